"""The quadratic model of a batch: dᵢᵀ F dⱼ and slopes along a few directions, and the actual change of the loss.

Everything is per target and in nats, whatever multiple κ of −log p the user's loss is (`likelihood/loss.py`): ∇L is the
user's gradient divided by κ times the number of targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.batches import OutputGradient, Subset, copied, examples
from bprong.errors import WhiteningError
from bprong.likelihood.families import Likelihood, nontrivial
from bprong.likelihood.loss import Loss, customary_scales, loss_behind
from bprong.likelihood.loss_scale import ScaleEstimate
from bprong.linalg.moments import finite, to_float64
from bprong.optim.auto.linearized import Direction, Linearized, curvature, linearized, output_of
from bprong.optim.rules import Group
from bprong.whitening.layers import Layer

EVALUATED_PART = 8  # the quadratic model is evaluated on an eighth of a batch,
ENOUGH_EXAMPLES = 64  # or on this many examples of a small one


@dataclass(frozen=True)
class StepBatch:
    """One batch of a step.

    left:  what the user's backward pass left at the model's output; None: unknown
    y:     the targets given with x; None: not given
    """

    x: Any
    left: OutputGradient | None = None
    y: Tensor | None = None

    def targets(self, likelihood: Likelihood) -> int:
        """How many targets the loss counts, as far as is known."""
        if self.left is not None:
            rows = self.left.gradient.reshape(likelihood.targets(self.left.output), -1)
            return int(rows.any(dim=1).sum())
        if self.y is None:
            return 0
        mask = likelihood.not_ignored(self.y)
        return len(self.y) if mask is None else int(mask.sum())

    def subset(self, count: int | None = None) -> Subset:
        """A subset of `count` examples; all, if outputs or targets do not have equally many rows for each example."""
        whole = examples(self.x)
        subset = Subset(whole if count is None else count, whole)
        rows = (self.y, None if self.left is None else self.left.output)
        return subset if all(t is None or subset.divides(t) for t in rows) else Subset(whole, whole)

    def fits(self, output: Tensor, subset: Subset) -> bool:
        """Whether this can be the output on a subset, as far as its shape is known."""
        if self.left is not None:
            return output.shape == subset.rows(self.left.output).shape
        return output.ndim > 0 and (self.y is None or len(output) == len(subset.rows(self.y)))

    def loss(self, likelihood: Likelihood, scale: ScaleEstimate, count: int) -> Loss | None:
        """The user's loss, if it can be recovered: from `count` examples, if these leave no doubt, or from all."""
        if self.left is None:
            return None
        targets = self.targets(likelihood)
        subset = self.subset(count or ENOUGH_EXAMPLES)
        loss = None if subset.everything else self.loss_on(likelihood, subset)
        if loss is None or not loss.certain or bool((loss.weights > 1).any()):  # weights are 1 on average over all
            loss = self.loss_on(likelihood, self.subset())
        known = scale.settled(targets)
        if loss is not None:
            customary = customary_scales(likelihood, self.left.output, targets)
            known = scale.note(loss, targets, float(self.left.value or 0.0), customary)
        if known is not None and (loss is None or known != loss.scale):
            loss = self.loss_on(likelihood, self.subset(), known) or loss
        return loss

    def loss_on(self, likelihood: Likelihood, subset: Subset, scale: float | None = None) -> Loss | None:
        """The loss on a subset, recovered from the gradients of that subset alone."""
        assert self.left is not None
        y = None if self.y is None else subset.rows(self.y)
        return loss_behind(
            likelihood, subset.rows(self.left.output), subset.rows(self.left.gradient), y, self.left.value, scale
        )

    def loss_of(self, likelihood: Likelihood, output: Tensor, subset: Subset, loss: Loss | None) -> Loss | None:
        """The loss on the examples of an output: the user's or, if that is unknown, −log p of the targets given.

        loss: the user's loss on the subset or on all examples; None: unknown
        """
        targets = likelihood.targets(output)
        if loss is not None and len(loss.weights) < targets:  # it was recovered on a subset, and this is all
            loss = self.loss_on(likelihood, self.subset())
        if loss is not None:
            return loss.select(subset.rows) if targets < len(loss.weights) else loss
        if self.y is None:
            return None
        y = subset.rows(self.y)
        likelihood.check_targets(output, y)
        mask = likelihood.not_ignored(y)
        weights = output.new_ones(targets) if mask is None else mask.flatten().to(output)
        return Loss(likelihood, 1.0, y, to_float64(weights), certain=False)


