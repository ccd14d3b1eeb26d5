"""Optimizer state through a change of coordinates: what a torch optimizer remembers of W†, b† is moved with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from bprong.coordinates import Change
from bprong.layers import WhitenedLayer
from bprong.moments import wide

__all__ = ["Rule", "Rules", "carry_", "check_state", "rate_ratio", "rules_for"]

Rule = Literal["velocity", "gradient", "squares"]  # the methods of Change
Rules = Mapping[str, Rule]  # by the key under which an optimizer keeps it

_ADAM: Rules = {"exp_avg": "gradient", "exp_avg_sq": "squares", "max_exp_avg_sq": "squares"}
_KNOWN: dict[type[Optimizer], Rules] = {
    # Whitened coordinates have the identity as their metric, so there SGD's average of gradients *is* a velocity, and
    # as a velocity it keeps its meaning when the metric changes: v ← βv + P_t g in ordinary coordinates.
    SGD: {"momentum_buffer": "velocity"},
    Adam: _ADAM,
    AdamW: _ADAM,
    NAdam: _ADAM,
    RAdam: _ADAM,
    RMSprop: {"momentum_buffer": "velocity", "grad_avg": "gradient", "square_avg": "squares"},
    Adagrad: {"sum": "squares"},
}


def rules_for(optimizer: Optimizer, own: Rules | None = None) -> Rules:
    """How each tensor of the optimizer's state moves; `own` says it for optimizers not known here."""
    if own is not None:
        for key, rule in own.items():
            if rule not in get_args(Rule):
                raise ValueError(f"carry[{key!r}] must be one of {get_args(Rule)}, not {rule!r}")
        return own
    for known, rules in _KNOWN.items():
        if type(optimizer) is known:
            return rules
    raise TypeError(
        f"how the state of {type(optimizer).__name__} moves with the coordinates is not known; it is for "
        f"{', '.join(known.__name__ for known in _KNOWN)}. Say it: carry={{'momentum_buffer': 'velocity'}} moves a key "
        f"as parameters move, 'gradient' as gradients, 'squares' as squared gradients; carry={{}} if there is no state"
    )


def check_state(optimizer: Optimizer, rules: Rules, layers: Mapping[str, WhitenedLayer]) -> None:
    """Raises ValueError where the optimizer keeps something of a layer's shape that no rule moves, or the reverse."""
    for name, layer in layers.items():
        for parameter in layer.parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                shaped = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
                if shaped != (key in rules) and value is not None:
                    raise ValueError(
                        f"layer {name!r}: {type(optimizer).__name__} keeps {key!r}, and carry says "
                        f"{rules.get(key, 'nothing')} of it; what is shaped like the parameter must be carried, and "
                        f"nothing else can be. carry is {dict(rules)}"
                    )


@torch.no_grad()
def carry_(optimizer: Optimizer, rules: Rules, layer: WhitenedLayer, change: Change) -> None:
    """Moves the optimizer's state of one layer, and its gradients if there are any, in place."""
    W, b = layer.weight_dagger, layer.bias_dagger
    weight_state = optimizer.state.get(W, {})
    bias_state = {} if b is None else optimizer.state.get(b, {})
    for key, rule in rules.items():
        # A momentum buffer is a velocity up to the learning rate, which weight and bias may have each their own of.
        ratio = rate_ratio(_rate(optimizer, W), _rate(optimizer, b)) if rule == "velocity" and b is not None else 1.0
        _move(change, rule, layer, weight_state.get(key), bias_state.get(key), ratio)
    _move(change, "gradient", layer, W.grad, None if b is None else b.grad)


def _move(
    change: Change, rule: Rule, layer: WhitenedLayer, W: Tensor | None, b: Tensor | None, ratio: float = 1.0
) -> None:
    """W and b move together; W counts `ratio` times as much for b as for itself."""
    if W is None and b is None:
        return
    W_old = torch.zeros_like(wide(layer.weight_dagger)) if W is None else wide(W)
    W_new, b_new = getattr(change, rule)(W_old, None if b is None else wide(b))
    if b is not None and ratio != 1:  # velocities: W moves without regard to b
        _, b_new = getattr(change, rule)(W_old * ratio, wide(b))
    if W is not None:
        W.copy_(W_new)
    if b is not None:
        b.copy_(b_new)


def rate_ratio(weight: float, bias: float) -> float:
    """By how much a weight's buffer counts for its bias's, each a velocity up to its own learning rate.

    Where both rates are zero, as if they were equal and very small; a bias at rest has no velocity to keep.
    """
    return 1.0 if weight == bias else weight / bias if bias else 0.0


def _rate(optimizer: Optimizer, parameter: Tensor) -> float:
    """The learning rate of the group a parameter is in; 1 where it is in none."""
    for group in optimizer.param_groups:
        if any(parameter is p for p in group["params"]):
            return float(group["lr"])
    return 1.0
