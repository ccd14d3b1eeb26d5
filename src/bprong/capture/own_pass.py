"""A pass of our own through a model, which leaves no trace.

Afterwards random number generators, buffers (running statistics of BatchNorm), attributes of the modules, `.grad` and
modes are what they were before.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from bprong.capture.calls import Calls, recorded_calls
from bprong.capture.losses import Replacements, watched_losses
from bprong.capture.output import Head
from bprong.capture.weights import WeightMatrix
from bprong.contexts import own_pass


class Arguments(NamedTuple):
    """What a model was called with; autocast: the precision of autocast at that time, if it was on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None = None


def copy_of(tensor: Tensor) -> Tensor:
    """A copy of an input, without its history."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def recorded_run(
    model: nn.Module, weights: Iterable[WeightMatrix], x: Any, seed: int, errors: bool, head: Head | None = None
) -> Iterator[tuple[list[Tensor], Calls]]:
    """Run `model` on x and return its output and every call of the weights; errors: with an autograd graph."""
    if errors and torch.is_inference_mode_enabled():
        raise RuntimeError("errors cannot be propagated back inside torch.inference_mode(); leave it for this call")
    with own_pass(), _without_trace(model, seed), torch.set_grad_enabled(errors):
        with recorded_calls(weights) as calls, watched_losses() as losses, _AS_WRITTEN.active(), ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # otherwise nothing was compiled, and importing it takes seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            calls.note_masks(x)
            calls.returned = _call(model, x)
            calls.losses = losses
        if errors:
            calls.drop_without_graph()
        yield (head or Head()).find(calls.returned, calls.losses), calls


# Checkpoints, reentrant or not: the function is called once, with nothing around it.
_AS_WRITTEN = Replacements(
    lambda: [
        (
            checkpoint,
            "CheckpointFunction",
            SimpleNamespace(apply=lambda function, preserve_rng_state, *args: function(*args)),
        ),
        # A generator, which newer versions of torch have under a second name.
        *(
            (checkpoint, name, lambda *args, **kwargs: (None for _ in range(1)))
            for name in vars(checkpoint)
            if name.startswith("_checkpoint_without_reentrant_generator")
        ),
    ]
)


def _call(model: nn.Module, x: Any) -> Any:
    """The model's output on a tensor, on a tuple or mapping of arguments, or on `Arguments`."""
    if isinstance(x, Tensor) and (x.ndim == 0 or len(x) == 0):
        raise ValueError(f"the batch is empty: its shape is {tuple(x.shape)}")
    x = tree_map_only(Tensor, copy_of, x)  # a model may change what it is given
    if isinstance(x, Arguments):
        # Parameters of several precisions need autocast; otherwise we compute in theirs.
        precisions = {(p.device.type, p.dtype) for p in model.parameters() if p.is_floating_point()}
        device, _ = next(iter(precisions))
        with torch.autocast(device, x.autocast, enabled=x.autocast is not None and len(precisions) > 1):
            return model(*x.args, **x.kwargs)
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


# What a forward pass may change ---------------------------------------------------------------------------------------


@contextmanager
def _without_trace(model: nn.Module, seed: int) -> Iterator[None]:
    """Use separate random numbers, and restore the state of all modules afterwards."""
    visited: set[int] = set()
    restore = _restorers(_GLOBAL_HOOKS, visited)
    for module in model.modules():
        if not getattr(module, "buffers_are_constant", False):
            attributes = {k: value for k, value in vars(module).items() if k not in ("_parameters", "_modules")}
            restore += [
                *_restorers(attributes.values(), visited),
                partial(_restore_attributes, vars(module), attributes),
            ]
        if getattr(module, "max_norm", None) is not None:  # an embedding renormalises the rows that it looks up
            restore += [partial(p.copy_, p.detach().clone()) for p in module.parameters(recurse=False)]
    with random_numbers(model, seed):
        try:
            for hooks, key, _ in list(_users_hooks(model)):
                if key not in _CHANGING:
                    del hooks[key]
            for hooks, key in list(_hooks_of_fsdp(model)):
                del hooks[key]
            yield
        finally:
            with torch.no_grad():
                for function in restore:
                    function()


