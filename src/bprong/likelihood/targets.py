"""What the user's loss is of a model's output, as the calls of its loss functions show it.

    the user's loss  =  Σ over calls of r · loss(f, y)  +  further terms

f is the output and r the gradient that the user's backward pass brings to the value of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bprong.likelihood.families import Likelihood, nontrivial
from bprong.likelihood.loss import Loss, loss_of_call
from bprong.linalg.moments import to_float64


class Term(NamedTuple):
    """ratio · loss(f, y)"""

    loss: Loss
    y: Tensor
    ratio: float = 1.0


@dataclass(frozen=True)
class Targets:
    """The user's loss as a function of the output.

    terms:  of the loss, with targets that are laid out like the output
    mask:   which targets it counts, without the output's last dimension; None: nothing says that any do not
    total:  its value when it was called; None: its call was not seen
    """

    terms: tuple[Term, ...]
    mask: Tensor | None = None
    total: float | None = None

    @classmethod
    def observed(cls, loss: Loss, y: Tensor) -> Targets:
        """Of targets that the user gives, for the loss that was declared."""
        return cls((Term(loss, y),), loss.likelihood.not_ignored(y))

    @property
    def y(self) -> Tensor:
        return self.terms[0].y

    @cached_property
    def counted(self) -> Tensor | None:
        """The mask; None: all count."""
        return nontrivial(self.mask)

    def mean(self, output: Tensor) -> float:
        """The mean −log p of a target, weighted as in the loss."""
        return float(self._mean(self._exact(output)))

    def slopes(self, output: Tensor, along: Sequence[Tensor]) -> list[float]:
        """The derivatives of that mean along changes of the output."""
        with torch.enable_grad():
            leaf = self._exact(output).requires_grad_()
            (g,) = torch.autograd.grad(self._mean(leaf), leaf)
        return [float((g * d).sum()) for d in along]

    @cached_property
    def multiple(self) -> float:
        """The user's loss as a multiple of the mean −log p of a target; it depends on the number of targets alone."""
        multiple = 0.0
        for loss, y, ratio in self.terms:
            # A mean does not depend on the number of targets.
            multiple += ratio * loss.multiple(self._part(y) if loss.sums else y)
        return multiple

    def select(self, rows: Callable[[Tensor], Tensor]) -> Targets:
        """The targets of some of the examples; rows: selects their rows of a tensor."""
        terms = [Term(loss.of_rows(rows, y), rows(y), ratio) for loss, y, ratio in self.terms]
        return Targets(tuple(terms), None if self.mask is None else rows(self.mask))

    def _mean(self, output: Tensor) -> Tensor:
        targets = self if self.counted is None else self.select(self._part)
        f = self._part(output)
        value = output.new_zeros(())
        for loss, y, ratio in targets.terms:
            value = value + ratio * loss.value(f, y)
        return value / self.multiple

    def _part(self, tensor: Tensor) -> Tensor:
        """The rows of the targets that count."""
        return tensor if self.counted is None else tensor[self.counted]

    def _exact(self, output: Tensor) -> Tensor:
        """The values of the output, in float64 if the likelihood accepts that."""
        likelihood = self.terms[0].loss.likelihood
        return to_float64(output.detach()) if likelihood.takes_float64 else output.detach()


@dataclass(eq=False)
class LossCall:
    """A call of a loss function.

    function: its name in torch.nn.functional
    input, target, options: what it was given
    value:    what it returned, detached
    is_declared: whether it was made by the declared module
    is_whole: whether its input is the output of a model, all of it
    arrived:  the last backward pass that reached it, and the gradient of the user's loss at its value in that pass
    gradient: this gradient, summed over the backward passes that count; None: none has arrived
    """

    function: str
    input: Tensor
    target: Tensor
    options: Mapping[str, Any]
    value: Tensor
    is_declared: bool = False
    is_whole: bool = False
    arrived: tuple[int, Tensor | None] = (-1, None)
    gradient: Tensor | None = None

    def arrive(self, task: int, gradient: Tensor) -> None:
        """Notes the gradient that a backward pass brings to the value; task: the number of that pass."""
        self.arrived = (task, gradient.detach())

    def count(self, task: int) -> None:
        """Adds the gradient of a backward pass, if that has reached this call."""
        number, gradient = self.arrived
        if number == task and gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient
            self.arrived = (task, None)


def targets_of(
    likelihood: Likelihood, calls: Sequence[LossCall], output: Tensor, gradient: Callable[[], Tensor | None]
) -> Targets | None:
    """The targets of some calls of a loss; None: these were given something other than the output.

    Calls that were given parts of the output, and none that was given all of it, are one term.

    output:    with classes in its last dimension
    gradient:  gives what the user's backward pass left there; None: not known
    """
    losses = [loss_of_call(likelihood, call.function, _options(call, output)) for call in calls]
    ratios, values = _read(calls, losses)
    terms = []
    masks: list[Tensor | None] = []
    total = 0.0
    for loss, call, ratio, value in zip(losses, calls, ratios, values, strict=True):
        y = _laid_out(likelihood, call, output)
        if y is None:  # a further term
            continue
        masks.append(_mask(loss, y, call.gradient if call.options["reduction"] == "none" else None))
        terms.append(Term(loss, y, ratio))
        total += value
    mask = _union(masks)
    if not terms:
        rows = _rows_of_calls(likelihood, calls, output, gradient)
        if rows is None:
            return None
        y, mask = rows
        multiple = 0.0
        for loss, call, ratio in zip(losses, calls, ratios, strict=True):
            multiple += ratio * loss.multiple(_target(likelihood, call))
        whole = Targets((Term(losses[0], y),), mask).multiple
        terms.append(Term(losses[0], y, multiple / (whole or 1.0)))
        total = sum(values)
    targets = Targets(tuple(terms), mask, total)
    return None if targets.multiple < 0 else targets  # an ascent is no loss


