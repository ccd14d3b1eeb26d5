"""Every use of a weight in a forward pass, recorded with its input z and its output a.

Uses are recorded in torch's own functions (`F.linear`, `F.conv2d`, …) and, of registered layers, in x @ W, because
hooks on modules would miss attention, which calls its projections as functions. While `recorded_calls` is active, these
functions are replaced by stand-ins that look at the weight they are given. The fused functions of recurrent cells do
not show their pre-activations, so cells are computed from their two products instead. The whitened layers of the
paper's network compute with several matrices and are recorded by hooks.

Other stand-ins note masks of positions, and keep the user's backward hooks from being called when errors of ours are
sent back through the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map

from bprong.capture.cells import CELLS
from bprong.capture.convolution import Geometry, patch_rows
from bprong.capture.listener import Replacements
from bprong.capture.tape import as_plain
from bprong.capture.weights import FUNCTIONS, WeightMatrix
from bprong.linalg.moments import Sums, block_rows

CHUNK = 2**16  # numbers of the inputs that are copied at once: 256 kB in float32
FEWEST_ROWS = 128  # that are copied at once nevertheless


@dataclass(frozen=True, eq=False)
class Call:
    """One use of a weight in a forward pass.

    z:         its input
    shape:     of its output a
    edge:      where a is in the autograd graph; None: in none. Later operations may change a in place, but not its edge
    first:     the column of a that belongs to the first row of the weight, where several are packed into one
    geometry:  of a convolution
    ignored:   mask of rows that do not count: the padding of an embedding
    of_data:   whether z was not computed from anything that is trained
    """

    weight: WeightMatrix
    z: Tensor
    shape: torch.Size
    edge: GradientEdge | None = None
    first: int = 0
    geometry: Geometry | None = None
    ignored: Tensor | None = None
    of_data: bool = False

    @property
    def positions(self) -> torch.Size | None:
        """The shape (B, T) of its rows, if these are positions of sequences."""
        return self.shape[:-1] if self.geometry is None and len(self.shape) > 2 else None

    @property
    def feature_dim(self) -> int:
        """The dimension of a that its features are in; the others are rows."""
        return -1 if self.geometry is None else -1 - len(self.geometry.kernel)

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return self.shape.numel() // self.shape[self.feature_dim]

    def errors(self, delta: Tensor) -> Tensor:
        """Return δ, with the entries of the output, as rows (rows, groups · out)."""
        size = self.weight.outputs.groups * self.weight.outputs.features
        delta = (delta.values() if delta.is_nested else delta).reshape(self.shape).movedim(self.feature_dim, -1)
        rows = delta.narrow(-1, self.first, size).reshape(-1, size)
        return rows if self.ignored is None else rows.masked_fill(self.ignored.view(-1, 1), 0)

    def add_errors(self, delta: Tensor, sums: Sums) -> None:
        """Add the rows of δ to the sums behind D."""
        for chunk in _in_chunks(self.errors(delta)):
            sums.add(block_rows(chunk, self.weight.outputs), self.rows)

    def inputs(self) -> Iterable[Tensor]:
        """Return z in chunks that fit into memory: (rows, groups, in) or (rows, in), or indices (rows,)."""
        blocks = self.weight.inputs
        if self.geometry is not None:
            return patch_rows(self.z, self.geometry, _rows_at_once(blocks.groups * blocks.features))
        return _in_chunks(self.z.flatten() if self.weight.one_hot else self.z.reshape(-1, blocks.features))

    def add_inputs(self, sums: Sums, counted: Tensor | None = None) -> None:
        """Add the rows of z that count to the sums behind c and Ž; counted: (rows,) mask, None: all but ignored."""
        if self.ignored is not None:
            real = ~self.ignored.flatten()
            counted = real if counted is None else counted & real
        expected = self.rows if counted is None else int(counted.sum())
        start = 0
        for z in self.inputs():
            stop = start + len(z)
            chunk = z if counted is None else z[counted[start:stop]]
            start = stop
            if self.weight.one_hot:
                sums.count(chunk, self.weight.inputs.count)
            elif len(chunk):
                sums.add(block_rows(chunk, self.weight.inputs), expected)


def _in_chunks(rows: Tensor) -> Sequence[Tensor]:
    return torch.split(rows, _rows_at_once(rows[0].numel()))


def _rows_at_once(features: int) -> int:
    """Return how many rows to sum at once: enough for products to be efficient, few enough to take little memory."""
    return max(FEWEST_ROWS, CHUNK // features)


class Calls(list[Call]):
    """The recorded calls of some weights, in the order of the forward pass.

    recorded: the weights that are recorded; `weights` has those that torch's functions take by the id of their
              parameter, each with the view of it that they take
    behind:   the operation that computed the input of each call, by the operation that computed its output
    called:   the names of weights that were called, if only without any row, as experts that were given no example
    masks:    tensors that may be masks of positions: what the model and its attention are given
    retained: the tensors whose gradients the user may have asked to be retained
    formulas: whether cells are computed by their formulas, so that they are recorded
    opaque:   whether some of the calls are in a reentrant checkpoint, whose graph cannot be used
    """

    def __init__(self, weights: Iterable[WeightMatrix], formulas: bool) -> None:
        super().__init__()
        self.formulas = formulas
        self.recorded = set(weights)
        self.weights: dict[int, list[tuple[WeightMatrix, Tensor]]] = {}
        self.called: set[str] = set()
        self.behind: dict[Node, Node | None] = {}
        self.masks: list[Tensor] = []
        self.retained: list[weakref.ref[Tensor]] = []
        self.opaque = False
        self._measuring = threading.Event()  # which hooks may hold on to, as they may not to these calls

    def note_masks(self, arguments: Any) -> None:
        """Note which of the model's arguments may be masks of positions (B, T), or lengths of sequences (B,)."""
        for leaf in tree_leaves(arguments):
            if not isinstance(leaf, Tensor) or leaf.is_nested or leaf.is_complex():
                continue
            if leaf.ndim == 2 or (leaf.ndim == 1 and not leaf.is_floating_point()):
                self.masks.append(leaf.detach())

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Send errors back through the graph of these calls: no hook of the user's is called, no gradient retained."""
        tensors = [tensor for tensor in (reference() for reference in self.retained) if tensor is not None]
        retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
        self._measuring.set()
        try:
            yield
        finally:
            self._measuring.clear()
            for tensor, gradient in retained:
                tensor.grad = gradient

    def quieted(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward hook that does nothing while errors of ours are sent back."""
        measuring = self._measuring
        return lambda *args: None if measuring.is_set() else hook(*args)

    def found_in(self, tensor: Any, one_hot: bool) -> list[tuple[WeightMatrix, int]]:
        """Return the weights to record among the rows of a tensor, and the row that each of them begins with.

        The tensor is a parameter or, where several weights are packed into one, a part of it.
        """
        parameter = tensor if id(tensor) in self.weights else getattr(tensor, "_base", None)
        weights = []
        for weight, view in self.weights.get(id(parameter), ()):
            if weight.one_hot is one_hot and view.stride() == tensor.stride() and view.shape[1:] == tensor.shape[1:]:
                first = (view.storage_offset() - tensor.storage_offset()) // tensor.stride(0)
                if 0 <= first <= len(tensor) - len(view):
                    weights.append((weight, first))
        return weights

    def add(self, weight: WeightMatrix, z: Tensor, a: Tensor, **details: Any) -> None:
        """Record a call; not under vmap, where its rows cannot be seen. For the details see `Call`.

        Later operations may change z in place, unless autograd keeps it for the weight's gradient.
        """
        if torch._C._functorch.is_batchedtensor(z):
            return
        # If a view is changed in place, its history is that of its base from then on.
        base = a if a._base is None or a._base.numel() != a.numel() else a._base
        edge = get_gradient_edge(base) if a.requires_grad else None
        if edge is not None:
            self.behind[edge.node] = get_gradient_edge(z).node if z.requires_grad else None
        self.called.add(weight.name)
        if z.numel() == 0:
            return
        of_data = torch.is_grad_enabled() and not (z.requires_grad or weight.one_hot)
        z = as_plain(z.detach())
        if z.is_nested:
            z = z.values()
        elif z.layout is not torch.strided:
            z = z.to_dense()
        is_kept = (
            weight.weight.requires_grad
            and a.requires_grad
            and (a.dtype is z.dtype or weight.one_hot)
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # they may keep a copy
        )
        shape = (a.values() if a.is_nested else a).shape
        self.append(Call(weight, z if is_kept else z.clone(), shape, edge, of_data=of_data, **details))
        self.note_masks(details.get("ignored"))


class _Active(threading.local):
    """The contexts of a thread that the stand-ins serve, by their ids."""

    def __init__(self) -> None:
        self.contexts: dict[int, Calls] = {}


_ACTIVE = _Active()


@contextmanager
def recorded_calls(weights: Iterable[WeightMatrix], formulas: bool = True) -> Iterator[Calls]:
    """Record every use of some weights while the context is active.

    formulas: compute recurrent cells by their formulas; the result may differ by rounding

    >>> from bprong.capture.weights import weight_matrices_of
    >>> layer = torch.nn.Linear(3, 2)
    >>> with recorded_calls(weight_matrices_of("layer", layer)) as calls:
    ...     _ = layer(torch.ones(5, 3))
    >>> [(call.weight.name, call.z.shape, call.shape) for call in calls]
    [('layer', torch.Size([5, 3]), torch.Size([5, 2]))]
    """
    calls = Calls(weights, formulas)
    with ExitStack() as stack:
        for weight in calls.recorded:
            if weight.module is None:
                calls.weights.setdefault(id(weight.weight), []).append((weight, _argument(weight)))
            else:
                hook = partial(_record_module, calls, weight)
                stack.callback(weight.module.register_forward_hook(hook, with_kwargs=True).remove)
        _ACTIVE.contexts[id(calls)] = calls
        stack.callback(_ACTIVE.contexts.pop, id(calls))
        stack.enter_context(_ACTIVE_STAND_INS.active())
        yield calls


def _bound(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Return the function with its first arguments bound, in a form that torch.compile can trace."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*first, *args, **kwargs)

    return bound


def _active() -> list[Calls]:
    """Return the contexts of this thread; none while torch.compile traces."""
    return [] if torch.compiler.is_compiling() else list(_ACTIVE.contexts.values())


def _argument(weight: WeightMatrix) -> Tensor:
    """Return a weight as torch's functions take it, as a view: (out, in, …), but (in, out) of an embedding."""
    part = weight.weight.detach()
    if weight.rows is not None:
        part = part[weight.rows]
    return part.T if weight.transposed and not weight.one_hot else part


def _recorded(function: Any, details: Any, name: str, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call one of torch's functions and record its use of a weight.

    details: see `FUNCTIONS`; name: of the function, "" for a product by hand, as torch's own layers do not compute it
    """
    a: Tensor = function(input, weight, *args, **kwargs)
    for calls in _active():
        for matrix, first in calls.found_in(weight, one_hot=name == "embedding"):
            if matrix.registered or name:
                more = details(input, weight, *args, **kwargs) if details else {}
                calls.add(matrix, input, a, first=first, **more)
    return a


def _by_hand(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a product x W, whose last two arguments are x and W, as what `F.linear` computes of x and Wᵀ."""
    W = args[-1] if args and not kwargs else None
    if not (isinstance(W, Tensor) and W.ndim == 2 and _active()):
        return function(*args, **kwargs)
    return _recorded(lambda *_: function(*args), None, "", args[-2], W.T)


def _by_formula(fused: Any, formula: Any, input: Tensor, state: Any, *parameters: Any) -> Any:
    """Return the new state of a cell: by its formula if one of its weights is recorded, to show its products."""
    if not any(id(p) in calls.weights for calls in _active() if calls.formulas for p in parameters):
        return fused(input, state, *parameters)
    h = state if isinstance(state, Tensor) else state[0]
    w_ih, w_hh, b_ih, b_hh = (*parameters, None, None)[:4]
    return formula(F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh), state)


def _noted(function: Any, note: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
    """Call one of torch's functions, and note its arguments in the active contexts."""
    for calls in _active():
        note(calls, *args, **kwargs)
    return function(*args, **kwargs)


def _note_keys(calls: Calls, *_: Any, key_padding_mask: Tensor | None = None, **__: Any) -> None:
    """Note which keys `F.multi_head_attention_forward` is told to leave out."""
    calls.note_masks(key_padding_mask)


def _note_attention(calls: Calls, q: Any, k: Any, v: Any, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> None:
    """Note the mask (B, …, queries, keys) of `F.scaled_dot_product_attention`."""
    if attn_mask is not None:
        calls.masks.append(attn_mask.detach())


def _hooks_of(function: Any, module: nn.Module) -> Any:
    """Return a module's backward hooks, which errors of ours are not to call."""
    hooks = function(module)
    for calls in _active():
        hooks = tree_map(calls.quieted, hooks)
    return hooks


def _register_hook(function: Any, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """Register a hook on a tensor, which errors of ours are not to call."""
    for calls in _active():
        hook = calls.quieted(hook)
    return function(tensor, hook)


def _record_module(calls: Calls, weight: WeightMatrix, module: Any, args: Any, kwargs: Any, a: Tensor) -> None:
    """Record a call of a whitened layer: a forward hook."""
    calls.add(weight, module.padded(*args, *kwargs.values()), a, geometry=module.geometry)


STAND_INS: list[tuple[Any, ...]] = [  # place, name, stand-in, and what that takes besides the function
    *((place, name, _recorded, details, name) for place, name, details in FUNCTIONS),
    *((torch._VF, name, _by_formula, formula) for name, formula in CELLS.items()),
    (torch, "addmm", _by_hand),
    (torch, "matmul", _by_hand),
    (Tensor, "matmul", _by_hand),
    (Tensor, "__matmul__", _by_hand),
    (F, "multi_head_attention_forward", _noted, _note_keys),
    (F, "scaled_dot_product_attention", _noted, _note_attention),
    (Tensor, "retain_grad", _noted, lambda calls, tensor: calls.retained.append(weakref.ref(tensor))),
    (checkpoint.CheckpointFunction, "apply", _noted, lambda calls, *_: setattr(calls, "opaque", True)),
    (Tensor, "register_hook", _register_hook),
    (nn.Module, "_get_backward_hooks", _hooks_of),
    (nn.Module, "_get_backward_pre_hooks", _hooks_of),
]
_ACTIVE_STAND_INS = Replacements(
    lambda: ((place, name, _bound(stand_in, getattr(place, name), *more)) for place, name, stand_in, *more in STAND_INS)
)
