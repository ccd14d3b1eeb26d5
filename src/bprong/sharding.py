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
        """Return the form of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)


def from_owners(
    ranks: Ranks, owners: Mapping[Key, int], forms: Mapping[Key, Form], owned: Mapping[Key, Tensor]
) -> dict[Key, Tensor]:
    """Return tensors from the ranks that own them, on all ranks.

    forms: of all tensors, the same on all ranks
    owned: those that this rank owns
    """
    tensors: dict[Key, Tensor] = {}
    kinds = {(owners[key], form.dtype, form.device) for key, form in forms.items()}
    for kind in sorted(kinds, key=str):
        owner, dtype, device = kind
        keys = [key for key, form in forms.items() if (owners[key], form.dtype, form.device) == kind]
        sizes = [math.prod(forms[key].shape) for key in keys]
        buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
        if owner == ranks.rank:
            buffer = torch.cat([owned[key].reshape(-1) for key in keys])
        for key, part in zip(keys, torch.split(ranks.received(buffer, owner), sizes), strict=True):
            tensors[key] = part.view(forms[key].shape)
    return {key: tensors[key] for key in forms}


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
        """Return whether this rank owns the layer of this name."""
        return self.owners[name] == self.ranks.rank

    def collected(self, values: Mapping[Tensor, Tensor]) -> Mapping[Tensor, Tensor]:
        """Return the values of the parameters that this rank owns, whole."""
        return _slices_to_owners(self.ranks, self.parameters, values)

    def distributed(self, owned: Mapping[Tensor, Tensor], values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return slices of what was computed from values, each by its owner.

        owned: for the parameters that this rank owns, whole, in at least float32
        """
        return _slices_from_owners(self.ranks, self.parameters, owned, values)


# Slices of parameters -------------------------------------------------------------------------------------------------


def is_sliced(tensor: Any) -> bool:
    """Return whether this process has a slice of a tensor only (a DTensor; importing that class takes a second)."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the slice that this process has; the tensor itself, if that is not sliced."""
    if not is_sliced(tensor):
        return tensor
    part: Tensor = cast(Any, tensor.detach()).to_local()
    return part


def summed(value: float, of: Iterable[Tensor]) -> float:
    """Return the sum over all processes of what each computed from its slices; the value, if nothing is sliced."""
    mesh = next((tensor.device_mesh for tensor in of if is_sliced(tensor)), None)  # type: ignore[attr-defined]
    if mesh is None:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    torch.distributed.all_reduce(total, group=mesh.get_group())
    return float(total)


def _lengths(tensor: Any, ranks: int) -> list[int]:
    """Return the lengths of the slices of all ranks, along the dimension that is sliced; the last may be empty."""
    length = tensor.shape[tensor.placements[0].dim]
    each = -(-length // ranks)
    return [min(each, max(0, length - rank * each)) for rank in range(ranks)]


def _shapes(tensor: Any, ranks: int) -> list[list[int]]:
    """Return the shapes of the slices of all ranks."""
    dim = tensor.placements[0].dim
    return [[*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]] for length in _lengths(tensor, ranks)]


def _joined(tensor: Any, slices: Sequence[Tensor]) -> Tensor:
    """Return the whole tensor, from vectors with the slices of all ranks."""
    shapes = _shapes(tensor, len(slices))
    parts = [part.view(shape) for part, shape in zip(slices, shapes, strict=True)]
    return torch.cat(parts, dim=tensor.placements[0].dim)


def _sliced_like(tensor: Any, part: Tensor) -> Tensor:
    """Return a sliced tensor like another one, from the slice of this process."""
    sliced: Tensor = type(tensor).from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return sliced


def _by_dtype(values: Mapping[Tensor, Tensor]) -> Iterator[tuple[torch.dtype, list[Tensor]]]:
    """Yield each dtype with the parameters whose values have it, in the same order on all ranks."""
    for dtype in sorted({value.dtype for value in values.values()}, key=str):
        yield dtype, [p for p, value in values.items() if value.dtype is dtype]


