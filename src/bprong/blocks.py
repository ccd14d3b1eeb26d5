"""How the features of one side of a layer are split for whitening: one block, blocks, single coordinates, channels.

A layer's weight is, for each of its groups (convolutions may have several), a matrix (out, in) that acts on rows. A
side is whitened as one block wherever that can be afforded. Where it cannot, as a block-diagonal matrix: of contiguous
blocks as large as fit, down to single coordinates; or, for a convolution's inputs, of one block over the channels that
every tap of the kernel shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MAX_DIM", "Blocks", "blocks_of"]

MAX_DIM = 4096  # a full side then takes 200 MB: 128 MB of float64 moments and a float32 inverse


@dataclass(frozen=True)
class Blocks:
    """groups × count blocks of `size` coordinates, each of which stands for `taps` features.

    features of a group = count · size · taps, in this order; a plain layer's side is one block of one group.
    """

    size: int
    count: int = 1
    groups: int = 1
    taps: int = 1

    @property
    def lead(self) -> int:
        """The leading dimension of moments and inverses, or 0 where there is none: a single block."""
        return self.groups * self.count if self.groups * self.count > 1 else 0

    @property
    def features(self) -> int:
        """Of one group."""
        return self.count * self.size * self.taps

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the moments and the inverse."""
        return (self.lead, self.size, self.size) if self.lead else (self.size, self.size)

    @property
    def entries(self) -> int:
        return self.groups * self.count * self.size**2

    def __str__(self) -> str:
        """
        >>> [str(b) for b in (Blocks(784), Blocks(9, groups=32), Blocks(1, 500), Blocks(250, 200), Blocks(64, taps=9))]
        ['784', '32 × 9', '500 diagonal', '200 × 250 blocks', '64 channels']
        """
        sizes = f"{self.groups} × {self.size}" if self.groups > 1 else f"{self.size}"
        if self.taps > 1:
            return f"{sizes} channels"
        if self.count > 1:
            total = self.groups * self.count
            return f"{total} diagonal" if self.size == 1 else f"{total} × {self.size} blocks"
        return sizes

    def rows(self, values: Tensor) -> Tensor:
        """(rows, groups, features) → what moments are taken of: (rows · taps, size), or (rows · taps, lead, size)."""
        values = values.reshape(len(values), self.groups * self.count, self.size, self.taps)
        values = values.movedim(-1, 1).flatten(0, 1)
        return values if self.lead else values.squeeze(1)

    def features_of(self, mean: Tensor) -> Tensor:
        """A mean (size) or (lead, size) as (features) of a plain side, or (groups, features)."""
        spread = mean.reshape(self.groups, -1, 1).expand(-1, -1, self.taps).flatten(1)
        return spread if self.groups > 1 else spread.squeeze(0)

    def from_right(self, M: Tensor, inverse: Any) -> Tensor:
        """M (out, features), or (groups, out, features), times the block-diagonal matrix of these blocks."""
        if self.count == 1 and self.taps == 1:  # one block a group
            product: Tensor = M @ inverse
            return product
        if self.size == 1:
            diagonal: Tensor = inverse.reshape(*M.shape[:-2], 1, -1).repeat_interleave(self.taps, dim=-1)
            return M * diagonal
        split = M.reshape(self.groups, -1, self.count, self.size, self.taps)
        inverse = inverse.view(self.groups, self.count, self.size, self.size)
        return torch.einsum("goibt,gibc->goict", split, inverse).reshape(M.shape)

    def from_left(self, inverse: Any, M: Tensor) -> Tensor:
        """The block-diagonal matrix of these blocks times M (features, in), or (groups, features, in)."""
        if self.lead == 0:
            product: Tensor = inverse @ M
            return product
        if self.size == 1:
            diagonal: Tensor = inverse.reshape(*M.shape[:-1], 1)
            return diagonal * M
        split: Tensor = inverse @ M.reshape(self.lead, self.size, M.shape[-1])
        return split.reshape(M.shape)


def blocks_of(
    features: int, groups: int = 1, taps: int = 1, *, max_dim: int = MAX_DIM, channels: bool = False
) -> Blocks:
    """The blocks for a side of so many features (in all groups), `taps` of which belong to each channel.

    One block a group, a convolution's channels on request or where that is too much, and beyond that the largest blocks
    that divide the features: whatever takes no more memory than one block of `max_dim` would.

    >>> [str(blocks_of(d, max_dim=100)) for d in (100, 120, 500, 20_000)]
    ['100', '2 × 60 blocks', '25 × 20 blocks', '20000 diagonal']
    """
    each = features // groups
    if each <= _largest(features, max_dim) and not (channels and taps > 1):
        return Blocks(each, 1, groups)
    each //= taps
    largest = min(_largest(each * groups, max_dim), each)
    size = next(b for b in range(largest, 0, -1) if each % b == 0)
    return Blocks(size, each // size, groups, taps)


def _largest(features: int, max_dim: int) -> int:
    """The size of blocks with which so many features take no more memory than one block of `max_dim`."""
    return min(max_dim, max(1, max_dim**2 // features))
