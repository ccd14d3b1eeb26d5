"""The quadratic model of a batch: dᵢᵀ F dⱼ and slopes along a few directions, and what the loss really did afterwards.

Everything is per target and in nats, whatever multiple κ of −log p the user's loss is (`user_loss.py`): ∇L is the
user's gradient divided by κ times the number of targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bprong.curvature import Linearized, curvature, linearized, output_of
from bprong.likelihood import Likelihood
from bprong.listening import Heard, copied
from bprong.loss_scale import agreed
from bprong.moments import widened
from bprong.user_loss import Loss, loss_behind

__all__ = ["Call", "Evaluation", "Scale", "enough", "evaluated", "examples"]

Vector = Mapping[Tensor, Tensor]  # a direction: what each parameter moves by
PART, ENOUGH = 8, 64  # curvature is taken on an eighth of a batch, or on so many examples of a small one
SETTLED, MOST = 20, 60  # estimates of κ after which none are made for batches of sizes seen before, and none at all


class Scale:
    """κ of the user's loss, from what the first batches say."""

    def __init__(self, seen: list[tuple[float, int]] | None = None) -> None:
        self.seen = [] if seen is None else seen

    def of(self, targets: int) -> float | None:
        """For a batch of so many targets, once it is settled; a size not seen before may tell means from sums."""
        if len(self.seen) < SETTLED or (len(self.seen) < MOST and targets not in {n for _, n in self.seen}):
            return None
        scales = [scale for scale, _ in self.seen]
        means = [scale * n for scale, n in self.seen]
        is_mean = max(means) / min(means) <= max(scales) / min(scales)
        return max(means) / targets if is_mean else max(scales)

    @property
    def is_mean(self) -> bool:
        """Whether batches of several sizes have shown κ to be that of a mean: what it is of a mean does not change."""
        means = [scale * n for scale, n in self.seen]
        return len({n for _, n in self.seen}) > 1 and max(means) <= 1.01 * min(means)

    def note(self, loss: Loss, targets: int, elements: int) -> float:
        """One more estimate; the κ that all of them agree on."""
        seen = [*self.seen, (loss.scale, targets)]
        if len(self.seen) < MOST:
            self.seen.append(seen[-1])
        scales, counts = zip(*seen, strict=True)
        return loss.scale if loss.certain else agreed(scales, counts, elements)


