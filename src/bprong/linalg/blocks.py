"""How the features of one side of a layer are split for whitening: one block, several blocks, single coordinates.

A layer's weight is, for each of its groups (convolutions may have several), a matrix (out, in) that acts on rows. A
side is whitened as one block wherever that is affordable. Otherwise it is whitened as a block-diagonal matrix of
contiguous blocks as large as memory allows, down to single coordinates.
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
        return self.groups * self.count if self.groups * self.count > 1 else 0

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

    @property
    def cost(self) -> float:
        """What factoring the second moment costs, up to a constant: the cube of the size, for each block."""
        return float(self.entries * self.size)

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
    """How sides are split into blocks.

    max_dim:  the largest side whitened as one block
    padded:   whether the last of several blocks may be padded
    """

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


def split(values: Tensor, blocks: Blocks) -> Tensor:
    """(…, features) → (…, count, size): the features of a group as blocks."""
    padding = values.new_zeros(*values.shape[:-1], blocks.padding)
    padded = torch.cat([values, padding], dim=-1) if blocks.padding else values
    return padded.reshape(*values.shape[:-1], blocks.count, blocks.size)


def joined(values: Tensor, blocks: Blocks) -> Tensor:
    """The inverse of `split`."""
    return values.flatten(-2)[..., : blocks.features]
