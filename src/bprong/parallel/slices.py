"""What of a model each rank has: the factors of some layers and, under FSDP2, slices of all parameters (DTensors).

`torch.distributed.fsdp.fully_shard` replaces parameters by DTensors, of which each rank has a slice. Each layer is
whitened by its owner: slices of gradients are sent to it, and slices of the direction come back. Passes of our own need
the whole model, which `whole_model` gathers for as long as they take.
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
        for p, value in values.items():
            dim = value.placements[0].dim
            part = value.to_local()
            padded = self._longest_slice(value)
            padded.narrow(dim, 0, part.shape[dim]).copy_(part)
            parts = self.ranks.collected(padded, self.parameters[p])
            if parts:
                owned[p] = torch.cat(parts, dim).narrow(dim, 0, value.shape[dim])
        return owned

    def distributed(self, owned: Mapping[Tensor, Tensor], values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return slices of what was computed from values, each by its owner.

        owned: for the parameters that this rank owns, whole, in at least float32
        """
        slices = {}
        for p, value in values.items():
            dim = value.placements[0].dim
            part = self._longest_slice(value).to(at_least_float32(value.dtype))
            parts: tuple[Tensor, ...] = ()  # one for each rank
            if self.parameters[p] == self.ranks.rank:
                padded = torch.cat([part] * self.ranks.size, dim)
                padded.narrow(dim, 0, value.shape[dim]).copy_(owned[p])
                parts = padded.chunk(self.ranks.size, dim)
            part = self.ranks.distributed(parts, self.parameters[p], part)
            slices[p] = type(value).from_local(
                part.narrow(dim, 0, value.to_local().shape[dim]),
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        return slices

    def _longest_slice(self, value: Any) -> Tensor:
        """Return room for a slice that is as long as the longest: the last ones may be shorter, or empty."""
        shape = list(value.shape)
        dim = value.placements[0].dim
        shape[dim] = -(-shape[dim] // self.ranks.size)
        room: Tensor = value.to_local().new_empty(shape)
        return room


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
