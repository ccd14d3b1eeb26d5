"""What every layer of the paper's network shares: its coordinates U, c, R, their changes, and the way back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from bprong.blocks import Blocks
from bprong.continuous import Factor
from bprong.coordinates import BackwardChange, Change, ForwardChange, Pair, on_outputs
from bprong.moments import wide, widened
from bprong.patches import Geometry
from bprong.relative import BackwardStep, ForwardStep

__all__ = ["WhitenedLayer"]


class WhitenedLayer(nn.Module):
    """a = Rᵀ (W† U (z − c) + b†): the parameters are W† (shaped as the stock layer's weight) and b†.

    U, c and R are buffers, shaped as `forward_blocks` and `backward_blocks` say: without a leading dimension where a
    side is one block, and with one for its blocks where there are several. R is None in a forward-only layer (PRONG).

    z are the rows that the weight multiplies: of a convolution (`geometry`) the patches of its padded input.
    """

    U: Tensor
    c: Tensor
    R: Tensor | None
    weight_dagger: nn.Parameter
    bias_dagger: nn.Parameter | None
    forward_blocks: Blocks
    backward_blocks: Blocks
    geometry: Geometry | None = None

    buffers_are_constant = True  # a forward pass never writes to them

    def _take(self, weight: Tensor, bias: Tensor | None, forward: Blocks, backward: Blocks, two_sided: bool) -> None:
        self.forward_blocks, self.backward_blocks = forward, backward
        self.weight_dagger = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        if bias is None:
            self.register_parameter("bias_dagger", None)
        else:
            self.bias_dagger = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        self.register_buffer("U", _eye(weight, forward))
        self.register_buffer("c", weight.new_zeros(forward.shape[:-1]))
        self.register_buffer("R", _eye(weight, backward) if two_sided else None)

    @abstractmethod
    def _empty_stock(self) -> nn.Module:
        """The stock layer of these sizes and options, on the meta device."""

    def to_stock(self) -> nn.Module:
        """The stock layer that computes the same function."""
        with torch.no_grad():
            W, b = self.weight, self.bias
        stock = self._empty_stock()
        stock.weight = nn.Parameter(W, self.weight_dagger.requires_grad)
        if b is not None and self.bias_dagger is not None:
            stock.bias = nn.Parameter(b, self.bias_dagger.requires_grad)
        return stock.train(self.training)

    def padded(self, z: Tensor) -> Tensor:
        """The layer's input with whatever is put around it, other than the zeros that `geometry` speaks of."""
        return z

    @property
    def weight(self) -> Tensor:
        """W = Rᵀ W† U, computed from the parameters and differentiable by them; writing to it changes nothing."""
        return self._like_weight(self._ordinary(widened)[0])

    @property
    def bias(self) -> Tensor | None:
        """b = Rᵀ b† − W c, as `weight`; None without one."""
        b = self._ordinary(widened)[1]
        return None if b is None else b.to(self.weight_dagger)

    @property
    def centred(self) -> bool:
        """Whether c may differ from 0: only where there is a bias to train."""
        return self.bias_dagger is not None and self.bias_dagger.requires_grad

    def _ordinary(self, cast: Callable[[Tensor], Tensor]) -> Pair:
        """W and b, computed in the precision that `cast` brings their parts to."""
        blocks, shape = self.forward_blocks, self.weight_dagger.shape
        lead = (blocks.groups,) if blocks.groups > 1 else ()
        W = blocks.from_right(cast(self.weight_dagger).reshape(*lead, -1, blocks.features), cast(self.U)).reshape(shape)
        b = None if self.bias_dagger is None else cast(self.bias_dagger)
        if self.R is not None:
            R_T = cast(self.R).mT
            W, b = on_outputs(R_T, W), None if b is None else on_outputs(R_T, b)
        if b is not None:
            c = blocks.features_of(cast(self.c)).unsqueeze(-1)
            b = b - (W.reshape(*lead, -1, blocks.features) @ c).reshape(b.shape)
        return W, b

    def _like_weight(self, W: Tensor) -> Tensor:
        """In the weight's dtype, on its device and in its memory format."""
        W, stored = W.to(self.weight_dagger), self.weight_dagger
        return W if stored.ndim != 4 or stored.is_contiguous() else W.contiguous(memory_format=torch.channels_last)

    def rewhiten_forward_(self, U: Tensor, c: Tensor) -> ForwardChange:
        """Takes new U and c, shaped as the old, and moves W†, b† so that the function stays; returns the change made.

        A singular U raises with nothing changed.
        """
        _check_shape("U", U, self.U)
        _check_shape("c", c, self.c)
        if not self.centred and bool(c.any()):
            raise ValueError("this layer has no trainable bias, so c must stay 0: training would grow a bias")
        change = ForwardChange(
            wide(self.U), wide(self.c), wide(U.to(self.U)), wide(c.to(self.c)), self.forward_blocks
        )  # fmt: skip
        self._move(change)
        self.U.copy_(U)
        self.c.copy_(c)
        return change

    def rewhiten_backward_(self, R: Tensor) -> BackwardChange:
        """Takes a new R, shaped as the old, and moves W†, b† so that the function stays; returns the change made."""
        if self.R is None:
            raise ValueError("this layer is forward-only: it was made with backward=False and has no R")
        _check_shape("R", R, self.R)
        change = BackwardChange(wide(self.R), wide(R.to(self.R)))
        self._move(change)
        self.R.copy_(R)
        return change

    @torch.no_grad()
    def step_forward_(self, T: Factor, c: Tensor) -> ForwardStep:
        """Takes T U for U, and a new c: as `rewhiten_forward_`, by products of T's rank only."""
        change = ForwardStep(T, self.U @ (c.to(self.c) - self.c))
        self._move(change)
        self.U.copy_(T.times(self.U.to(T.V)))
        self.c.copy_(c)
        return change

    @torch.no_grad()
    def step_backward_(self, T: Factor) -> BackwardStep:
        """Takes T R for R, as `rewhiten_backward_`."""
        if self.R is None:
            raise ValueError("this layer is forward-only: it was made with backward=False and has no R")
        change = BackwardStep(T)
        self._move(change)
        self.R.copy_(T.times(self.R.to(T.V)))
        return change

    @torch.no_grad()
    def _move(self, change: Change) -> None:
        b = self.bias_dagger
        W_new, b_new = change.velocity(wide(self.weight_dagger), None if b is None else wide(b))
        self.weight_dagger.copy_(W_new)
        if b is not None and b_new is not None:
            b.copy_(b_new)
        torch.clear_autocast_cache()  # autocast may hold a low-precision copy of the weight as it was

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
            R_T = own.pop("R").mT  # a layer of both directions into a forward-only one
            own |= {k: on_outputs(R_T, own[k]) for k in ("weight_dagger", "bias_dagger") if own.get(k) is not None}
        elif "weight_dagger" in own and "R" not in own and self.R is not None:
            own["R"] = _eye(own["weight_dagger"], self.backward_blocks)  # and the other way round
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]
        state_dict.update({prefix + key: value for key, value in own.items()})
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)

    def _from_stock(self, own: dict[str, Any]) -> dict[str, Any]:
        """W and b as W† and b† in the coordinates of Algorithm 2's first line."""
        renamed = {f"{key}_dagger" if key in ("weight", "bias") else key: value for key, value in own.items()}
        W = renamed["weight_dagger"]
        return renamed | {"U": _eye(W, self.forward_blocks), "c": W.new_zeros(self.c.shape)}


def _check_shape(kind: str, given: Tensor, held: Tensor) -> None:
    if given.shape != held.shape:  # a missing leading dimension would broadcast
        raise ValueError(f"the {kind} of this layer is of shape {tuple(held.shape)}, not {tuple(given.shape)}")


def _eye(like: Tensor, blocks: Blocks) -> Tensor:
    """The identity of every block."""
    return torch.eye(blocks.size, dtype=like.dtype, device=like.device).repeat(*blocks.shape[:-2], 1, 1)
