"""Which inverse a side gets: the exact one by Cholesky, or a low-rank one where that makes steps cheaper.

A step through a side of d features, with n rows on the other side, takes 2nd² operations exactly, 4ndk with rank k.
Products with a narrow factor run at some 0.7 of the rate of square ones (benchmarks/cost.py), so low rank pays up to
k ≈ 0.35 d; and below a few hundred features neither costs much beside the rest of a step.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from bprong.lowrank import LowRank, low_rank
from bprong.whitening import Damping, inverse

__all__ = ["Inverse", "Solver", "solve"]

Solver = Literal["auto", "exact", "low-rank"]
Inverse = Tensor | LowRank

WIDE = 256  # features from which on low rank is tried
PAYS = 0.35  # of the features: the largest rank that makes steps cheaper
TOLERANCE = 0.3  # how far, relatively, a low-rank step may be from the exact one (`LowRank.error`)


def solve(second: Tensor, damping: Damping, like: Tensor, solver: Solver, start: Inverse | None) -> Inverse:
    """(Ž+ε)⁻¹ in the precision of `like`, from where the previous one was."""
    if solver != "exact" and _suits(second, damping, solver):
        epsilon = damping.value * float(damping.scale(second)[0])
        most = int(PAYS * len(second)) if solver == "auto" else len(second) - 1
        begin = start.B if isinstance(start, LowRank) else None
        found = low_rank(second.to(like), epsilon, TOLERANCE, most, begin)
        if found is not None:
            return found
    return inverse(second, damping, like.dtype).to(like)


def _suits(second: Tensor, damping: Damping, solver: Solver) -> bool:
    """One block, damped alike in all directions; and wide, unless low rank is asked for."""
    return second.ndim == 2 and damping.relative_to != "variance" and (solver == "low-rank" or len(second) >= WIDE)
