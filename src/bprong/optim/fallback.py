"""The rule for parameters that no whitener covers: Adam.

Scales of normalisation layers, bare parameters and tied weights have no z and δ of their own. Adam is what most people
would use for them, and its usual learning rate is a tenth of ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bprong.optim.rules import States, kept


@dataclass(frozen=True)
class Fallback:
    """Adam (Kingma & Ba, Algorithm 1); the states of the parameters are the optimizer's."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def directions(
        self, gradients: Mapping[Tensor, Tensor], states: States, rates: Mapping[Tensor, float]
    ) -> dict[Tensor, Tensor]:
        """Return what a step adds to each parameter that has a gradient; the states advance, and are created at first.

        rates: the learning rates of the parameters, and maybe of others
        """
        if not gradients:
            return {}
        rows = []
        counts = []
        for p, gradient in gradients.items():
            state = states[p]
            if "step" not in state:
                state["step"] = torch.zeros((), device="cpu")  # as in torch's optimizers: it is read at every step
            state["step"] += 1
            counts.append(float(state["step"]))
            row = (gradient, kept(state, "exp_avg", gradient), kept(state, "exp_avg_sq", gradient))
            rows.append(map(torch.view_as_real, row) if p.is_complex() else row)  # as torch's Adam treats it
        g, m, v = zip(*rows, strict=True)
        first, second = self.betas
        torch._foreach_lerp_(m, g, 1 - first)
        torch._foreach_mul_(v, second)
        torch._foreach_addcmul_(v, g, g, value=1 - second)
        denominators = torch._foreach_div(v, [1 - second**t for t in counts])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, [max(self.eps, _vanishing(each.dtype, second)) for each in v])
        steps = torch._foreach_div(m, denominators)
        torch._foreach_mul_(steps, [-rates[p] / (1 - first**t) for p, t in zip(gradients, counts, strict=True)])
        direction = zip(gradients, steps, strict=True)
        return {p: torch.view_as_complex(step) if p.is_complex() else step for p, step in direction}


@functools.cache
def _vanishing(dtype: torch.dtype, beta: float) -> float:
    """Return the size up to which a gradient is lost in the second moment: 0.008 in float16, 10⁻²¹ in float32."""
    kind = torch.finfo(dtype)
    return math.sqrt(kind.tiny * kind.eps / (1 - beta))
