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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from bprong.checks import one_of
from bprong.errors import WhiteningError
from bprong.linalg.moments import Blocks, float64_copy, outer

Pair = tuple[Tensor, Tensor]  # a value for a weight (out, …), and one for its bias (out,); zeros if it has none
Map = Callable[[Tensor], Tensor]


class Multiplier(NamedTuple):
    """T of a change of coordinates, U' = T U or R' = T R."""

    times: Map  # M → T M
    transposed_solve: Map  # M → T⁻ᵀ M


def quotient(old: Tensor, new: Tensor) -> Multiplier:
    """Return T = U' U⁻¹ for any two invertible matrices, or n pairs of them, in float64."""
    old = float64_copy(old)
    new = float64_copy(new)
    solve: Callable[[Tensor, Tensor], Tensor] = torch.linalg.solve
    return Multiplier(lambda M: new @ solve(old, M), lambda M: solve(new.mT, old.mT @ M))


@dataclass(frozen=True)
class Change:
    """(U, c) → (T U, c') with s = U (c' − c), shaped like c; or R → T R, with s = None.

    blocks: of the side that changes
    ratio:  of the units of a velocity of W† to those of one of b†

    Each method moves a (W†, b†) pair to the new coordinates.
    """

    T: Multiplier
    blocks: Blocks
    s: Tensor | None = None
    ratio: float = 1.0

    def velocity(self, W: Tensor, b: Tensor) -> Pair:
        """Return parameters, or whatever is added to them, in the new coordinates."""
        if self.s is not None:
            b = b + times_mean(W, self.s * self.ratio, self.blocks)
        return self._apply(self.T.transposed_solve, W, b)

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
    columns = W.reshape(blocks.groups, -1, blocks.features).mT
    return on_outputs(apply, columns, blocks).mT.reshape(W.shape)


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
    limit = dtype.eps**0.5
    difference = functional_call(layer, dict(new), (probe,)) - before
    change = float64_copy(difference).norm() / float64_copy(before).norm().clamp(min=dtype.tiny)
    if not change <= limit:  # written so that NaN is an error too
        raise WhiteningError(
            f"re-whitening would change its outputs on this batch by {float(change):.1e} relative, more than "
            f"{before.dtype} allows ({limit:.1e}); use a larger damping, which makes the change better conditioned"
        )


# The state of an optimizer --------------------------------------------------------------------------------------------

Transport = Literal["velocity", "gradient", "squares"]  # the methods of a change of coordinates
Transports = Mapping[str, Transport]  # by the key in the optimizer's state
Holder = tuple[Optimizer, Transports]  # an optimizer that holds parameters, and how its state moves

_ADAM: Transports = {"exp_avg": "gradient", "exp_avg_sq": "squares", "max_exp_avg_sq": "squares"}
_KNOWN: dict[str, Transports] = {  # by the name in torch.optim
    # The metric of whitened coordinates is the identity, so SGD's average of gradients *is* a velocity there. Moved as
    # a velocity it keeps its meaning when the metric changes: v ← βv + P_t g in ordinary coordinates.
    "SGD": {"momentum_buffer": "velocity"},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": _ADAM,
    "RAdam": _ADAM,
    "RMSprop": {"momentum_buffer": "velocity", "grad_avg": "gradient", "square_avg": "squares"},
    "Adagrad": {"sum": "squares"},
    # Muon averages gradients, and orthogonalises the average at each step: it is a gradient.
    "Muon": {"momentum_buffer": "gradient"},
}


def holders_for(optimizers: Optimizer | Iterable[Optimizer], carry: Transports | None = None) -> list[Holder]:
    """Return each optimizer with how its state moves; `carry` says it for keys that are not known."""
    several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    return [(optimizer, transports_for(optimizer, carry)) for optimizer in several]


def transports_for(optimizer: Optimizer, carry: Transports | None = None) -> Transports:
    """Return how each tensor of the optimizer's state moves: as in _KNOWN, and as in `carry`, which has precedence."""
    kind = type(optimizer)
    is_torchs = getattr(torch.optim, kind.__name__, None) is kind  # a subclass may use a key otherwise
    known = _KNOWN.get(kind.__name__, carry) if is_torchs else carry
    if known is None:
        raise TypeError(
            f"it is not known how the state of {kind.__name__} moves with the coordinates; supported are "
            f"{', '.join(_KNOWN)}. Say it for each tensor of its state: "
            f"carry={{'momentum_buffer': 'velocity'}} moves this key like the parameters, 'gradient' like a gradient, "
            f"'squares' like squared gradients; carry={{}} if it has no state"
        )
    transports = {**known, **(carry or {})}
    for key, transport in transports.items():
        one_of(f"carry[{key!r}]", transport, get_args(Transport))
    return transports


@torch.no_grad()
def carry_(holders: Sequence[Holder], layer: Any, change: Change) -> None:
    """Move the optimizers' state for one layer, and its gradients if there are any, in place."""
    W = layer.weight_dagger
    change = replace(change, ratio=_rate_ratio(holders, W, layer.bias_dagger))
    of_W = carried_with(W, holders)
    of_b = carried_with(layer.bias_dagger, holders)
    for key in of_W | of_b:
        old = of_W.get(key, torch.zeros_like(W)), of_b.get(key, W.new_zeros(len(W)))  # what is not kept yet is zero
        for tensor, new in zip(old, getattr(change, key[0])(*map(float64_copy, old)), strict=True):
            tensor.copy_(new)


def carried_with(
    parameter: Tensor | None, holders: Sequence[Holder], name: str = ""
) -> dict[tuple[Transport, int], Tensor]:
    """Return what moves with a parameter, by how it moves and how many before it in optimizers' state move so.

    By this number tensors of a weight and of its bias belong together. Different optimizers may hold them under
    different keys: Muon's average of gradients of the weight belongs to Adam's of the bias, since both move as
    gradients. The gradients themselves, in `.grad`, have the number −1.

    Raises ValueError, with the name of the layer, unless there is a transport for exactly those tensors that are shaped
    like the parameter.
    """
    if parameter is None:
        return {}
    tensors: dict[tuple[Transport, int], Tensor] = {}
    for optimizer, transports in holders:
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            is_shaped = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_shaped != (key in transports) and value is not None:
                raise ValueError(
                    f"layer {name!r}: {type(optimizer).__name__} keeps {key!r}, for which carry has "
                    f"{transports.get(key)!r}. It must have a value for state that is shaped like the parameter, and "
                    f"none for other state; carry is {dict(transports)}"
                )
            if is_shaped:
                transport = transports[key]
                tensors[transport, sum(kind == transport for kind, _ in tensors)] = value
    if parameter.grad is not None:
        tensors["gradient", -1] = parameter.grad
    return tensors


def _rate_ratio(holders: Sequence[Holder], W: Tensor, b: Tensor | None) -> float:
    """Return the factor for a weight's buffer where it enters its bias's: each is a velocity up to its learning rate.

    1 if both rates are zero; 0 if only the bias's rate is, as the bias has no velocity then.
    """
    rates: dict[Tensor | None, float] = {}
    for optimizer, _ in holders:
        for group in optimizer.param_groups:
            rates |= dict.fromkeys(group["params"], float(group["lr"]))
    rate = rates.get(W, 1.0)
    bias_rate = rates.get(b, 1.0)
    return rate / bias_rate if bias_rate else float(rate == bias_rate)
