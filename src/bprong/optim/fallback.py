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
        """What a step adds to each parameter that has a gradient; the states advance, and are created at first.

        rates: the learning rates of the parameters, and maybe of others
        """
        if not gradients:
            return {}
        own = [states[p] for p in gradients]
        for gradient, state in zip(gradients.values(), own, strict=True):
            self.prepare(gradient, state)
            state["step"] += 1
        counts = [float(state["step"]) for state in own]
        g = list(gradients.values())
        m = [state["exp_avg"] for state in own]
        v = [state["exp_avg_sq"] for state in own]
        is_complex = [p.is_complex() for p in gradients]
        if any(is_complex):
            g, m, v = ([_real(values) for values in tensors] for tensors in (g, m, v))
        first, second = self.betas
        torch._foreach_lerp_(m, g, 1 - first)
        torch._foreach_mul_(v, second)
        torch._foreach_addcmul_(v, g, g, value=1 - second)
        denominators = torch._foreach_div(v, [1 - second**t for t in counts])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, [max(self.eps, _vanishing(each.dtype, second)) for each in v])
        steps = torch._foreach_div(m, denominators)
        torch._foreach_mul_(
            steps, [-self.rate * rates[p] / (1 - first**t) for p, t in zip(gradients, counts, strict=True)]
        )
        if any(is_complex):
            steps = tuple(
                torch.view_as_complex(d) if p.is_complex() else d for p, d in zip(gradients, steps, strict=True)
            )
        return dict(zip(gradients, steps, strict=True))

    def prepare(self, gradient: Tensor, state: dict[str, Any]) -> None:
        """Starts the state, if that has not been done; converts it, if the model was."""
        if "exp_avg" in state and state["exp_avg"].dtype is not gradient.dtype:
            state |= {key: state[key].to(gradient.dtype) for key in ("exp_avg", "exp_avg_sq")}
        if "exp_avg" not in state:
            count = torch.zeros((), device="cpu")  # on the CPU, as in torch's optimizers: it is read at every step
            state |= {"step": count, "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}


@functools.cache
def _vanishing(dtype: torch.dtype, beta: float) -> float:
    """The size up to which a gradient leaves nothing in the second moment: 0.008 in float16, 10⁻²¹ in float32."""
    kind = torch.finfo(dtype)
    return math.sqrt(kind.tiny * kind.eps / (1 - beta))


def _real(values: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, in a last dimension, as torch's Adam treats it; a view."""
    return torch.view_as_real(values) if values.is_complex() else values
