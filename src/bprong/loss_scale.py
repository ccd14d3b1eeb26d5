"""κ, the multiple of −log p that a loss is, from probabilities p and the gradient G = κ (p − y) at their logits.

As 0 ≤ y ≤ 1, κ is at least G/p and −G/(1−p) everywhere, and just that where y is 0 or 1. It is one for a sum over
targets, 1 / targets for a mean, 2 / elements for F.mse_loss, and anything for a loss that was scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["agreed", "customary", "explains", "line", "lower_bound", "of_each_target", "rounded", "tolerance"]

NEAR = 0.01  # what an estimate may be off a customary κ to be taken for it
BELOW = 0.25  # what a lower bound may be
TINY = 1e-300
VANISHED = 1e-20  # a probability of which single precision leaves nothing once it is multiplied by κ


def tolerance(eps: float) -> float:
    """What a gradient of this precision may be off, relative to it, and be explained."""
    return max(1e-4, 4 * eps)


def explains(explanation: Tensor, G: Tensor, scale: float, eps: float) -> bool:
    """Whether G is what it is explained by, but for rounding: its own, and that of κ p and κ y before their difference.

    The latter is float32's even where autocast has rounded G to less: losses are computed in float32.
    """
    left, rounding = float((G - explanation).norm()), 4 * min(eps, 1.2e-7) * scale * math.sqrt(G.numel())
    return left <= tolerance(eps) * float(G.norm()) + rounding


def line(p: Tensor, G: Tensor, eps: float) -> tuple[float, float] | None:
    """κ and q from G = κ (p − q) where q is the same for all: G is a line in p. None if it is not.

    Labels smoothed by ε have q = ε/m wherever they are not y; hard ones q = 0. If p is the same everywhere too, as in a
    network that begins at zero, q cannot be told from a smaller κ: then it is taken to be zero, as for few points.

    >>> p = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)
    >>> kappa, q = line(p, 3 * (p - 0.02), eps=1e-16)
    >>> round(kappa, 9), round(q, 9)
    (3.0, 0.02)
    """
    spread, near = p - p.mean(), tolerance(eps)
    if float(spread.norm()) > 50 * eps * float(p.norm()) and p.numel() > 3:
        scale = float((spread * G).sum() / spread.square().sum())
        q = float(p.mean() - G.mean() / scale) if scale > 0 else -1.0
    else:
        scale, q = float((p * G).sum() / p.square().sum().clamp(min=TINY)), 0.0
    return (scale, q) if scale > 0 and q > -near and explains(scale * (p - q), G, scale, eps) else None


def of_each_target(p: Tensor, G: Tensor, y: Tensor, eps: float) -> Tensor | None:
    """κ of each target by itself, (targets,), where its label is y alone and the loss weights targets; else None.

    p, G: (targets, m). The gradient of one target of two classes looks hard whatever it is; so there the weights are
    asked to go by class.
    """
    off = torch.ones_like(G).scatter_(1, y[:, None], 0)
    scales = (G * p * off).sum(dim=1) / (p.square() * off).sum(dim=1).clamp(min=TINY)
    expected = scales
    if p.shape[1] == 2:
        expected = torch.stack([scales[y == k].mean() for k in range(2)])[y]
    return scales if explains(expected[:, None] * p * off, G * off, float(scales.mean()), eps) else None


def lower_bound(G: Tensor, room: Tensor, eps: float) -> tuple[float, bool]:
    """The least κ with |G| ≤ κ · room everywhere; and whether a twentieth or more of the elements attain it.

    room: how far p is from where G pushes it, p or 1 − p. Elements that share the bound have targets of 0 or 1, and it
    is κ.
    """
    ratio, reliable = G.abs() / room.clamp(min=TINY), room > 1e-3  # p − 1 has lost its digits where p is nearly one
    if reliable.any():
        ratio = ratio.where(reliable, 0)
    rounding = min(4 * eps / 1e-3, 3e-4 + 2 * eps)
    attained = ratio >= (1 - rounding) * ratio.max()
    bound = float(G[attained].abs().sum() / room[attained].sum().clamp(min=TINY))
    return bound, int(attained.sum()) >= max(3, 0.05 * int((ratio > 0).sum()))


def customary(counts: Iterable[int]) -> list[float]:
    """κ of sums and of means over so many things, of −log p or, for squares, of twice that.

    >>> customary([4])
    [0.25, 0.5, 1.0, 2.0]
    """
    return sorted({factor / count for factor in (1, 2) for count in {1, *counts}})


def rounded(scale: float, known: Iterable[float], below: float = NEAR) -> float | None:
    """The customary κ that an estimate stands for, which may be `below` it, or above by a hundredth; else None.

    >>> rounded(0.0998, [1.0, 0.1, 0.01]), rounded(0.08, [1.0, 0.1], below=0.25), rounded(0.08, [1.0, 0.1])
    (0.1, 0.1, None)
    """
    near = [kappa for kappa in known if (1 - below) * kappa <= scale <= (1 + NEAR) * kappa]
    return min(near, key=lambda kappa: abs(kappa - scale), default=None)


def agreed(scales: Sequence[float], targets: Sequence[int], elements: int = 1) -> float:
    """κ of the last of several batches, of so many targets (of so many elements each), from estimates by their losses.

    Means have the same κ · targets in all batches, sums the same κ; what varies less is what the loss is. A penalty in
    the loss makes each estimate too small, the less so the larger the loss itself: then the largest comes nearest, and
    what is customary just above it nearer still.

    >>> agreed([0.02, 0.02, 0.04], targets=[50, 50, 25]), agreed([0.018, 0.0183, 0.0177], targets=[50, 50, 50])
    (0.04, 0.02)
    """
    sums = list(scales)
    means = [scale * n for scale, n in zip(scales, targets, strict=True)]
    varies = {True: max(means) / min(means), False: max(sums) / min(sums)}
    is_mean = varies[True] <= varies[False]
    largest = max(means) / targets[-1] if is_mean else max(sums)
    if varies[is_mean] <= 1 + NEAR:
        return largest
    return rounded(largest, customary([targets[-1], targets[-1] * elements]), BELOW) or largest
