"""Checks of what a user typed. Each error says what was given, what is required and what to do."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor, nn


def period(kind: str, every: int, offset: int | None) -> tuple[int, int]:
    """Return the paper's τ and c as integers; the default offset is half of the period."""
    tau = integer(f"{kind}_every", every, 1)
    return tau, tau // 2 if offset is None else integer(f"{kind}_offset", offset, 0, tau)


def pair(samples: Any) -> Any:
    """Return (x, y) from x or from (x, y); None stays None."""
    if isinstance(samples, tuple) and len(samples) != 2:
        raise ValueError(
            f"samples must be x or (x, y), not a tuple of {len(samples)}; give several inputs as ((x1, x2), y)"
        )
    return samples if samples is None or isinstance(samples, tuple) else (samples, None)


# By the beginning of a class's name, because importing torch.distributed.fsdp takes seconds.
_WRAPPERS = {
    "FSDPModule": "fully_shard",
    "FullySharded": "FullyShardedDataParallel",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
}


def wrapper_of(module: nn.Module) -> str | None:
    """Return the name of what wraps a module to train it on several devices, if anything does."""
    for kind in type(module).__mro__:
        for beginning, name in _WRAPPERS.items():
            if kind.__name__.startswith(beginning):
                return name
    return None


def unwrapped(model: nn.Module, fully_sharded: bool = False) -> nn.Module:
    """Return the model inside of DistributedDataParallel; raise ValueError for other ways to train on several devices.

    fully_sharded: whether a model that was sharded as a whole by FSDP2's `fully_shard` is accepted too
    """
    if isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel):
        raise ValueError(
            "torch.compile around DistributedDataParallel hides what the model is called with. Compile the model "
            "itself: DistributedDataParallel(torch.compile(model))"
        )
    is_sharded = fully_sharded and wrapper_of(model) == "fully_shard"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    for name, module in model.named_modules():
        wrapper = wrapper_of(module)
        if wrapper and not (is_sharded and wrapper == "fully_shard"):
            raise ValueError(
                f"{f'its module {name!r}' if name else 'the model'} is wrapped for {wrapper}, which is not supported. "
                f"To train in several processes, wrap the whole model in torch.nn.parallel.DistributedDataParallel"
                + (", or shard the whole model too: fully_shard(model)" if fully_sharded else "")
            )
    for name, parameter in model.named_parameters():
        placements = getattr(parameter, "placements", None)  # of a DTensor
        if is_sharded and [type(placement).__name__ for placement in placements or ()] != ["Shard"]:
            raise ValueError(
                f"parameter {name!r} is not sharded over a mesh of one dimension, but placed {placements}. "
                f"fully_shard(model) without ignored_params does that; HSDP and tensor parallelism are not supported"
            )
        if placements and not is_sharded:
            raise ValueError(f"parameter {name!r} is a DTensor: tensor-parallel models are not supported")
    return model


def number(kind: str, value: float, minimum: float, below: float = math.inf) -> float:
    """Return a finite number of at least `minimum` and less than `below`; raise ValueError for anything else.

    A tensor with one number, as torch's own optimizers take it, is a number.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    _check_range(f"{kind} must be a finite number", value, isinstance(value, numbers.Real), minimum, below)
    return float(value)


def positive(kind: str, value: float) -> float:
    """Return a finite number above zero; raise ValueError for anything else."""
    if number(kind, value, 0) == 0:
        raise ValueError(f"{kind} must be a finite number above 0, not {value!r}")
    return float(value)


def integer(kind: str, value: int, minimum: int, below: float = math.inf) -> int:
    """Return a whole number of at least `minimum` and less than `below`; raise ValueError for anything else.

    numpy's integers are accepted, True and False are not.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _check_range(f"{kind} must be a whole number", value, is_whole, minimum, below)
    return int(value)


def _check_range(requirement: str, value: Any, is_number: bool, minimum: float, below: float) -> None:
    if not (is_number and minimum <= value < below):
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise ValueError(f"{requirement} of at least {minimum:g}{limit}, not {value!r}")


def one_of(kind: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return a value that is allowed; raise ValueError for any other."""
    if value not in allowed:
        raise ValueError(f"{kind} must be one of {allowed}, not {value!r}")
    return value
