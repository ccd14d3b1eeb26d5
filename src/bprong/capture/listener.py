"""What is seen of the user's code: calls of a model and of torch's loss functions; and what our own code runs in.

Calls in eval mode or without gradients are validation; calls inside of others, passes of our own, traces and transforms
of torch.func are not training either.
"""

from __future__ import annotations

# Python's own wrappers make enumerations of all that they return, which takes longer than the rest of a context.
import _signal as signal  # type: ignore[import-not-found]
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.likelihood.declared import KINDS
from bprong.likelihood.loss import Kind, LossCall

if TYPE_CHECKING:
    from bprong.capture.recorder import Recorder
    from bprong.capture.tape import Tape

# What our own code runs in --------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """What runs in a thread.

    passes: how many passes of our own
    tape:   what is recorded of the call that is running; None: none is, as far as calls are recorded
    """

    passes = 0
    tape: Tape | None = None


_THREAD = _Thread()
_ONE_AT_A_TIME = threading.RLock()  # random number generators and forward-mode AD belong to the process
_INTERRUPT = SimpleNamespace(handler=None, is_pending=False)


def _delay(signum: int, frame: FrameType | None) -> None:
    """Handle an interrupt while interrupts are delayed."""
    if _INTERRUPT.is_pending:
        signal.signal(signal.SIGINT, _INTERRUPT.handler)
        _INTERRUPT.handler(signum, frame)
    _INTERRUPT.is_pending = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt (SIGINT: Ctrl-C, a notebook's stop button) until the context ends.

    A step changes statistics, factors and parameters one after the other; an interrupt between them would leave some of
    them from this step and some from the last. A second interrupt is not delayed, because a model that is run in here
    may hang. Only the main thread is ever interrupted, and only a handler in Python can be delayed.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if handler is _delay or not callable(handler):
        yield
        return
    _INTERRUPT.handler = handler
    _INTERRUPT.is_pending = False
    signal.signal(signal.SIGINT, _delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if _INTERRUPT.is_pending:
            handler(signal.SIGINT, None)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Switch autocast off; entering a context takes longer than finding out whether it is needed."""
    active = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


def is_own_pass() -> bool:
    """Return whether the call of a model that is running is one of ours, which is not training."""
    return _THREAD.passes > 0


@contextmanager
def own_pass() -> Iterator[None]:
    """Mark what is run as a pass of our own."""
    with _ONE_AT_A_TIME:
        _THREAD.passes += 1
        try:
            yield
        finally:
            _THREAD.passes -= 1


# Calls of a model -----------------------------------------------------------------------------------------------------


class Listener:
    """Reports the training calls of a model to a recorder, as long as that lives.

    It stands where torch keeps the call of a module that is compiled in place: hooks are not told of interrupts, and
    copies and pickles leave it out. Calls in compiled code are not seen.

    wanted:  whether calls are reported
    thread:  has what is recorded in each thread
    """

    def __init__(self, recorder: Recorder) -> None:
        self.wanted = False
        self.thread = _Thread()
        self._compiled_call_impl: Any = None  # what was there before
        self._recorder = weakref.ref(recorder)
        self._model = weakref.ref(recorder.model)
        weakref.finalize(recorder, self.listen, False)
        self.listen(True)

    def listen(self, wanted: bool) -> None:
        """Say whether the calls from now on are reported."""
        model = self._model()
        if wanted == self.wanted or model is None:
            return
        self.wanted = wanted
        if wanted:
            self._compiled_call_impl = model._compiled_call_impl
            vars(model)["_compiled_call_impl"] = self.call
            return
        for place in _places(model):
            if place._compiled_call_impl == self.call:
                vars(place)["_compiled_call_impl"] = self._compiled_call_impl

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and end what was begun however the call ends."""
        model: Any = self._model()
        proceed = self._compiled_call_impl or model._call_impl
        if torch.compiler.is_compiling() or self.thread.tape is not None:  # a model that calls itself is called once
            return proceed(*args, **kwargs)
        try:
            with uninterrupted():
                self._begin(model, args, kwargs)
            returned = proceed(*args, **kwargs)
            with uninterrupted():
                self._finish(returned)
            return returned
        except BaseException:
            self._finish(None)
            raise

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin to record a call, if it is one of training."""
        recorder = self._recorder()
        is_training = model.training and torch.is_grad_enabled() and not is_own_pass()
        is_traced = torch._C._get_tracing_state() is not None
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if recorder is not None and is_training and not is_traced and not is_transformed:
            self.thread.tape = recorder.begin(args, kwargs)

    def _finish(self, returned: Any) -> None:
        """End the recording of a call, once; returned: None if it has raised an error."""
        recorder = self._recorder()
        tape = self.thread.tape
        self.thread.tape = None
        if tape is not None and recorder is not None:
            recorder.finish(tape, returned)


