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

    python benchmarks/modern_networks.py                         runs what docs/modern.csv lacks, then draws
    python benchmarks/modern_networks.py --only gpt --methods muon,soap
    python benchmarks/modern_networks.py --draw                  docs/figures/modern.png, and tables in Markdown
    python benchmarks/modern_networks.py --rates --methods adamw,muon,spectral
                                                                 ends at rates from a tenth to ten times the best one
    python benchmarks/modern_networks.py --price                 milliseconds of a step, methods taking turns
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from harness import figures
from harness.command_line import CommandLine
from harness.methods import METHODS
from harness.races import FACTORS, SELECTION_SEED, Races, Records, Row, Study
from harness.recipes import Training
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from problems.modern import MODERN

from bprong.experiments.bench.rows import Log, read
from bprong.experiments.bench.search import written
from bprong.experiments.bench.tables import markdown, median_and_range
from bprong.experiments.bench.timing import interleaved

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


@dataclass(frozen=True)
class Price:
    """Milliseconds of a step in one round."""

    method: str
    settings: str
    round: int
    milliseconds: float


# Tables and the figure ------------------------------------------------------------------------------------------------


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


LOOKS = {
    "adamw": figures.Style(figures.OCHRE, figures.DASHED, "v"),
    "muon": figures.Style(figures.GREEN, figures.DASH_DOT, "P"),
    "soap": figures.Style(figures.PURPLE, figures.DOTTED, "D"),
    "prodigy": figures.Style(figures.INK, figures.DOTTED, "x"),
    "schedule-free": figures.Style(figures.INK, figures.LONG, "+"),
    "spectral": figures.Style(figures.VERMILION, figures.SOLID, "o"),
    "spectral-damped": figures.Style(figures.VERMILION, figures.DOTTED, ">"),
    "auto-spectral": figures.Style(figures.BLUE, figures.SOLID, "s"),
    "auto": figures.Style(figures.BLUE, figures.DASHED, "^"),
    "auto-decayed": figures.Style(figures.BLUE, figures.LONG, "h"),
    "bprong": figures.Style(figures.VIOLET, figures.DASHED, "<"),
}


def draw(every: Sequence[Records], path: Path) -> None:
    """For every race to a target: the loss at the end of a run against its number of steps."""
    raced = [records for records in every if not math.isnan(records.target)]
    if not raced:
        return
    columns = min(2, len(raced))
    rows = math.ceil(len(raced) / columns)
    with figures.drawing(path, rows, columns, 1.2 + 3.1 * rows) as (chart, grid):
        for axes, records in zip(grid, raced, strict=False):
            study = records.study
            for method in study.methods:
                draw_ends(axes, records, method)
            figures.target_line(axes, records.target, f"AdamW after {study.steps} steps", above=True)
            name = "validation" if study.measure == "val_loss" else "training"
            figures.frame(axes, study.title, "steps of the run", f"{name} loss at its end, nats")
            scale(axes, study.measure)
        for axes in grid[len(raced) :]:
            axes.set_visible(False)
        used = [method for method in LOOKS if any(points(records, method) for records in raced)]
        handles = [figures.entry(LOOKS[method], METHODS[method].title) for method in used]
        signs = [figures.explain("band", "least to greatest of the fresh seeds (line: median)")]
        signs.append(figures.explain("faint", f"seed {SELECTION_SEED}, on which the trials were"))
        figures.legend(chart, [*handles, *signs], columns=2)


