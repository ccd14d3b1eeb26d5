"""The protocol of step rules: what turns gradients into a step. And what all rules share.

They share Adam's rule for parameters that no whitener covers, and products of directions, for which the host waits.

A rule is given the gradients of a step and the layers with their factors. It never measures statistics, and nothing
that does knows which rule there is. A new rule is one file with a subclass of `StepRule`, which `BPRONG` makes.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bprong.capture.tape import Batch
from bprong.likelihood.families import mixed
from bprong.linalg.factors import Damping
from bprong.linalg.moments import to_float64
from bprong.parallel.processes import is_sliced, local, summed
from bprong.whitening.layer import Layer, Side, SideName
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import EARLY_PARTS

if TYPE_CHECKING:
    from bprong.optim.options import Setup

Group = dict[str, Any]
States = MutableMapping[Tensor, dict[str, Any]]  # torch's own states of the parameters
Direction = Mapping[Tensor, Tensor]  # what each parameter moves by; others do not move
CHOSEN_MOMENTUM = "chosen_momentum"  # in the groups of automatic steps: the user's, whatever schedulers write


@dataclass
class Gradients:
    """The gradients of one step, and what the optimizer knows about their parameters.

    values:   by parameter
    groups:   the parameter group of each parameter that has a gradient
    states:   the optimizer's state
    t:        the number of steps made before
    base_seed: for `seed`
    noted:    whether lengths of steps are noted for the report, which would cost too much at every step
    sliced:   whether each process has slices of all of them
    checked:  whether they are known to be finite; a rule that `checks` them raises NotFiniteError otherwise
    batches:  those behind the gradients, with their targets, if the rule keeps every batch or statistics are due
    factor:   what gradients were multiplied by since the backward pass; None: they differ in it
    """

    values: dict[Tensor, Tensor]
    groups: Mapping[Tensor, Group]
    states: States
    t: int
    base_seed: int
    noted: bool
    sliced: bool
    checked: bool
    batches: Sequence[Batch] = ()
    factor: float | None = 1.0

    @property
    def seed(self) -> int:
        """For random numbers of this step."""
        return mixed(self.base_seed, self.t)

    def summed(self, value: float) -> float:
        """The sum over all processes of what each computed from its slices; the value, if nothing is sliced."""
        return summed(value, self.values.values()) if self.sliced else value


class NotFiniteError(ArithmeticError):
    """A gradient may not be finite; nothing was changed."""


def kept(state: dict[str, Any], key: str, like: Tensor) -> Tensor:
    """A tensor in the state of a parameter, which starts at zero; converted, if the model was."""
    tensor: Tensor = state[key].to(like.dtype) if key in state else torch.zeros_like(like)
    state[key] = tensor
    return tensor


def decay_(groups: Mapping[Tensor, Group]) -> None:
    """p ← (1 − lr · weight_decay) p."""
    for p, group in groups.items():
        if group["weight_decay"]:
            p.mul_(1 - float(group["lr"]) * group["weight_decay"])


class Defaults:
    """What a user who sets nothing else gets.

    momentum:     of the parameter groups
    early_steps:  further steps at which statistics are measured, for rules whose first steps are the largest
    early_parts:  parts of the first period after which they are measured too, of which a half is 2
    """

    momentum: float = 0.0
    early_steps: tuple[int, ...] = ()
    early_parts: tuple[int, ...] = EARLY_PARTS


class Directions(ABC, Defaults):
    """Where an automatic step may go.

    name:               in checkpoints; empty: the paper's
    keeps_last_update:  whether the last update Δ₀ is one more direction
    adapts_damping:     whether the quadratic model of the loss may choose the damping
    """

    name = ""
    keeps_last_update = True
    adapts_damping = True

    @classmethod
    @abstractmethod
    def of(cls, setup: Setup) -> Directions:
        """The directions that a user has set."""

    @classmethod
    @abstractmethod
    def damping(cls, setup: Setup) -> dict[SideName, Damping]:
        """The damping of each side that a user has set, or the default of these directions."""

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raises ValueError if the numbers of a parameter group do not fit."""

    @abstractmethod
    def by_kind(
        self, gradients: Gradients, layers: Layers, rates: Mapping[Tensor, float]
    ) -> dict[str, dict[Tensor, Tensor]]:
        """The directions, of which "whitened" is always there; rates: relative to the largest lr of all groups."""


class StepRule(ABC, Defaults):
    """Turns the gradients of a step into a change of the parameters.

    reads_every_batch:  whether the rule needs the targets of every step, not only of those with a refresh
    checks:             whether `step_` raises NotFiniteError for gradients that are not `checked` and not finite
    undone_at:          the last steps that were undone
    """

    reads_every_batch: bool = False
    checks: bool = False
    undone_at: Sequence[int] = ()

    @property
    def kind(self) -> str:
        """The name of the rule in checkpoints; a checkpoint of another rule is refused."""
        return type(self).__name__

    def reruns(self, t: int) -> bool:
        """Whether the rule runs the model again on the batches of step t, as far as is known after the step before."""
        return False

    def check_group(self, group: Group) -> None:  # a rule may do without it
        """Raises ValueError if the rule cannot follow the numbers of a parameter group."""

    @abstractmethod
    def step_(self, gradients: Gradients, layers: Layers) -> None:
        """Moves the parameters."""

    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        """Creates the states of the parameters, as a step does; gradients, rates and decay are zero."""
        self.step_(gradients, layers)

    @abstractmethod
    def damping(self, layer: Layer, side: Side) -> Damping:
        """The damping of a side for its next factor."""

    def undo_if_blown_up_(self, gradients: Gradients) -> bool:
        """Undoes the last update if the loss blew up; True if it did, which ends the step.

        Called before statistics are measured, so that nothing is measured at a bad point.
        """
        return False

    def undo_(self, gradients: Gradients) -> bool:
        """Undoes the last update, because gradients have repeatedly not been finite."""
        return False

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        """What outlives a step: numbers under keys that never change, None where there is none.

        Under "pending" a rule may have a tensor for each parameter.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        """Restores what `state_dict` returned."""

    def report(self) -> dict[str, float | None]:
        """Numbers for the optimizer's report."""
        return {}


