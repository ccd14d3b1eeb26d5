"""Directions → parameters: many tensors moved at once, and what is asked of gradients before that."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["Moves", "as_", "decay_", "sizes_of", "times", "without_autocast"]

LONG = 2**14  # numbers of which a dot product takes less time than a norm


class Moves:
    """Steps of many tensors at once, those of one learning rate together: p ← p − η v."""

    def __init__(self) -> None:
        self._by_rate: dict[float, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, parameter: Tensor, velocity: Tensor, lr: float) -> None:
        parameters, velocities = self._by_rate.setdefault(lr, ([], []))
        parameters.append(parameter)
        velocities.append(as_(parameter, velocity))

    def make_(self) -> None:
        for lr, (parameters, velocities) in self._by_rate.items():
            torch._foreach_sub_(parameters, velocities, alpha=lr)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Entering a context takes longer than asking whether it is needed."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def sizes_of(gradients: list[Tensor]) -> list[float]:
    """Zero where a gradient is, not finite where it is not: squared norms of the long ones, by BLAS; else norms."""
    long = [g for g in gradients if g.numel() > LONG and g.is_contiguous()]
    short = [g for g in gradients if not (g.numel() > LONG and g.is_contiguous())]
    squares = [float(torch.dot(g.view(-1), g.view(-1))) for g in long]
    return squares + ([float(norm) for norm in torch._foreach_norm(short)] if short else [])


def as_(like: Tensor, values: Tensor) -> Tensor:
    return values if values.dtype == like.dtype else values.to(like.dtype)


def times(scale: float, direction: Tensor | None) -> Tensor | None:
    return direction if direction is None or scale == 1 else direction * scale


def decay_(parameter: Tensor, group: Mapping[str, Any]) -> None:
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
