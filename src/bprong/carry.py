"""Optimizer state through a change of coordinates: what a torch optimizer remembers of W†, b† is moved with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from bprong.coordinates import Change
from bprong.layers import WhitenedLinear
from bprong.moments import wide

__all__ = ["Rule", "Rules", "carry_", "rules_for"]

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


@torch.no_grad()
def carry_(optimizer: Optimizer, rules: Rules, layer: WhitenedLinear, change: Change) -> None:
    """Moves the optimizer's state of one layer, in place."""
    weight_state: dict[str, Tensor] = optimizer.state.get(layer.weight_dagger, {})
    bias_state: dict[str, Tensor] = {} if layer.bias_dagger is None else optimizer.state.get(layer.bias_dagger, {})
    for key, rule in rules.items():
        W, b = weight_state.get(key), bias_state.get(key)
        if W is None and b is None:
            continue
        W_new, b_new = getattr(change, rule)(
            torch.zeros_like(wide(layer.weight_dagger)) if W is None else wide(W), None if b is None else wide(b)
        )
        if W is not None:
            W.copy_(W_new)
        if b is not None:
            b.copy_(b_new)
