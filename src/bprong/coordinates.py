"""What a change of a layer's coordinates does to points, velocities, gradients and squared gradients.

    whitened:  a = Rᵀ (W† U (z − c) + b†)          ordinary:  W = Rᵀ W† U,  b = Rᵀ b† − W c

The forward side changes (U, c) → (U', c'), the backward side R → R', each so that a stays what it is for every z
(Fujimoto & Ohira, "Updating of the model parameters", sections 3.1 and 3.2). Both maps are linear in (W†, b†), so a
velocity, such as SGD's momentum buffer, moves exactly as the parameters do. A gradient is a covector: it moves by the
inverse transpose. Taking one for the other was off by a factor 12 in a small case.

All tensors are float64 and hold the very values of the layer's buffers: solving against U' as it was rounded, not as
it was computed, leaves the rounding of W† as the only error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["BackwardChange", "Change", "ForwardChange", "Pair"]

Pair = tuple[Tensor, Tensor | None]  # what belongs to a weight (out, in) and to a bias (out,), if there is one


class Change(Protocol):
    """A change of coordinates of one layer; each rule takes and returns what belongs to (W†, b†)."""

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        """Parameters, and whatever is added to them: dW†' from dW†."""

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        """Whatever multiplies them: ∂/∂W†' from ∂/∂W†."""

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        """Mean squares of gradients, taken as uncorrelated.

        With g' = L g the diagonal of L diag(v) Lᵀ is (L∘L) v: the best estimate that a diagonal v allows. Positive
        stays positive; the correlations, which v never knew, are lost.
        """


@dataclass(frozen=True)
class ForwardChange:
    """(U, c) → (U', c'):  W†' = W† U U'⁻¹,  b†' = b† + W† s  with  s = U (c' − c)."""

    U: Tensor
    c: Tensor
    U_new: Tensor
    c_new: Tensor

    @cached_property
    def s(self) -> Tensor:
        return self.U @ (self.c_new - self.c)

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        W_new = torch.linalg.solve(self.U_new, W @ self.U, left=False)
        return W_new, None if b is None else b + W @ self.s

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        centred = W if b is None else W - torch.outer(b, self.s)
        return torch.linalg.solve(self.U.T, centred, left=False) @ self.U_new.T, b

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        A = torch.linalg.solve(self.U.T, self.U_new.T)  # g_W' = (g_W − g_b sᵀ) A
        moved = W @ A**2
        return (moved if b is None else moved + torch.outer(b, (self.s @ A) ** 2)), b


@dataclass(frozen=True)
class BackwardChange:
    """R → R':  W†' = R'^-T Rᵀ W†,  b†' = R'^-T Rᵀ b†."""

    R: Tensor
    R_new: Tensor

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        return _on_both(torch.linalg.solve(self.R_new.T, self.R.T), W, b)

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        return _on_both(torch.linalg.solve(self.R, self.R_new, left=False), W, b)

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        return _on_both(torch.linalg.solve(self.R, self.R_new, left=False) ** 2, W, b)


def _on_both(matrix: Tensor, W: Tensor, b: Tensor | None) -> Pair:
    return matrix @ W, None if b is None else matrix @ b
