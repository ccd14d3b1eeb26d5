"""The command line: `bprong reproduce`, `bprong bench` and `bprong audit`."""

from __future__ import annotations

import argparse
import errno
import io
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import bprong
from bprong.experiments.extras import install_command

try:
    from bprong.experiments.auditing import run_audit
    from bprong.experiments.bench.command import Options, bench, recompute_targets
    from bprong.experiments.bench.methods import METHODS as BENCH_METHODS
    from bprong.experiments.bench.plan import Plan, names_in, parse_duration
    from bprong.experiments.bench.workloads import WORKLOADS
    from bprong.experiments.methods import METHODS, Fisher, Solver
    from bprong.experiments.models import ACTIVATIONS
    from bprong.experiments.reproduce import reproduce
    from bprong.experiments.training import Config
    from bprong.experiments.workers import available_cores
except ModuleNotFoundError as missing:  # the library itself works without them
    if sys.argv[1:] == ["--version"]:
        print(f"bprong {bprong.__version__}")
        raise SystemExit(0) from None
    raise SystemExit(
        f"bprong: {missing.name} is not installed; the commands require {install_command('experiments')}"
    ) from missing

DATA = "auto|mnist|digits|DIR"
Formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print ? on a terminal without Greek letters, instead of failing
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        options.run(options)
    except ValueError as error:
        print(f"bprong {options.command}: {error}", file=sys.stderr)
        return 2  # as argparse does for a wrong value
    except OSError as error:
        print(f"bprong {options.command}: {error}; {_what_to_do(options, error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"\nbprong {options.command}: interrupted; {_what_to_do(options, error)}", file=sys.stderr)
        return 130  # as a shell reports Ctrl-C
    return 0


def _what_to_do(options: argparse.Namespace, error: BaseException) -> str:
    """What to do after an error of the system or an interrupt."""
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return "choose a folder that can be written to, with --out"
    return "finished work is saved, --resume continues" if "resume" in options else "run it again"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bprong",
        description="Natural-gradient training by bidirectional whitening: rerun the paper's\n"
        "experiment, race against other optimizers, or measure how close the Fisher\n"
        "matrix is to the identity.",
        epilog="To train a network of your own, use the Python package: import bprong",
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"bprong {bprong.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command")
    _add_reproduce(commands)
    _add_bench(commands)
    _add_audit(commands)
    return parser


def _add_reproduce(commands: Any) -> None:
    command = commands.add_parser(
        "reproduce",
        help="rerun the paper's experiment: figures, tables and a verdict on its claims",
        description="Train the paper's 784-100-100-100-10 network with each method, from the same\n"
        "weights and on the same batches. Write results.csv, run.json, four figures and\n"
        "report.html to the output folder.",
        epilog="\n  ".join(["methods:", *(f"{name:<13} {method.summary}" for name, method in METHODS.items())]),
        formatter_class=Formatter,
    )
    command.set_defaults(run=_reproduce)
    _add_options(command, _REPRODUCE_OPTIONS)
    whitening = command.add_argument_group(
        "whitening",
        "Hyperparameters of the paper's whitened networks, prong and bprong; each has\n"
        "its own defaults. They do not apply to bprong-fast and bprong-auto, which use\n"
        "the defaults of the optimizer, nor to the recipes.",
    )
    _add_options(whitening, _WHITENING_OPTIONS)


def _add_bench(commands: Any) -> None:
    workloads = (f"{name:<22} {workload.title}" for name, workload in WORKLOADS.items())
    methods = (f"{name:<22} {method.title}" for name, method in BENCH_METHODS.items())
    command = commands.add_parser(
        "bench",
        help="race against AdamW, SOAP, Muon, K-FAC, Prodigy and others to targets fixed beforehand",
        description="Tune every method with the same number of trials, rerun the best one on fresh\n"
        "seeds, and measure steps and seconds to a training and a validation target.\n"
        "Write bench.csv, figures, benchmark.md and report.html to the output folder.\n"
        "Packages of other people are used if they are installed (the extra `bench`).\n"
        "Every finished run is kept: --resume continues.",
        epilog="\n  ".join(["workloads:", *workloads]) + "\n\n" + "\n  ".join(["methods:", *methods]),
        formatter_class=Formatter,
    )
    command.set_defaults(run=_bench)
    _add_options(command, _BENCH_OPTIONS)


