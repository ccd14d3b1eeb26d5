"""Changes of coordinates by a factor close to the identity, U' = T U: as `coordinates.py`, without solves of size d.

A weight is taken as its matrix (out, in), whatever its shape; sides in blocks are not moved in this way.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bprong.continuous import Factor
from bprong.coordinates import Pair

__all__ = ["BackwardStep", "ForwardStep"]


@dataclass(frozen=True)
class ForwardStep:
    """(U, c) → (T U, c'):  W†' = W† T⁻¹,  b†' = b† + W† s  with  s = U (c' − c)."""

    T: Factor
    s: Tensor

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        moved = self.T.transposed_solve(W.flatten(1).mT).mT.reshape(W.shape)
        return moved, None if b is None else b + W.flatten(1) @ self.s.to(b)

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        centred = W.flatten(1) if b is None else W.flatten(1) - b.unsqueeze(-1) * self.s.to(b)
        return self.T.times(centred.mT).mT.reshape(W.shape), b

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        T = self.T.dense().to(W)
        moved = W.flatten(1) @ T.mT.square()
        if b is not None:
            moved = moved + b.unsqueeze(-1) * (T @ self.s.to(b)).square()
        return moved.reshape(W.shape), b


@dataclass(frozen=True)
class BackwardStep:
    """R → T R:  W†' = T⁻ᵀ W†,  b†' = T⁻ᵀ b†."""

    T: Factor

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        moved = self.T.transposed_solve(W.flatten(1)).reshape(W.shape)
        return moved, None if b is None else self.T.transposed_solve(b.unsqueeze(-1)).squeeze(-1)

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        moved = self.T.times(W.flatten(1)).reshape(W.shape)
        return moved, None if b is None else self.T.times(b.unsqueeze(-1)).squeeze(-1)

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        T = self.T.dense().to(W).square()
        return (T @ W.flatten(1)).reshape(W.shape), None if b is None else T @ b
