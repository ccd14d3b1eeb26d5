"""What a change of a layer's coordinates does to points, velocities, gradients and squared gradients.

    whitened:  a = Rᵀ (W† U (z − c) + b†)          ordinary:  W = Rᵀ W† U,  b = Rᵀ b† − W c

The forward side changes (U, c) → (U', c'), the backward side R → R', each so that a stays what it is for every z
(Fujimoto & Ohira, "Updating of the model parameters", sections 3.1 and 3.2). Both maps are linear in (W†, b†), so a
velocity, such as SGD's momentum buffer, moves exactly as the parameters do. A gradient is a covector: it moves by the
inverse transpose. Taking one for the other was off by a factor 12 in a small case.

A weight keeps its own shape, (out, in) or a convolution's (out, channels, *kernel). A side in blocks (`blocks.py`), of
which the groups of a convolution are one kind, changes block by block: U, c and R then have a leading dimension for
them. Where blocks act on channels, every tap of the kernel has the same U and c, and s counts once for each.

All tensors are float64 and hold the very values of the layer's buffers: solving against U' as it was rounded, not as
it was computed, leaves the rounding of W† as the only error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bprong.blocks import Blocks

__all__ = ["BackwardChange", "Change", "ForwardChange", "Pair", "on_outputs"]

Pair = tuple[Tensor, Tensor | None]  # what belongs to a weight (out, …) and to a bias (out,), if there is one


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
    """(U, c) → (U', c'):  W†' = W† U U'⁻¹,  b†' = b† + W† s  with  s = U (c' − c).

    U and c are shaped as `blocks` says, by default one block of all features.
    """

    U: Tensor
    c: Tensor
    U_new: Tensor
    c_new: Tensor
    blocks: Blocks | None = None

    @cached_property
    def s(self) -> Tensor:
        return _times(self.U, self.c_new - self.c)

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        W_new = torch.linalg.solve(self.U_new, self._split(W) @ self.U, left=False)
        if b is not None:
            b = b + (self._grouped(W) @ self._features(self.s).mT).reshape(b.shape)
        return self._joined(W_new, W), b

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        centred = W if b is None else W - self._outer(b, self.s).reshape(W.shape)
        return self._joined(torch.linalg.solve(self.U.mT, self._split(centred), left=False) @ self.U_new.mT, W), b

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        A = torch.linalg.solve(self.U.mT, self.U_new.mT)  # g_W' = (g_W − g_b sᵀ) A
        moved = self._joined(self._split(W) @ A**2, W)
        return (moved if b is None else moved + self._outer(b, _times(A.mT, self.s) ** 2).reshape(W.shape)), b

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(len(self.c)) if self.blocks is None else self.blocks

    def _grouped(self, W: Tensor) -> Tensor:
        """(groups, out of a group, features of a group)."""
        return W.reshape(self._blocks.groups, -1, self._blocks.features)

    def _features(self, values: Tensor) -> Tensor:
        """(groups, 1, features of a group) from what is shaped like c."""
        return self._blocks.features_of(values).reshape(self._blocks.groups, 1, -1)

    def _outer(self, b: Tensor, s: Tensor) -> Tensor:
        return b.reshape(self._blocks.groups, -1, 1) * self._features(s)

    def _split(self, W: Tensor) -> Tensor:
        """A weight as the rows that U acts on, block by block: (groups · count, out of a group · taps, size)."""
        k = self._blocks
        rows = W.reshape(k.groups, -1, k.count, k.size, k.taps).permute(0, 2, 1, 4, 3).flatten(0, 1).flatten(1, 2)
        return rows if k.lead else rows.squeeze(0)

    def _joined(self, rows: Tensor, like: Tensor) -> Tensor:
        """The reverse of `_split`, in the shape of a weight."""
        k = self._blocks
        return rows.reshape(k.groups, k.count, -1, k.taps, k.size).permute(0, 2, 1, 4, 3).reshape(like.shape)


@dataclass(frozen=True)
class BackwardChange:
    """R → R':  W†' = R'^-T Rᵀ W†,  b†' = R'^-T Rᵀ b†; of each block where there are several."""

    R: Tensor
    R_new: Tensor

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        return _on_both(torch.linalg.solve(self.R_new.mT, self.R.mT), W, b)

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        return _on_both(torch.linalg.solve(self.R, self.R_new, left=False), W, b)

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        return _on_both(torch.linalg.solve(self.R, self.R_new, left=False) ** 2, W, b)


def _on_both(matrix: Tensor, W: Tensor, b: Tensor | None) -> Pair:
    return on_outputs(matrix, W), None if b is None else on_outputs(matrix, b)


def on_outputs(matrix: Tensor, W: Tensor) -> Tensor:
    """A matrix, block-diagonal where it has a leading dimension, times the outputs of a weight or bias (out, …)."""
    return (matrix @ W.reshape(*matrix.shape[:-1], -1)).reshape(W.shape)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
