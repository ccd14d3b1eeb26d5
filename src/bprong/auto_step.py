"""The tensors behind lr="auto": directions, their slopes and products, the update, and the way back from a bad one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.auto import Auto, Parts
from bprong.cut import examples
from bprong.evaluation import ENOUGH, Call, Evaluation, Scale, evaluated, shares
from bprong.fallback import adam_direction
from bprong.likelihood import Gaussian
from bprong.listening import Heard
from bprong.moves import Groups, States
from bprong.rescaled import Rescaled, watched
from bprong.schedule import WhiteningWarning, mixed
from bprong.statistics import Statistics
from bprong.user_loss import Loss
from bprong.vectors import dot, metric

__all__ = ["AutoStep"]

ADAM = 1e-3  # the learning rate of Adam's direction, before its coefficient
JUMP = 2.0  # times: a loss that is so much more or less than the last may be another multiple of −log p
REACHED = 1e-6  # of −log p: below, a gradient that tells no targets is rounding
LAST, RATE = "last_update", "last_rate"  # the keys of Δ₀ in a parameter's state, and of the lr it was made at
Vector = dict[Tensor, Tensor]
Calls = list[tuple[Call, Loss | None]]


class AutoStep:
    """Makes the steps that `Auto` chooses."""

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.whole = False  # whether batches cannot be cut, and all of each is evaluated
        self.pending: Vector = {}  # Δ of the last step, if that was evaluated, for the next batch to judge
        self._said: set[str] = set()
        self._told = (0, 0.0, 1.0)  # the calls behind the scale, their loss by it, and by what .grad was multiplied
        self._watched: list[Tensor] = []
        self._rescaled = Rescaled()

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """Looks at some of these to find out whether gradients are clipped or unscaled."""
        self._watched = watched(parameters)
        self._rescaled.attach(self._watched, self)

    def step_(self, groups: Groups, states: States, statistics: Statistics) -> None:
        auto, t = self.auto, statistics.schedule.t
        _slow_(groups, states)
        factor = self._factor()
        calls = self._calls(groups, statistics, factor)
        scale = auto.memory.scale * factor
        gradients = {p: _gradient(p, group, scale) for p, group in groups.items()}
        if self.pending:
            auto.judge(dot(gradients, self.pending))
        rate = max(float(group["lr"]) for group in groups.values())
        shares = {p: float(group["lr"]) / rate if rate else 1.0 for p, group in groups.items()}
        parts = self._directions(gradients, states, statistics, shares)
        evaluates = auto.evaluates(t)
        slopes = {name: dot(gradients, d) for name, d in parts.items() if evaluates or name == "whitened"}
        found = self._evaluate(parts, calls, statistics) if evaluates else None
        products = None if found is None else metric(parts, statistics.layers.values(), groups)
        c = auto.choose(t, slopes, found, products, rate)
        _update_(parts, c, groups, states)
        if statistics.due:  # for the report; not worth its price at every step
            for layer in statistics.layers.values():
                if (last := states.get(layer.weight, {}).get(LAST)) is not None:
                    layer.step_norm = float(layer.unit.own(last).norm())
        self.pending = parts["whitened"] if found is not None else {}
        if found is not None and found.loss is not None and not auto.learn(found, c, found.change(statistics.model)):
            self.undo_(groups, states, t)

    def takes_back_(self, groups: Groups, states: States, statistics: Statistics) -> bool:
        """Whether the last update has led astray, and is no more; it is judged before anything is measured there."""
        if statistics.schedule.t == 0:  # nothing was made, and the loss's scale is not known
            return False
        loss = _value(_seen(statistics)) / self.auto.memory.scale
        return self.auto.astray(loss) and self.undo_(groups, states, statistics.schedule.t)

    def _factor(self) -> float:
        """What gradients were multiplied by since the backward pass."""
        factor = self._rescaled.factor(self._watched)
        if factor is None:
            self._say(
                "gradients were multiplied by more than one factor between the backward pass and the step, as by "
                "clip_grad_value_: they are taken as they are"
            )
        return 1.0 if factor is None else factor

    def _calls(self, groups: Groups, statistics: Statistics, factor: float) -> Calls:
        """The calls of a step with their losses, and the scale of the user's gradient; unless both are as before."""
        auto, m, likelihood = self.auto, self.auto.memory, statistics.likelihood
        evaluates, calls = auto.evaluates(statistics.schedule.t), _seen(statistics)
        jump = JUMP if isinstance(likelihood, Gaussian) else JUMP**3  # by which batches of classes differ anyway
        targets = sum(call.targets(likelihood) for call in calls)
        if not evaluates and (not calls or self._as_before(calls, targets, factor, jump)):
            return []
        if not calls:
            raise RuntimeError(
                'lr="auto" has no batch to measure the step on: the model given to the optimizer was not called in '
                "training mode with gradients. Use optimizer.observe(x, y) before the step, or give a learning rate"
            )
        counts, kappa = shares(calls, self.whole), auto.scale()
        told = [
            (call, call.loss(likelihood, kappa, count or ENOUGH)) for call, count in zip(calls, counts, strict=True)
        ]
        self._judge_scale(kappa)
        scales = [loss.scale * call.targets(likelihood) for call, loss in told if loss is not None]
        if len(scales) == len(told):
            m.scale = sum(scales)
        elif targets != m.targets and all(call.y is not None for call in calls):
            m.scale = _compared(groups, told, statistics, auto.forward_mode) / factor
        m.scale = 1.0 if math.isclose(m.scale, 1, rel_tol=1e-3) else m.scale  # means need no division
        m.targets, self._told = targets, (len(calls), _value(calls) / m.scale, factor)
        return told

    def _judge_scale(self, kappa: Scale) -> None:
        """Says that κ is a guess. Of one that was, and has been corrected, no comparison of slopes is left; squares
        found with it were off by its square."""
        m = self.auto.memory
        if kappa.doubtful:
            self._say(
                "there is more in the loss than a multiple of −log p, which cannot be told for certain, so steps may "
                "be shorter than need be; give the targets, optimizer.observe(x, y)"
            )
        if not math.isclose(kappa.revised, 1, rel_tol=1e-2):
            self.pending, m.slope = {}, m.slope * kappa.revised
            m.loss = None if m.loss is None else m.loss * kappa.revised**2

    def _as_before(self, calls: Collection[Call], targets: int, factor: float, jump: float) -> bool:
        """Whether the scale can still be what it was: as many calls, with as many targets if that matters, a loss that
        is not another one by far, as when its weight has changed, and the same power of two in mixed precision."""
        m, (number, loss, before) = self.auto.memory, self._told
        now, power = _value(calls) / m.scale, math.log2(factor / before)
        same = len(calls) == number and (targets == m.targets or self.auto.scale().is_mean)
        same = same and (abs(power) < 0.5 or abs(power - round(power)) > 1e-5)
        return same and (loss == 0 or now == 0 or loss / jump < now < loss * jump)

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

    def _evaluate(self, parts: Mapping[str, Vector], calls: Calls, statistics: Statistics) -> Evaluation:
        auto = self.auto
        found = evaluated(
            statistics.model, calls, list(parts.values()), statistics.likelihood, mixed(statistics.schedule.seed, -1),
            whole=self.whole, forward_mode=auto.forward_mode,
        )  # fmt: skip
        if found.uncut is not None:
            self.whole = True
            self._say(f"the model takes no part of a batch, so that all of it is evaluated: {found.uncut}")
        tried, auto.forward_mode = auto.forward_mode, auto.forward_mode and found.refused is None
        if found.refused is not None and tried:
            self._say(f"forward mode is not to be had, finite differences stand in for it: {found.refused}")
        if found.loss is None:
            self._lost(calls)
        return found

    def _lost(self, calls: Calls) -> None:
        """Says that the targets are not known, unless that is because they are reached."""
        m = self.auto.memory
        m.ratio = None
        if m.loss is None:
            self._say(
                "the targets cannot be told from the gradient at the output, so the damping stays as it is and the "
                "loss is taken for the mean of −log p; give them, optimizer.observe(x, y)"
            )
        elif m.targets and _value([call for call, _ in calls]) > REACHED * m.scale:
            self._say(
                "the targets can no longer be told from the gradient at the output, so the damping and the loss's "
                "multiple of −log p stay as they are; give them, optimizer.observe(x, y)"
            )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f'lr="auto": {message}', WhiteningWarning, stacklevel=7)

    def undo_(self, groups: Groups, states: States, t: int) -> bool:
        """Takes back the last update, if there is one; the next starts from rest."""
        updates = {p: states[p][LAST] for p in groups if LAST in states[p]}
        if not any(bool(update.any()) for update in updates.values()):
            return False
        torch._foreach_sub_(list(updates), list(updates.values()))
        torch._foreach_zero_(list(updates.values()))
        self.pending = {}
        self.auto.undone(t)
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_rescaled"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _rescaled=Rescaled())
        self._rescaled.attach(self._watched, self)

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        """Tensors and plain values only; what is pending by the parameters' order."""
        kept = {"pending": [self.pending.get(p) for p in parameters], "told": list(self._told), "whole": self.whole}
        return self.auto.state_dict() | kept

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        kept = dict(state)
        pending, self.whole = zip(parameters, kept.pop("pending"), strict=True), kept.pop("whole", False)
        self.pending = {p: d.to(p.device) for p, d in pending if d is not None}
        calls, loss, factor = kept.pop("told")
        self._told = (calls, loss, factor)
        self.auto.load_state_dict(kept)


