"""The step rule of an explicit learning rate: SGD in whitened coordinates, written in ordinary ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bprong.linalg.factors import Damping
from bprong.optim.options import Setup
from bprong.optim.rules import (
    Fallback,
    Gradients,
    Group,
    NotFiniteError,
    RuleWithDamping,
    decay_,
    kept,
    note_lengths,
    products,
)
from bprong.whitening.layer import SideName
from bprong.whitening.layers import Layers

DAMPING: Mapping[SideName, float] = {"forward": 0.2, "backward": 0.015}  # docs/sweep.md
DAMPING_OF_INPUTS_ALONE: Mapping[SideName, float] = {"forward": 0.01, "backward": 0.015}
MAX_STEP = 0.1  # docs/spectral.md has the rates that were tried
SMALL_RATE = 0.005  # a smaller one is more often a habit than a choice
FALLBACK_RATE = 0.1  # Adam's learning rate, relative to that of whitened parameters
MOST_FALLBACK = 0.01  # of Adam's learning rate where natural steps are bounded, as at lr="auto"

Rates = dict[Tensor, float]  # learning rates by parameter


class FixedRate(RuleWithDamping):
    """p ← p − η v with momentum v, as torch's SGD, of the preconditioned gradients.

    v is a velocity in ordinary coordinates, which a new whitener leaves as it is.

    max_step:  a bound on the length of each step in the Fisher metric, momentum included; None: no bound
    """

    def __init__(self, setup: Setup) -> None:
        """BPRONG's steps are bounded by default."""
        self._max_step = setup.bound(MAX_STEP if setup.both_sides else None)
        self._fallback = Fallback()
        self.checks = self._max_step is not None
        super().__init__(natural_damping(setup), few=self.checks and setup.has_default_damping)

    def __str__(self) -> str:
        return "natural steps"

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        groups = gradients.groups
        rates = {p: float(group["lr"]) for p, group in groups.items()}
        natural = layers.natural_gradients(gradients.values)
        scale = self._scale(natural, rates, gradients, layers)
        if weights := _weights_of_biases(rates, layers):
            # They move by η_b d_b − η_W d_W c, also if their own rate is zero.
            steps = layers.natural_gradients(gradients.values, rates)
            for bias, weight in weights.items():
                rates[bias] = rates[bias] or rates[weight]
                natural[bias] = steps[bias] / rates[bias]
        decay_(groups)
        factors = {p: rates[p] * (1.0 if groups[p]["momentum"] else scale) for p in natural}
        velocities = _make_(natural, factors, scale, gradients)
        if gradients.noted:
            note_lengths(velocities, layers, factors)
        others = {p: g for p, g in gradients.values.items() if p not in natural}
        for p in others:
            rates[p] *= FALLBACK_RATE
            if self._max_step is not None:  # a schedule lowers the limit too
                rates[p] *= min(1.0, MOST_FALLBACK / max(FALLBACK_RATE * groups[p]["highest_lr"], 1e-300))
        if others:
            for p, direction in self._fallback.directions(others, gradients.states, rates).items():
                p.add_(direction)

    def _scale(self, natural: Mapping[Tensor, Tensor], rates: Rates, gradients: Gradients, layers: Layers) -> float:
        """The factor that reduces a step to the bound.

        With momentum β a step is a sum of steps whose factors add up to 1/(1 − β), so each of them may have 1 − β of
        the bound. A learning rate below its highest lowers the bound too.
        """
        if self._max_step is None:
            return 1.0
        scheduled = 0.0
        momentum = 0.0
        for group in {id(group): group for group in gradients.groups.values()}.values():
            scheduled = max(scheduled, float(group["lr"]) / (_highest(group) or 1.0))
            momentum = max(momentum, float(group["momentum"]))
        if not scheduled:  # velocities advance as at a very small rate
            rates = {p: group["highest_lr"] for p, group in gradients.groups.items()}
            scheduled = 1.0
        length = _length(natural, rates, gradients, layers)
        return min(1.0, (1 - momentum) * scheduled * self._max_step / max(length, 1e-150))


def natural_damping(setup: Setup) -> dict[SideName, Damping]:
    """The damping of each side for natural steps."""
    return setup.damping(DAMPING if setup.both_sides else DAMPING_OF_INPUTS_ALONE)


def _length(natural: Mapping[Tensor, Tensor], rates: Rates, gradients: Gradients, layers: Layers) -> float:
    """√(ΔᵀFΔ) of the step Δ of the whitened parameters; raises NotFiniteError.

    With the learning rates η_W and η_b its square is the product of the gradient and of the step at the rates η²:

        η_W² (g_W − g_b cᵀ)·d_W + η_b² g_b·d_b  =  η_W² g_W·d_W + g_b·(η_b² d_b − η_W² d_W c)
    """
    values = gradients.values
    squares = {p: rate * rate for p, rate in rates.items()}
    if _weights_of_biases(rates, layers):
        natural = layers.natural_gradients(values, squares)
        squares = dict.fromkeys(natural, 1.0)
    pairs = [(values[p], d) for p, d in natural.items()]
    pairs += [(g, g) for p, g in values.items() if p not in natural]  # to see whether they are finite
    numbers = products(pairs)
    if not (gradients.checked or math.isfinite(sum(numbers))):
        raise NotFiniteError
    squared = 0.0
    for p, product in zip(natural, numbers, strict=False):
        squared += squares[p] * product
    return math.sqrt(max(gradients.summed(squared), 0.0))


def _weights_of_biases(rates: Rates, layers: Layers) -> dict[Tensor, Tensor]:
    """The biases that have another learning rate than their weight, which moves them too; each with a weight."""
    weights: dict[Tensor, Tensor] = {}
    for layer in layers.values() if len(set(rates.values())) > 1 else ():
        if layer.bias in rates and rates.get(layer.weight, rates[layer.bias]) != rates[layer.bias]:
            weights[layer.bias] = layer.weight
    return weights


def _highest(group: Group) -> float:
    """The highest learning rate of a group so far, or that a schedule will raise it to; it is noted in the group."""
    highest = max([float(group.get(key) or 0.0) for key in ("lr", "highest_lr", "initial_lr", "max_lr")])
    group["highest_lr"] = highest
    return highest


def _make_(
    natural: Mapping[Tensor, Tensor], factors: Rates, scale: float, gradients: Gradients
) -> dict[Tensor, Tensor]:
    """p ← p − η v with v ← β v + s d, for parameters with the same numbers together; without momentum v = d. Gives v.

    natural: d, the natural gradients; factors: η, what v is multiplied by; scale: s
    """
    kinds: dict[tuple[float, float], list[Tensor]] = {}
    for p in natural:
        kinds.setdefault((factors[p], gradients.groups[p]["momentum"]), []).append(p)
    velocities: dict[Tensor, Tensor] = {}
    for (factor, beta), parameters in kinds.items():
        steps = [natural[p].to(p.dtype) for p in parameters]
        if beta:
            directions = steps
            steps = [kept(gradients.states[p], "momentum_buffer", p) for p in parameters]
            torch._foreach_mul_(steps, beta)
            torch._foreach_add_(steps, directions, alpha=scale)
        torch._foreach_add_(parameters, steps, alpha=-factor)
        velocities |= dict(zip(parameters, steps, strict=True))
    return velocities
