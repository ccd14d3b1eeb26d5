"""The files of a benchmark: runs/NAME.json for every finished run, and bench.csv with one row for each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bprong.experiments.bench.data import Split
from bprong.experiments.bench.plan import Job, Plan
from bprong.experiments.bench.rows import columns_of, write
from bprong.experiments.bench.search import written
from bprong.experiments.bench.targets import TARGETS, Target
from bprong.experiments.bench.training import Outcome, Point
from bprong.experiments.bench.workloads import WORKLOADS
from bprong.experiments.records import remove_temporary_files, write_atomically

RUNS = "runs"
NOT_RUN = "not run: "
FAILED = "failed: "


@dataclass(frozen=True)
class Row:
    """A run. Steps and seconds to a target are infinite if it was missed; losses are the lowest that were measured.

    stage:     "tuning" or "test"; "none" for a method that was not run, whose `end` says why
    megabytes: the peak memory of the run, above what the process held before
    end:       why the run ended
    """

    workload: str
    method: str
    stage: str
    trial: int
    seed: int
    settings: str
    train_steps: float = math.inf
    train_seconds: float = math.inf
    val_steps: float = math.inf
    val_seconds: float = math.inf
    train_loss: float = math.inf
    val_loss: float = math.inf
    steps: int = 0
    seconds: float = 0.0
    megabytes: float = math.nan
    end: str = ""


@dataclass(frozen=True)
class Record:
    """A finished run with the points at which its losses were measured, and its `basis`."""

    row: Row
    points: list[Point]
    basis: str = ""


def basis(job: Job) -> str:
    """What a record depends on beside its settings: if it has changed since, the run is repeated."""
    target = TARGETS[job.workload][split_of(job)]
    return f"{WORKLOADS[job.workload].steps} steps to {target.train_loss:g} and {target.val_loss:g}"


def split_of(job: Job) -> Split:
    return "tuning" if job.stage == "tuning" else "test"


def row_of(job: Job, outcome: Outcome, target: Target, megabytes: float) -> Row:
    """The row of a run: when it first reached each target, and the lowest losses."""
    points = outcome.points
    train = next((p for p in points if p.train_loss <= target.train_loss), None)
    val = next((p for p in points if p.val_loss <= target.val_loss), None)
    return Row(
        *_key(job),
        train_steps=train.step if train else math.inf,
        train_seconds=train.seconds if train else math.inf,
        val_steps=val.step if val else math.inf,
        val_seconds=val.seconds if val else math.inf,
        train_loss=min((p.train_loss for p in points), default=math.inf),
        val_loss=min((p.val_loss for p in points), default=math.inf),
        steps=outcome.steps, seconds=outcome.seconds, megabytes=megabytes, end=outcome.end,
    )  # fmt: skip


def failed(job: Job, reason: str) -> Record:
    """The record of a run that raised an exception."""
    return Record(Row(*_key(job), end=FAILED + " ".join(reason.split())[:200]), [])


def _key(job: Job) -> tuple[str, str, str, int, int, str]:
    return job.workload, job.method, job.stage, job.trial, job.seed, written(job.settings)


class Folder:
    """The records in an output folder. Every record is one file, written in one step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}

    def load(self) -> None:
        """Read the runs of an earlier benchmark in this folder; a file that cannot be read is run again."""
        for file in sorted((self.path / RUNS).glob("*.json")):
            try:
                saved = json.loads(file.read_text(encoding="utf-8"))
                row = Row(**{name: _number(value) for name, value in saved["row"].items()})
                self.records[file.stem] = Record(row, [Point(*point) for point in saved["points"]], saved["basis"])
            except (ValueError, KeyError, TypeError):
                continue

    def prepare(self) -> None:
        (self.path / RUNS).mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.path / RUNS):
            remove_temporary_files(folder)

    def find(self, job: Job) -> Record | None:
        """The record of a job, if it has been run with these settings, this step budget and these targets."""
        record = self.records.get(job.name)
        same = record is not None and (record.row.settings, record.basis) == (written(job.settings), basis(job))
        return record if same else None

    def add(self, job: Job, record: Record) -> None:
        """Keep a record: its file, and bench.csv."""
        record = replace(record, basis=basis(job))
        self.records[job.name] = record
        saved = {
            "basis": record.basis,
            "row": _plain(asdict(record.row)),
            "points": [list(point) for point in record.points],
        }
        write_atomically(self.path / RUNS / f"{job.name}.json", json.dumps(saved, allow_nan=False).encode())

    def write_csv(self, rows: Iterable[Row]) -> None:
        write(self.path / "bench.csv", rows, columns_of(Row))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON does not have are written as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "nan") else value


def missing_rows(plan: Plan, reasons: dict[tuple[str, str], str]) -> list[Row]:
    """A row that says why, for each method that was not run on a workload."""
    return [
        Row(workload, method, "none", -1, -1, "", end=NOT_RUN + reason)
        for (workload, method), reason in reasons.items()
        if workload in plan.workloads
    ]


def sorted_rows(rows: Iterable[Row], plan: Plan) -> list[Row]:
    """Rows by workload, method, stage, trial and seed, in the order of the plan."""
    stages: Sequence[str] = ("tuning", "test", "none")

    def place(row: Row) -> tuple[int, int, int, int, int]:
        return (
            plan.workloads.index(row.workload), plan.methods.index(row.method), stages.index(row.stage),
            row.trial, row.seed,
        )  # fmt: skip

    own = [row for row in rows if row.workload in plan.workloads and row.method in plan.methods]
    return sorted(own, key=place)
