"""A batch of training: what the model was called with, what it returned, and what the loss is of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bprong.capture.request import LayerMoments
from bprong.likelihood.families import nontrivial
from bprong.likelihood.loss import Targets


@dataclass(frozen=True)
class Subset:
    """`count` of the `whole` examples of a batch, evenly spread, because a batch may be sorted.

    Outputs, gradients and targets may have several rows for each example.

    >>> Subset(2, 4).rows(torch.arange(8)).tolist()  # two rows for each example
    [0, 1, 4, 5]
    """

    count: int
    whole: int

    @property
    def everything(self) -> bool:
        return self.count >= self.whole

    def divides(self, tensor: Tensor) -> bool:
        """Whether the tensor can have the same number of rows for each example."""
        dense = tensor.layout is torch.strided and tensor.ndim > 0
        return dense and 0 < self.whole <= len(tensor) and len(tensor) % self.whole == 0

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of the chosen examples; the tensor itself if all examples are chosen."""
        if self.everything:
            return tensor
        chosen = torch.arange(self.count, device=tensor.device) * self.whole // self.count
        return tensor.reshape(self.whole, len(tensor) // self.whole, *tensor.shape[1:])[chosen].flatten(0, 1)


@dataclass(frozen=True)
class Batch:
    """A batch that the model was trained on, or that was observed.

    x          what the model is called with; None: not kept
    output     what it returned, with classes in the last dimension; None: unknown
    class_dim  where the model has the classes, if they were moved (`output.laid_out`)
    targets    what the loss is of the output; None: unknown
    reached    which targets a gradient came back to, where their loss was not seen
    measured   the moments of its layers, if they were measured in the user's own pass
    """

    x: Any = None
    output: Tensor | None = None
    class_dim: int | None = None
    targets: Targets | None = None
    reached: Tensor | None = None
    measured: Mapping[str, LayerMoments] | None = None

    @property
    def y(self) -> Tensor | None:
        """The targets of the data, if they are known."""
        return None if self.targets is None else self.targets.y

    @property
    def counted(self) -> Tensor | None:
        """Which targets the loss counts, without the output's last dimension; None: all, as far as is known."""
        return nontrivial(self.reached) if self.targets is None else self.targets.counted

    @property
    def counts(self) -> bool:
        """Whether the loss counts any of its targets, as far as is known."""
        mask = self.reached if self.targets is None else self.targets.mask
        return mask is None or bool(mask.any())

    def subset(self, count: int) -> Subset:
        """`count` of the examples; all, if outputs or targets do not have equally many rows for each example."""
        subset = Subset(count, examples(self.x))
        rows = [leaf for leaf in tree_leaves(self.x) if isinstance(leaf, Tensor) and leaf.layout is not torch.strided]
        rows += [] if self.output is None else [self.output]
        rows += [] if self.targets is None else [self.targets.y]
        return subset if all(map(subset.divides, rows)) else Subset(subset.whole, subset.whole)


def examples(x: Any) -> int:
    """The number of examples of a batch: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim > 0), 1)


def copied(batch: Any, subset: Subset, dtype: torch.dtype) -> Any:
    """A copy of a subset of the examples of a batch, in which low precision is converted to `dtype`.

    Tensors of another length than the batch are not examples and are copied whole. Inputs in half precision come from
    autocast, which is off when a batch is measured. The graph of inputs that were computed from parameters, e.g. of the
    state of a recurrent network, may be gone, and is left out.
    """

    def copy(leaf: Tensor) -> Tensor:
        detached = leaf.detach()
        part = subset.rows(detached) if subset.divides(detached) and len(detached) == subset.whole else detached
        part = part.to(dtype) if detached.dtype in (torch.bfloat16, torch.float16) else part
        return (part.clone() if part is detached else part).requires_grad_(leaf.requires_grad)

    return tree_map_only(Tensor, copy, batch)
