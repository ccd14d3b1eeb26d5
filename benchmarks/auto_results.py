"""What `auto.py` leaves on disk, auto-*.csv, and the tables in Markdown that are made of it."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median

from bprong.experiments.records import write_atomically

OURS = "bprong-auto"
NAMES = {
    OURS: 'BPRONG, lr="auto"',
    "adam": "Adam",
    "bn-adam": "BN+Adam",
    "nesterov": "SGD+Nesterov",
    "sgd": "SGD, momentum",
}
LOSS_AIM, RIGHT_AIM = 0.05, 0.95  # of the paper's network; of the deep ones
LONG = "autoencoder-long"


@dataclass(frozen=True)
class Row:
    """A network after some steps, `seconds` of training. Losses: infinite once it has diverged, nan: not measured."""

    problem: str
    method: str
    lr: str
    batch: int
    seed: int
    step: int
    seconds: float
    train_loss: float
    val_loss: float
    accuracy: float


COLUMNS = [field.name for field in fields(Row)]
Key = tuple[str, str, str, int, int]  # problem, method, learning rate, batch, seed
Runs = dict[Key, list[Row]]


def read(folder: Path, name: str) -> Runs:
    """The runs of a sub-command so far."""
    runs: Runs = defaultdict(list)
    if (path := folder / f"auto-{name}.csv").exists():
        for problem, method, lr, batch, seed, step, *numbers in list(csv.reader(io.StringIO(path.read_text())))[1:]:
            key = (problem, method, lr, int(batch), int(seed))
            runs[key].append(Row(*key, int(step), *(float(number or "nan") for number in numbers)))
    return dict(runs)


def write(folder: Path, name: str, runs: Runs) -> None:
    """All of them, after each run anew: what is on disk is whole at any moment."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in (row for rows in runs.values() for row in rows):
        writer.writerow([*astuple(row)[:6], *("" if math.isnan(v) else f"{v:.6g}" for v in astuple(row)[6:])])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"auto-{name}.csv", text.getvalue().encode())


def label(method: str) -> str:
    family = next((name for name in sorted(NAMES, key=len, reverse=True) if method.startswith(name)), method)
    return NAMES.get(family, family) + method.removeprefix(family)


