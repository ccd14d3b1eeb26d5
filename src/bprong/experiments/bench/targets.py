"""The targets of each workload, fixed before any method of ours was run on it, and how they were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bprong.experiments.bench.data import Split


@dataclass(frozen=True)
class Target:
    """A training and a validation loss to reach."""

    train_loss: float
    val_loss: float

    def reached_by(self, points: Sequence[Any]) -> bool:
        """Whether some point has reached the training loss, and some point, maybe another, the validation loss."""
        return any(p.train_loss <= self.train_loss for p in points) and any(p.val_loss <= self.val_loss for p in points)


NONE = Target(0.0, 0.0)  # which no run reaches
TARGETS: dict[str, dict[Split, Target]] = {}
