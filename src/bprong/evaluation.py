"""The quadratic model of a batch: dᵢᵀ F dⱼ and slopes along a few directions, and what the loss really did afterwards.

Everything is per target and in nats, whatever multiple κ of −log p the user's loss is (`user_loss.py`): ∇L is the
user's gradient divided by κ times the number of targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bprong.curvature import Linearized, curvature, linearized, output_of
from bprong.cut import Cut, examples
from bprong.likelihood import Likelihood
from bprong.listening import Heard, copied
from bprong.loss_scale import GUESS, NEAR, RECENT, SURE, customary, verdict
from bprong.moments import widened
from bprong.user_loss import Loss, loss_behind

__all__ = ["Call", "Evaluation", "Scale", "evaluated", "shares"]

Vector = Mapping[Tensor, Tensor]  # a direction: what each parameter moves by
PART, ENOUGH = 8, 64  # curvature is taken on an eighth of a batch, or on so many examples of a small one
SETTLED, MOST = 20, 60  # estimates of κ after which it stands for batches that tell none, and how many are kept
Seen = tuple[float, int, float]  # an estimate of κ, the number of targets and the loss's value, zero: unknown


class Scale:
    """κ of the user's loss, from what batches say.

    seen:    first the verdict so far, its sureness in place of a value (`loss_scale.py`), then the estimates
    revised: how many times too large a guess has turned out to be
    """

    def __init__(self, seen: list[Seen] | None = None) -> None:
        self.seen, self.revised = [] if seen is None else seen, 1.0

    def of(self, targets: int) -> float | None:
        """For a batch of so many targets that does not tell it by itself, once it is settled."""
        return self._for(targets)[0] if len(self.seen) > SETTLED else None

    @property
    def is_mean(self) -> bool:
        """Whether batches of several sizes have shown κ to be that of a mean: what it is of a mean does not change."""
        means = [scale * n for scale, n, _ in self.seen[1:]]
        return len({n for _, n, _ in self.seen[1:]}) > 1 and max(means) <= 1.01 * min(means)

    @property
    def doubtful(self) -> bool:
        """Whether κ is a guess, and estimates have shown that there is something else in the loss."""
        if not self.seen or self.seen[0][2] != GUESS:
            return False
        recent = self._for(self.seen[-1][1])[1:][-RECENT:]
        return max(recent) > (1 + NEAR) * min(recent)

    def note(self, loss: Loss, targets: int, value: float, known: Sequence[float]) -> float:
        """One more estimate; the κ that all of them speak for. known: what is customary for this batch"""
        if not self.seen:
            self.seen.append((0.0, targets, GUESS))
        self.seen.append((loss.scale if loss.at_least is None else loss.at_least, targets, value))
        del self.seen[1:-MOST]
        kappa, *estimates = self._for(targets)
        found = (loss.scale, SURE)
        if not loss.certain:
            values = [value for *_, value in self.seen[1:]]
            before, lower = (kappa, self.seen[0][2]), loss.at_least is not None
            found = verdict(before, estimates[-RECENT:], values[-RECENT:], known, lower)
        if kappa > 0 and self.seen[0][2] == GUESS:
            self.revised *= kappa / found[0]
        self.seen[0] = (found[0], targets, found[1])
        return found[0]

    def _for(self, targets: int) -> list[float]:
        """What was seen, for a batch of so many targets.

        Means have the same κ · targets in all batches, sums the same κ; what varies less is what the loss is.
        """
        scales, means = [scale for scale, *_ in self.seen[1:]], [scale * n for scale, n, _ in self.seen[1:]]
        is_mean = max(means) / min(means) <= max(scales) / min(scales)
        return [scale * n / targets if is_mean and n != targets else scale for scale, n, _ in self.seen]


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

    def cut(self, count: int) -> Cut:
        """So many examples; all, where the rows of the output are not so many for each."""
        cut = Cut(count, examples(self.x))
        rows = [None if self.heard is None else self.heard.output, self.y]
        return cut if all(t is None or cut.divides(t) for t in rows) else Cut(cut.whole, cut.whole)

    def shape(self, cut: Cut) -> tuple[int, ...]:
        """That of the output on the examples of a cut, or how it begins, as far as is known."""
        known = self.y.shape[:1] if self.y is not None else torch.Size()
        known = self.heard.output.shape if self.heard is not None else known
        return (known[0] // cut.whole * cut.count, *known[1:]) if known else ()

    @property
    def whole(self) -> Cut:
        return self.cut(examples(self.x))

    def loss(self, likelihood: Likelihood, scale: Scale, count: int) -> Loss | None:
        """The user's loss, if what was heard tells it: of so many examples, if these leave no doubt, or of all."""
        if self.heard is None:
            return None
        targets, cut = self.targets(likelihood), self.cut(count)
        loss = None if cut.everything else self.behind(likelihood, cut)
        if loss is None or not loss.certain or bool((loss.weights > 1).any()):  # weights are one on average over all
            loss = self.behind(likelihood, self.whole)
        if loss is None:
            known = scale.of(targets)
        else:
            value = 0.0 if self.heard.value is None else float(self.heard.value)
            known = scale.note(loss, targets, value, self._customary(likelihood, targets))
        if known is not None and (loss is None or known != loss.scale):
            loss = self.behind(likelihood, self.whole, known) or loss
        return loss

    def _customary(self, likelihood: Likelihood, counted: int) -> list[float]:
        assert self.heard is not None
        output = self.heard.output
        rows = likelihood.targets(output)
        return customary([counted, rows, len(output), counted * (output.numel() // rows), output.numel()])

    def behind(self, likelihood: Likelihood, cut: Cut, scale: float | None = None) -> Loss | None:
        """The loss on the examples of a cut, by what was heard of these alone."""
        assert self.heard is not None
        output, gradient = cut.rows(self.heard.output), cut.rows(self.heard.gradient)
        y = None if self.y is None else cut.rows(self.y)
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
    uncut    why the model could not be run on a part of the batch; then all of it was looked at
    """

    Q: Tensor
    loss: float | None
    slopes: Tensor | None
    refused: str | None
    _parts: Sequence[_Part]
    uncut: str | None = None

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
    """The quadratic model on the calls of a step and their losses.

    whole: on all examples; if not, on a part of them, unless it turns out that the model takes none
    """
    dtype = next(model.parameters()).dtype
    parts: list[_Part] = []
    for i, ((call, loss), count) in enumerate(zip(calls, shares([call for call, _ in calls], whole), strict=True)):
        if count or len(calls) == 1:
            cut = call.cut(count)
            x = copied(call.x, cut, dtype)
            found = _linearized(model, x, directions, seed + i, forward_mode, call, cut)
            if isinstance(found, str):
                again = evaluated(model, calls, directions, likelihood, seed, whole=True, forward_mode=forward_mode)
                return replace(again, uncut=found)
            on = _on(found.output, call, loss, cut, likelihood)
            parts.append(_measured(model, x, found, on, likelihood, seed + i))
    return Evaluation.of(parts)


def _linearized(
    model: nn.Module, x: Any, directions: Sequence[Vector], seed: int, forward_mode: bool, call: Call, cut: Cut
) -> Linearized | str:
    """As `linearized`; of a part of a batch, why it is not to be had: states, masks and graphs are of the whole."""
    if cut.everything:
        return linearized(model, x, directions, seed, forward_mode)
    try:
        # This tries without forward mode before it says that there is none: what raises then is the part.
        output = (found := linearized(model, x, directions, seed, forward_mode)).output
    except Exception as reason:  # whatever a model may raise
        return f"{type(reason).__name__}: {str(reason).split(chr(10), maxsplit=1)[0]}"
    expected = call.shape(cut)
    if output.ndim and tuple(output.shape[: len(expected)]) == expected:
        return found
    return f"{cut.count} of {cut.whole} examples have an output of shape {tuple(output.shape)}"


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


def _on(output: Tensor, call: Call, loss: Loss | None, cut: Cut, likelihood: Likelihood) -> Loss | None:
    """The loss on the examples of an output: the user's, or, where that is not known, −log p of the targets given."""
    if loss is not None and len(loss.weights) < len(output):  # it was found on a part, and all are looked at
        loss = call.behind(likelihood, call.whole)
    if loss is not None:
        return loss.cut(cut) if len(output) < len(loss.weights) else loss
    if call.y is None:
        return None
    y = cut.rows(call.y)
    likelihood.check_targets(output, y)
    left_in, rows = likelihood.left_in(y), output.ndim > 1 and output[..., 0].numel() == likelihood.targets(output)
    weights = torch.ones_like(output[..., 0] if rows else output.flatten(1)[:, 0] if output.ndim > 1 else output)
    return Loss(likelihood, 1.0, y, widened(weights if left_in is None else left_in.to(weights)), certain=False)


def shares(calls: Sequence[Call], whole: bool) -> list[int]:
    """How many examples of each call of a step curvature is taken on: of the first ones, until they are enough.

    Never one that is left over from several, whose variance BatchNorm would ask for.
    """
    lengths = [examples(call.x) for call in calls]
    left, found = sum(lengths), list[int]()
    left = left if whole else max(left // PART, min(left, ENOUGH))
    for call, length in zip(calls, lengths, strict=True):
        count = call.cut(min(left, length)).count if left > 0 and not left == 1 < length else 0
        found.append(count)
        left -= count
    return found
