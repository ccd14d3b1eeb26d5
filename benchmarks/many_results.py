"""What `many.py` leaves on disk, auto-many.csv, and the table in Markdown that is made of it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median

from auto_results import markdown
from many_problems import Problem

from bprong.experiments.records import write_atomically

ADAM_RATES = ["1e-3", "3e-3", "1e-2", "3e-2", "1e-1"]
WORSE = 1.2  # times Adam's loss; more is worse, less a matter of the seed
NOTHING = 1e-6  # a loss of no more is none


@dataclass(frozen=True)
class Row:
    """A network trained: its losses over the training set, infinite where it diverged, and its updates taken back.

    `highest`: of those measured on the way, some twenty. `seconds`: of training.
    """

    problem: str
    method: str
    lr: str
    seed: int
    start: float
    end: float
    highest: float
    undone: int
    seconds: float

    @property
    def diverged(self) -> bool:
        return not self.end <= self.start


COLUMNS = [field.name for field in fields(Row)]
Rows = dict[tuple[str, str, int], Row]  # by problem, learning rate, seed


def path_of(folder: Path) -> Path:
    return folder / "auto-many.csv"


def read(folder: Path) -> Rows:
    """The runs so far."""
    rows = {}
    if path_of(folder).exists():
        for line in csv.DictReader(io.StringIO(path_of(folder).read_text())):
            losses = (float(line[name]) for name in ("start", "end", "highest"))
            key = line["problem"], line["lr"], int(line["seed"])
            rows[key] = Row(key[0], line["method"], *key[1:], *losses, int(line["undone"]), float(line["seconds"]))
    return rows


def write(folder: Path, rows: Rows) -> None:
    """All of them, after each run anew: what is on disk is whole at any moment."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows.values():
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in astuple(row)])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path_of(folder), text.getvalue().encode())


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """lr="auto" on one problem, beside Adam at the one learning rate with the best median over the seeds."""

    ours: list[Row]
    adam: list[Row]
    floor: float

    @property
    def end(self) -> float:
        return median(row.end for row in self.ours)

    @property
    def adam_end(self) -> float:
        return median(row.end for row in self.adam)

    @property
    def ratio(self) -> float:
        """Of what is above the least loss there can be."""
        mine, best = (max(end - self.floor, 0.0) for end in (self.end, self.adam_end))
        if mine == best or not math.isfinite(best):
            return 1.0 if mine == best else 0.0
        return mine / best if best else math.inf

    @property
    def nothing(self) -> bool:
        return max(self.end, self.adam_end) - self.floor <= NOTHING

    def cells(self) -> Iterator[str]:
        yield f"{median(row.start for row in self.ours):.3g}"
        yield f"{self.end:.3g}"
        yield f"{max(row.end for row in self.ours):.3g}"
        yield f"{self.adam_end:.3g}"
        yield self.adam[0].lr
        yield f"{self.ratio:.2g}"
        yield f"{sum(row.diverged for row in self.ours)} of {len(self.ours)}"


def judge(rows: Rows, name: str, problem: Problem, seeds: Sequence[int]) -> Verdict | None:
    """None where a run is missing."""
    by_rate = {lr: [rows.get((name, lr, seed)) for seed in seeds] for lr in ["auto", *ADAM_RATES]}
    found = {lr: [row for row in group if row is not None] for lr, group in by_rate.items()}
    if any(len(group) < len(seeds) for group in found.values()):
        return None
    ours = found.pop("auto")
    return Verdict(ours, min(found.values(), key=lambda group: median(row.end for row in group)), problem.floor)


def table(rows: Rows, problems: Mapping[str, Problem], seeds: Sequence[int]) -> Iterator[str]:
    judged = {name: judge(rows, name, problem, seeds) for name, problem in problems.items()}
    verdicts = {name: verdict for name, verdict in judged.items() if verdict is not None}
    lines = [[f"`{name}`: {problems[name].title}", *verdict.cells()] for name, verdict in verdicts.items()]
    titles = ["problem", "start", 'lr="auto"', "worst end", "best Adam", "its lr", "ratio", "diverged"]
    yield from markdown(titles, lines)
    yield f"\nSeeds {', '.join(map(str, seeds))}: {summary(list(verdicts.values()))}"


def summary(verdicts: Sequence[Verdict]) -> str:
    worse = [verdict for verdict in verdicts if verdict.ratio > WORSE]
    runs = [row for verdict in verdicts for row in verdict.ours]
    edge = sum(verdict.adam[0].lr in (ADAM_RATES[0], ADAM_RATES[-1]) for verdict in verdicts)
    return (
        f'of {len(verdicts)} problems, lr="auto" ends below the best Adam on {sum(v.ratio < 1 for v in verdicts)}, '
        f"above it by more than {WORSE}× on {len(worse)} (both below {NOTHING:g} on {sum(v.nothing for v in worse)} of "
        f"these); {sum(row.diverged for row in runs)} of its {len(runs)} runs diverged, in "
        f"{sum(row.undone > 0 for row in runs)} of them updates were taken back. Adam's best learning rate is at an "
        f"end of its grid on {edge}."
    )