def _mask(loss: Loss, y: Tensor, weights: Tensor | None) -> Tensor | None:
    """Which targets are neither ignored nor have a weight of zero; None: nothing says that any are or have.

    weights: of single targets, where the loss function left the reduction to the user
    """
    mask = loss.likelihood.not_ignored(y)
    if weights is None:
        return mask
    if mask is None:
        return loss.likelihood.reached(weights.reshape(y.shape))
    return mask & (weights.reshape(mask.shape) != 0)


def _target(likelihood: Likelihood, call: LossCall) -> Tensor:
    """The targets of a call, with classes in the last dimension."""
    return likelihood.classes_last(call.target) if call.target.is_floating_point() else call.target


def _union(masks: Sequence[Tensor | None]) -> Tensor | None:
    """Return which targets any of the masks counts; None, which counts all, is among them or is the only one."""
    union: Tensor | None = None
    for mask in masks:
        if mask is None:
            return None
        union = mask if union is None else union | mask
    return union


def _options(call: LossCall, output: Tensor) -> Mapping[str, Any]:
    """The options of a call, with weights of single elements laid out like the output."""
    weight = call.options.get("weight")
    if weight is None or weight.ndim < call.input.ndim or call.input.numel() != output.numel():
        return call.options
    return {**call.options, "weight": weight.expand(call.input.shape).reshape(output.shape)}


def _read(calls: Sequence[LossCall], losses: Sequence[Loss]) -> tuple[list[float], list[float]]:
    """r of each call as a factor on the loss, and what its value adds to the user's loss."""
    ratios = []
    values = []
    for call, loss in zip(calls, losses, strict=True):
        gradient = torch.ones_like(call.value) if call.gradient is None else call.gradient
        values.append((gradient * call.value).sum())
        if gradient.ndim and not call.target.is_floating_point():  # the mean that they are a factor on
            counted = call.target != loss.likelihood.ignore_index
            gradient = gradient.where(counted, 0.0)
            weight = call.options.get("weight")
            if weight is not None:  # divides by the weights of these targets
                gradient = gradient * weight[call.target.where(counted, 0)]
        ratios.append(gradient.sum())
    numbers = torch.stack(ratios + values).tolist()
    return numbers[: len(calls)], numbers[len(calls) :]


def _laid_out(likelihood: Likelihood, call: LossCall, output: Tensor) -> Tensor | None:
    """The targets of a call, laid out like the output that it was given; None: it was given something else."""
    y = likelihood.laid_out(_target(likelihood, call), output)
    if y is None or call.is_whole:
        return y
    rows = likelihood.classes_last(call.input)
    return y if rows.numel() == output.numel() and _equal(rows.reshape(output.shape), output) else None


def _equal(input: Tensor, output: Tensor) -> bool:
    """Whether the values are the same, in the lower precision of both."""
    dtype = max(input.dtype, output.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(input.detach().to(dtype), output.to(dtype))


def _rows_of_calls(
    likelihood: Likelihood, calls: Sequence[LossCall], output: Tensor, gradient: Callable[[], Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """Targets for all rows of the output, and which of them the calls were given, in their order; None: others."""
    classes = output.shape[-1]
    hard = not calls[0].target.is_floating_point()
    inputs = []
    targets = []
    for call in calls:
        input = likelihood.classes_last(call.input)
        if input.shape[-1] != classes:
            return None
        inputs.append(input.reshape(-1, classes))
        targets.append(call.target.flatten() if hard else _target(likelihood, call).reshape(-1, classes))
    joined = torch.cat(inputs)
    joined_targets = torch.cat(targets)
    rows = output.reshape(-1, classes)
    mask = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    if len(joined) != len(rows):
        values = gradient()
        if values is None:
            return None
        mask = (values.reshape(-1, classes) != 0).any(dim=1)
        if hard:  # targets that are ignored have no gradient
            counted = joined_targets != likelihood.ignore_index
            joined = joined[counted]
            joined_targets = joined_targets[counted]
    order = _order(joined, rows[mask], len(calls))
    if order is None:
        return None
    y = joined_targets.new_full((len(rows), *joined_targets.shape[1:]), likelihood.ignore_index if hard else 0)
    y[mask] = joined_targets[order]
    if not hard:
        return y.reshape(output.shape), mask.reshape(output.shape[:-1])
    y = y.reshape(output.shape[:-1])
    return y, y != likelihood.ignore_index


def _order(joined: Tensor, rows: Tensor, count: int) -> Tensor | None:
    """Which rows of `count` inputs, one after the other, the rows of an output are; None: these are others."""
    if len(joined) != len(rows):
        return None
    order = torch.arange(len(rows), device=rows.device)
    stacked = order.view(count, -1).T.flatten() if len(rows) % count == 0 else order  # in dimension 1
    for candidate in (order, stacked):
        if _equal(joined[candidate], rows):
            return candidate
    return None