class RuleWithDamping(StepRule):
    """A rule whose damping is given.

    damping:  of both sides
    few:      whether to damp more where few observations are behind the statistics
    """

    def __init__(self, damping: Mapping[SideName, Damping], few: bool) -> None:
        self._damping = damping
        self._few = few

    def damping(self, layer: Layer, side: Side) -> Damping:
        damping = self._damping[side.name]
        return side.damping_for_few(damping) if self._few else damping


# Parameters that no whitener covers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fallback:
    """The rule of parameters that no whitener covers: Adam (Kingma & Ba, Algorithm 1).

    Scales of normalisation layers, bare parameters and tied weights have no z and δ of their own. Adam is what most
    people would use for them, and its usual learning rate is a tenth of ours. Its states are the optimizer's.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def directions(
        self, gradients: Mapping[Tensor, Tensor], states: States, rates: Mapping[Tensor, float]
    ) -> dict[Tensor, Tensor]:
        """Return what a step adds to each parameter that has a gradient; the states advance, and are created at first.

        rates: the learning rates of the parameters, and maybe of others
        """
        if not gradients:
            return {}
        rows = []
        counts = []
        for p, gradient in gradients.items():
            state = states[p]
            if "step" not in state:
                state["step"] = torch.zeros((), device="cpu")  # as in torch's optimizers: it is read at every step
            state["step"] += 1
            counts.append(float(state["step"]))
            row = (gradient, kept(state, "exp_avg", gradient), kept(state, "exp_avg_sq", gradient))
            rows.append(map(torch.view_as_real, row) if p.is_complex() else row)  # as torch's Adam treats it
        g, m, v = zip(*rows, strict=True)
        first, second = self.betas
        torch._foreach_lerp_(m, g, 1 - first)
        torch._foreach_mul_(v, second)
        torch._foreach_addcmul_(v, g, g, value=1 - second)
        denominators = torch._foreach_div(v, [1 - second**t for t in counts])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, [max(self.eps, _vanishing(each.dtype, second)) for each in v])
        steps = torch._foreach_div(m, denominators)
        torch._foreach_mul_(steps, [-rates[p] / (1 - first**t) for p, t in zip(gradients, counts, strict=True)])
        direction = zip(gradients, steps, strict=True)
        return {p: torch.view_as_complex(step) if p.is_complex() else step for p, step in direction}


@functools.cache
def _vanishing(dtype: torch.dtype, beta: float) -> float:
    """Return the size up to which a gradient is lost in the second moment: 0.008 in float16, 10⁻²¹ in float32."""
    kind = torch.finfo(dtype)
    return math.sqrt(kind.tiny * kind.eps / (1 - beta))


# Products of directions -----------------------------------------------------------------------------------------------


def dot(a: Direction, b: Direction) -> float:
    """The dot product over the parameters of both, and over all slices of them; of complex ones, over both parts.

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> dot({p: torch.tensor([1.0, 2.0]), q: torch.ones(1)}, {p: torch.tensor([3.0, 4.0])})
    11.0
    """
    total = sum(products([(a[p], b[p]) for p in b if p in a]))
    return total if type(next(iter(a.values()), None)) is Tensor else summed(total, a.values())


def products(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """The dot product of each pair of tensors, or of this process's slices of them; they are read at once."""
    scalars = []
    if pairs and type(pairs[0][0]) is not Tensor and is_sliced(pairs[0][0]):
        pairs = [(local(x), local(y)) for x, y in pairs]
    for x, y in pairs:
        is_plain = x.dtype is y.dtype and not x.is_complex()
        scalars.append(x.flatten().dot(y.flatten()) if is_plain else _mixed(x, y))
    numbers = read(scalars)
    for i, product in enumerate(numbers):
        if not math.isfinite(product):  # the sum may have overflowed
            numbers[i] = float(_mixed(*map(to_float64, pairs[i])))
    return numbers


def _mixed(x: Tensor, y: Tensor) -> Tensor:
    """The product of tensors that are complex or differ in precision."""
    return (x.conj() * y).sum().real


def read(numbers: Sequence[Tensor]) -> list[float]:
    """The values of 0-dimensional tensors, which takes one synchronisation with their device."""
    if not numbers:
        return []
    if len({(x.dtype, x.device) for x in numbers}) > 1:
        numbers = [x.to("cpu", torch.float64) for x in numbers]
    return torch.stack(list(numbers)).tolist()


def note_lengths(steps: Direction, layers: Layers, rates: Mapping[Tensor, float]) -> None:
    """Notes how far the weight of each layer moves, for the report; rates: what steps are multiplied by."""
    for layer in layers.values():
        if layer.weight in steps:
            step = steps[layer.weight]
            rows = layer.linear.rows
            part = local(step) if rows is None or is_sliced(step) else step[rows]  # slices: of the whole parameter
            layer.step_norm = rates[layer.weight] * math.sqrt(summed(float(part.norm()) ** 2, [step]))
