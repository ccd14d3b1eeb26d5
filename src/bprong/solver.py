"""Which inverse a side gets: the exact one by Cholesky, or a low-rank one where that makes steps cheaper.

A step through a side of d features, with n rows on the other side, takes 2nd² operations exactly, 4ndk with rank k.
Products with a narrow factor run at some 0.7 of the rate of square ones (benchmarks/cost.py): steps are cheaper up to
k ≈ 0.35 d; but a large rank takes longer to find than Cholesky's factor, so low rank pays up to k ≈ d/4. Below a few
hundred features neither costs much beside the rest of a step. Where it was tried in vain it is not tried again soon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bprong.lowrank import LowRank, low_rank
from bprong.whitening import Damping, inverse

__all__ = ["Attempts", "Inverse", "Solver", "solve"]

Solver = Literal["auto", "exact", "low-rank"]
Inverse = Tensor | LowRank

WIDE = 256  # features from which on low rank is tried
PAYS = 0.25  # of the features: the largest rank that makes training cheaper
LONGEST = 16  # refreshes for which low rank is not tried again, at most
TOLERANCE = 0.5  # how far, relatively, a low-rank step may be from the exact one (`LowRank.error`)


@dataclass
class Attempts:
    """Of a side: for how many refreshes low rank is not tried, because it was in vain, and for how many next time."""

    left: int = 0
    next: int = 2

    def solver(self, asked: Solver) -> Solver:
        """The one for this refresh."""
        if asked != "auto" or self.left == 0:
            return asked
        self.left -= 1
        return "exact"

    def took(self, solver: Solver, found: Inverse) -> None:
        """What came of it."""
        if isinstance(found, LowRank):
            self.left, self.next = 0, 2
        elif solver == "auto" and len(found) >= WIDE:
            self.left, self.next = self.next, min(2 * self.next, LONGEST)


def solve(
    second: Tensor, damping: Damping, like: Tensor, solver: Solver, start: Inverse | None, weight: float = 1.0
) -> Inverse:
    """(Ž+ε)⁻¹ in the precision of `like`, from where the previous one was; Ž still to be divided by weight."""
    if solver != "exact" and _suits(second, damping, solver):
        epsilon = damping.value * float(damping.unit(second.diagonal() / weight)[0])
        most = int(PAYS * len(second)) if solver == "auto" else len(second) - 1
        begin = start.B if isinstance(start, LowRank) else None
        found = low_rank(second.to(like, copy=True).div_(weight), epsilon, TOLERANCE, most, begin)
        if found is not None:
            return found
    return inverse(second, damping, like.dtype, weight=weight).to(like)


def _suits(second: Tensor, damping: Damping, solver: Solver) -> bool:
    """One block, damped alike in all directions; and wide, unless low rank is asked for."""
    return second.ndim == 2 and damping.relative_to != "variance" and (solver == "low-rank" or len(second) >= WIDE)
