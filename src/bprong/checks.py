"""What a user typed, checked: each error says what was given, what is required and what to do."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from bprong.convert import is_wrapper
from bprong.layers import WhitenedLayer

__all__ = [
    "averaging",
    "check_continuous",
    "check_parameters",
    "number",
    "one_of",
    "pair",
    "period",
    "positive",
    "refuse_distributed",
    "whole",
]


def period(kind: str, every: int, offset: int | None) -> tuple[int, int]:
    """(τ, c), checked; without an offset, half of the period."""
    try:
        every, offset = operator.index(every), None if offset is None else operator.index(offset)
    except TypeError:
        raise ValueError(f"{kind}_every and {kind}_offset must be whole numbers, not {every!r}, {offset!r}") from None
    if every < 1:
        raise ValueError(f"{kind}_every must be a whole number of at least 1, not {every!r}")
    offset = every // 2 if offset is None else offset
    if not 0 <= offset < every:
        raise ValueError(f"{kind}_offset must lie in 0 … {kind}_every − 1 = {every - 1}, not {offset!r}")
    return every, offset


def averaging(average: float, record_every: int | None) -> tuple[float, int | None]:
    number("average", average, 0, 1)
    if record_every is None:
        return average, None
    if average == 0:
        raise ValueError("record_every measures for a running average: give average too, e.g. average=0.9")
    return average, period("record", record_every, 0)[0]


def pair(samples: Any) -> Any:
    """(x, y) from x, or from (x, y)."""
    if samples is None or (isinstance(samples, tuple) and len(samples) == 2):
        return samples
    if isinstance(samples, tuple):
        raise ValueError(
            f"samples must be x or (x, y), not a tuple of {len(samples)}; several inputs go in ((x1, x2), y)"
        )
    return samples, None


def refuse_distributed(model: nn.Module) -> None:
    """Every process would measure its own batches and choose coordinates of its own."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several or any(is_wrapper(module) for module in model.modules()):
        raise ValueError(
            "whitening works in one process on an unwrapped model: in several, each would choose its own U, c and R"
        )


def number(kind: str, value: float, least: float, below: float = math.inf) -> float:
    """A finite number of at least `least` and less than `below`."""
    if not (isinstance(value, numbers.Real) and least <= value < below):
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise ValueError(f"{kind} must be a finite number of at least {least:g}{limit}, not {value!r}")
    return float(value)


def positive(kind: str, value: float) -> float:
    """A finite number above zero; not by the smallest float, which is zero where denormals are flushed."""
    if number(kind, value, 0) == 0:
        raise ValueError(f"{kind} must be a finite number above 0, not {value!r}")
    return float(value)


def whole(kind: str, value: int, least: int) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{kind} must be a whole number, of at least {least}, not {value!r}")
    return value


def one_of(kind: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{kind} must be one of {allowed}, not {value!r}")
    return value


def check_parameters(layers: Mapping[str, WhitenedLayer], optimizer: Optimizer) -> None:
    if not layers:
        raise ValueError("the model has no whitened layer; call bprong.whiten_(model) first")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, layer in layers.items():
        for parameter in layer.parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise ValueError(
                    f"the optimizer does not hold the parameters of layer {name!r}: it was built before whiten_, which "
                    f"gives layers new parameters, or without them. Build it after whiten_; to leave a layer "
                    f"untrained, set requires_grad_(False) on it"
                )


def check_continuous(layers: Mapping[str, WhitenedLayer], average: float) -> None:
    if average:
        raise ValueError(f'refresh="continuous" averages by its rate: leave average at 0, not {average:g}')
    for name, layer in layers.items():
        for side, blocks in (("forward", layer.forward_blocks), ("backward", layer.backward_blocks)):
            if blocks.lead or blocks.taps > 1:
                raise ValueError(
                    f"layer {name!r}: its {side} side is whitened as {blocks}, and only a side of one block can be "
                    f'whitened continuously; use refresh="periodic", or whiten_ with a larger max_dim'
                )
