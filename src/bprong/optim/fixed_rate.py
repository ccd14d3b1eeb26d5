"""The step rule of an explicit learning rate: SGD in whitened coordinates, written in ordinary ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.errors import warn
from bprong.linalg.factors import Damping
from bprong.optim.fallback import Fallback, States
from bprong.optim.rules import Gradients, Group, NotFiniteError, RuleWithDamping, Setup, norm, products, read
from bprong.parallel.slices import local, summed
from bprong.whitening.layer import SideName
from bprong.whitening.layers import Layers

MAX_STEP = 0.1  # docs/spectral.md has the rates that were tried
FALLBACK_RATE = 0.1  # Adam's learning rate, relative to that of whitened parameters
MOST_FALLBACK = 0.01  # of Adam's learning rate where natural steps are bounded, as at lr="auto"

Rates = dict[Tensor, float]  # learning rates by parameter


class FixedRate(RuleWithDamping):
    """p ← p − η v with momentum v, as torch's SGD, of the preconditioned gradients.

    v is a velocity in ordinary coordinates, which a new whitener leaves as it is.

    max_step:  a bound on the length of each step in the Fisher metric, momentum included; None: no bound
    """

    def __init__(
        self,
        damping: Mapping[SideName, Damping],
        max_step: float | None,
        fallback: Fallback,
        few: bool = False,
    ) -> None:
        super().__init__(damping, few)
        self._max_step = max_step
        self._fallback = fallback
        self._momentum = 0.0  # the largest that was given, before a scheduler changed it
        self._warned = False
        self.checks = max_step is not None

    @classmethod
    def of(cls, setup: Setup) -> FixedRate:
        """BPRONG's steps are bounded by default."""
        bound = setup.bound(MAX_STEP if setup.both_sides else None)
        few = setup.has_default_damping and bound is not None
        return cls(setup.damping(), bound, setup.options.fallback(FALLBACK_RATE), few)

    def check_group(self, group: Group) -> None:
        self._momentum = max(self._momentum, float(group["momentum"]))

    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        covered = layers.parameters
        for p, g in gradients.values.items():
            if p not in covered:
                self._fallback.prepare(g, gradients.states[p])
            elif gradients.groups[p]["momentum"]:
                _momentum(p, gradients.states)

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        groups = gradients.groups
        rates = {p: float(group["lr"]) for p, group in groups.items()}
        natural = layers.natural_gradients(gradients.values)
        scale = self._scale(natural, rates, gradients, layers)
        units = _follow_weights_(natural, rates, gradients, layers)
        velocities = _make_(natural, units, scale, gradients)
        for layer in layers.values() if gradients.noted else ():
            if layer.weight in velocities:
                rate = units[layer.weight] * (1.0 if groups[layer.weight]["momentum"] else scale)
                layer.step_norm = rate * norm(velocities[layer.weight], layer.linear.own)
        others = {p: g for p, g in gradients.values.items() if p not in natural}
        if others:
            for p in others:
                if groups[p]["weight_decay"]:
                    p.mul_(1 - rates[p] * groups[p]["weight_decay"])
            rates = {p: rates[p] * self._fallback_part(groups[p]) for p in others}
            for p, direction in self._fallback.directions(others, gradients.states, rates).items():
                p.add_(direction)

    def _fallback_part(self, group: Group) -> float:
        """The part of a group's rate at which Adam's stays within its limit. A schedule lowers both."""
        if self._max_step is None:
            return 1.0
        return min(1.0, MOST_FALLBACK / max(self._fallback.rate * _highest(group), 1e-300))

    def _warn_of_cycled_momentum(self, gradients: Gradients) -> None:
        """Warns once if a scheduler added momentum to literal steps, which makes them up to 1/(1 − β) times longer."""
        if self._warned or self._momentum:
            return
        cycled = max((float(group.get("max_momentum", 0)) for group in gradients.groups.values()), default=0.0)
        if cycled:
            self._warned = True
            warn(
                f"a scheduler, such as OneCycleLR or CyclicLR, has written a momentum of up to {cycled:g} into the "
                f"parameter groups, although none was given: steps become up to {1 / (1 - cycled):.0f} times longer, "
                f"and nothing bounds them here. Give the scheduler cycle_momentum=False, or the optimizer max_step=0.1"
            )

    def _scale(self, natural: Mapping[Tensor, Tensor], rates: Rates, gradients: Gradients, layers: Layers) -> float:
        """The factor that reduces a step to the bound.

        With momentum β a step is a sum of steps whose factors add up to 1/(1 − β), so each of them may have 1 − β of
        the bound. A learning rate below its highest lowers the bound too.
        """
        if self._max_step is None:
            self._warn_of_cycled_momentum(gradients)
            return 1.0
        groups = {id(group): group for group in gradients.groups.values()}
        highest = {key: _highest(group) for key, group in groups.items()}
        scheduled = max([float(group["lr"]) / (highest[key] or 1.0) for key, group in groups.items()])
        if not scheduled:  # velocities advance as at a very small rate
            rates = {p: highest[id(group)] for p, group in gradients.groups.items()}
            scheduled = 1.0
        momentum = max([float(group["momentum"]) for group in groups.values()])
        length = _length(natural, rates, gradients, layers)
        return min(1.0, (1 - momentum) * scheduled * self._max_step / max(length, 1e-150))


