"""What is measured: the mean and second moment of z, the second moment of δ.

Fujimoto & Ohira, sections 3.1 and 3.2:  c = E[z],  Ž = E[(z−c)(z−c)ᵀ],  D = E[δδᵀ].
Everything is float64, whatever the model computes in: float32 covariances of rank 20 in 200 dimensions show dozens of
negative eigenvalues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Moments",
    "count_moments",
    "error_moments",
    "finite",
    "input_moments",
    "outer",
    "rows_of",
    "wide",
    "widened",
]


@dataclass(frozen=True)
class Moments:
    """Sums over observations, kept so that two halves merge into the whole exactly.

    weight:   what the scatter is divided by: rows for z, targets drawn for δ; a real number, so that it can decay
    mean:     (d,) E[z], or None where nothing is centred (δ, and z of a layer without a trainable bias)
    scatter:  (d, d) Σ (z−mean)(z−mean)ᵀ, or Σ zzᵀ where nothing is centred

    Where a side is measured in blocks (`blocks.py`) both have a leading dimension for them: (n, d) and (n, d, d).
    """

    weight: float
    mean: Tensor | None
    scatter: Tensor

    @property
    def second(self) -> Tensor:
        """Ž or D: the scatter per unit of weight, shaped like it."""
        return self.scatter / self.weight

    def second_in(self, dtype: torch.dtype) -> Tensor:
        """The same in another precision, which halves the memory to go through on the way to float32."""
        return self.scatter.to(dtype, copy=True).div_(self.weight)

    @property
    def finite(self) -> bool:
        """Whether every number measured is finite (an infinite or NaN row spoils its own line of the scatter)."""
        return finite(self.scatter)

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of observations together (Chan, Golub & LeVeque's pairwise rule)."""
        if self.scatter.shape != other.scatter.shape or (self.mean is None) != (other.mean is None):
            raise ValueError(f"cannot merge moments of {_describe(self)} with moments of {_describe(other)}")
        return self.average(other, 1.0)

    def average(self, new: Moments, keep: float) -> Moments:
        """`self.decay(keep).merge(new)`, going through the scatters once: a running average without bias."""
        old, weight = self.weight * keep, self.weight * keep + new.weight
        scatter = torch.add(new.scatter, self.scatter, alpha=keep)
        if self.mean is None or new.mean is None:
            return Moments(weight, None, scatter)
        apart = new.mean - self.mean
        # Written as a step from one mean, so that a constant coordinate keeps a variance of exactly zero.
        mean, both = self.mean + apart * (new.weight / weight), old * new.weight / weight
        plain = apart.ndim == 1
        scatter = scatter.addr_(apart, apart, alpha=both) if plain else scatter.add_(outer(apart, apart), alpha=both)
        return Moments(weight, mean, scatter)

    def overlay(self, other: Moments) -> Moments:
        """More errors of the same targets (another position, another root): the scatters add, the weight stays."""
        if self.mean is not None or other.mean is not None or self.weight != other.weight:
            raise ValueError(f"only errors of the same targets overlay, not {_describe(self)} and {_describe(other)}")
        return Moments(self.weight, None, self.scatter + other.scatter)

    def decay(self, keep: float) -> Moments:
        """The same moments with `keep` of their weight: `old.decay(ρ).merge(new)` is a running average without bias."""
        return Moments(self.weight * keep, self.mean, self.scatter * keep)


def input_moments(z: Tensor, centre: bool = True, blocks: int = 0) -> Moments:
    """c and Ž from a batch of layer inputs z (..., d), or (..., blocks, d); every row counts once.

    >>> m = input_moments(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> m.mean.tolist(), m.second.tolist()
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    """
    rows = rows_of(z, blocks)
    if not centre:
        return Moments(float(len(rows)), None, _scatter(rows))
    # The first row as the origin: constant features then have a variance of exactly zero, not one of rounding.
    first = rows[0].clone()
    rows -= first
    shift = rows.mean(dim=0)
    rows -= shift
    return Moments(float(len(rows)), first + shift, _scatter(rows))


def error_moments(delta: Tensor, targets: int, blocks: int = 0) -> Moments:
    """D from errors δ (..., d) of a *summed* negative log-likelihood: rows are summed, the sum divided by `targets`.

    Where one weight acts at many positions, an example's score is the sum over positions, and with it the Fisher
    matrix: averaging over positions instead would lose a factor of their number.
    """
    return Moments(float(targets), None, _scatter(rows_of(delta, blocks)))


def count_moments(indices: Tensor, features: int) -> Moments:
    """Ž of one-hot inputs, from where their ones are: diagonal, so `features` blocks of one coordinate each."""
    counts = torch.bincount(indices.flatten(), minlength=features).to(torch.float64)
    return Moments(float(indices.numel()), None, counts.view(-1, 1, 1))


def _scatter(rows: Tensor) -> Tensor:
    """Σ over rows of their outer products, block by block: (rows, d) → (d, d), (rows, n, d) → (n, d, d)."""
    if rows.shape[-1] == 1:
        return rows.square().sum(dim=0).unsqueeze(-1)
    return rows.T @ rows if rows.ndim == 2 else rows.permute(1, 2, 0) @ rows.transpose(0, 1)


def finite(values: Tensor) -> bool:
    """Whether all are: their sum tells at a fraction of the price, unless it overflows."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def outer(a: Tensor, b: Tensor) -> Tensor:
    """abᵀ, of every block where there are several."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def rows_of(values: Tensor, blocks: int = 0) -> Tensor:
    """(..., d) → (rows, d), or (..., blocks, d) → (rows, blocks, d): float64, detached, a copy."""
    if values.ndim < 1 or values.numel() == 0:
        raise ValueError(
            f"moments need at least one row of at least one feature, not a tensor of {tuple(values.shape)}"
        )
    return wide(values).reshape(-1, *values.shape[-2 if blocks else -1 :])


def wide(values: Tensor) -> Tensor:
    """A detached float64 copy, on the tensor's own device or, where that has no float64, on the CPU."""
    return values.detach().to(_roomy(values), torch.float64, copy=True)


def widened(values: Tensor) -> Tensor:
    """The same in float64, gradients and all."""
    return values.to(_roomy(values), torch.float64)


def _roomy(values: Tensor) -> torch.device:
    return torch.device("cpu") if values.device.type == "mps" else values.device


def _describe(moments: Moments) -> str:
    kind = "uncentred" if moments.mean is None else "centred"
    return f"{moments.scatter.shape[0]} {kind} coordinates of weight {moments.weight:g}"
