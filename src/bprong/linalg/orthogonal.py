"""A matrix with all its singular values set to about one, in coordinates that two factors whiten.

    msgn(X) = (XXᵀ)^(-1/2) X                        all singular values of X become 1
    Rᵀ msgn(R M Uᵀ) U,   RᵀR = P,  UᵀU = Q          the same in whitened coordinates, written in ordinary ones

Muon (Jordan et al., 2024) approaches msgn by five steps X ← (a + bA + cA²) X with A = XXᵀ, which bring singular values
from 0.003 on to between 0.7 and 1.2. All of these steps are polynomials in the first A, so that X itself need not be
iterated. With the smaller side that of the outputs,

    A = P (M Q Mᵀ)      and      Rᵀ msgn(R M Uᵀ) U = p(A) P (M Q)

because P M Q Mᵀ and R M Q Mᵀ Rᵀ have the same powers between Rᵀ and R: products of small square matrices, one product
with the larger factor, and no roots. A is divided by (tr A⁴)^¼, which is closer to its largest eigenvalue than the
trace, which Muon divides by so that no eigenvalue is above one. Smaller singular values come to one by that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bprong.linalg.factors import Factor

QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's a, b, c: chosen for a steep rise at zero
STEPS = 5


def polynomial(A: Tensor, steps: int = STEPS) -> Tensor:
    """Return p(A) with p(A) X ≈ msgn(X) for A = XXᵀ with eigenvalues of at most one; (…, m, m).

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
    tensor([[ 1.0506,  0.0000,  0.0000],
            [ 0.0000,  0.0000, -0.7111]], dtype=torch.float64)
    """
    if M.shape[-2] > M.shape[-1]:
        return whitened_msgn(M.mT, inputs, outputs).mT
    largest = M.abs().amax(dim=(-2, -1), keepdim=True)
    tiny = torch.finfo(torch.float32).tiny  # M may be zero, and then stays so
    M = M / largest.clamp(min=tiny)  # to avoid overflow
    MQ = M if inputs is None else inputs.right(M)
    A = MQ @ M.mT
    if outputs is not None:
        A = outputs.left(A)
    bound = A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=tiny)
    A = A / bound
    square = A @ A
    fourth = (square * square.mT).sum(dim=(-2, -1), keepdim=True) ** 0.25
    p = polynomial(A / fourth.where(fourth > 0, 1.0))
    if outputs is not None:
        p = outputs.right(p)
    return p @ (MQ * (bound * fourth).rsqrt().nan_to_num(posinf=0.0))