Losses = Sequence[tuple[StepBatch, Loss | None]]


@dataclass(frozen=True)
class Evaluation:
    """The quadratic model of a step along some directions.

    Q         (k, k) dᵢᵀ F dⱼ, float64
    loss      the mean −log p of a target; None: the targets are not known
    slopes    (k,) its derivatives along the directions, on the examples that Q is of; zero if it is not known
    examples  the number of these examples
    loss_now  computes the loss again, at the current parameters, on the same examples and random numbers
    weight    of this loss in that of all batches
    refused   why forward-mode AD was unavailable; None: it was available
    undivided why the model could not be run on a subset of the batch, so that all of it was evaluated; None: it could
    """

    Q: Tensor
    loss: float | None
    slopes: Tensor
    examples: int
    loss_now: Callable[[], float] = lambda: math.nan
    weight: float = 1.0
    refused: str | None = None
    undivided: str | None = None


def evaluate(
    model: nn.Module,
    batches: Losses,
    directions: Sequence[Direction],
    likelihood: Likelihood,
    seed: int,
    *,
    everything: bool,
    forward_mode: bool,
) -> Evaluation:
    """The quadratic model on the batches of a step.

    everything: on all examples; otherwise on a subset, unless the model cannot be run on one, because states, masks or
    graphs belong to the whole batch
    """
    parts: list[Evaluation] = []
    counts = evaluated_counts([batch for batch, _ in batches], everything)
    for i, ((batch, loss), count) in enumerate(zip(batches, counts, strict=True)):
        if not count and len(batches) > 1:
            continue
        subset = batch.subset(count)
        x = copied(batch.x, subset, next(model.parameters()).dtype)
        reason = None
        try:
            found = linearized(model, x, directions, seed + i, forward_mode)
            if not subset.everything and not batch.fits(found.output, subset):
                reason = f"{subset.count} of {subset.whole} examples give the shape {tuple(found.output.shape)}"
        except Exception as error:  # a model may raise anything; it was tried without forward-mode AD too
            if subset.everything:
                raise
            reason = f"{type(error).__name__}: {str(error).split(chr(10), maxsplit=1)[0]}"
        if reason is not None:
            return replace(
                evaluate(model, batches, directions, likelihood, seed, everything=True, forward_mode=forward_mode),
                undivided=reason,
            )
        part_loss = batch.loss_of(likelihood, found.output, subset, loss)
        parts.append(_part(model, x, seed + i, found, part_loss, likelihood))
    return _merged(parts)


def _part(
    model: nn.Module, x: Any, seed: int, found: Linearized, loss: Loss | None, likelihood: Likelihood
) -> Evaluation:
    """The quadratic model on some examples x of one batch."""
    counted = None if loss is None else loss.weights != 0
    Q = curvature(model, found, likelihood, seed, nontrivial(counted)).cpu()
    if not finite(Q):
        raise WhiteningError("the model's output, or its change along the step, is not finite on this batch")
    if loss is None or counted is None:
        return Evaluation(
            Q, None, Q.new_zeros(len(Q)), examples(x), weight=likelihood.targets(found.output), refused=found.refused
        )
    return Evaluation(
        Q,
        loss.mean(found.output),
        Q.new_tensor(loss.slopes(found.output, found.along)),
        examples(x),
        lambda: loss.mean(output_of(model, x, seed)),
        weight=loss.scale * int(counted.sum()),
        refused=found.refused,
    )


