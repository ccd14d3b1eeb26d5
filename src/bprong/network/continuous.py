"""Continuous whitening: every batch moves a whitener a little, instead of an exact factorisation from time to time.

Cardoso & Laheld (1996) whiten by the relative gradient  U ← U − μ (E[z†z†ᵀ] − I) U.  As it stands it diverges for large
μ, and on rank-deficient input for any μ. The stable form is exact for the second moment that it tracks,

    S' = (1−μ) S + μ VᵀV,      UᵀU = S⁻¹,   V (n, d) the rows of a batch, VᵀV their second moment with damping,

whose whitener moves by a factor T close to the identity. With V† = V Uᵀ, ρ = μ/(1−μ) and I + ρ V†V†ᵀ = L Lᵀ, (n, n),

    U' = T U,   T = (I − V†ᵀ A V†) / √(1−μ),   A = ρ (Lᵀ+I)⁻¹ L⁻¹,     T⁻¹ = √(1−μ) (I + ρ V†ᵀ (L+I)⁻¹ V†),

for any 0 < μ < 1 (Andrews' square root of Woodbury's identity). To first order T = I − μ/2 (V†ᵀV† − I), the relative
gradient with half of this μ; for one row it is Cardoso & Laheld's normalised algorithm. T depends on V† alone, so the
iteration is equivariant: on inputs A z it gives U A⁻¹.

The damping ε I has full rank, which the rows of a batch have not. It is added as rows √(Kε) e_j for a K-th of the
coordinates at each step, so that all coordinates have been damped within half of the 1/μ steps after which the tracked
moment forgets.

A side is factored exactly at the start (its *anchor*), and again once it has drifted from white. If S is the moment of
the batches, tr(V†ᵀV†)/d is 1 on average, whatever the sampling noise. A side has drifted when the running average of
this, which starts at 1 and forgets as S does, leaves ½ … 2.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bprong.errors import WhiteningError
from bprong.linalg.factors import Damping
from bprong.linalg.moments import to_float64
from bprong.network.coordinates import Multiplier

CYCLES = 2  # times that every coordinate is damped within 1/μ steps: ε then stays within 0.77 … 1.27 of itself
DRIFT = 2.0  # a side is anchored again once its whitened rows are this many times too long or too short, squared


class Track(NamedTuple):
    """What is remembered about one side between steps, besides its U and c, or its R.

    length:  running average of tr(V†ᵀV†)/d, the squared length of whitened rows per coordinate
    turn:    relative steps since the anchor; chooses the coordinates that are damped next
    """

    length: float = 1.0
    turn: int = 0

    def step(self, U: Tensor, V: Tensor, mu: float, damping: Damping) -> tuple[Multiplier, Track]:
        """Return T of the relative step by rows V (n, d) of a batch, VᵀV their second moment, and the track after it.

        Raises WhiteningError if the side has drifted and needs an exact factorisation.
        """
        epsilon = damping.amounts(V.square().sum(dim=0))  # relative damping is linear in these, and averages like them
        rows = torch.cat([V @ U.mT, damping_rows(U, epsilon, mu, self.turn)])
        length = (1 - mu) * self.length + mu * float(rows.square().sum()) / len(U)
        if not 1 / DRIFT <= length <= DRIFT:  # written so that NaN counts as drift
            raise WhiteningError("it has drifted from white")
        return near_identity(rows, mu), Track(length, self.turn + 1)


def damping_rows(U: Tensor, epsilon: Tensor, mu: float, turn: int) -> Tensor:
    """Return the rows √(Kε) U e_j (m, d) that damp every K-th of the coordinates at step number `turn`, for ε (d,).

    >>> [damping_rows(torch.eye(4), torch.ones(4), 0.25, turn).argmax(dim=1).tolist() for turn in range(3)]
    [[0, 2], [1, 3], [0, 2]]
    """
    K = max(1, int(1 / (CYCLES * mu)))
    damped = slice(turn % K, None, K)
    return (U[:, damped] * (K * epsilon[damped]).sqrt()).mT


def centred_rows(V: Tensor, mean: Tensor, c: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """Return rows V of a second moment about the mean z̄ as rows about c' = (1−μ)c + μz̄, and c'.

    (1−μ)S + μVᵀV is then the moment about c' of the mixture of both, including the distance between their means.
    """
    between = math.sqrt(1 - mu) * (mean - c)
    return torch.cat([V, between.unsqueeze(0)]), c + mu * (mean - c)


def near_identity(V: Tensor, mu: float) -> Multiplier:
    """Return T with T ((1−μ) I + μ VᵀV) Tᵀ = I, for rows V (n, d) in whitened coordinates."""
    if len(V) > V.shape[-1]:
        V = torch.linalg.qr(V, mode="r").R  # d rows with the same VᵀV
    rho = mu / (1 - mu)
    gram = to_float64(V @ V.mT)
    one = torch.eye(len(V), dtype=gram.dtype, device=gram.device)
    L = torch.linalg.cholesky(one + rho * (gram + gram.mT) / 2)
    # Triangular solves of the batch's size cost little in float64; the products with V keep its own precision.
    B = torch.linalg.solve_triangular(L + one, rho * one, upper=False)
    A = torch.linalg.solve_triangular(L.mT, B, upper=True).mT
    gain = (1 - mu) ** -0.5
    return Multiplier(partial(_times, gain, V, -A.to(V)), partial(_times, 1 / gain, V, B.mT.to(V)))


def _times(gain: float, V: Tensor, C: Tensor, M: Tensor) -> Tensor:
    """Return gain · (I + VᵀCV) M, for V (n, d), C (n, n) and M (d, k): 4ndk operations."""
    V = V.to(M)
    return torch.addmm(M, V.mT, C.to(M) @ (V @ M), alpha=gain, beta=gain)