def _value(calls: Iterable[Call]) -> float:
    """The user's loss over all calls; zero where it is not known."""
    values = [0.0 if call.heard is None or call.heard.value is None else float(call.heard.value) for call in calls]
    return sum(values) if all(value > 0 for value in values) else 0.0


def _share(direction: Tensor | None, parameter: Tensor | None, shares: Mapping[Tensor, float]) -> Tensor | None:
    share = 1.0 if direction is None or parameter is None else shares[parameter]
    return direction if direction is None or share == 1 else direction * share


def _gradient(parameter: Tensor, group: Mapping[str, Any], scale: float) -> Tensor:
    """Of the mean −log p and ½ weight_decay ‖θ‖² beside it."""
    gradient = parameter.grad
    assert gradient is not None
    gradient = gradient if scale == 1 else gradient / scale
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
        if LAST not in states[p]:
            states[p][LAST] = torch.zeros_like(p)
    updates = [states[p][LAST] for p in groups]
    torch._foreach_mul_(updates, c.get("last", 0.0))
    for name in ("whitened", "adam"):
        for p, d in parts.get(name, {}).items():
            states[p][LAST].add_(d if d.dtype == p.dtype else d.to(p), alpha=c.get(name, 0.0))
    torch._foreach_add_(list(groups), updates)