def _add_audit(commands: Any) -> None:
    command = commands.add_parser(
        "audit",
        help="measure how close the Fisher matrix is to the identity",
        description="Compute the Fisher matrix of one function in plain, whitened and\n"
        "bidirectionally whitened coordinates: exact, in Kronecker form and\n"
        "block-diagonal. Print tables, and write audit.json and figures to the output\n"
        "folder.",
        formatter_class=Formatter,
    )
    command.set_defaults(run=_audit)
    _add_options(command, _AUDIT_OPTIONS)


def _add_options(parser: Any, options: dict[str, dict[str, Any]]) -> None:
    """Add options to a parser or group; the help of an option that has a default ends with it."""
    for name, settings in options.items():
        default = " (default: %(default)s)" if "default" in settings else ""
        parser.add_argument(f"--{name.replace('_', '-')}", **settings | {"help": settings["help"] + default})


def _reproduce(options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in _WHITENING_OPTIONS if getattr(options, name) is not None}
    config = Config(
        options.methods, options.epochs, options.seeds, options.activation,
        lr=options.lr, batch=options.batch, whitening=given,
    )  # fmt: skip
    reproduce(
        config, options.data, options.out, options.resume, options.jobs, options.threads, options.look_in,
        options.nproc,
    )  # fmt: skip


def _bench(options: argparse.Namespace) -> None:
    workloads = names_in(options.workloads, list(WORKLOADS), "workload")
    if options.find_targets:
        recompute_targets(workloads)
        return
    plan = Plan(workloads, names_in(options.methods, list(BENCH_METHODS), "method"), options.trials, options.seeds)
    budget = None if options.budget is None else parse_duration(options.budget)
    bench(Options(plan, options.out, budget, options.jobs, options.resume, options.draw, options.publish))


def _audit(options: argparse.Namespace) -> None:
    run_audit(
        options.checkpoint, options.data, options.examples, options.forward_damping, options.backward_damping,
        options.out,
    )  # fmt: skip


