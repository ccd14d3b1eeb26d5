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
    python benchmarks/modern_networks.py --price                 milliseconds of a step, methods taking turns
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from harness import figures
from harness.command_line import CommandLine
from harness.methods import METHODS
from harness.recipes import Training
from harness.rows import Log
from harness.search import Settings, trials, written
from harness.tables import markdown, median_and_range
from harness.timing import interleaved
from problems.modern import MODERN

SELECTION_SEED = 0
HORIZONS = [40, 45, 50, 56, 63, 71, 80, 90, 100, 112, 125, 140, 160, 180, 200, 225, 250, 280, 320, 360, 400, 450, 500,
            560, 640, 720, 800]  # fmt: skip
PEERS = ["adamw", "muon", "soap"]
OURS = ["spectral", "auto", "auto-decayed", "auto-spectral", "bprong"]
RATE_FREE = ["prodigy", "schedule-free"]


@dataclass(frozen=True)
class Row:
    """The end of one run. `settings` as `harness.search.written` gives them."""

    study: str
    method: str
    settings: str
    steps: int
    seed: int
    train_loss: float
    val_loss: float
    accuracy: float


@dataclass(frozen=True)
class Price:
    """Milliseconds of a step in one round."""

    method: str
    settings: str
    round: int
    milliseconds: float


