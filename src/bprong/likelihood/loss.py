"""The user's loss: as it is declared, and as the calls of its loss functions show it.

    the user's loss  =  Σ over calls of κ · mean of −log p(y_t | f_t) over targets t  +  further terms

f is the output; targets may have weights. κ, the multiple, follows from the reduction of the call and from the gradient
that the user's backward pass brings to its value. `declared.py` has what may be declared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bprong.likelihood.families import Likelihood, Undeclared, nontrivial
from bprong.likelihood.parts import is_equal, rows_of_parts
from bprong.linalg.moments import to_float64


class Kind(NamedTuple):
    """A loss of torch.

    end:      the name of the function of torch that `function` ends in
    options:  those of its function, which its module has too, in the order in which the end takes them
    nats:     what the loss of one element is as a multiple of −log p, unless it is over classes
    """

    module: type[nn.Module]
    function: Callable[..., Tensor]
    end: str
    family: type[Likelihood]
    options: tuple[str, ...]
    nats: float = 1.0


@dataclass(eq=False)
class Loss:
    """A loss of torch, or the mean of −log p over the targets that count.

    name:        as the user declared it
    likelihood:  p(y | output)
    kind:        which loss of torch it is; None: the mean of −log p
    given:       the loss module, whose calls show the targets, or the options of a loss function
    functions:   the names of torch's functions that may be this loss
    """

    name: str
    likelihood: Likelihood
    kind: Kind | None = None
    given: nn.Module | Mapping[str, Any] | None = None
    functions: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.likelihood.ignore_index = self.options.get("ignore_index", self.likelihood.ignore_index)

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, read at every use, because the user may change them or move them to a device."""
        if isinstance(self.given, Mapping):
            return dict(self.given)
        return {name: getattr(self.given, name) for name in self.kind.options} if self.kind else {}

    @property
    def is_undeclared(self) -> bool:
        """Whether no loss was declared, so that nothing is known of it."""
        return isinstance(self.likelihood, Undeclared)

    @property
    def sums(self) -> bool:
        """Whether the loss is a sum over targets."""
        return bool(self.options.get("reduction") == "sum")

    def class_dim(self, output: Tensor, loss_input: Tensor | None) -> int | None:
        """The dimension of the classes, if the output must be laid out as (B, positions, classes).

        loss_input: what the loss was given instead of the output; None: its call was not seen

        torch's functions take classes in the second dimension.
        """
        if not self.likelihood.has_classes or output.ndim < 3:
            return None
        if loss_input is None:
            is_second = output.ndim > 3
        elif loss_input.shape == output.shape:
            is_second = loss_input.stride() == output.stride()
        else:
            is_second = output.shape[1] == loss_input.shape[:2][-1] != output.shape[-1]
        if output.ndim == 3 and not is_second:
            return None
        return 1 if is_second else -1

    def mean(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean −log p of a target, weighted as in the loss; classes are in the last dimension."""
        if self.kind is None:
            return self.likelihood.total_nll(output, y) / self.likelihood.targets(output)
        options = {name: o.to(output) if isinstance(o, Tensor) else o for name, o in self.options.items()}
        options["reduction"] = "mean"
        if not self.likelihood.has_classes:
            return self.kind.function(output, y.to(output), **options) / self._of_a_mean(y)
        y = y.flatten(end_dim=output.ndim - 2)
        return self.kind.function(output.flatten(end_dim=-2), y.to(output) if y.is_floating_point() else y, **options)

    def multiple(self, y: Tensor, gradient: Tensor) -> Tensor:
        """What the user's loss is as a multiple of this mean; y: with classes in the last dimension.

        gradient: of the user's loss at the value of this loss, or at its values if it has no reduction
        """
        if self.kind is not None and not self.likelihood.has_classes:
            return (gradient * y.numel() if self.sums else gradient.sum()) * self._of_a_mean(y)
        if not (self.sums or gradient.ndim):  # without its call a loss that has no reduction is taken for a mean
            return gradient
        weights = cast(Tensor, self.likelihood.not_ignored(y))
        of_classes = self.options.get("weight")
        if of_classes is not None and not y.is_floating_point():
            weights = of_classes.to(y.device)[y.where(weights, 0)] * weights
        return (gradient.reshape(weights.shape if gradient.ndim else ()) * weights).sum()

    def _of_a_mean(self, y: Tensor) -> float | Tensor:
        """What a mean over elements is as a multiple of the mean −log p of a target."""
        weight = self.options.get("weight")
        size = cast(Kind, self.kind).nats * self.likelihood.targets(y) / y.numel()
        return size if weight is None else size * weight.mean()

    def of_rows(self, select: Callable[[Tensor], Tensor], y: Tensor) -> Loss:
        """The loss of some of the rows of its targets y, if each of their elements has a weight of its own."""
        weight = self.options.get("weight")
        if weight is None or weight.shape != y.shape or self.likelihood.has_classes:
            return self
        return replace(self, given=self.options | {"weight": select(weight)})


class Term(NamedTuple):
    """multiple · loss.mean(f, y)"""

    loss: Loss
    y: Tensor
    multiple: float


@dataclass(frozen=True)
class Targets:
    """The user's loss as a function of the output.

    terms:  of the loss, with targets that are laid out like the output
    mask:   which targets it counts, without the output's last dimension; None: nothing says that any do not
    total:  its value when it was called; NaN: its call was not seen
    """

    terms: tuple[Term, ...]
    mask: Tensor | None = None
    total: float = math.nan

    @classmethod
    def observed(cls, loss: Loss, y: Tensor) -> Targets:
        """Of targets that the user gives, for the loss that was declared."""
        return cls(
            (Term(loss, y, float(loss.multiple(y, torch.ones((), dtype=torch.float64)))),),
            loss.likelihood.not_ignored(y),
        )

    @property
    def y(self) -> Tensor:
        return self.terms[0].y

    @cached_property
    def counted(self) -> Tensor | None:
        """The mask; None: all count."""
        return nontrivial(self.mask)

    def mean(self, output: Tensor) -> float:
        """The mean −log p of a target, weighted as in the loss."""
        return float(self._mean(output.detach()))

    def value(self, output: Tensor) -> Tensor:
        """The user's loss, as far as it is of these terms."""
        return self.multiple * self._mean(output)

    def slopes(self, output: Tensor, along: Sequence[Tensor]) -> list[float]:
        """The derivatives of that mean along changes of the output."""
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            (g,) = torch.autograd.grad(self._mean(leaf), leaf)
        return [float((to_float64(g) * d).sum()) for d in along]

    @property
    def multiple(self) -> float:
        """The user's loss as a multiple of the mean −log p of a target."""
        return sum(term.multiple for term in self.terms)

    def select(self, rows: Callable[[Tensor], Tensor]) -> Targets:
        """The targets of some of the examples; rows: selects their rows of a tensor."""
        terms = [Term(loss.of_rows(rows, y), rows(y), multiple) for loss, y, multiple in self.terms]
        return Targets(tuple(terms), None if self.mask is None else rows(self.mask))

    def _mean(self, output: Tensor) -> Tensor:
        f = to_float64(output) if self.terms[0].loss.likelihood.takes_float64 else output
        f = self._part(f)
        value = f.new_zeros(())
        for loss, y, multiple in self.select(self._part).terms:
            value = value + multiple * loss.mean(f, y)
        return value / self.multiple

    def _part(self, tensor: Tensor) -> Tensor:
        """The rows of the targets that count."""
        return tensor if self.counted is None else tensor[self.counted]


@dataclass(eq=False)
class LossCall:
    """A call of a loss function.

    kind:     which loss of torch it is
    input, target, options: what it was given
    value:    what it returned, detached
    is_declared: whether it was made by the declared module
    is_whole: whether its input is the output of a model, all of it
    gradients: of the user's loss at its value, by the number of the backward pass that brought it
    gradient: the sum of those of the backward passes that count; 0: none has arrived
    """

    kind: Kind
    input: Tensor
    target: Tensor
    options: Mapping[str, Any]
    value: Tensor
    is_declared: bool = False
    is_whole: bool = False
    gradients: dict[int, Tensor] = field(default_factory=dict)
    gradient: Any = 0

    @property
    def function(self) -> str:
        """The name of the function in torch.nn.functional."""
        return self.kind.function.__name__

    def count(self, tasks: Container[int]) -> bool:
        """Sum the gradients of these backward passes; return whether there is any."""
        gradients = [gradient for task, gradient in self.gradients.items() if task in tasks]
        self.gradient = sum(gradients)
        return bool(gradients)


def loss_of_call(likelihood: Likelihood, call: LossCall, output: Tensor) -> Loss:
    """The loss that a call computes, with weights of single elements laid out like the output."""
    options = call.options
    weight = options.get("weight")
    if weight is not None and not likelihood.has_classes and call.input.numel() == output.numel():
        options = {**options, "weight": weight.expand(call.input.shape).reshape(output.shape)}
    own_index = copy.copy(likelihood)  # calls may differ in the index that they ignore
    return Loss(f"F.{call.function}", own_index, call.kind, options)


def targets_of(likelihood: Likelihood, calls: Sequence[LossCall], output: Tensor, gradient: Tensor) -> Targets | None:
    """The targets of some calls of a loss; None: these were given something other than the output.

    Each call that was given all of the output is a term. Without any, calls that were given parts of it are one term.

    output:    with classes in its last dimension
    gradient:  what the user's backward pass left there
    """
    targets = {}
    for call in calls:
        y = _laid_out(likelihood, call, output)
        if y is not None:
            targets[call] = y
    is_whole = bool(targets)
    if not is_whole:
        targets = {call: classes_last(likelihood, call.target) for call in calls}
    losses = [loss_of_call(likelihood, call, output) for call in targets]
    numbers: list[Tensor] = []
    value: Any = 0  # of the user's loss, as far as these calls make it
    for (call, y), loss in zip(targets.items(), losses, strict=True):
        numbers.append(loss.multiple(y, call.gradient))
        value = value + (call.gradient * call.value).sum()
    *multiples, total = torch.stack([*numbers, value]).tolist()
    if is_whole:
        terms = tuple(map(Term, losses, targets.values(), multiples))
        mask = reduce(_union, [_mask(term, call, output) for term, call in zip(terms, targets, strict=True)])
    else:
        inputs = [classes_last(likelihood, call.input) for call in calls]
        rows = rows_of_parts(likelihood, inputs, list(targets.values()), output, gradient)
        if rows is None:
            return None
        y, mask = rows
        terms = (Term(losses[0], y, sum(multiples)),)
    return None if sum(multiples) < 0 else Targets(terms, mask, total)  # an ascent is no loss


def classes_last(likelihood: Likelihood, given: Tensor) -> Tensor:
    """What a loss function of torch was given, with classes in the last dimension; indices of classes as they are."""
    is_moved = likelihood.has_classes and given.is_floating_point() and given.ndim > 2
    return given.movedim(1, -1) if is_moved else given


def _laid_out(likelihood: Likelihood, call: LossCall, output: Tensor) -> Tensor | None:
    """The targets of a call, laid out like the output, if it was given all of that."""
    y = likelihood.laid_out(classes_last(likelihood, call.target), output)
    if y is None or call.is_whole:
        return y
    rows = classes_last(likelihood, call.input)
    return y if rows.numel() == output.numel() and is_equal(rows.reshape(output.shape), output) else None


def _mask(term: Term, call: LossCall, output: Tensor) -> Tensor | None:
    """Which targets of a call are neither ignored nor given a weight of zero; None: nothing says that any are."""
    likelihood = term.loss.likelihood
    mask = likelihood.not_ignored(term.y)
    if call.options["reduction"] != "none":
        return mask
    reached = likelihood.reached(call.gradient.reshape(*output.shape[:-1], -1))
    return reached if mask is None else mask & reached


def _union(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Which targets either of two masks counts; None counts all."""
    return None if first is None or second is None else first | second
