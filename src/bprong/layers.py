"""The network of the paper: layers that carry U, c, W†, b† and R explicitly."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.blocks import Blocks
from bprong.coordinates import BackwardChange, Change, ForwardChange, Pair
from bprong.moments import wide, widened

__all__ = ["WhitenedLinear"]


class WhitenedLinear(nn.Module):
    """a = Rᵀ (W† U (z − c) + b†), the layer of a bidirectionally whitened network (Fujimoto & Ohira, section 3.2).

    Parameters `weight_dagger` (out, in) and `bias_dagger` (out,); buffers `U` (in, in), `c` (in,) and `R` (out, out),
    which is None in a forward-only layer (PRONG). It starts as Algorithm 2 does, with U = R = I and c = 0, and computes
    what `nn.Linear` computes with its `weight` and `bias`, which can be read here too, in ordinary coordinates.

    Without a trainable bias nothing is centred: c stays 0, for otherwise training W† would grow a bias.

    A stock checkpoint (`weight`, `bias`) loads into it; the coordinates then start anew.

    >>> layer = WhitenedLinear(3, 2)
    >>> z = torch.randn(5, 3)
    >>> torch.allclose(layer(z), layer.to_linear()(z), atol=1e-6)
    True
    """

    U: Tensor
    c: Tensor
    R: Tensor | None
    weight_dagger: nn.Parameter
    bias_dagger: nn.Parameter | None

    buffers_are_constant = True  # a forward pass never writes to them

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        backward: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        stock = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(stock, backward)

    @classmethod
    def from_linear(cls, linear: nn.Linear, backward: bool = True) -> WhitenedLinear:
        """The same function as `linear`, with parameters of its own."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, backward)
        return layer.train(linear.training)

    def _take(self, linear: nn.Linear, backward: bool) -> None:
        weight, bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_dagger = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        if bias is None:
            self.register_parameter("bias_dagger", None)
        else:
            self.bias_dagger = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        self.register_buffer("U", _eye(weight, 1))
        self.register_buffer("c", weight.new_zeros(self.in_features))
        self.register_buffer("R", _eye(weight, 0) if backward else None)

    def to_linear(self) -> nn.Linear:
        """The stock layer that computes the same function."""
        with torch.no_grad():
            W, b = self.weight, self.bias
        linear = nn.Linear(self.in_features, self.out_features, b is not None, device="meta", dtype=W.dtype)
        linear.weight = nn.Parameter(W, self.weight_dagger.requires_grad)
        if b is not None and self.bias_dagger is not None:
            linear.bias = nn.Parameter(b, self.bias_dagger.requires_grad)
        return linear.train(self.training)

    def forward(self, input: Tensor) -> Tensor:  # named as nn.Linear names it: some callers pass it by keyword
        z = input
        if z.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"a WhitenedLinear of {self.in_features} inputs was given a tensor of shape {tuple(z.shape)}; "
                f"its last dimension must be {self.in_features}"
            )
        a = F.linear(F.linear(z - self.c, self.U), self.weight_dagger, self.bias_dagger)
        return a if self.R is None else F.linear(a, self.R.T)

    @property
    def weight(self) -> Tensor:
        """W = Rᵀ W† U, computed from the parameters and differentiable by them; writing to it changes nothing."""
        return self._ordinary()[0].to(self.weight_dagger)

    @property
    def bias(self) -> Tensor | None:
        """b = Rᵀ b† − W c, as `weight`; None without one."""
        b = self._ordinary()[1]
        return None if b is None else b.to(self.weight_dagger)

    geometry = None

    @property
    def forward_blocks(self) -> Blocks:
        return Blocks(self.in_features)

    @property
    def backward_blocks(self) -> Blocks:
        return Blocks(self.out_features)

    def padded(self, z: Tensor) -> Tensor:
        return z

    @property
    def centred(self) -> bool:
        """Whether c may differ from 0: only where there is a bias to train."""
        return self.bias_dagger is not None and self.bias_dagger.requires_grad

    def _ordinary(self) -> Pair:
        W = widened(self.weight_dagger) @ widened(self.U)
        b = None if self.bias_dagger is None else widened(self.bias_dagger)
        if self.R is not None:
            R_T = widened(self.R).T
            W, b = R_T @ W, None if b is None else R_T @ b
        return W, None if b is None else b - W @ widened(self.c)

    def rewhiten_forward_(self, U: Tensor, c: Tensor) -> ForwardChange:
        """Takes new U (in, in) and c (in,) and moves W†, b† so that the function stays; returns the change made.

        A singular U raises with nothing changed.
        """
        if not self.centred and bool(c.any()):
            raise ValueError("this layer has no trainable bias, so c must stay 0: training would grow a bias")
        change = ForwardChange(wide(self.U), wide(self.c), wide(U.to(self.U)), wide(c.to(self.c)))
        self._move(change)
        self.U.copy_(U)
        self.c.copy_(c)
        return change

    def rewhiten_backward_(self, R: Tensor) -> BackwardChange:
        """Takes a new R (out, out) and moves W†, b† so that the function stays; returns the change made."""
        if self.R is None:
            raise ValueError("this layer is forward-only: it was made with backward=False and has no R")
        change = BackwardChange(wide(self.R), wide(R.to(self.R)))
        self._move(change)
        self.R.copy_(R)
        return change

    @torch.no_grad()
    def _move(self, change: Change) -> None:
        b = self.bias_dagger
        W_new, b_new = change.velocity(wide(self.weight_dagger), None if b is None else wide(b))
        self.weight_dagger.copy_(W_new)
        if b is not None and b_new is not None:
            b.copy_(b_new)
        torch.clear_autocast_cache()  # autocast may hold a low-precision copy of the weight as it was

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias_dagger is not None}, backward={self.R is not None}"

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        *rest: Any,
    ) -> None:
        """Reads stock layers and layers whitened in other directions too, always as the function that was saved."""
        own = {key[len(prefix) :]: state_dict[key] for key in state_dict if key.startswith(prefix)}
        if "weight" in own and own["weight"].shape == self.weight_dagger.shape:
            if "bias" not in own and self.bias_dagger is not None:
                own["bias"] = self.bias  # what strict=False leaves alone is the function's bias, not its coordinates
                missing.append(f"{prefix}bias")
            own = self._from_stock(own)
        if "weight_dagger" in own and "R" in own and self.R is None:
            R_T = own.pop("R").T  # a layer of both directions into a forward-only one
            own |= {k: R_T @ own[k] for k in ("weight_dagger", "bias_dagger") if own.get(k) is not None}
        elif "weight_dagger" in own and "R" not in own and self.R is not None:
            own["R"] = _eye(own["weight_dagger"], 0)  # and the other way round
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]
        state_dict.update({prefix + key: value for key, value in own.items()})
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)

    def _from_stock(self, own: dict[str, Any]) -> dict[str, Any]:
        """W and b as W† and b† in the coordinates of Algorithm 2's first line."""
        renamed = {f"{key}_dagger" if key in ("weight", "bias") else key: value for key, value in own.items()}
        W = renamed["weight_dagger"]
        return renamed | {"U": _eye(W, 1), "c": W.new_zeros(self.in_features)}


def _eye(like: Tensor, side: int) -> Tensor:
    """The identity on one side of a weight."""
    return torch.eye(like.shape[side], dtype=like.dtype, device=like.device)
