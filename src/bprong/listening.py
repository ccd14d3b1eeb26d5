"""Which batches a model was trained on since the last step: one pre-hook on the root, nothing on its layers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from bprong.recording import Arguments

__all__ = ["Listener"]


class Listener:
    """Keeps references to the arguments of training calls while they are wanted.

    Calls in eval mode or without gradients are validation and are not kept. The calls form a chain rather than a list,
    because torch.compile traces this hook and would compile anew for each length of a list.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.last: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.wanted and module.training and torch.is_grad_enabled():
            self.last = (args, kwargs, self.last)

    def take(self) -> list[Arguments]:
        """The calls kept, in their order; they are forgotten."""
        kept: list[Arguments] = []
        link, self.last = self.last, None
        while link is not None:
            args, kwargs, link = link
            kept.append(Arguments(args, kwargs))
        return kept[::-1]

    def attach(self, model: nn.Module, owner: object) -> None:
        """Listens to the model as long as its owner lives."""
        handle = model.register_forward_pre_hook(self, with_kwargs=True)
        weakref.finalize(owner, handle.remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> Listener:
        """A copied model has no optimizer of its own: its copy of the hook keeps nothing."""
        return Listener(wanted=False)

    def __reduce__(self) -> tuple[type[Listener], tuple[bool]]:
        return Listener, (False,)
