"""F v at the output for likelihoods without a formula: from their roots, or from targets drawn of the model's own.

F is the Fisher matrix of one target at the output, E_y[g gᵀ] with g = ∇(−log p(y | output)), y drawn from the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bprong.moments import widened

if TYPE_CHECKING:
    from bprong.likelihood import Likelihood

__all__ = ["products", "times_drawn", "times_roots"]


def products(V: Tensor, FV: Tensor, targets: int, counted: Tensor | None = None) -> Tensor:
    """vᵢᵀ F vⱼ summed over targets, or over those that count: (k, k), exactly symmetric; V, FV: (k, *output)."""
    V, FV = V.reshape(len(V), targets, -1), FV.reshape(len(FV), targets, -1)
    if counted is not None:
        V, FV = V[:, counted.flatten()], FV[:, counted.flatten()]
    matrix = V.flatten(1) @ FV.flatten(1).T
    return (matrix + matrix.T) / 2


def times_roots(roots: Iterable[Tensor], V: Tensor, targets: int) -> Tensor:
    """F v = Σ_k g_k (g_kᵀ v), target by target, for every v of V; V: (directions, *output), float64.

    >>> times_roots([torch.tensor([[2.0, 0.0]])], torch.ones(1, 1, 2, dtype=torch.float64), targets=1)
    tensor([[[4., 0.]]], dtype=torch.float64)
    """
    total, rows = torch.zeros_like(V), (len(V), targets, -1)
    for root in roots:
        g = widened(root.detach()).reshape(1, targets, -1)
        total += (g * (g * V.reshape(rows)).sum(dim=-1, keepdim=True)).view_as(V)
    return total


def times_drawn(likelihood: Likelihood, output: Tensor, V: Tensor) -> Tensor:
    """F v with one drawn target y each: ∇²(−log p(y)) v, whose mean it is where −log p is smooth.

    In natural parameters of an exponential family that does not depend on y and is exact. Elsewhere it may come out
    negative by chance, and where −log p has kinks (Laplace) it misses what is in them: then g gᵀ v, which is noisier.
    """
    y = likelihood.sample(output)
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        (g,) = torch.autograd.grad(likelihood.total_nll(leaf, y), leaf, create_graph=True)
        try:
            HV = torch.stack([widened(_product(g, leaf, v.to(leaf.dtype))) for v in V])
        except RuntimeError:  # once differentiable only, says torch in several ways
            HV = torch.full_like(V, torch.nan)
    return HV if _is_curvature(products(V, HV, 1)) and HV.any() else times_roots([g], V, likelihood.targets(output))


def _product(g: Tensor, leaf: Tensor, v: Tensor) -> Tensor:
    """The derivative of g along v, a Hessian being symmetric."""
    if not g.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(g, leaf, v, retain_graph=True, materialize_grads=True)[0]


def _is_curvature(matrix: Tensor) -> bool:
    """Whether vᵀHv is finite and, but for rounding, nowhere negative."""
    if not torch.isfinite(matrix).all():
        return False
    eigenvalues = torch.linalg.eigvalsh(matrix)
    return bool(eigenvalues[0] >= -1e-6 * eigenvalues[-1])
