"""The tensors behind lr="auto": directions, their slopes and products, the update, and the way back from a bad one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.auto import Auto, Parts
from bprong.evaluation import Evaluation, evaluated
from bprong.fallback import adam_direction
from bprong.listening import Heard
from bprong.moves import Groups, States
from bprong.preconditioner import Layer
from bprong.schedule import WhiteningWarning, mixed
from bprong.statistics import Statistics

__all__ = ["AutoStep"]

ADAM = 1e-3  # the learning rate of Adam's direction, before its coefficient
LAST, RATE = "last_update", "last_rate"  # the keys of Δ₀ in a parameter's state, and of the lr it was made at
Vector = dict[Tensor, Tensor]


class AutoStep:
    """Makes the steps that `Auto` chooses."""

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.pending: Vector = {}  # Δ of the last step, if that was evaluated, for the next batch to judge
        self._said: set[str] = set()

    def step_(self, groups: Groups, states: States, statistics: Statistics) -> None:
        auto, t = self.auto, statistics.schedule.t
        _slow_(groups, states)
        gradients = {p: _gradient(p, group) for p, group in groups.items()}
        if self.pending:
            auto.judge(_dot(gradients, self.pending) / auto.memory.scale)
        rate = max(float(group["lr"]) for group in groups.values())
        shares = {p: float(group["lr"]) / rate if rate else 1.0 for p, group in groups.items()}
        parts = self._directions(gradients, states, statistics, shares)
        slopes = {name: _dot(gradients, d) for name, d in parts.items()}
        found = self._evaluate(parts, statistics) if auto.evaluates(t) else None
        gram = _gram(parts, statistics.layers.values()) if found is not None else {}
        c = auto.choose(t, slopes, found, gram, rate)
        _update_(parts, c, groups, states)
        self.pending = parts["whitened"] if found is not None else {}
        if found is not None and found.loss is not None and not auto.learn(found, c, found.change(statistics.model)):
            self._undo_(states, groups)

    def _directions(
        self, gradients: Vector, states: States, statistics: Statistics, shares: Mapping[Tensor, float]
    ) -> dict[str, Vector]:
        """shares: of each parameter's learning rate in the largest there is, which multiplies what it is about to do"""
        whitened: Vector = {}
        for layer, (d_W, d_b) in statistics.directions(gradients).items():
            layer.ordinary(_share(d_W, layer.weight, shares), _share(d_b, layer.bias, shares), whitened)
        parts = {"whitened": whitened}
        if adam := {
            p: adam_direction(g, states[p], ADAM * shares[p]) for p, g in gradients.items() if p not in whitened
        }:
            parts["adam"] = adam
        if last := {p: states[p][LAST] for p in gradients if LAST in states[p]}:
            parts["last"] = last
        return parts

    def _evaluate(self, parts: Mapping[str, Vector], statistics: Statistics) -> Evaluation:
        auto, t = self.auto, statistics.schedule.t
        calls: list[tuple[Any, Heard | None, Tensor | None]] = [(x, None, y) for x, y, _ in statistics.observed]
        calls = calls or [(x, heard if isinstance(heard, Heard) else None, None) for x, heard in statistics.heard()]
        if not calls:
            raise RuntimeError(
                'lr="auto" has no batch to measure the step on: the model given to the optimizer was not called in '
                "training mode with gradients. Use optimizer.observe(x, y) before the step, or give a learning rate"
            )
        found = evaluated(
            statistics.model, calls, list(parts.values()), statistics.likelihood, auto.scale(),
            mixed(statistics.schedule.seed, -1), whole=t == 0, forward_mode=auto.forward_mode,
        )  # fmt: skip
        tried, auto.forward_mode = auto.forward_mode, auto.forward_mode and found.refused is None
        if found.refused is not None and tried:
            self._say(f"forward mode is not to be had, finite differences stand in for it: {found.refused}")
        if found.loss is None and auto.memory.loss is None:
            self._say(
                "the targets cannot be told from the gradient at the output, so the damping stays as it is and the "
                "loss is taken for the mean of −log p; give them, optimizer.observe(x, y)"
            )
        return found

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f'lr="auto": {message}', WhiteningWarning, stacklevel=7)

    def _undo_(self, states: States, groups: Groups) -> None:
        """Takes back an update that made things much worse; the next one starts from rest."""
        updates = {p: states[p][LAST] for p in groups if LAST in states[p]}
        torch._foreach_sub_(list(updates), list(updates.values()))
        torch._foreach_zero_(list(updates.values()))
        self.pending = {}
        self.auto.undone()

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        """Tensors and plain values only; what is pending by the parameters' order."""
        return self.auto.state_dict() | {"pending": [self.pending.get(p) for p in parameters]}

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        kept = dict(state)
        pending = zip(parameters, kept.pop("pending"), strict=True)
        self.pending = {p: d.to(p) for p, d in pending if d is not None}
        self.auto.load_state_dict(kept)


def _share(direction: Tensor | None, parameter: Tensor | None, shares: Mapping[Tensor, float]) -> Tensor | None:
    share = 1.0 if direction is None or parameter is None else shares[parameter]
    return direction if direction is None or share == 1 else direction * share


def _gradient(parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Of the loss with ½ weight_decay ‖θ‖² in it."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradient


def _slow_(groups: Groups, states: States) -> None:
    """A learning rate that came down takes the last update down with it, as it does SGD's; at zero nothing moves."""
    for p, group in groups.items():
        before, lr = states[p].get(RATE, 0.0), float(group["lr"])
        if lr < before:
            states[p][LAST].mul_(lr / before)
        states[p][RATE] = lr


def _update_(parts: Mapping[str, Vector], c: Parts, groups: Groups, states: States) -> None:
    """Δ₀ ← αΔ + βΔ_Adam + μΔ₀, θ ← θ + Δ₀."""
    for p in groups:
        states[p].setdefault(LAST, torch.zeros_like(p))
    updates = [states[p][LAST] for p in groups]
    torch._foreach_mul_(updates, c.get("last", 0.0))
    for name in ("whitened", "adam"):
        for p, d in parts.get(name, {}).items():
            states[p][LAST].add_(d if d.dtype == p.dtype else d.to(p), alpha=c[name])
    torch._foreach_add_(list(groups), updates)


def _dot(a: Vector, b: Vector) -> float:
    """The sum over all parameters that both name."""
    return sum(_inner(a[p], d) for p, d in b.items() if p in a)


def _inner(a: Tensor, b: Tensor) -> float:
    if a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous():
        return float(torch.dot(a.view(-1), b.view(-1)))
    return float((a * b).sum())


def _gram(parts: Mapping[str, Vector], layers: Iterable[Layer]) -> dict[str, Parts]:
    """Products of the directions; weights whose inputs have units of their own count in these."""
    units = {layer.weight: layer.units for layer in layers if layer.units is not None}
    found: dict[str, Parts] = {name: {} for name in parts}
    for a, own in parts.items():
        for b, other in parts.items():
            if b in found and a in found[b]:
                found[a][b] = found[b][a]
                continue
            weighted = {p: d * units[p] if p in units else d for p, d in other.items()} if units else other
            found[a][b] = _dot(own, weighted)
    return found
