"""A matrix with all its singular values set to about one, in coordinates that two factors whiten.

    msgn(X) = (XXᵀ)^(-1/2) X                        all singular values of X become 1
    Rᵀ msgn(R M Uᵀ) U,   RᵀR = P,  UᵀU = Q          the same in whitened coordinates, written in ordinary ones

Muon (Jordan et al., 2024) approaches msgn by five steps X ← (a + bA + cA²) X with A = XXᵀ, which bring singular values
from 0.003 on to between 0.7 and 1.2. All of these steps are polynomials in the first A, so that X itself need not be
iterated: with R the root of the smaller side, say that of the outputs,

    A = R (M Q Mᵀ) Rᵀ / t,  t = tr      and      Rᵀ msgn(R M Uᵀ) U = Rᵀ p(A) R (M Q) / √t

which takes products of small square matrices, one product with the larger factor, and no root of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bprong.linalg.factors import Factor

QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's a, b, c: chosen for a steep rise at zero
STEPS = 5


def polynomial(A: Tensor, steps: int = STEPS) -> Tensor:
    """Return p(A) with p(A) X ≈ msgn(X) for A = XXᵀ of trace one; (…, m, m).

    >>> A = torch.diag(torch.tensor([0.64, 0.36], dtype=torch.float64))
    >>> (polynomial(A) @ A.sqrt()).diagonal()
    tensor([1.1192, 0.7229], dtype=torch.float64)
    """
    a, b, c = QUINTIC
    add_product = torch.baddbmm if A.ndim == 3 else torch.addmm
    p = add_product(A, A, A, beta=b, alpha=c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p if steps == 1 else polynomial(p @ (A @ p), steps - 1) @ p  # A of the next step is that of p X


def whitened_msgn(M: Tensor, outputs: Factor | None = None, inputs: Factor | None = None) -> Tensor:
    """Return Rᵀ msgn(R M Uᵀ) U of a matrix (out, in), or of each of several (n, out, in).

    outputs: P = RᵀR; inputs: Q = UᵀU; None: the identity

    >>> M = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -4.0]], dtype=torch.float64)
    >>> whitened_msgn(M)
    tensor([[ 0.7229,  0.0000,  0.0000],
            [ 0.0000,  0.0000, -1.1192]], dtype=torch.float64)
    """
    if M.shape[-2] > M.shape[-1]:
        return whitened_msgn(M.mT, inputs, outputs).mT
    largest = M.abs().amax(dim=(-2, -1), keepdim=True)
    M = M / largest.clamp(min=torch.finfo(M.dtype).tiny)  # to avoid overflow
    MQ = M if inputs is None else inputs.right(M)
    A = MQ @ M.mT
    if outputs is not None:
        A = outputs.root.right(outputs.root.left(A))
    trace = A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    trace = trace.clamp(min=torch.finfo(torch.float32).tiny)  # M may be zero, and then stays so
    p = polynomial(A / trace)
    if outputs is not None:
        p = outputs.root.right(outputs.root.left(p))
    return p @ (MQ * trace.rsqrt())
