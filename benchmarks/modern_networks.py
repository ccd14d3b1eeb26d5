"""How many steps do BPRONG and its peers need on the networks people train now, and how well do they generalise?

Every method has eight quasi-random trials on seed 0 over a space that `harness/methods.py` declares: learning rate,
schedule, warm-up, weight decay, averaged weights and the method's own constants. The best trial is rerun on five fresh
seeds. All methods of a seed have the same initial weights and the same batches. A run that ends with a loss that is not
finite, or above the untrained network's, has diverged and counts as infinity.

    gpt         a character-level GPT: steps to the validation loss that the best AdamW reaches in 800 steps
    gpt-other   the same with a smaller network and another text, in 400 steps
    vit, conv   a vision transformer and a convolutional network on digits: steps to AdamW's final training loss
    paper       the paper's network, and with Batch Normalisation: validation loss after three epochs
    paper-train the network with Batch Normalisation: training loss after three epochs, Adam at its best constant rate

In races to a target every horizon is a run of its own, with its own schedule. A method is tuned at one horizon; with
the best trial's settings the shortest horizon is sought whose median over the fresh seeds reaches the target.

    python benchmarks/modern_networks.py                         runs what docs/modern.csv lacks; tables in Markdown
    python benchmarks/modern_networks.py --only gpt --methods muon,soap
    python benchmarks/modern_networks.py --draw                  runs nothing; tables in Markdown
    python benchmarks/modern_networks.py --rates --methods adamw,muon,spectral
                                                                 ends at rates from a tenth to ten times the best one
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from harness.command_line import CommandLine
from harness.methods import METHODS
from harness.races import FACTORS, SELECTION_SEED, Races, Records, Row, Study
from problems.modern import MODERN

from bprong.experiments.bench.rows import read
from bprong.experiments.bench.search import written
from bprong.experiments.bench.tables import markdown

PEERS = ["adamw", "muon", "soap"]
OURS = ["spectral", "spectral-damped", "auto", "auto-decayed", "auto-spectral", "bprong"]
RATE_FREE = ["prodigy", "schedule-free"]
RACERS = [*PEERS, *OURS]
EVERYBODY = [*PEERS, *RATE_FREE, *OURS]
STUDIES = {
    "gpt": Study(
        "GPT, Python's sources", "val_loss", 800, EVERYBODY, MODERN["gpt"], "adamw",
        {"muon": 320, "spectral": 250, "spectral-damped": 250, "auto-spectral": 250},
    ),
    "gpt-other": Study("smaller GPT, C++ headers", "val_loss", 400, EVERYBODY, MODERN["gpt-other"], "adamw"),
    "vit": Study("vision transformer, digits", "train_loss", 200, RACERS, MODERN["vit"], "adamw"),
    "conv": Study("convolutional network, digits", "train_loss", 300, RACERS, MODERN["conv"], "adamw"),
    "paper": Study("paper's network, MNIST", "val_loss", 1800, RACERS, MODERN["paper"]),
    "paper-bn": Study("the same with Batch Normalisation", "val_loss", 1800, RACERS, MODERN["paper-bn"]),
    "paper-train": Study(
        "BN network, training loss", "train_loss", 1800, ["adam-constant", "auto", "auto-spectral"], MODERN["paper-bn"]
    ),
}  # fmt: skip


# Tables ---------------------------------------------------------------------------------------------------------------


def span(values: Sequence[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def outcome(records: Records, method: str) -> list[object]:
    """A line of the table: trials, best settings, and what the fresh seeds gave at the horizons that decide."""
    study = records.study
    title = METHODS[method].title
    settings = records.best(method)
    if settings is None:
        reason = METHODS[method].missing or f"{len(records.tried(method))} trials so far"
        return [title, "–", "–", "–", f"not run: {reason}"]
    shortest = records.shortest(method)
    steps = [h for h in study.horizons if records.fresh(method, h)]
    spans = [f"{h}: {span([records.value(row) for row in records.fresh(method, h)])}" for h in steps]
    needed = "–"
    if study.reference and steps:
        needed = f"more than {max(steps)}" if shortest is None else str(shortest)
    crossing = records.between(method)
    if not math.isnan(crossing):
        needed += f" ({crossing:.0f})"
    ratio = f"{shortest / study.steps:.2f}" if shortest and study.reference else "–"
    return [title, f"`{written(settings) or 'nothing to tune'}`", needed, ratio, "; ".join(spans)]


def table(records: Records) -> str:
    study = records.study
    name = study.measure.replace("_", " ").replace("val", "validation").replace("train", "training")
    titles = ["method", "best of its trials", "steps to target (interpolated)", "AdamW = 1", f"{name}, fresh seeds"]
    head = f"### {study.title}\n"
    if not math.isnan(records.target):
        reference = METHODS[study.reference].title
        head += f"\nTarget: {name} {records.target:.4g}, {reference}'s after {study.steps} steps.\n"
    return "\n".join([head, markdown(titles, [outcome(records, method) for method in study.methods])])


def tuning(records: Records) -> str:
    """All trials, so that a reader sees whether the best one is at an edge."""
    lines = [
        [METHODS[method].title, records.study.horizon(method), f"`{row.settings}`", f"{records.value(row):.4f}"]
        for method in records.study.methods
        for _, row in records.tried(method)
    ]
    return markdown(["method", "steps", "trial", records.study.measure], lines)


def rates_table(every: Sequence[Records]) -> str:
    """What the rates around the best one gave, and how many of them diverged."""
    lines = []
    for records in every:
        for method in records.study.methods:
            steps = records.study.horizon(method)
            rows = [records.find(method, settings, steps, SELECTION_SEED) for _, settings in records.rates(method)]
            ends = [records.value(row) for row in rows if row is not None]
            if len(ends) == len(FACTORS):
                shown = ["diverged" if math.isinf(end) else f"{end:.3g}" for end in ends]
                lines.append([records.name, METHODS[method].title, *shown, sum(map(math.isinf, ends))])
    return markdown(["study", "method", *(f"{factor:.2g}" for factor in FACTORS), "diverged"], lines)


# The command line -----------------------------------------------------------------------------------------------------


def small(study: Study) -> Study:
    return replace(study, steps=4, tuned_at={})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True, draw=True)
    parser.add_argument("--rates", action="store_true", help="two decades of rates around the best trial; no races")
    parser.add_argument("--tuning", action="store_true", help="also print all trials")
    parser.setting("only", ",".join(STUDIES), "gpt,vit", "studies")
    parser.setting("methods", ",".join(METHODS), "adamw,muon,soap,spectral,auto", "methods to run")
    parser.setting("seeds", [1, 2, 3, 4, 5], [1], "fresh seeds")
    parser.setting("trials", 8, 2, "trials of every method")
    options = parser.parse(arguments)
    path = options.out / "modern.csv"
    studies = {name: small(study) if options.quick else study for name, study in STUDIES.items()}
    chosen = [(name, studies[name]) for name in options.only.split(",")]
    if not options.draw:
        run_all(chosen, path, options)
    every = [Records(name, study, read(path, Row), options.trials, options.seeds) for name, study in chosen]
    if options.rates:
        print(rates_table(every))
        return
    for records in every:
        print(table(records), end="\n\n")
        if options.tuning:
            print(tuning(records), end="\n\n")


def run_all(chosen: Sequence[tuple[str, Study]], path: Path, options: argparse.Namespace) -> None:
    for name, study in chosen:
        for method in [each for each in study.methods if each in options.methods.split(",")]:
            if METHODS[method].missing:
                print(f"{name} {method}: not run, {METHODS[method].missing}", flush=True)
            else:
                races = Races(name, study, path, options.trials, options.seeds)
                (races.sweep if options.rates else races.compete)(method)


if __name__ == "__main__":
    main()
