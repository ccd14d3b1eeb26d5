"""The quadratic model of a batch: dᵢᵀ F dⱼ and slopes along a few directions, and the actual change of the loss.

Everything is per target and in nats, whatever multiple of the mean −log p the user's loss is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batch, Subset, copied, examples
from bprong.errors import WhiteningError
from bprong.likelihood.families import Likelihood, nontrivial
from bprong.linalg.moments import finite, to_float64
from bprong.optim.auto.linearized import Direction, Linearized, curvature, linearized, output_of
from bprong.optim.auto.settings import SETTINGS
from bprong.optim.rules import Group
from bprong.whitening.layers import Layer


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
    batches: Sequence[Batch],
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
    for i, (batch, count) in enumerate(zip(batches, evaluated_counts(batches, everything), strict=True)):
        if not count and len(batches) > 1:
            continue
        subset = batch.subset(count)
        x = copied(batch.x, subset, next(model.parameters()).dtype)
        reason = None
        try:
            found = linearized(model, x, directions, seed + i, forward_mode, batch.class_dim)
            if not subset.everything and not _fits(batch, found.output, subset):
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
        parts.append(_part(model, x, seed + i, found, batch, subset, likelihood))
    return _merged(parts)


def _fits(batch: Batch, output: Tensor, subset: Subset) -> bool:
    """Whether this can be the output on a subset, as far as its shape is known."""
    if batch.left is not None:
        return output.shape == subset.rows(batch.left.output).shape
    return output.ndim > 0 and (batch.targets is None or len(output) == len(subset.rows(batch.targets.y)))


def _part(
    model: nn.Module, x: Any, seed: int, found: Linearized, batch: Batch, subset: Subset, likelihood: Likelihood
) -> Evaluation:
    """The quadratic model on some examples x of one batch."""
    targets = None if batch.targets is None else batch.targets.select(subset.rows)
    if targets is not None and batch.left is None:
        likelihood.check_targets(found.output, targets.y)
    counted = nontrivial(None if targets is None else targets.counted)
    Q = curvature(model, found, likelihood, seed, counted).cpu()
    if not finite(Q):
        raise WhiteningError("the model's output, or its change along the step, is not finite on this batch")
    if targets is None:
        return Evaluation(Q, None, Q.new_zeros(len(Q)), examples(x), refused=found.refused)
    return Evaluation(
        Q,
        targets.mean(found.output),
        Q.new_tensor(targets.slopes(found.output, found.along)),
        examples(x),
        lambda: targets.mean(output_of(model, x, seed, batch.class_dim)),
        weight=targets.multiple(),
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


def evaluated_counts(batches: Sequence[Batch], everything: bool) -> list[int]:
    """On how many examples of each batch the quadratic model is evaluated: of the first ones, until they are enough.

    Never on a single one of several, because BatchNorm needs a variance.
    """
    lengths = [examples(batch.x) for batch in batches]
    total = sum(lengths)
    enough = total if everything else max(int(SETTINGS.evaluated_part * total), min(total, SETTINGS.evaluated_least))
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
