"""The step rule of lr="auto": directions, their slopes and products, the update, and its undoing."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batches, examples
from bprong.capture.measure import LayerMoments
from bprong.errors import warn
from bprong.likelihood.families import Likelihood
from bprong.likelihood.loss_scale import ScaleEstimate
from bprong.linalg.damped_inverse import Damping
from bprong.optim.auto.evaluation import (
    Evaluation,
    Losses,
    StepBatch,
    dot,
    evaluate,
    evaluated_counts,
    is_badly_scaled,
    metrics,
)
from bprong.optim.auto.gradient_scale import GradientScale
from bprong.optim.auto.linearized import Direction
from bprong.optim.auto.rule import AutoRule
from bprong.optim.auto.settings import SETTINGS, AutoState, Parts
from bprong.optim.options import Options
from bprong.optim.rules import Gradients, Group, States, StepRule
from bprong.whitening.layers import Layer, Layers
from bprong.whitening.schedule import mixed
from bprong.whitening.side import Side, SideName

FALLBACK_LR = 1e-3  # the learning rate of Adam's direction, before its coefficient
FITTED = 1e-6  # mean −log p below which an unreadable gradient is rounding and not worth a warning
LAST = "last_update"  # the key of Δ₀ in a parameter's state,
LAST_LR = "last_lr"  # and of the lr it was made at


class Automatic(StepRule):
    """Makes the steps that an `AutoRule` chooses.

    pending: Δ of the last step, if that was evaluated, for the next batch to check its slope
    """

    early_steps = SETTINGS.early_steps
    exact_refreshes = len(SETTINGS.early_steps) + SETTINGS.exact_refreshes
    keeps_every_batch = True
    undoes = True

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        likelihood: Likelihood,
        options: Options,
        damping: Mapping[SideName, Damping],
        damping_given: bool = False,
        max_step: float | None = None,
    ) -> None:
        if options.fallback_rate is not None:
            raise ValueError('lr="auto" chooses how far the fallback goes; leave out fallback_rate')
        self.rule = AutoRule(
            damping_given=damping_given,
            bound=math.inf if max_step is None else max_step**2 / 2,
            nll_bounded=likelihood.nonnegative,
        )
        self.pending: Direction = {}
        self._damping = damping
        self._model = model
        self._batches = batches
        self._likelihood = likelihood
        self._fallback = options.fallback
        self._warned: set[str] = set()

    def check_group(self, group: Group) -> None:
        if group["momentum"]:
            raise ValueError(
                f'lr="auto" chooses how much of the last update to keep; leave out momentum={group["momentum"]}'
            )

    def attach(self, parameters: list[Tensor]) -> None:
        self._gradient_scale = GradientScale(parameters)

    def damping(self, layer: Layer, side: Side) -> Damping:
        return self.rule.damping(layer, side) or self._damping[side.name]

    def first_measured(self, measured: Mapping[str, LayerMoments]) -> None:
        spread = self.rule.settings.variance_spread
        self.rule.badly_scaled += [
            name for name, found in measured.items() if found.probe is not None and is_badly_scaled(found.probe, spread)
        ]

    def report(self) -> dict[str, float | None]:
        return {
            "alpha": self.rule.coefficients.get("whitened"),
            "mu": self.rule.coefficients.get("last"),
            "lambda": self.rule.lam,
            "ratio": self.rule.ratio,
        }

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        rule = self.rule
        groups = gradients.groups
        _scale_last_update_(groups, gradients.states)
        factor = self._gradient_scale.factor()
        if factor is None:
            self._warn(
                "gradients were multiplied by more than one factor between the backward pass and the step, as "
                "clip_grad_value_ does; they are used as they are"
            )
        factor = factor or 1.0
        evaluates = rule.evaluates(gradients.t)
        losses = self._losses(gradients, evaluates, factor)
        values = {p: _penalised(p, g, groups[p], rule.scale * factor) for p, g in gradients.values.items()}
        if self.pending:
            rule.update_slope_trust(dot(values, self.pending))
        lr = max(float(group["lr"]) for group in groups.values())
        relative = {p: float(group["lr"]) / lr if lr else 1.0 for p, group in groups.items()}
        directions = self._directions(values, gradients.states, layers, relative)
        slopes = {name: dot(values, d) for name, d in directions.items() if evaluates or name == "whitened"}
        found = self._evaluate(list(directions.values()), losses, gradients) if evaluates else None
        metric = None if found is None else metrics(directions, layers.values(), groups)
        c = rule.choose(gradients.t, slopes, found, metric, lr)
        _update_(directions, c, groups, gradients.states)
        for layer in layers.values() if gradients.noted else ():
            if LAST in gradients.states.get(layer.weight, {}):
                layer.step_norm = float(layer.linear.own(gradients.states[layer.weight][LAST]).norm())
        self.pending = {} if found is None else directions["whitened"]
        if found is None or found.loss is None:
            return
        if not rule.update_damping(found, c, found.loss_now() - found.loss):
            self.undo_(gradients)

    def undo_if_blown_up_(self, gradients: Gradients) -> bool:
        # At step 0 there is no update, and the scale of the loss is not known.
        return gradients.t > 0 and self.rule.blew_up(_value(self._seen()) / self.rule.scale) and self.undo_(gradients)

    def undo_(self, gradients: Gradients) -> bool:
        """Undoes the last update, if there is one; the next starts without momentum."""
        updates = {p: gradients.states[p][LAST] for p in gradients.groups if LAST in gradients.states[p]}
        if not any(bool(update.any()) for update in updates.values()):
            return False
        torch._foreach_sub_(list(updates), list(updates.values()))
        torch._foreach_zero_(list(updates.values()))
        self.pending = {}
        self.rule.undone(gradients.t)
        return True

    # The user's loss --------------------------------------------------------------------------------------------------

    def _seen(self) -> list[StepBatch]:
        """The batches since the last step: those observed, with the gradients of the calls, or those of the calls."""
        calls = self._batches.calls()
        given = self._batches.observed
        if not given:
            known = [StepBatch(x, left) for x, left in calls if left is not None]
            return known or [StepBatch(x) for x, _ in calls]
        lefts = [left for _, left in calls] if len(calls) == len(given) else [None] * len(given)
        lengths = [examples(batch.x) if batch.y is None else len(batch.y) for batch in given]
        return [
            StepBatch(batch.x, left if left is not None and len(left.output) == length else None, batch.y)
            for batch, left, length in zip(given, lefts, lengths, strict=True)
        ]

    def _losses(self, gradients: Gradients, evaluates: bool, factor: float) -> Losses:
        """The batches of a step with their losses, and the scale of the user's loss; none if that has not changed."""
        rule = self.rule
        batches = self._seen()
        targets = sum(batch.targets(self._likelihood) for batch in batches)
        estimate = ScaleEstimate(rule.scales)
        if not evaluates and (not batches or self._scale_holds(estimate, batches, targets, factor)):
            return []
        if not batches:
            raise RuntimeError(
                'lr="auto" has no batch to measure the step on: the model given to the optimizer was not called in '
                "training mode with gradients. Call optimizer.observe(x, y) before the step, or give a learning rate"
            )
        losses = [
            (batch, batch.loss(self._likelihood, estimate, count))
            for batch, count in zip(batches, evaluated_counts(batches, rule.everything), strict=True)
        ]
        self._check_scale(estimate)
        scales = [loss.scale * batch.targets(self._likelihood) for batch, loss in losses if loss is not None]
        if len(scales) == len(losses):
            rule.scale = sum(scales)
        elif targets != rule.scaled_at[1] and all(batch.y is not None for batch in batches):
            rule.scale = self._compared_scale(gradients, losses) / factor
        rule.scale = 1.0 if math.isclose(rule.scale, 1, rel_tol=1e-3) else rule.scale  # a mean needs no division
        rule.scaled_at = (len(batches), targets, _value(batches) / rule.scale, factor)
        return losses

    def _scale_holds(self, estimate: ScaleEstimate, batches: list[StepBatch], targets: int, factor: float) -> bool:
        """Whether the scale can still be what it was.

        As many batches, with as many targets if that matters; a loss of the same order, unlike after a change of its
        weight; and the same power of two in mixed precision.
        """
        count, targets_before, loss_before, factor_before = self.rule.scaled_at
        loss = _value(batches) / self.rule.scale
        jump = self._likelihood.loss_varies_by
        power = math.log2(factor / factor_before)
        rescaled = abs(power) >= 0.5 and abs(power - round(power)) <= 1e-5
        same = len(batches) == count and (targets == targets_before or estimate.is_mean)
        varies = loss_before > 0 and loss > 0 and not loss_before / jump < loss < loss_before * jump
        return same and not rescaled and not varies

    def _check_scale(self, estimate: ScaleEstimate) -> None:
        """Warns if the scale is a guess. If a guess was revised, rescales what was measured with it."""
        if estimate.doubtful:
            self._warn(
                "the loss contains more than a multiple of −log p, and that multiple is uncertain, so steps may be "
                "shorter than necessary; call optimizer.observe(x, y) before step()"
            )
        if not math.isclose(estimate.revised, 1, rel_tol=1e-2):
            self.pending = {}
            self.rule.rescale(estimate.revised)

    def _compared_scale(self, gradients: Gradients, losses: Losses) -> float:
        """The user's gradient g relative to that of the mean −log p of the targets given: ‖g‖² by its slope along g."""
        slope = float(self._evaluate([gradients.values], losses, gradients, everything=True).slopes[0])
        return dot(gradients.values, gradients.values) / slope if slope > 0 else 1.0

    # Directions and their quadratic model -----------------------------------------------------------------------------

    def _directions(
        self, values: Direction, states: States, layers: Layers, relative: Mapping[Tensor, float]
    ) -> dict[str, Direction]:
        """Δ, Adam's direction and Δ₀; relative: each parameter's lr divided by the largest lr of all groups."""
        whitened: dict[Tensor, Tensor] = {}
        for layer, steps in layers.directions(values).items():
            rates = [1.0 if p is None else relative.get(p, 1.0) for p in (layer.weight, layer.bias)]
            d_W, d_b = (d if d is None or rate == 1 else d * rate for d, rate in zip(steps, rates, strict=True))
            layer.write_step(d_W, d_b, whitened)
        adam = {
            p: self._fallback.direction(g, states[p], FALLBACK_LR * relative[p])
            for p, g in values.items()
            if p not in whitened
        }
        last = {p: states[p][LAST] for p in values if LAST in states[p]}
        found: dict[str, Direction] = {"whitened": whitened, "adam": adam, "last": last}
        return {name: direction for name, direction in found.items() if direction or name == "whitened"}

    def _evaluate(
        self, directions: list[Direction], losses: Losses, gradients: Gradients, everything: bool = False
    ) -> Evaluation:
        found = evaluate(
            self._model, losses, directions, self._likelihood, mixed(gradients.seed, -1),
            everything=everything or self.rule.everything, forward_mode=self.rule.forward_mode,
        )  # fmt: skip
        if found.undivided is not None:
            self.rule.everything = True
            self._warn(f"the model cannot be run on a subset of a batch, so all of it is evaluated: {found.undivided}")
        if found.refused is not None and self.rule.forward_mode:
            self.rule.forward_mode = False
            self._warn(f"forward-mode AD is unavailable for this model; using finite differences: {found.refused}")
        if found.loss is None and self.rule.loss is None:
            self._warn(
                "could not recover the targets from the loss gradient, so damping will not adapt and the loss is "
                "assumed to be the mean of −log p. Check that likelihood= matches your loss, or call "
                "optimizer.observe(x, y) before step()"
            )
        elif found.loss is None and self.rule.scaled_at[1] and self.rule.scaled_at[2] > FITTED:
            self._warn(
                "can no longer recover the targets from the loss gradient, so damping and the scale of the loss stay "
                "as they are; call optimizer.observe(x, y) before step()"
            )
        return found

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(f'lr="auto": {message}')

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        kept = {field.name: getattr(self.rule, field.name) for field in fields(AutoState)}
        return copy.deepcopy(kept | {"pending": [self.pending.get(p) for p in parameters]})

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        kept = copy.deepcopy(dict(state))
        pending = zip(parameters, kept.pop("pending"), strict=True)
        self.pending = {p: d.to(p.device) for p, d in pending if d is not None}
        self.rule = replace(self.rule, **kept)


