"""The step rule of lr="auto": directions, the quadratic model of the loss along them, and the rule that chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from bprong.capture.tape import Batch
from bprong.errors import warn
from bprong.likelihood.families import mixed
from bprong.likelihood.loss import Targets
from bprong.linalg.factors import Damping
from bprong.optim.auto.rule import SETTINGS, AutoRule, AutoState, Evaluation, Parts
from bprong.optim.fixed_rate import natural_damping
from bprong.optim.options import Setup
from bprong.optim.rules import (
    CHOSEN_MOMENTUM,
    Direction,
    Directions,
    Fallback,
    Gradients,
    Group,
    StepRule,
    dot,
    kept,
    note_lengths,
)
from bprong.whitening.layer import Layer, Side, SideName
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import evaluation_period

PARTS = ("whitened", "adam", "last")  # all directions that a step may have
LAST = "last_update"  # the key of Δ₀ in a parameter's state,
LAST_RATE = "last_rate"  # of the learning rate it was made at, relative to the highest of all groups,
LAST_DECAY = "last_decay"  # of what the parameter was multiplied by before,
LAST_STEP = "last_step"  # and of the number of that step


@dataclass(frozen=True)
class NaturalDirections(Directions):
    """Δ, the natural gradient with its sign reversed, and Adam's direction for parameters that no whitener covers."""

    early_steps = SETTINGS.early_refreshes

    fallback: Fallback

    @classmethod
    def of(cls, setup: Setup) -> NaturalDirections:
        return cls(Fallback())

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
        opposite = {p: -rate for p, rate in rates.items()}
        directions = {"whitened": layers.natural_gradients(gradients.values, opposite)}
        others = {p: g for p, g in gradients.values.items() if p not in directions["whitened"]}
        if others:
            directions["adam"] = self.fallback.directions(others, gradients.states, rates)
        return directions


