"""The value of the loss whose backward pass is running, for a hook that is called in the midst of it."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["running_loss"]

# Through these two every backward pass goes, Tensor.backward() too: where to look, and what for.
_ENTRANCES: dict[CodeType, tuple[str, str]] = {
    torch.autograd.backward.__code__: ("tensors", "grad_tensors"),
    torch.autograd.grad.__code__: ("outputs", "grad_outputs"),
}


def running_loss() -> Tensor | None:
    """What is being differentiated, detached: the loss times the factor given to backward(), if there is one.

    A gradient at the output tells the loss only up to what does not depend on the output's own scale, and a hook is
    told nothing else. On a CPU hooks run in the thread that called backward(), so the loss is found in its frames.
    None where it cannot be: other threads (accelerators), several losses, a loss of more than one element. A backward
    pass within another, as of a checkpoint, has no loss of its own; that of the one around it counts.

    >>> found = []
    >>> w = torch.tensor([3.0], requires_grad=True)
    >>> handle = w.register_hook(lambda g: found.append(running_loss()))
    >>> (2 * w).sum().backward()
    >>> found
    [tensor(6.)]
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _ENTRANCES:
            tensors, factors = (_single(frame.f_locals.get(name)) for name in _ENTRANCES[frame.f_code])
            if isinstance(tensors, Tensor) and tensors.numel() == 1:
                return _times(tensors, factors)
        frame = frame.f_back
    return None


def _single(found: Any) -> Any:
    """The one thing of a sequence of one."""
    return found[0] if isinstance(found, (tuple, list)) and len(found) == 1 else found


def _times(loss: Tensor, factor: Any) -> Tensor | None:
    value = loss.detach().reshape(())
    if factor is None:
        return value
    return value * factor.detach().reshape(()) if isinstance(factor, Tensor) and factor.numel() == 1 else None
