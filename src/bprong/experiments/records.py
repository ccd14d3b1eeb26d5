"""The files of a run, results.csv (one row per method, seed and epoch) and run.json, and summaries of their rows."""

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
    """A results file cannot be read; the message names the file, the line and the fault."""


@dataclass(frozen=True)
class Row:
    """The losses of one network after one epoch.

    Epoch 0 is the untrained network. A train_loss that is not finite marks the last row of a network that diverged.
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
    """One method at one epoch, summarized over its seeds.

    seconds: median training time, infinite if no seed reached this epoch
    median:  infinite (minus infinity for an accuracy) once half of the seeds have diverged
    """

    epoch: int
    step: int
    seconds: float
    median: float
    low: float
    high: float
    seeds: int


COLUMNS = tuple(field.name for field in fields(Row))
_INTEGERS = {"seed", "epoch", "step"}


def label(method: str) -> str:
    """The name of a method for figures and tables; an unknown method keeps its own name.

    >>> label("bn"), label("bprong-fast"), label("mine")
    ('BN', 'BPRONG-fast', 'mine')
    """
    family, dash, variant = method.partition("-")
    return LABELS.get(family, family) + dash + variant


def method_names(rows: Iterable[Row]) -> list[str]:
    """The methods of a run, in the order in which they first appear."""
    return list(dict.fromkeys(row.method for row in rows))


def seed_count(rows: Iterable[Row]) -> int:
    """The number of different seeds in the rows."""
    return len({row.seed for row in rows})


def divergence_epochs(rows: Iterable[Row], method: str) -> dict[int, int]:
    """The epoch at which each diverged seed of a method diverged, by seed; empty if none did."""
    epochs: dict[int, int] = {}
    for row in rows:
        if row.method == method and not math.isfinite(row.train_loss):
            epochs[row.seed] = min(row.epoch, epochs.get(row.seed, row.epoch))
    return epochs


def curve(rows: Sequence[Row], method: str, column: Column) -> list[Point]:
    """Median, minimum and maximum of a column over the seeds of a method, for every epoch that has values.

    A diverged seed counts as infinitely bad from then on, up to the last epoch of the run; leaving it out would
    flatter the method. A seed that has not reached an epoch yet is left out of that epoch.
    """
    steps = {row.epoch: row.step for row in rows}
    own = [row for row in rows if row.method == method]
    ends = divergence_epochs(own, method)
    points = []
    for epoch in sorted(steps):
        here = [row for row in own if row.epoch == epoch and row.epoch <= ends.get(row.seed, epoch)]
        values = [_value_or_worst(row, column) for row in here]
        values += [_worst(column)] * sum(end < epoch for end in ends.values())
        if values:
            step = here[0].step if here else steps[epoch]
            seconds = median(row.seconds for row in here) if here else math.inf
            points.append(Point(epoch, step, seconds, median(values), min(values), max(values), len(values)))
    return points


def _worst(column: Column) -> float:
    return -math.inf if column == "val_accuracy" else math.inf


def _value_or_worst(row: Row, column: Column) -> float:
    value = float(getattr(row, column))
    return value if math.isfinite(value) and math.isfinite(row.train_loss) else _worst(column)


def write_results(path: Path, rows: Iterable[Row]) -> None:
    """Write results.csv; every number is written so that reading it back gives the same number."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(name, value) for name, value in zip(COLUMNS, astuple(row), strict=True)] for row in rows)
    write_atomically(path, text.getvalue().encode())


def _cell(name: str, value: Any) -> str:
    """The shortest text that reads back as the same number; int and float first, as repr of a NumPy scalar differs."""
    if name == "method":
        return str(value)
    return repr(int(value) if name in _INTEGERS else float(value))


def read_results(path: Path) -> list[Row]:
    """Read the rows of a results.csv; RecordError if the file is malformed."""
    try:
        reader = csv.reader(io.StringIO(path.read_bytes().decode(), newline=""), strict=True)
        lines = [(reader.line_num, cells) for cells in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path}: not a CSV file in UTF-8: {error}") from error
    header = lines[0][1] if lines else []
    if tuple(header) != COLUMNS:
        raise RecordError(f"{path}, line 1: the columns are '{','.join(header)}'; expected '{','.join(COLUMNS)}'")
    seen: dict[tuple[str, int, int], int] = {}
    rows = []
    for line, cells in lines[1:]:
        row = _parse_row(cells, f"{path}, line {line}")
        first = seen.setdefault((row.method, row.seed, row.epoch), line)
        if first != line:
            key = f"method {row.method}, seed {row.seed}, epoch {row.epoch}"
            raise RecordError(f"{path}, line {line}: {key} already appears in line {first}; expected one row for each")
        rows.append(row)
    return rows


def _parse_row(cells: list[str], where: str) -> Row:
    if len(cells) != len(COLUMNS):
        raise RecordError(f"{where}: {len(cells)} values; expected {len(COLUMNS)}: {', '.join(COLUMNS)}")
    if not cells[0]:
        raise RecordError(f"{where}: the method has no name")
    return Row(cells[0], *(_parse_number(name, cell, where) for name, cell in zip(COLUMNS[1:], cells[1:], strict=True)))


def _parse_number(name: str, cell: str, where: str) -> Any:
    try:
        return int(cell) if name in _INTEGERS else float(cell)
    except ValueError:
        kind = "an integer" if name in _INTEGERS else "a number"
        raise RecordError(f"{where}: {name} is {cell!r}; expected {kind}") from None


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a dict as JSON; values that JSON cannot represent (nan, inf, a Path) are written as strings."""
    text = json.dumps(_json_value(record), indent=2, ensure_ascii=False, allow_nan=False)
    # A file name that is not UTF-8 contains lone surrogates; JSON writes them as \udc80.
    write_atomically(path, (text + "\n").encode(errors="backslashreplace"))


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    known = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that, even if the process is killed, the path holds either the old bytes or the new ones."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):  # report the first error, not a failure to clean up
            part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power failure, on systems that can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_temporary_files(folder: Path) -> None:
    """Delete files that a killed `write_atomically` left behind; no other process may be writing to the folder."""
    for part in folder.glob(f".*.{'[0-9a-f]' * 32}.tmp"):
        part.unlink(missing_ok=True)