class Automatic(StepRule):
    """Makes the steps that an `AutoRule` chooses along some directions, by a quadratic model of the loss.

    pending: Δ of the last step, if that was evaluated, for the next batch to check its slope
    """

    reads_every_batch = True

    def __init__(self, setup: Setup, kind: type[Directions]) -> None:
        self.directions = kind.of(setup)
        self.loss_model = setup.loss_model
        self.rule = AutoRule(
            damping_given=not (kind.adapts_damping and setup.has_default_damping),
            most=(setup.bound(None) or math.inf) ** 2 / 2,
            shortens=not kind.keeps_last_update,
            nll_bounded=setup.loss.likelihood.nonnegative,
        )
        self.momentum = kind.momentum
        self.early_steps = kind.early_steps
        self.early_parts = kind.early_parts
        self.pending: Direction = {}
        self._damping = kind.damping(setup)
        self._ranks = setup.ranks
        self._warned = False

    @property
    def kind(self) -> str:
        return f"{super().kind}, {self.directions.name}" if self.directions.name else super().kind

    def __str__(self) -> str:
        return f"{self.directions.name or 'natural'} steps, lr: automatic, times {self.rule.multiplier:.3g}"

    def check_group(self, group: Group) -> None:
        self.directions.check_group(group)
        group[CHOSEN_MOMENTUM] = group["momentum"]

    def damping(self, layer: Layer, side: Side) -> Damping:
        return self.rule.damping(layer, side) or self._damping[side.name]

    def report(self) -> dict[str, float | None]:
        return {
            "alpha": self.rule.coefficients.get("whitened"),
            "mu": self.rule.coefficients.get("last"),
            "lambda": self.rule.lam,
            "ratio": self.rule.ratio,
            "multiplier": self.rule.multiplier,
        }

    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        rates = dict.fromkeys(gradients.values, 0.0)
        self.directions.by_kind(gradients, layers, rates)
        _last_update_(gradients, rates, 0.0)

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        rule = self.rule
        rates = self.relative_rates(gradients)
        if not rule.multiplier:
            rule.evaluate_until = max(rule.evaluate_until, gradients.t + 2)  # evaluate the next one
            return
        last = _last_update_(gradients, rates, rule.settings.decay_rate * rule.multiplier)
        gradients = self._per_target(gradients)
        if self.pending:
            rule.update_trust(dot(gradients.values, self.pending))
        directions: dict[str, Direction] = {**self.directions.by_kind(gradients, layers, rates)}
        if gradients.t and self.directions.keeps_last_update:
            directions["last"] = last
        measured = {"whitened": directions["whitened"]}
        evaluation = None
        if rule.evaluates(gradients.t):
            measured = directions
            evaluation = self._evaluated(directions, gradients, layers)
        slopes = {name: dot(gradients.values, d) for name, d in measured.items()}
        c = rule.choose(gradients.t, slopes, evaluation)
        _update_(last, directions, c)
        updates = list(last.values())
        if gradients.noted:
            note_lengths(last, layers, dict.fromkeys(last, rule.multiplier))
        self.pending = {} if evaluation is None else directions["whitened"]
        if evaluation is None or math.isnan(evaluation.loss):
            torch._foreach_add_(list(last), updates, alpha=rule.multiplier)
            return
        torch._foreach_add_(list(last), updates)
        change = evaluation.loss_now() - evaluation.loss
        torch._foreach_sub_(list(last), updates, alpha=1 - rule.multiplier)
        if not rule.update_damping(evaluation, c, change):
            self.undo_(gradients)

    def relative_rates(self, gradients: Gradients) -> dict[Tensor, float]:
        """The learning rates, relative to the highest of them. That, relative to the whole run's, is the rule's M."""
        lrs = {}
        planned = 0.0
        for p, group in gradients.groups.items():
            lrs[p] = float(group["lr"])
            of_cycle = group["max_lr"] if "min_lr" in group else 0.0  # OneCycleLR writes both
            planned = max(planned, group.get("initial_lr", 0.0), of_cycle)
        highest = max(lrs.values())
        self.rule.relate(gradients.t, highest, float(planned))
        return {p: lr and lr / highest for p, lr in lrs.items()}

    def _per_target(self, gradients: Gradients) -> Gradients:
        """With the gradients of the mean −log p of a target."""
        if gradients.factor is None and not self._warned:
            self._warned = True
            warn(
                'lr="auto": gradients were multiplied by more than one factor between the backward pass and the step, '
                "as clip_grad_value_ does; they are used as they are"
            )
        scale = self.rule.scale * (gradients.factor or 1.0)
        if scale == 1:
            return gradients
        values = torch._foreach_div(list(gradients.values.values()), scale)
        return replace(gradients, values=dict(zip(gradients.values, values, strict=True)))

    def _evaluated(self, directions: Mapping[str, Direction], gradients: Gradients, layers: Layers) -> Evaluation:
        """The quadratic model along the directions; the first one shows what evaluations cost."""
        seed = mixed(gradients.seed, -1)  # no other purpose has it at this step,
        if self._ranks.rank:  # and no other rank
            seed = mixed(seed, self._ranks.rank)
        in_units = [layers.in_units(direction) for direction in directions.values()]
        evaluation = self.loss_model.evaluate(list(directions.values()), gradients.batches, seed, in_units)
        if self.rule.period is None:
            count = len(directions.keys() | {"last"})
            share = self.rule.settings.evaluate_share
            self.rule.period = evaluation_period(layers.values(), count, evaluation.part, share)
        return evaluation

    def reruns(self, t: int) -> bool:
        return self.rule.evaluates(t)

    # Undoing ----------------------------------------------------------------------------------------------------------

    def undo_if_blown_up_(self, gradients: Gradients) -> bool:
        """Also notes what multiple of the mean −log p of a target the user's loss is."""
        rule = self.rule
        total, scale = self._ranks.sums(totals(gradients.batches))
        if not scale:
            return False
        loss = total / scale
        scale /= self._ranks.size  # processes average their gradients
        rule.scale = 1.0 if math.isclose(scale, 1, rel_tol=1e-3) else scale  # a mean needs no division
        if math.isnan(loss):
            return False
        # While a schedule has lowered M the gain does not rise, which would undo what it is for.
        rule.note(loss, rule.settings, rule.multiplier == rule.highest_multiplier)
        if not rule.blew_up(loss):
            return False
        is_undone = self.undo_(gradients)
        if not is_undone:
            rule.first_loss = max(rule.first_loss, loss)  # it is that high without an update
        return is_undone

    def undo_(self, gradients: Gradients) -> bool:
        """Undoes the last update, if there is one; the next starts without momentum."""
        states = gradients.states
        latest = max([state.get(LAST_STEP, 0) for state in states.values()], default=0)
        updates = {p: state[LAST] for p, state in states.items() if state.get(LAST_STEP) == latest}
        if not (self.rule.multiplier and dot(updates, updates)):
            return False
        torch._foreach_sub_(list(updates), list(updates.values()), alpha=self.rule.multiplier)
        torch._foreach_div_(list(updates), [states[p][LAST_DECAY] for p in updates])
        torch._foreach_zero_(list(updates.values()))
        self.pending = {}
        self.undone_at = [*self.undone_at[-9:], gradients.t]
        self.rule.undone(gradients.t)
        return True

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        state: dict[str, Any] = {"pending": [self.pending.get(p) for p in parameters]}
        for name, owner in self._remembered():
            number = getattr(owner, name)
            state[name] = dict.fromkeys(PARTS) | number if isinstance(number, dict) else number
        return state

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        self.pending = {p: d.to(p.device) for p, d in zip(parameters, state["pending"], strict=True) if d is not None}
        for name, owner in self._remembered():
            number = state[name]
            if isinstance(number, dict):
                number = {part: x for part, x in number.items() if x is not None}
            setattr(owner, name, number)

    def _remembered(self) -> Iterator[tuple[str, object]]:
        """The name of each number that outlives a step, with the object that has it."""
        yield "everything", self.loss_model
        yield "forward_mode", self.loss_model
        for field in fields(AutoState):
            yield field.name, self.rule


