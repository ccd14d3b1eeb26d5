"""What the benchmarks train: data, networks and losses, put together as problems. Nothing here trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


class Data(NamedTuple):
    """Training inputs and targets, and those of a validation set where there is one."""

    x: Tensor
    y: Tensor
    x_val: Tensor | None = None
    y_val: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """A network, its data and its loss.

    model:        makes the network for a seed
    batch, steps: batch size, and steps of a full run
    declared:     the loss as it is declared to our optimizers
    evaluated:    at most this many training rows are used to measure the loss
    summed:       the loss is a sum over the batch; it is reported per example
    penalty:      a term of the loss that is not declared, computed from the model
    floor:        the least possible loss
    optimizer:    the optimizer of ours that is used with lr="auto"
    clip:         gradients are clipped to this norm; 0 means not at all
    cosine:       the learning rate falls to 0 along a cosine
    """

    title: str
    model: Callable[[int], nn.Module]
    data: Callable[[], Data]
    batch: int
    steps: int
    declared: Any = "cross_entropy"
    loss: Loss = F.cross_entropy
    evaluated: int = 10_000
    summed: bool = False
    penalty: Callable[[Any], Tensor] | None = None
    floor: float = 0.0
    optimizer: str = "BPRONG"
    weight_decay: float = 0.0
    clip: float = 0.0
    cosine: bool = False
