"""Gradients that are not finite are refused before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bprong.errors import warn
from bprong.optim.rules import Gradients
from bprong.sharding import local, summed
from bprong.whitening.layer import PATIENCE

LONG_GRADIENT = 2**14  # entries from which on a dot product is faster than a norm


class Refusal:
    """Refuses gradients that are not finite: with a warning, and after several in a row with an error.

    count: how many were refused in a row
    """

    def __init__(self) -> None:
        self.count = 0

    def accepts(
        self,
        gradients: Gradients,
        name_of: Callable[[Tensor], str],
        undo_: Callable[[Gradients], bool],
        size: float | None = None,
    ) -> bool:
        """Whether gradients are finite and, at the first step, not all zero.

        name_of: the name of a parameter
        undo_:   undoes the last update; True if there was one
        size:    the sum of their norms, if known
        """
        values = list(gradients.values.values())
        if not values:
            return False
        slices = [local(g) for g in values] if gradients.sliced else values
        if size is None:
            size = float(_size(slices))
        if math.isfinite(summed(size, values) if gradients.sliced else size):
            self.count = 0
            return gradients.t > 0 or summed(any(bool(g.any()) for g in slices), values) > 0
        names = []
        for p, g in gradients.values.items():
            if summed(float(not local(g).isfinite().all()), [g]):
                names.append(name_of(p))
        if not names:  # every number is finite, but the square of one overflows
            return True
        self.count += 1
        message = f"step {gradients.t} refused: the gradient of {', '.join(names)} is not finite"
        if self.count >= PATIENCE:
            raise FloatingPointError(f"{message}, {PATIENCE} times in a row; lower the learning rate or check the data")
        # Two in a row are not one bad batch but a bad step.
        is_undone = self.count == PATIENCE - 1 and undo_(gradients)
        warn(f"{message}; {'the last update was undone' if is_undone else 'nothing was changed'}")
        return False


def _size(gradients: list[Tensor]) -> Tensor:
    """A number that is finite if all gradients are, unless it overflows: squared norms of long ones, else norms."""
    sizes = []
    others = []
    for g in gradients:
        if g.numel() > LONG_GRADIENT and g.is_contiguous() and not g.is_complex():
            flat = g.view(-1)
            sizes.append(torch.dot(flat, flat))
        else:
            others.append(g)
    sizes += torch._foreach_norm(others) if others else []
    device = gradients[0].device
    return torch.stack([size.to(device, torch.float32) for size in sizes]).sum()
