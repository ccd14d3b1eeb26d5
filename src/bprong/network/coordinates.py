"""Changes of a layer's coordinates, and what they do to its parameters and to the state of a torch optimizer.

    whitened:  a = Rᵀ (W† U (z − c) + b†)          ordinary:  W = Rᵀ W† U,  b = Rᵀ b† − W c

A forward change replaces (U, c) by (U', c'), a backward change replaces R by R'. Both leave a as it is for every z
(Fujimoto & Ohira, "Updating of the model parameters", sections 3.1 and 3.2). In terms of T = U' U⁻¹ or T = R' R⁻¹:

    forward:   W†' = W† T⁻¹,  b†' = b† + W† s   with  s = U (c' − c)
    backward:  W†' = T⁻ᵀ W†,  b†' = T⁻ᵀ b†

Both maps are linear in (W†, b†), so a velocity, such as SGD's momentum buffer, moves exactly as the parameters do. A
gradient is a covector and moves by the inverse transpose. The two differ unless T is orthogonal and c stays, so
each kind of state has a method of its own. `carry_` moves what a torch optimizer remembers of W† and b† with them.

A weight keeps its own shape: (out, in), or (out, channels, *kernel) for a convolution. If a side is whitened in several
blocks (`Blocks`), it changes block by block, and U, c and R have a leading dimension for the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from bprong.checks import one_of
from bprong.errors import WhiteningError
from bprong.linalg.blocks import Blocks
from bprong.linalg.moments import float64_copy, outer

Pair = tuple[Tensor, Tensor]  # a value for a weight (out, …), and one for its bias (out,); zeros if it has none
Map = Callable[[Tensor], Tensor]


class Multiplier(NamedTuple):
    """T of a change of coordinates, U' = T U or R' = T R."""

    times: Map  # M → T M
    transposed_solve: Map  # M → T⁻ᵀ M


def quotient(old: Tensor, new: Tensor) -> Multiplier:
    """Return T = U' U⁻¹ for any two invertible matrices, or n pairs of them, in float64."""
    solve: Callable[[Tensor, Tensor], Tensor] = torch.linalg.solve
    return Multiplier(lambda M: new @ solve(old, M), lambda M: solve(new.mT, old.mT @ M))


@dataclass(frozen=True)
class Change:
    """(U, c) → (T U, c') with s = U (c' − c), shaped like c; or R → T R, with s = None.

    blocks: of the side that changes. Each method moves a (W†, b†) pair to the new coordinates.
    """

    T: Multiplier
    blocks: Blocks
    s: Tensor | None = None

    def velocity(self, W: Tensor, b: Tensor) -> Pair:
        """Return parameters, or whatever is added to them, in the new coordinates."""
        W_new, b_new = self._apply(self.T.transposed_solve, W, b)
        if self.s is not None:
            b_new = b_new + times_mean(W, self.s, self.blocks)
        return W_new, b_new

    def gradient(self, W: Tensor, b: Tensor) -> Pair:
        """Return gradients in the new coordinates."""
        if self.s is not None:
            W = W - self._outer(b, self.s, W)
        return self._apply(self.T.times, W, b)

    def squares(self, W: Tensor, b: Tensor) -> Pair:
        """Return mean squares v of gradients, which are taken to be uncorrelated, in the new coordinates.

        With g' = L g, the diagonal of L diag(v) Lᵀ is (L∘L) v, the best estimate that a diagonal v allows. It stays
        positive; correlations, which v does not contain, are lost.
        """
        T = self.T.times(identity(self.blocks, W))
        W_new, b_new = self._apply(T.square().matmul, W, b)
        if self.s is not None:
            shift = (T @ self.s.unsqueeze(-1)).squeeze(-1)
            W_new = W_new + self._outer(b_new, shift.square(), W)
        return W_new, b_new

    def _apply(self, function: Map, W: Tensor, b: Tensor) -> Pair:
        """Apply a map of columns to the side that changes; the bias belongs to the outputs."""
        if self.s is None:
            return on_outputs(function, W, self.blocks), on_outputs(function, b, self.blocks)
        return on_inputs(function, W, self.blocks), b

    def _outer(self, b: Tensor, s: Tensor, like: Tensor) -> Tensor:
        """Return b sᵀ in the shape of a weight."""
        groups = self.blocks.groups
        return outer(b.reshape(groups, -1), s.reshape(groups, -1)).reshape(like.shape)


