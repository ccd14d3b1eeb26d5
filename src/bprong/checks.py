"""Checks of what a user typed. Each error says what was given, what is required and what to do."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch.distributed as dist
from torch import nn


def period(kind: str, every: int, offset: int | None) -> tuple[int, int]:
    """The paper's τ and c as integers; the default offset is half of the period."""
    tau = integer(f"{kind}_every", every, 1)
    c = tau // 2 if offset is None else integer(f"{kind}_offset", offset, 0)
    if c >= tau:
        raise ValueError(f"{kind}_offset must lie in 0 … {kind}_every − 1 = {tau - 1}, not {offset!r}")
    return tau, c


def pair(samples: Any) -> Any:
    """(x, y) from x or from (x, y); None stays None."""
    if isinstance(samples, tuple) and len(samples) != 2:
        raise ValueError(
            f"samples must be x or (x, y), not a tuple of {len(samples)}; give several inputs as ((x1, x2), y)"
        )
    return samples if samples is None or isinstance(samples, tuple) else (samples, None)


def refuse_distributed(model: nn.Module) -> None:
    """Raises ValueError in several processes, each of which would measure its own batches and whiten differently."""
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if processes > 1 or any(map(is_wrapper, model.modules())):
        raise ValueError(
            "distributed training (DDP, FSDP, DataParallel) is not supported; pass the unwrapped model and train in "
            "one process"
        )


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module wraps a model to train it on several devices."""
    # FSDP is recognised by name, because importing torch.distributed.fsdp takes seconds.
    sharded = any("FSDP" in kind.__name__ or "FullySharded" in kind.__name__ for kind in type(module).__mro__)
    return sharded or isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))


def number(kind: str, value: float, least: float, below: float = math.inf) -> float:
    """A finite number of at least `least` and less than `below`."""
    if not (isinstance(value, numbers.Real) and least <= value < below):
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise ValueError(f"{kind} must be a finite number of at least {least:g}{limit}, not {value!r}")
    return float(value)


def positive(kind: str, value: float) -> float:
    """A finite number above zero."""
    if number(kind, value, 0) == 0:
        raise ValueError(f"{kind} must be a finite number above 0, not {value!r}")
    return float(value)


def integer(kind: str, value: int, least: int) -> int:
    """A whole number of at least `least`; numpy's integers are accepted, True and False are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{kind} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def one_of(kind: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{kind} must be one of {allowed}, not {value!r}")
    return value