# Hooks of the user's that change what a module computes belong to it; others must not be called by us.
_CHANGING: set[int] = set()  # keys of hooks that have returned something; they are unique over all modules
_GLOBAL_HOOKS = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)


def _users_hooks(model: nn.Module) -> Iterator[tuple[dict[int, Any], int, Callable[..., Any]]]:
    """The hooks of a model, other than those of torch and ours: where they are, under which key, and they."""
    everywhere = [*_GLOBAL_HOOKS]
    for m in model.modules():
        everywhere += [m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks]
    for hooks in everywhere:
        for key, hook in hooks.items():
            source = getattr(getattr(hook, "func", hook), "__module__", "")
            if not source.startswith(("torch.", "bprong.")):
                yield hooks, key, hook


def _hooks_of_fsdp(model: nn.Module) -> Iterator[tuple[dict[int, Any], int]]:
    """Those that gather and release the parameters of a sharded model, which is whole in a pass of our own."""
    for hooks in (d for m in model.modules() for d in (m._forward_pre_hooks, m._forward_hooks)):
        for key, hook in hooks.items():
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp."):
                yield hooks, key


@contextmanager
def noted_hooks(model: nn.Module) -> Iterator[None]:
    """Find out, in a pass of the user's, which forward hooks change what their module computes."""
    replaced = [(hooks, key, hook, partial(_noted, key, hook)) for hooks, key, hook in _users_hooks(model)]
    for hooks, key, _, noted in replaced:
        hooks[key] = noted
    try:
        yield
    finally:
        for hooks, key, hook, noted in replaced:
            if hooks.get(key) is noted:
                hooks[key] = hook


def _noted(key: int, hook: Callable[..., Any], *args: Any) -> Any:
    result = hook(*args)
    if result is not None:
        _CHANGING.add(key)
    return result


def _restore_attributes(own: dict[str, Any], kept: Mapping[str, Any]) -> None:
    """Unlike `_refill` it never removes an attribute that another thread may need."""
    for name in own.keys() - kept.keys() - {"_parameters", "_modules"}:
        del own[name]
    own.update(kept)


def _restorers(values: Iterable[Any], visited: set[int]) -> list[Callable[[], object]]:
    """Functions that give values back their present contents: tensors, containers, and random number generators."""
    restorers: list[Callable[[], object]] = []
    for value in values:
        if type(value) in _IMMUTABLE or id(value) in visited:
            continue
        visited.add(id(value))
        match value:
            case dict() | list() | deque() | set() if not value:
                restorers.append(value.clear)  # most containers of a module are for hooks, of which it has none
            case dict() | list() | deque() | set():
                contents = dict(value) if isinstance(value, dict) else list(value)
                restorers.append(partial(_refill, value, contents))
                restorers += _restorers(contents.values() if isinstance(contents, dict) else contents, visited)
            case Tensor() if not isinstance(value, nn.Parameter):
                restorers.append(partial(value.copy_, value.clone()))
            case tuple():
                restorers += _restorers(value, visited)
            case np.ndarray():
                restorers.append(partial(np.copyto, value, value.copy()))
            case torch.Generator() | np.random.RandomState():
                restorers.append(partial(value.set_state, value.get_state()))  # type: ignore[arg-type]
            case random.Random():
                restorers.append(partial(value.setstate, value.getstate()))
            case np.random.Generator():
                restorers.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    return restorers


_IMMUTABLE = {type(None), bool, int, float, complex, str, bytes, type, FunctionType}


def _refill(container: Any, contents: Any) -> None:
    fill = container.extend if isinstance(container, (list, deque)) else container.update
    container.clear()
    fill(contents)


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
