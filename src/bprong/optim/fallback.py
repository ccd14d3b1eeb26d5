"""The rule for parameters that no whitener covers: Adam, at a fraction of the learning rate.

Scales of normalisation layers, bare parameters and tied weights have no z and δ of their own. Adam is what most people
would use for them, and its usual learning rate is a tenth of ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

States = MutableMapping[Tensor, dict[str, Any]]  # torch's own states of the parameters


@dataclass(frozen=True)
class Fallback:
    """Adam (Kingma & Ba, Algorithm 1); the states of the parameters are the optimizer's.

    rate: its learning rate, relative to the parameter group's
    """

    rate: float = 0.1
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
        g = list(gradients.values())
        m = []
        v = []
        counts = []
        for p, gradient in gradients.items():
            state = states[p]
            self.prepare(gradient, state)
            state["step"] += 1
            counts.append(float(state["step"]))
            m.append(state["exp_avg"])
            v.append(state["exp_avg_sq"])
        is_complex = any(p.is_complex() for p in gradients)
        if is_complex:
            g = list(map(_real, g))
            m = list(map(_real, m))
            v = list(map(_real, v))
        first, second = self.betas
        torch._foreach_lerp_(m, g, 1 - first)
        torch._foreach_mul_(v, second)
        torch._foreach_addcmul_(v, g, g, value=1 - second)
        denominators = torch._foreach_div(v, [1 - second**t for t in counts])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, [max(self.eps, _vanishing(each.dtype, second)) for each in v])
        steps = torch._foreach_div(m, denominators)
        factors = [-self.rate * rates[p] / (1 - first**t) for p, t in zip(gradients, counts, strict=True)]
        torch._foreach_mul_(steps, factors)
        direction = dict(zip(gradients, steps, strict=True))
        if is_complex:
            direction |= {p: torch.view_as_complex(step) for p, step in direction.items() if p.is_complex()}
        return direction

    def prepare(self, gradient: Tensor, state: dict[str, Any]) -> None:
        """Start the state, if that has not been done; convert it, if the model was converted."""
        if "exp_avg" in state and state["exp_avg"].dtype is not gradient.dtype:
            state |= {key: state[key].to(gradient.dtype) for key in ("exp_avg", "exp_avg_sq")}
        if "exp_avg" not in state:
            count = torch.zeros((), device="cpu")  # on the CPU, as in torch's optimizers: it is read at every step
            state |= {"step": count, "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}


@functools.cache
def _vanishing(dtype: torch.dtype, beta: float) -> float:
    """Return the size up to which a gradient is lost in the second moment: 0.008 in float16, 10⁻²¹ in float32."""
    kind = torch.finfo(dtype)
    return math.sqrt(kind.tiny * kind.eps / (1 - beta))


def _real(values: Tensor) -> Tensor:
    """Return a complex tensor as real and imaginary parts in a last dimension, as torch's Adam treats it; a view."""
    return torch.view_as_real(values) if values.is_complex() else values
