"""Hooks on a model and on its loss: which of their calls are training.

Calls in eval mode or without gradients are validation; calls inside of others, passes of our own, traces and transforms
of torch.func are not training either.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bprong.capture.own_pass import is_own_pass
from bprong.likelihood.loss import Loss


class Follower(Protocol):
    """Follows the training calls of a model."""

    model: nn.Module
    loss: Loss

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """When the model is called; what it returns is given to `finish`, unless it is None."""

    def finish(self, begun: Any, returned: Any) -> None:
        """When the call has returned, or raised an error (None)."""

    def after_loss(self, value: Tensor, y: Tensor) -> None:
        """When the loss module was called with these targets."""


class Listener:
    """Hooks on a model and on its loss that report training calls to their owner.

    owner:     what the calls are reported to; None for the copy in a copied or unpickled model, which has none yet
    wanted:    whether the arguments of calls inside torch.compile are kept
    compiled:  these, as a linked list, since torch.compile would compile again for each length of a Python list
    """

    def __init__(self, owner: Follower | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self.wanted = True
        self.compiled: Any = None
        self._thread = threading.local()

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()

    @property
    def owner(self) -> Follower | None:
        return None if self._owner is None else self._owner()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        training = module.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            if self.wanted and training and self._owner is not None:
                self.compiled = ((args, kwargs), self.compiled)
            return
        running = self._running
        owner = self.owner
        # A model that calls itself is called once.
        starts = owner is not None and training and not running and not is_own_pass() and not _is_transformed()
        running.append(owner.begin(args, kwargs) if starts and owner is not None else None)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        if torch.compiler.is_compiling() or not self._running:
            return
        begun = self._running.pop()
        owner = self.owner
        if begun is not None and owner is not None:
            owner.finish(begun, returned)

    def after_loss(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        owner = None if torch.compiler.is_compiling() or is_own_pass() else self.owner
        y = kwargs.get("target", args[-1] if args else None)
        if owner is not None and isinstance(y, Tensor) and isinstance(value, Tensor) and value.requires_grad:
            owner.after_loss(value, y)

    @property
    def _running(self) -> list[Any]:
        """The calls of the model that are running in this thread."""
        running: list[Any] = self._thread.__dict__.setdefault("running", [])
        return running

    def attach(self, owner: Follower) -> None:
        """Listen to the model and its loss as long as the owner lives; remove hooks that were copied with them."""
        loss = owner.loss.given
        _remove_copies(owner.model)
        handles = [
            owner.model.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]
        if isinstance(loss, nn.Module):
            _remove_copies(loss)
            handles.append(loss.register_forward_hook(self.after_loss, with_kwargs=True))
        for handle in handles:
            weakref.finalize(owner, handle.remove)


def _is_transformed() -> bool:
    """Whether calls are traced, or are inside of a transform of torch.func."""
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def _remove_copies(module: nn.Module) -> None:
    for hooks, others in (
        (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
        (module._forward_hooks, [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]),
    ):
        for key, hook in list(hooks.items()):
            listener = getattr(hook, "__self__", None)
            if isinstance(listener, Listener) and listener.owner is None:
                for flags in (hooks, *others):
                    flags.pop(key, None)  # type: ignore[attr-defined]
