"""By what `.grad` was multiplied between the backward pass and the step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["Rescaled", "watched"]

WATCHED = 4  # parameters
ROUNDING = 1e-3  # by which factors may differ that are one, and a few times that of a lower precision


class Rescaled:
    """Clipping and the unscaling of mixed precision multiply all gradients by one number: it is seen at a few of them.

    >>> p = torch.ones(3, requires_grad=True)
    >>> rescaled, owner = Rescaled(), torch.nn.Identity()
    >>> rescaled.attach([p], owner)
    >>> p.sum().backward()
    >>> p.grad *= 0.25
    >>> rescaled.factor([p])
    0.25
    """

    def __init__(self) -> None:
        self._norms: dict[int, Tensor] = {}  # by the parameters' ids: they keep the hook, which keeps this

    def attach(self, parameters: Iterable[Tensor], owner: object) -> None:
        """Looks at parameters as long as the owner lives."""
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            weakref.finalize(owner, handle.remove)

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            with torch.no_grad():
                self._norms[id(parameter)] = parameter.grad.norm()

    def factor(self, parameters: Iterable[Tensor]) -> float | None:
        """Of the parameters that have a gradient; None where they differ; one where there is nothing to tell it by."""
        norms, self._norms = self._norms, {}
        found, tolerance = [], ROUNDING
        for p in parameters:
            if id(p) in norms and p.grad is not None:
                before, now = float(norms[id(p)]), float(p.grad.norm())
                if math.isfinite(before) and before > 0 and now > 0:
                    found.append(now / before)
                    tolerance = max(tolerance, 4 * torch.finfo(p.grad.dtype).eps)
        if found and max(found) > (1 + tolerance) * min(found):
            return None
        return found[-1] if found else 1.0


def watched(parameters: Iterable[Tensor]) -> list[Tensor]:
    """A few of those that are trained, spread over them, so that some have a gradient; the smallest, as norms cost.

    >>> [len(p) for p in watched([torch.ones(n, requires_grad=True) for n in (9, 3, 9, 3, 9, 9, 2, 9)])]
    [3, 3, 9, 2]
    """
    trained = [p for p in parameters if p.requires_grad]
    n = min(WATCHED, len(trained))
    return [_smallest(trained[i * len(trained) // n : (i + 1) * len(trained) // n]) for i in range(n)]


def _smallest(parameters: Sequence[Tensor]) -> Tensor:
    return min(parameters, key=Tensor.numel)
