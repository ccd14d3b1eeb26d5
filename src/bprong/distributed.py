"""Several processes that train one model: moments are summed over all of them, and factorisations are divided up.

Each rank measures its own batches. At a refresh the moments of all ranks are merged, so that every rank has those of
the whole batch; each side is factored by one rank, its owner, and all ranks receive the factor. In one process nothing
is communicated.

Every collective operation is entered by all ranks or by none. Whatever a rank finds out alone (a layer that its batch
did not reach, an error) is exchanged before anything is decided by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bprong.errors import WhiteningError
from bprong.linalg.blocks import Blocks
from bprong.linalg.factors import (
    DESCRIPTION,
    Elsewhere,
    Factor,
    described_shape,
    described_state,
    description,
    factor_of_state,
)
from bprong.linalg.moments import Moments, add_outer, float64_device

Key = TypeVar("Key", bound=Hashable)
PANEL = 64  # rows of a second moment that are sent as one piece
BUCKET = 2**26  # entries of second moments whose triangles are summed at once: 268 MB
ALIKE = 1e-6  # the relative difference up to which sizes of gradients of two ranks are the same


class Ranks:
    """The processes that train one model together; a group of one where torch.distributed is not in use.

    wrapper: the DistributedDataParallel around the model, if it is known; None: all processes train it

    Whether there are several processes is found out anew each time, since a script may start torch.distributed after
    it has made the optimizer.
    """

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel | None = None) -> None:
        self._wrapper = wrapper
        self._group: Any = None if wrapper is None else wrapper.process_group

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """The ranks that a model is trained by."""
        found = cls(model if isinstance(model, nn.parallel.DistributedDataParallel) else None)
        mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
        found._group = found._group if mesh is None else mesh.get_group()
        return found

    def __reduce__(self) -> tuple[type[Ranks], tuple[()]]:
        return Ranks, ()  # a group of processes cannot be copied

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group) if self.size > 1 else 0

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be sent."""
        return torch.device("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")

    def check(self) -> None:
        """Raises ValueError if ranks may end before others, which would then wait for them."""
        if self._wrapper is not None and self._wrapper._join_config.enable:
            raise ValueError(
                "torch.distributed.algorithms.Join is not supported: ranks that have run out of data would exchange no "
                "statistics. Give all ranks the same number of batches, for example with DistributedSampler"
            )

    # Numbers ----------------------------------------------------------------------------------------------------------

    def table(self, columns: int, compute: Callable[[], Sequence[float]]) -> Tensor:
        """(ranks, columns) what each rank computes, float64. If that fails on some rank, all ranks raise an error."""
        if self.size == 1:
            return torch.tensor([list(compute())], dtype=torch.float64, device="cpu")
        failure: Exception | None = None
        row = [0.0] * columns
        try:
            row = list(compute())
        except Exception as error:  # which must not leave the other ranks waiting
            failure = error
        found = self.gathered(torch.tensor([float(failure is not None), *row], dtype=torch.float64, device="cpu")).cpu()
        if failure is not None:
            raise failure
        if failed := found[:, 0].nonzero().flatten().tolist():
            raise RuntimeError(f"the step was stopped by an error on rank {failed[0]}, which that process reports")
        return found[:, 1:]

    def sums(self, columns: int, compute: Callable[[], Sequence[float]]) -> list[float]:
        """The sums over all ranks of what each computes."""
        return self.table(columns, compute).sum(dim=0).tolist()

    # Tensors ----------------------------------------------------------------------------------------------------------

    def gathered(self, values: Tensor) -> Tensor:
        """(ranks, n) the vectors of all ranks."""
        values = values.to(self.device)
        found = [torch.empty_like(values) for _ in range(self.size)]
        with self._together():
            dist.all_gather(found, values, group=self._group)
        return torch.stack(found)

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place where the tensor can be sent from."""
        sent = values.to(self.device)
        with self._together():
            dist.all_reduce(sent, group=self._group)
        return sent.to(values.device)

    def received(self, values: Tensor, owner: int) -> Tensor:
        """The owner's values; those of other ranks are overwritten where they can be sent from."""
        sent = values.to(self.device)
        source = owner if self._group is None else dist.get_global_rank(self._group, owner)
        with self._together():
            dist.broadcast(sent, source, group=self._group)
        return sent.to(values.device)

    def exchanged(self, values: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """What each rank has sent to this one; values: a vector for each rank; sizes: of what comes from each."""
        sent = torch.cat(list(values)).to(self.device)
        found = sent.new_empty(sum(sizes))
        with self._together():
            dist.all_to_all_single(found, sent, list(sizes), [len(own) for own in values], group=self._group)
        return torch.split(found.to(values[0].device), list(sizes))

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} could not exchange statistics: another process has ended, or has not "
                f"come to this step in time. {error}"
            ) from error


ALONE = Ranks()


