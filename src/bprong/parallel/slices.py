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

    Slices are exchanged in one message for each owner and dtype, so that no rank has more whole tensors than it owns.
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
        for owner, parameters in self._by_owner(values):
            padded = []
            for p in parameters:
                dim = values[p].placements[0].dim
                room = self._empty_slice(values[p])
                part = local(values[p])
                room.narrow(dim, 0, part.shape[dim]).copy_(part)
                padded.append(room)
            vectors = self.ranks.collected(_joined(padded), owner)
            by_rank = [_split(vector, padded) for vector in vectors]
            for i, p in enumerate(parameters if vectors else ()):
                dim = values[p].placements[0].dim
                whole_value = torch.cat([slices[i] for slices in by_rank], dim=dim)
                owned[p] = whole_value.narrow(dim, 0, values[p].shape[dim])
        return owned

    def distributed(self, owned: Mapping[Tensor, Tensor], values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return slices of what was computed from values, each by its owner.

        owned: for the parameters that this rank owns, whole, in at least float32
        """
        slices: dict[Tensor, Tensor] = {}
        for owner, parameters in self._by_owner(values):
            rooms = []
            for p in parameters:
                rooms.append(self._empty_slice(values[p]).to(torch.promote_types(values[p].dtype, torch.float32)))
            chunks = []  # of each tensor that this rank owns, one for each rank
            for p, room in zip(parameters if owner == self.ranks.rank else (), rooms, strict=False):
                dim = values[p].placements[0].dim
                padded = torch.cat([room] * self.ranks.size, dim=dim)
                padded.narrow(dim, 0, values[p].shape[dim]).copy_(owned[p])
                chunks.append(padded.chunk(self.ranks.size, dim))
            vectors = [_joined(parts) for parts in zip(*chunks, strict=True)]
            received = self.ranks.distributed(vectors, owner, _joined(rooms))
            for p, part in zip(parameters, _split(received, rooms), strict=True):
                slices[p] = _sliced_like(values[p], part)
        return {p: slices[p] for p in values}

    def _by_owner(self, values: Mapping[Tensor, Any]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each owner with its parameters of one dtype."""
        groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for p, value in values.items():
            groups.setdefault((self.parameters[p], value.dtype), []).append(p)
        for (owner, _), parameters in groups.items():
            yield owner, parameters

    def _empty_slice(self, value: Any) -> Tensor:
        """Return room for a slice that is as long as the longest: the last ones may be shorter, or empty."""
        shape = list(value.shape)
        dim = value.placements[0].dim
        shape[dim] = -(-shape[dim] // self.ranks.size)
        return local(value).new_empty(shape)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of some tensors in one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that were joined in a vector; like: their shapes."""
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _sliced_like(value: Any, part: Tensor) -> Tensor:
    """Return a tensor of which this rank has a slice, cut as another one; part: it may be padded."""
    dim = value.placements[0].dim
    sliced: Tensor = type(value).from_local(
        part.narrow(dim, 0, local(value).shape[dim]),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return sliced


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
