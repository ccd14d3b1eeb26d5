"""Optimizer state through a change of coordinates: what a torch optimizer remembers of W† and b† is moved with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from bprong.checks import one_of
from bprong.linalg.moments import float64_copy
from bprong.network.coordinates import Change
from bprong.network.layers import WhitenedLayer

Transport = Literal["velocity", "gradient", "squares"]  # the methods of a change of coordinates
Transports = Mapping[str, Transport]  # by the key in the optimizer's state

_ADAM: Transports = {"exp_avg": "gradient", "exp_avg_sq": "squares", "max_exp_avg_sq": "squares"}
_KNOWN: dict[type[Optimizer], Transports] = {
    # The metric of whitened coordinates is the identity, so SGD's average of gradients *is* a velocity there. Moved as
    # a velocity it keeps its meaning when the metric changes: v ← βv + P_t g in ordinary coordinates.
    SGD: {"momentum_buffer": "velocity"},
    Adam: _ADAM,
    AdamW: _ADAM,
    NAdam: _ADAM,
    RAdam: _ADAM,
    RMSprop: {"momentum_buffer": "velocity", "grad_avg": "gradient", "square_avg": "squares"},
    Adagrad: {"sum": "squares"},
}


def transports_for(optimizer: Optimizer, carry: Transports | None = None) -> Transports:
    """How each tensor of the optimizer's state moves; `carry` says it for optimizers that are not known."""
    for key, transport in (carry or {}).items():
        one_of(f"carry[{key!r}]", transport, get_args(Transport))
    transports = _KNOWN.get(type(optimizer)) if carry is None else carry
    if transports is None:
        raise TypeError(
            f"it is not known how the state of {type(optimizer).__name__} moves with the coordinates; supported are "
            f"{', '.join(known.__name__ for known in _KNOWN)}. Say it for each tensor of its state: "
            f"carry={{'momentum_buffer': 'velocity'}} moves this key like the parameters, 'gradient' like a gradient, "
            f"'squares' like squared gradients; carry={{}} if it has no state"
        )
    return transports


def check_state(optimizer: Optimizer, transports: Transports, layers: Mapping[str, WhitenedLayer]) -> None:
    """Raises ValueError unless there is a transport for exactly those tensors that are shaped like their parameter."""
    kept = (
        (name, parameter, key, value)
        for name, layer in layers.items()
        for parameter in layer.parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    )
    for name, parameter, key, value in kept:
        shaped = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
        if shaped != (key in transports) and value is not None:
            raise ValueError(
                f"layer {name!r}: {type(optimizer).__name__} keeps {key!r}, for which carry has "
                f"{transports.get(key)!r}. It must have a value for state that is shaped like the parameter, and none "
                f"for other state; carry is {dict(transports)}"
            )


@torch.no_grad()
def carry_(optimizer: Optimizer, transports: Transports, layer: WhitenedLayer, change: Change) -> None:
    """Moves the optimizer's state for one layer, and its gradients if there are any, in place."""
    W = layer.weight_dagger
    b = layer.bias_dagger
    states = [{} if p is None else optimizer.state.get(p, {}) for p in (W, b)]
    # W enters the new b by s alone
    velocity = change if change.s is None else replace(change, s=change.s * _rate_ratio(optimizer, W, b))
    for key, transport in transports.items():
        by = velocity if transport == "velocity" else change
        _move(by, transport, W, states[0].get(key), states[1].get(key))
    _move(change, "gradient", W, W.grad, None if b is None else b.grad)


def _move(change: Change, transport: Transport, like: Tensor, W: Tensor | None, b: Tensor | None) -> None:
    """Moves W (None: zeros like a tensor) and b together."""
    if W is None and b is None:
        return
    W_old = float64_copy(torch.zeros_like(like) if W is None else W)
    moved = getattr(change, transport)(W_old, None if b is None else float64_copy(b))
    for held, new in zip((W, b), moved, strict=True):
        if held is not None:
            held.copy_(new)


def _rate_ratio(optimizer: Optimizer, W: Tensor, b: Tensor | None) -> float:
    """The factor for a weight's buffer where it enters its bias's: each is a velocity up to its own learning rate.

    1 if both rates are zero; 0 if only the bias's rate is, as the bias has no velocity then.
    """
    rates = {id(parameter): float(group["lr"]) for group in optimizer.param_groups for parameter in group["params"]}
    weight = rates.get(id(W), 1.0)
    bias = rates.get(id(b), 1.0)
    return weight / bias if bias else float(weight == bias)
