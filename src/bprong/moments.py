"""What is measured: the mean and second moment of z, the second moment of δ.

Fujimoto & Ohira, sections 3.1 and 3.2:  c = E[z],  Ž = E[(z−c)(z−c)ᵀ],  D = E[δδᵀ].
Everything is float64, whatever the model computes in: float32 covariances of rank 20 in 200 dimensions show dozens of
negative eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Moments", "error_moments", "input_moments", "rows_of", "wide", "widened"]


@dataclass(frozen=True)
class Moments:
    """Sums over observations, kept so that two halves merge into the whole exactly.

    weight:   what the scatter is divided by: rows for z, targets drawn for δ; a real number, so that it can decay
    mean:     (d,) E[z], or None where nothing is centred (δ, and z of a layer without a trainable bias)
    scatter:  (d, d) Σ (z−mean)(z−mean)ᵀ, or Σ zzᵀ where nothing is centred
    """

    weight: float
    mean: Tensor | None
    scatter: Tensor

    @property
    def second(self) -> Tensor:
        """Ž or D: the scatter per unit of weight, (d, d)."""
        return self.scatter / self.weight

    @property
    def finite(self) -> bool:
        """Whether every number measured is finite (an infinite or NaN row spoils its own line of the scatter)."""
        return bool(torch.isfinite(self.scatter).all())

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of observations together (Chan, Golub & LeVeque's pairwise rule)."""
        if self.scatter.shape != other.scatter.shape or (self.mean is None) != (other.mean is None):
            raise ValueError(f"cannot merge moments of {_describe(self)} with moments of {_describe(other)}")
        weight = self.weight + other.weight
        scatter = self.scatter + other.scatter
        if self.mean is None or other.mean is None:
            return Moments(weight, None, scatter)
        apart = other.mean - self.mean
        # Written as a step from one mean, so that a constant coordinate keeps a variance of exactly zero.
        mean = self.mean + apart * (other.weight / weight)
        scatter = scatter + torch.outer(apart, apart) * (self.weight * other.weight / weight)
        return Moments(weight, mean, scatter)

    def overlay(self, other: Moments) -> Moments:
        """More errors of the same targets (another position, another root): the scatters add, the weight stays."""
        if self.mean is not None or other.mean is not None or self.weight != other.weight:
            raise ValueError(f"only errors of the same targets overlay, not {_describe(self)} and {_describe(other)}")
        return Moments(self.weight, None, self.scatter + other.scatter)

    def decay(self, keep: float) -> Moments:
        """The same moments with `keep` of their weight: `old.decay(ρ).merge(new)` is a running average without bias."""
        return Moments(self.weight * keep, self.mean, self.scatter * keep)


def input_moments(z: Tensor, centre: bool = True) -> Moments:
    """c and Ž from a batch of layer inputs z (..., d); every row counts once.

    >>> m = input_moments(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> m.mean.tolist(), m.second.tolist()
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    """
    rows = rows_of(z)
    if not centre:
        return Moments(float(len(rows)), None, rows.T @ rows)
    # The first row as the origin: constant features then have a variance of exactly zero, not one of rounding.
    shifted = rows - rows[0]
    shift = shifted.mean(dim=0)
    shifted -= shift
    return Moments(float(len(rows)), rows[0] + shift, shifted.T @ shifted)


def error_moments(delta: Tensor, targets: int) -> Moments:
    """D from errors δ (..., d) of a *summed* negative log-likelihood: rows are summed, the sum divided by `targets`.

    Where one weight acts at many positions, an example's score is the sum over positions, and with it the Fisher
    matrix: averaging over positions instead would lose a factor of their number.
    """
    rows = rows_of(delta)
    return Moments(float(targets), None, rows.T @ rows)


def rows_of(values: Tensor) -> Tensor:
    """(..., d) → (rows, d) in float64, detached, never sharing memory with `values`."""
    if values.ndim < 1 or values.numel() == 0:
        raise ValueError(
            f"moments need at least one row of at least one feature, not a tensor of {tuple(values.shape)}"
        )
    return wide(values).reshape(-1, values.shape[-1])


def wide(values: Tensor) -> Tensor:
    """A detached float64 copy, on the tensor's own device or, where that has no float64, on the CPU."""
    return widened(values.detach().clone())


def widened(values: Tensor) -> Tensor:
    """The same in float64, gradients and all."""
    device = torch.device("cpu") if values.device.type == "mps" else values.device
    return values.to(device, torch.float64)


def _describe(moments: Moments) -> str:
    kind = "uncentred" if moments.mean is None else "centred"
    return f"{moments.scatter.shape[0]} {kind} coordinates of weight {moments.weight:g}"
