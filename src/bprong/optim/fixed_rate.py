"""The step rule of an explicit learning rate: SGD in whitened coordinates, written in ordinary ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.errors import warn
from bprong.linalg.damped_inverse import Damping
from bprong.linalg.moments import to_float64
from bprong.optim.fallback import Fallback
from bprong.optim.rules import GivenDamping, Gradients, Group, States, StepRule
from bprong.whitening.layers import Layer, Layers, WeightAndBias
from bprong.whitening.side import Side


class FixedRate(StepRule):
    """p ← p − η v with momentum v, as torch's SGD, but in coordinates whose inputs are centred at c.

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
        directions = layers.directions(gradients.values)
        scale = self._scale(directions, gradients)
        steps = _Steps()
        covered = set()
        for layer, (d_W, d_b) in directions.items():
            covered.update(layer.parameters)
            _add_layer(layer, _times(scale, d_W), _times(scale, d_b), gradients, steps)
        steps.make_()
        for parameter in gradients.values.keys() - covered:
            group = gradients.groups[parameter]
            _decay_(parameter, group)
            self._fallback.step_(
                parameter, gradients.values[parameter], gradients.states[parameter], float(group["lr"])
            )

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

    def _scale(self, directions: Mapping[Layer, WeightAndBias], gradients: Gradients) -> float:
        """The factor that reduces η² gᵀF⁻¹g, the squared length of the step in the Fisher metric, to the bound.

        With momentum β a step is a sum of steps whose factors add up to 1/(1 − β), so each of them may have 1 − β of
        the bound. A schedule that lowers the learning rate lowers the bound too.
        """
        if self._max_step is None:
            return 1.0
        squared = 0.0
        groups = gradients.groups.values()
        momentum = max(float(group["momentum"]) for group in groups)
        scheduled = max(_scheduled(group) for group in groups)
        for layer, (d_W, d_b) in directions.items():
            g_W, g_b = layer.gradients(gradients.values)
            if g_W is not None and d_W is not None:
                lr = gradients.groups[layer.weight]["lr"]
                squared += lr**2 * _product(layer.centred(g_W, g_b), d_W)
            if g_b is not None and d_b is not None and layer.bias is not None:
                squared += gradients.groups[layer.bias]["lr"] ** 2 * _product(g_b, d_b)
        return min(1.0, (1 - momentum) * scheduled * self._max_step / math.sqrt(max(squared, 1e-300)))


def _product(a: Tensor, b: Tensor) -> float:
    """The sum of the products of two tensors' entries; in float64 if it overflows otherwise."""
    found = float((a * b).sum())
    return found if math.isfinite(found) else float((to_float64(a) * to_float64(b)).sum())


def _scheduled(group: Mapping[str, Any]) -> float:
    """The part of its highest learning rate that a schedule leaves to a group.

    torch's schedulers note what it was before, and OneCycleLR what it will rise to. Velocities from a lower rate than
    the present one are then within the bound too.
    """
    highest = max(float(group.get(key, 0.0)) for key in ("initial_lr", "max_lr"))
    return min(1.0, float(group["lr"]) / highest) if highest else 1.0


def _add_layer(layer: Layer, d_W: Tensor | None, d_b: Tensor | None, gradients: Gradients, steps: _Steps) -> None:
    """Adds the steps of W and b along their directions: Δb = −η_b d_b − ΔW c, d_b being seen from the centre c."""
    linear = layer.linear
    v_W = None
    lr = 0.0
    if d_W is not None:
        group = gradients.groups[layer.weight]
        lr = group["lr"]
        v_W = _velocity(layer.weight, linear.own, linear.shaped(d_W), group, gradients.states)
        W = linear.own(layer.weight)
        _decay_(W, group)
        steps.add(W, v_W, lr)
        if gradients.noted:
            layer.step_norm = lr * float(v_W.norm())
    if d_b is None or layer.bias is None:
        return
    group = gradients.groups[layer.bias]
    b = linear.vector(layer.bias)
    v_b = _velocity(layer.bias, linear.vector, d_b, group, gradients.states)
    _decay_(b, group)
    if v_W is None or layer.c is None:
        steps.add(b, v_b, group["lr"])
    elif lr == group["lr"] and v_W.ndim == 2 and not (linear.transposed or linear.computed):
        steps.add(b, torch.addmv(v_b, v_W.to(v_b.dtype), layer.c.to(v_b.dtype), alpha=-1), lr)
    else:
        steps.add(b, v_b, group["lr"])
        b.add_(linear.times(v_W.to(b.dtype), layer.c.to(b.dtype)), alpha=lr)


def _velocity(
    parameter: Tensor, own: Callable[[Tensor], Tensor], direction: Tensor, group: Mapping[str, Any], states: States
) -> Tensor:
    """What the layer's own part of a parameter moves by, per unit of learning rate."""
    beta = group["momentum"]
    if not beta:
        return direction
    velocity = own(_momentum(parameter, states)).mul_(beta).add_(direction)
    return direction.add(velocity, alpha=beta) if group["nesterov"] else velocity


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
        self._by_lr: dict[float, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, parameter: Tensor, velocity: Tensor, lr: float) -> None:
        parameters, velocities = self._by_lr.setdefault(lr, ([], []))
        parameters.append(parameter)
        velocities.append(velocity.to(parameter.dtype))

    def make_(self) -> None:
        for lr, (parameters, velocities) in self._by_lr.items():
            torch._foreach_sub_(parameters, velocities, alpha=lr)


def _times(scale: float, direction: Tensor | None) -> Tensor | None:
    return direction if direction is None or scale == 1 else direction * scale


def _decay_(parameter: Tensor, group: Mapping[str, Any]) -> None:
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
