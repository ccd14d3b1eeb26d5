"""A pass of our own through a model, which leaves no trace.

Afterwards random number generators, buffers (running statistics of BatchNorm), attributes of the modules, `.grad` and
modes are what they were before.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter, methodcaller
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from bprong.capture.listener import CHANGING, GLOBAL_HOOKS, Replacements, hooks_of, own_pass, watched_losses
from bprong.capture.tape import Arguments, Batch, Head, copy_of


@contextmanager
def run_alone(
    model: nn.Module,
    x: Any,
    seed: int,
    errors: bool,
    head: Head | None = None,
    recording: AbstractContextManager[Any] | None = None,
) -> Iterator[tuple[Tensor, Any]]:
    """Run `model` on x; yield its output, and what the context that it ran in has recorded.

    errors: with an autograd graph; head: finds the output; recording: the context
    """
    if errors and torch.is_inference_mode_enabled():
        raise RuntimeError("errors cannot be propagated back inside torch.inference_mode(); leave it for this call")
    with own_pass(), _without_trace(model, seed), torch.set_grad_enabled(errors):
        with recording or nullcontext() as recorded, watched_losses() as losses, _AS_WRITTEN.active():
            # Otherwise nothing was compiled, and importing it takes seconds.
            eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
            with eager:
                returned = _call(model, x)
        yield (head or Head()).find(returned, losses), recorded


_GENERATORS = [name for name in vars(checkpoint) if name.startswith("_checkpoint_without_reentrant_generator")]

# Checkpoints, reentrant or not: the function is called once, with nothing around it. In eval mode without gradients
# attention is one fused function, which shows none of its projections and has no derivatives.
_AS_WRITTEN = Replacements(
    lambda: [
        (torch.backends.mha, "get_fastpath_enabled", lambda: False),
        (
            checkpoint,
            "CheckpointFunction",
            SimpleNamespace(apply=lambda function, preserve_rng_state, *args: function(*args)),
        ),
        # A generator, which newer versions of torch have under a second name.
        *((checkpoint, name, lambda *args, **kwargs: iter([None])) for name in _GENERATORS),
    ]
)


def _call(model: nn.Module, x: Any) -> Any:
    """Return the model's output on a tensor, on a tuple or mapping of arguments, or on `Arguments`."""
    if isinstance(x, Tensor) and (x.ndim == 0 or len(x) == 0):
        raise ValueError(f"the batch is empty: its shape is {tuple(x.shape)}")
    x = tree_map(copy_of, x)  # a model may change what it is given
    if isinstance(x, Arguments):
        # Parameters of several precisions need autocast; otherwise we compute in theirs.
        precisions = {p.dtype for p in model.parameters() if p.is_floating_point()}
        device = next(model.parameters()).device.type
        with torch.autocast(device, x.autocast, enabled=x.autocast is not None and len(precisions) > 1):
            return model(*x.args, **x.kwargs)
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


# What a forward pass may change ---------------------------------------------------------------------------------------


@contextmanager
def _without_trace(model: nn.Module, seed: int) -> Iterator[None]:
    """Use separate random numbers, and restore the state of all modules afterwards."""
    state: list[Any] = [*GLOBAL_HOOKS]
    parameters: set[int] = set()
    for module in model.modules():
        parameters.update(map(id, module._parameters.values()))
        if not getattr(module, "buffers_are_constant", False):
            state.append(vars(module))
        if getattr(module, "max_norm", None) is not None:  # an embedding renormalises the rows that it looks up
            state += [p.detach() for p in module.parameters(recurse=False)]
    restorers = _restorers(state, parameters)
    with random_numbers(model, seed):
        try:
            for hooks, key, _, source in hooks_of(model):
                is_users = not source.startswith(("torch.", "bprong."))
                # A sharded model is whole in a pass of our own.
                if source.startswith("torch.distributed.fsdp.") or (is_users and key not in CHANGING):
                    del hooks[key]
            yield
        finally:
            with torch.no_grad():
                for restore in restorers:
                    restore()


def _restorers(values: Sequence[Any], visited: set[int]) -> list[Callable[[], object]]:
    """Return functions that give values, and what they contain, back their present contents.

    visited: the ids of those that are to be left out
    """
    restorers: list[Callable[[], object]] = []
    remaining = list(values)
    for value in remaining:  # which grows meanwhile
        kind: Any = type(value)
        if kind in _IMMUTABLE or id(value) in visited:
            continue
        visited.add(id(value))
        is_container = issubclass(kind, (dict, list, deque, set, tuple))
        way = _way_of(kind)
        if way and is_container and not value:  # as most containers of a module are
            restorers.append(value.clear)
            continue
        if way:
            contents_of, restore = way
            restorers.append(partial(restore, value, contents_of(value)))
        if is_container:
            remaining += value.values() if issubclass(kind, dict) else value
    return restorers