def identity(blocks: Blocks, like: Tensor) -> Tensor:
    """Return I for the features of a side: (d, d), or (n, d, d) for n blocks."""
    return like.new_ones(blocks.shape[:-1]).diag_embed()


def on_inputs(apply: Map, W: Tensor, blocks: Blocks) -> Tensor:
    """Applies a map of columns, (d, k) or (n, d, k) for n blocks, to the rows of a weight: W L for `(L.mT).matmul`."""
    columns = W.reshape(blocks.groups, -1, blocks.count, blocks.size).permute(0, 2, 3, 1)
    mapped = apply(columns.reshape(*blocks.shape[:-1], -1)).reshape(columns.shape)
    return mapped.permute(0, 3, 1, 2).reshape(W.shape)


def on_outputs(apply: Map, values: Tensor, blocks: Blocks) -> Tensor:
    """Apply a map of columns to those of a weight (out, …), or to a bias (out,): L W or L b for `L.matmul`."""
    return apply(values.reshape(*blocks.shape[:-1], -1)).reshape(values.shape)


def times_mean(W: Tensor, mean: Tensor, blocks: Blocks) -> Tensor:
    """Return W c, (out,), for c shaped like the layer's."""
    return (W.reshape(blocks.groups, -1, blocks.features) @ mean.reshape(blocks.groups, -1, 1)).flatten()


@torch.no_grad()
def check_outputs(layer: nn.Module, new: Mapping[str, Tensor], probe: Tensor) -> None:
    """Raise WhiteningError unless the layer's outputs on `probe` are finite and stay the same with new tensors."""
    before: Tensor = layer(probe)
    if not torch.isfinite(before).all():
        raise WhiteningError("its outputs on this batch are not finite")
    dtype = torch.finfo(before.dtype)
    difference = functional_call(layer, dict(new), (probe,)) - before
    change = float64_copy(difference).norm() / float64_copy(before).norm().clamp(min=dtype.tiny)
    if not change <= dtype.eps**0.5:  # written so that NaN is an error too
        raise WhiteningError(
            f"re-whitening would change its outputs on this batch by {float(change):.1e} relative, more than "
            f"{before.dtype} allows ({dtype.eps**0.5:.1e}); use a larger damping, which makes the change better "
            f"conditioned"
        )


# The state of an optimizer --------------------------------------------------------------------------------------------

Transport = Literal["velocity", "gradient", "squares"]  # the methods of a change of coordinates
Transports = Mapping[str, Transport]  # by the key in the optimizer's state
Holder = tuple[Optimizer, Transports]  # an optimizer that holds parameters, and how its state moves

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
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    # Muon averages gradients, and orthogonalises the average at each step: it is a gradient.
    _KNOWN[torch.optim.Muon] = {"momentum_buffer": "gradient"}


def holders_for(
    optimizers: Optimizer | Sequence[Optimizer], carry: Transports | Sequence[Transports | None] | None = None
) -> list[Holder]:
    """Return each optimizer with how its state moves; `carry` says it for those that are not known."""
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    if carry is None or isinstance(carry, Mapping):
        carry = [carry] * len(optimizers)
    if len(carry) != len(optimizers):
        raise ValueError(f"carry has {len(carry)} entries for {len(optimizers)} optimizers; give None for known ones")
    return [(optimizer, transports_for(optimizer, each)) for optimizer, each in zip(optimizers, carry, strict=True)]


