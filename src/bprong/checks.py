"""Checks of what a user typed. Each error says what was given, what is required and what to do."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor


def period(kind: str, every: int, offset: int | None) -> tuple[int, int]:
    """Return the paper's τ and c as integers; the default offset is half of the period."""
    tau = integer(f"{kind}_every", every, 1)
    return tau, tau // 2 if offset is None else integer(f"{kind}_offset", offset, 0, tau)


def number(kind: str, value: float, minimum: float, below: float = math.inf) -> float:
    """Return a finite number of at least `minimum` and less than `below`; raise ValueError for anything else.

    A tensor with one number, as torch's own optimizers take it, is a number.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    _check_range(f"{kind} must be a finite number", value, isinstance(value, numbers.Real), minimum, below)
    return float(value)


def positive(kind: str, value: float) -> float:
    """Return a finite number above zero; raise ValueError for anything else."""
    if number(kind, value, 0) == 0:
        raise ValueError(f"{kind} must be a finite number above 0, not {value!r}")
    return float(value)


def integer(kind: str, value: int, minimum: int, below: float = math.inf) -> int:
    """Return a whole number of at least `minimum` and less than `below`; raise ValueError for anything else.

    numpy's integers are accepted, True and False are not.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _check_range(f"{kind} must be a whole number", value, is_whole, minimum, below)
    return int(value)


def _check_range(requirement: str, value: Any, is_number: bool, minimum: float, below: float) -> None:
    if not (is_number and minimum <= value < below):
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise ValueError(f"{requirement} of at least {minimum:g}{limit}, not {value!r}")


def one_of(kind: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return a value that is allowed; raise ValueError for any other."""
    if value not in allowed:
        raise ValueError(f"{kind} must be one of {allowed}, not {value!r}")
    return value
