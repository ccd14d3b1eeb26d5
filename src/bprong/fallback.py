"""The rule for parameters that no whitener covers: Adam, at a fraction of the learning rate.

Norm scales, embeddings, bare parameters and tied weights have no z and δ of their own. Adam is the rule their owners
would otherwise use, and its default rate is a tenth of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["FALLBACK_RATE", "adam_direction", "adam_step_"]

FALLBACK_RATE = 0.1  # of the group's lr
BETAS, EPS = (0.9, 0.999), 1e-8


def adam_step_(parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
    """One step of Adam (Kingma & Ba, Algorithm 1) in place; the state is begun at the first."""
    m, denominator, correction = _moments_(gradient, state)
    parameter.addcdiv_(m, denominator, value=-lr * FALLBACK_RATE / correction)


def adam_direction(gradient: Tensor, state: dict[str, Any], lr: float) -> Tensor:
    """What such a step would add; the state goes on as if it were made."""
    m, denominator, correction = _moments_(gradient, state)
    return (m / denominator).mul_(-lr / correction)


def _moments_(gradient: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """The first moment, the root of the second, corrected, and the first one's correction."""
    if "exp_avg" not in state:
        count = torch.zeros((), device="cpu")  # where torch's optimizers keep theirs: it is read at every step
        state |= {"step": count, "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
    state["step"] += 1
    m, v, t = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    m.lerp_(gradient, 1 - BETAS[0])
    v.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    return m, (v / (1 - BETAS[1] ** t)).sqrt_().add_(EPS), 1 - BETAS[0] ** t
