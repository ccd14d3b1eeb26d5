"""κ, the multiple of −log p that a loss is, from probabilities p and the gradient G = κ (p − y) at their logits.

As 0 ≤ y ≤ 1, κ is at least G/p and −G/(1−p) everywhere, and just that where y is 0 or 1. It is one for a sum over
targets, 1 / targets for a mean, 2 / elements for F.mse_loss, and anything for a loss that was scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "agree", "customary", "explains", "is_round", "line", "lower_bound", "of_each_target", "rounded", "tolerance",
    "verdict",
]  # fmt: skip

NEAR = 0.01  # what an estimate may be off a customary κ to be taken for it
BELOW = 0.25  # what a lower bound may be
EXACT = 3e-6  # what single precision leaves of an estimate by a loss's value, at worst
RECENT, STEADY = 5, 1e-3  # estimates that must agree, and how well, by how much their losses vary
SURE, LIKELY, GUESS = 1.0, 0.5, 0.0
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


def is_round(multiple: float) -> bool:
    """Whether somebody may have written it: two digits, one by such, or a power of two; to rounding.

    >>> [is_round(multiple) for multiple in (7.3, 1 / 30, 2.0**16, 7.3123, 0.4512)]
    [True, True, True, False, False]
    """
    if not 1e-12 < multiple < 1e12:
        return False
    power = math.log2(multiple)
    if abs(power - round(power)) <= EXACT:
        return True
    digits = [m / 10 ** (math.floor(math.log10(m)) - 1) for m in (multiple, 1 / multiple)]
    return any(abs(m - round(m)) <= EXACT * m for m in digits)


def agree(estimates: Sequence[float], values: Sequence[float]) -> bool:
    """Whether five estimates stay the same while the losses they come from vary: a thousand times less than these.

    Something else in a loss, a constant or a penalty, is another part of it in each: κ̂ = κ D / (D + C). Losses that do
    not vary say nothing.

    >>> agree([0.5] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]), agree([0.5] * 5, [1.0] * 5), agree([0.5, 0.5], [1.0, 2.0])
    (True, False, False)
    """
    if len(estimates) < RECENT or min(*estimates, *values) <= 0:
        return False
    apart, varied = (math.log(max(each) / min(each)) for each in (estimates, values))
    return varied > 1e-3 and apart <= STEADY * min(1.0, varied)


def verdict(
    before: tuple[float, float],
    estimates: Sequence[float],
    values: Sequence[float],
    known: Sequence[float],
    lower: bool,
) -> tuple[float, float]:
    """κ after one more estimate, and how sure it is: SURE, LIKELY (it looks like one) or a GUESS.

    before:            the last verdict; κ = 0: none
    estimates, values: the last five at most, and the losses they come from, the newest last
    lower:             whether something else in the loss makes estimates too small; then a guess is not below the next
                       κ that is customary, as a step by too large a κ is but too short

    Estimates above κ show that it has grown. Those below may be due to a penalty, unless they agree, or all are what
    somebody may have written.

    >>> verdict((0.0, GUESS), [0.1432], [1.0], [0.1, 0.2], True), verdict((0.0, GUESS), [0.0998], [1.0], [0.1], True)
    ((0.2, 0.0), (0.1, 0.5))
    >>> verdict((1.0, SURE), [1.0, 1.0, 30.12], [2.0, 2.1, 60.0], [1.0], True)
    (30.12, 1.0)
    """
    latest, (kappa, sure) = estimates[-1], before
    written = all(any(is_round(estimate / custom) for custom in known) for estimate in estimates)
    if written or agree(estimates, values):
        return rounded(latest, known) or latest, SURE if len(estimates) >= RECENT else LIKELY
    if latest <= (1 + NEAR) * kappa:
        return before
    if sure == SURE:
        return latest, SURE
    if (near := rounded(latest, known, BELOW)) is not None:
        return near, LIKELY
    return (_above(latest, known), GUESS) if lower else (latest, LIKELY)


def _above(estimate: float, known: Sequence[float]) -> float:
    """The next κ that is customary for squares, which is twice that for −log p: half would be the more dangerous."""
    return min((kappa for kappa in known if kappa >= estimate and kappa / 2 in known), default=estimate)
