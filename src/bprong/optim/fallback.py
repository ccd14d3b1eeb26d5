"""The rule for parameters that no whitener covers: Adam, at a fraction of the learning rate.

Scales of normalisation layers, bare parameters and tied weights have no z and δ of their own. Adam is what most people
would use for them, and its usual learning rate is a tenth of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fallback:
    """Adam (Kingma & Ba, Algorithm 1) for single parameters; their states are the optimizer's.

    rate: its learning rate, relative to the parameter group's
    """

    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def step_(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        """One step in place; starts the state at the first one."""
        m, denominator, correction = self._moments(gradient, state)
        _real(parameter).addcdiv_(m, denominator, value=-lr * self.rate / correction)

    def direction(self, gradient: Tensor, state: dict[str, Any], lr: float) -> Tensor:
        """What a step at this learning rate would add; the state advances as if the step were made."""
        m, denominator, correction = self._moments(gradient, state)
        step = (m / denominator).mul_(-lr / correction)
        return torch.view_as_complex(step) if gradient.is_complex() else step

    def prepare(self, gradient: Tensor, state: dict[str, Any]) -> None:
        """Starts the state, if that has not been done."""
        if "exp_avg" not in state:
            count = torch.zeros((), device="cpu")  # on the CPU, as in torch's optimizers: it is read at every step
            state |= {"step": count, "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}

    def _moments(self, gradient: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
        """The first moment and the root of the corrected second one, as real numbers; the correction of the first."""
        self.prepare(gradient, state)
        state["step"] += 1
        t = float(state["step"])
        first, second = self.betas
        g = _real(gradient)
        m = _real(state["exp_avg"]).lerp_(g, 1 - first)
        v = _real(state["exp_avg_sq"]).mul_(second).addcmul_(g, g, value=1 - second)
        return m, (v / (1 - second**t)).sqrt_().add_(max(self.eps, self._vanishing(v.dtype))), 1 - first**t

    def _vanishing(self, dtype: torch.dtype) -> float:
        """The size up to which a gradient leaves nothing in the second moment: 0.008 in float16, 10⁻²¹ in float32."""
        kind = torch.finfo(dtype)
        return math.sqrt(kind.tiny * kind.eps / (1 - self.betas[1]))


def _real(values: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, in a last dimension, as torch's Adam treats it; a view."""
    return torch.view_as_real(values) if values.is_complex() else values
