"""The step rule of lr="auto": directions, their slopes and products, the update, and its undoing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bprong.capture.batches import Batch
from bprong.errors import warn
from bprong.likelihood.families import mixed
from bprong.linalg.factors import Damping
from bprong.optim.auto.evaluation import LossModel, metrics
from bprong.optim.auto.rule import AutoRule
from bprong.optim.auto.settings import SETTINGS, AutoState, Parts
from bprong.optim.fallback import Fallback
from bprong.optim.fixed_rate import natural_damping
from bprong.optim.options import Setup
from bprong.optim.rules import Direction, Directions, Gradients, Group, States, StepRule, dot, note_lengths
from bprong.parallel.processes import ALONE, Ranks
from bprong.parallel.slices import local, summed
from bprong.whitening.layer import Layer, Side, SideName
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import evaluation_period

LAST = "last_update"  # the key of Δ₀ in a parameter's state,
LAST_LR = "last_lr"  # and of the lr it was made at


@dataclass(frozen=True)
class NaturalDirections(Directions):
    """Δ, the natural gradient with its sign reversed, and Adam's direction for parameters that no whitener covers."""

    early_steps = SETTINGS.early_refreshes

    fallback: Fallback

    @classmethod
    def of(cls, setup: Setup) -> NaturalDirections:
        return cls(setup.options.fallback())

    @classmethod
    def damping(cls, setup: Setup) -> dict[SideName, Damping]:
        return natural_damping(setup)

    def check_group(self, group: Group) -> None:
        if group["momentum"]:
            raise ValueError(
                f'lr="auto" chooses how much of the last update to keep; leave out momentum={group["momentum"]}'
            )

    def by_kind(
        self, gradients: Gradients, layers: Layers, rates: Mapping[Tensor, float]
    ) -> dict[str, dict[Tensor, Tensor]]:
        natural = layers.natural_gradients(gradients.values, None if set(rates.values()) == {1.0} else rates)
        negated = torch._foreach_neg(list(natural.values())) if natural else ()
        whitened = dict(zip(natural, negated, strict=True))
        others = {p: g for p, g in gradients.values.items() if p not in whitened}
        if not others:
            return {"whitened": whitened}
        return {"whitened": whitened, "adam": self.fallback.directions(others, gradients.states, rates)}


