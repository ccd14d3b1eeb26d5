"""The step rule of lr="auto": directions, their slopes and products, the update, and its undoing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batch
from bprong.capture.output import Head
from bprong.errors import warn
from bprong.likelihood.families import Likelihood
from bprong.linalg.damped_inverse import Damping
from bprong.optim.auto.evaluation import Evaluation, evaluate, metrics, over_ranks, why_undivided
from bprong.optim.auto.rule import AutoRule
from bprong.optim.auto.settings import SETTINGS, AutoState, Parts
from bprong.optim.directions import Direction, dot, norm
from bprong.optim.fallback import States
from bprong.optim.options import Options
from bprong.optim.rules import Gradients, Group, StepRule
from bprong.optim.spectral import EARLY_PARTS, SpectralDirection, check_momentum
from bprong.parallel.processes import ALONE, Ranks
from bprong.parallel.slices import gathered, local, summed, whole
from bprong.whitening.layer import Layer
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import evaluation_period, mixed
from bprong.whitening.side import Side, SideName

LAST = "last_update"  # the key of Δ₀ in a parameter's state,
LAST_LR = "last_lr"  # and of the lr it was made at


class Automatic(StepRule):
    """Makes the steps that an `AutoRule` chooses.

    pending: Δ of the last step, if that was evaluated, for the next batch to check its slope
    moved:   the parameters that the last step moved
    """

    early_steps = SETTINGS.early_refreshes
    reads_every_batch = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        options: Options,
        damping: Mapping[SideName, Damping],
        damping_given: bool = False,
        max_step: float | None = None,
        head: Head | None = None,
        spectral: SpectralDirection | None = None,
        ranks: Ranks = ALONE,
        sums: bool = False,
    ) -> None:
        self.rule = AutoRule(
            damping_given=damping_given,
            most=math.inf if max_step is None else max_step**2 / 2,
            nll_bounded=likelihood.nonnegative,
        )
        self.pending: Direction = {}
        self.moved: list[Tensor] = []
        self._damping = damping
        self._model = model
        self._likelihood = likelihood
        self._head = head
        self._fallback = options.fallback()
        self._spectral = spectral
        self._ranks = ranks
        self._sums = sums  # the loss is a sum, whose scale changes with the number of targets
        if spectral is not None:
            self.early_steps = ()
            self.early_parts = EARLY_PARTS
        self._warned: set[str] = set()
        self._is_divisible = False  # not known yet

    @property
    def kind(self) -> str:
        return super().kind if self._spectral is None else f"{super().kind}, spectral"

    def check_group(self, group: Group) -> None:
        if self._spectral is not None:
            check_momentum(group)
        elif group["momentum"]:
            raise ValueError(
                f'lr="auto" chooses how much of the last update to keep; leave out momentum={group["momentum"]}'
            )

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
        if self._spectral is not None:
            self._spectral.prepare(gradients, layers)
        covered = layers.parameters
        for p, g in gradients.values.items():
            if self._spectral is None and p not in covered:
                self._fallback.prepare(g, gradients.states[p])
            gradients.states[p] |= {LAST: torch.zeros_like(p), LAST_LR: 0.0}

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        rule = self.rule
        groups = gradients.groups
        _scale_last_update_(groups, gradients.states)
        self._warn_of_unused(gradients)
        evaluates = rule.evaluates(gradients.t)
        scale = rule.scale * (gradients.factor or 1.0)
        values = gradients.values
        if scale != 1 or any(group["weight_decay"] for group in groups.values()):
            values = {p: _penalised(p, g, groups[p], scale) for p, g in values.items()}
        if self.pending:
            rule.update_trust(dot(values, self.pending))
        lr = max(float(group["lr"]) for group in groups.values())
        relative = {p: float(group["lr"]) / lr if lr else 1.0 for p, group in groups.items()}
        directions = self._directions(replace(gradients, values=values), layers, relative)
        slopes = {name: dot(values, d) for name, d in directions.items() if evaluates or name == "whitened"}
        evaluation = self._evaluate(list(directions.values()), gradients) if evaluates else None
        metric = None if evaluation is None else metrics(directions, groups)
        if evaluation is not None and rule.period is None:
            count = len(directions.keys() | {"last"})
            rule.period = evaluation_period(layers.values(), count, evaluation.part, rule.settings.evaluate_share)
        c = rule.choose(gradients.t, slopes, evaluation, metric, lr)
        _update_(directions, c, groups, gradients.states)
        self.moved = list(groups)
        if self._ranks.size > 1:
            rule.promised = dot(values, {p: gradients.states[p][LAST] for p in self.moved})
        for layer in layers.values() if gradients.noted else ():
            if LAST in gradients.states.get(layer.weight, {}):
                layer.step_norm = norm(gradients.states[layer.weight][LAST], layer.linear.own)
        self.pending = {} if evaluation is None else directions["whitened"]
        if evaluation is None or evaluation.loss is None:
            return
        with whole(self._model):
            loss_now = evaluation.loss_now()
        if not rule.update_damping(evaluation, c, loss_now - evaluation.loss):
            self.undo_(gradients)

    def _warn_of_unused(self, gradients: Gradients) -> None:
        """Warns of what was done to gradients or groups and does not act as meant."""
        if gradients.factor is None:
            self._warn(
                "gradients were multiplied by more than one factor between the backward pass and the step, as "
                "clip_grad_value_ does; they are used as they are"
            )
        if self._spectral is None and any(group["momentum"] for group in gradients.groups.values()):
            self._warn(
                "something, such as OneCycleLR or CyclicLR, has written a momentum into the parameter groups. It is "
                "not used here, and lr multiplies the automatic step: 1 is the step itself. Give such a scheduler "
                "cycle_momentum=False and max_lr=1"
            )

    def reruns(self, t: int) -> bool:
        return self.rule.evaluates(t)

    def communicates(self, gradients: Gradients) -> bool:
        """At evaluations, at steps that may have to be undone, and at all steps if the loss is a sum.

        Gradients are the same on all ranks, so that all agree.
        """
        return self.rule.evaluates(gradients.t) or self._sums or self._slope_along_last(gradients) > -self.rule.promised

    def _slope_along_last(self, gradients: Gradients) -> float:
        """The slope of the mean −log p along the last update, by the present gradients."""
        last = {p: gradients.states[p][LAST] for p in self.moved if p in gradients.values}
        return dot(gradients.values, last) / (self.rule.scale * (gradients.factor or 1.0))

    def undo_if_blown_up_(self, gradients: Gradients) -> bool:
        """Also notes what multiple of the mean −log p of a target the user's loss is, if the targets are known."""
        if self._ranks.size > 1 and not self.communicates(gradients):
            return False
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

    def _seed(self, gradients: Gradients, purpose: int) -> int:
        """A seed that no other purpose and no other rank has at this step."""
        seed = mixed(gradients.seed, purpose)
        return mixed(seed, self._ranks.rank) if self._ranks.rank else seed

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

    # Directions and their quadratic model -----------------------------------------------------------------------------

    def _directions(
        self, gradients: Gradients, layers: Layers, relative: Mapping[Tensor, float]
    ) -> dict[str, Direction]:
        """Δ, Adam's direction and Δ₀; relative: each parameter's lr divided by the largest lr of all groups.

        A spectral direction has Adam's in it, and an average of gradients instead of Δ₀.
        """
        if self._spectral is not None:
            return {"whitened": self._spectral.steps(gradients, layers, relative)}
        values = gradients.values
        states = gradients.states
        whitened = layers.steps(values, relative)
        if whitened and set(relative.values()) == {1.0}:
            whitened = dict(zip(whitened, torch._foreach_neg(list(whitened.values())), strict=True))
        else:
            units = layers.units(relative)
            whitened = {p: d * -units[p] for p, d in whitened.items()}
        others = {p: g for p, g in values.items() if p not in whitened}
        adam = self._fallback.directions(others, states, relative)
        last = {p: states[p][LAST] for p in values if LAST in states[p] and self.moved}
        by_kind: dict[str, Direction] = {"whitened": whitened, "adam": adam, "last": last}
        return {name: direction for name, direction in by_kind.items() if direction or name == "whitened"}

    def _evaluate(self, directions: list[Direction], gradients: Gradients) -> Evaluation:
        with whole(self._model) as parameters:
            in_parameters = [self._of(parameters, direction) for direction in directions]
            evaluation = over_ranks(
                self._ranks, len(in_parameters), lambda: self._evaluate_own(in_parameters, gradients)
            )
        if evaluation.undivided is not None:
            self.rule.everything = True
            self._warn(
                f"the model cannot be run on a subset of a batch, so all of it is evaluated: {evaluation.undivided}"
            )
        if evaluation.refused is not None and self.rule.forward_mode:
            self.rule.forward_mode = False
            self._warn(f"forward-mode AD is unavailable for this model; using finite differences: {evaluation.refused}")
        if evaluation.loss is None and any(batch.targets is None for batch in gradients.batches):
            self._warn(
                "the targets are not known, so damping will not adapt. Declare the loss module that you call, or call "
                "optimizer.observe(x, y) before step()"
            )
        return evaluation

    def _of(self, parameters: Mapping[Tensor, Tensor], direction: Direction) -> Direction:
        """The direction in the whole parameters of a sharded model; without any, as it is."""
        if not parameters:
            return direction
        return {parameters[p]: d for p, d in gathered(direction).items()}

    def _evaluate_own(self, directions: list[Direction], gradients: Gradients) -> Evaluation | None:
        """The quadratic model of this rank's batches; None if it has none."""
        if not gradients.batches:
            return None
        ranks = self._ranks.size
        undivided = None
        if not self.rule.everything and not self._is_divisible:
            undivided = why_undivided(self._model, gradients.batches, self._likelihood, self._head, ranks)
            self._is_divisible = undivided is None
        everything = self.rule.everything or undivided is not None
        evaluation = evaluate(
            self._model, gradients.batches, directions, self._likelihood, self._seed(gradients, -1),
            everything=everything, forward_mode=self.rule.forward_mode, head=self._head, ranks=ranks,
        )  # fmt: skip
        return replace(evaluation, undivided=undivided or evaluation.undivided)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(f'lr="auto": {message}')

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        numbers = {field.name: getattr(self.rule, field.name) for field in fields(AutoState)}
        for name in ("coefficients", "curvature"):
            numbers[name] = {part: numbers[name].get(part) for part in ("whitened", "adam", "last")}
        parameters_moved = set(self.moved)
        pending = [self.pending[p].detach().clone() if p in self.pending else None for p in parameters]
        return numbers | {"moved": [p in parameters_moved for p in parameters], "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        numbers = {name: value for name, value in state.items() if name not in ("moved", "pending")}
        for name in ("coefficients", "curvature"):
            numbers[name] = {part: value for part, value in numbers[name].items() if value is not None}
        pending = zip(parameters, state["pending"], strict=True)
        self.moved = [p for p, moved in zip(parameters, state["moved"], strict=True) if moved]
        self.pending = {p: d.detach().to(p.device, copy=True) for p, d in pending if d is not None}
        self.rule = replace(self.rule, **numbers)


def _totals(batches: Sequence[Batch]) -> list[float]:
    """Of the batches of a rank: the user's loss, what multiple of the mean −log p of a target it is, how many batches
    there are, of how many the targets are known, and of how many the call of the loss was seen."""
    targets_of_batches = [batch.targets for batch in batches if batch.targets is not None]
    totals = [targets.total for targets in targets_of_batches if targets.total is not None]
    scale = sum(targets.multiple for targets in targets_of_batches)
    return [sum(totals), scale, len(batches), len(targets_of_batches), len(totals)]


def _penalised(parameter: Tensor, gradient: Tensor, group: Group, scale: float) -> Tensor:
    """The gradient of the mean −log p and of ½ weight_decay ‖θ‖²."""
    gradient = gradient if scale == 1 else gradient / scale
    return gradient.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradient


def _scale_last_update_(groups: Mapping[Tensor, Group], states: States) -> None:
    """A learning rate that was lowered scales the last update down, as it does SGD's; at zero nothing moves."""
    for p, group in groups.items():
        if LAST in states[p] and states[p][LAST].dtype is not p.dtype:  # the model was converted
            states[p][LAST] = states[p][LAST].to(p.dtype)
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
            states[p][LAST].add_(d.to(p.dtype), alpha=c.get(name, 0.0))
    torch._foreach_add_(list(groups), updates)
