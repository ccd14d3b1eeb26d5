"""κ, the scale of the user's loss as a multiple of −log p, from the estimates of several batches.

It is one for a sum over targets, 1 / targets for a mean and 2 / elements for F.mse_loss; a loss that is multiplied by a
factor has any κ. Estimates from the value of a loss are wrong by whatever else is in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bprong.likelihood.loss import BELOW, NEAR, Loss, rounded

EXACT = 3e-6  # relative rounding error, at most, of an estimate from a loss's value in single precision
AGREEING = 5  # number of estimates that must agree
STEADY = 1e-3  # how well they must agree, relative to how much their losses vary
SURE = 1.0  # how certain a verdict on κ is: SURE, LIKELY or GUESS
LIKELY = 0.5
GUESS = 0.0
SETTLED = 20  # number of estimates after which κ is used for batches that give no estimate
REMEMBERED = 60  # number of estimates kept

Estimate = tuple[float, int, float]  # an estimate of κ, the number of targets, and the loss's value (0: unknown)


def is_round(multiple: float) -> bool:
    """Whether a person may have written this factor: two digits, the inverse of two digits, or a power of two.

    >>> [is_round(multiple) for multiple in (7.3, 1 / 30, 2.0**16, 7.3123, 0.4512)]
    [True, True, True, False, False]
    """
    if not 1e-12 < multiple < 1e12:
        return False
    power = math.log2(multiple)
    digits = [m / 10 ** (math.floor(math.log10(m)) - 1) for m in (multiple, 1 / multiple)]
    return abs(power - round(power)) <= EXACT or any(abs(m - round(m)) <= EXACT * m for m in digits)


def agree(estimates: Sequence[float], values: Sequence[float]) -> bool:
    """Whether five estimates vary a thousand times less than the losses they come from.

    A constant or a penalty C in a loss D is another part of it in each batch, so that κ̂ = κ D / (D + C) varies. Losses
    that do not vary are no evidence.

    >>> agree([0.5] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]), agree([0.5] * 5, [1.0] * 5), agree([0.5, 0.5], [1.0, 2.0])
    (True, False, False)
    """
    if len(estimates) < AGREEING or min(*estimates, *values) <= 0:
        return False
    varied = math.log(max(values) / min(values))
    return varied > 1e-3 and math.log(max(estimates) / min(estimates)) <= STEADY * min(1.0, varied)


def verdict(
    before: tuple[float, float],
    estimates: Sequence[float],
    values: Sequence[float],
    known: Sequence[float],
    lower: bool,
) -> tuple[float, float]:
    """κ after one more estimate, and how certain it is: SURE, LIKELY or GUESS.

    before:            the last verdict; κ = 0: none
    estimates, values: the last five estimates at most, and the losses they come from, the newest last
    known:             the customary κ
    lower:             whether a penalty in the loss makes estimates too small. A guess is then rounded up to the next
                       customary κ, because a κ that is too large only shortens steps

    Estimates above κ show that it has grown. Estimates below it may be due to a penalty, unless they agree or are all
    round multiples of a customary κ.

    >>> verdict((0.0, GUESS), [0.1432], [1.0], [0.1, 0.2], True), verdict((0.0, GUESS), [0.0998], [1.0], [0.1], True)
    ((0.2, 0.0), (0.1, 0.5))
    >>> verdict((1.0, SURE), [1.0, 1.0, 30.12], [2.0, 2.1, 60.0], [1.0], True)
    (30.12, 1.0)
    """
    latest = estimates[-1]
    written = all(any(is_round(estimate / custom) for custom in known) for estimate in estimates)
    if written or agree(estimates, values):
        return rounded(latest, known) or latest, SURE if len(estimates) >= AGREEING else LIKELY
    if latest <= (1 + NEAR) * before[0]:
        return before
    if before[1] == SURE:
        return latest, SURE
    if (near := rounded(latest, known, BELOW)) is not None:
        return near, LIKELY
    # The next κ that is customary for squared errors: twice that of −log p, as half of κ would make steps too long.
    above = [kappa for kappa in known if kappa >= latest and kappa / 2 in known]
    return (min(above, default=latest), GUESS) if lower else (latest, LIKELY)


@dataclass
class ScaleEstimate:
    """κ of the user's loss, estimated from several batches.

    seen:    the current verdict as (κ, targets, certainty), followed by the estimates of the latest batches
    revised: the factor by which a guess has turned out to be too large
    """

    seen: list[Estimate] = field(default_factory=list)
    revised: float = 1.0

    def settled(self, targets: int) -> float | None:
        """κ for a batch of this many targets that gives no estimate itself; None if too few batches gave one."""
        return self._for(targets)[0] if len(self.seen) > SETTLED else None

    @property
    def is_mean(self) -> bool:
        """Whether batches of different sizes have shown that the loss is a mean: κ · targets is the same for all."""
        means = [scale * n for scale, n, _ in self.seen[1:]]
        return len({n for _, n, _ in self.seen[1:]}) > 1 and max(means) <= 1.01 * min(means)

    @property
    def doubtful(self) -> bool:
        """Whether κ is a guess and recent estimates disagree, so that the loss contains something beside κ (−log p)."""
        if not self.seen or self.seen[0][2] != GUESS:
            return False
        recent = self._for(self.seen[-1][1])[1:][-AGREEING:]
        return max(recent) > (1 + NEAR) * min(recent)

    def note(self, loss: Loss, targets: int, value: float, known: Sequence[float]) -> float:
        """Adds an estimate and returns κ from all of them; known: the customary κ for this batch."""
        if not self.seen:
            self.seen.append((0.0, targets, GUESS))
        self.seen.append((loss.at_least or loss.scale, targets, value))
        del self.seen[1:-REMEMBERED]
        before, *estimates = self._for(targets)
        values = [value for *_, value in self.seen[1:]][-AGREEING:]
        certainty = self.seen[0][2]
        found = (
            (loss.scale, SURE)
            if loss.certain
            else verdict((before, certainty), estimates[-AGREEING:], values, known, lower=loss.at_least is not None)
        )
        if before > 0 and certainty == GUESS:
            self.revised *= before / found[0]
        self.seen[0] = (found[0], targets, found[1])
        return found[0]

    def _for(self, targets: int) -> list[float]:
        """The κ of everything seen, converted to a batch of this many targets.

        A mean has the same κ · targets in all batches, a sum the same κ; the one that varies less is assumed.
        """
        scales = [scale for scale, *_ in self.seen[1:]]
        means = [scale * n for scale, n, _ in self.seen[1:]]
        is_mean = max(means) / min(means) <= max(scales) / min(scales)
        return [scale * n / targets if is_mean and n != targets else scale for scale, n, _ in self.seen]