def _places(model: nn.Module) -> Iterator[Any]:
    """Yield a model and the listeners to its calls: each stands where the one before it keeps its call."""
    place: Any = model
    while place is not None:
        yield place
        listener = getattr(place._compiled_call_impl, "__self__", None)
        place = listener if isinstance(listener, Listener) else None


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has compiled a module, in place or not."""
    *_, last = _places(module)
    return last._compiled_call_impl is not None or hasattr(module, "_orig_mod")


# Hooks of the user's that change what a module computes belong to it; others must not be called by us.
CHANGING: set[int] = set()  # keys of hooks that have returned something; they are unique over all modules
GLOBAL_HOOKS = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)


def hooks_of(model: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any, str]]:
    """Yield the forward hooks of a model: where they are, their key, they themselves, and where they were defined."""
    everywhere = [*GLOBAL_HOOKS]
    for m in model.modules():
        everywhere += [m._forward_pre_hooks, m._forward_hooks]
    for hooks in everywhere:
        for key, hook in list(hooks.items()):
            yield hooks, key, hook, getattr(getattr(hook, "func", hook), "__module__", "")


@contextmanager
def noted_hooks(model: nn.Module) -> Iterator[None]:
    """Find out, in a pass of the user's, which forward hooks change what their module computes."""
    replaced = []
    for hooks, key, hook, source in hooks_of(model):
        if not source.startswith(("torch.", "bprong.")):
            replaced.append((hooks, key, hook))
            hooks[key] = partial(_noted, key, hook)
    try:
        yield
    finally:
        for hooks, key, hook in replaced:
            if key in hooks:
                hooks[key] = hook


def _noted(key: int, hook: Callable[..., Any], *args: Any) -> Any:
    result = hook(*args)
    if result is not None:
        CHANGING.add(key)
    return result


# Calls of loss functions ----------------------------------------------------------------------------------------------


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

_WATCHERS: dict[int, Callable[[LossCall], object]] = {}  # those that are told of calls, by the id of whom they serve


def _stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield those of the functions that all of torch's losses end in: a call is seen however the user writes it."""
    for kind in KINDS.values():
        place = torch._C._nn if hasattr(torch._C._nn, kind.end) else torch
        yield place, kind.end, _stand_in(getattr(place, kind.end), kind)


def _stand_in(end: Callable[..., Tensor], kind: Kind) -> Callable[..., Tensor]:
    def seen(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = end(input, target, *args, **kwargs)
        if torch.compiler.is_compiling() or not _WATCHERS:
            return value
        named = dict(zip(kind.options, args, strict=False)) | kwargs
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


def _arrive(reference: weakref.ref[LossCall], gradient: Tensor) -> None:
    call = reference()
    if call is not None:
        call.gradients[torch._C._current_graph_task_id()] = gradient.detach()


_STAND_INS = Replacements(_stand_ins)


def watch(key: int, watcher: Callable[[LossCall], object]) -> None:
    """Tell somebody of the calls of loss functions from now on; key: the id of whom this serves."""
    if key not in _WATCHERS:
        _WATCHERS[key] = watcher
        _STAND_INS.begin()


def unwatch(key: int) -> None:
    """Tell him no longer."""
    if _WATCHERS.pop(key, None) is not None:
        _STAND_INS.end()


@contextmanager
def watched_losses() -> Iterator[list[LossCall]]:
    """Yield the calls of loss functions that this thread makes in this context."""
    calls: list[LossCall] = []
    thread = threading.get_ident()
    watch(id(calls), lambda call: calls.append(call) if threading.get_ident() == thread else None)
    try:
        yield calls
    finally:
        unwatch(id(calls))
