"""The step rule of an explicit learning rate: SGD in whitened coordinates, written in ordinary ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.errors import warn
from bprong.linalg.damped_inverse import Damping
from bprong.optim.directions import dot, norm
from bprong.optim.fallback import Fallback, States
from bprong.optim.rules import GivenDamping, Gradients, Group, StepRule
from bprong.whitening.layers import Layer, Layers
from bprong.whitening.side import Side


class FixedRate(StepRule):
    """p ← p − η v with momentum v, as torch's SGD, of the preconditioned gradients.

    v is a velocity in ordinary coordinates, which a new whitener leaves as it is.

    max_step: a bound on the length of each step in the Fisher metric, momentum included; None: no bound
    """

    def __init__(self, damping: GivenDamping, max_step: float | None, fallback: Fallback) -> None:
        self._damping = damping
        self._max_step = max_step
        self._fallback = fallback
        self._momentum = 0.0  # the largest that was given, before a scheduler changed it
        self._warned = False

    def check_group(self, group: Group) -> None:
        self._momentum = max(self._momentum, float(group["momentum"]))

    def damping(self, layer: Layer, side: Side) -> Damping:
        return self._damping.of(side)

    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        covered = layers.parameters
        for p, g in gradients.values.items():
            if p not in covered:
                self._fallback.prepare(g, gradients.states[p])
            elif gradients.groups[p]["momentum"]:
                _momentum(p, gradients.states)

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        self._warn_of_cycled_momentum(gradients)
        groups = gradients.groups
        rates = {p: float(group["lr"]) for p, group in groups.items()}
        directions = layers.steps(gradients.values, rates)
        rates = layers.units(rates)
        scale = self._scale(directions, rates, gradients)
        steps = _Steps()
        for p, d in directions.items():
            _decay_(p, groups[p])
            steps.add(p, *_velocity(p, d, scale, rates[p], groups[p], gradients.states))
        for layer in layers.values() if gradients.noted else ():
            if layer.weight in directions:
                layer.step_norm = steps.norm(layer.weight, layer.linear.own)
        steps.make_()
        others = {p: g for p, g in gradients.values.items() if p not in directions}
        for p in others:
            _decay_(p, groups[p])
        all_rates = {p: float(group["lr"]) for p, group in groups.items()}
        for p, step in self._fallback.directions(others, gradients.states, all_rates).items():
            p.add_(step)

    def _warn_of_cycled_momentum(self, gradients: Gradients) -> None:
        """Warns once if a scheduler added momentum to literal steps, which makes them up to 1/(1 − β) times longer."""
        if self._warned or self._max_step is not None or self._momentum:
            return
        cycled = max((float(group.get("max_momentum", 0)) for group in gradients.groups.values()), default=0.0)
        if cycled:
            self._warned = True
            warn(
                f"a scheduler, such as OneCycleLR or CyclicLR, has written a momentum of up to {cycled:g} into the "
                f"parameter groups, although none was given: steps become up to {1 / (1 - cycled):.0f} times longer, "
                f"and nothing bounds them here. Give the scheduler cycle_momentum=False, or the optimizer max_step=0.1"
            )

    def _scale(self, directions: Mapping[Tensor, Tensor], rates: Mapping[Tensor, float], gradients: Gradients) -> float:
        """The factor that reduces η² gᵀF⁻¹g, the squared length of the step in the Fisher metric, to the bound.

        With momentum β a step is a sum of steps whose factors add up to 1/(1 − β), so each of them may have 1 − β of
        the bound. A schedule that lowers the learning rate lowers the bound too.
        """
        if self._max_step is None:
            return 1.0
        groups = gradients.groups
        momentum = max(float(group["momentum"]) for group in groups.values())
        scheduled = max(_scheduled(group) for group in groups.values())
        squared = dot(gradients.values, directions, {p: rate**2 for p, rate in rates.items()})
        return min(1.0, (1 - momentum) * scheduled * self._max_step / math.sqrt(max(squared, 1e-300)))


def _scheduled(group: Mapping[str, Any]) -> float:
    """The part of its highest learning rate that a schedule leaves to a group.

    torch's schedulers note what it was before, and OneCycleLR what it will rise to. Velocities from a lower rate than
    the present one are then within the bound too.
    """
    highest = max(float(group.get(key, 0.0)) for key in ("initial_lr", "max_lr"))
    return min(1.0, float(group["lr"]) / highest) if highest else 1.0


def _velocity(
    parameter: Tensor, direction: Tensor, scale: float, lr: float, group: Mapping[str, Any], states: States
) -> tuple[Tensor, float]:
    """What a parameter moves by, and the learning rate to multiply it by; scale: of the direction."""
    beta = group["momentum"]
    if not beta:
        return direction, lr * scale
    velocity = _momentum(parameter, states).mul_(beta).add_(direction, alpha=scale)
    return (torch.add(velocity.mul(beta), direction, alpha=scale) if group["nesterov"] else velocity), lr


def _momentum(parameter: Tensor, states: States) -> Tensor:
    """The momentum of a parameter, which starts at zero."""
    state = states[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    found: Tensor = state["momentum_buffer"]
    return found


class _Steps:
    """p ← p − η v for many tensors at once, those with one learning rate together."""

    def __init__(self) -> None:
        self._by_parameter: dict[Tensor, tuple[Tensor, float]] = {}

    def add(self, parameter: Tensor, velocity: Tensor, lr: float) -> None:
        self._by_parameter[parameter] = velocity.to(parameter.dtype), lr

    def norm(self, parameter: Tensor, own: Callable[[Tensor], Tensor]) -> float:
        """The length of the step of a part of a parameter."""
        velocity, lr = self._by_parameter[parameter]
        return lr * norm(velocity, own)

    def make_(self) -> None:
        by_lr: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, (velocity, lr) in self._by_parameter.items():
            parameters, velocities = by_lr.setdefault(lr, ([], []))
            parameters.append(parameter)
            velocities.append(velocity)
        for lr, (parameters, velocities) in by_lr.items():
            torch._foreach_sub_(parameters, velocities, alpha=lr)


def _decay_(parameter: Tensor, group: Mapping[str, Any]) -> None:
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
