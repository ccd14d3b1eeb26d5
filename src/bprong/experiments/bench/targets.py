"""The targets of each workload, and how they were found.

`finding.py` computes them (`bprong bench --find-targets`): the best of twelve trials each of AdamW, NAdam and SGD with
momentum on the tuning split, rerun on three seeds of each split; the median of the lowest losses within three quarters
of the step budget. Found on 2026-11-17 with torch 2.13.0 on a CPU. The best trials, for training and for validation:

    workload     training                              validation
    paper        NAdam 0.0101, falling                 NAdam 0.00251, averaged
    autoencoder  NAdam 0.00164, averaged               NAdam 0.0051, averaged
    deep         NAdam 0.00195, falling, decay 0.1     NAdam 0.00164, averaged
    conv         NAdam 0.0133, averaged                NAdam 0.027, averaged, decay 0.1
    gpt          AdamW 0.00251, averaged               the same
    vit          NAdam 0.0051, averaged                AdamW 0.00251, averaged
    pinn         AdamW 0.0133, averaged                AdamW 0.0051, averaged
    regression   NAdam 0.0101, falling                 the same
"""

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
TARGETS: dict[str, dict[Split, Target]] = {
    "paper": {"tuning": Target(0.01621, 0.1635), "test": Target(0.0279, 0.1115)},
    "autoencoder": {"tuning": Target(138.8, 158.9), "test": Target(140.3, 166.9)},
    "deep": {"tuning": Target(0.008476, 0.1541), "test": Target(0.01324, 0.1331)},
    "conv": {"tuning": Target(4.441e-05, 0.03919), "test": Target(3.635e-05, 0.02327)},
    "gpt": {"tuning": Target(2.333, 2.218), "test": Target(2.304, 2.097)},
    "vit": {"tuning": Target(0.02653, 0.1652), "test": Target(0.0295, 0.151)},
    "pinn": {"tuning": Target(3.274e-05, 6.631e-07), "test": Target(4.049e-05, 2.357e-06)},
    "regression": {"tuning": Target(0.1117, 0.1341), "test": Target(0.1115, 0.1508)},
}