def _slices_to_owners(
    ranks: Ranks, owners: Mapping[Tensor, int], values: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    """Return the whole values of the parameters that this rank owns, from the slices of all ranks."""
    whole_values: dict[Tensor, Tensor] = {}
    for _, parameters in _by_dtype(values):
        by_owner = _by_owner(ranks, owners, parameters)
        owned = by_owner[ranks.rank]
        sent = [_vector([local(values[p]) for p in theirs], values) for theirs in by_owner]
        sizes = _sizes(ranks, owned, values)
        received = ranks.exchanged(sent, list(map(sum, sizes)))
        whole_values |= _joined_slices(owned, values, received, sizes)
    return {p: whole_values[p] for p in values if p in whole_values}


def _slices_from_owners(
    ranks: Ranks, owners: Mapping[Tensor, int], owned: Mapping[Tensor, Tensor], values: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    """Return, on all ranks, slices of the whole tensors that their owners have; values: sliced in the same way."""
    slices: dict[Tensor, Tensor] = {}
    for dtype, parameters in _by_dtype(values):
        by_owner = _by_owner(ranks, owners, parameters)
        chunks = []  # of each tensor that this rank owns, one for each rank
        for p in by_owner[ranks.rank]:
            value: Any = values[p]
            chunks.append(torch.split(owned[p], _lengths(value, ranks.size), dim=value.placements[0].dim))
        sent = []
        for rank in range(ranks.size):
            sent.append(
                _vector([chunk[rank] for chunk in chunks], values).to(torch.promote_types(dtype, torch.float32))
            )
        sizes = [[local(values[p]).numel() for p in theirs] for theirs in by_owner]
        received = ranks.exchanged(sent, list(map(sum, sizes)))
        for theirs, vector, lengths in zip(by_owner, received, sizes, strict=True):
            for p, part in zip(theirs, torch.split(vector, lengths), strict=True):
                slices[p] = _sliced_like(values[p], part.view(local(values[p]).shape))
    return {p: slices[p] for p in values}


def gathered(ranks: Ranks, values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return the whole tensors on all ranks, from the slices of all."""
    whole_values: dict[Tensor, Tensor] = {}
    for _, parameters in _by_dtype(values):
        sizes = _sizes(ranks, parameters, values)
        sent = _vector([local(values[p]) for p in parameters], values)
        padding = sent.new_zeros(max(map(sum, sizes)) - len(sent))  # vectors of all ranks must have one length
        received = ranks.gathered(torch.cat([sent, padding])).to(sent.device)
        vectors = [row[: sum(lengths)] for row, lengths in zip(received, sizes, strict=True)]
        whole_values |= _joined_slices(parameters, values, vectors, sizes)
    return {p: whole_values[p] for p in values}


def _by_owner(ranks: Ranks, owners: Mapping[Tensor, int], parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the parameters that each rank owns."""
    return [[p for p in parameters if owners[p] == rank] for rank in range(ranks.size)]


def _vector(tensors: Sequence[Tensor], values: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the numbers of some tensors in one vector; without any, an empty one like the values."""
    if not tensors:
        return local(next(iter(values.values()))).new_empty(0)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _sizes(ranks: Ranks, parameters: Sequence[Tensor], values: Mapping[Tensor, Tensor]) -> list[list[int]]:
    """Return how many numbers each rank has of each parameter."""
    shapes = [_shapes(values[p], ranks.size) for p in parameters]
    return [[math.prod(shape[rank]) for shape in shapes] for rank in range(ranks.size)]


def _joined_slices(
    parameters: Sequence[Tensor],
    values: Mapping[Tensor, Tensor],
    vectors: Sequence[Tensor],
    sizes: Sequence[Sequence[int]],
) -> dict[Tensor, Tensor]:
    """Return whole values from a vector of each rank, with its slices of these sizes."""
    by_rank = [torch.split(vector, list(lengths)) for vector, lengths in zip(vectors, sizes, strict=True)]
    return {p: _joined(values[p], [slices[i] for slices in by_rank]) for i, p in enumerate(parameters)}


# Models of FSDP2 ------------------------------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model was sharded by `fully_shard`."""
    return any(map(_is_fsdp, model.modules()))


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


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
    sliced: dict[Tensor, Tensor] = {p: p.detach() for _, _, p in places}
    parameters: dict[Tensor, Tensor] = {}
    for p, value in gathered(Ranks.of(model), sliced).items():
        parameters[p] = nn.Parameter(value, p.requires_grad)
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
    modules = list(filter(_is_fsdp, model.modules()))
    for module in modules:
        module.unshard()  # type: ignore[operator]
    parameters: list[Tensor] = list(model.parameters())
    reshard(model)
    return parameters
