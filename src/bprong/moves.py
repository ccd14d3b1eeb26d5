"""Directions → parameters, at a learning rate: the steps of SGD in whitened coordinates, in ordinary ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bprong.fallback import adam_step_
from bprong.preconditioner import Layer
from bprong.statistics import Statistics

__all__ = ["Groups", "LearningRateStep", "States", "sizes_of", "without_autocast"]

Groups = Mapping[Tensor, dict[str, Any]]  # the parameters that have a gradient, and the group of each
States = MutableMapping[Tensor, dict[str, Any]]

LONG = 2**14  # numbers of which a dot product takes less time than a norm


class LearningRateStep:
    """Makes the steps of explicit learning rates, momentum and all."""

    def __init__(self, max_step: float | None) -> None:
        self._max_step = max_step

    def step_(self, groups: Groups, states: States, statistics: Statistics) -> None:
        gradients = {p: p.grad for p in groups if p.grad is not None}
        directions = statistics.directions(gradients)
        scale = self._scale(directions, gradients, groups)
        moves = Moves()
        for layer, (d_W, d_b) in directions.items():
            _move(layer, _times(scale, d_W), _times(scale, d_b), groups, states, moves, statistics.due)
        moves.make_()
        for parameter in groups.keys() - statistics.covered:
            group, gradient = groups[parameter], parameter.grad
            assert gradient is not None
            _decay_(parameter, group)
            adam_step_(parameter, gradient, states[parameter], group["lr"])

    def _scale(self, directions: Mapping[Layer, Any], gradients: Mapping[Tensor, Tensor], groups: Groups) -> float:
        """What brings η² gᵀ F⁻¹ g, the squared length of the step in the Fisher metric, down to the bound."""
        if self._max_step is None:
            return 1.0
        squared = 0.0
        for layer, (d_W, d_b) in directions.items():
            g_W, g_b = layer.gradients(gradients)
            if g_W is not None and d_W is not None:
                squared += groups[layer.weight]["lr"] ** 2 * float((layer.centred(g_W, g_b) * d_W).sum())
            if g_b is not None and d_b is not None and layer.bias is not None:
                squared += groups[layer.bias]["lr"] ** 2 * float((g_b * d_b).sum())
        return min(1.0, self._max_step / math.sqrt(max(squared, 1e-300)))


def _move(
    layer: Layer,
    d_W: Tensor | None,
    d_b: Tensor | None,
    groups: Groups,
    states: States,
    moves: Moves,
    report: bool,
) -> None:
    """W and b by the directions given, d_b as seen from the centre c: Δb = −η_b d_b − ΔW c."""
    unit, v_W, lr = layer.unit, None, 0.0
    if d_W is not None:
        group, W = groups[layer.weight], unit.own(layer.weight)
        v_W, lr = _velocity(layer.weight, unit.own, unit.shaped(d_W), group, states), group["lr"]
        _decay_(W, group)
        moves.add(W, v_W, lr)
        if report:  # for the report; not worth its price at every step
            layer.step_norm = lr * float(v_W.norm())
    if d_b is not None and layer.bias is not None:
        group, b = groups[layer.bias], unit.vector(layer.bias)
        v_b = _velocity(layer.bias, unit.vector, d_b, group, states)
        _decay_(b, group)
        if v_W is None or layer.c is None:
            moves.add(b, v_b, group["lr"])
        elif lr == group["lr"] and v_W.ndim == 2 and not unit.one_hot:
            moves.add(b, torch.addmv(v_b, _as(v_b, v_W), _as(v_b, layer.c), alpha=-1), lr)
        else:
            moves.add(b, v_b, group["lr"])
            b.add_(unit.times(_as(b, v_W), _as(b, layer.c)), alpha=lr)


def _velocity(
    parameter: Tensor, own: Callable[[Tensor], Tensor], direction: Tensor, group: Mapping[str, Any], states: States
) -> Tensor:
    """What the parameter's own part moves by, the learning rate apart."""
    beta = group["momentum"]
    if not beta:
        return direction
    state = states[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    velocity = own(state["momentum_buffer"]).mul_(beta).add_(direction)
    return direction.add(velocity, alpha=beta) if group["nesterov"] else velocity


class Moves:
    """Steps of many tensors at once, those of one learning rate together: p ← p − η v."""

    def __init__(self) -> None:
        self._by_rate: dict[float, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, parameter: Tensor, velocity: Tensor, lr: float) -> None:
        parameters, velocities = self._by_rate.setdefault(lr, ([], []))
        parameters.append(parameter)
        velocities.append(_as(parameter, velocity))

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


def _as(like: Tensor, values: Tensor) -> Tensor:
    return values if values.dtype == like.dtype else values.to(like.dtype)


def _times(scale: float, direction: Tensor | None) -> Tensor | None:
    return direction if direction is None or scale == 1 else direction * scale


def _decay_(parameter: Tensor, group: Mapping[str, Any]) -> None:
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