class Automatic(StepRule):
    """Makes the steps that an `AutoRule` chooses along some directions, by a quadratic model of the loss.

    damping: of both sides, where the rule does not choose it
    pending: Δ of the last step, if that was evaluated, for the next batch to check its slope
    moved:   the parameters that the last step moved
    """

    reads_every_batch = True
    undoes = True

    def __init__(
        self,
        directions: Directions,
        loss_model: LossModel,
        rule: AutoRule,
        damping: Mapping[SideName, Damping],
        ranks: Ranks = ALONE,
    ) -> None:
        self.directions = directions
        self.loss_model = loss_model
        self.rule = rule
        self.momentum = directions.momentum
        self.early_steps = directions.early_steps
        self.early_parts = directions.early_parts
        self.pending: Direction = {}
        self.moved: list[Tensor] = []
        self._damping = damping
        self._ranks = ranks
        self._warned: set[str] = set()

    @classmethod
    def of(cls, setup: Setup, kind: type[Directions]) -> Automatic:
        likelihood = setup.loss.likelihood
        bound = setup.bound(None)
        rule = AutoRule(
            damping_given=not (kind.adapts_damping and setup.has_default_damping),
            most=math.inf if bound is None else bound**2 / 2,
            nll_bounded=likelihood.nonnegative,
        )
        loss_model = LossModel(setup.model, likelihood, setup.head, setup.ranks)
        return cls(kind.of(setup), loss_model, rule, kind.damping(setup), setup.ranks)

    @property
    def kind(self) -> str:
        return f"{super().kind}, {self.directions.name}" if self.directions.name else super().kind

    def check_group(self, group: Group) -> None:
        self.directions.check_group(group)

    def damping(self, layer: Layer, side: Side) -> Damping:
        return self.rule.damping(layer, side) or self._damping[side.name]

    def report(self) -> dict[str, float | None]:
        return {
            "alpha": self.rule.coefficients.get("whitened"),
            "mu": self.rule.coefficients.get("last"),
            "lambda": self.rule.lam,
            "ratio": self.rule.ratio,
        }

    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        self.directions.by_kind(gradients, layers, dict.fromkeys(gradients.values, 0.0))
        for p in gradients.values:
            gradients.states[p] |= {LAST: torch.zeros_like(p), LAST_LR: 0.0}

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        rule = self.rule
        groups = gradients.groups
        _scale_last_update_(groups, gradients.states)
        self._warn_of_unused(gradients)
        evaluates = rule.evaluates(gradients.t)
        values = _penalised(gradients, rule.scale * (gradients.factor or 1.0))
        if self.pending:
            rule.update_trust(dot(values, self.pending))
        lr = max([float(group["lr"]) for group in groups.values()])
        directions = self._directions(replace(gradients, values=values), layers, lr)
        slopes = {name: dot(values, d) for name, d in directions.items() if evaluates or name == "whitened"}
        evaluation = None
        metric = None
        if evaluates:
            seed = self._seed(gradients)
            evaluation = self.loss_model.evaluate(list(directions.values()), gradients.batches, seed)
            metric = metrics(directions, groups)
            if rule.period is None:
                count = len(directions.keys() | {"last"})
                rule.period = evaluation_period(layers.values(), count, evaluation.part, rule.settings.evaluate_share)
        c = rule.choose(gradients.t, slopes, evaluation, metric, lr)
        _update_(directions, c, groups, gradients.states)
        self.moved = list(groups)
        if gradients.noted:
            note_lengths({p: state[LAST] for p, state in gradients.states.items() if LAST in state}, layers)
        self.pending = {} if evaluation is None else directions["whitened"]
        if evaluation is not None and evaluation.loss is not None:
            change = evaluation.loss_now() - evaluation.loss
            if not rule.update_damping(evaluation, c, change):
                self.undo_(gradients)

    def _directions(self, gradients: Gradients, layers: Layers, lr: float) -> dict[str, Direction]:
        """The directions and Δ₀; lr: the largest of all groups."""
        relative = {p: float(group["lr"]) / lr if lr else 1.0 for p, group in gradients.groups.items()}
        by_kind: dict[str, Direction] = {**self.directions.by_kind(gradients, layers, relative)}
        if self.moved and self.directions.keeps_last_update:
            states = gradients.states
            last = {p: states[p][LAST] for p in gradients.values if LAST in states[p]}
            if last:
                by_kind["last"] = last
        return by_kind

    def _warn_of_unused(self, gradients: Gradients) -> None:
        """Warns of what was done to gradients or groups and does not act as meant."""
        if gradients.factor is None:
            self._warn(
                "gradients were multiplied by more than one factor between the backward pass and the step, as "
                "clip_grad_value_ does; they are used as they are"
            )
        if self.directions.keeps_last_update and any(group["momentum"] for group in gradients.groups.values()):
            self._warn(
                "something, such as OneCycleLR or CyclicLR, has written a momentum into the parameter groups. It is "
                "not used here, and lr multiplies the automatic step: 1 is the step itself. Give such a scheduler "
                "cycle_momentum=False and max_lr=1"
            )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(f'lr="auto": {message}')

    def reruns(self, t: int) -> bool:
        return self.rule.evaluates(t)

    def _seed(self, gradients: Gradients) -> int:
        """The seed of an evaluation, which no other purpose and no other rank has at this step."""
        seed = mixed(gradients.seed, -1)
        return mixed(seed, self._ranks.rank) if self._ranks.rank else seed

    # Undoing ----------------------------------------------------------------------------------------------------------

    def undo_if_blown_up_(self, gradients: Gradients) -> bool:
        """Also notes what multiple of the mean −log p of a target the user's loss is, if the targets are known."""
        total, scale, batches, with_targets, with_calls = self._ranks.sums(5, lambda: _totals(gradients.batches))
        if not scale or with_targets < batches:
            return False
        scale /= self._ranks.size  # processes average their gradients
        self.rule.scale = 1.0 if math.isclose(scale, 1, rel_tol=1e-3) else scale  # a mean needs no division
        if with_calls < with_targets:
            return False
        loss = total / (scale * self._ranks.size)
        if not self.rule.blew_up(loss):
            return False
        if self.undo_(gradients):
            return True
        self.rule.first_loss = max(self.rule.first_loss or 0.0, loss)  # it is that high without an update
        return False

    def undo_(self, gradients: Gradients) -> bool:
        """Undoes the last update, if there is one; the next starts without momentum."""
        updates = {p: gradients.states[p][LAST] for p in self.moved}
        if not summed(any(bool(local(update).any()) for update in updates.values()), updates.values()):
            return False
        torch._foreach_sub_(list(updates), list(updates.values()))
        torch._foreach_zero_(list(updates.values()))
        self.pending = {}
        self.rule.undone(gradients.t)
        return True

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        numbers = {field.name: getattr(self.rule, field.name) for field in fields(AutoState)}
        for name in ("coefficients", "curvature"):
            numbers[name] = {part: numbers[name].get(part) for part in ("whitened", "adam", "last")}
        numbers |= {name: getattr(self.loss_model, name) for name in ("everything", "forward_mode")}
        parameters_moved = set(self.moved)
        pending = [self.pending[p].detach().clone() if p in self.pending else None for p in parameters]
        return numbers | {"moved": [p in parameters_moved for p in parameters], "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        numbers = dict(state)
        self.loss_model.everything = numbers.pop("everything")
        self.loss_model.forward_mode = numbers.pop("forward_mode")
        pending = zip(parameters, numbers.pop("pending"), strict=True)
        self.pending = {p: d.detach().to(p.device, copy=True) for p, d in pending if d is not None}
        self.moved = [p for p, is_moved in zip(parameters, numbers.pop("moved"), strict=True) if is_moved]
        for name in ("coefficients", "curvature"):
            numbers[name] = {part: value for part, value in numbers[name].items() if value is not None}
        names = {field.name for field in fields(AutoState)}  # others are those of an earlier version
        self.rule = replace(self.rule, **{name: value for name, value in numbers.items() if name in names})


def _totals(batches: Sequence[Batch]) -> list[float]:
    """Of the batches of a rank: the user's loss, what multiple of the mean −log p of a target it is, how many batches
    there are, of how many the targets are known, and of how many the call of the loss was seen."""
    total = scale = 0.0
    with_targets = with_calls = 0
    for batch in batches:
        if batch.targets is not None:
            scale += batch.targets.multiple
            total += batch.targets.total or 0.0
            with_targets += 1
            with_calls += batch.targets.total is not None
    return [total, scale, len(batches), with_targets, with_calls]


def _penalised(gradients: Gradients, scale: float) -> dict[Tensor, Tensor]:
    """The gradients of the mean −log p and of ½ weight_decay ‖θ‖²; scale: of the user's loss relative to that mean."""
    values = gradients.values
    if scale != 1:
        values = dict(zip(values, torch._foreach_div(list(values.values()), scale), strict=True))
    decays = {p: group["weight_decay"] for p, group in gradients.groups.items() if group["weight_decay"]}
    return values | {p: values[p].add(p, alpha=decay) for p, decay in decays.items()} if decays else values


def _scale_last_update_(groups: Mapping[Tensor, Group], states: States) -> None:
    """A learning rate that was lowered scales the last update down, as it does SGD's; at zero nothing moves."""
    for p, group in groups.items():
        state = states[p]
        if LAST in state and state[LAST].dtype is not p.dtype:  # the model was converted
            state[LAST] = state[LAST].to(p.dtype)
        before = state.get(LAST_LR, 0.0)
        lr = float(group["lr"])
        if lr < before:
            state[LAST].mul_(lr / before)
        state[LAST_LR] = lr


def _update_(directions: Mapping[str, Direction], c: Parts, groups: Mapping[Tensor, Group], states: States) -> None:
    """Δ₀ ← αΔ + βΔ_Adam + μΔ₀, θ ← θ + Δ₀."""
    for p in groups:
        if LAST not in states[p]:
            states[p][LAST] = torch.zeros_like(p)
    updates = [states[p][LAST] for p in groups]
    torch._foreach_mul_(updates, c.get("last", 0.0))
    for name in ("whitened", "adam"):
        for p, d in directions.get(name, {}).items():
            states[p][LAST].add_(d.to(p.dtype), alpha=c.get(name, 0.0))
    torch._foreach_add_(list(groups), updates)
