"""The generator that targets are drawn from: one of our own, so that torch's own generators, which all threads share,
are not touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_GENERATOR: ContextVar[torch.Generator | None] = ContextVar("generator", default=None)


def generator() -> torch.Generator | None:
    """The generator of the context that is active; None: torch's own."""
    return _GENERATOR.get()


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a generator with this seed. It gives the numbers that torch's own would give with this seed.

    >>> with drawing(1, torch.device("cpu")):
    ...     own = torch.rand(3, generator=generator())
    >>> _ = torch.manual_seed(1)
    >>> bool(own.equal(torch.rand(3)))
    True
    """
    token = _GENERATOR.set(torch.Generator(device).manual_seed(seed))
    try:
        yield
    finally:
        _GENERATOR.reset(token)


def mixed(seed: int, t: int) -> int:
    """A seed for step t that shares no stream with the user's own seeds, however small those are."""
    return (seed * 0x9E3779B97F4A7C15 + t * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
