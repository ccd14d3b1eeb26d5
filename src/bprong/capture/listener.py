"""Hooks on a model and on its loss: which of their calls are training.

Calls in eval mode or without gradients are validation; calls inside of others, passes of our own, traces and transforms
of torch.func are not training either.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bprong.contexts import Uninterrupted, is_own_pass

if TYPE_CHECKING:
    from bprong.capture.recorder import Recorder


class Listener:
    """Hooks on a model and on its loss that report training calls to their owner, as long as that lives.

    owner:     returns it; None for the copy in a copied or unpickled model, which has none yet
    wanted:    whether training calls are reported
    compiled:  these, as a linked list, since torch.compile would compile again for each length of a Python list
    """

    def __init__(self, owner: Recorder | None = None) -> None:
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)
        self.wanted = False
        self.compiled: Any = None
        self._thread = threading.local()
        if owner is None:
            return
        loss = owner.loss.given
        _remove_copies(owner.model)
        handles = [
            owner.model.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]
        if isinstance(loss, nn.Module):
            _remove_copies(loss)
            handles.append(loss.register_forward_hook(self.after_loss))
        for handle in handles:
            weakref.finalize(owner, handle.remove)
        weakref.finalize(owner, Guard.take_off, weakref.ref(owner.model), self)
        self.listen(True)

    def __reduce__(self) -> tuple[type[SimpleNamespace], tuple[()], dict[str, Any]]:
        """In a pickled model its hooks are functions of Python that do nothing: whoever loads it needs no bprong."""
        nothing = nullcontext().__exit__  # takes any arguments and returns None
        return SimpleNamespace, (), {"before": nothing, "after": nothing, "after_loss": nothing}

    def __deepcopy__(self, memo: dict[int, Any]) -> Listener:
        return Listener()

    def listen(self, wanted: bool) -> None:
        """Whether the calls from now on are reported. If not, a hook costs no more than the test of a flag."""
        owner = self.owner()
        if wanted == self.wanted or owner is None:
            return
        self.wanted = wanted
        if wanted:
            Guard.put_on(owner.model, self)
        else:
            Guard.take_off(weakref.ref(owner.model), self)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if self.wanted and module.training and torch.is_grad_enabled() and not _is_exporting():
                self.compiled = ((args, kwargs), self.compiled)
            return
        if not self.wanted:
            return
        training = module.training and torch.is_grad_enabled()
        # A model that calls itself is called once.
        starts = training and not self._running and not is_own_pass() and not _is_transformed()
        owner = self.owner() if starts else None
        with Uninterrupted():
            self._running.append(None if owner is None else owner.begin(args, kwargs))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        # torch.jit.script, which shows these lines, cannot compile the hooks of an optimizer. Use torch.export.export
        # or torch.jit.trace (Lightning: to_torchscript(method="trace")), or delete the optimizer before scripting.
        if torch.compiler.is_compiling() or not self.wanted or not self._running:
            return
        with Uninterrupted():
            begun = self._running.pop()
            owner = self.owner()
            if begun is not None and owner is not None:
                owner.finish(begun, returned)

    def after_loss(self, module: nn.Module, args: tuple[Any, ...], value: Any) -> None:
        if torch.compiler.is_compiling() or not self.wanted or is_own_pass():
            return
        owner = self.owner()
        if owner is not None and owner.last_loss is not None:
            owner.last_loss.is_declared = True

    def abandon(self, depth: int) -> None:
        """Ends the calls beyond this depth, which have neither returned nor raised an Exception."""
        while len(self._running) > depth:
            begun = self._running.pop()
            owner = self.owner()
            if begun is not None and owner is not None:
                owner.finish(begun, None)

    @property
    def innermost(self) -> Any:
        """What is recorded of the call of the model that is running in this thread; None: there is none."""
        return self._running[-1] if self._running else None

    @property
    def depth(self) -> int:
        """How many calls of the model are running in this thread, one inside of the other."""
        return len(self._running)

    @property
    def _running(self) -> list[Any]:
        """The calls of the model that are running in this thread."""
        running: list[Any] = self._thread.__dict__.setdefault("running", [])
        return running


class Guard:
    """The call of a model, which ends what hooks began even if it is interrupted.

    torch calls `Listener.after` when the model returns or raises an Exception; KeyboardInterrupt is none. The guard
    stands where torch keeps the call of a module that is compiled in place, which copies and pickles leave out.

    listeners: those of the model's optimizers that are listening
    """

    def __init__(self, module: nn.Module) -> None:
        self.compiled = module._compiled_call_impl
        self.listeners: list[Listener] = []
        self._module = weakref.ref(module)  # not a cycle, so that an unused model is freed at once

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        depths = [(listener, listener.depth) for listener in self.listeners]
        try:
            return (self.compiled or self._module()._call_impl)(*args, **kwargs)  # type: ignore[union-attr]
        except BaseException:
            for listener, depth in depths:
                listener.abandon(depth)
            raise

    @classmethod
    def put_on(cls, module: nn.Module, listener: Listener) -> None:
        guard = module._compiled_call_impl
        if not isinstance(guard, Guard):
            guard = cls(module)
            module._compiled_call_impl = guard
        guard.listeners.append(listener)

    @classmethod
    def take_off(cls, module: weakref.ref[nn.Module], listener: Listener) -> None:
        guarded = module()
        guard = None if guarded is None else guarded._compiled_call_impl
        if guarded is not None and isinstance(guard, Guard):
            guard.listeners = [other for other in guard.listeners if other is not listener]
            if not guard.listeners:
                guarded._compiled_call_impl = guard.compiled


def _is_exporting() -> bool:
    """Whether torch.export calls the model, with tensors that have no values."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))  # is_exporting() is missing in torch 2.6


def _is_transformed() -> bool:
    """Whether calls are traced, or are inside of a transform of torch.func."""
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def _remove_copies(module: nn.Module) -> None:
    """Removes the hooks that a copied or loaded module has from the original."""
    for hooks, *flags in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ):
        for key, hook in list(hooks.items()):
            listener = getattr(hook, "__self__", None)
            if isinstance(listener, nullcontext) or (isinstance(listener, Listener) and listener.owner() is None):
                for entries in (hooks, *flags):
                    entries.pop(key, None)  # type: ignore[attr-defined]