@cache
def _way_of(kind: Any) -> Sequence[Callable[..., Any]]:
    """Return what copies and what restores the contents of values of a type; nothing, if they do not change."""
    return next((way for kinds, *way in _RESTORED if issubclass(kind, kinds)), [])


def _refill(container: Any, contents: Any) -> None:
    """Give a container its contents; attributes of a module are never gone in between, since another thread may ask."""
    if isinstance(container, dict):
        for key in container.keys() - contents.keys():
            del container[key]
    else:
        container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(contents)


_IMMUTABLE = {type(None), bool, int, float, complex, str, bytes, type, FunctionType}
_RESTORED: tuple[tuple[Any, ...], ...] = (
    (dict, dict, _refill),
    ((list, deque, set), list, _refill),
    (Tensor, Tensor.clone, Tensor.copy_),
    (np.ndarray, np.copy, np.copyto),
    ((torch.Generator, np.random.RandomState), methodcaller("get_state"), lambda g, state: g.set_state(state)),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.Generator, attrgetter("bit_generator.state"), lambda g, state: setattr(g.bit_generator, "state", state)),
)


@contextmanager
def random_numbers(model: nn.Module, seed: int) -> Iterator[None]:
    """Draw random numbers from `seed` on the model's devices; afterwards all generators continue as before."""
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        torch.default_generator.manual_seed(seed)
        for device in {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}:
            stack.enter_context(torch.random.fork_rng([device.index or 0], device_type=device.type))
            with device:
                torch.get_device_module(device.type).manual_seed(seed)
        yield


# What it is run on ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subset:
    """`count` of the `whole` examples of a batch, evenly spread, because a batch may be sorted.

    Outputs, gradients and targets may have several rows for each example.

    >>> Subset(2, 4).rows(torch.arange(8)).tolist()  # two rows for each example
    [0, 1, 4, 5]
    """

    count: int
    whole: int

    @classmethod
    def of(cls, batch: Batch, count: int) -> Subset:
        """`count` of the examples; all, if outputs or targets do not have equally many rows for each example."""
        subset = cls(count, examples(batch.x))
        rows = [t for t in tree_leaves(batch.x) if isinstance(t, Tensor) and t.layout is not torch.strided]
        rows += [t for t in (batch.output, batch.y) if t is not None]
        return subset if all(map(subset.divides, rows)) else cls(subset.whole, subset.whole)

    @property
    def everything(self) -> bool:
        return self.count >= self.whole

    def divides(self, tensor: Tensor) -> bool:
        """Whether the tensor can have the same number of rows for each example."""
        dense = tensor.layout is torch.strided and tensor.ndim > 0
        return dense and 0 < self.whole <= len(tensor) and len(tensor) % self.whole == 0

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of the chosen examples; the tensor itself if all examples are chosen."""
        if self.everything:
            return tensor
        chosen = torch.arange(self.count, device=tensor.device) * self.whole // self.count
        return torch.unflatten(tensor, 0, (self.whole, -1))[chosen].flatten(0, 1)


WHOLE = Subset(1, 1)  # of any batch


def examples(x: Any) -> int:
    """The number of examples of a batch: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim > 0), 1)


def rows_of(batch: Any, subset: Subset, dtype: torch.dtype) -> Any:
    """Return a subset of the examples of a batch, in which low precision is converted to `dtype`.

    Tensors of another length are not examples and stay whole. Inputs in half precision come from autocast, which is off
    when a batch is measured. The graph of inputs that were computed from parameters, e.g. of the state of a recurrent
    network, may be gone, and is left out.
    """

    def select(leaf: Tensor) -> Tensor:
        is_of_examples = subset.divides(leaf) and len(leaf) == subset.whole
        rows = (subset.rows(leaf) if is_of_examples else leaf).detach()
        rows = rows.to(dtype) if leaf.dtype in (torch.bfloat16, torch.float16) else rows
        return rows.requires_grad_(leaf.requires_grad)

    return tree_map_only(Tensor, select, batch)


@torch.no_grad()
def set_tangent_(parameter: Tensor, tangent: Tensor) -> None:
    """Make a parameter dual in place, until the dual level ends.

    This is torch's make_dual, which would compile decompositions of rare functions first. That takes as long as
    hundreds of steps of a small network; models with one of these functions use finite differences.
    """
    parameter.copy_(torch._VF._make_dual(parameter.detach(), tangent.to(parameter), level=0))
