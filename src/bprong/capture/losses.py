"""The calls of torch's loss functions: what they are given, and what the user's backward pass brings back to them.

The functions that all of torch's losses end in are replaced by stand-ins while somebody watches, so that a call is seen
however the user writes it: as a module, as a function under any name, or inside of a model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.likelihood.declared import KINDS
from bprong.likelihood.loss import Kind, LossCall


class Replacements:
    """Attributes of modules and classes, replaced while at least one context is active.

    Contexts may end in another order than they began in, since they may belong to several threads.

    find: gives the place, the name and the stand-in of each attribute
    """

    def __init__(self, find: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._find = find
        self._active = 0
        self._stack = ExitStack()
        self._lock = threading.Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Replace the attributes, unless they are replaced already."""
        with self._lock:
            self._active += 1
            if self._active == 1:
                for place, name, stand_in in self._find():
                    attributes = vars(place)  # what is found by __getattr__ is not there, and must not stay there
                    is_there = name in attributes
                    restore = (setattr, place, name, attributes[name]) if is_there else (delattr, place, name)
                    self._stack.callback(*restore)
                    setattr(place, name, stand_in)

    def end(self) -> None:
        """Restore the attributes, if nobody else needs their stand-ins."""
        with self._lock:
            self._active -= 1
            if self._active == 0:
                self._stack.close()


REDUCTIONS = ("none", "mean", "sum")  # by their numbers in torch


_WATCHERS: dict[int, Callable[[LossCall], None]] = {}  # those that are told of calls, by any number


def _stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    for kind in KINDS.values():
        place = torch._C._nn if hasattr(torch._C._nn, kind.end) else torch
        yield place, kind.end, _stand_in(getattr(place, kind.end), kind)


def _stand_in(end: Callable[..., Tensor], kind: Kind) -> Callable[..., Tensor]:
    def seen(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = end(input, target, *args, **kwargs)
        if torch.compiler.is_compiling() or not _WATCHERS:
            return value
        named = dict(zip(kind.options, args, strict=False)) | kwargs
        named = {name: option for name, option in named.items() if option is not None}
        named["reduction"] = REDUCTIONS[named.get("reduction", 1)]
        if kind.function is F.mse_loss and target.requires_grad and not input.requires_grad:  # it is symmetric
            input, target = target, input
        for watcher in list(_WATCHERS.values()):
            call = LossCall(kind, input, target.detach(), named, value.detach())
            if value.grad_fn is not None:  # whoever keeps the value must not keep the logits
                value.register_hook(partial(_arrive, weakref.ref(call)))  # type: ignore[no-untyped-call]
            watcher(call)
        return value

    return seen


def _arrive(call: weakref.ref[LossCall], gradient: Tensor) -> None:
    known = call()
    if known is not None:
        known.arrive(torch._C._current_graph_task_id(), gradient)


_STAND_INS = Replacements(_stand_ins)


class Watch:
    """Tells somebody of the calls of loss functions while it is on."""

    def __init__(self, watcher: Callable[[LossCall], None]) -> None:
        self._watcher = watcher

    def start(self) -> None:
        if id(self) not in _WATCHERS:
            _WATCHERS[id(self)] = self._watcher
            _STAND_INS.begin()

    def stop(self) -> None:
        if _WATCHERS.pop(id(self), None) is not None:
            _STAND_INS.end()


@contextmanager
def watched_losses() -> Iterator[list[LossCall]]:
    """The calls of loss functions that this thread makes in this context."""
    calls: list[LossCall] = []
    thread = threading.get_ident()
    watch = Watch(lambda call: calls.append(call) if threading.get_ident() == thread else None)
    watch.start()
    try:
        yield calls
    finally:
        watch.stop()
