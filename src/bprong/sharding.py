"""What of a model each rank has: the factors of some layers and, under FSDP2, slices of all parameters.

`torch.distributed.fsdp.fully_shard` replaces parameters by DTensors, of which each rank has a slice. Each layer is
whitened by its owner: slices of gradients are sent to it, and slices of the direction come back. Passes of our own need
the whole model, which `whole` gathers for as long as they take.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from bprong.distributed import Ranks

Key = TypeVar("Key", bound=Hashable)


class Form(NamedTuple):
    """What is known about a tensor that another rank has."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tensor.shape, tensor.dtype, tensor.device)


def from_owners(
    ranks: Ranks, owners: Mapping[Key, int], forms: Mapping[Key, Form], own: Mapping[Key, Tensor]
) -> dict[Key, Tensor]:
    """Tensors from the ranks that own them, on all ranks.

    forms: of all tensors, the same on all ranks
    own:   those that this rank owns
    """
    found: dict[Key, Tensor] = {}
    kinds = {(owners[key], form.dtype, form.device) for key, form in forms.items()}
    for kind in sorted(kinds, key=str):
        owner, dtype, device = kind
        keys = [key for key, form in forms.items() if (owners[key], form.dtype, form.device) == kind]
        sizes = [math.prod(forms[key].shape) for key in keys]
        buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
        if owner == ranks.rank:
            buffer = torch.cat([own[key].reshape(-1) for key in keys])
        for key, part in zip(keys, torch.split(ranks.received(buffer, owner), sizes), strict=True):
            found[key] = part.view(forms[key].shape)
    return {key: found[key] for key in forms}