def _seen(statistics: Statistics) -> list[Call]:
    """The calls since the last step: those given, with what was heard of them, or those heard of."""
    heard = [(x, read if isinstance(read, Heard) else None) for x, read in statistics.heard()]
    if given := statistics.observed:
        reads = [read for _, read in heard] if len(heard) == len(given) else [None] * len(given)
        reads = [
            r if r is not None and len(r.output) == (examples(x) if y is None else len(y)) else None
            for r, (x, y, _) in zip(reads, given, strict=True)
        ]
        return [Call(x, read, y) for (x, y, _), read in zip(given, reads, strict=True)]
    return [Call(x, read, None) for x, read in heard if read is not None] or [Call(x, None, None) for x, _ in heard]


def _compared(groups: Groups, calls: Calls, statistics: Statistics, forward_mode: bool) -> float:
    """The user's gradient g by that of the mean −log p of the targets given: ‖g‖² by the latter's slope along g."""
    g = {p: p.grad for p in groups if p.grad is not None}
    seed = mixed(statistics.schedule.seed, -1)
    found = evaluated(statistics.model, calls, [g], statistics.likelihood, seed, whole=True, forward_mode=forward_mode)
    slope = 0.0 if found.slopes is None else float(found.slopes[0])
    return dot(g, g) / slope if slope > 0 else 1.0
