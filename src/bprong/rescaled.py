"""By what `.grad` was multiplied between the backward pass and the step."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

__all__ = ["Rescaled"]


class Rescaled:
    """Clipping and the unscaling of mixed precision multiply all gradients by one number: it is seen at one parameter.

    >>> p = torch.ones(3, requires_grad=True)
    >>> rescaled, owner = Rescaled(), torch.nn.Identity()
    >>> rescaled.attach(p, owner)
    >>> p.sum().backward()
    >>> p.grad *= 0.25
    >>> rescaled.factor(p)
    0.25
    """

    def __init__(self) -> None:
        self._norm: Tensor | None = None

    def attach(self, parameter: Tensor, owner: object) -> None:
        """Looks at a parameter as long as the owner lives."""
        handle = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        weakref.finalize(owner, handle.remove)

    def _note(self, parameter: Tensor) -> None:
        with torch.no_grad():
            self._norm = None if parameter.grad is None or parameter.grad.is_sparse else parameter.grad.norm()

    def factor(self, parameter: Tensor) -> float:
        """One where nothing is known, or nothing was there to multiply."""
        norm, self._norm = self._norm, None
        if norm is None or parameter.grad is None:
            return 1.0
        before, now = float(norm), float(parameter.grad.norm())
        return now / before if math.isfinite(before) and before > 0 and now > 0 else 1.0
