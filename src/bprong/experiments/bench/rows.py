"""Rows of measurements: dataclasses in memory, CSV files on disk."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

RowT = TypeVar("RowT")


def columns_of(kind: type[Any]) -> list[str]:
    """The names of a dataclass's fields, which are the columns of its file."""
    return [field.name for field in fields(kind)]


def read(path: Path, kind: type[RowT]) -> list[RowT]:
    """The rows of a CSV file as instances of the dataclass `kind`; an empty list if there is no file.

    A column that the file does not have takes its field's default. An empty cell of a number is NaN.
    """
    if not path.exists():
        return []
    types = get_type_hints(kind)
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [kind(**{name: _value(cell, types[name]) for name, cell in line.items()}) for line in lines]


def _value(cell: str, kind: type[Any]) -> Any:
    return math.nan if kind is float and not cell else kind(cell)


def write(path: Path, rows: Iterable[Any], columns: Sequence[str]) -> None:
    """Replaces a CSV file in one step, so that it is complete at any moment. Floats have six digits, NaN is empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(getattr(row, name)) for name in columns] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.tmp")
    part.write_text(text.getvalue(), encoding="utf-8")
    part.replace(path)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else f"{value:.6g}"


def grouped(rows: Iterable[RowT], *columns: str) -> dict[tuple[Any, ...], list[RowT]]:
    """The rows that agree in the given columns, by the values they agree in, in the order in which these first appear.

    >>> grouped([1 + 2j, 1 + 3j, 4 + 0j], "real")
    {(1.0,): [(1+2j), (1+3j)], (4.0,): [(4+0j)]}
    """
    found: dict[tuple[Any, ...], list[RowT]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in columns), []).append(row)
    return found


class Log(Generic[RowT]):
    """The rows of one CSV file, to which a benchmark adds as it goes and from which it resumes."""

    def __init__(self, path: Path, kind: type[RowT], columns: Sequence[str] | None = None) -> None:
        self.path = path
        self.columns = columns or columns_of(kind)
        self.rows = read(path, kind)

    def add(self, rows: Iterable[RowT]) -> None:
        self.rows += rows
        write(self.path, self.rows, self.columns)

    def grouped(self, *columns: str) -> dict[tuple[Any, ...], list[RowT]]:
        return grouped(self.rows, *columns)
