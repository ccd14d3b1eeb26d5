"""The layers of the paper's network, which hold U, c, W†, b† and R explicitly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.capture.convolution import geometry_of
from bprong.capture.listener import without_autocast
from bprong.capture.weights import weight_matrices_of
from bprong.errors import LinAlgError, WhiteningError
from bprong.linalg.moments import MAX_DIM, Limits, at_least_float32, float64_copy, to_float64
from bprong.network.coordinates import (
    Change,
    Multiplier,
    check_outputs,
    identity,
    on_inputs,
    on_outputs,
    quotient,
    times_mean,
)
from bprong.whitening.layer import SideName

Stock = nn.Linear | nn.Conv2d


class WhitenedLayer(nn.Module):
    """a = Rᵀ (W† U (z − c) + b†): the parameters are W† (shaped like the stock layer's weight) and b†.

    U, c and R are buffers. If a side is whitened in several blocks (`forward_blocks`, `backward_blocks`), its buffers
    have a leading dimension for them. R is None in a forward-only layer (PRONG).

    z are the rows that the weight multiplies; for a convolution (`geometry`) these are the patches of its padded input.

    It computes the same function as the stock layer that it is made from, with copies of its parameters. For everything
    else the stock layer itself is kept on the `meta` device, without values.
    """

    buffers_are_constant = True  # a forward pass never writes to them

    U: Tensor
    c: Tensor
    R: Tensor | None

    def __init__(self, stock: Stock, backward: bool = True, *, max_dim: int = MAX_DIM) -> None:
        super().__init__()
        self.training = stock.training
        self._stock = (copy.deepcopy(stock).to("meta"),)  # in a tuple, so that torch does not register its parameters
        for constant in stock.__constants__:
            setattr(self, constant, getattr(stock, constant))
        self.geometry = geometry_of(stock) if isinstance(stock, nn.Conv2d) else None
        linear = weight_matrices_of("", stock, Limits(max_dim, padded=False))[0]
        self.forward_blocks = linear.inputs
        self.backward_blocks = linear.outputs
        self.weight_dagger = copy.deepcopy(linear.weight)
        self.bias_dagger = copy.deepcopy(linear.bias)
        U = identity(self.forward_blocks, linear.weight)
        self.register_buffer("U", U)
        self.register_buffer("c", torch.zeros_like(U[..., 0]))
        self.register_buffer("R", identity(self.backward_blocks, linear.weight) if backward else None)

    @torch.no_grad()
    def to_stock(self) -> nn.Module:
        """Return the stock layer that computes the same function."""
        W, b = self._ordinary(to_float64)
        stock = copy.deepcopy(self._stock[0])
        stock.weight = nn.Parameter(W, self.weight_dagger.requires_grad)
        if b is not None and self.bias_dagger is not None:
            stock.bias = nn.Parameter(b, self.bias_dagger.requires_grad)
        return stock.train(self.training)

    def extra_repr(self) -> str:
        return f"{self._stock[0].extra_repr()}, backward={self.R is not None}"

    def padded(self, z: Tensor) -> Tensor:
        """Return the layer's input after any padding other than the zeros described by `geometry`."""
        stock = self._stock[0]
        if isinstance(stock, nn.Linear) or stock.padding_mode == "zeros":
            return z
        return F.pad(z, stock._reversed_padding_repeated_twice, mode=stock.padding_mode)

    @property
    def weight(self) -> Tensor:
        """W = Rᵀ W† U, computed from the parameters and differentiable by them. It cannot be assigned."""
        return self._ordinary(to_float64)[0]

    @property
    def bias(self) -> Tensor | None:
        """b = Rᵀ b† − W c, computed like `weight`; None if the layer has no bias."""
        return self._ordinary(to_float64)[1]

    @property
    def centred(self) -> bool:
        """Whether c may differ from 0: only if there is a bias and it is trained."""
        return self.bias_dagger is not None and self.bias_dagger.requires_grad

    @property
    def _bias_or_zero(self) -> Tensor:
        """b†, or zeros if the layer has no bias."""
        return self.weight_dagger.new_zeros(len(self.weight_dagger)) if self.bias_dagger is None else self.bias_dagger

    def _ordinary(self, cast_to: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return W and b, stored like the parameters and computed in the precision that `cast_to` converts these to."""
        W = on_inputs(cast_to(self.U).mT.matmul, cast_to(self.weight_dagger), self.forward_blocks)
        b = cast_to(self._bias_or_zero)
        if self.R is not None:
            product = cast_to(self.R).mT.matmul
            W = on_outputs(product, W, self.backward_blocks)
            b = on_outputs(product, b, self.backward_blocks)
        stored_W = torch.empty_like(self.weight_dagger).copy_(W)
        if self.bias_dagger is None:
            return stored_W, None
        return stored_W, (b - times_mean(W, cast_to(self.c), self.forward_blocks)).to(self.bias_dagger)

    @torch.no_grad()
    def rewhiten_(
        self,
        side: SideName,
        matrix: Tensor,
        mean: Tensor | None = None,
        probe: Tensor | None = None,
        T: Multiplier | None = None,
    ) -> Change:
        """Take a new U and c, or a new R, and move W†, b† so that the function stays the same; return the change.

        Raises WhiteningError, with nothing changed, if the matrix is singular, or if the outputs on `probe` would
        change. The mean None stands for 0. T: the change's multiplier; None: compute it, by solves of size d.
        """
        new = {"R": matrix}
        if side == "forward":
            new = {"U": matrix, "c": torch.zeros_like(self.c) if mean is None else mean}
        for name, value in new.items():
            stored = getattr(self, name)
            if stored is None:
                raise ValueError("this layer is forward-only: it was made with backward=False and has no R")
            if value.shape != stored.shape:  # a missing leading dimension would broadcast
                raise ValueError(
                    f"{name} of this layer must have shape {tuple(stored.shape)}, not {tuple(value.shape)}"
                )
            new[name] = value.to(stored)
        try:
            change = self._change_to(new, T)
            W, b = change.velocity(float64_copy(self.weight_dagger), float64_copy(self._bias_or_zero))
        except LinAlgError as reason:  # U' or R' is singular once it is rounded to the layer's dtype
            raise WhiteningError(f"its new coordinates cannot be inverted: {reason}") from reason
        new["weight_dagger"] = W.to(self.weight_dagger)
        if self.bias_dagger is not None:
            new["bias_dagger"] = b.to(self.bias_dagger)
        if probe is not None:
            check_outputs(self, new, probe)
        for name, value in new.items():
            getattr(self, name).copy_(value)
        torch.clear_autocast_cache()  # autocast may hold a low-precision copy of the old weight
        return change

    def _change_to(self, new: Mapping[str, Tensor], T: Multiplier | None) -> Change:
        """Return the change from the present U and c, or R, to new ones, which have this layer's dtype."""
        if self.R is not None and "R" in new:
            return Change(T or quotient(self.R, new["R"]), self.backward_blocks)
        if not self.centred and bool(new["c"].any()):
            raise ValueError("this layer has no trainable bias, so c must stay 0; otherwise training would grow a bias")
        shift = float64_copy(new["c"]) - float64_copy(self.c)
        s = (float64_copy(self.U) @ shift.unsqueeze(-1)).squeeze(-1)
        return Change(T or quotient(self.U, new["U"]), self.forward_blocks, s)


class WhitenedLinear(WhitenedLayer):
    """a = Rᵀ (W† U (z − c) + b†), the layer of a bidirectionally whitened network (Fujimoto & Ohira, section 3.2).

    Parameters `weight_dagger` (out, in) and `bias_dagger` (out,); buffers `U` (in, in), `c` (in,) and `R` (out, out),
    which is None in a forward-only layer (PRONG). As in Algorithm 2, it starts with U = R = I and c = 0. `weight` and
    `bias` can be read in ordinary coordinates.

    A side of more than `max_dim` features is whitened in n blocks of d features: U (n, d, d), c (n, d), R (n, d, d).

    Without a trainable bias nothing is centred: c stays 0, since otherwise training W† would grow a bias.

    >>> layer = WhitenedLinear(nn.Linear(3, 2))
    >>> z = torch.randn(5, 3)
    >>> torch.allclose(layer(z), layer.to_stock()(z), atol=1e-6)
    True
    """

    def forward(self, input: Tensor) -> Tensor:  # the name in nn.Linear, which some callers pass as a keyword
        features = self.c.numel()
        if input.shape[-1:] != (features,):
            raise ValueError(
                f"a WhitenedLinear of {features} inputs was given a tensor of shape {tuple(input.shape)}; its last "
                f"dimension must be {features}"
            )
        z_dagger = _times_rows(self.U, input - self.c.flatten())
        a_dagger = F.linear(z_dagger, self.weight_dagger, self.bias_dagger)
        return a_dagger if self.R is None else _times_rows(self.R.mT, a_dagger)


def _times_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return the product of a matrix, block-diagonal if it has a leading dimension, and every row of (…, d)."""
    if matrix.ndim == 2:
        return F.linear(rows, matrix)
    split = rows.reshape(*rows.shape[:-1], *matrix.shape[:-1])
    return torch.einsum("...ni,nji->...nj", split, matrix).flatten(-2)


class WhitenedConv2d(WhitenedLayer):
    """a = Rᵀ (W† U (z − c) + b†) at every output position: a convolution in whitened coordinates.

    z is the patch of the padded input under the kernel, with d = channels of a group · positions of the kernel
    features. Parameters `weight_dagger`, shaped like the stock weight, and `bias_dagger`; buffers `U` (G, d, d), `c`
    (G, d) and `R` (G, out/G, out/G) for G groups, without the leading dimension if there is one group. Everything else
    is as in `WhitenedLinear`.

    >>> layer = WhitenedConv2d(nn.Conv2d(4, 6, 3, padding=1, groups=2))
    >>> layer.U.shape, layer.R.shape
    (torch.Size([2, 18, 18]), torch.Size([2, 3, 3]))
    """

    def forward(self, input: Tensor) -> Tensor:
        # Whitening the weight instead of every patch is the same function with the same gradients, and far cheaper. It
        # also pads correctly: zeros put around z − c would be c put around z. Without autocast the weight is the one
        # that a stock layer would have, and the convolution then rounds it likewise.
        precision = at_least_float32(self.weight_dagger.dtype)
        with without_autocast(input.device.type):
            W, b = self._ordinary(lambda tensor: tensor.to(precision))
        return cast(Tensor, cast(nn.Conv2d, self._stock[0])._conv_forward(input, W, b))
