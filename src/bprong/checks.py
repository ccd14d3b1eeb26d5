"""Checks of what a user typed. Each error says what was given, what is required and what to do."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, nn


def period(kind: str, every: int, offset: int | None) -> tuple[int, int]:
    """Return the paper's τ and c as integers; the default offset is half of the period."""
    tau = integer(f"{kind}_every", every, 1)
    c = tau // 2 if offset is None else integer(f"{kind}_offset", offset, 0)
    if c >= tau:
        raise ValueError(f"{kind}_offset must lie in 0 … {kind}_every − 1 = {tau - 1}, not {offset!r}")
    return tau, c


def pair(samples: Any) -> Any:
    """Return (x, y) from x or from (x, y); None stays None."""
    if isinstance(samples, tuple) and len(samples) != 2:
        raise ValueError(
            f"samples must be x or (x, y), not a tuple of {len(samples)}; give several inputs as ((x1, x2), y)"
        )
    return samples if samples is None or isinstance(samples, tuple) else (samples, None)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module wraps a model to train it on several devices."""
    return bool(_kind_of_wrapper(module))


def _kind_of_wrapper(module: nn.Module) -> str:
    """Return the name of what wraps a module; empty if nothing does."""
    # FSDP is recognised by name, because importing torch.distributed.fsdp takes seconds.
    names = {kind.__name__ for kind in type(module).__mro__}
    if "FSDPModule" in names:
        return "fully_shard"
    if any("FullySharded" in name for name in names):
        return "FullyShardedDataParallel"
    kinds = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return next((kind.__name__ for kind in kinds if isinstance(module, kind)), "")


def unwrapped(model: nn.Module, fully_sharded: bool = False) -> nn.Module:
    """Return the model inside of DistributedDataParallel; raise ValueError for other ways to train on several devices.

    fully_sharded: whether a model that was sharded as a whole by FSDP2's `fully_shard` is accepted too
    """
    if isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel):
        raise ValueError(
            "torch.compile around DistributedDataParallel hides what the model is called with. Compile the model "
            "itself: DistributedDataParallel(torch.compile(model))"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    elif fully_sharded and _kind_of_wrapper(model) == "fully_shard":
        _check_slices(model)
        return model
    for name, module in model.named_modules():
        if kind := _kind_of_wrapper(module):
            what = f"its module {name!r}" if name else "the model"
            raise ValueError(
                f"{what} is wrapped for {kind}, which is not supported. To train in several processes, wrap the whole "
                f"model in torch.nn.parallel.DistributedDataParallel"
                + (", or shard the whole model too: fully_shard(model)" if fully_sharded else "")
            )
    for name, parameter in model.named_parameters():
        if _is_dtensor(parameter):
            raise ValueError(f"parameter {name!r} is a DTensor: tensor-parallel models are not supported")
    return model


def _check_slices(model: nn.Module) -> None:
    """Raise ValueError unless every parameter is split between all ranks, along one dimension."""
    for name, module in model.named_modules():
        if (kind := _kind_of_wrapper(module)) not in ("", "fully_shard"):
            raise ValueError(f"its module {name!r} is wrapped for {kind}, which cannot be combined with fully_shard")
    for name, p in model.named_parameters():
        if not _is_dtensor(p):
            raise ValueError(f"parameter {name!r} is not sharded; fully_shard(model) without ignored_params does that")
        placements = cast(Any, p).placements
        if len(placements) != 1 or type(placements[0]).__name__ != "Shard":
            raise ValueError(
                f"parameter {name!r} is placed {placements} on a mesh of {len(placements)} dimensions. Shard over a "
                f"mesh of one dimension; HSDP and tensor parallelism are not supported"
            )


def _is_dtensor(parameter: Any) -> bool:
    return type(parameter.data).__name__ == "DTensor"


def number(kind: str, value: float, minimum: float, below: float = math.inf) -> float:
    """Return a finite number of at least `minimum` and less than `below`; raise ValueError for anything else.

    A tensor with one number, as torch's own optimizers take it, is a number.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not (isinstance(value, numbers.Real) and minimum <= value < below):
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise ValueError(f"{kind} must be a finite number of at least {minimum:g}{limit}, not {value!r}")
    return float(value)


def positive(kind: str, value: float) -> float:
    """Return a finite number above zero; raise ValueError for anything else."""
    if number(kind, value, 0) == 0:
        raise ValueError(f"{kind} must be a finite number above 0, not {value!r}")
    return float(value)


def integer(kind: str, value: int, minimum: int) -> int:
    """Return a whole number of at least `minimum`; numpy's integers are accepted, True and False raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{kind} must be a whole number of at least {minimum}, not {value!r}")
    return int(value)


def one_of(kind: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return a value that is allowed; raise ValueError for any other."""
    if value not in allowed:
        raise ValueError(f"{kind} must be one of {allowed}, not {value!r}")
    return value


Function = TypeVar("Function", bound=Callable[..., Any])


_INSTEAD = {
    "likelihood": "likelihood= is now called loss=, and takes the loss that you minimise",
    "betas": "there are no betas= here. Give momentum=; parameters that are not whitened follow Adam, with "
    "options={'fallback_betas': (0.9, 0.999)}",
    "eps": "there is no eps= here. What is added to eigenvalues is forward_damping= and backward_damping=",
    "nesterov": "there is no nesterov= here: spectral steps have Nesterov's form of momentum, natural steps do not",
    "solver": "solver= is an option: options={'solver': …}",
    "max_dim": "max_dim= is an option: options={'max_dim': …}",
    "output": "output= is an option: options={'output': …}",
    "closure": "closure= is an argument of step()",
}  # what to give instead of arguments that other optimizers have


def takes_loss(function: Function) -> Function:
    """Decorate a function with an argument `loss`: arguments of other optimizers raise a TypeError that helps."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in _INSTEAD and name not in parameters:
                raise TypeError(_INSTEAD[name])
        return function(*args, **kwargs)

    return cast(Function, checked)