def markdown(titles: Sequence[str], lines: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for line in lines:
        yield f"| {' | '.join(str(cell) for cell in line)} |"


def groups(runs: Runs) -> dict[tuple[str, str, str, int], list[list[Row]]]:
    """The runs that differ by their seed alone."""
    found = defaultdict(list)
    for key, rows in runs.items():
        found[key[:4]].append(rows)
    return dict(found)


def diverged(rows: Sequence[Row]) -> bool:
    return not rows[-1].train_loss <= rows[0].train_loss


def loss_at(rows: Sequence[Row], column: str, at: float) -> float:
    """The training loss at so many seconds or steps, log-linear between two rows; nan beyond the last."""
    for before, after in pairwise(rows):
        low, high = getattr(before, column), getattr(after, column)
        if low <= at <= high and high > low:
            share = (at - low) / (high - low)
            if not math.isfinite(after.train_loss):
                return after.train_loss
            return math.exp((1 - share) * math.log(before.train_loss) + share * math.log(after.train_loss))
    return math.inf if rows and math.isinf(rows[-1].train_loss) else math.nan


# Tables ---------------------------------------------------------------------------------------------------------------


def hold_table(runs: Runs, titles: Mapping[str, str]) -> Iterator[str]:
    """Medians over the seeds, the worst of them, and how many diverged."""
    lines = []
    for (problem, *_), paths in groups(runs).items():
        columns = [[rows[min(i, len(rows) - 1)].train_loss for rows in paths] for i in range(5)]
        val = [rows[-1].val_loss for rows in paths]
        cells = [f"{median(column):.3g}" for column in columns]
        cells += [f"{max(columns[-1]):.3g}", f"{median(val):.3g}", f"{max(val):.3g}"]
        cells += [f"{median(rows[-1].seconds for rows in paths):.1f}", f"{sum(map(diverged, paths))} of {len(paths)}"]
        lines.append([titles.get(problem, problem), *cells])
    titles_of_columns = ["problem", "loss at first", "¼", "½", "¾", "end", "worst end", "validation", "worst"]
    return markdown([*titles_of_columns, "seconds", "diverged"], lines)


def time_to(rows: Sequence[Row], column: str = "seconds") -> float:
    """Seconds, or steps, until the aim of the paper's network was reached; infinite if it was not."""
    return next((getattr(row, column) for row in rows if row.train_loss <= LOSS_AIM), math.inf)


def paper_table(runs: Runs) -> Iterator[str]:
    found = {
        key: (median(map(time_to, paths)), median(time_to(rows, "step") for rows in paths), paths)
        for key, paths in groups(runs).items()
    }
    lines = []
    for (_, method, lr, batch), (seconds, steps, paths) in sorted(found.items(), key=lambda item: item[1][0]):
        each = ", ".join(f"{time_to(rows):.2f}" for rows in paths)
        lines.append([label(method), lr, batch, f"{seconds:.2f}", each, f"{steps:.0f}"])
    yield from markdown(
        ["method", "lr", "batch", f"seconds to {LOSS_AIM}, median", "each seed", "steps, median"], lines
    )
    mine, best = (
        min((v[0] for k, v in found.items() if (k[1] == OURS) is own), default=math.nan) for own in (True, False)
    )
    yield f"\nOurs at its best batch {mine:.2f} s, the best baseline {best:.2f} s: {mine / best:.2f} of it."


def steps_to(rows: Sequence[Row]) -> float:
    return next((row.step for row in rows if row.accuracy >= RIGHT_AIM), math.inf)


def toil(rows: Sequence[Row]) -> float:
    """Steps to the aim; those that never came there after all that did, by their accuracy."""
    return steps if math.isfinite(steps := steps_to(rows)) else 1e9 - max(row.accuracy for row in rows)


def count(steps: float) -> str:
    return f"{steps:g}" if math.isfinite(steps) else "never"


def deep_table(runs: Runs, titles: Mapping[str, str]) -> Iterator[str]:
    """Steps to the aim, and the greatest accuracy met, by learning rate."""
    lines, best = [], defaultdict(lambda: math.inf)
    for (problem, method, lr, _), paths in groups(runs).items():
        steps = median(map(steps_to, paths))
        best[problem, method == OURS] = min(best[problem, method == OURS], steps)
        each = ", ".join(count(steps_to(rows)) for rows in paths)
        right = median(max(row.accuracy for row in rows) for rows in paths)
        lines.append([titles[problem], label(method), lr, count(steps), each, f"{right:.3f}"])
    yield from markdown(["network", "method", "lr", "steps to 95 %, median", "each seed", "best accuracy"], lines)
    for problem in dict.fromkeys(key[0] for key in runs):
        mine, theirs = best[problem, True], best[problem, False]
        share = f": {mine / theirs:.2f} of it" if math.isfinite(mine / theirs) else ""
        yield f"\n{titles[problem]}, steps: ours {count(mine)}, the best baseline {count(theirs)}{share}."


def race(runs: Runs) -> Runs:
    return {key: rows for key, rows in runs.items() if key[0] != LONG}


def lowest(runs: Runs) -> float:
    """L*: the least loss of any run, the long ones included."""
    return min(row.train_loss for rows in runs.values() for row in rows)


def duration(runs: Runs) -> float:
    """For how many seconds ours raced; the last step ended a little later."""
    ends = [rows[-1] for key, rows in race(runs).items() if key[1] == OURS]
    return float(int(min((row.seconds for row in ends if math.isfinite(row.train_loss)), default=ends[0].seconds)))


def autoencoder_table(runs: Runs) -> Iterator[str]:
    """Equal seconds, and L − L* at the number of steps that each of ours has made by then; medians over seeds."""
    star, racing, seconds = lowest(runs), groups(race(runs)), duration(runs)
    steps = {
        batch: median(_steps(rows, seconds) for rows in paths)
        for (_, m, _, batch), paths in racing.items()
        if m == OURS
    }
    lines, gaps = [], defaultdict(list)
    for (_, method, lr, batch), paths in racing.items():
        times = [median(loss_at(rows, "seconds", t) for rows in paths) for t in (seconds / 2, seconds)]
        gap = {b: median(loss_at(rows, "step", n) for rows in paths) - star for b, n in steps.items()}
        for b, value in gap.items():
            gaps[b, method == OURS and batch == b, method == OURS].append(value)
        made = median(_steps(rows, seconds) for rows in paths)
        cells = [f"{v:.2f}" if not math.isnan(v) else "" for v in (*times, *gap.values())]
        lines.append([label(method), lr, batch, *cells[:2], f"{made:.0f}", *cells[2:]])
    lines.sort(key=lambda line: (not line[4], float(line[4] or line[-1] or "inf")))
    titles = [
        "method",
        "lr",
        "batch",
        f"loss at {seconds / 2:g} s",
        f"loss at {seconds:g} s",
        f"steps by {seconds:g} s",
    ]
    yield from markdown([*titles, *(f"loss − L* at {n:.0f} steps" for n in steps.values())], lines)
    yield f"\nL* = {star:.2f}. Empty: not trained so long, for others of its method were better."
    for b, n in steps.items():
        mine = gaps[b, True, True][0]
        best = min((gap for gap in gaps[b, False, False] if not math.isnan(gap)), default=math.nan)
        yield f"Ours at batch {b}, {n:.0f} steps: {mine:.2f} above L*, the best baseline {best:.2f}: {mine / best:.2f}."


def _steps(rows: Sequence[Row], seconds: float) -> int:
    """Steps by then; the last step may have begun before and ended after."""
    return next((row.step for row in rows if row.seconds >= seconds), rows[-1].step)


def general_table(runs: Runs) -> Iterator[str]:
    """Training and validation loss epoch by epoch, medians over seeds."""
    lines = []
    for (_, method, lr, _), paths in groups(runs).items():
        points = list(zip(*paths, strict=False))[1:]
        cells = [f"{median(r.train_loss for r in p):.4f} / {median(r.val_loss for r in p):.4f}" for p in points]
        least = median(min(row.val_loss for row in rows) for rows in paths)
        lines.append([label(method), lr, *cells, f"{least:.4f}"])
    epochs = max(len(line) for line in lines) - 3
    return markdown(["method", "lr", *(f"epoch {i + 1}" for i in range(epochs)), "least validation loss"], lines)


def tables(folder: Path, titles: Mapping[str, str], *names: str) -> Iterator[str]:
    """Those named, or of all that there is on disk."""
    makers: dict[str, Callable[[Runs], Iterable[str]]] = {
        "hold": lambda runs: hold_table(runs, titles),
        "autoencoder": autoencoder_table,
        "paper": paper_table,
        "deep": lambda runs: deep_table(runs, titles),
        "general": general_table,
    }
    for name in names or makers:
        if runs := read(folder, name):
            yield f"\n{folder}/auto-{name}.csv\n"
            yield from makers[name](runs)
