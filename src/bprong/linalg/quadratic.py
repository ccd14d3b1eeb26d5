"""The minimum of a quadratic model of the loss along a few directions.

    M(c) = ½ cᵀ A c + bᵀ c      d = Σ cᵢ dᵢ,  Aᵢⱼ = dᵢᵀ (F + λ) dⱼ,  bᵢ = ∇Lᵀ dᵢ

Martens & Grosse (2015, section 6) choose the step along the preconditioned gradient and the last update by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def minimiser(A: Array, b: Array, limits: Sequence[float]) -> Array:
    """Return the c that minimises ½cᵀAc + bᵀc over 0 ≤ c ≤ limits; A (k, k) is positive semidefinite, k small.

    In NumPy, whose calls take a tenth of torch's time here.

    >>> minimiser(np.eye(2), np.array([-1.0, -3.0]), [math.inf, 0.95]).round(4).tolist()
    [1.0, 0.95]
    """
    scale = 1 / np.sqrt(np.maximum(A.diagonal(), 1e-300))
    # Scaled so that the diagonal is one. What is added is below the accuracy of A, and lets directions that are nearly
    # parallel share a step instead of cancelling each other.
    H = A * scale[:, None] * scale + 1e-6 * np.eye(len(b))
    h = b * scale
    upper = np.array(limits) / scale
    # At the minimum each coordinate is free (NaN here), zero, or at its limit.
    choices = [(math.nan, 0.0) if math.isinf(limit) else (math.nan, 0.0, limit) for limit in upper]
    candidates = []
    for choice in product(*choices):
        c = np.array(choice)
        free = np.isnan(c)
        c[free] = 0.0
        c[free] = -np.linalg.solve(H[free][:, free], (h + H @ c)[free])
        if ((c >= 0) & (c <= upper)).all():
            candidates.append(c)
            if free.all():  # the minimum over all c
                break
    best = min(candidates, key=lambda c: float(c @ H @ c / 2 + h @ c))
    return best * scale + 0.0  # +0.0 turns −0 into 0
