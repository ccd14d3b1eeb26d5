"""The quadratic model of the loss along a few directions, and its minimum.

    M(c) = ½ cᵀ A c + bᵀ c      d = Σ cᵢ dᵢ,  Aᵢⱼ = dᵢᵀ (F + λ) dⱼ,  bᵢ = ∇Lᵀ dᵢ

Martens & Grosse (2015, section 6) choose the step along the preconditioned gradient and the last update so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["minimiser", "shortened"]

Vector = npt.NDArray[np.float64]


def minimiser(A: Tensor, b: Tensor, most: Sequence[float]) -> Tensor:
    """The c with the least ½cᵀAc + bᵀc among 0 ≤ c ≤ most; A (k, k) is positive semidefinite, k small.

    >>> A, b = torch.eye(2, dtype=torch.float64), torch.tensor([-1.0, -3.0], dtype=torch.float64)
    >>> minimiser(A, b, [math.inf, 0.95]).round(decimals=4).tolist()
    [1.0, 0.95]
    """
    scale = A.diagonal().clamp(min=1e-300).rsqrt()
    # In units in which the diagonal is one; what is added is beyond the digits that are known of A, and lets directions
    # that are nearly parallel share a step instead of cancelling one another.
    unit = A * scale[:, None] * scale + 1e-6 * torch.eye(len(b), dtype=A.dtype)
    g, top = b * scale, [m / float(s) for m, s in zip(most, scale, strict=True)]
    H, h = unit.numpy(), g.numpy()  # whose calls take a tenth of torch's time
    found = min(_candidates(H, h, top), key=lambda c: float(c @ H @ c / 2 + h @ c))
    return torch.from_numpy(found) * scale + 0.0  # no −0


def _candidates(A: Vector, b: Vector, most: Sequence[float]) -> Iterator[Vector]:
    """Of all ways to hold some coordinates at 0 or at their most, the minimum over the others where that is allowed."""
    for held in product((None, 0.0, 1.0), repeat=len(b)):
        if any(h == 1.0 and math.isinf(m) for h, m in zip(held, most, strict=True)):
            continue
        c = np.array([h * m if h else 0.0 for h, m in zip(held, most, strict=True)])
        free = [i for i, h in enumerate(held) if h is None]
        if free:
            c[free] = -np.linalg.solve(A[free][:, free], (b + A @ c)[free])
        if all(0 <= x <= m for x, m in zip(c, most, strict=True)):
            yield c
            if len(free) == len(b):  # nothing is held: the minimum of all
                return


def shortened(c: Tensor, length: float, bound: float) -> tuple[Tensor, float]:
    """c and its ½cᵀQc, brought down to the bound where they are above it.

    >>> shortened(torch.tensor([2.0]), length=8.0, bound=2.0)
    (tensor([1.]), 2.0)
    """
    if not length > bound:
        return c, length
    return c * math.sqrt(bound / length), bound