def _length(natural: Mapping[Tensor, Tensor], rates: Rates, gradients: Gradients, layers: Layers) -> float:
    """√(ΔᵀFΔ) of the step Δ of the whitened parameters; raises NotFiniteError.

    With the learning rates η_W and η_b its square is the product of the gradient and of the step at the rates η²:

        η_W² (g_W − g_b cᵀ)·d_W + η_b² g_b·d_b  =  η_W² g_W·d_W + g_b·(η_b² d_b − η_W² d_W c)
    """
    values = gradients.values
    squares = {p: rate * rate for p, rate in rates.items()}
    steps = layers.natural_gradients(values, squares) if _weights_of_biases(rates, layers) else natural
    pairs = [(values[p], d) for p, d in steps.items()]
    if gradients.sliced:
        pairs = [(local(x), local(y)) for x, y in pairs]
    numbers = products(pairs)
    others = [g for p, g in values.items() if p not in natural]
    sizes = read(torch._foreach_norm(others)) if others and not gradients.checked else []
    if not (gradients.checked or math.isfinite(sum(numbers) + sum(sizes))):
        raise NotFiniteError
    squared = 0.0
    for p, product in zip(natural, numbers, strict=True):
        squared += squares[p] * product if steps is natural else product
    squared = summed(squared, values.values()) if gradients.sliced else squared
    return math.sqrt(max(squared, 0.0))


def _weights_of_biases(rates: Rates, layers: Layers) -> dict[Tensor, Tensor]:
    """The biases that have another learning rate than their weight, which moves them too; each with a weight."""
    weights: dict[Tensor, Tensor] = {}
    if len(set(rates.values())) > 1:
        for layer in layers.values():
            if layer.bias in rates and rates.get(layer.weight, rates[layer.bias]) != rates[layer.bias]:
                weights[layer.bias] = layer.weight
    return weights


def _follow_weights_(
    natural: dict[Tensor, Tensor], rates: Rates, gradients: Gradients, layers: Layers
) -> Mapping[Tensor, float]:
    """Replaces the natural gradients of biases whose weight has another rate; gives what each is multiplied by.

    Such a bias moves by η_b d_b − η_W d_W c, also if its own rate is zero.
    """
    weights = _weights_of_biases(rates, layers)
    if not weights:
        return rates
    steps = layers.natural_gradients(gradients.values, rates)
    units = rates | {bias: rates[bias] or rates[weight] for bias, weight in weights.items()}
    for bias in weights:
        natural[bias] = steps[bias] / units[bias]
    return units


def _highest(group: Group) -> float:
    """The highest learning rate of a group so far, or that a schedule will raise it to; it is noted in the group."""
    highest = max([float(group.get(key) or 0.0) for key in ("lr", "highest_lr", "initial_lr", "max_lr")])
    group["highest_lr"] = highest
    return highest


def _make_(
    natural: Mapping[Tensor, Tensor], units: Mapping[Tensor, float], scale: float, gradients: Gradients
) -> dict[Tensor, Tensor]:
    """p ← (1 − η w) p − η v with v ← β v + d, for parameters with the same numbers together; gives v.

    units: what the natural gradients d, or their velocities, are multiplied by: the learning rates
    scale: of d
    """
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in natural:
        group = gradients.groups[p]
        numbers = (units[p], group["momentum"], group["weight_decay"], group["lr"])
        kinds.setdefault(numbers, []).append(p)
    velocities: dict[Tensor, Tensor] = {}
    for (unit, beta, weight_decay, lr), parameters in kinds.items():
        if weight_decay:
            torch._foreach_mul_(parameters, 1 - float(lr) * weight_decay)
        steps = [natural[p].to(p.dtype) for p in parameters]
        alpha = -unit
        if beta:
            averages = [_momentum(p, gradients.states) for p in parameters]
            torch._foreach_mul_(averages, beta)
            torch._foreach_add_(averages, steps, alpha=scale)
            steps = averages
        else:
            alpha *= scale
        torch._foreach_add_(parameters, steps, alpha=alpha)
        velocities |= dict(zip(parameters, steps, strict=True))
    return velocities


def _momentum(parameter: Tensor, states: States) -> Tensor:
    """The momentum of a parameter, which starts at zero; converted, if the model was."""
    state = states[parameter]
    velocity: Tensor | None = state.get("momentum_buffer")
    if velocity is None:
        velocity = torch.zeros_like(parameter)
    elif velocity.dtype is not parameter.dtype:
        velocity = velocity.to(parameter.dtype)
    state["momentum_buffer"] = velocity
    return velocity
