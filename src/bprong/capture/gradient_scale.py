"""The lengths of gradients, and the factor by which they were multiplied between the backward pass and the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from bprong.parallel.processes import ALIKE, Ranks
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
        self._parameters: list[Tensor] = []
        self._norms: Tensor | None = None  # of the gradients of these parameters
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
        self._parameters = list(gradients)
        self._norms = _norms(_slices(gradients)) if gradients else None

    def compare(self, gradients: Mapping[Tensor, Tensor], ranks: Ranks) -> tuple[float, float | None]:
        """The sum of the norms of some gradients, and the factor since the last backward pass.

        That is None if gradients differ in it, and 1 if nothing was noted. Their device is waited for once.
        """
        values = _slices(gradients)
        norms = _norms(values)
        before = norms[:0] if self._norms is None else self._norms.to(norms)
        is_shared = ranks.size > 1
        is_sliced = values[0] is not next(iter(gradients.values()))
        if is_shared and not is_sliced and self.is_comparable is None:
            # Who averages gradients by hand does so after the norms were noted, which then differ between ranks.
            sums = ranks.table(1, lambda: [float(before.sum())])
            self.is_comparable = torch.allclose(sums, sums[:1], rtol=ALIKE)
        numbers = torch.cat([norms, before]).tolist()
        size = sum(numbers[: len(norms)])
        noted = dict(zip(self._parameters, numbers[len(norms) :], strict=True))
        self._parameters = []
        self._norms = None
        ratios = []
        for p, now in zip(gradients, numbers, strict=False):
            if 0 < noted.get(p, 0.0) < math.inf and 0 < now < math.inf and self.is_comparable is not False:
                ratios.append(now / noted[p])
        lowest = min(ratios, default=math.inf)
        highest = max(ratios, default=0.0)
        if is_shared and is_sliced:  # each has a slice of every gradient
            table = ranks.table(2, lambda: [lowest, highest])
            lowest = float(table[:, 0].min())
            highest = float(table[:, 1].max())
        tolerance = max(4 * torch.finfo(dtype).eps for dtype in {g.dtype for g in values})
        if highest > (1 + max(ROUNDING, tolerance)) * lowest:
            return size, None
        return size, highest or 1.0
