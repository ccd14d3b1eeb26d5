"""Losses that torch does not have by one name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RARE_CLASS_WEIGHTS = torch.tensor([1.0, 20.0])
LEAST_SMOOTHED = 0.5003  # the least cross-entropy with labels smoothed by 0.1 over ten classes


def sequence_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy per target of (…, classes) logits; padding has the target −100 and does not count."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def bits_per_image(logits: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy in nats, summed over the pixels of an image."""
    return F.binary_cross_entropy_with_logits(logits, y, reduction="sum") / len(y)


def single_bit(logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits[:, 0], y)


def summed_squares(output: Tensor, y: Tensor) -> Tensor:
    """Half of the squared error, summed over the batch."""
    return 0.5 * ((output - y) ** 2).sum()


def weighted_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=RARE_CLASS_WEIGHTS)


def smoothed_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


SQUARES: dict[str, Any] = {"likelihood": "gaussian", "loss": F.mse_loss}
BITS: dict[str, Any] = {"likelihood": "bernoulli", "loss": F.binary_cross_entropy_with_logits}
