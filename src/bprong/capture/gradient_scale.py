"""The lengths of gradients, and the factor by which they were multiplied between the backward pass and the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from bprong.parallel.processes import Ranks
from bprong.parallel.slices import local

ROUNDING = 1e-3  # the relative difference up to which two factors are one; a few times eps in lower precision


def _norms(gradients: list[Tensor]) -> Tensor:
    """(n,) the norms of tensors."""
    norms = torch._foreach_norm(gradients)
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        return torch.stack([norm.to(gradients[0].device, torch.float64) for norm in norms])
    stacked = torch.stack(norms)
    return stacked if stacked.dtype.itemsize >= torch.float32.itemsize else stacked.float()


def _slices(gradients: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """The gradients as this process has them: whole, or slices of them."""
    values = list(gradients.values())
    return values if type(values[0]) is Tensor else [local(g) for g in values]


class GradientScale:
    """Clipping and the unscaling of mixed precision multiply all gradients by one number.

    Norms of gradients at the end of a backward pass are compared with those at the step.

    is_comparable: False: processes average gradients after the backward pass, so that norms differ; None: not known
    """

    def __init__(self) -> None:
        self.is_comparable: bool | None = None
        self._norms: dict[Tensor, Tensor] = {}
        self._task = -1  # the backward pass at whose end norms are noted

    def __reduce__(self) -> tuple[type[GradientScale], tuple[()]]:
        return GradientScale, ()

    def expect(self, parameters: Iterable[Tensor]) -> None:
        """Within a backward pass: notes the norms of the gradients when it ends.

        Processes average their gradients in a callback at the end of the backward pass; a callback that a callback
        queues comes after it.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        queue = torch.autograd.Variable._execution_engine.queue_callback
        note = partial(self.note, parameters)
        queue(note if Ranks().size == 1 else partial(queue, note))

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Notes the norms of the gradients as they are now."""
        gradients = {p: p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse}
        self._norms = {}
        if gradients:
            self._norms = dict(zip(gradients, _norms(_slices(gradients)), strict=True))

    def size(self) -> float:
        """The sum of the norms that were noted."""
        return sum(float(norm) for norm in self._norms.values())

    def factor(self, gradients: Mapping[Tensor, Tensor], ranks: Ranks | None = None) -> float | None:
        """The factor since the last backward pass; None if gradients differ in it, 1 if none was noted.

        ranks: the processes of which each has a slice of every gradient
        """
        return self.compare(gradients, ranks)[1]

    def compare(self, gradients: Mapping[Tensor, Tensor], ranks: Ranks | None = None) -> tuple[float, float | None]:
        """The sum of the norms of the gradients, and `factor`, in one synchronisation with their device."""
        if not gradients:
            return 0.0, 1.0
        values = _slices(gradients)
        now = _norms(values)
        places = [i for i, p in enumerate(gradients) if p in self._norms]
        before = [self._norms[p] for p in gradients if p in self._norms]
        self._norms = {}
        numbers = [now.sum(), now.new_zeros(()), now.new_zeros(())]
        if before and self.is_comparable is not False:
            ratios = (now if len(places) == len(now) else now[places]) / torch.stack(before)
            valid = (ratios > 0) & ratios.isfinite()
            numbers[1:] = [ratios.where(valid, math.inf).amin(), ratios.where(valid, 0.0).amax()]
        size, lowest, highest = torch.stack(numbers).tolist()
        if ranks is not None:
            table = ranks.table(2, lambda: [lowest, highest])
            present = table[table[:, 1] > 0]
            lowest = float(present[:, 0].min()) if len(present) else 0.0
            highest = float(present[:, 1].max()) if len(present) else 0.0
        tolerance = max(4 * torch.finfo(g.dtype).eps for g in values)
        if highest > (1 + max(ROUNDING, tolerance)) * lowest:
            return size, None
        return size, highest or 1.0
