"""Changes of a layer's coordinates, and what they do to parameters, velocities, gradients and squared gradients.

    whitened:  a = Rᵀ (W† U (z − c) + b†)          ordinary:  W = Rᵀ W† U,  b = Rᵀ b† − W c

A forward change replaces (U, c) by (U', c'), a backward change replaces R by R'. Both leave a as it is for every z
(Fujimoto & Ohira, "Updating of the model parameters", sections 3.1 and 3.2). In terms of T = U' U⁻¹ or T = R' R⁻¹:

    forward:   W†' = W† T⁻¹,  b†' = b† + W† s   with  s = U (c' − c)
    backward:  W†' = T⁻ᵀ W†,  b†' = T⁻ᵀ b†

Both maps are linear in (W†, b†), so a velocity, such as SGD's momentum buffer, moves exactly as the parameters do. A
gradient is a covector and moves by the inverse transpose. The two differ unless T is orthogonal and c stays, so
each kind of state has a method of its own.

A weight keeps its own shape: (out, in), or (out, channels, *kernel) for a convolution. If a side is whitened in several
blocks (`Blocks`), it changes block by block, and U, c and R have a leading dimension for the blocks. If the blocks act
on channels, all positions of the kernel share U and c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bprong.errors import WhiteningError
from bprong.linalg.blocks import Blocks
from bprong.linalg.moments import feature_means, float64_copy, outer, to_float64

Pair = tuple[Tensor, Tensor | None]  # a value for a weight (out, …), and one for its bias (out,) if it has one
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Quotient:
    """T = U' U⁻¹ for any two invertible matrices, or n pairs of them, in float64."""

    old: Tensor
    new: Tensor

    def times(self, M: Tensor) -> Tensor:
        """T M."""
        return torch.matmul(self.new, torch.linalg.solve(self.old, M))

    def transposed_solve(self, M: Tensor) -> Tensor:
        """T⁻ᵀ M."""
        return cast(Tensor, torch.linalg.solve(self.new.mT, self.old.mT @ M))


@dataclass(frozen=True)
class NearIdentity:
    """T = gain · (I − VᵀAV), with T⁻¹ = (I + VᵀBV) / gain: a step of continuous whitening. V (n, d), A and B (n, n)."""

    V: Tensor
    A: Tensor
    B: Tensor
    gain: float

    @classmethod
    def whitening(cls, V: Tensor, mu: float) -> NearIdentity:
        """T with T ((1−μ) I + μ VᵀV) Tᵀ = I, for rows V (n, d) in whitened coordinates."""
        if len(V) > V.shape[-1]:
            V = torch.linalg.qr(V, mode="r").R  # d rows with the same VᵀV
        rho = mu / (1 - mu)
        gram = to_float64(V @ V.mT)
        one = torch.eye(len(V), dtype=gram.dtype, device=gram.device)
        L = torch.linalg.cholesky(one + rho * (gram + gram.mT) / 2)
        # Triangular solves of the batch's size cost little in float64; the products with V keep its own precision.
        B = torch.linalg.solve_triangular(L + one, rho * one, upper=False)
        A = torch.linalg.solve_triangular(L.mT, B, upper=True).mT
        return cls(V, A.to(V), B.to(V), (1 - mu) ** -0.5)

    def times(self, M: Tensor) -> Tensor:
        """T M, for M (d, k): 4ndk operations."""
        V = self.V.to(M)
        return torch.addmm(M, V.mT, self.A.to(M) @ (V @ M), alpha=-self.gain, beta=self.gain)

    def transposed_solve(self, M: Tensor) -> Tensor:
        V = self.V.to(M)
        return torch.addmm(M, V.mT, self.B.mT.to(M) @ (V @ M), alpha=1 / self.gain, beta=1 / self.gain)


Multiplier = Quotient | NearIdentity  # T of a change of coordinates, U' = T U or R' = T R


