"""The factor by which `.grad` was multiplied between the backward pass and the step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from bprong.distributed import Ranks
from bprong.sharding import local

WATCHED = 4  # parameters
ROUNDING = 1e-3  # the relative difference up to which two factors are one; a few times eps in lower precision


class GradientScale:
    """Clipping and the unscaling of mixed precision multiply all gradients by one number, seen here at a few of them.

    >>> p = torch.ones(3, requires_grad=True)
    >>> scale = GradientScale([p])
    >>> p.sum().backward()
    >>> p.grad *= 0.25
    >>> scale.factor()
    0.25
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        n = min(WATCHED, len(trained))
        # Spread over all parameters, so that some have a gradient; small ones, because norms cost time.
        parts = (trained[i * len(trained) // n : (i + 1) * len(trained) // n] for i in range(n))
        self._watched = [min(part, key=Tensor.numel) for part in parts]
        self.known: bool | None = None  # False: gradients change in other ways after the backward pass; None: not known
        self._norms: dict[int, Tensor] = {}
        # The hook holds on to the norms and not to this object, which removes it when it is no longer used.
        hook = partial(_note, self._norms, set(), [weakref.ref(p) for p in self._watched])
        # In several processes a rank may use none of those watched; whichever it uses tells that gradients are there.
        for parameter in trained if Ranks().size > 1 else self._watched:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def __reduce__(self) -> tuple[type[GradientScale], tuple[list[Tensor]]]:
        return GradientScale, (self._watched,)

    def noted(self) -> float:
        """The sum of the norms that were noted since the last call of `factor`."""
        return sum(float(norm) for norm in self._norms.values())

    def factor(self, ranks: Ranks | None = None) -> float | None:
        """The factor since the last call; None if parameters differ in it, 1 if no parameter has a gradient.

        ranks: the processes of which each has a slice of every gradient
        """
        if self.known is False:
            self._norms.clear()
            return 1.0
        norms = [(self._norms.pop(id(p), None), p.grad) for p in self._watched]
        ratios = [
            float(local(g).norm()) / (float(before) or math.inf)
            for before, g in norms
            if before is not None and g is not None
        ]
        found = [ratio for ratio in ratios if 0 < ratio < math.inf]
        if ranks is not None:
            own = [min(found), max(found)] if found else [0.0, 0.0]
            found = [ratio for ratio in ranks.table(2, lambda: own).flatten().tolist() if ratio]
        tolerance = max((4 * torch.finfo(p.dtype).eps for p in self._watched), default=0.0)
        if found and max(found) > (1 + max(ROUNDING, tolerance)) * min(found):
            return None
        return found[-1] if found else 1.0


def _note(
    norms: dict[int, Tensor], queued: set[str], watched: Sequence[weakref.ref[Tensor]], parameter: Tensor
) -> None:
    """Notes the norm of a gradient: at once or, in several processes, when these have averaged all gradients.

    They do so in a callback at the end of the backward pass; a callback that a callback queues comes after it. Then all
    norms are noted, since a parameter may have been used by other ranks only.
    """
    if Ranks().size == 1:
        _note_norms(norms, [parameter])
        return
    if not queued:
        queued.add("at the end of this backward pass")
        parameters = [p for p in (ref() for ref in watched) if p is not None]
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, partial(_note_norms, norms, parameters, queued)))


def _note_norms(norms: dict[int, Tensor], parameters: Sequence[Tensor], queued: set[str] | None = None) -> None:
    if queued is not None:
        queued.clear()
    for p in parameters:
        if p.grad is not None and not p.grad.is_sparse:
            norms[id(p)] = local(p.grad.detach()).norm()