@dataclass(frozen=True)
class Call:
    """One call of the model in a step.

    heard: what the user's backward pass left at its output; y: the targets given with x; None: nothing
    """

    x: Any
    heard: Heard | None
    y: Tensor | None

    def targets(self, likelihood: Likelihood) -> int:
        """How many targets the loss counts, as far as can be told."""
        if self.heard is not None:
            rows = self.heard.gradient.reshape(likelihood.targets(self.heard.output), -1)
            return int((rows != 0).any(dim=1).sum())
        left_in = None if self.y is None else likelihood.left_in(self.y)
        return int(left_in.sum()) if left_in is not None else 0 if self.y is None else len(self.y)

    def loss(self, likelihood: Likelihood, scale: Scale, count: int) -> Loss | None:
        """The user's loss, if what was heard tells it: of so many examples, if these leave no doubt, or of all."""
        if self.heard is None:
            return None
        output, targets = self.heard.output, self.targets(likelihood)
        loss = self._behind(likelihood, count) if count < len(output) else None
        if loss is None or not loss.certain or bool((loss.weights > 1).any()):  # weights are one on average over all
            loss = self._behind(likelihood, len(output))
        known = scale.of(targets) if loss is None or not loss.certain else None
        if known is None and loss is not None:
            known = scale.note(loss, targets, output.numel() // likelihood.targets(output))
        if known is not None and (loss is None or known != loss.scale):
            loss = self._behind(likelihood, len(output), known) or loss
        return loss

    def _behind(self, likelihood: Likelihood, count: int, scale: float | None = None) -> Loss | None:
        assert self.heard is not None
        output, gradient = self.heard.output[:count], self.heard.gradient[:count]
        y = None if self.y is None else self.y[:count]
        return loss_behind(likelihood, output, gradient, y, self.heard.value, scale)


@dataclass(frozen=True)
class _Part:
    """Some examples of a call; weight: that of their loss in the whole."""

    x: Any
    seed: int
    output: Tensor
    target: Loss | None
    weight: float
    Q: Tensor
    slopes: Tensor | None
    refused: str | None

    def mean(self, output: Tensor) -> float:
        assert self.target is not None
        return self.target.mean(output)


@dataclass(frozen=True)
class Evaluation:
    """What one batch says of some directions.

    Q        (k, k) dᵢᵀ F dⱼ, float64
    loss     the mean −log p of a target; None: the targets are not known
    slopes   (k,) its derivatives along the directions, on the examples that Q is of
    refused  why forward mode was not to be had
    """

    Q: Tensor
    loss: float | None
    slopes: Tensor | None
    refused: str | None
    _parts: Sequence[_Part]

    @property
    def examples(self) -> int:
        """How many it is of."""
        return sum(examples(part.x) for part in self._parts)

    @classmethod
    def of(cls, parts: Sequence[_Part]) -> Evaluation:
        whole = sum(part.weight for part in parts)
        parts = [replace(part, weight=part.weight / whole) for part in parts]
        Q = torch.stack([part.weight * part.Q for part in parts]).sum(dim=0)
        refused = next((part.refused for part in parts if part.refused is not None), None)
        each = [part.weight * part.slopes for part in parts if part.slopes is not None]
        if len(each) < len(parts):
            return cls(Q, None, None, refused, parts)
        return cls(Q, sum(p.weight * p.mean(p.output) for p in parts), torch.stack(each).sum(dim=0), refused, parts)

    def change(self, model: nn.Module) -> float:
        """By how much the mean −log p has changed since, on the same examples and random numbers."""
        return sum(p.weight * (p.mean(output_of(model, p.x, p.seed)) - p.mean(p.output)) for p in self._parts)


def evaluated(
    model: nn.Module,
    calls: Sequence[tuple[Call, Loss | None]],
    directions: Sequence[Vector],
    likelihood: Likelihood,
    seed: int,
    *,
    whole: bool,
    forward_mode: bool,
) -> Evaluation:
    """The quadratic model on the calls of a step and their losses; whole: on all examples, not a part of them."""
    dtype = next(model.parameters()).dtype
    lengths = [examples(call.x) for call, _ in calls]
    left = sum(lengths) if whole else enough(call for call, _ in calls)
    parts: list[_Part] = []
    for i, ((call, loss), length) in enumerate(zip(calls, lengths, strict=True)):
        if parts and left <= 0:
            break
        x = copied(call.x, left if 0 < left < length else None, dtype)
        found = linearized(model, x, directions, seed + i, forward_mode)
        parts.append(_measured(model, x, found, _on(found.output, call, loss, likelihood), likelihood, seed + i))
        left -= length
    return Evaluation.of(parts)


def _measured(
    model: nn.Module, x: Any, found: Linearized, loss: Loss | None, likelihood: Likelihood, seed: int
) -> _Part:
    output = found.output
    if loss is None:
        Q, targets = curvature(model, found, likelihood, seed), likelihood.targets(output)
        return _Part(x, seed, output, None, targets, Q, None, found.refused)
    counted = loss.weights != 0
    Q = curvature(model, found, likelihood, seed, None if counted.all() else counted)
    slopes = torch.tensor(loss.slopes(output, found.along), dtype=torch.float64)
    return _Part(x, seed, output, loss, loss.scale * int(counted.sum()), Q, slopes, found.refused)


def _on(output: Tensor, call: Call, loss: Loss | None, likelihood: Likelihood) -> Loss | None:
    """The loss on the examples of an output: the user's, or, where that is not known, −log p of the targets given."""
    if loss is not None:
        return loss.cut(len(output)) if len(output) < len(loss.weights) else loss
    if call.y is None:
        return None
    y = call.y[: len(output)]
    likelihood.check_targets(output, y)
    left_in, rows = likelihood.left_in(y), output.ndim > 1 and output[..., 0].numel() == likelihood.targets(output)
    weights = torch.ones_like(output[..., 0] if rows else output.flatten(1)[:, 0] if output.ndim > 1 else output)
    return Loss(likelihood, 1.0, y, widened(weights if left_in is None else left_in.to(weights)), certain=False)


def enough(calls: Iterable[Call]) -> int:
    """How many examples of a step's calls curvature is taken on."""
    total = sum(examples(call.x) for call in calls)
    return max(total // PART, min(total, ENOUGH))


def examples(x: Any) -> int:
    """How many examples a batch has: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim > 0), 1)
