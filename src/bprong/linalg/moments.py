"""What is measured: the mean and the second moment of z, the second moment of δ.

Fujimoto & Ohira, sections 3.1 and 3.2:  c = E[z],  Ž = E[(z−c)(z−c)ᵀ],  D = E[δδᵀ].

A batch with more rows than features is summed in the precision of the model, at least float32 (`Sums`). Everything
else is float64: the products of fewer rows, whose rank rounding would hide, averages, and what is computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bprong.linalg.blocks import Blocks, split

PANEL = 128  # rows of a second moment that are computed at once, from the diagonal on; symmetry gives the rest
ORDINARY = 1e8  # sizes of numbers, and of their reciprocals, whose squares can be summed in float32


@dataclass(frozen=True)
class Moments:
    """Sums over observations, so that the moments of two halves merge exactly into those of the whole.

    weight:   what the scatter is divided by: rows for z, targets for δ; a real number, so that it can decay
    mean:     (d,) E[z], or None where nothing is centred (δ, and z of a layer without a trainable bias)
    values:   (d, d) Σ (z−mean)(z−mean)ᵀ, or Σ zzᵀ where nothing is centred
    as_rows:  values are the rows z−mean, or z, instead: (n, d)
    diagonal: values are the diagonal of the scatter, where another process keeps the rest of it

    For a side in n blocks they have one dimension more: (n, d), (n, d, d) and (rows, n, d).
    """

    weight: float
    mean: Tensor | None
    values: Tensor
    as_rows: bool = False
    diagonal: bool = False

    @property
    def scatter(self) -> Tensor:
        """Σ (z−mean)(z−mean)ᵀ, or Σ zzᵀ, in float64."""
        if not self.as_rows:
            return self.values.to(torch.float64)
        shape = (*self.values.shape[1:], self.values.shape[-1])
        return add_products_(self.values.new_zeros(shape, dtype=torch.float64), self.values)

    @property
    def second(self) -> Tensor:
        """Ž or D: the scatter divided by the weight."""
        return self.scatter / self.weight

    def second_in(self, dtype: torch.dtype) -> Tensor:
        """Return a copy of Ž or D in another precision; cheaper than converting `second`."""
        return self.scatter.to(dtype, copy=True).div_(self.weight)

    @property
    def variances(self) -> Tensor:
        """The diagonal of Ž or D."""
        if self.as_rows:
            return self.values.to(torch.float64).square().sum(dim=0) / self.weight
        diagonal = self.values if self.diagonal else self.values.diagonal(dim1=-2, dim2=-1)
        return diagonal.to(torch.float64) / self.weight

    def thinned(self) -> Moments:
        """Return these moments with only the diagonal of their scatter."""
        return Moments(self.weight, self.mean, self.variances * self.weight, diagonal=True)

    @property
    def finite(self) -> bool:
        """Whether every observation was finite: an infinite or NaN row leaves its mark in the variances."""
        return finite(self.variances)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of observations (Chan, Golub & LeVeque's pairwise rule)."""
        if self._description != other._description:
            raise ValueError(f"cannot merge {self._description} with {other._description}")
        return self.average(other, 1.0)

    @property
    def _description(self) -> str:
        """What must be equal for two moments to be merged, in words."""
        kind = "uncentred" if self.mean is None else "centred"
        return f"{kind} moments of {tuple(self.variances.shape)} features"

    def copy(self) -> Moments:
        """Return these moments, summed in float64, in new memory."""
        scatter = self.scatter
        return replace(self, values=scatter.clone() if scatter is self.values else scatter, as_rows=False)

    def average(self, new: Moments, keep: float) -> Moments:
        """Return a running average without bias: these moments, with `keep` times their weight, merged with `new`."""
        return self.copy().average_(new, keep)

    def average_(self, new: Moments, keep: float) -> Moments:
        """Return the same in the memory of these moments, which must be float64 and are not valid afterwards."""
        old_weight = self.weight * keep
        weight = old_weight + new.weight
        if self.diagonal:
            scatter = self.values.mul_(keep).add_(new.variances, alpha=new.weight)
        elif new.as_rows:
            scatter = add_products_(self.values, new.values, keep)
        else:
            scatter = self.values
            new_panels = torch.split(new.values, PANEL, dim=-2)
            for panel, new_panel in zip(torch.split(scatter, PANEL, dim=-2), new_panels, strict=True):
                panel.mul_(keep).add_(new_panel)  # which makes a converted copy of the new panel
        if self.mean is None or new.mean is None:
            return Moments(weight, None, scatter, diagonal=self.diagonal)
        difference = new.mean - self.mean
        # Written as a step from one mean, so that a constant coordinate keeps a variance of exactly zero.
        mean = self.mean + difference * (new.weight / weight)
        between = old_weight * new.weight / weight
        if self.diagonal:
            return Moments(weight, mean, scatter.addcmul_(difference, difference, value=between), diagonal=True)
        return Moments(weight, mean, add_outer(scatter, difference, difference, between, out=scatter))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the numbers, since averages change in place."""
        return {"weight": self.weight, "mean": self.mean, "scatter": self.copy().values}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], device: torch.device) -> Moments:
        """Return moments from a copy of what `state_dict` returned."""
        mean = state["mean"]
        return cls(state["weight"], None if mean is None else mean.to(device), state["scatter"].to(device, copy=True))


class Sums:
    """The moments of rows that are added chunk by chunk, in the precision of the model, at least float32.

    centre:     whether they are centred at their mean
    keep_rows:  whether the moments are to have the rows themselves

    Rows z are summed about an origin o, the mean of the first chunk: Σ(z−o)(z−o)ᵀ and s = Σ(z−o). At the end s sᵀ/n is
    subtracted. The first chunk is a part of the rows, so that with k chunks o is at most √k standard deviations from
    their mean, and the subtraction loses at most a factor of about k in accuracy. Rows that are fewer than their
    features are kept as they are, which takes less memory than their products.

    >>> sums = Sums(centre=True)
    >>> sums.add(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> moments = sums.moments()
    >>> moments.mean.tolist(), moments.second.tolist()
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    """

    def __init__(self, centre: bool, keep_rows: bool = False) -> None:
        self.rows = 0
        self._keep_rows = keep_rows
        self._centre = centre
        self._origin: Tensor | None = None
        self._sum: Tensor | float = 0.0  # s, float64
        self._chunks: list[Tensor] = []  # rows about the origin whose products are not in the scatter yet
        self._scatter: Tensor | None = None

    def add(self, rows: Tensor, expected: int = 0) -> None:
        """Add rows (n, d), or (n, blocks, d); expected: how many there will be at least."""
        rows = rows.detach()
        if self._origin is None:
            rows = rows.to(float64_device(rows), _precision(rows))
            self._origin = _origin(rows) if self._centre else rows.new_zeros(())
        rows = rows.to(self._origin)
        if self._centre:
            rows = rows - self._origin
            self._sum = self._sum + rows.sum(dim=0).to(torch.float64)
        self.rows += len(rows)
        if self._scatter is None and (self._keep_rows or max(self.rows, expected) < rows.shape[-1]):
            self._chunks.append(rows if self._centre else rows.clone())
            return
        if self._scatter is None:
            self._scatter = rows.new_zeros(*rows.shape[1:], rows.shape[-1])
        for chunk in (*self._chunks, rows):
            add_products_(self._scatter, chunk)
        self._chunks.clear()

    def count(self, indices: Tensor, features: int) -> None:
        """Add one-hot rows by the indices of their ones: `features` blocks of one coordinate each."""
        counts = torch.bincount(indices.flatten(), minlength=features).to(torch.float64).view(-1, 1, 1)
        self.rows += indices.numel()
        self._scatter = counts if self._scatter is None else self._scatter + counts

    def moments(self, weight: float | None = None) -> Moments:
        """Return the moments of all rows; to be called once.

        weight: what they are divided by; None: the number of rows

        D is divided by the number of targets. Where one weight acts at many positions, the score of an example is the
        sum over positions, and so is its Fisher matrix: the mean over positions would lose a factor of their number.
        """
        weight = float(self.rows) if weight is None else weight
        as_rows = self._scatter is None
        values = self._scatter
        if values is None:
            values = self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks)
        if self._origin is None or not isinstance(self._sum, Tensor):
            return Moments(weight, None, values, as_rows)
        s = self._sum.to(values)
        if as_rows:
            values.sub_(s, alpha=1 / self.rows)
        else:
            add_outer(values, s, s, -1 / self.rows, out=values)
        return Moments(weight, self._origin + self._sum / self.rows, values, as_rows)


def _origin(rows: Tensor) -> Tensor:
    """Return the mean of rows; for a constant feature exactly the constant, so that its variance is exactly zero."""
    first = rows[0]
    return first + (rows - first).mean(dim=0)


def _precision(rows: Tensor) -> torch.dtype:
    """Return the precision to sum rows in: at least float32; float64 if squares in float32 could over- or underflow."""
    if rows.dtype is torch.float64:
        return torch.float64
    minimum, maximum = rows.aminmax()
    largest = max(-float(minimum), float(maximum))
    return torch.float32 if largest == 0 or 1 / ORDINARY <= largest <= ORDINARY else torch.float64


def add_products_(scatter: Tensor, rows: Tensor, keep: float = 1.0) -> Tensor:
    """Return keep · scatter + Σ zzᵀ over the rows z, in place.

    scatter is (d, d) and rows are (n, d), or (blocks, d, d) and (n, blocks, d). The products are computed
    in the precision of the scatter, one half of them, panel by panel.
    """
    rows = rows.to(scatter.dtype)
    size = scatter.shape[-1]
    if size == 1:
        return scatter.mul_(keep).add_(rows.square().sum(dim=0).unsqueeze(-1))
    Z = rows.movedim(0, -2)  # (n, d), or (blocks, n, d)
    add_product_ = Tensor.addmm_ if scatter.ndim == 2 else Tensor.baddbmm_
    for i in range(0, size, PANEL):
        j = min(i + PANEL, size)
        add_product_(scatter[..., i:j, i:], Z[..., i:j].mT, Z[..., i:], beta=keep)
        scatter[..., j:, i:j] = scatter[..., i:j, j:].mT
    return scatter


def block_rows(values: Tensor, blocks: Blocks) -> Tensor:
    """(rows, groups, features) → the rows that moments are taken of: (rows, size), or with `lead` between."""
    values = split(values.reshape(len(values), blocks.groups, -1), blocks).flatten(1, 2)
    return values if blocks.lead else values.squeeze(1)


def feature_means(mean: Tensor, blocks: Blocks) -> Tensor:
    """A mean (size) or (lead, size) as the mean of every feature: (features,), or (groups, features)."""
    means = mean.reshape(blocks.groups, -1)[:, : blocks.features]
    return means if blocks.groups > 1 else means.squeeze(0)


def finite(values: Tensor) -> bool:
    """Return whether all values are finite. Their sum tells at a fraction of the cost, unless it overflows."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return abᵀ, block by block if there are leading dimensions."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def add_outer(M: Tensor, a: Tensor, b: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """Return M + α abᵀ, block by block if there is a leading dimension; `out` may be M."""
    if M.ndim == 2:
        return torch.addr(M, a, b, alpha=alpha, out=out)
    return torch.baddbmm(M, a.unsqueeze(-1), b.unsqueeze(-2), alpha=alpha, out=out)


def float64_copy(values: Tensor) -> Tensor:
    """Return a detached float64 copy, on the tensor's device or, if that has no float64, on the CPU."""
    return values.detach().to(float64_device(values), torch.float64, copy=True)


def to_float64(values: Tensor) -> Tensor:
    """Return the values in float64, still part of the autograd graph; no copy if they are float64 already."""
    return values.to(float64_device(values), torch.float64)


def float64_device(values: Tensor) -> torch.device:
    """Return the device for float64 tensors about `values`."""
    return torch.device("cpu") if values.device.type == "mps" else values.device
