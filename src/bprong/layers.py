"""The network of the paper: layers that carry U, c, W†, b† and R explicitly."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.blocks import MAX_DIM, Blocks, blocks_of
from bprong.patches import Geometry, geometry_of
from bprong.whitened import WhitenedLayer

__all__ = ["WhitenedConv2d", "WhitenedLayer", "WhitenedLinear"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class WhitenedLinear(WhitenedLayer):
    """a = Rᵀ (W† U (z − c) + b†), the layer of a bidirectionally whitened network (Fujimoto & Ohira, section 3.2).

    Parameters `weight_dagger` (out, in) and `bias_dagger` (out,); buffers `U` (in, in), `c` (in,) and `R` (out, out),
    which is None in a forward-only layer (PRONG). It starts as Algorithm 2 does, with U = R = I and c = 0, and computes
    what `nn.Linear` computes with its `weight` and `bias`, which can be read here too, in ordinary coordinates.

    A side of more than `max_dim` features is whitened in n blocks of d: U (n, d, d), c (n, d), R (n, d, d).

    Without a trainable bias nothing is centred: c stays 0, for otherwise training W† would grow a bias.

    A stock checkpoint (`weight`, `bias`) loads into it; the coordinates then start anew.

    >>> layer = WhitenedLinear(3, 2)
    >>> z = torch.randn(5, 3)
    >>> torch.allclose(layer(z), layer.to_linear()(z), atol=1e-6)
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        backward: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_dim: int = MAX_DIM,
    ) -> None:
        super().__init__()
        stock = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take_linear(stock, backward, max_dim)

    @classmethod
    def from_linear(cls, linear: nn.Linear, backward: bool = True, *, max_dim: int = MAX_DIM) -> WhitenedLinear:
        """The same function as `linear`, with parameters of its own."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take_linear(linear, backward, max_dim)
        return layer.train(linear.training)

    def _take_linear(self, linear: nn.Linear, backward: bool, max_dim: int) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        inputs, outputs = (blocks_of(d, max_dim=max_dim) for d in (self.in_features, self.out_features))
        self._take(linear.weight, linear.bias, inputs, outputs, backward)

    def to_linear(self) -> nn.Linear:
        """The stock layer that computes the same function."""
        return cast(nn.Linear, self.to_stock())

    def _empty_stock(self) -> nn.Linear:
        bias, dtype = self.bias_dagger is not None, self.weight_dagger.dtype
        return nn.Linear(self.in_features, self.out_features, bias, device="meta", dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:  # named as nn.Linear names it: some callers pass it by keyword
        z = input
        if z.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"a WhitenedLinear of {self.in_features} inputs was given a tensor of shape {tuple(z.shape)}; "
                f"its last dimension must be {self.in_features}"
            )
        z_dagger = _on_rows(self.U, z - self.c.flatten(), self.forward_blocks)
        a_dagger = F.linear(z_dagger, self.weight_dagger, self.bias_dagger)
        return a_dagger if self.R is None else _on_rows(self.R.mT, a_dagger, self.backward_blocks)

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias_dagger is not None}, backward={self.R is not None}"


def _on_rows(matrix: Tensor, rows: Tensor, blocks: Blocks) -> Tensor:
    """The matrix, block-diagonal where it has a leading dimension, times every row of (…, d)."""
    if not blocks.lead:
        return F.linear(rows, matrix)
    return blocks.from_right(rows.reshape(-1, rows.shape[-1]), matrix.mT).reshape(rows.shape)


class WhitenedConv2d(WhitenedLayer):
    """a = Rᵀ (W† U (z − c) + b†) at every output position: a convolution in whitened coordinates.

    z is the patch of the padded input that the kernel lies on, d = channels of a group · taps of the kernel. Parameters
    `weight_dagger`, shaped as the stock weight, and `bias_dagger`; buffers, of each group of G where there are several,
    `U` (G, d, d), `c` (G, d) and `R` (G, out/G, out/G). With `channels`, or where d is more than `max_dim`, all taps
    share a U and a c over the channels. Everything else is as in `WhitenedLinear`.

    >>> layer = WhitenedConv2d(4, 6, 3, padding=1, groups=2)
    >>> layer.U.shape, layer.R.shape
    (torch.Size([2, 18, 18]), torch.Size([2, 3, 3]))
    """

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: PaddingMode

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        backward: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_dim: int = MAX_DIM,
        channels: bool = False,
    ) -> None:
        super().__init__()
        stock = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._take_conv(stock, backward, max_dim, channels)

    @classmethod
    def from_conv(
        cls, conv: nn.Conv2d, backward: bool = True, *, max_dim: int = MAX_DIM, channels: bool = False
    ) -> WhitenedConv2d:
        """The same function as `conv`, with parameters of its own."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take_conv(conv, backward, max_dim, channels)
        return layer.train(conv.training)

    def _take_conv(self, conv: nn.Conv2d, backward: bool, max_dim: int, channels: bool) -> None:
        for option in _OPTIONS:
            setattr(self, option, getattr(conv, option))
        self.geometry = geometry_of(conv)
        taps, groups = self.geometry.taps, self.groups
        inputs = blocks_of(self.in_channels * taps, groups, taps, max_dim=max_dim, channels=channels)
        outputs = blocks_of(self.out_channels, groups, max_dim=max_dim)
        self._take(conv.weight, conv.bias, inputs, outputs, backward)

    def to_conv(self) -> nn.Conv2d:
        """The stock layer that computes the same function."""
        return cast(nn.Conv2d, self.to_stock())

    def _empty_stock(self) -> nn.Conv2d:
        options = {option: getattr(self, option) for option in _OPTIONS}
        return nn.Conv2d(**options, bias=self.bias_dagger is not None, device="meta", dtype=self.weight_dagger.dtype)

    def padded(self, z: Tensor) -> Tensor:
        if self.padding_mode == "zeros":
            return z
        both = Geometry.of(self.kernel_size, self.stride, self.padding, self.dilation).padding
        return F.pad(z, [p for pair in reversed(both) for p in pair], mode=self.padding_mode)

    def forward(self, input: Tensor) -> Tensor:
        # Whitening the weight instead of every patch is the same function with the same gradients, far cheaper. It also
        # leaves the padding where it belongs: zeros put around z − c would be c put around z.
        padding = self.padding if self.padding_mode == "zeros" else 0
        W, b = self._whole()
        return F.conv2d(self.padded(input), W, b, self.stride, padding, self.dilation, self.groups)

    def _whole(self) -> tuple[Tensor, Tensor | None]:
        """W and b in the weight's dtype, and never in autocast's: what it rounds is what a stock layer would have."""
        device, precision = self.weight_dagger.device.type, torch.promote_types(self.weight_dagger.dtype, torch.float32)
        known = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if known else nullcontext():
            W, b = self._ordinary(lambda t: t.to(precision))
            return self._like_weight(W), None if b is None else b.to(self.weight_dagger)

    def extra_repr(self) -> str:
        options = ", ".join(f"{option}={getattr(self, option)!r}" for option in _OPTIONS)
        return f"{options}, bias={self.bias_dagger is not None}, backward={self.R is not None}"


_OPTIONS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
