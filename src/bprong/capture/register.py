"""Layers of other packages that compute what a layer of torch's does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from bprong.capture.weights import LIKE, REGISTERED, Maker, WeightMatrix, named
from bprong.linalg.blocks import Limits


def register(
    kind: type[nn.Module],
    *,
    like: type[nn.Module],
    transposed: bool = False,
    stacked: bool = False,
    weight: str | Sequence[str] = "weight",
    bias: str | Sequence[str] = "bias",
) -> RemovableHandle:
    """Whitens layers of this type as a known layer of torch's, in all optimizers that are built later.

    kind        the type of the layer; subclasses are not included, as for torch's own layers
    like        the layer that it computes the same as: nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d or nn.Embedding
    transposed  its weight is stored as (in, out): y = x W + b
    stacked     its weight is a stack of matrices (number, out, in), each of which is used on its own, as by experts
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
    form = {key: True for key, holds in (("transposed", transposed), ("stacked", stacked)) if holds}
    if form and like is not nn.Linear:
        raise ValueError(f"only the weight of an nn.Linear can be {' and '.join(form)}, not that of a {like.__name__}")
    weights, biases = ((names,) if isinstance(names, str) else tuple(names) for names in (weight, bias))
    make = partial(named, partial(LIKE[like], **form), weights, biases)
    handle = RemovableHandle(REGISTERED)
    REGISTERED[handle.id] = kind, partial(_registered, make)
    return handle


def _registered(make: Maker, module: nn.Module, limits: Limits) -> Iterator[WeightMatrix]:
    """The weights of a registered layer."""
    for weight in make(module, limits):
        yield replace(weight, registered=True)