# Moments --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one rank contributes to the moments of a side.

    blocks:   of the side
    centred:  whether the moments have a mean
    weight:   of its observations; targets whose errors do not reach the layer count too
    moments:  None: it has none
    owner:    the rank that needs the sum, while the others need its diagonal; None: all ranks need it
    """

    blocks: Blocks
    centred: bool
    weight: float
    moments: Moments | None
    owner: int | None = None


def merged(ranks: Ranks, shares: Sequence[Share], like: Tensor) -> list[Moments | None]:
    """The moments of the observations of all ranks, as one process would have measured them; None: no rank has any.

    Means are exchanged first. Each scatter is then moved to the common mean, and buffers with the triangles of many
    scatters are summed. The common mean is written as a step from one rank's mean, so that a constant feature has a
    variance of exactly zero.
    """
    device = float64_device(like)
    means = [_mean_of(share, device).flatten() for share in shares if share.centred]
    row = [[share.weight, float(share.moments is not None)] for share in shares]
    sent = torch.cat([torch.tensor(row, dtype=torch.float64, device=device).flatten(), *means])
    table = ranks.gathered(sent).to(device)
    weights, present = table[:, : 2 * len(shares)].view(ranks.size, -1, 2).unbind(-1)
    measured = present.any(dim=0).tolist()
    common = _common_means(shares, weights, present, table[:, 2 * len(shares) :])
    totals = weights.sum(dim=0).tolist()
    found: list[Moments | None] = [None] * len(shares)
    for bucket in _buckets(
        [share.blocks.entries if is_any else 0 for share, is_any in zip(shares, measured, strict=True)]
    ):
        triangles = {i: _triangle(_scatter_about(shares[i], common[i], device)) for i in bucket}
        for i, values in _sums(ranks, {i: shares[i] for i in bucket}, triangles).items():
            diagonal = shares[i].owner not in (None, ranks.rank)
            found[i] = Moments(totals[i], common[i], values, diagonal=diagonal)
    return found


def _sums(ranks: Ranks, shares: Mapping[int, Share], triangles: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The sums of triangles over all ranks, as matrices; their diagonals, on ranks that do not own them."""
    everywhere = [i for i, share in shares.items() if share.owner is None]
    found: dict[int, Tensor] = {}
    if everywhere:
        sums = ranks.sum_(torch.cat([triangles[i] for i in everywhere]))
        parts = torch.split(sums, [len(triangles[i]) for i in everywhere])
        found |= {i: _symmetric(part, shares[i].blocks) for i, part in zip(everywhere, parts, strict=True)}
    owned = [[i for i, share in shares.items() if share.owner == rank] for rank in range(ranks.size)]
    own = owned[ranks.rank]
    if len(everywhere) == len(shares):
        return found
    nothing = next(iter(triangles.values())).new_empty(0)
    sent = [torch.cat([triangles[i] for i in theirs] or [nothing]) for theirs in owned]
    sizes = [len(triangles[i]) for i in own]
    total, *others = ranks.exchanged(sent, [sum(sizes)] * ranks.size)
    for part in others:
        total += part
    found |= {i: _symmetric(part, shares[i].blocks) for i, part in zip(own, torch.split(total, sizes), strict=True)}
    diagonals = torch.cat([found[i].diagonal(dim1=-2, dim2=-1).reshape(-1) for i in own] or [nothing])
    lengths = [[math.prod(shares[i].blocks.shape[:-1]) for i in theirs] for theirs in owned]
    for theirs, part, own_lengths in zip(
        owned, ranks.exchanged([diagonals] * ranks.size, list(map(sum, lengths))), lengths, strict=True
    ):
        for i, diagonal in zip(theirs, torch.split(part, own_lengths), strict=True):
            found.setdefault(i, diagonal.view(shares[i].blocks.shape[:-1]))
    return found


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """The places of sizes above zero, in order, in groups whose sizes add up to BUCKET or little more.

    >>> _buckets([3, 0, 2])
    [[0, 2]]
    """
    found: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if size and room <= 0:
            found.append([])
            room = BUCKET
        if size:
            found[-1].append(place)
            room -= size
    return found


def _mean_of(share: Share, device: torch.device) -> Tensor:
    if share.moments is None or share.moments.mean is None:
        return torch.zeros(share.blocks.shape[:-1], dtype=torch.float64, device=device)
    return share.moments.mean.to(torch.float64)


def _common_means(shares: Sequence[Share], weights: Tensor, present: Tensor, means: Tensor) -> list[Tensor | None]:
    """The mean of each side that is centred; weights, present: (ranks, sides); means: (ranks, all features)."""
    found: list[Tensor | None] = []
    start = 0
    for i, share in enumerate(shares):
        if not share.centred:
            found.append(None)
            continue
        shape = share.blocks.shape[:-1]
        end = start + math.prod(shape)
        own = means[:, start:end].reshape(-1, *shape)
        first = own[int(present[:, i].argmax())]
        counted = weights[:, i] * present[:, i]
        parts = (counted / counted.sum().clamp(min=1e-300)).view(-1, *(1 for _ in shape))
        found.append(first + (parts * (own - first)).sum(dim=0))
        start = end
    return found


