"""The value of the loss whose backward pass is running, for a hook that is called in the midst of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["reaches", "running_loss"]

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
    for frame in _passes():
        tensors, factors = (_single(frame.f_locals.get(name)) for name in _ENTRANCES[frame.f_code])
        if isinstance(tensors, Tensor) and tensors.numel() == 1:
            return _times(tensors, factors)
    return None


def reaches(parameters: Iterable[Tensor]) -> bool:
    """Whether the backward pass that is running is to give gradients to any of these, as far as can be told.

    One that asks for others alone, as ∂f/∂x for a penalty on gradients or a differential equation, trains nobody.

    >>> found = []
    >>> w, x = (torch.tensor([3.0], requires_grad=True) for _ in range(2))
    >>> f = w * x
    >>> handle = f.register_hook(lambda g: found.append(reaches([w])))
    >>> _ = torch.autograd.grad(f.sum(), x, create_graph=True)
    >>> f.sum().backward()
    >>> found
    [False, True]
    """
    scope = next((frame.f_locals for frame in _passes()), {})
    asked = scope.get("inputs_tuple", scope.get("inputs"))  # a tuple by now, under its new name or its old one
    if not isinstance(asked, tuple) or not asked or not all(isinstance(leaf, Tensor) for leaf in asked):
        return True
    among = {id(leaf) for leaf in asked}
    return any(id(parameter) in among for parameter in parameters)


def _passes() -> Iterator[FrameType]:
    """The backward passes that are running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _ENTRANCES:
            yield frame
        frame = frame.f_back


def _single(found: Any) -> Any:
    """The one thing of a sequence of one."""
    return found[0] if isinstance(found, (tuple, list)) and len(found) == 1 else found


def _times(loss: Tensor, factor: Any) -> Tensor | None:
    value = loss.detach().reshape(())
    if factor is None:
        return value
    return value * factor.detach().reshape(()) if isinstance(factor, Tensor) and factor.numel() == 1 else None
