"""The processes that train one model together, and their collective operations.

Each rank measures its own batches. At a refresh the moments of all ranks are merged, so that every rank has those of
the whole batch; each side is factored by one rank, its owner, and all ranks receive the factor. In one process nothing
is communicated.

Every collective operation is entered by all ranks or by none. Whatever a rank finds out alone (a layer that its batch
did not reach, an error) is exchanged before anything is decided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bprong.linalg.moments import at_least_float32
from bprong.parallel.slices import whole_model

ALIKE = 1e-6  # the relative difference up to which sizes of gradients of two ranks are the same
AVAILABLE = dist.is_available()


class Ranks:
    """The processes that train one model together; a group of one where torch.distributed is not in use.

    group:   of torch.distributed; None: all processes
    wrapper: the DistributedDataParallel around the model, if it is known
    sharded: whether each process has a slice of each parameter (FSDP2)
    owners:  the rank that factors the layers of each parameter; empty: each rank factors all
    before:  how many processes made the steps so far; None: none was made

    Whether there are several processes is found out anew each time, since a script may start torch.distributed after
    it has made the optimizer.
    """

    def __init__(
        self, group: Any = None, wrapper: nn.parallel.DistributedDataParallel | None = None, sharded: bool = False
    ) -> None:
        self.sharded = sharded
        self.owners: dict[Tensor, int] = {}
        self.before: int | None = None
        self._group = group
        self._wrapper = wrapper

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """Return the ranks that a model is trained by."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return cls(model.process_group, model)
        for parameter in model.parameters():
            if hasattr(parameter, "device_mesh"):
                return cls(parameter.device_mesh.get_group(), sharded=True)
        return cls()

    def __reduce__(self) -> tuple[type[Ranks], tuple[Any, ...]]:
        return Ranks, (None, None, self.sharded)  # a group of processes cannot be copied

    @property
    def size(self) -> int:
        """The number of processes."""
        return dist.get_world_size(self._group) if AVAILABLE and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """The number of this process, from 0 on."""
        return dist.get_rank(self._group) if self.size > 1 else 0

    def check(self) -> None:
        """Before a step: raise ValueError if ranks may end before others, which would then wait for them.

        Raises RuntimeError if training goes on with another number of processes, whose states would differ.
        """
        size = self.size
        if self.before not in (None, size):
            raise RuntimeError(
                f"the first steps were made by {self.before} processes, and this one by {size}. Start "
                f"torch.distributed before the first step, or load a checkpoint into a new optimizer"
            )
        self.before = size
        if self._wrapper is not None and self._wrapper._join_config.enable:
            raise ValueError(
                "torch.distributed.algorithms.Join is not supported: ranks that have run out of data would exchange no "
                "statistics. Give all ranks the same number of batches, for example with DistributedSampler"
            )

    def is_own(self, parameter: Tensor) -> bool:
        """Return whether this rank factors the layers of this parameter."""
        return not self.owners or self.owners[parameter] == self.rank

    def whole(self, model: nn.Module) -> AbstractContextManager[Mapping[Tensor, Tensor]]:
        """Put whole parameters into a sharded model while the context is active; yield them by those that are sliced.

        To be entered by all ranks.
        """
        return whole_model(model) if self.sharded else nullcontext({})

    # Numbers ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def exchange(self, columns: int) -> Iterator[list[list[float]]]:
        """Yield a list for a row of so many numbers; after the block it has the rows of all ranks.

        If the block fails on one rank, all raise an error.

        >>> with Ranks().exchange(2) as rows:
        ...     rows.append([1.0, 2.0])
        """
        rows: list[list[float]] = []
        failure: Exception | None = None
        try:
            yield rows
        except Exception as error:  # which must not leave the other ranks waiting
            failure = error
        failed: list[float] = []
        if self.size > 1:
            rows[:] = self.table([failure is not None, *(rows[0] if rows else [0.0] * columns)]).tolist()
            failed = [row.pop(0) for row in rows]
        if failure is not None:
            raise failure
        if any(failed):
            rank = failed.index(1.0)
            raise RuntimeError(f"the step was stopped by an error on rank {rank}, which that process reports")

    def table(self, numbers: Sequence[float]) -> Tensor:
        """Return some numbers of each of several ranks: (ranks, numbers), float64."""
        return self.gathered(torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over all ranks of some numbers of each."""
        return list(numbers) if self.size == 1 else self.table(numbers).sum(dim=0).tolist()

    # Tensors, which have one shape and dtype on all ranks -------------------------------------------------------------

    def gathered(self, values: Tensor) -> Tensor:
        """Return the tensors of all ranks: (ranks, …), as the sum of tables that have one row each."""
        table = values.new_zeros(self.size, *values.shape)
        table[self.rank] = values
        return self.sum_(table)

    def sum_(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, in place where the tensor can be sent from."""
        return self._run(dist.all_reduce, values)

    def received(self, values: Tensor, owner: int) -> Tensor:
        """Return the owner's values; those of other ranks are overwritten where they can be sent from."""
        return self._run(dist.broadcast, values, group_src=owner)

    # Slices of the parameters of a sharded model ----------------------------------------------------------------------

    def collected(self, values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return the values of the parameters that this rank owns, whole, from the slices of all ranks."""
        owned = {}
        for p, value in values.items():
            whole = value.full_tensor()
            if self.is_own(p):
                owned[p] = whole
        return owned

    def distributed(self, owned: Mapping[Tensor, Tensor], values: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return slices of what was computed from values, each by its owner.

        owned: for the parameters that this rank owns, whole, in at least float32
        """
        slices = {}
        for p, value in values.items():
            empty = torch.empty(value.shape, dtype=at_least_float32(value.dtype), device=value.device)
            whole = self.received(owned.get(p, empty), self.owners[p])
            of_all = type(value).from_local(whole, value.device_mesh, run_check=False)
            slices[p] = of_all.redistribute(placements=value.placements)
        return slices

    def _run(self, collective: Callable[..., Any], values: Tensor, **options: Any) -> Tensor:
        """Run a collective operation on a tensor, or on a copy where that can be sent from; return the result.

        Raises a RuntimeError that explains it if that fails.
        """
        sent = values.to("cuda" if dist.get_backend(self._group) == "nccl" else "cpu").contiguous()
        try:
            collective(sent, group=self._group, **options)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} could not exchange statistics: another process has ended, or has not "
                f"come to this step in time. {error}"
            ) from error
        return sent.to(values.device)


ALONE = Ranks()


# Slices ---------------------------------------------------------------------------------------------------------------


def is_sliced(tensor: Any) -> bool:
    """Return whether this process has a slice of a tensor only (a DTensor; importing that class takes a second)."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the slice that this process has; the tensor itself, if that is not sliced."""
    return cast(Any, tensor.detach()).to_local() if is_sliced(tensor) else tensor


def summed(value: float, of: Iterable[Any]) -> float:
    """Return the sum over all processes of what each computed from its slices; the value, if nothing is sliced."""
    for tensor in of:
        if is_sliced(tensor):
            return Ranks(tensor.device_mesh.get_group()).sums([value])[0]
    return value
