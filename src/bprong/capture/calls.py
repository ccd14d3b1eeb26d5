"""Every use of a weight in a forward pass, recorded with its input z and its output a.

Uses are recorded in torch's own functions (`F.linear`, `F.conv2d`, …), because hooks on modules would miss attention,
which calls its projections as functions. While `recorded_calls` is active, these functions are replaced by stand-ins
that look at the weight they are given. The fused functions of recurrent cells do not show their pre-activations, so
cells are computed from their two products instead. The whitened layers of the paper's network compute with several
matrices and are recorded by hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.capture.convolution import Geometry, patch_rows
from bprong.capture.weights import WeightMatrix
from bprong.linalg.moments import Moments, block_rows, count_moments, error_moments, input_moments

CHUNK = 2**22  # numbers converted to float64 at once: 32 MB


@dataclass(frozen=True, eq=False)
class Call:
    """One use of a weight in a forward pass.

    z, a:      its input, a copy, and its output, in the autograd graph
    columns:   the columns of `a` that belong to the weight, where several weights are packed into one; None: all
    geometry:  of a convolution
    ignored:   (rows,) mask of rows that do not count: the padding of an embedding
    """

    weight: WeightMatrix
    z: Tensor
    a: Tensor
    columns: slice | None = None
    geometry: Geometry | None = None
    ignored: Tensor | None = None

    def errors(self, delta: Tensor) -> Tensor:
        """δ, shaped like the output, as rows (rows, groups, out)."""
        if self.geometry is not None:
            delta = delta.movedim(-1 - len(self.geometry.kernel), -1)
        rows = delta[..., self.columns or slice(None)].reshape(
            -1, self.weight.outputs.groups, self.weight.outputs.features
        )
        return rows if self.ignored is None else rows.masked_fill(self.ignored.view(-1, 1, 1), 0)

    def error_moments(self, delta: Tensor, targets: int) -> Moments:
        """D of one call."""
        blocks = self.weight.outputs
        rows = self.errors(delta)
        chunks = torch.split(rows, max(1, CHUNK // rows[0].numel()))
        found = (error_moments(block_rows(chunk, blocks), targets, blocks.lead) for chunk in chunks)
        return reduce(Moments.overlay, found)

    def inputs(self) -> Iterator[tuple[slice, Tensor]]:
        """z as rows (rows, groups, in), or as indices (rows,), in chunks that fit into memory: (which rows, chunk)."""
        if self.geometry is not None:
            chunks: Iterable[Tensor] = patch_rows(self.z, self.geometry, CHUNK)
        else:
            rows = self.z.flatten() if self.weight.one_hot else self.z.reshape(-1, 1, self.weight.inputs.features)
            chunks = torch.split(rows, max(1, CHUNK // rows[0].numel()))
        start = 0
        for chunk in chunks:
            yield slice(start, start + len(chunk)), chunk
            start += len(chunk)

    def counted_inputs(self, counted: Tensor | None = None) -> Iterator[Tensor]:
        """The rows of z that count, in chunks; counted: (rows,) mask, None: all but the ignored ones."""
        if self.ignored is not None:
            counted = ~self.ignored if counted is None else counted & ~self.ignored
        return filter(len, (chunk if counted is None else chunk[counted[rows]] for rows, chunk in self.inputs()))

    def input_moments(self, centre: bool, counted: Tensor | None = None) -> Moments | None:
        """c and Ž of the rows that count; None if no row does."""
        blocks = self.weight.inputs
        found = (
            count_moments(rows, blocks.count)
            if self.weight.one_hot
            else input_moments(block_rows(rows, blocks), centre, blocks.lead)
            for rows in self.counted_inputs(counted)
        )
        return reduce(merge_moments, found, None)


def merge_moments(
    a: Moments | None, b: Moments | None, merge: Callable[[Moments, Moments], Moments] = Moments.merge
) -> Moments | None:
    """Two moments together, of different rows or (merge=Moments.overlay) of the same targets; None: no rows."""
    return (a or b) if a is None or b is None else merge(a, b)


class Calls(list[Call]):
    """The recorded calls of some weights, in the order of the forward pass.

    weights:  the weights to record, by the id of their parameter
    empty:    the names of weights that were called without any row, e.g. experts that were given no example
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, list[WeightMatrix]] = {}
        self.empty: set[str] = set()

    def found_in(self, tensor: Any, one_hot: bool) -> list[tuple[WeightMatrix, int]]:
        """The weights to record among the rows of a tensor, and the row of their parameter that the tensor begins with.

        The tensor is a parameter or, where several weights are packed into one, some rows of it.
        """
        parameter: Any = tensor if id(tensor) in self.weights else getattr(tensor, "_base", None)
        if id(parameter) not in self.weights or tensor.stride() != parameter.stride():
            return []
        first = (tensor.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
        rows = range(first, first + len(tensor))
        return [
            (w, first)
            for w in self.weights[id(parameter)]
            if w.one_hot is one_hot
            and (tensor is parameter or (w.rows and w.rows.start in rows and w.rows.stop - 1 in rows))
        ]

    def add(self, weight: WeightMatrix, z: Tensor, a: Tensor, **details: Any) -> None:
        """Record a call. Later operations may work in place, so z is copied; the caller must pass on a copy of `a`."""
        if torch._C._functorch.is_batchedtensor(z):
            raise RuntimeError(f"layer {weight.name!r} is called under vmap, where its rows cannot be seen")
        if z.numel() == 0:
            self.empty.add(weight.name)
        else:
            self.append(Call(weight, z.detach().clone(), a, **details))


# Contexts may end in another order than they began in, so torch's functions are replaced once, when the first context
# begins, until the last one ends; the stand-ins serve all contexts that are active.
_ACTIVE: list[Calls] = []
_REPLACED = ExitStack()
_LOCK = threading.RLock()

# In eval mode without gradients attention is one fused function, which shows none of its projections.
SEPARATE_ATTENTION = (torch.backends.mha, "get_fastpath_enabled", lambda: False)


@contextmanager
def recorded_calls(weights: Iterable[WeightMatrix]) -> Iterator[Calls]:
    """Record every use of some weights while the context is active.

    >>> from bprong.capture.weights import weight_matrices_of
    >>> layer = torch.nn.Linear(3, 2)
    >>> with recorded_calls(weight_matrices_of("layer", layer)) as calls:
    ...     _ = layer(torch.ones(5, 3))
    >>> [(call.weight.name, call.z.shape, call.a.shape) for call in calls]
    [('layer', torch.Size([5, 3]), torch.Size([5, 2]))]
    """
    calls = Calls()
    with ExitStack() as stack:
        for weight in weights:
            if weight.module is None:
                calls.weights.setdefault(id(weight.weight), []).append(weight)
            else:
                hook = partial(_record_module, calls, weight)
                stack.callback(weight.module.register_forward_hook(hook, with_kwargs=True).remove)
        if calls.weights:
            stack.callback(_stop, calls)
            _start(calls)
        yield calls


def _start(calls: Calls) -> None:
    with _LOCK:
        _ACTIVE.append(calls)
        if len(_ACTIVE) == 1:
            for place, name, stand_in in _stand_ins():
                replace_attribute(_REPLACED, place, name, stand_in)


def _stop(calls: Calls) -> None:
    with _LOCK:
        _ACTIVE[:] = [other for other in _ACTIVE if other is not calls]
        if not _ACTIVE:
            _REPLACED.close()


def replace_attribute(stack: ExitStack, place: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or class until the stack is closed."""
    is_own = name in vars(place)  # if not, it is looked up by __getattr__ and must not be set afterwards
    stack.callback(*((setattr, place, name, vars(place)[name]) if is_own else (delattr, place, name)))
    setattr(place, name, value)


def _stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to replace: the place, the name and the stand-in of each of torch's functions that use a weight."""
    yield SEPARATE_ATTENTION
    for name, describe in DESCRIPTIONS.items():
        yield F, name, partial(_recorded, getattr(F, name), describe)
    for name, formula in CELLS.items():
        yield torch._VF, name, partial(_cell, getattr(torch._VF, name), formula)


def _recorded(function: Any, describe: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call one of torch's functions and record its use of a weight; `describe` returns the details of the `Call`."""
    used = [
        (calls, own, describe(own, first, input, weight, *args, **kwargs))
        for calls in _ACTIVE
        for own, first in calls.found_in(weight, one_hot=describe is _embedding)
    ]
    a: Tensor = function(input, weight, *args, **kwargs)
    for calls, own, details in used:
        calls.add(own, input, a, **details)
    return a.clone() if used else a


def _linear(own: WeightMatrix, first: int, input: Any, weight: Tensor, bias: Any = None) -> dict[str, Any]:
    features = own.inputs.features
    if not isinstance(input, Tensor) or input.shape[-1:] != (features,):
        given = f"shape {tuple(input.shape)}" if isinstance(input, Tensor) else f"a {type(input).__name__}"
        raise ValueError(f"layer {own.name!r} takes rows of {features} features, not {given}")
    rows = own.rows or slice(0, len(own.weight))
    return {"columns": slice(rows.start - first, rows.stop - first)}


def _convolution(
    own: WeightMatrix, first: int, input: Any, weight: Tensor, bias: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> dict[str, Any]:  # fmt: skip
    return {"geometry": Geometry.of(weight.shape[2:], stride, padding, dilation, groups)}


def _embedding(
    own: WeightMatrix, first: int, input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> dict[str, Any]:
    return {"ignored": None if padding_idx is None else (input == padding_idx % len(weight)).flatten()}


def _cell(fused: Any, formula: Any, input: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, *biases: Any) -> Any:
    """A recurrent cell; if one of its weights is recorded, by its formula, so that both products can be seen."""
    if not any(id(weight) in calls.weights for calls in _ACTIVE for weight in (w_ih, w_hh)):
        return fused(input, state, w_ih, w_hh, *biases)
    b_ih, b_hh = biases or (None, None)
    h = state[0] if isinstance(state, (tuple, list)) else state
    return formula(F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh), state)


def _record_module(calls: Calls, weight: WeightMatrix, module: Any, args: Any, kwargs: Any, a: Tensor) -> Tensor:
    """A forward hook that records the calls of a whitened layer."""
    calls.add(weight, module.padded(*args, *kwargs.values()), a, geometry=module.geometry)
    return a.clone()


# The formulas of torch's recurrent cells: a and r are the products of the two weights with input and state -----------


def _lstm(a: Tensor, r: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (a + r).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(a: Tensor, r: Tensor, h: Tensor) -> Tensor:
    (a_r, r_r), (a_z, r_z), (a_n, r_n) = zip(a.chunk(3, dim=-1), r.chunk(3, dim=-1), strict=True)
    n = (a_n + (a_r + r_r).sigmoid() * r_n).tanh()
    return n + (a_z + r_z).sigmoid() * (h - n)


DESCRIPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "linear": _linear,
    "embedding": _embedding,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
}
CELLS: dict[str, Callable[..., Any]] = {
    "lstm_cell": _lstm,
    "gru_cell": _gru,
    "rnn_tanh_cell": lambda a, r, h: (a + r).tanh(),
    "rnn_relu_cell": lambda a, r, h: (a + r).relu(),
}
