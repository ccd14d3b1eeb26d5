"""What of a model each rank has: the factors of some layers and, under FSDP2, slices of all parameters (DTensors).

`torch.distributed.fsdp.fully_shard` replaces parameters by DTensors, of which each rank has a slice. Each layer is
whitened by its owner: slices of gradients are gathered, and the owner broadcasts the direction. Passes of our own need
the whole model, which `whole_model` gathers for as long as they take. `unwrapped` refuses what is not supported: tensor
parallelism, for example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from bprong.linalg.moments import at_least_float32

if TYPE_CHECKING:
    from bprong.parallel.processes import Ranks


@dataclass(frozen=True)
class Sharding:
    """What slices of parameters and whole ones are exchanged by; parameters: the rank that has the layers of each."""

    ranks: Ranks
    parameters: Mapping[Tensor, int]

    def collected(self, values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return the values of the parameters that this rank owns, whole, from the slices of all ranks."""
        owned = {}
        for p in filter(self.parameters.__contains__, values):
            value = values[p]
            part = value.to_local()
            longest = -(-len(value) // self.ranks.size)  # the last slices may be shorter, or empty
            padded = part.new_empty(longest, *part.shape[1:])
            padded[: len(part)] = part
            parts = self.ranks.gathered(padded)
            if self.parameters[p] == self.ranks.rank:
                owned[p] = parts.flatten(0, 1)[: len(value)]
        return owned

    def distributed(self, owned: Mapping[Tensor, Tensor], values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return slices of what was computed from values, each by its owner.

        owned: for the parameters that this rank owns, whole, in at least float32
        """
        slices = {}
        for p in filter(self.parameters.__contains__, values):
            value = values[p]
            whole = owned.get(p)
            if whole is None:
                whole = torch.empty(value.shape, dtype=at_least_float32(value.dtype), device=value.device)
            whole = self.ranks.received(whole, self.parameters[p])
            of_all = type(value).from_local(whole, value.device_mesh, run_check=False)
            slices[p] = of_all.redistribute(placements=value.placements)
        return slices


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
                f"To train in several processes, wrap the whole model in torch.nn.parallel.DistributedDataParallel"
                + (", or shard the whole model too: fully_shard(model)" if fully_sharded else "")
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
