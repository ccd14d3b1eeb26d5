"""Layers of other packages that compute what a layer of torch's does.

Some compute the weight that they use from a parameter, such as standardised ones: W = f(w), with the Jacobian
J = ∂W/∂w. What is whitened is W. The parameter makes the step of W as far as f can express it:

    Δw = J⁺ ΔW,   where ΔW is the whitened step for the gradient J⁺ᵀ g_w

It is assumed that a row of W depends on the same row of w, and that J is a multiple of a projection there, as for
weights that are standardised or normalised by rows. One step of conjugate gradients in each row is then exact:

    J⁺ x = Jᵀx ‖Jᵀx‖² / ‖JJᵀx‖²
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bprong.capture.own_pass import recorded_run
from bprong.capture.weights import LIKE, REGISTERED, Maker, WeightMatrix, named
from bprong.linalg.blocks import Limits
from bprong.linalg.moments import add_outer

Product = Callable[[Tensor], Tensor]


def register(
    kind: type[nn.Module],
    *,
    like: type[nn.Module],
    transposed: bool = False,
    stacked: bool = False,
    computed: bool = False,
    weight: str | Sequence[str] = "weight",
    bias: str | Sequence[str] = "bias",
) -> RemovableHandle:
    """Whitens layers of this type as a known layer of torch's, in all optimizers that are built later.

    kind        the type of the layer; subclasses are not included, as for torch's own layers
    like        the layer that it computes the same as: nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d or nn.Embedding
    transposed  its weight is stored as (in, out): y = x W + b
    stacked     its weight is a stack of matrices (number, out, in), each of which is used on its own, as by experts
    computed    the weight that it uses is computed from its parameters, e.g. standardised by rows; that one is whitened
    weight, bias
                the names of its parameters; several weights are given as a tuple, and so are their biases. A missing
                bias is none. Other parameters of the layer follow the fallback rule

    As for torch's hooks, the handle has `remove()` and is a context manager.

    >>> import torch
    >>> from bprong.capture.weights import covered_weights
    >>> class Scores(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = nn.Parameter(torch.randn(4, 3))
    ...     def forward(self, x):
    ...         return x @ self.table
    >>> with register(Scores, like=nn.Linear, transposed=True, weight="table"):
    ...     [(found.name, str(found.inputs), str(found.outputs)) for found in covered_weights(Scores())]
    [('', '4', '3')]
    >>> list(covered_weights(Scores()))
    []
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register takes a type of module, not {kind!r}")
    if like not in LIKE:
        raise ValueError(f"like must be one of {', '.join(k.__name__ for k in LIKE)}, not {like!r}")
    form = {key: True for key, given in (("transposed", transposed), ("stacked", stacked)) if given}
    if form and (like is not nn.Linear or computed):
        what = "a computed weight" if computed else f"that of a {like.__name__}"
        raise ValueError(f"only the weight of an nn.Linear can be {' and '.join(form)}, not {what}")
    weights, biases = ((names,) if isinstance(names, str) else tuple(names) for names in (weight, bias))
    make = partial(named, partial(LIKE[like], **form), weights, biases)
    handle = RemovableHandle(REGISTERED)
    REGISTERED[handle.id] = kind, partial(_registered, make, computed)
    return handle


def _registered(make: Maker, computed: bool, module: nn.Module, limits: Limits) -> Iterator[WeightMatrix]:
    """The weights of a registered layer."""
    for found in make(module, limits):
        own = replace(found, computed=computed, registered=True)
        yield ComputedWeight(**vars(own), computed_by=module) if computed else own


# Weights computed from parameters -------------------------------------------------------------------------------------


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
