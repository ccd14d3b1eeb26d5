"""The quadratic model of a batch: dᵢᵀ F dⱼ and slopes along a few directions, and what the loss really did afterwards.

Everything is per target and in nats, whatever multiple κ of −log p the user's loss is (`user_loss.py`): ∇L is the
user's gradient divided by κ times the number of targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bprong.curvature import curvature, linearized, output_of
from bprong.likelihood import Likelihood
from bprong.listening import Heard, copied
from bprong.loss_scale import agreed
from bprong.user_loss import Loss, loss_behind

__all__ = ["Evaluation", "Scale", "evaluated"]

Vector = Mapping[Tensor, Tensor]  # a direction: what each parameter moves by
PART, ENOUGH = 4, 64  # curvature is taken on a quarter of a batch, or on so many examples of a small one
SETTLED = 20  # estimates of κ after which no more are made


class Scale:
    """κ of the user's loss, from what the first batches say."""

    def __init__(self, seen: Sequence[tuple[float, int]] = ()) -> None:
        self.seen = list(seen)

    def of(self, targets: int) -> float | None:
        """For a batch of so many targets, once it is settled."""
        if len(self.seen) < SETTLED:
            return None
        scales = [scale for scale, _ in self.seen]
        means = [scale * n for scale, n in self.seen]
        is_mean = max(means) / min(means) <= max(scales) / min(scales)
        return max(means) / targets if is_mean else max(scales)

    def note(self, loss: Loss, targets: int, elements: int) -> float:
        """One more estimate; the κ that all of them agree on."""
        self.seen.append((loss.scale, targets))
        scales, counts = zip(*self.seen, strict=True)
        return loss.scale if loss.certain else agreed(scales, counts, elements)


@dataclass(frozen=True)
class Evaluation:
    """What one batch says of some directions.

    Q        (k, k) dᵢᵀ F dⱼ, float64
    scale    κ times the number of targets: what the user's gradient is of that of the mean −log p; None: not known
    loss     the mean −log p of a target; None: the targets are not known
    slopes   its derivatives along the directions, on the examples that Q is of
    refused  why forward mode was not to be had
    """

    Q: Tensor
    scale: float | None
    loss: float | None
    slopes: Tensor | None
    refused: str | None
    _target: Loss | None
    _x: Any
    _output: Tensor
    _seed: int

    def change(self, model: nn.Module) -> float:
        """By how much the mean −log p has changed since, on the same examples and random numbers."""
        assert self._target is not None
        return self._target.mean(output_of(model, self._x, self._seed)) - self._target.mean(self._output)


def evaluated(
    model: nn.Module,
    calls: Sequence[tuple[Any, Heard | None, Tensor | None]],
    directions: Sequence[Vector],
    likelihood: Likelihood,
    scale: Scale,
    seed: int,
    *,
    whole: bool,
    forward_mode: bool,
) -> Evaluation:
    """The quadratic model on the first call of a step; `calls`: its x, what was heard of it, the targets given with it.

    whole: take all examples, not a part
    """
    x, *_ = calls[0]
    loss, total = _loss(calls, likelihood, scale)
    dtype = next(model.parameters()).dtype
    length = _examples(x)
    count = None if whole or length is None else max(length // PART, min(length, ENOUGH))
    x = copied(x, count, dtype)
    found = linearized(model, x, directions, seed, forward_mode)
    part = None if loss is None else loss.cut(len(found.output)) if len(found.output) < len(loss.weights) else loss
    counted = None if part is None else part.weights != 0
    Q = curvature(model, found, likelihood, seed, counted if counted is not None and not counted.all() else None)
    mean = None if part is None else part.mean(found.output)
    slopes = None if part is None else torch.tensor([part.slope(found.output, d) for d in found.along]).double()
    return Evaluation(Q, total, mean, slopes, found.refused, part, x, found.output, seed)


def _loss(
    calls: Sequence[tuple[Any, Heard | None, Tensor | None]], likelihood: Likelihood, scale: Scale
) -> tuple[Loss | None, float | None]:
    """The user's loss on the first call, and κ times the targets of all calls."""
    _, heard, y = calls[0]
    if heard is None:
        return None, None
    targets = likelihood.targets(heard.output)
    known = scale.of(targets)
    loss = loss_behind(likelihood, heard.output, heard.gradient, y, heard.value, known)
    if loss is None:
        return None, None
    if known is None:
        agreed_on = scale.note(loss, targets, heard.output.numel() // targets)
        if agreed_on != loss.scale:
            loss = loss_behind(likelihood, heard.output, heard.gradient, y, heard.value, agreed_on) or loss
    counts = [int((loss.weights != 0).sum())] + [_counted(h, likelihood) for _, h, _ in calls[1:]]
    return loss, loss.scale * sum(counts)


def _counted(heard: Heard | None, likelihood: Likelihood) -> int:
    if heard is None:
        return 0
    rows = heard.gradient.reshape(likelihood.targets(heard.output), -1)
    return int((rows != 0).any(dim=1).sum())


def _examples(x: Any) -> int | None:
    """How many examples a batch has: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim > 0), None)
