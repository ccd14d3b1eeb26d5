"""What is measured: the mean and the second moment of z, the second moment of δ.

Fujimoto & Ohira, sections 3.1 and 3.2:  c = E[z],  Ž = E[(z−c)(z−c)ᵀ],  D = E[δδᵀ].
Everything is float64, whatever the model computes in: float32 covariances of rank 20 in 200 dimensions show dozens of
negative eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bprong.linalg.blocks import Blocks, split


@dataclass(frozen=True)
class Moments:
    """Sums over observations, so that the moments of two halves merge exactly into those of the whole.

    weight:   what the scatter is divided by: rows for z, targets for δ; a real number, so that it can decay
    mean:     (d,) E[z], or None where nothing is centred (δ, and z of a layer without a trainable bias)
    scatter:  (d, d) Σ (z−mean)(z−mean)ᵀ, or Σ zzᵀ where nothing is centred

    For a side in n blocks both have a leading dimension: (n, d) and (n, d, d).
    """

    weight: float
    mean: Tensor | None
    scatter: Tensor

    @property
    def second(self) -> Tensor:
        """Ž or D: the scatter divided by the weight."""
        return self.scatter / self.weight

    def second_in(self, dtype: torch.dtype) -> Tensor:
        """Ž or D as a copy in another precision; cheaper than converting `second`."""
        return self.scatter.to(dtype, copy=True).div_(self.weight)

    @property
    def variances(self) -> Tensor:
        """The diagonal of Ž or D."""
        return self.scatter.diagonal(dim1=-2, dim2=-1) / self.weight

    @property
    def finite(self) -> bool:
        """Whether every observation was finite: an infinite or NaN row leaves its mark in the scatter."""
        return finite(self.scatter)

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of observations together (Chan, Golub & LeVeque's pairwise rule)."""
        ours, theirs = (
            f"{'uncentred' if m.mean is None else 'centred'} moments of shape {tuple(m.scatter.shape)}"
            for m in (self, other)
        )
        if ours != theirs:
            raise ValueError(f"cannot merge {ours} with {theirs}")
        return self.average(other, 1.0)

    def average(self, new: Moments, keep: float) -> Moments:
        """A running average without bias: the merger of `new` with these moments, whose weight counts `keep` times."""
        old = self.weight * keep
        weight = old + new.weight
        scatter = torch.add(new.scatter, self.scatter, alpha=keep)
        if self.mean is None or new.mean is None:
            return Moments(weight, None, scatter)
        difference = new.mean - self.mean
        # Written as a step from one mean, so that a constant coordinate keeps a variance of exactly zero.
        mean = self.mean + difference * (new.weight / weight)
        between = old * new.weight / weight
        return Moments(weight, mean, add_outer(scatter, difference, difference, between, out=scatter))

    def overlay(self, other: Moments) -> Moments:
        """Adds errors of the same targets (another position, another root): the scatters add, the weight stays."""
        if self.weight != other.weight:
            raise ValueError(f"only errors of the same targets overlay, not of {self.weight:g} and {other.weight:g}")
        return Moments(self.weight, None, self.scatter + other.scatter)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "mean": self.mean, "scatter": self.scatter}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], device: torch.device) -> Moments:
        mean = state["mean"]
        return cls(state["weight"], None if mean is None else mean.to(device), state["scatter"].to(device))


def input_moments(z: Tensor, centre: bool = True, blocks: int = 0) -> Moments:
    """c and Ž from a batch of layer inputs z (..., d), or (..., blocks, d); every row counts once.

    >>> m = input_moments(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> m.mean.tolist(), m.second.tolist()
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    """
    rows = rows_of(z, blocks)
    if not centre:
        return Moments(float(len(rows)), None, _scatter(rows))
    # With the first row as the origin, constant features have a variance of exactly zero, not one of rounding.
    first = rows[0].clone()
    rows -= first
    shift = rows.mean(dim=0)
    rows -= shift
    return Moments(float(len(rows)), first + shift, _scatter(rows))


def error_moments(delta: Tensor, targets: int, blocks: int = 0) -> Moments:
    """D from errors δ (..., d) of a *summed* negative log-likelihood: Σ δδᵀ over all rows, divided by `targets`.

    Where one weight acts at many positions, the score of an example is the sum over positions, and so is its Fisher
    matrix: averaging over positions instead would lose a factor of their number.
    """
    return Moments(float(targets), None, _scatter(rows_of(delta, blocks)))


def count_moments(indices: Tensor, features: int) -> Moments:
    """Ž of one-hot inputs, from the indices of their ones: diagonal, so `features` blocks of one coordinate each."""
    counts = torch.bincount(indices.flatten(), minlength=features).to(torch.float64)
    return Moments(float(indices.numel()), None, counts.view(-1, 1, 1))


def block_rows(values: Tensor, blocks: Blocks) -> Tensor:
    """(rows, groups, features) → the rows that moments are taken of: (rows · positions, size), or with `lead` between.

    Each position of a convolution's kernel counts as a row where all positions share their channels' moments.
    """
    values = split(values.reshape(len(values), blocks.groups, -1), blocks).flatten(1, 2)
    values = values.movedim(-1, 1).flatten(0, 1)
    return values if blocks.lead else values.squeeze(1)


def feature_means(mean: Tensor, blocks: Blocks) -> Tensor:
    """A mean (size) or (lead, size) as the mean of every feature: (features,), or (groups, features)."""
    means = mean.reshape(blocks.groups, -1, 1).expand(-1, -1, blocks.positions).flatten(1)
    means = means[:, : blocks.features]
    return means if blocks.groups > 1 else means.squeeze(0)


def _scatter(rows: Tensor) -> Tensor:
    """Σ over rows of their outer products, block by block: (rows, d) → (d, d), (rows, n, d) → (n, d, d)."""
    if rows.shape[-1] == 1:
        return rows.square().sum(dim=0).unsqueeze(-1)
    return rows.movedim(0, -1) @ rows.movedim(0, -2)


def finite(values: Tensor) -> bool:
    """Whether all values are finite. Their sum tells at a fraction of the cost, unless it overflows."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def outer(a: Tensor, b: Tensor) -> Tensor:
    """abᵀ, block by block if there are leading dimensions."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def add_outer(M: Tensor, a: Tensor, b: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """M + α abᵀ, block by block if there is a leading dimension; `out` may be M."""
    if M.ndim == 2:
        return torch.addr(M, a, b, alpha=alpha, out=out)
    return torch.baddbmm(M, a.unsqueeze(-1), b.unsqueeze(-2), alpha=alpha, out=out)


def rows_of(values: Tensor, blocks: int = 0) -> Tensor:
    """(..., d) → (rows, d), or (..., blocks, d) → (rows, blocks, d): a detached float64 copy."""
    if values.ndim < 1 or values.numel() == 0:
        raise ValueError(
            f"moments need at least one row of at least one feature, not a tensor of {tuple(values.shape)}"
        )
    return float64_copy(values).reshape(-1, *values.shape[-2 if blocks else -1 :])


def float64_copy(values: Tensor) -> Tensor:
    """A detached float64 copy, on the tensor's device or, if that has no float64, on the CPU."""
    return values.detach().to(float64_device(values), torch.float64, copy=True)


def to_float64(values: Tensor) -> Tensor:
    """The values in float64, still part of the autograd graph; no copy if they are float64 already."""
    return values.to(float64_device(values), torch.float64)


def float64_device(values: Tensor) -> torch.device:
    """Where float64 tensors about `values` are kept."""
    return torch.device("cpu") if values.device.type == "mps" else values.device
