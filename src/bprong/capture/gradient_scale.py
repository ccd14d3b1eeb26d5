"""The factor by which `.grad` was multiplied between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from bprong.distributed import Ranks
from bprong.sharding import local

ROUNDING = 1e-3  # the relative difference up to which two factors are one; a few times eps in lower precision


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
        self._norms = _norms({p: p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse})

    def size(self) -> float:
        """The sum of the norms that were noted."""
        return sum(float(norm) for norm in self._norms.values())

    def factor(self, gradients: Mapping[Tensor, Tensor], ranks: Ranks | None = None) -> float | None:
        """The factor since the last backward pass; None if gradients differ in it, 1 if none was noted.

        ranks: the processes of which each has a slice of every gradient
        """
        before = self._norms
        self._norms = {}
        if self.is_comparable is False:
            return 1.0
        now = _norms({p: g for p, g in gradients.items() if p in before})
        least, most = 0.0, 0.0
        if now:
            ratios = torch.stack([(now[p] / before[p]).double() for p in now])
            ratios = ratios[(ratios > 0) & ratios.isfinite()]
            if ratios.numel():
                least, most = torch.stack(torch.aminmax(ratios)).tolist()
        if ranks is not None:
            table = ranks.table(2, lambda: [least, most])
            present = table[table[:, 1] > 0]
            least, most = (float(present[:, 0].min()), float(present[:, 1].max())) if len(present) else (0.0, 0.0)
        tolerance = max((4 * torch.finfo(g.dtype).eps for g in gradients.values()), default=0.0)
        if most > (1 + max(ROUNDING, tolerance)) * least:
            return None
        return most or 1.0


def _norms(gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    if not gradients:
        return {}
    slices = [local(g.detach()) for g in gradients.values()]
    return dict(zip(gradients, torch._foreach_norm(slices), strict=True))