def transports_for(optimizer: Optimizer, carry: Transports | None = None) -> Transports:
    """Return how each tensor of the optimizer's state moves; `carry` says it for optimizers that are not known."""
    for key, transport in (carry or {}).items():
        one_of(f"carry[{key!r}]", transport, get_args(Transport))
    transports = _KNOWN.get(type(optimizer)) if carry is None else carry
    if transports is None:
        raise TypeError(
            f"it is not known how the state of {type(optimizer).__name__} moves with the coordinates; supported are "
            f"{', '.join(kind.__name__ for kind in _KNOWN)}. Say it for each tensor of its state: "
            f"carry={{'momentum_buffer': 'velocity'}} moves this key like the parameters, 'gradient' like a gradient, "
            f"'squares' like squared gradients; carry={{}} if it has no state"
        )
    return transports


def check_state(holders: Sequence[Holder], layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError unless there is a transport for exactly those tensors that are shaped like their parameter."""
    for name, layer in layers.items():
        for parameter in layer.parameters():
            for optimizer, transports in holders:
                for key, value in optimizer.state.get(parameter, {}).items():
                    is_shaped = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0
                    if is_shaped != (key in transports) and value is not None:
                        raise ValueError(
                            f"layer {name!r}: {type(optimizer).__name__} keeps {key!r}, for which carry has "
                            f"{transports.get(key)!r}. It must have a value for state that is shaped like the "
                            f"parameter, and none for other state; carry is {dict(transports)}"
                        )


@torch.no_grad()
def carry_(holders: Sequence[Holder], layer: Any, change: Change) -> None:
    """Move the optimizers' state for one layer, and its gradients if there are any, in place."""
    W = layer.weight_dagger
    b = layer.bias_dagger
    velocity_change = change
    if change.s is not None:  # W enters the new b by s alone
        velocity_change = replace(change, s=change.s * _rate_ratio(holders, W, b))
    of_W = _tensors_of(W, holders)
    of_b = {} if b is None else _tensors_of(b, holders)
    for kind in of_W | of_b:
        transport = kind[0]
        move = getattr(velocity_change if transport == "velocity" else change, transport)
        # Tensors of the weight and of its bias belong together in the order in which the optimizers keep them.
        for pair in zip_longest(of_W.get(kind, []), of_b.get(kind, [])):
            old = []
            for tensor, like in zip(pair, (W, W.flatten(1)[:, 0]), strict=True):  # what is not kept yet is zero
                old.append(float64_copy(torch.zeros_like(like) if tensor is None else tensor))
            for tensor, new in zip(pair, move(*old), strict=True):
                if tensor is not None:
                    tensor.copy_(new)


def _tensors_of(parameter: Tensor, holders: Sequence[Holder]) -> dict[tuple[Transport, str], list[Tensor]]:
    """Return what moves with a parameter, by how it moves and by where it is: in `.grad`, or in optimizers' state.

    Different optimizers may hold a weight and its bias under different keys: Muon's average of gradients of the weight
    belongs to Adam's of the bias, since both move as gradients. The gradients themselves belong to each other only.
    """
    tensors: dict[tuple[Transport, str], list[Tensor]] = {}
    if parameter.grad is not None:
        tensors["gradient", "grad"] = [parameter.grad]
    for optimizer, transports in holders:
        state = optimizer.state.get(parameter, {})
        for key, transport in transports.items():
            if state.get(key) is not None:
                tensors.setdefault((transport, "state"), []).append(state[key])
    return tensors


def _rate_ratio(holders: Sequence[Holder], W: Tensor, b: Tensor | None) -> float:
    """Return the factor for a weight's buffer where it enters its bias's: each is a velocity up to its learning rate.

    1 if both rates are zero; 0 if only the bias's rate is, as the bias has no velocity then.
    """
    rate = 1.0
    bias_rate = 1.0
    for optimizer, _ in holders:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter is W:
                    rate = float(group["lr"])
                elif parameter is b:
                    bias_rate = float(group["lr"])
    return rate / bias_rate if bias_rate else float(rate == bias_rate)
