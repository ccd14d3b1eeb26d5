"""The protocol of step rules: what turns gradients into a step. And products of the directions that it may go.

A rule is given the gradients of a step and the layers with their factors. It never measures statistics, and nothing
that does knows which rule there is. A new rule is one file with a subclass of `StepRule`, which `BPRONG` makes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batch
from bprong.capture.output import Head
from bprong.checks import positive
from bprong.likelihood.families import mixed
from bprong.likelihood.loss import Loss
from bprong.linalg.factors import Damping
from bprong.linalg.moments import to_float64
from bprong.optim.fallback import States
from bprong.optim.options import Options
from bprong.parallel.processes import Ranks
from bprong.parallel.slices import is_sliced, local, summed
from bprong.whitening.layer import Layer, Side, SideName
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import EARLY_PARTS

Group = dict[str, Any]
Direction = Mapping[Tensor, Tensor]  # what each parameter moves by; others do not move


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
    batches:  those behind the gradients, with their targets, if the rule keeps every batch or statistics are due
    any_batch: whether there is one on any rank
    checked:  whether they are known to be finite; a rule that `checks` them raises NotFiniteError otherwise
    factor:   what gradients were multiplied by since the backward pass; None: they differ in it
    """

    values: dict[Tensor, Tensor]
    groups: Mapping[Tensor, Group]
    states: States
    t: int
    base_seed: int
    noted: bool
    sliced: bool = False
    batches: Sequence[Batch] = ()
    any_batch: bool = False
    checked: bool = True
    factor: float | None = 1.0

    @property
    def seed(self) -> int:
        """For random numbers of this step."""
        return mixed(self.base_seed, self.t)


class NotFiniteError(ArithmeticError):
    """A gradient may not be finite; nothing was changed."""


@dataclass(frozen=True)
class Setup:
    """What a rule is made from.

    dampings:    of the inputs and of the errors, as the user gave them; None: the default
    default_damping: of natural steps
    max_step:    the user's bound on the length of a step; "auto": the rule's default
    both_sides:  whether errors are whitened too
    """

    model: nn.Module
    loss: Loss
    head: Head
    options: Options
    dampings: Mapping[SideName, float | Damping | None]
    default_damping: Mapping[SideName, float | Damping]
    max_step: float | Literal["auto"] | None
    both_sides: bool
    ranks: Ranks

    @property
    def has_default_damping(self) -> bool:
        return all(damping is None for damping in self.dampings.values())

    def damping(self, defaults: Mapping[SideName, float | Damping] | None = None) -> dict[SideName, Damping]:
        """The damping of each side; defaults: where these are not those of natural steps."""
        by_side = dict(self.default_damping if defaults is None else defaults)
        by_side |= {name: damping for name, damping in self.dampings.items() if damping is not None}
        dampings = {name: Damping.of(damping) for name, damping in by_side.items()}
        if self.options.solver == "low-rank" and any(d.relative_to == "variance" for d in dampings.values()):
            raise ValueError('solver="low-rank" needs damping that is equal in all directions, not "variance"')
        return dampings

    def bound(self, default: float | None) -> float | None:
        """The bound on the length of a step; None: there is none."""
        if self.max_step is None or self.max_step == "auto":
            return None if self.max_step is None else default
        if isinstance(self.max_step, str):
            raise ValueError(f'max_step must be a number above 0, "auto" or None, not {self.max_step!r}')
        return positive("max_step", self.max_step)


class Directions(ABC):
    """Where an automatic step may go.

    name:               in checkpoints; empty: the paper's
    keeps_last_update:  whether the last update Δ₀ is one more direction
    momentum, early_steps, early_parts
                        see `StepRule`
    """

    name: ClassVar[str] = ""
    keeps_last_update: ClassVar[bool] = True
    momentum: ClassVar[float] = 0.0
    early_steps: ClassVar[tuple[int, ...]] = ()
    early_parts: ClassVar[tuple[int, ...]] = EARLY_PARTS

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raises ValueError if the numbers of a parameter group do not fit."""

    @abstractmethod
    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        """Creates the states of the parameters."""

    @abstractmethod
    def by_kind(
        self, gradients: Gradients, layers: Layers, rates: Mapping[Tensor, float]
    ) -> dict[str, dict[Tensor, Tensor]]:
        """The directions, of which "whitened" is always there; rates: relative to the largest lr of all groups."""


class StepRule(ABC):
    """Turns the gradients of a step into a change of the parameters.

    momentum:           its default
    early_steps:        further steps at which statistics are measured, for rules whose first steps are the largest
    early_parts:        parts of the first period after which they are measured too, of which a half is 2
    reads_every_batch:  whether the rule needs the targets of every step, not only of those with a refresh
    undoes:             whether it may undo an update
    checks:             whether `step_` raises NotFiniteError for gradients that are not `checked` and not finite
    """

    momentum: float = 0.0
    early_steps: tuple[int, ...] = ()
    early_parts: tuple[int, ...] = EARLY_PARTS
    reads_every_batch: bool = False
    undoes: bool = False
    checks: bool = False

    @property
    def kind(self) -> str:
        """The name of the rule in checkpoints; a checkpoint of another rule is refused."""
        return type(self).__name__

    def reruns(self, t: int) -> bool:
        """Whether the rule runs the model again on the batches of step t, as far as is known after the step before."""
        return False

    def check_group(self, group: Group) -> None:  # noqa: B027  # a rule may do without it
        """Raises ValueError if the rule cannot follow the numbers of a parameter group."""

    def prepare(self, gradients: Gradients, layers: Layers) -> None:  # noqa: B027  # a rule may do without states
        """Creates the states of the parameters, as the first step would, and changes nothing else."""

    @abstractmethod
    def step_(self, gradients: Gradients, layers: Layers) -> None:
        """Moves the parameters."""

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

        Under "moved" and "pending" a rule may have a flag and a tensor for each parameter.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:  # noqa: B027
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


# Products of directions -----------------------------------------------------------------------------------------------


def dot(a: Direction, b: Direction) -> float:
    """The dot product over the parameters of both, and over all slices of them; of complex ones, over both parts.

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> dot({p: torch.tensor([1.0, 2.0]), q: torch.ones(1)}, {p: torch.tensor([3.0, 4.0])})
    11.0
    """
    pairs = [(a[p], b[p]) for p in b if p in a]
    is_sharded = bool(pairs) and type(pairs[0][0]) is not Tensor and is_sliced(pairs[0][0])
    if is_sharded:
        pairs = [(local(x), local(y)) for x, y in pairs]
    total = sum(products(pairs))
    return summed(total, a.values()) if is_sharded else total


def products(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """The dot product of each pair of tensors; they are read at once."""
    scalars = []
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


def norm(values: Tensor, select: Callable[[Tensor], Tensor]) -> float:
    """The length of the part of a tensor that a layer selects; of the whole tensor, if that is sharded."""
    if local(values) is values:
        return float(select(values).norm())
    return math.sqrt(summed(float(local(values).square().sum()), [values]))


def note_lengths(steps: Direction, layers: Layers) -> None:
    """Notes how far each layer moves, for the report."""
    for layer in layers.values():
        if layer.weight in steps:
            layer.step_norm = norm(steps[layer.weight], layer.linear.own)