def _scatter_about(share: Share, mean: Tensor | None, device: torch.device) -> Tensor:
    """The scatter of one rank's observations about the mean of all; zero if it has none."""
    own = share.moments
    if own is None:
        return torch.zeros(share.blocks.shape, dtype=torch.float64, device=device)
    if mean is None or own.mean is None:
        return own.scatter
    away = own.mean - mean
    return add_outer(own.scatter, away, away, own.weight)


def _triangle(scatter: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, or of blocks, as a vector: panels of rows from the diagonal on.

    Panels are copied twenty times as fast as single entries. They have some entries below the diagonal too: 6 % more
    for 1,000 features.
    """
    return torch.cat([scatter[..., i : i + PANEL, i:].reshape(-1) for i in range(0, scatter.shape[-1], PANEL)])


def _symmetric(triangle: Tensor, blocks: Blocks) -> Tensor:
    """The matrix, or the blocks, of such a vector."""
    found = triangle.new_empty(blocks.shape)
    parts = [found[..., i : i + PANEL, i:] for i in range(0, blocks.size, PANEL)]
    for i, (part, values) in enumerate(zip(parts, torch.split(triangle, [p.numel() for p in parts]), strict=True)):
        part.copy_(values.view(part.shape))
        below = (i + 1) * PANEL
        found[..., below:, i * PANEL : below] = part[..., PANEL:].mT
    return found


# Factors --------------------------------------------------------------------------------------------------------------


def assigned(costs: Mapping[Key, float], ranks: int) -> dict[Key, int]:
    """An owner for each item: the costliest first, each to the rank that has the least to do.

    >>> assigned({"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    load = [0.0] * ranks
    owners = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        owners[key] = min(range(ranks), key=lambda rank: load[rank])
        load[owners[key]] += costs[key]
    return {key: owners[key] for key in costs}


NUMBERS = DESCRIPTION + 1  # sent about a factor: its description and its cost


def shared(
    ranks: Ranks, owners: Mapping[Key, int], like: Mapping[Key, tuple[Blocks, Tensor]],
    solve: Callable[[Sequence[Key]], Mapping[Key, Factor | WhiteningError]], everywhere: bool = True,
) -> dict[Key, Factor | WhiteningError]:  # fmt: skip
    """Factors that each rank computes for what it owns.

    like:        the blocks of each side, and a tensor with the dtype and device of its factor
    solve:       the factors of some sides, with an error for each that has none
    everywhere:  whether all ranks receive them; otherwise they know that their owners have them
    """
    own: dict[Key, Factor | WhiteningError] = {}

    def described() -> list[float]:
        own.update(solve([key for key, owner in owners.items() if owner == ranks.rank]))
        return [number for key in owners for number in _described(own.get(key))]

    table = ranks.table(NUMBERS * len(owners), described).view(ranks.size, -1, NUMBERS)
    numbers = {key: table[owner, i].tolist() for i, (key, owner) in enumerate(owners.items())}
    found: dict[Key, Factor | WhiteningError] = {}
    for key, (kind, *_) in numbers.items():
        if kind == 0:
            found[key] = own.get(key) or WhiteningError(f"rank {owners[key]}, which factors it, could not do so")
    if not everywhere:
        remote = {k: Elsewhere(owners[k], int(numbers[k][-1]), like[k][1].dtype) for k in owners if k not in found}
        return {key: found.get(key) or own.get(key) or remote[key] for key in owners}
    for owner, dtype in sorted({(owners[key], like[key][1].dtype) for key in owners}, key=str):
        keys = [k for k in owners if owners[k] == owner and like[k][1].dtype is dtype and k not in found]
        sizes = [described_shape(numbers[key]) for key in keys]
        device = like[keys[0]][1].device if keys else None
        buffer = torch.empty(sum(map(math.prod, sizes)), dtype=dtype, device=device)
        if owner == ranks.rank and keys:
            buffer = torch.cat([_tensor(own[key]).flatten() for key in keys])
        parts = torch.split(ranks.received(buffer, owner), [math.prod(size) for size in sizes]) if keys else ()
        for key, size, part in zip(keys, sizes, parts, strict=True):
            state = described_state(numbers[key], part.view(size))
            found[key] = factor_of_state(cast(dict[str, Any], state), *like[key])
    return {key: found[key] for key in owners}


def _described(factor: Factor | WhiteningError | None) -> list[float]:
    if not isinstance(factor, Factor):
        return [0.0] * NUMBERS
    return [*description(factor), float(factor.cost)]


def _tensor(factor: Factor | WhiteningError) -> Tensor:
    assert isinstance(factor, Factor)
    (tensor,) = factor.tensors().values()
    return tensor
