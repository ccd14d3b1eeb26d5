"""The tensors that a loss is computed from: where they are found, and where they are in the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bprong.likelihood.loss import LossCall
from bprong.parallel.slices import is_sliced

Key = str | int | Callable[[Any], Any]

TO_THE_LOSS = 200  # operations, at most, between an output and its loss


@dataclass
class Head:
    """Finds the tensors that the loss is computed from.

    key:        names them in what the model returns: a key or attribute, an index, or a function of it; None: the
                logits or the first tensor or, if a loss inside of the model does not depend on that, its input
    functions:  the names of torch's functions that may be this loss
    inside:     whether they are the input of a loss inside of the model; None: not known yet

    >>> Head().find({"logits": torch.zeros(2, 3), "features": torch.zeros(2, 8)})[0].shape
    torch.Size([2, 3])
    """

    key: Key | None = None
    functions: frozenset[str] = frozenset()
    inside: bool | None = None

    def __post_init__(self) -> None:
        if not (self.key is None or isinstance(self.key, (str, int)) or callable(self.key)):
            raise TypeError(f"output must be a key, an index or a function of what the model returns, not {self.key!r}")

    def find(self, returned: Any, losses: Sequence[LossCall] = ()) -> list[Tensor]:
        """Tensors that differ in their first dimension only.

        losses: the calls of loss functions inside of the model
        """
        inside = [] if self.key is not None else self.inputs(losses)
        if inside and self.inside is None and torch.is_grad_enabled():
            node = getattr(_chosen(returned, None), "grad_fn", None)
            self.inside = node is None or not nodes_behind(inside[0].input, lambda one: one is node, TO_THE_LOSS)
        if inside and self.inside is not False:
            return [call.input for call in inside]
        output = _chosen(returned, self.key)
        parts = list(output) if isinstance(output, (tuple, list)) and self.key is not None else [output]
        for part in parts:
            if not isinstance(part, Tensor) or part.ndim == 0:
                what = "a number" if isinstance(part, Tensor) else f"a {type(part).__name__}"
                raise TypeError(
                    f"the loss must be computed from a tensor that the model returns, not {what}. {_advice(returned)}"
                )
        return parts

    def inputs(self, losses: Sequence[LossCall]) -> list[LossCall]:
        """The calls that may be those of the loss: with the largest input, and inputs of the same shape."""
        calls = []
        for call in losses:
            is_computed = call.input.requires_grad or not torch.is_grad_enabled()
            if call.function in self.functions and call.input.ndim > 0 and is_computed:
                calls.append(call)
        largest = max(calls, key=lambda call: call.input.numel(), default=None)
        return [call for call in calls if largest is not None and call.input.shape[1:] == largest.input.shape[1:]]


def _chosen(returned: Any, key: Key | None) -> Any:
    match returned:
        case object(logits=found) | {"logits": found} | [found, *_] if key is None:
            return found
        case _ if key is None:
            return returned
    try:
        if callable(key):
            return key(returned)
        by_name = isinstance(key, str) and not isinstance(returned, Mapping)
        return getattr(returned, str(key)) if by_name else returned[key]
    except (LookupError, AttributeError, TypeError) as reason:
        raise TypeError(f"the model returns nothing under options['output'] = {key!r}. {_advice(returned)}") from reason


def _advice(returned: Any) -> str:
    names = sorted(map(str, returned)) if isinstance(returned, Mapping) else []
    has = f"The model returns {', '.join(names)}. " if names else ""
    return f"{has}Name it with options={{'output': …}}: a key, an index, or a function of what the model returns"


@dataclass(frozen=True)
class Output:
    """The tensors that a loss is computed from.

    parts:      copies of them; they differ in their first dimension only, and the targets of all of them are drawn
    edges:      where they are in the autograd graph; empty: in none. Later operations may change them in place
    class_dim:  see `laid_out`
    """

    parts: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    class_dim: int | None = None

    @classmethod
    def of(cls, parts: Sequence[Tensor], class_dim: int | None = None) -> Output:
        edges = tuple(get_gradient_edge(part) for part in parts if part.requires_grad)
        return cls(tuple(as_plain(part.detach().clone()) for part in parts), edges, class_dim)

    @cached_property
    def values(self) -> Tensor:
        """All of them, laid out, in at least float32."""
        values = laid_out(self.parts, self.class_dim)
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def gradients(self, root: Tensor, wanted: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
        """Propagates a gradient at the values back; None: it does not reach there. The graph remains usable."""
        split = (root,) if len(self.parts) == 1 else torch.split(root, [len(part) for part in self.parts])
        dim = -1 if self.class_dim is None else self.class_dim
        roots = [
            own.reshape(part.movedim(dim, -1).shape).movedim(-1, dim).to(part.dtype)
            for own, part in zip(split, self.parts, strict=True)
        ]
        return torch.autograd.grad(self.edges, wanted, roots, retain_graph=True, allow_unused=True)


def laid_out(parts: Sequence[Tensor], class_dim: int | None) -> Tensor:
    """Outputs as one, with classes in this dimension as (B, positions, classes); None: as they are."""
    output = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return output if class_dim is None else output.movedim(class_dim, -1).flatten(1, -2)


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor without what a user's subclass adds to its operations; nested and sharded tensors unchanged."""
    if type(tensor) is Tensor or tensor.is_nested or is_sliced(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def nodes_behind(value: Tensor, wanted: Callable[[Any], bool], farthest: int) -> list[Any]:
    """Return the wanted operations that a value was computed by; the search ends after `farthest` operations."""
    nodes: list[Any] = [] if value.grad_fn is None else [value.grad_fn]  # torch's stubs lack some of their attributes
    matches = []
    for node in nodes:  # which grows meanwhile
        if wanted(node):
            matches.append(node)
        elif len(nodes) < farthest:
            nodes += [before for before, _ in node.next_functions if before is not None and before not in nodes]
    return matches