def _value(batches: Iterable[StepBatch]) -> float:
    """The value of the user's loss over all batches; zero if it is not known."""
    values = [0.0 if batch.left is None else float(batch.left.value or 0.0) for batch in batches]
    return sum(values) if all(value > 0 for value in values) else 0.0


def _penalised(parameter: Tensor, gradient: Tensor, group: Group, scale: float) -> Tensor:
    """The gradient of the mean −log p and of ½ weight_decay ‖θ‖²."""
    gradient = gradient if scale == 1 else gradient / scale
    return gradient.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradient


def _scale_last_update_(groups: Mapping[Tensor, Group], states: States) -> None:
    """A learning rate that was lowered scales the last update down, as it does SGD's; at zero nothing moves."""
    for p, group in groups.items():
        before = states[p].get(LAST_LR, 0.0)
        lr = float(group["lr"])
        if lr < before:
            states[p][LAST].mul_(lr / before)
        states[p][LAST_LR] = lr


def _update_(directions: Mapping[str, Direction], c: Parts, groups: Mapping[Tensor, Group], states: States) -> None:
    """Δ₀ ← αΔ + βΔ_Adam + μΔ₀, θ ← θ + Δ₀."""
    for p in groups:
        if LAST not in states[p]:
            states[p][LAST] = torch.zeros_like(p)
    updates = [states[p][LAST] for p in groups]
    torch._foreach_mul_(updates, c.get("last", 0.0))
    for name in ("whitened", "adam"):
        for p, d in directions.get(name, {}).items():
            states[p][LAST].add_(d if d.dtype == p.dtype else d.to(p), alpha=c.get(name, 0.0))
    torch._foreach_add_(list(groups), updates)
