"""What is measured: the mean and the second moment of z, the second moment of δ.

Fujimoto & Ohira, sections 3.1 and 3.2:  c = E[z],  Ž = E[(z−c)(z−c)ᵀ],  D = E[δδᵀ].

A large batch is summed in float32 where that is accurate (`Sums`). Everything else is float64: the products of fewer
rows than features, whose rank rounding would hide, averages, and what is computed from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

# The precision to compute in for numbers of a precision: its own or, as factors become indefinite in bfloat16, float32.
at_least_float32 = partial(torch.promote_types, torch.float32)

MAX_DIM = 4096  # a full side then takes 200 MB: 128 MB of float64 moments and a float32 inverse
PANEL = 128  # rows of a second moment that are computed at once, from the diagonal on; symmetry gives the rest

# Products are summed in float32 if combinations of some rows, which are as likely to point anywhere as the rows
# themselves, show that their rounding hides nothing (`_precision`).
FLOAT64_UP_TO = 2**14  # numbers: the products of so few rows take less time than such a test
COMBINED = 128  # rows
COMBINATIONS = 8
DOMINATED = 1e-4  # of the variance of the leading direction; below that, rounding changes a step by a percent or more
ORDINARY = 1e16  # squares, and their reciprocals, whose sums do not overflow in float32


@dataclass(frozen=True)
class Blocks:
    """groups × count blocks of `size` features.

    The features of a group are ordered as (count, size). The side of a plain layer is one block of one group. The last
    block of a group may have `padding` features that are always zero.
    """

    size: int
    count: int = 1
    groups: int = 1
    padding: int = 0

    @cached_property
    def lead(self) -> int:
        """The leading dimension of moments and factors; 0 for a single block, whose tensors have none."""
        number = self.groups * self.count
        return number if number > 1 else 0

    @cached_property
    def features(self) -> int:
        """The number of features of one group."""
        return self.count * self.size - self.padding

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the second moment and of its dense inverse."""
        return (self.lead, self.size, self.size) if self.lead else (self.size, self.size)

    @cached_property
    def entries(self) -> int:
        """The number of entries of the second moment."""
        return self.groups * self.count * self.size**2

    def __str__(self) -> str:
        """
        >>> [str(blocks) for blocks in (Blocks(784), Blocks(9, groups=32), Blocks(1, 500), Blocks(250, 200))]
        ['784', '32 × 9', '500 diagonal', '200 × 250 blocks']
        """
        if self.count > 1:
            return f"{self.lead} diagonal" if self.size == 1 else f"{self.lead} × {self.size} blocks"
        return f"{self.groups} × {self.size}" if self.groups > 1 else f"{self.size}"