def totals(batches: Sequence[Batch]) -> list[float]:
    """The user's loss, NaN if it was not seen, and what multiple of the mean −log p of a target it is."""
    total = 0.0
    scale = 0.0
    for batch in batches:
        targets = cast(Targets, batch.targets)
        total += targets.total
        scale += targets.multiple
    return [total, scale]


def _last_update_(gradients: Gradients, rates: Mapping[Tensor, float], eta: float) -> dict[Tensor, Tensor]:
    """Δ₀; and weight decay: p ← exp(−η · weight_decay) p, before evaluations, so that they need not contain it.

    A relative rate that was lowered scales Δ₀ down, as a rate does SGD's momentum; at zero nothing moves.
    """
    last = {}
    for p, rate in rates.items():
        state = gradients.states[p]
        last[p] = kept(state, LAST, p)
        before = state.get(LAST_RATE, 0.0)
        if rate < before:
            last[p].mul_(rate / before)
        decay = math.exp(-eta * rate * gradients.groups[p]["weight_decay"])
        if decay < 1:
            p.mul_(decay)
        state |= {LAST_RATE: rate, LAST_DECAY: decay, LAST_STEP: gradients.t}
    return last


def _update_(last: Direction, directions: Mapping[str, Direction], c: Parts) -> None:
    """Δ₀ ← αΔ + βΔ_Adam + μΔ₀."""
    torch._foreach_mul_(list(last.values()), c.get("last", 0.0))
    for name in ("whitened", "adam"):
        if part := directions.get(name):
            steps = [d.to(p.dtype) for p, d in part.items()]
            torch._foreach_add_([last[p] for p in part], steps, alpha=c.get(name, 0.0))
