"""A part of a batch: some of its examples, and the rows that are theirs in outputs, gradients and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["Cut", "examples"]


@dataclass(frozen=True)
class Cut:
    """`count` of the `whole` of a batch's examples, evenly spread: a batch of all data may be sorted.

    >>> Cut(2, 4).rows(torch.arange(8)).tolist()  # an example has two rows here
    [0, 1, 4, 5]
    """

    count: int
    whole: int

    @property
    def everything(self) -> bool:
        return self.count >= self.whole

    def divides(self, tensor: Tensor) -> bool:
        """Whether a tensor can have as many rows for each example."""
        return tensor.ndim > 0 and 0 < self.whole <= len(tensor) and len(tensor) % self.whole == 0

    def rows(self, tensor: Tensor) -> Tensor:
        """Those of the examples chosen; the tensor itself where they are all."""
        if self.everything:
            return tensor
        chosen = torch.arange(self.count, device=tensor.device) * self.whole // self.count
        if (each := len(tensor) // self.whole) == 1:
            return tensor[chosen]
        return tensor.reshape(self.whole, each, *tensor.shape[1:])[chosen].flatten(0, 1)


def examples(x: Any) -> int:
    """How many examples a batch has: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim > 0), 1)
