"""What lr="auto" is worth, with nothing tuned: problems on which it must not diverge, and tuned baselines beside it.

    python benchmarks/auto.py hold              every problem, five seeds, one setting: none may diverge      11 minutes
    python benchmarks/auto.py autoencoder       40 s of training each, against Adam, BN+Adam, SGD+Nesterov    11 minutes
    python benchmarks/auto.py paper             seconds to a training loss of 0.05, against BN+Adam            5 minutes
    python benchmarks/auto.py deep              30 layers: steps to 95 % accuracy, against SGD with momentum   5 minutes
    python benchmarks/auto.py general           training and validation loss, and what helps the latter        5 minutes
    python benchmarks/auto.py figure            figures/auto.png and figures/generalisation.png, all tables

Each writes auto-NAME.csv into --out and prints a table in Markdown. What the file holds is not run again: delete it to
begin anew. Minutes are those of free cores, two where seconds are compared, else one. Seconds are of training alone;
where they are compared, the methods take turns, so that whatever else the machine does befalls all of them alike. If it
does much, set OMP_WAIT_POLICY=PASSIVE: two threads that wait for each other by spinning can take twenty times as long.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from auto_figures import draw_auto, draw_general
from auto_problems import CODER, DEEP_MLPS, PROBLEMS, VARIANTS, Run, paper
from auto_results import LONG, LOSS_AIM, OURS, RIGHT_AIM, Row, Runs, read, tables, toil, write

CODER_RATES = {
    "adam": ["3e-4", "1e-3", "2e-3", "4e-3", "8e-3"],
    "bn-adam": ["3e-4", "1e-3", "2e-3", "4e-3", "8e-3"],
    "nesterov": ["1e-3", "3e-3", "1e-2", "3e-2"],
}
PAPER_RATES = ["1e-3", "2e-3", "4e-3", "8e-3"]
DEEP_RATES = ["1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "0.1", "0.3", "1"]
KEPT = 2  # learning rates a method that go on after the screening
LONG_RATE = 2e-3  # of BN+Adam's long run, falling linearly to 0
GENERAL = [
    (OURS, "auto"),
    *((f"{OURS}, {variant}", "auto") for variant in VARIANTS),
    ("adam", "1e-3"),
    ("sgd", "0.1"),
]
AVERAGED = f"{OURS}, averaged weights"


def show(options: argparse.Namespace, *names: str) -> None:
    titles = {name: problem.title for name, problem in PROBLEMS.items()}
    print(*tables(options.out, titles, *names), sep="\n")


def say(run: Run, text: str = "") -> None:
    (problem, method, lr, batch, seed), row = run.key, run.rows[-1]
    end = f"loss {row.train_loss:.4g}" if run.alive else "diverged"
    where = f"{problem:<18}{method:<30} lr {lr:<5} batch {batch:<6}seed {seed}"
    print(f"{where}: {end} at step {run.step} ({run.seconds:.1f} s){text}", flush=True)


def warm() -> None:
    """Not timed: the first steps of a process are slow."""
    Run("warm", CODER, "adam", "1e-3", 0).until(steps=5)
    Run("warm", paper(100, 0), OURS, "auto", 0).until(steps=20)


# hold -----------------------------------------------------------------------------------------------------------------


def hold(options: argparse.Namespace) -> None:
    runs = read(options.out, "hold")
    for seed in options.seeds:
        for name in options.only or PROBLEMS:
            problem = replace(PROBLEMS[name], steps=4) if options.quick else PROBLEMS[name]
            if (name, OURS, "auto", problem.batch, seed) not in runs:
                run = Run(name, problem, OURS, "auto", seed)
                for quarter in range(5):
                    run.until(steps=quarter * problem.steps // 4).record(validate=quarter == 4 or not run.alive)
                finish(run, runs, options, "hold")
    show(options, "hold")


def finish(run: Run, runs: Runs, options: argparse.Namespace, name: str) -> None:
    runs[run.key] = run.rows
    write(options.out, name, runs)
    say(run)


# autoencoder ----------------------------------------------------------------------------------------------------------


def autoencoder(options: argparse.Namespace) -> None:
    warm()
    runs = read(options.out, "autoencoder")
    for seed in options.seeds:
        if not any(key[0] == "autoencoder" and key[-1] == seed for key in runs):
            runs |= {run.key: run.rows for run in race_autoencoders(options, seed)}
            write(options.out, "autoencoder", runs)
    if options.long and not any(key[0] == LONG for key in runs):
        for run in long_runs(options.long):
            finish(run, runs, options, "autoencoder")
    show(options, "autoencoder")


def race_autoencoders(options: argparse.Namespace, seed: int) -> list[Run]:
    """All take turns up to the screening, the best of each method to the end and on to as many steps as ours made."""
    entries = [(OURS, "auto", 250), (OURS, "auto", 500)]
    entries += [(method, lr, 500) for method, rates in CODER_RATES.items() for lr in rates]
    problem = replace(CODER, evaluate=200) if options.quick else CODER
    everyone = [Run("autoencoder", problem, method, lr, seed, batch) for method, lr, batch in entries]
    take_turns(everyone, 0.0, options.screen, options.turn)
    going = [run for method in (OURS, *CODER_RATES) for run in best_of(everyone, method)]
    print(f"going on: {', '.join(f'{run.key[1]} {run.key[2]}' for run in going)}", flush=True)
    take_turns(going, options.screen, options.seconds, options.turn)
    most = max(run.step for run in going if run.key[1] == OURS)
    for run in going:
        if options.equal_steps and run.key[1] != OURS and run.step < most:
            run.until(steps=most).record()
            say(run, ", continued")
    return everyone


def take_turns(runs: list[Run], start: float, end: float, turn: float) -> None:
    """From second `start` to second `end` of every clock, so many seconds at a time."""
    if not start:
        for run in runs:
            run.record()
    while start < end:
        start = min(start + turn, end)
        for run in runs:
            if run.alive:
                run.until(seconds=start).record()
                say(run)


def best_of(runs: list[Run], method: str) -> list[Run]:
    own = [run for run in runs if run.key[1] == method and run.alive]
    return own if method == OURS else sorted(own, key=lambda run: run.rows[-1].train_loss)[:KEPT]


def long_runs(seconds: float) -> Iterator[Run]:
    """For L*: ours, and BN+Adam with a learning rate that falls to 0."""
    for method, lr in (("bn-adam", f"{LONG_RATE:g}"), (OURS, "auto")):
        run = Run(LONG, CODER, method, lr, 0, 500)
        for part in range(50):
            if method != OURS:
                run.optimizer.param_groups[0]["lr"] = LONG_RATE * (1 - part / 50)
            run.until(seconds=seconds * (part + 1) / 50).record()
        yield run


# paper ----------------------------------------------------------------------------------------------------------------


def paper_network(options: argparse.Namespace) -> None:
    warm()
    runs = read(options.out, "paper")
    entries = [(method, lr) for method, rates in ((OURS, ["auto"]), ("bn-adam", PAPER_RATES)) for lr in rates]
    for seed in options.seeds:
        racing = [Run("paper", paper(b, 0), method, lr, seed) for method, lr in entries for b in (100, 500, 1000)]
        racing = [run for run in racing if run.key not in runs]
        for run in racing:
            run.record()
        while going := [run for run in racing if on_its_way(run, options.limit)]:
            run = min(going, key=lambda run: run.seconds)  # whoever is behind is next
            run.until(steps=run.step + options.every).record()
        for run in racing:
            finish(run, runs, options, "paper")
    show(options, "paper")


def on_its_way(run: Run, limit: float) -> bool:
    return run.alive and run.rows[-1].train_loss > LOSS_AIM and run.seconds < limit


# deep -----------------------------------------------------------------------------------------------------------------


def deep(options: argparse.Namespace) -> None:
    """All learning rates on the first seed, on the others the best few of them."""
    runs = read(options.out, "deep")
    for name, problem in DEEP_MLPS.items():
        rates = DEEP_RATES
        for seed in options.seeds:
            for method, lr in [(OURS, "auto"), *(("sgd", lr) for lr in rates)]:
                if (name, method, lr, problem.batch, seed) not in runs:
                    finish(climb(Run(name, problem, method, lr, seed), options.most), runs, options, "deep")
            first = {lr: toil(runs[name, "sgd", lr, problem.batch, options.seeds[0]]) for lr in DEEP_RATES}
            rates = sorted(first, key=lambda lr: first[lr])[: options.kept]
    show(options, "deep")


def climb(run: Run, most: int) -> Run:
    """Until it has reached the aim, judged every ten steps."""
    run.record()
    while run.alive and run.step < most and run.rows[-1].accuracy < RIGHT_AIM:
        run.until(steps=run.step + 10).record()
    run.rows = thinned(run.rows)
    return run


def thinned(rows: list[Row]) -> list[Row]:
    """Every row of the first steps, then every fifth, and the last."""
    return [row for row in rows if row.step < 200 or row.step % 50 == 0 or row is rows[-1]]


# general --------------------------------------------------------------------------------------------------------------


def general(options: argparse.Namespace) -> None:
    runs = read(options.out, "general")
    problem = replace(paper(100, 20 if options.quick else 600), evaluate=60_000)  # steps: an epoch's
    for seed in options.seeds:
        for method, lr in GENERAL:
            if ("general", method, lr, problem.batch, seed) not in runs:
                run = Run("general", problem, method, lr, seed, averaged=method == OURS)
                averages = []
                for epoch in range(options.epochs + 1):
                    run.until(steps=epoch * problem.steps).record(validate=True)
                    averages += [run.record_average(AVERAGED)] if run.average else []
                runs[run.key] = run.rows
                if averages:
                    runs["general", AVERAGED, lr, problem.batch, seed] = averages
                finish(run, runs, options, "general")
    show(options, "general")


# The command line -----------------------------------------------------------------------------------------------------


def figure(options: argparse.Namespace) -> None:
    show(options)
    titles = {name: problem.title for name, problem in DEEP_MLPS.items()}
    runs = {name: read(options.out, name) for name in ("autoencoder", "paper", "deep", "general")}
    print(*draw_auto(options.out, runs, titles), *draw_general(options.out, runs["general"]), sep="\n")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


# By command: what it calls, its options (name, default, default of --quick, help).
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], list[tuple[str, Any, Any, str]]]] = {
    "hold": (hold, [("seeds", [0, 1, 2, 3, 4], [0], "such as 0,1,2")]),
    "autoencoder": (autoencoder, [
        ("seeds", [0], [0], "such as 0,1,2"),
        ("seconds", 40.0, 1.0, "of training each"),
        ("screen", 10.0, 0.4, f"seconds after which only the best {KEPT} learning rates of a method go on"),
        ("turn", 2.0, 0.2, "seconds of training before it is another's turn"),
        ("long", 120.0, 0.5, "seconds of each of the two long runs for L*; 0: none"),
    ]),
    "paper": (paper_network, [
        ("seeds", [0, 1, 2], [0], "such as 0,1,2"),
        ("limit", 20.0, 0.5, "seconds of training, at most"),
        ("every", 25, 10, "steps between two evaluations"),
    ]),
    "deep": (deep, [
        ("seeds", [0, 1, 2], [0, 1], "such as 0,1,2"),
        ("most", 2000, 20, "steps, at most"),
        ("kept", 4, 2, "learning rates, the best on the first seed, that are run on the others"),
    ]),
    "general": (general, [("seeds", [0, 1, 2], [0], "such as 0,1,2"), ("epochs", 5, 2, "of 600 steps")]),
    "figure": (figure, []),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, (call, own) in COMMANDS.items():
        command = commands.add_parser(name)
        command.set_defaults(call=call, own=own)
        command.add_argument("--threads", type=int, default=2 if name in ("autoencoder", "paper") else 1)
        command.add_argument("--out", type=Path, help="folder of the CSV; docs, or with --quick a temporary one")
        command.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; says nothing")
        for option, default, _, text in own:
            kind = numbers if option == "seeds" else type(default)
            command.add_argument(f"--{option}", type=kind, help=f"{text} (default {default})")
        if name == "hold":
            command.add_argument("--only", nargs="+", choices=PROBLEMS, metavar="NAME", help=", ".join(PROBLEMS))
        if name == "autoencoder":
            command.add_argument("--equal-steps", action=argparse.BooleanOptionalAction, default=True)
    options = complete(parser.parse_args())
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    options.call(options)


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """Defaults, which --quick changes."""
    for name, default, quick, _ in options.own:
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else default)
    options.out = options.out or Path(tempfile.mkdtemp(prefix="auto-") if options.quick else "docs")
    return options


if __name__ == "__main__":
    main()
