"""What our own code runs in: without interrupts, without autocast, and marked as a pass of our own."""

from __future__ import annotations

# Python's own wrappers make enumerations of all that they return, which takes longer than the rest of a context.
import _signal as signal  # type: ignore[import-not-found]
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

_MAIN = threading.main_thread()
_THREAD = threading.local()  # `passes`: how many passes of our own are running in this thread
_ONE_AT_A_TIME = threading.RLock()  # random number generators and forward-mode AD belong to the process


class Uninterrupted:
    """Delays an interrupt (SIGINT: Ctrl-C, a notebook's stop button) until the context ends.

    A step changes statistics, factors and parameters one after the other; an interrupt between them would leave some of
    them from this step and some from the last. A second interrupt is not delayed, because a model that is run in here
    may hang. Only the main thread is ever interrupted, and only a handler in Python can be delayed.

    >>> with Uninterrupted() as delayed:
    ...     delayed.is_pending
    False
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._handler: Any = None  # that was in force; None: nothing is delayed

    def __enter__(self) -> Uninterrupted:
        if threading.current_thread() is _MAIN:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), Uninterrupted):
                self._handler = handler
                signal.signal(signal.SIGINT, self._delay)
        return self

    def _delay(self, signum: int, frame: FrameType | None) -> None:
        if self.is_pending:
            signal.signal(signal.SIGINT, self._handler)
            self._handler(signum, frame)
        self.is_pending = True

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        handler = self._handler
        self._handler = None
        signal.signal(signal.SIGINT, handler)
        if self.is_pending:
            handler(signal.SIGINT, None)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Entering a context takes longer than finding out whether it is needed."""
    active = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


def is_own_pass() -> bool:
    """Whether the call of a model that is running is one of ours, which is not training."""
    return getattr(_THREAD, "passes", 0) > 0


@contextmanager
def own_pass() -> Iterator[None]:
    """Marks what is run as a pass of our own."""
    with _ONE_AT_A_TIME:
        _THREAD.passes = getattr(_THREAD, "passes", 0) + 1
        try:
            yield
        finally:
            _THREAD.passes -= 1


@contextmanager
def timed(seconds: dict[str, float], purpose: str) -> Iterator[None]:
    """Adds the time that the context takes."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[purpose] += time.perf_counter() - start
