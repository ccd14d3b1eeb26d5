"""The network of the paper: layers that carry U, c, W†, b† and R explicitly."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.coordinates import BackwardChange, Change, ForwardChange, Pair
from bprong.moments import wide

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
        self.register_buffer("U", torch.eye(self.in_features, dtype=weight.dtype, device=weight.device))
        self.register_buffer("c", torch.zeros(self.in_features, dtype=weight.dtype, device=weight.device))
        R = torch.eye(self.out_features, dtype=weight.dtype, device=weight.device) if backward else None
        self.register_buffer("R", R)

    def to_linear(self) -> nn.Linear:
        """The stock layer that computes the same function."""
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
        """W = Rᵀ W† U, detached, in the layer's dtype."""
        return self._ordinary()[0].to(self.weight_dagger.dtype)

    @property
    def bias(self) -> Tensor | None:
        """b = Rᵀ b† − W c, detached, in the layer's dtype; None without one."""
        b = self._ordinary()[1]
        return None if b is None else b.to(self.weight_dagger.dtype)

    @property
    def centred(self) -> bool:
        """Whether c may differ from 0: only where there is a bias to train."""
        return self.bias_dagger is not None and self.bias_dagger.requires_grad

    def _ordinary(self) -> Pair:
        W = wide(self.weight_dagger) @ wide(self.U)
        b = None if self.bias_dagger is None else wide(self.bias_dagger)
        if self.R is not None:
            R_T = wide(self.R).T
            W, b = R_T @ W, None if b is None else R_T @ b
        return W, None if b is None else b - W @ wide(self.c)

    def rewhiten_forward_(self, U: Tensor, c: Tensor) -> ForwardChange:
        """Takes new U (in, in) and c (in,) and moves W†, b† so that the function stays; returns the change made."""
        U_old, c_old = wide(self.U), wide(self.c)
        self.U.copy_(U)
        self.c.copy_(c)
        change = ForwardChange(U_old, c_old, wide(self.U), wide(self.c))
        self._move(change)
        return change

    def rewhiten_backward_(self, R: Tensor) -> BackwardChange:
        """Takes a new R (out, out) and moves W†, b† so that the function stays; returns the change made."""
        if self.R is None:
            raise ValueError("this layer is forward-only: it was made with backward=False and has no R")
        R_old = wide(self.R)
        self.R.copy_(R)
        change = BackwardChange(R_old, wide(self.R))
        self._move(change)
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

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        """Reads a stock layer's `weight` and `bias` as W† and b† in the coordinates of Algorithm 2's first line."""
        stock = state_dict.get(f"{prefix}weight")
        if stock is not None and stock.shape == self.weight_dagger.shape:
            for name in ("weight", "bias"):
                if f"{prefix}{name}" in state_dict:
                    state_dict[f"{prefix}{name}_dagger"] = state_dict.pop(f"{prefix}{name}")
            state_dict[f"{prefix}U"] = torch.eye(self.in_features, dtype=stock.dtype, device=stock.device)
            state_dict[f"{prefix}c"] = stock.new_zeros(self.in_features)
            if self.R is not None:
                state_dict[f"{prefix}R"] = torch.eye(self.out_features, dtype=stock.dtype, device=stock.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