def scale(axes: Axes, measure: str) -> None:
    """Steps on a logarithmic axis with round numbers; training losses, which span decades, on one as well."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [steps for steps in (50, 70, 100, 140, 200, 280, 400, 560, 800) if low <= steps <= high]
    axes.set_xticks(ticks, [str(steps) for steps in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if measure == "train_loss":
        least, most = axes.dataLim.intervaly
        figures.log_axis(axes, "y", most / least)


def points(records: Records, method: str) -> list[int]:
    """The horizons with finite losses on all fresh seeds."""
    runs = {h: records.fresh(method, h) for h in records.study.horizons}
    return [h for h, rows in runs.items() if rows and all(math.isfinite(records.value(row)) for row in rows)]


def draw_ends(axes: Axes, records: Records, method: str) -> None:
    """The medians over fresh seeds, and as a faint line the runs on the seed of the trials."""
    steps = points(records, method)
    by_seed = [*zip(*([records.value(row) for row in records.fresh(method, h)] for h in steps), strict=True)]
    if not steps:
        return
    figures.band(axes, steps, by_seed, LOOKS[method])
    ends = [min(by_seed), max(by_seed)] if len(steps) == 1 else []
    axes.plot(steps * len(ends), [end for (end,) in ends], color=LOOKS[method].colour, linewidth=1)
    alone = selection(records, method)
    figures.competitor(axes, list(alone), list(alone.values()), LOOKS[method], None)


def selection(records: Records, method: str) -> dict[int, float]:
    """By horizon, the finite ends of runs with the best trial's settings on the seed of the trials."""
    settings = records.best(method)
    assert settings is not None
    found = {h: records.find(method, settings, h, SELECTION_SEED) for h in records.study.horizons}
    values = {h: records.value(row) for h, row in found.items() if row is not None}
    return {h: value for h, value in values.items() if math.isfinite(value)}


# The price of a step --------------------------------------------------------------------------------------------------


def price(log: Log[Price], records: Records, options: argparse.Namespace) -> None:
    """Milliseconds of a step, methods taking turns in one process, each with its best settings or its first trial.

    A turn is twenty steps, so that what a method does every ten steps is in it.
    """
    runs = {}
    for method in [name for name in records.study.methods if not METHODS[name].missing]:
        settings = records.best(method) or records.trials(method)[0]
        problem = records.study.problem
        runs[method] = Training(problem, METHODS[method], settings, 10**6, SELECTION_SEED), written(settings)
    turn = 2 if options.quick else 20

    def steps(training: Training) -> None:
        for _ in range(turn):
            training.step()

    calls = {method: (lambda training=training: steps(training)) for method, (training, _) in runs.items()}
    interleaved(calls, 1)  # what happens only at the beginning
    for method, seconds in interleaved(calls, options.rounds).items():
        log.add(Price(method, runs[method][1], i, 1000 * each / turn) for i, each in enumerate(seconds))


def price_table(rows: Sequence[Price]) -> str:
    spent = {method: [row.milliseconds for row in rows if row.method == method] for method in METHODS}
    base = spent["adamw"]
    ratios = {m: [a / b for a, b in zip(own, base, strict=False)] for m, own in spent.items() if own}
    lines = [[METHODS[m].title, f"{median(spent[m]):.1f}", median_and_range(each)] for m, each in ratios.items()]
    return markdown(["method", "milliseconds a step", "AdamW = 1, by round"], lines)


# The command line -----------------------------------------------------------------------------------------------------


def small(study: Study) -> Study:
    return replace(study, steps=4, tuned_at={})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True, draw=True)
    parser.add_argument("--price", action="store_true", help="time the steps of all methods on the GPT; no races")
    parser.add_argument("--rates", action="store_true", help="two decades of rates around the best trial; no races")
    parser.add_argument("--tuning", action="store_true", help="also print all trials")
    parser.setting("only", ",".join(STUDIES), "gpt,vit", "studies")
    parser.setting("methods", ",".join(METHODS), "adamw,muon,soap,spectral,auto", "methods to run")
    parser.setting("seeds", [1, 2, 3, 4, 5], [1], "fresh seeds")
    parser.setting("trials", 8, 2, "trials of every method")
    parser.setting("rounds", 9, 2, "rounds of --price")
    options = parser.parse(arguments)
    path = options.out / "modern.csv"
    studies = {name: small(study) if options.quick else study for name, study in STUDIES.items()}
    if options.price:
        prices = Log(options.out / "modern-price.csv", Price)
        prices.rows.clear()
        price(prices, Records("gpt", studies["gpt"], read(path, Row), options.trials, options.seeds), options)
        print(price_table(prices.rows))
        return
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
    draw(every, options.out / "figures" / "modern.png")


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