@dataclass(frozen=True)
class Study:
    """A problem, what is compared, and over how many steps.

    measure:   the column that decides
    steps:     the reference's horizon, which is everybody's if there is no race to a target
    methods:   in the order in which they are run
    reference: the method whose median over fresh seeds is the target; empty if nobody races to one
    tuned_at:  the horizon at which a method has its trials; by default half of `steps`
    """

    title: str
    measure: str
    steps: int
    methods: Sequence[str]
    problem: str
    reference: str = ""
    tuned_at: dict[str, int] = field(default_factory=dict)

    def horizon(self, method: str) -> int:
        """The horizon of a method's trials."""
        alone = not self.reference or method == self.reference
        return self.steps if alone else self.tuned_at.get(method, self.steps // 2)

    @property
    def horizons(self) -> list[int]:
        return sorted({h for h in HORIZONS if h < self.steps} | {self.steps, self.steps // 2, *self.tuned_at.values()})


RACERS = [*PEERS, *OURS]
EVERYBODY = [*PEERS, *RATE_FREE, *OURS]
STUDIES = {
    "gpt": Study(
        "GPT, Python's sources", "val_loss", 800, EVERYBODY, "gpt", "adamw",
        {"muon": 320, "spectral": 250, "auto-spectral": 250},
    ),
    "gpt-other": Study("smaller GPT, C++ headers", "val_loss", 400, EVERYBODY, "gpt-other", "adamw"),
    "vit": Study("vision transformer, digits", "train_loss", 200, RACERS, "vit", "adamw"),
    "conv": Study("convolutional network, digits", "train_loss", 300, RACERS, "conv", "adamw"),
    "paper": Study("paper's network, MNIST", "val_loss", 1800, RACERS, "paper"),
    "paper-bn": Study("the same with Batch Normalisation", "val_loss", 1800, RACERS, "paper-bn"),
    "paper-train": Study(
        "BN network, training loss", "train_loss", 1800, ["adam-constant", "auto", "auto-spectral"], "paper-bn"
    ),
}  # fmt: skip


class Records:
    """What the rows say about one study."""

    def __init__(self, name: str, study: Study, rows: Sequence[Row], count: int, seeds: Sequence[int]) -> None:
        self.name = name
        self.study = study
        self.rows = [row for row in rows if row.study == name]
        self.count = count
        self.seeds = seeds

    def find(self, method: str, settings: Settings, steps: int, seed: int) -> Row | None:
        key = (method, written(settings), steps, seed)
        return next((row for row in self.rows if (row.method, row.settings, row.steps, row.seed) == key), None)

    def value(self, row: Row) -> float:
        found: float = getattr(row, self.study.measure)
        return found if math.isfinite(found) else math.inf

    def tried(self, method: str) -> list[tuple[Settings, Row]]:
        """The trials that have been run."""
        steps = self.study.horizon(method)
        known = [(each, self.find(method, each, steps, SELECTION_SEED)) for each in self.trials(method)]
        return [(settings, row) for settings, row in known if row is not None]

    def trials(self, method: str) -> list[dict[str, object]]:
        return trials(METHODS[method].space, self.count)

    def best(self, method: str) -> Settings | None:
        """The settings of the best trial; None unless all trials have been run."""
        found = self.tried(method)
        if len(found) < len(self.trials(method)):
            return None
        return min(found, key=lambda pair: self.value(pair[1]))[0]

    def fresh(self, method: str, steps: int) -> list[Row]:
        """The runs of the best trial's settings on fresh seeds; an empty list unless there are all of them."""
        settings = self.best(method)
        if settings is None:
            return []
        found = [self.find(method, settings, steps, seed) for seed in self.seeds]
        return [row for row in found if row is not None] if all(found) else []

    def typical(self, method: str, steps: int) -> float:
        """The median over the fresh seeds; NaN if they have not been run."""
        rows = self.fresh(method, steps)
        return median(self.value(row) for row in rows) if rows else math.nan

    @property
    def target(self) -> float:
        return self.typical(self.study.reference, self.study.steps) if self.study.reference else math.nan

    def shortest(self, method: str) -> int | None:
        """The shortest horizon whose median reaches the target; None if there is none among what has been run."""
        if method == self.study.reference:
            return self.study.steps
        reached = [steps for steps in self.study.horizons if self.typical(method, steps) <= self.target]
        return min(reached, default=None)


class Races(Records):
    """Runs what is missing in the CSV file."""

    def __init__(self, name: str, study: Study, log: Log[Row], options: argparse.Namespace) -> None:
        super().__init__(name, study, log.rows, options.trials, options.seeds)
        self.log = log

    def run(self, method: str, settings: Settings, steps: int, seed: int) -> float:
        """What one run gives, from the file if it has it."""
        row = self.find(method, settings, steps, seed)
        if row is None:
            end = Training(MODERN[self.study.problem], METHODS[method], settings, steps, seed).run()
            row = Row(self.name, method, written(settings), steps, seed, end.train_loss, end.val_loss, end.accuracy)
            self.rows.append(row)
            self.log.add([row])
            print(f"{self.name} {method} {row.settings} steps={steps} seed={seed}: {self.value(row):.4f}", flush=True)
        return self.value(row)

    def rerun(self, method: str, settings: Settings, steps: int) -> float:
        """The median over the fresh seeds."""
        return median(self.run(method, settings, steps, seed) for seed in self.seeds)

    def compete(self, method: str) -> None:
        """The trials of a method, then its fresh seeds: at its horizon, or at the shortest that reaches the target."""
        for settings in self.trials(method):
            self.run(method, settings, self.study.horizon(method), SELECTION_SEED)
        best = self.best(method)
        assert best is not None
        if not self.study.reference or method == self.study.reference:
            self.rerun(method, best, self.study.steps)
        elif math.isnan(self.target):
            print(f"{self.name} {method}: no target yet, {self.study.reference} has to run first", flush=True)
        else:
            self.shorten(method, best)

    def shorten(self, method: str, settings: Settings) -> None:
        """Seeks the shortest horizon on the selection seed, then on fresh seeds from there on, up or down."""
        horizons = self.study.horizons
        place = self._on_selection_seed(method, settings)
        while self.rerun(method, settings, horizons[place]) > self.target:
            if place == len(horizons) - 1:
                return
            place += 1
        while place > 0 and self.rerun(method, settings, horizons[place - 1]) <= self.target:
            place -= 1

    def _on_selection_seed(self, method: str, settings: Settings) -> int:
        """The place in `horizons` of the shortest one that reaches the target on the selection seed, by bisection."""
        horizons = self.study.horizons
        low = 0
        high = len(horizons) - 1
        middle = horizons.index(self.study.horizon(method))
        while low < high:
            if self.run(method, settings, horizons[middle], SELECTION_SEED) <= self.target:
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return low


# Tables and the figure ------------------------------------------------------------------------------------------------


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
    spans = [f"{h}: {median_and_range([records.value(row) for row in records.fresh(method, h)])}" for h in steps]
    needed = "–" if not study.reference else f"more than {max(steps, default=study.horizon(method))}"
    needed = needed if shortest is None or not study.reference else str(shortest)
    ratio = f"{shortest / study.steps:.2f}" if shortest and study.reference else "–"
    return [title, f"`{written(settings) or 'nothing to tune'}`", needed, ratio, "; ".join(spans)]


def table(records: Records) -> str:
    study = records.study
    name = study.measure.replace("_", " ").replace("val", "validation").replace("train", "training")
    titles = ["method", "best of its trials", "steps to target", "reference = 1", f"{name} by steps, fresh seeds"]
    head = f"### {study.title}\n"
    if not math.isnan(records.target):
        head += (
            f"\nTarget: {name} {records.target:.4f}, {METHODS[study.reference].title}'s after {study.steps} steps.\n"
        )
    return "\n".join([head, markdown(titles, [outcome(records, method) for method in study.methods])])


def tuning(records: Records) -> str:
    """All trials, so that a reader sees whether the best one is at an edge."""
    lines = [
        [METHODS[method].title, records.study.horizon(method), f"`{row.settings}`", f"{records.value(row):.4f}"]
        for method in records.study.methods
        for _, row in records.tried(method)
    ]
    return markdown(["method", "steps", "trial", records.study.measure], lines)


LOOKS = {
    "adamw": figures.Style(figures.OCHRE, figures.DASHED, "v"),
    "muon": figures.Style(figures.GREEN, figures.DASH_DOT, "P"),
    "soap": figures.Style(figures.PURPLE, figures.DOTTED, "D"),
    "prodigy": figures.Style(figures.INK, figures.DOTTED, "x"),
    "schedule-free": figures.Style(figures.INK, figures.LONG, "+"),
    "spectral": figures.Style(figures.VERMILION, figures.SOLID, "o"),
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
            figures.target_line(axes, records.target, f"AdamW after {study.steps} steps", above=False)
            name = "validation" if study.measure == "val_loss" else "training"
            figures.frame(axes, study.title, "steps of the run", f"{name} loss at its end, nats")
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            ticks = [steps for steps in (25, 50, 100, 200, 400, 800) if low <= steps <= high]
            axes.set_xticks(ticks, [str(steps) for steps in ticks])
            axes.minorticks_off()
        for axes in grid[len(raced) :]:
            axes.set_visible(False)
        used = [method for method in LOOKS if any(points(records, method) for records in raced)]
        handles = [figures.entry(LOOKS[method], METHODS[method].title) for method in used]
        legend_ = figures.explain("band", "least to greatest of five fresh seeds (line: median)")
        figures.legend(chart, [*handles, legend_], columns=3)


def points(records: Records, method: str) -> list[int]:
    """The horizons with finite losses on all fresh seeds."""
    runs = {h: records.fresh(method, h) for h in records.study.horizons}
    return [h for h, rows in runs.items() if rows and all(math.isfinite(records.value(row)) for row in rows)]


def draw_ends(axes: figures.Axes, records: Records, method: str) -> None:
    steps = points(records, method)
    by_seed = zip(*([records.value(row) for row in records.fresh(method, h)] for h in steps), strict=True)
    if steps:
        figures.band(axes, steps, list(by_seed), LOOKS[method])


# The price of a step --------------------------------------------------------------------------------------------------


def price(log: Log[Price], records: Records, options: argparse.Namespace) -> None:
    """Milliseconds of a step, methods taking turns in one process, each with its best settings or its first trial.

    A turn is twenty steps, so that what a method does every ten steps is in it.
    """
    runs = {}
    for method in [name for name in records.study.methods if not METHODS[name].missing]:
        settings = records.best(method) or records.trials(method)[0]
        problem = MODERN[records.study.problem]
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
    parser.add_argument("--tuning", action="store_true", help="also print all trials")
    parser.setting("only", ",".join(STUDIES), "gpt,vit", "studies")
    parser.setting("methods", ",".join(METHODS), "adamw,muon,soap,spectral,auto", "methods to run")
    parser.setting("seeds", [1, 2, 3, 4, 5], [1], "fresh seeds")
    parser.setting("trials", 8, 2, "trials of every method")
    parser.setting("rounds", 9, 2, "rounds of --price")
    options = parser.parse(arguments)
    log = Log(options.out / "modern.csv", Row)
    studies = {name: small(study) if options.quick else study for name, study in STUDIES.items()}
    if options.price:
        prices = Log(options.out / "modern-price.csv", Price)
        prices.rows.clear()
        price(prices, Records("gpt", studies["gpt"], log.rows, options.trials, options.seeds), options)
        print(price_table(prices.rows))
        return
    chosen = [(name, studies[name]) for name in options.only.split(",")]
    if not options.draw:
        run_all(chosen, log, options)
    every = [Records(name, study, log.rows, options.trials, options.seeds) for name, study in chosen]
    for records in every:
        print(table(records), end="\n\n")
        if options.tuning:
            print(tuning(records), end="\n\n")
    draw(every, options.out / "figures" / "modern.png")


def run_all(chosen: Sequence[tuple[str, Study]], log: Log[Row], options: argparse.Namespace) -> None:
    for name, study in chosen:
        for method in [each for each in study.methods if each in options.methods.split(",")]:
            if METHODS[method].missing:
                print(f"{name} {method}: not run, {METHODS[method].missing}", flush=True)
            else:
                Races(name, study, log, options).compete(method)


if __name__ == "__main__":
    main()
