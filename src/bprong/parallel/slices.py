"""What of a model each rank has: the factors of some layers and, under FSDP2, slices of all parameters.

`torch.distributed.fsdp.fully_shard` replaces parameters by DTensors, of which each rank has a slice. Each layer is
whitened by its owner: slices of gradients are sent to it, and slices of the direction come back. Passes of our own need
the whole model, which `whole` gathers for as long as they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from bprong.parallel.processes import Ranks


def is_sliced(tensor: Any) -> bool:
    """Return whether this process has a slice of a tensor only (a DTensor; importing that class takes a second)."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the slice that this process has; the tensor itself, if that is not sliced."""
    if not is_sliced(tensor):
        return tensor
    part: Tensor = cast(Any, tensor.detach()).to_local()
    return part


def summed(value: float, of: Iterable[Any]) -> float:
    """Return the sum over all processes of what each computed from its slices; the value, if nothing is sliced."""
    for tensor in of:
        if is_sliced(tensor):
            return Ranks(tensor.device_mesh.get_group()).sums(1, lambda: [value])[0]
    return value


def gathered(values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
    """Return whole tensors on all ranks, from the slices of all."""
    return {p: value.full_tensor() for p, value in values.items()}


@dataclass(frozen=True)
class Sharding:
    """Each rank keeps the factors of some layers, and computes what these need.

    owners:     the rank of each layer, by name
    parameters: the rank that has the layers of each parameter

    Slices are exchanged parameter by parameter, so that no rank has more whole tensors than it owns.
    """

    ranks: Ranks
    owners: Mapping[str, int]
    parameters: Mapping[Tensor, int]

    def is_own(self, name: str) -> bool:
        """Return whether this rank owns the layer of this name."""
        return self.owners[name] == self.ranks.rank

    def collected(self, values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return the values of the parameters that this rank owns, whole."""
        owned = {}
        for p, value in values.items():
            dim = value.placements[0].dim
            part = local(value)
            padded = self._empty_slice(value)
            padded.narrow(dim, 0, part.shape[dim]).copy_(part)
            parts = self.ranks.collected(padded, self.parameters[p])
            if parts:
                owned[p] = torch.cat(parts, dim=dim).narrow(dim, 0, value.shape[dim])
        return owned

    def distributed(self, owned: Mapping[Tensor, Tensor], values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return slices of what was computed from values, each by its owner.

        owned: for the parameters that this rank owns, whole, in at least float32
        """
        slices = {}
        for p, value in values.items():
            dim = value.placements[0].dim
            like = self._empty_slice(value).to(torch.promote_types(value.dtype, torch.float32))
            parts: Sequence[Tensor] = ()
            if p in owned:
                padded = torch.cat([like] * self.ranks.size, dim=dim)
                padded.narrow(dim, 0, value.shape[dim]).copy_(owned[p])
                parts = padded.chunk(self.ranks.size, dim)
            part = self.ranks.distributed(parts, self.parameters[p], like).narrow(dim, 0, local(value).shape[dim])
            slices[p] = type(value).from_local(
                part, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        return slices

    def _empty_slice(self, value: Any) -> Tensor:
        """Return room for a slice that is as long as the longest: the last ones may be shorter, or empty."""
        shape = list(value.shape)
        dim = value.placements[0].dim
        shape[dim] = -(-shape[dim] // self.ranks.size)
        return local(value).new_empty(shape)


# Models of FSDP2 ------------------------------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model was sharded by `fully_shard`."""
    return any(map(_is_fsdp, model.modules()))


def _is_fsdp(module: nn.Module) -> bool:
    return written_type(module) is not type(module)


def written_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was written: `fully_shard` makes a subclass, FSDPLinear of Linear."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


@contextmanager
def whole(model: nn.Module) -> Iterator[Mapping[Tensor, Tensor]]:
    """Put whole parameters into a sharded model while the context is active; yield them by those that are sliced.

    To be entered by all ranks. They have the precision of the slices, whatever FSDP computes in. In a pass of our own
    FSDP's hooks are not called. Without FSDP this does nothing.
    """
    if not is_sharded(model):
        yield {}
        return
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
    """Return the parameters as autograd sees them when the model runs: of a sharded model FSDP's whole ones.

    To be called by all ranks, before the model runs.
    """
    for module in filter(_is_fsdp, model.modules()):
        module.unshard()  # type: ignore[operator]
    parameters: list[Tensor] = list(model.parameters())
    reshard(model)
    return parameters
