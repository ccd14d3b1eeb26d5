"""Which models are accepted, and those of FSDP2, of whose parameters each rank has slices (DTensors).

`torch.distributed.fsdp.fully_shard` replaces parameters by DTensors. Passes of our own need the whole model, which
`whole_model` gathers for as long as they take. `unwrapped` refuses what is not supported: tensor
parallelism, for example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

# Which models are accepted -------------------------------------------------------------------------------------------

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
    is_sharded = fully_sharded and _is_fsdp(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    for name, module in model.named_modules():
        wrapper = wrapper_of(module)
        if wrapper and not (is_sharded and wrapper == "fully_shard"):
            raise ValueError(
                f"{f'its module {name!r}' if name else 'the model'} is wrapped for {wrapper}, which is not supported. "
                f"To train in several processes, wrap the whole model in torch.nn.parallel.DistributedDataParallel. "
                f"For BPRONG and PRONG you can shard the whole model too: fully_shard(model)"
            )
    for name, parameter in model.named_parameters():
        placements = getattr(parameter, "placements", None)  # of a DTensor
        if is_sharded and [getattr(placement, "dim", None) for placement in placements or ()] != [0]:
            raise ValueError(
                f"parameter {name!r} is not sharded by rows over a mesh of one dimension, but placed {placements}. "
                f"fully_shard(model) without ignored_params does that; HSDP and tensor parallelism are not supported"
            )
        if placements and not is_sharded:
            raise ValueError(f"parameter {name!r} is a DTensor: tensor-parallel models are not supported")
    return model


# Models of FSDP2 ------------------------------------------------------------------------------------------------------


def _is_fsdp(module: nn.Module) -> bool:
    return written_type(module) is not type(module)


def written_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was written: `fully_shard` makes a subclass, FSDPLinear of Linear."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


@contextmanager
def whole_model(model: nn.Module) -> Iterator[Mapping[Tensor, Tensor]]:
    """See `Ranks.whole`.

    Parameters have the precision of the slices, whatever FSDP computes in. In a pass of our own FSDP's hooks are not
    called.
    """
    reshard(model)
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    parameters: dict[Tensor, Tensor] = {}
    for p in model.parameters():
        values = cast(Any, p.detach()).full_tensor()
        parameters[p] = nn.Parameter(values.clone(), p.requires_grad)  # the slice of a single rank is the whole tensor
    try:
        for module, name, p in places:
            setattr(module, name, parameters[p])
        yield parameters
    finally:
        for module, name, p in places:
            setattr(module, name, p)


def reshard(model: nn.Module) -> None:
    """Leave each rank its slices. After a forward pass without a backward pass some parameters are still whole."""
    for module in filter(_is_fsdp, model.modules()):
        module.reshard()  # type: ignore[operator]


def leaves(model: nn.Module) -> list[Tensor]:
    """Return the parameters of a sharded model as autograd sees them when it runs: FSDP's whole ones; else none.

    To be called by all ranks, before the model runs.
    """
    modules = list(filter(_is_fsdp, model.modules()))
    for module in modules:
        module.unshard()  # type: ignore[operator]
    parameters: list[Tensor] = list(model.parameters()) if modules else []
    reshard(model)
    return parameters