@dataclass(frozen=True)
class Sharding:
    """Each rank keeps the factors of some layers, and computes what these need.

    owners:     the rank of each layer, by name
    parameters: the rank that has the layers of each parameter
    """

    ranks: Ranks
    owners: Mapping[str, int]
    parameters: Mapping[Tensor, int]

    def is_own(self, name: str) -> bool:
        return self.owners[name] == self.ranks.rank

    def collected(self, values: Mapping[Tensor, Tensor]) -> Mapping[Tensor, Tensor]:
        """The values of the parameters that this rank owns, whole."""
        return _slices_to_owners(self.ranks, self.parameters, values)

    def distributed(self, own: Mapping[Tensor, Tensor], values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Slices of what was computed from values, each by its owner.

        own: for the parameters that this rank owns, whole, in at least float32
        """
        return _slices_from_owners(self.ranks, self.parameters, own, values)


# Slices of parameters -------------------------------------------------------------------------------------------------


def is_sliced(tensor: Any) -> bool:
    """Whether this process has a slice of a tensor only (a DTensor; importing that class takes a second)."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """The slice that this process has; the tensor itself, if that is not sliced."""
    found: Tensor = cast(Any, tensor.detach()).to_local() if is_sliced(tensor) else tensor
    return found


def summed(value: float, of: Iterable[Tensor]) -> float:
    """The sum over all processes of what each has computed from its slices; the value itself, if nothing is sliced."""
    mesh = next((tensor.device_mesh for tensor in of if is_sliced(tensor)), None)  # type: ignore[attr-defined]
    if mesh is None:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    torch.distributed.all_reduce(total, group=mesh.get_group())
    return float(total)


def _lengths(tensor: Any, ranks: int) -> list[int]:
    """The lengths of the slices of all ranks, along the dimension that is sliced; those of the last may be empty."""
    length = tensor.shape[tensor.placements[0].dim]
    each = -(-length // ranks)
    return [max(0, min(length, (rank + 1) * each) - rank * each) for rank in range(ranks)]


def _shapes(tensor: Any, ranks: int) -> list[list[int]]:
    """The shapes of the slices of all ranks."""
    dim = tensor.placements[0].dim
    return [[*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]] for length in _lengths(tensor, ranks)]


def _joined(tensor: Any, slices: Sequence[Tensor]) -> Tensor:
    """The whole tensor, from vectors with the slices of all ranks."""
    shapes = _shapes(tensor, len(slices))
    parts = [part.view(shape) for part, shape in zip(slices, shapes, strict=True)]
    return torch.cat(parts, dim=tensor.placements[0].dim)


def _sliced_like(tensor: Any, part: Tensor) -> Tensor:
    """A sliced tensor like another one, from the slice of this process."""
    found: Tensor = type(tensor).from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return found


def _by_dtype(values: Mapping[Tensor, Tensor]) -> Iterator[tuple[torch.dtype, list[Tensor]]]:
    """The parameters whose values have one dtype, in the same order on all ranks."""
    for dtype in sorted({value.dtype for value in values.values()}, key=str):
        yield dtype, [p for p, value in values.items() if value.dtype is dtype]


def _slices_to_owners(
    ranks: Ranks, owners: Mapping[Tensor, int], values: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    """The whole values of the parameters that this rank owns, from the slices of all ranks."""
    found: dict[Tensor, Tensor] = {}
    for _, parameters in _by_dtype(values):
        sent = [
            torch.cat([local(values[p]).reshape(-1) for p in parameters if owners[p] == rank] or [_nothing(values)])
            for rank in range(ranks.size)
        ]
        own = [p for p in parameters if owners[p] == ranks.rank]
        sizes = {p: [math.prod(shape) for shape in _shapes(values[p], ranks.size)] for p in own}
        received = ranks.exchanged(sent, [sum(sizes[p][rank] for p in own) for rank in range(ranks.size)])
        parts = [torch.split(part, [sizes[p][i] for p in own]) for i, part in enumerate(received)]
        found |= {p: _joined(values[p], [part[i] for part in parts]) for i, p in enumerate(own)}
    return {p: found[p] for p in values if p in found}


def _slices_from_owners(
    ranks: Ranks, owners: Mapping[Tensor, int], own: Mapping[Tensor, Tensor], values: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    """Slices of whole tensors, which their owners have, on all ranks; values: sliced alike."""
    found: dict[Tensor, Tensor] = {}
    for dtype, parameters in _by_dtype(values):
        mine = [p for p in parameters if owners[p] == ranks.rank]
        chunks = {
            p: torch.split(own[p], _lengths(values[p], ranks.size), dim=values[p].placements[0].dim)  # type: ignore[attr-defined]
            for p in mine
        }
        sent = [
            torch.cat([chunks[p][rank].reshape(-1) for p in mine] or [_nothing(values)]).to(
                torch.promote_types(dtype, torch.float32)
            )
            for rank in range(ranks.size)
        ]
        by_owner = [[p for p in parameters if owners[p] == rank] for rank in range(ranks.size)]
        sizes = [[local(values[p]).numel() for p in theirs] for theirs in by_owner]
        received = ranks.exchanged(sent, list(map(sum, sizes)))
        for theirs, part, lengths in zip(by_owner, received, sizes, strict=True):
            for p, values_of_p in zip(theirs, torch.split(part, lengths), strict=True):
                found[p] = _sliced_like(values[p], values_of_p.view(local(values[p]).shape))
    return {p: found[p] for p in values}


def _nothing(values: Mapping[Tensor, Tensor]) -> Tensor:
    return local(next(iter(values.values()))).new_empty(0)


def gathered(ranks: Ranks, values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The whole tensors on all ranks, from the slices of all."""
    found: dict[Tensor, Tensor] = {}
    for _, parameters in _by_dtype(values):
        sizes = [[math.prod(shape) for shape in _shapes(values[p], ranks.size)] for p in parameters]
        most = max(map(sum, zip(*sizes, strict=True)))
        own = torch.cat([local(values[p]).reshape(-1) for p in parameters])
        received = ranks.gathered(torch.cat([own, own.new_zeros(most - len(own))])).to(own.device)
        rows = [
            torch.split(row[: sum(lengths)], list(lengths))
            for row, lengths in zip(received, zip(*sizes, strict=True), strict=True)
        ]
        found |= {p: _joined(values[p], [row[i] for row in rows]) for i, p in enumerate(parameters)}
    return {p: found[p] for p in values}


# Models of FSDP2 ------------------------------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether a model was sharded by `fully_shard`."""
    return any(map(_is_fsdp, model.modules()))


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def written_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module as it was written: `fully_shard` makes a subclass, FSDPLinear of Linear."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


@contextmanager
def whole(model: nn.Module) -> Iterator[Mapping[Tensor, Tensor]]:
    """Puts whole parameters into a sharded model; gives them by those that are sliced.

    To be entered by all ranks. They have the precision of the slices, whatever FSDP computes in. In a pass of our own
    FSDP's hooks are not called. Without FSDP this does nothing.
    """
    if not is_sharded(model):
        yield {}
        return
    reshard(model)
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    sliced: dict[Tensor, Tensor] = {p: p.detach() for _, _, p in places}
    found: dict[Tensor, Tensor] = {
        p: nn.Parameter(value, p.requires_grad) for p, value in gathered(Ranks.of(model), sliced).items()
    }
    try:
        for module, name, p in places:
            setattr(module, name, found[p])
        yield found
    finally:
        for module, name, p in places:
            setattr(module, name, p)


def reshard(model: nn.Module) -> None:
    """Leaves each rank its slices. After a forward pass without a backward pass some parameters are still whole."""
    for module in filter(_is_fsdp, model.modules()):
        module.reshard()  # type: ignore[operator]


def leaves(model: nn.Module) -> list[Tensor]:
    """The parameters as autograd sees them when the model runs: of a sharded model FSDP's whole ones.

    To be called by all ranks, before the model runs.
    """
    modules = list(filter(_is_fsdp, model.modules()))
    for module in modules:
        module.unshard()  # type: ignore[operator]
    found: list[Tensor] = list(model.parameters())
    reshard(model)
    return found
