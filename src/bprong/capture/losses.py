"""The calls of torch's loss functions: what they are given, and what the user's backward pass brings back to them.

The functions that all of torch's losses end in are replaced by stand-ins while somebody watches, so that a call is seen
however the user writes it: as a module, as a function under any name, or inside of a model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bprong.capture.replacements import Replacements
from bprong.likelihood.targets import LossCall

REDUCTIONS = ("none", "mean", "sum")  # by their numbers in torch

# Where torch's functions end, their names in torch.nn.functional, and what they take besides input and target.
ENDS: dict[tuple[Any, str], tuple[str, tuple[str, ...]]] = {
    (torch._C._nn, "cross_entropy_loss"): ("cross_entropy", ("weight", "reduction", "ignore_index", "label_smoothing")),
    (torch._C._nn, "nll_loss_nd"): ("nll_loss", ("weight", "reduction", "ignore_index")),
    (torch, "binary_cross_entropy_with_logits"): (
        "binary_cross_entropy_with_logits",
        ("weight", "pos_weight", "reduction"),
    ),
    (torch._C._nn, "mse_loss"): ("mse_loss", ("reduction",)),
}


_WATCHERS: dict[int, Callable[[LossCall], None]] = {}  # those that are told of calls, by any number


def _stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    for (place, end), (function, options) in ENDS.items():
        yield place, end, _stand_in(getattr(place, end), function, options)


def _stand_in(end: Callable[..., Tensor], function: str, options: tuple[str, ...]) -> Callable[..., Tensor]:
    def seen(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = end(input, target, *args, **kwargs)
        if torch.compiler.is_compiling() or not _WATCHERS:
            return value
        named = dict(zip(options, args, strict=False)) | kwargs
        named = {name: option for name, option in named.items() if option is not None}
        named["reduction"] = REDUCTIONS[named.get("reduction", 1)]
        if function == "mse_loss" and target.requires_grad and not input.requires_grad:  # it is symmetric
            input, target = target, input
        for watcher in list(_WATCHERS.values()):
            call = LossCall(function, input, target.detach(), named, value.detach())
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
