"""Weights that a layer computes from a parameter, such as standardised ones: W = f(w), with the Jacobian J = ∂W/∂w.

What is whitened is W. The parameter makes the step of W as far as f can express it:

    Δw = J⁺ ΔW,   where ΔW is the whitened step for the gradient J⁺ᵀ g_w

It is assumed that a row of W depends on the same row of w, and that J is a multiple of a projection there, as for
weights that are standardised or normalised by rows. One step of conjugate gradients in each row is then exact:

    J⁺ x = Jᵀx ‖Jᵀx‖² / ‖JJᵀx‖²
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bprong.capture.own_pass import recorded_run
from bprong.capture.weights import WeightMatrix
from bprong.linalg.moments import add_outer

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ComputedWeight(WeightMatrix):
    """A weight that a layer computes from the parameter `weight`; computed_by: the layer, which takes one tensor."""

    computed_by: nn.Module = field(default_factory=nn.Module)

    def gradient(self, values: Tensor, g_b: Tensor | None, c: Tensor | None) -> Tensor:
        """G with G − g_b cᵀ = J⁺ᵀ (g_w − Jᵀ g_b cᵀ): what f cannot express is left out after centring."""
        zero = self.matrix(torch.zeros_like(values))
        outer = zero if g_b is None or c is None else add_outer(zero, g_b.to(zero), c.to(zero), 1)
        with self._jacobian() as (J, J_T):
            rest = values - J_T(super().shaped(outer))
            return self.matrix(_least_squares(J_T, J, rest)) + outer

    def shaped(self, matrix: Tensor) -> Tensor:
        with self._jacobian() as (J, J_T):
            return _least_squares(J, J_T, super().shaped(matrix).to(self.weight.dtype))

    def times(self, values: Tensor, z: Tensor) -> Tensor:
        with self._jacobian() as (J, _):
            return super().times(J(values.to(self.weight.dtype)).to(z.dtype), z)

    @contextmanager
    def _jacobian(self) -> Iterator[tuple[Product, Product]]:
        """v ↦ J v and u ↦ Jᵀu at the present parameter; the layer is run on zeros under a single kernel."""
        w = self.weight
        sizes = zip(w.shape[2:], getattr(self.computed_by, "dilation", ()), strict=False)
        channels = self.inputs.groups * self.inputs.features // w[0, 0].numel()
        x = w.new_zeros(1, channels, *((k - 1) * dilation + 1 for k, dilation in sizes))
        with recorded_run(self.computed_by, [self], x, seed=0, errors=True) as (_, calls):
            W = cast(Tensor, calls[0].computed)
            u = torch.zeros_like(w, requires_grad=True)
            (pulled,) = torch.autograd.grad(W, w, u, create_graph=True)
            yield partial(_product, pulled, u), partial(_product, W, w)


def _product(output: Tensor, input: Tensor, v: Tensor) -> Tensor:
    return torch.autograd.grad(output, input, v, retain_graph=True)[0].detach()


def _least_squares(A: Product, A_T: Product, x: Tensor) -> Tensor:
    """A⁺ x in each row, for A that is a multiple of a projection there.

    >>> _least_squares(lambda v: v * torch.tensor([2.0, 0.0]), lambda v: v * torch.tensor([2.0, 0.0]), torch.ones(1, 2))
    tensor([[0.5000, 0.0000]])
    """
    d = A_T(x)
    squares = [values.flatten(1).square().sum(dim=1) for values in (d, A(d))]
    return d * (squares[0] / squares[1]).nan_to_num(0, 0, 0).view(-1, *(1 for _ in d.shape[1:]))
