"""Losses that torch does not have by one name."""

from __future__ import annotations

from functools import partial
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


summed_squares = partial(F.mse_loss, reduction="sum")
weighted_cross_entropy = partial(F.cross_entropy, weight=RARE_CLASS_WEIGHTS)
smoothed_cross_entropy = partial(F.cross_entropy, label_smoothing=0.1)
SQUARES: dict[str, Any] = {"declared": F.mse_loss, "loss": F.mse_loss}
BITS: dict[str, Any] = {"declared": "bce_with_logits", "loss": F.binary_cross_entropy_with_logits}
