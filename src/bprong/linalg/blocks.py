"""How the features of one side of a layer are split for whitening: one block, several blocks, single coordinates.

A layer's weight is, for each of its groups (convolutions may have several), a matrix (out, in) that acts on rows. A
side is whitened as one block wherever that is affordable. Otherwise it is whitened as a block-diagonal matrix: of
contiguous blocks as large as memory allows, down to single coordinates; or, for the inputs of a convolution, of one
block over the channels, which all positions of the kernel share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_DIM = 4096  # a full side then takes 200 MB: 128 MB of float64 moments and a float32 inverse


@dataclass(frozen=True)
class Blocks:
    """groups × count blocks of `size` coordinates, each of which stands for `positions` features.

    The features of a group are ordered as (count, size, positions). The side of a plain layer is one block of one
    group; positions > 1 is a convolution that is whitened over its channels alone. The last block of a group may have
    `padding` coordinates that are always zero.
    """

    size: int
    count: int = 1
    groups: int = 1
    positions: int = 1
    padding: int = 0

    @cached_property
    def lead(self) -> int:
        """The leading dimension of moments and factors; 0 for a single block, whose tensors have none."""
        return self.groups * self.count if self.groups * self.count > 1 else 0

    @cached_property
    def features(self) -> int:
        """The number of features of one group."""
        return (self.count * self.size - self.padding) * self.positions

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the second moment and of its dense inverse."""
        return (self.lead, self.size, self.size) if self.lead else (self.size, self.size)

    @cached_property
    def entries(self) -> int:
        """The number of entries of the second moment."""
        return self.groups * self.count * self.size**2

    @property
    def cost(self) -> float:
        """What factoring the second moment costs, up to a constant: the cube of the size, for each block."""
        return float(self.entries * self.size)

    def __str__(self) -> str:
        """
        >>> sides = Blocks(784), Blocks(9, groups=32), Blocks(1, 500), Blocks(250, 200), Blocks(64, positions=9)
        >>> [str(blocks) for blocks in sides]
        ['784', '32 × 9', '500 diagonal', '200 × 250 blocks', '64 channels']
        """
        if self.count > 1 and self.positions == 1:
            return f"{self.lead} diagonal" if self.size == 1 else f"{self.lead} × {self.size} blocks"
        sizes = f"{self.groups} × {self.size}" if self.groups > 1 else f"{self.size}"
        return f"{sizes} channels" if self.positions > 1 else sizes


@dataclass(frozen=True)
class Limits:
    """How sides are split into blocks.

    max_dim:   the largest side whitened as one block
    channels:  whiten convolutions by their channels only
    padded:    whether the last of several blocks may be padded
    """

    max_dim: int = MAX_DIM
    channels: bool = False
    padded: bool = True

    def blocks(self, features: int, groups: int = 1, positions: int = 1) -> Blocks:
        """The blocks for a side with this many features in all groups, of which each channel has `positions`.

        The first of these that takes no more memory than one block of `max_dim`: one block for each group; for a
        convolution, its channels (at once if `channels`); as few equal blocks as possible.

        >>> [str(Limits(100).blocks(d)) for d in (100, 120, 499, 20_000)]
        ['100', '2 × 60 blocks', '25 × 20 blocks', '20000 diagonal']
        """
        each = features // groups
        if each <= self._largest(features) and not (self.channels and positions > 1):
            return Blocks(each, 1, groups)
        each //= positions
        count = math.ceil(each / min(self._largest(each * groups), each))
        while not self.padded and each % count:
            count += 1
        size = math.ceil(each / count)
        return Blocks(size, count, groups, positions, count * size - each)

    def _largest(self, features: int) -> int:
        """The largest block size with which all features together take no more memory than one block of `max_dim`."""
        return min(self.max_dim, max(1, self.max_dim**2 // features))


def split(values: Tensor, blocks: Blocks) -> Tensor:
    """(…, features) → (…, count, size, positions): the features of a group as blocks."""
    padding = values.new_zeros(*values.shape[:-1], blocks.padding * blocks.positions)
    padded = torch.cat([values, padding], dim=-1) if blocks.padding else values
    return padded.reshape(*values.shape[:-1], blocks.count, blocks.size, blocks.positions)


def joined(values: Tensor, blocks: Blocks) -> Tensor:
    """The inverse of `split`."""
    return values.flatten(-3)[..., : blocks.features]