@dataclass(frozen=True)
class Change:
    """(U, c) → (T U, c') with s = U (c' − c), shaped like c; or R → T R, with s = None.

    blocks: of the side that changes. Each method moves a (W†, b†) pair to the new coordinates.
    """

    T: Multiplier
    blocks: Blocks
    s: Tensor | None = None

    def velocity(self, W: Tensor, b: Tensor | None) -> Pair:
        """Moves parameters, and whatever is added to them."""
        if self.s is None:
            return on_outputs(self.T.transposed_solve, W, b, self.blocks)
        moved = on_inputs(self.T.transposed_solve, W, self.blocks)
        return moved, None if b is None else b + times_mean(W, self.s, self.blocks)

    def gradient(self, W: Tensor, b: Tensor | None) -> Pair:
        """Moves gradients by the parameters."""
        if self.s is None:
            return on_outputs(self.T.times, W, b, self.blocks)
        return on_inputs(self.T.times, W if b is None else W - self._outer(b, self.s, W), self.blocks), b

    def squares(self, W: Tensor, b: Tensor | None) -> Pair:
        """Moves mean squares v of gradients, which are taken to be uncorrelated.

        With g' = L g, the diagonal of L diag(v) Lᵀ is (L∘L) v, the best estimate that a diagonal v allows. It stays
        positive; correlations, which v does not contain, are lost.
        """
        shape = self.blocks.shape
        T = self.T.times(torch.eye(shape[-1], dtype=W.dtype, device=W.device).expand(shape))
        if self.s is None:
            return on_outputs(T.square().matmul, W, b, self.blocks)
        moved = on_inputs(T.square().matmul, W, self.blocks)
        if b is not None:
            moved = moved + self._outer(b, (T @ self.s.unsqueeze(-1)).squeeze(-1).square(), W)
        return moved, b

    def _outer(self, b: Tensor, s: Tensor, like: Tensor) -> Tensor:
        """b sᵀ in the shape of a weight."""
        return outer(b.reshape(self.blocks.groups, -1), feature_means(s, self.blocks)).reshape(like.shape)


def on_inputs(apply: Map, W: Tensor, blocks: Blocks) -> Tensor:
    """Applies a map of columns, (d, k) or (n, d, k) for n blocks, to the rows of a weight: W L for `(L.mT).matmul`."""
    columns = W.reshape(blocks.groups, -1, blocks.count, blocks.size, blocks.positions).permute(0, 2, 3, 1, 4)
    moved = apply(columns.reshape(*blocks.shape[:-1], -1)).reshape(columns.shape)
    return moved.permute(0, 3, 1, 2, 4).reshape(W.shape)


def on_outputs(apply: Map, W: Tensor, b: Tensor | None, blocks: Blocks) -> Pair:
    """Applies a map of columns to those of a weight (out, …) and to its bias: (L W, L b) for `L.matmul`."""
    shape = blocks.shape[:-1]
    moved = apply(W.reshape(*shape, -1)).reshape(W.shape)
    return moved, None if b is None else apply(b.reshape(*shape, -1)).reshape(b.shape)


def times_mean(W: Tensor, mean: Tensor, blocks: Blocks) -> Tensor:
    """W c, (out,), for c shaped like the layer's."""
    return (W.reshape(blocks.groups, -1, blocks.features) @ feature_means(mean, blocks).unsqueeze(-1)).flatten()


@torch.no_grad()
def check_outputs(layer: nn.Module, new: Mapping[str, Tensor], probe: Tensor) -> None:
    """Raises WhiteningError unless the layer's outputs on `probe` are finite and stay the same with new tensors."""
    before: Tensor = layer(probe)
    if not torch.isfinite(before).all():
        raise WhiteningError("its outputs on this batch are not finite")
    dtype = torch.finfo(before.dtype)
    difference = functional_call(layer, dict(new), (probe,)) - before
    moved = float64_copy(difference).norm() / float64_copy(before).norm().clamp(min=dtype.tiny)
    if not moved <= dtype.eps**0.5:  # written so that NaN is an error too
        raise WhiteningError(
            f"re-whitening would change its outputs on this batch by {float(moved):.1e} relative, more than "
            f"{before.dtype} allows ({dtype.eps**0.5:.1e}); use a larger damping, which makes the change better "
            f"conditioned"
        )