@dataclass(frozen=True)
class Limits:
    """How sides are split into blocks of at most `max_dim` features, the last of which may be `padded`."""

    max_dim: int = MAX_DIM
    padded: bool = True

    def blocks(self, features: int, groups: int = 1) -> Blocks:
        """As few equal blocks as possible for a side with this many features in all groups.

        Together they take no more memory than one block of `max_dim`.

        >>> [str(Limits(100).blocks(d)) for d in (100, 120, 499, 20_000)]
        ['100', '2 × 60 blocks', '25 × 20 blocks', '20000 diagonal']
        """
        each = features // groups
        largest = min(self.max_dim, max(1, self.max_dim**2 // features))
        count = math.ceil(each / largest)
        while not self.padded and each % count:
            count += 1
        size = math.ceil(each / count)
        return Blocks(size, count, groups, count * size - each)


@dataclass(frozen=True)
class Moments:
    """Sums over observations, so that the moments of two halves merge exactly into those of the whole.

    weight:   what the scatter is divided by: rows for z, targets for δ; a real number, so that it can decay
    mean:     (d,) E[z], or None where nothing is centred (δ, and z of a layer without a trainable bias)
    values:   (d, d) Σ (z−mean)(z−mean)ᵀ, or Σ zzᵀ where nothing is centred
    as_rows:  values are the rows z−mean, or z, instead: (n, d)
    tails:    (2, d) Σ z³ and Σ z⁴, float64, of features of the data (`units.py`); None: not measured

    For a side in n blocks they have one dimension more: (n, d), (n, d, d), (rows, n, d) and (2, n, d).
    """

    weight: float
    mean: Tensor | None
    values: Tensor
    as_rows: bool = False
    tails: Tensor | None = None

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
        return self.second_in(torch.float64)

    def second_in(self, dtype: torch.dtype) -> Tensor:
        """Return Ž or D in new memory, in another precision."""
        return self.scatter.to(dtype, copy=True).div_(self.weight)

    @property
    def variances(self) -> Tensor:
        """The diagonal of Ž or D."""
        if self.as_rows:
            return self.values.to(torch.float64).square().sum(dim=0) / self.weight
        return diagonal(self.values).to(torch.float64) / self.weight

    @cached_property
    def mean_eigenvalue(self) -> float:
        """The mean eigenvalue of Ž or D."""
        return float(self.variances.mean())

    def thinned(self) -> Moments:
        """Return the moments of each feature alone, as those of a block of its own; another process has the rest."""
        mean = None if self.mean is None else self.mean.reshape(-1, 1)
        tails = None if self.tails is None else self.tails.reshape(2, -1, 1)
        return Moments(self.weight, mean, self.variances.reshape(-1, 1, 1) * self.weight, tails=tails)

    def in_units(self, units: Tensor | None) -> Moments:
        """Return the second moment of the features, each divided by its unit; units: (d,); None: as they are."""
        return self if units is None else Moments(self.weight, None, self.scatter / outer(units, units))

    @property
    def finite(self) -> bool:
        """Whether every observation was finite: an infinite or NaN row leaves its mark in the variances."""
        return finite(self.variances)

    def merge(self, new: Moments, keep: float = 1.0) -> Moments:
        """Return the moments of both sets of observations, these with `keep` times their weight.

        With a `keep` below one this is a running average without bias. Both are centred, or neither is.
        """
        return self.copy().average_(new, keep)

    def copy(self) -> Moments:
        """Return these moments, summed in float64, in new memory."""
        values = self.scatter if self.as_rows else self.values.to(torch.float64, copy=True)
        return replace(self, values=values, as_rows=False)

    def average_(self, new: Moments, keep: float) -> Moments:
        """Return what `merge` returns, in the memory of these moments, which are not valid afterwards.

        These must be float64 and not rows. The rule is Chan, Golub & LeVeque's.
        """
        scatter = self.values
        if new.as_rows:
            add_products_(scatter, new.values, keep)
        else:
            scatter.mul_(keep).add_(new.values)
        old_weight = self.weight * keep
        weight = old_weight + new.weight
        mean = self.mean
        if mean is not None:
            difference = cast(Tensor, new.mean) - mean
            add_outer_(scatter, difference, old_weight * new.weight / weight)
            # Written as a step from one mean, so that a constant coordinate keeps a variance of exactly zero.
            mean = mean + difference * (new.weight / weight)
        tails = None if self.tails is None or new.tails is None else self.tails * keep + new.tails
        return Moments(weight, mean, scatter, tails=tails)


class Sums:
    """The moments of rows that are added chunk by chunk.

    centre:     whether they are centred at their mean
    keep_rows:  whether the moments are to have the rows themselves
    tails:      whether they are to have Σ z³ and Σ z⁴

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

    def __init__(self, centre: bool, keep_rows: bool = False, tails: bool = False) -> None:
        self.rows = 0
        self._keep_rows = keep_rows
        self._centre = centre
        self._origin: Tensor | None = None
        self._sum = torch.zeros((), dtype=torch.float64, device="cpu")  # s
        self._chunks: list[Tensor] = []  # rows about the origin whose products are not in the scatter yet
        self._scatter: Tensor | None = None
        self._tails = torch.zeros((), dtype=torch.float64, device="cpu") if tails else None

    def add(self, rows: Tensor, expected: int = 0) -> None:
        """Add rows (n, d), or (n, blocks, d); expected: how many there will be at least."""
        rows = rows.detach().to(float64_device(rows), at_least_float32(rows.dtype))
        if self._tails is not None:
            z = rows.to(torch.float64)
            self._tails = self._tails + torch.stack([(z**3).sum(0), (z**4).sum(0)])
        if self._centre:
            if self._origin is None:
                # Written as a step from one row, so that the variance of a constant feature is exactly zero.
                self._origin = rows[0] + (rows - rows[0]).mean(dim=0)
            rows = rows - self._origin
            self._sum = self._sum + rows.sum(dim=0).to(torch.float64)
        self.rows += len(rows)
        if self._scatter is None:
            if self._keep_rows or max(self.rows, expected) < rows.shape[-1]:
                self._chunks.append(rows if self._centre else rows.clone())
                return
            self._scatter = rows.new_zeros(*rows.shape[1:], rows.shape[-1], dtype=_precision(rows))
        for chunk in (*self._chunks, rows):
            add_products_(self._scatter, chunk)
        self._chunks.clear()

    def count(self, indices: Tensor, features: int) -> None:
        """Add one-hot rows by the indices of their ones: `features` blocks of one coordinate each."""
        counts = torch.bincount(indices.flatten(), minlength=features).to(torch.float64).view(-1, 1, 1)
        self.rows += indices.numel()
        self._scatter = counts if self._scatter is None else self._scatter + counts

    def moments(self, weight: float | None = None) -> Moments | None:
        """Return the moments of all rows, or None if there are none; to be called once.

        weight: what they are divided by; None: the number of rows

        D is divided by the number of targets. Where one weight acts at many positions, the score of an example is the
        sum over positions, and so is its Fisher matrix: the mean over positions would lose a factor of their number.
        """
        if self.rows == 0:
            return None
        as_rows = self._scatter is None
        values = torch.cat(self._chunks) if self._scatter is None else self._scatter
        mean = None
        if self._origin is not None:
            offset = self._sum / self.rows
            mean = self._origin + offset
            if as_rows:
                values -= offset.to(values)
            else:
                add_outer_(values, offset.to(values), -self.rows)
        return Moments(float(self.rows) if weight is None else weight, mean, values, as_rows, self._tails)


def _precision(rows: Tensor) -> torch.dtype:
    """Return the precision to sum the products of rows like these in: float32 where that is accurate, else float64.

    Products in float32 are rounded in proportion to the directions in which rows vary most. If these are few, such as a
    level that all features share, and vary far more than all others, rounding hides the others, which whitening would
    then enlarge. Combinations of rows show it: their Gram matrix has as many large eigenvalues as there are such
    directions.
    """
    size = rows.shape[-1]
    if rows.dtype is torch.float64 or rows.numel() <= FLOAT64_UP_TO or size == 1:
        return torch.float64
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(rows), generator=generator, device="cpu")[:COMBINED]  # a stride could meet a period
    some = rows[chosen.to(rows.device)].to(torch.float64)
    combined = random_directions(len(some), COMBINATIONS, some).T @ some.flatten(1)
    combined = combined.view(COMBINATIONS, -1, size).transpose(0, 1)  # (blocks, combinations, d)
    gram = combined @ combined.mT
    largest = float(gram.max())
    if largest != 0 and not 1 / ORDINARY < largest < ORDINARY:  # or not finite
        return torch.float64
    eigenvalues = torch.linalg.eigvalsh(gram)
    is_dominated = eigenvalues[:, COMBINATIONS // 2] < DOMINATED * eigenvalues[:, -1]
    return torch.float64 if is_dominated.any() else torch.float32


def random_directions(size: int, count: int, like: Tensor) -> Tensor:
    """Return (size, count) random numbers from a generator of their own, the same at each call."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(size, count, generator=generator, dtype=torch.float32, device="cpu").to(like)


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


def split(values: Tensor, blocks: Blocks) -> Tensor:
    """(…, features) → (…, count, size): the features of a group as blocks."""
    padded = F.pad(values, (0, blocks.padding)) if blocks.padding else values
    return padded.reshape(*values.shape[:-1], blocks.count, blocks.size)


def block_rows(values: Tensor, blocks: Blocks) -> Tensor:
    """(rows, groups, features) → the rows that moments are taken of: (rows, size), or with `lead` between."""
    values = split(values.reshape(len(values), blocks.groups, -1), blocks).flatten(1, 2)
    return values if blocks.lead else values.squeeze(1)


def feature_means(mean: Tensor, blocks: Blocks) -> Tensor:
    """A mean (size) or (lead, size) as the mean of every feature: (features,), or (groups, features)."""
    means = mean.reshape(blocks.groups, -1)[:, : blocks.features]
    return means if blocks.groups > 1 else means.squeeze(0)


def diagonal(matrix: Tensor) -> Tensor:
    """Return the diagonal of a matrix, or of each of several, as a view."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def finite(values: Tensor) -> bool:
    """Return whether all values are finite. Their sum tells at a fraction of the cost, unless it overflows."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return abᵀ, block by block if there are leading dimensions."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def add_outer_(M: Tensor, a: Tensor, factor: float) -> None:
    """Add a multiple of aaᵀ to M in place, block by block if there is a leading dimension."""
    if M.ndim == 2:
        M.addr_(a, a, alpha=factor)
    else:
        M.baddbmm_(a.unsqueeze(-1), a.unsqueeze(-2), alpha=factor)


def float64_copy(values: Tensor) -> Tensor:
    """Return a detached float64 copy, on the tensor's device or, if that has no float64, on the CPU."""
    return values.detach().to(float64_device(values), torch.float64, copy=True)


def to_float64(values: Tensor) -> Tensor:
    """Return the values in float64, still part of the autograd graph; no copy if they are float64 already."""
    return values.to(float64_device(values), torch.float64)


def float64_device(values: Tensor) -> torch.device:
    """Return the device for float64 tensors about `values`."""
    return torch.device("cpu") if values.device.type == "mps" else values.device
