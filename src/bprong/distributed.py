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
        """Return the ranks that a model is trained by."""
        ranks = cls(model if isinstance(model, nn.parallel.DistributedDataParallel) else None)
        for parameter in model.parameters():
            if hasattr(parameter, "device_mesh"):
                ranks._group = parameter.device_mesh.get_group()
                break
        return ranks

    def __reduce__(self) -> tuple[type[Ranks], tuple[()]]:
        return Ranks, ()  # a group of processes cannot be copied

    @property
    def size(self) -> int:
        """The number of processes."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """The number of this process, from 0 on."""
        return dist.get_rank(self._group) if self.size > 1 else 0

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be sent."""
        return torch.device("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")

    def check(self) -> None:
        """Raise ValueError if ranks may end before others, which would then wait for them."""
        if self._wrapper is not None and self._wrapper._join_config.enable:
            raise ValueError(
                "torch.distributed.algorithms.Join is not supported: ranks that have run out of data would exchange no "
                "statistics. Give all ranks the same number of batches, for example with DistributedSampler"
            )

    # Numbers ----------------------------------------------------------------------------------------------------------

    def table(self, columns: int, compute: Callable[[], Sequence[float]]) -> Tensor:
        """Return what each rank computes: (ranks, columns), float64. If that fails on one rank, all raise an error."""
        if self.size == 1:
            return torch.tensor([list(compute())], dtype=torch.float64, device="cpu")
        failure: Exception | None = None
        row = [0.0] * columns
        try:
            row = list(compute())
        except Exception as error:  # which must not leave the other ranks waiting
            failure = error
        sent = torch.tensor([float(failure is not None), *row], dtype=torch.float64, device="cpu")
        rows = self.gathered(sent).cpu()
        if failure is not None:
            raise failure
        if failed := rows[:, 0].nonzero().flatten().tolist():
            raise RuntimeError(f"the step was stopped by an error on rank {failed[0]}, which that process reports")
        return rows[:, 1:]

    def sums(self, columns: int, compute: Callable[[], Sequence[float]]) -> list[float]:
        """Return the sums over all ranks of what each computes."""
        return list(compute()) if self.size == 1 else self.table(columns, compute).sum(dim=0).tolist()

    # Tensors ----------------------------------------------------------------------------------------------------------

    def gathered(self, values: Tensor) -> Tensor:
        """Return the vectors of all ranks: (ranks, n)."""
        values = values.to(self.device)
        received = [torch.empty_like(values) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(received, values, group=self._group)
        return torch.stack(received)

    def sum_(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, in place where the tensor can be sent from."""
        sent = values.to(self.device)
        with self._exchange():
            dist.all_reduce(sent, group=self._group)
        return sent.to(values.device)

    def received(self, values: Tensor, owner: int) -> Tensor:
        """Return the owner's values; those of other ranks are overwritten where they can be sent from."""
        sent = values.to(self.device)
        source = owner if self._group is None else dist.get_global_rank(self._group, owner)
        with self._exchange():
            dist.broadcast(sent, source, group=self._group)
        return sent.to(values.device)

    def exchanged(self, values: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Send values[r] to rank r, and return what each rank has sent to this one, of these sizes (all-to-all)."""
        sent = torch.cat(list(values)).to(self.device)
        received = sent.new_empty(sum(sizes))
        with self._exchange():
            dist.all_to_all_single(received, sent, list(sizes), list(map(len, values)), group=self._group)
        return torch.split(received.to(values[0].device), list(sizes))

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Raise a RuntimeError that explains it if a collective operation fails."""
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
class Contribution:
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


def merged(ranks: Ranks, contributions: Sequence[Contribution], like: Tensor) -> list[Moments | None]:
    """Return the moments of the observations of all ranks, as one process would measure them; None: no rank has any.

    Means are exchanged first. Each scatter is then moved to the common mean, and buffers with the triangles of many
    scatters are summed. The common mean is written as a step from one rank's mean, so that a constant feature has a
    variance of exactly zero.
    """
    device = float64_device(like)
    means = [_mean_of(part, device).flatten() for part in contributions if part.centred]
    rows = [[part.weight, float(part.moments is not None)] for part in contributions]
    sent = torch.cat([torch.tensor(rows, dtype=torch.float64, device=device).flatten(), *means])
    table = ranks.gathered(sent).to(device)
    columns = 2 * len(contributions)
    weights, present = table[:, :columns].view(ranks.size, -1, 2).unbind(-1)
    common = _common_means(contributions, weights, present, table[:, columns:])
    totals = weights.sum(dim=0).tolist()
    sizes = []
    for part, is_measured in zip(contributions, present.any(dim=0).tolist(), strict=True):
        sizes.append(part.blocks.entries if is_measured else 0)
    moments: list[Moments | None] = [None] * len(contributions)
    for bucket in _buckets(sizes):
        triangles = {i: _triangle(_scatter_about(contributions[i], common[i], device)) for i in bucket}
        for i, values in _sums(ranks, {i: contributions[i] for i in bucket}, triangles).items():
            diagonal = contributions[i].owner not in (None, ranks.rank)
            moments[i] = Moments(totals[i], common[i], values, diagonal=diagonal)
    return moments


def _sums(
    ranks: Ranks, contributions: Mapping[int, Contribution], triangles: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return the sums of triangles over all ranks, as matrices; their diagonals, on ranks that do not own them."""
    blocks = {i: part.blocks for i, part in contributions.items()}
    everywhere = [i for i, part in contributions.items() if part.owner is None]
    sums: dict[int, Tensor] = {}
    if everywhere:
        total = ranks.sum_(torch.cat([triangles[i] for i in everywhere]))
        sums |= _matrices(total, everywhere, triangles, blocks)
    if len(everywhere) == len(contributions):
        return sums
    by_owner: list[list[int]] = [[] for _ in range(ranks.size)]
    for i, part in contributions.items():
        if part.owner is not None:
            by_owner[part.owner].append(i)
    owned = by_owner[ranks.rank]
    nothing = next(iter(triangles.values())).new_empty(0)
    sent = [torch.cat([triangles[i] for i in places] or [nothing]) for places in by_owner]
    total, *others = ranks.exchanged(sent, [len(sent[ranks.rank])] * ranks.size)
    for values in others:
        total += values
    sums |= _matrices(total, owned, triangles, blocks)
    diagonals = torch.cat([sums[i].diagonal(dim1=-2, dim2=-1).reshape(-1) for i in owned] or [nothing])
    lengths = [[math.prod(blocks[i].shape[:-1]) for i in places] for places in by_owner]
    received = ranks.exchanged([diagonals] * ranks.size, list(map(sum, lengths)))
    for places, values, sizes in zip(by_owner, received, lengths, strict=True):
        for i, diagonal in zip(places, torch.split(values, sizes), strict=True):
            sums.setdefault(i, diagonal.view(blocks[i].shape[:-1]))
    return sums


def _matrices(
    total: Tensor, places: Sequence[int], triangles: Mapping[int, Tensor], blocks: Mapping[int, Blocks]
) -> dict[int, Tensor]:
    """Return the matrices, by place, whose triangles were summed in one vector."""
    parts = torch.split(total, [len(triangles[i]) for i in places])
    return {i: _symmetric(part, blocks[i]) for i, part in zip(places, parts, strict=True)}


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Return the places of sizes above zero, in order, in groups whose sizes add up to BUCKET or little more.

    >>> _buckets([3, 0, 2])
    [[0, 2]]
    """
    buckets: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if size and room <= 0:
            buckets.append([])
            room = BUCKET
        if size:
            buckets[-1].append(place)
            room -= size
    return buckets


def _mean_of(part: Contribution, device: torch.device) -> Tensor:
    """Return the mean of one rank's observations; zero if it has none."""
    if part.moments is None or part.moments.mean is None:
        return torch.zeros(part.blocks.shape[:-1], dtype=torch.float64, device=device)
    return part.moments.mean.to(torch.float64)


def _common_means(
    contributions: Sequence[Contribution], weights: Tensor, present: Tensor, means: Tensor
) -> list[Tensor | None]:
    """Return the mean of each side, None if not centred; weights, present: (ranks, sides); means: (ranks, features)."""
    common: list[Tensor | None] = []
    start = 0
    for i, part in enumerate(contributions):
        if not part.centred:
            common.append(None)
            continue
        shape = part.blocks.shape[:-1]
        end = start + math.prod(shape)
        by_rank = means[:, start:end].reshape(-1, *shape)
        first = by_rank[int(present[:, i].argmax())]
        counted = weights[:, i] * present[:, i]
        fractions = (counted / counted.sum().clamp(min=1e-300)).view(-1, *[1] * len(shape))
        common.append(first + (fractions * (by_rank - first)).sum(dim=0))
        start = end
    return common


def _scatter_about(part: Contribution, mean: Tensor | None, device: torch.device) -> Tensor:
    """Return the scatter of one rank's observations about the mean of all; zero if it has none."""
    moments = part.moments
    if moments is None:
        return torch.zeros(part.blocks.shape, dtype=torch.float64, device=device)
    if mean is None or moments.mean is None:
        return moments.scatter
    shift = moments.mean - mean
    return add_outer(moments.scatter, shift, shift, moments.weight)


def _triangle(scatter: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix, or of blocks, as a vector: panels of rows from the diagonal on.

    Panels are copied twenty times as fast as single entries. They have some entries below the diagonal too: 6 % more
    for 1,000 features.
    """
    return torch.cat([scatter[..., i : i + PANEL, i:].reshape(-1) for i in range(0, scatter.shape[-1], PANEL)])


def _symmetric(triangle: Tensor, blocks: Blocks) -> Tensor:
    """Return the matrix, or the blocks, of a vector that `_triangle` returned."""
    matrix = triangle.new_empty(blocks.shape)
    start = 0
    for i in range(0, blocks.size, PANEL):
        j = i + PANEL
        panel = matrix[..., i:j, i:]
        end = start + panel.numel()
        panel.copy_(triangle[start:end].view(panel.shape))
        matrix[..., j:, i:j] = panel[..., PANEL:].mT
        start = end
    return matrix


# Factors --------------------------------------------------------------------------------------------------------------


def assigned(costs: Mapping[Key, float], ranks: int) -> dict[Key, int]:
    """Return an owner for each item: the costliest first, each to the rank that has the least to do.

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
    computed: dict[Key, Factor | WhiteningError] = {}

    def described() -> list[float]:
        computed.update(solve([key for key, owner in owners.items() if owner == ranks.rank]))
        return [number for key in owners for number in _described(computed.get(key))]

    table = ranks.table(NUMBERS * len(owners), described).view(ranks.size, -1, NUMBERS)
    numbers = {key: table[owner, i].tolist() for i, (key, owner) in enumerate(owners.items())}
    factors: dict[Key, Factor | WhiteningError] = {}
    for key, (kind, *_) in numbers.items():
        if kind == 0:
            factors[key] = computed.get(key) or WhiteningError(f"rank {owners[key]}, which factors it, could not do so")
    if not everywhere:
        remote = {k: Elsewhere(owners[k], int(numbers[k][-1]), like[k][1].dtype) for k in owners if k not in factors}
        return {key: factors.get(key) or computed.get(key) or remote[key] for key in owners}
    for owner, dtype in sorted({(owners[key], like[key][1].dtype) for key in owners}, key=str):
        keys = [k for k in owners if owners[k] == owner and like[k][1].dtype is dtype and k not in factors]
        sizes = [described_shape(numbers[key]) for key in keys]
        device = like[keys[0]][1].device if keys else None
        buffer = torch.empty(sum(map(math.prod, sizes)), dtype=dtype, device=device)
        if owner == ranks.rank and keys:
            buffer = torch.cat([_tensor(computed[key]).flatten() for key in keys])
        parts = torch.split(ranks.received(buffer, owner), [math.prod(size) for size in sizes]) if keys else ()
        for key, size, part in zip(keys, sizes, parts, strict=True):
            state = described_state(numbers[key], part.view(size))
            factors[key] = factor_of_state(cast(dict[str, Any], state), *like[key])
    return {key: factors[key] for key in owners}


def _described(factor: Factor | WhiteningError | None) -> list[float]:
    if not isinstance(factor, Factor):
        return [0.0] * NUMBERS
    return [*description(factor), float(factor.cost)]


def _tensor(factor: Factor | WhiteningError) -> Tensor:
    assert isinstance(factor, Factor)
    (tensor,) = factor.tensors().values()
    return tensor