def _merged(parts: Sequence[Evaluation]) -> Evaluation:
    """The quadratic model of several batches, weighted as they are in the user's loss."""
    total = sum(part.weight for part in parts)
    weighted = [(part.weight / total, part) for part in parts]
    losses = [weight * part.loss for weight, part in weighted if part.loss is not None]
    return Evaluation(
        Q=torch.stack([weight * part.Q for weight, part in weighted]).sum(dim=0),
        loss=sum(losses) if len(losses) == len(parts) else None,
        slopes=torch.stack([weight * part.slopes for weight, part in weighted]).sum(dim=0),
        examples=sum(part.examples for part in parts),
        loss_now=lambda: sum(weight * part.loss_now() for weight, part in weighted),
        refused=next((part.refused for part in parts if part.refused is not None), None),
    )


def evaluated_counts(batches: Sequence[StepBatch], everything: bool) -> list[int]:
    """On how many examples of each batch the quadratic model is evaluated: of the first ones, until they are enough.

    Never on a single one of several, because BatchNorm needs a variance.
    """
    lengths = [examples(batch.x) for batch in batches]
    total = sum(lengths)
    enough = total if everything else max(total // EVALUATED_PART, min(total, ENOUGH_EXAMPLES))
    left = [enough - before for before in accumulate(lengths, initial=0)]
    return [
        batch.subset(min(n, length)).count if n > 1 or n == length == 1 else 0
        for batch, n, length in zip(batches, left, lengths, strict=False)
    ]


def is_badly_scaled(z: Tensor, spread: float) -> bool:
    """Whether inputs (rows, d) have variances that differ by more than `spread`, and none of them is rarely active.

    Damping relative to each variance makes steps invariant to such scales; but it would let a pixel that is rarely on,
    or a unit that is nearly dead, take huge steps on the few examples that show it. Those have few rows behind their
    variance: n E[z²]² / E[z⁴] of them.

    >>> _ = torch.manual_seed(0)
    >>> z = torch.randn(100, 3)
    >>> rare = z * (torch.rand(100, 3) < 0.02)
    >>> [is_badly_scaled(x, spread=1e4) for x in (z, z * torch.tensor([1.0, 1e3, 1e-3]), rare)]
    [False, True, False]
    """
    if z.ndim != 2 or not z.is_floating_point() or len(z) < 2:
        return False
    z = to_float64(z.detach())
    squares = (z - z.mean(dim=0)).square()
    squares = squares[:, squares.any(dim=0)]  # a constant has no scale
    variances = squares.mean(dim=0)
    rows = len(z) * variances**2 / squares.square().mean(dim=0)
    return len(rows) > 0 and bool(variances.max() > spread * variances.min() and rows.min() >= max(4, len(z) / 20))


# Products of directions -----------------------------------------------------------------------------------------------


def dot(a: Direction, b: Direction) -> float:
    """The sum over all parameters that both name.

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> dot({p: torch.tensor([1.0, 2.0]), q: torch.ones(1)}, {p: torch.tensor([3.0, 4.0])})
    11.0
    """
    pairs = ((a[p], d) for p, d in b.items() if p in a)
    return sum(float(x.flatten().dot(y.flatten()) if x.dtype == y.dtype else (x * y).sum()) for x, y in pairs)


def metrics(
    directions: Mapping[str, Direction], layers: Iterable[Layer], groups: Mapping[Tensor, Group]
) -> tuple[Tensor, Tensor]:
    """Two Gram matrices (k, k) of the directions: in the damping's metric, and in that of ½ weight_decay ‖θ‖²."""
    units = {layer.weight: layer.forward.damping_units for layer in layers if layer.forward.damping_units is not None}
    decay = {p: group["weight_decay"] for p, group in groups.items() if group["weight_decay"]}
    vectors = list(directions.values())
    damped = ({p: d * units[p] if p in units else d for p, d in vector.items()} for vector in vectors)
    decayed = ({p: d * decay[p] for p, d in vector.items() if p in decay} for vector in vectors)
    return _gram(vectors, damped), _gram(vectors, decayed)


def _gram(a: Sequence[Direction], b: Iterable[Direction]) -> Tensor:
    """aᵢᵀ bⱼ, which is symmetric, so that one half is computed."""
    lower = [[dot(a[i], d) if i <= j else 0.0 for i in range(len(a))] for j, d in enumerate(b)]
    found = torch.tensor(lower, dtype=torch.float64, device="cpu")
    return found + found.tril(-1).T
