"""What a run leaves on disk: results.csv, a row per method, seed and epoch, and run.json; how both are read back."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal

Column = Literal["train_loss", "val_loss", "val_accuracy"]

LABELS = {"sgd": "SGD", "bn": "BN", "prong": "PRONG", "bprong": "BPRONG", "adam": "Adam", "kfac": "K-FAC"}


class RecordError(ValueError):
    """A file of a run that cannot be read: which file, which line, and what is wrong with it."""


@dataclass(frozen=True)
class Row:
    """One network after one epoch.

    Epoch 0 is the untrained network; a train_loss that is not finite is the last row of a network that diverged.
    """

    method: str
    seed: int
    epoch: int
    step: int
    seconds: float
    train_loss: float
    val_loss: float
    val_accuracy: float


@dataclass(frozen=True)
class Point:
    """One epoch of a method over its seeds; `median` is infinitely bad once half of them have diverged."""

    epoch: int
    step: int
    seconds: float  # the median, infinite if no seed came so far
    median: float
    low: float
    high: float
    seeds: int


COLUMNS = tuple(field.name for field in fields(Row))
_INTEGERS = {"seed", "epoch", "step"}


def label(method: str) -> str:
    """How a method is called in print; an unknown one by its name.

    >>> label("bn"), label("bprong-fast"), label("mine")
    ('BN', 'BPRONG-fast', 'mine')
    """
    family, dash, variant = method.partition("-")
    return LABELS.get(family, family) + dash + variant


def methods(rows: Iterable[Row]) -> list[str]:
    """The methods of a run, in the order in which they first appear."""
    return list(dict.fromkeys(row.method for row in rows))


def diverged(rows: Iterable[Row]) -> dict[str, dict[int, int]]:
    """For each method that diverged: at which epoch, by seed."""
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        if not math.isfinite(row.train_loss):
            seeds = found.setdefault(row.method, {})
            seeds[row.seed] = min(row.epoch, seeds.get(row.seed, row.epoch))
    return found


def curve(rows: Sequence[Row], method: str, column: Column) -> list[Point]:
    """Median, least and greatest of a column over the seeds of a method, at every epoch at which there are any.

    A seed that diverged stays, infinitely bad, until the last epoch of the run: left out, it would flatter the method.
    A seed that has merely not come so far is left out.
    """
    steps = {row.epoch: row.step for row in rows}
    own = [row for row in rows if row.method == method]
    ends = diverged(own).get(method, {})
    points = []
    for epoch in sorted(steps):
        here = [row for row in own if row.epoch == epoch and row.epoch <= ends.get(row.seed, epoch)]
        gone = [_worst(column)] * sum(end < epoch for end in ends.values())
        values = [_value(row, column) for row in here] + gone
        if values:
            step = here[0].step if here else steps[epoch]
            seconds = median(row.seconds for row in here) if here else math.inf
            points.append(Point(epoch, step, seconds, median(values), min(values), max(values), len(values)))
    return points


def _worst(column: Column) -> float:
    return -math.inf if column == "val_accuracy" else math.inf


def _value(row: Row, column: Column) -> float:
    value = float(getattr(row, column))
    return value if math.isfinite(value) and math.isfinite(row.train_loss) else _worst(column)


def write_results(path: Path, rows: Iterable[Row]) -> None:
    """Writes results.csv; every number is written so that it is read back exactly."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(name, value) for name, value in zip(COLUMNS, astuple(row), strict=True)] for row in rows)
    write_atomically(path, text.getvalue().encode())


def _cell(name: str, value: Any) -> str:
    """The shortest text that reads back as the same number; numpy's numbers, whose repr is a call, included."""
    if name == "method":
        return str(value)
    return repr(int(value) if name in _INTEGERS else float(value))


def read_results(path: Path) -> list[Row]:
    """The rows of a results.csv, or RecordError."""
    try:
        reader = csv.reader(io.StringIO(path.read_bytes().decode(), newline=""), strict=True)
        lines = [(reader.line_num, cells) for cells in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path}: not a CSV file in UTF-8: {error}") from error
    header = lines[0][1] if lines else []
    if tuple(header) != COLUMNS:
        raise RecordError(f"{path}, line 1: the columns are '{','.join(header)}'; required are '{','.join(COLUMNS)}'")
    seen: dict[tuple[str, int, int], int] = {}
    rows = []
    for line, cells in lines[1:]:
        row = _row(cells, f"{path}, line {line}")
        first = seen.setdefault((row.method, row.seed, row.epoch), line)
        if first != line:
            name = f"method {row.method}, seed {row.seed}, epoch {row.epoch}"
            raise RecordError(f"{path}, line {line}: {name} was already in line {first}; one row each is required")
        rows.append(row)
    return rows


def _row(cells: list[str], where: str) -> Row:
    if len(cells) != len(COLUMNS):
        raise RecordError(f"{where}: {len(cells)} values; required are {len(COLUMNS)}: {', '.join(COLUMNS)}")
    if not cells[0]:
        raise RecordError(f"{where}: the method has no name")
    return Row(cells[0], *(_number(name, cell, where) for name, cell in zip(COLUMNS[1:], cells[1:], strict=True)))


def _number(name: str, cell: str, where: str) -> Any:
    try:
        return int(cell) if name in _INTEGERS else float(cell)
    except ValueError:
        kind = "a whole number" if name in _INTEGERS else "a number"
        raise RecordError(f"{where}: {name} is {cell!r}; {kind} is required") from None


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes a dict as JSON; what JSON has no word for (nan, inf, a Path) is written as a string."""
    text = json.dumps(_plain(record), indent=2, ensure_ascii=False, allow_nan=False)
    # A file name that is not UTF-8 has lone surrogates; \udc80 is how JSON spells them.
    write_atomically(path, (text + "\n").encode(errors="backslashreplace"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    known = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a JSON file, or RecordError."""
    try:
        record = json.loads(path.read_bytes().decode())
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8: {error}") from error
    if not isinstance(record, dict):
        raise RecordError(f"{path}, line 1: a {type(record).__name__}; an object {{…}} is required")
    return record


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file such that, killed at any moment, the path holds all of the old bytes or all of the new ones."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):  # the reason to stop is the one to report
            part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed `write_atomically` left behind; not while another process writes there."""
    for part in folder.glob(f".*.{'[0-9a-f]' * 32}.tmp"):
        part.unlink(missing_ok=True)
