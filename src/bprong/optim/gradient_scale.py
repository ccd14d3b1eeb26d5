"""The factor by which `.grad` was multiplied between the backward pass and the step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

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
        self._norms: dict[int, Tensor] = {}
        # The hook holds on to the norms and not to this object, which removes it when it is no longer used.
        hook = partial(_note_norm, self._norms)
        for parameter in self._watched:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def __reduce__(self) -> tuple[type[GradientScale], tuple[list[Tensor]]]:
        return GradientScale, (self._watched,)

    def factor(self) -> float | None:
        """The factor since the last call; None if parameters differ in it, 1 if no parameter has a gradient."""
        norms = [(self._norms.pop(id(p), None), p.grad) for p in self._watched]
        ratios = [
            float(g.norm()) / (float(before) or math.inf) for before, g in norms if before is not None and g is not None
        ]
        found = [ratio for ratio in ratios if 0 < ratio < math.inf]
        tolerance = max((4 * torch.finfo(p.dtype).eps for p in self._watched), default=0.0)
        if found and max(found) > (1 + max(ROUNDING, tolerance)) * min(found):
            return None
        return found[-1] if found else 1.0


def _note_norm(norms: dict[int, Tensor], parameter: Tensor) -> None:
    if parameter.grad is not None and not parameter.grad.is_sparse:
        norms[id(parameter)] = parameter.grad.detach().norm()