def _number(kind: type, allowed: Callable[[Any], bool], required: str) -> Callable[[str], Any]:
    """A parser of numbers for argparse, which accepts finite numbers that are allowed."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not (allowed(value) and value < float("inf")):
            raise argparse.ArgumentTypeError(f"{text!r} is not {required}")
        return value

    return parse


def _count(least: int) -> Callable[[str], Any]:
    return _number(int, lambda value: value >= least, f"an integer of at least {least}")


_positive = _number(float, lambda value: value > 0, "a number greater than 0")
_not_negative = _number(float, lambda value: value >= 0, "a number of at least 0")
_fraction = _number(float, lambda value: 0 <= value < 1, "a number of at least 0 and less than 1")


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [repr(name) for name in names if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"unknown method {', '.join(unknown)}; choose from {', '.join(METHODS)}")
    return names


_DEFAULT = Config()
_JOBS = {
    "type": _count(1), "default": available_cores(), "metavar": "N",
    "help": "number of processes, each with one network at a time; the losses do not depend on it. The default is the "
            "number of cores that this process may use",
}  # fmt: skip
_REPRODUCE_OPTIONS: dict[str, dict[str, Any]] = {
    "data": {
        "default": "auto", "metavar": DATA,
        "help": "auto: MNIST if it is cached or can be downloaded, otherwise scikit-learn's 8×8 digits; mnist: MNIST "
                "or an error; DIR: a folder with four IDX files, or with one .npz file of x_train, y_train, x_test, "
                "y_test",
    },
    "look_in": {"type": Path, "metavar": "DIR", "help": "folder to search for MNIST first"},
    "activation": {"choices": ACTIVATIONS, "default": _DEFAULT.activation, "help": "activation function"},
    "methods": {
        "type": _methods, "default": ",".join(_DEFAULT.methods), "metavar": "M,M,…",
        "help": "methods to compare, see the list below",
    },
    "epochs": {"type": _count(1), "default": _DEFAULT.epochs, "metavar": "N", "help": "number of epochs"},
    "seeds": {"type": _count(1), "default": _DEFAULT.seeds, "metavar": "N", "help": "number of seeds, from seed 0"},
    "lr": {
        "type": _positive, "default": _DEFAULT.lr, "metavar": "LR",
        "help": "learning rate of all methods except bprong-auto and the recipes",
    },
    "batch": {"type": _count(1), "default": _DEFAULT.batch, "metavar": "N", "help": "examples per minibatch"},
    "out": {"type": Path, "default": Path("results/reproduce"), "metavar": "DIR", "help": "output folder"},
    "resume": {
        "action": "store_true",
        "help": "continue the run in the output folder, if there is one; the schedule of a recipe covers the whole "
                "run, so a run with recipes keeps its number of epochs",
    },
    "jobs": _JOBS,
    "threads": {
        "type": _count(1), "default": 1, "metavar": "N",
        "help": "CPU threads of each process; more make these small networks slower, and the losses change in their "
                "last digits",
    },
    "nproc": {
        "type": _count(1), "default": 1, "metavar": "N",
        "help": "instead of --jobs: train one network at a time in so many processes, which take equal parts of each "
                "minibatch; batch normalisation then uses the statistics of these parts",
    },
}  # fmt: skip
_WHITENING_OPTIONS: dict[str, dict[str, Any]] = {
    "forward_every": {"type": _count(1), "metavar": "STEPS", "help": "τ₁, updates between refreshes of U and c"},
    "forward_offset": {"type": _count(0), "metavar": "STEPS", "help": "c₁, offset of these refreshes"},
    "backward_every": {"type": _count(1), "metavar": "STEPS", "help": "τ₂, updates between refreshes of R"},
    "backward_offset": {"type": _count(0), "metavar": "STEPS", "help": "c₂, offset of these refreshes"},
    "forward_damping": {"type": _not_negative, "metavar": "ε", "help": "ε₁, added to the covariance Ž of the inputs"},
    "backward_damping": {
        "type": _not_negative, "metavar": "ε", "help": "ε₂, added to the second moment D of the errors",
    },
    "statistics": {
        "type": _count(0), "metavar": "N",
        "help": "training examples to measure the moments on; 0: the current minibatch",
    },
    "average": {
        "type": _fraction, "metavar": "ρ",
        "help": "weight of the earlier measurements in the running average of the moments; 0: no average",
    },
    "fisher": {
        "choices": get_args(Fisher),
        "help": "labels behind D: sampled from the model, all classes (exact), or the data's (empirical)",
    },
    "solver": {"choices": get_args(Solver), "help": "how U and R are computed; eigh is the paper's"},
}  # fmt: skip
_PLAN = Plan(tuple(WORKLOADS), tuple(BENCH_METHODS))
_BENCH_OPTIONS: dict[str, dict[str, Any]] = {
    "workloads": {"default": ",".join(WORKLOADS), "metavar": "W,W,…", "help": "workloads to train"},
    "methods": {"default": ",".join(BENCH_METHODS), "metavar": "M,M,…", "help": "methods to compare"},
    "budget": {
        "metavar": "TIME",
        "help": "such as 10m or 2h: fewer trials and seeds, so that the run takes about this long, and no new run is "
                "begun after it; says what was cut",
    },
    "trials": {"type": _count(1), "default": _PLAN.trials, "metavar": "N", "help": "trials of each tuned method"},
    "seeds": {"type": _count(1), "default": _PLAN.seeds, "metavar": "N", "help": "fresh seeds of each method"},
    "jobs": _JOBS,
    "out": {"type": Path, "default": Path("results/bench"), "metavar": "DIR", "help": "output folder"},
    "resume": {"action": "store_true", "help": "continue the benchmark in the output folder, if there is one"},
    "draw": {"action": "store_true", "help": "run nothing; write tables, figures and page of what the folder has"},
    "publish": {
        "type": Path, "metavar": "DIR", "help": "write benchmark.md, bench.csv and figures to this folder, too",
    },
    "find_targets": {
        "action": "store_true", "help": "compute the targets of the workloads again, print them, and run nothing else",
    },
}  # fmt: skip
_AUDIT_OPTIONS: dict[str, dict[str, Any]] = {
    "checkpoint": {
        "type": Path, "metavar": "FILE",
        "help": "checkpoint of a `reproduce` run, OUT/checkpoints/METHOD-SEED.pt (default: a small network, trained "
                "on 8×8 digits)",
    },
    "data": {"default": "auto", "metavar": DATA, "help": "with --checkpoint: the data that it was trained on"},
    "examples": {"type": _count(2), "default": 500, "metavar": "N", "help": "number of examples to average over"},
    "forward_damping": {**_WHITENING_OPTIONS["forward_damping"], "default": 0.01},
    "backward_damping": {**_WHITENING_OPTIONS["backward_damping"], "default": 0.001},
    "out": {"type": Path, "default": Path("results/audit"), "metavar": "DIR", "help": "output folder"},
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
