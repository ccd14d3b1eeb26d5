"""Functions of torch that are replaced for a while, so that their calls can be seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


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
