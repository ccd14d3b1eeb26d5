"""Which batches a model was trained on since the last step: one pre-hook on the root, nothing on its layers."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bprong.cut import Cut
from bprong.likelihood import Likelihood
from bprong.recording import Arguments, tensor_of
from bprong.running_loss import reaches, running_loss

__all__ = ["Batch", "Heard", "Listener", "copied", "gradient_of", "mask_by", "together", "told", "unheard", "whole"]

Batch = tuple[Any, Tensor | None, Tensor | None]  # x, the data's targets, and which of them count; None: unknown, all


@dataclass(frozen=True)
class Heard:
    """What the user's own backward pass left at an output: the gradient, and the loss's value where it can be had."""

    output: Tensor
    gradient: Tensor
    value: Tensor | None = None

    def __add__(self, other: Heard) -> Heard:
        """Of two backward passes through one output, as of the sum of both losses."""
        values = (self.value, other.value)
        value = None if values[0] is None or values[1] is None else values[0] + values[1]
        return Heard(self.output, self.gradient + other.gradient, value)


Read = Callable[[Heard], Any]


def whole(heard: Heard) -> Heard:
    return heard


def gradient_of(heard: Heard) -> Tensor:
    return heard.gradient.clone()


def mask_by(likelihood: Likelihood) -> Read:
    """Which targets count, or what is wrong, in the likelihood's words."""
    return lambda heard: likelihood.heard(heard.gradient)


class Listener:
    """Keeps references to the arguments of training calls while they are wanted.

    Calls in eval mode or without gradients are validation and are not kept. The calls form a chain rather than a list,
    because torch.compile traces this hook and would compile anew for each length of a list.

    read: what to keep of the gradient that the user's own backward pass leaves at the output of each call
    """

    paused = False  # for all listeners alike: a pass that measures is nobody's training

    def __init__(self, wanted: bool = True, read: Read | None = None) -> None:
        self.wanted, self.read = wanted, read
        self.last: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.wanted and not Listener.paused and module.training and torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))  # containers of their own
            self.last = (args, kwargs, _versions((args, kwargs)), [], self.last)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The call has returned: what is read off its gradient will go where the call is kept."""
        if torch.compiler.is_compiling() or self.read is None or self.last is None:
            return
        if self.wanted and not Listener.paused and module.training:
            try:
                tensor, read, found = tensor_of(output), self.read, self.last[3]
            except TypeError:  # the pass that measures, or whoever calls the likelihood, says what is missing
                return
            if tensor.requires_grad:
                output = tensor.detach()  # for the hook to keep: the tensor itself keeps the hook

                def hook(g: Tensor) -> None:
                    if reaches(module.parameters()):
                        found.append(read(Heard(output, g.detach(), running_loss())))

                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def take(self) -> list[tuple[Arguments, Any]]:
        """The calls kept, in their order, each with what was read off the gradient at its output.

        They are forgotten. Raises if a batch has been written to since its call.
        """
        kept: list[tuple[Arguments, Any]] = []
        link, self.last = self.last, None
        while link is not None:
            args, kwargs, versions, found, link = link
            if versions is not None and versions != _versions((args, kwargs)):
                raise RuntimeError(
                    "the batch was changed in place between the model's call and the step, so it cannot be measured: "
                    "give a copy that stays, optimizer.observe(x.clone()), before it is changed"
                )
            kept.append((Arguments(args, kwargs), _together(found)))
        return kept[::-1]

    def attach(self, model: nn.Module, owner: object) -> None:
        """Listens to the model as long as its owner lives; hooks of copies, which keep nothing, make way."""
        for key, hook in list(model._forward_pre_hooks.items()):
            if isinstance(hook, Listener) and hook.read is None:
                del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
        for key, hook in list(model._forward_hooks.items()):
            listener = getattr(hook, "__self__", None)
            if isinstance(listener, Listener) and listener.read is None:
                del model._forward_hooks[key]
        before = model.register_forward_pre_hook(self, with_kwargs=True)
        after = model.register_forward_hook(self.after)
        for handle in (before, after):
            weakref.finalize(owner, handle.remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> Listener:
        """A copied model has no optimizer of its own: its copy of the hook keeps nothing."""
        return Listener(wanted=False)

    def __reduce__(self) -> tuple[type[Listener], tuple[bool]]:
        return Listener, (False,)


@contextmanager
def unheard() -> Iterator[None]:
    """Calls of the model that are not its training, so that no listener keeps them."""
    before, Listener.paused = Listener.paused, True
    try:
        yield
    finally:
        Listener.paused = before


def _together(found: list[Any]) -> Any:
    """Of several backward passes through one output: what counts for one counts, gradients add up, words are kept."""
    words = [read for read in found if isinstance(read, str)]
    return words[0] if words else functools.reduce(operator.add, found) if found else None


def _versions(batch: Any) -> list[int] | None:
    """How often each tensor of a batch has been written to; not known while torch.compile traces."""
    if torch.compiler.is_compiling():
        return None
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def together(batches: list[Batch]) -> list[Batch]:
    """The batches of a step, measured as their whole would be.

    Those of whose targets the loss counts none are left out; and unless it leaves out some of some batch, all count.
    """
    batches = [batch for batch in batches if batch[2] is None or batch[2].any()] or batches
    if all(counted is None or counted.all() for *_, counted in batches):
        return [(x, y, None) for x, y, _ in batches]
    return batches


def told(read: Any, likelihood: Likelihood, empirical: bool, backward: bool) -> tuple[Tensor | None, Tensor | None]:
    """The data's targets, and which of them count, from what was read off the gradient at the output.

    empirical: the targets are wanted; backward: errors are, so that what is wrong, in words, is raised
    """
    if isinstance(read, Heard):
        read = read.gradient if empirical else likelihood.heard(read.gradient)
    if isinstance(read, str) and backward:
        raise ValueError(read)
    if not isinstance(read, Tensor) or not empirical:
        return None, read if isinstance(read, Tensor) else None
    y = likelihood.targets_behind(read)
    return y, likelihood.left_in(y)


def copied(batch: Any, cut: Cut | None, dtype: torch.dtype, *, several: bool = False) -> Any:
    """A batch of its own to measure on: the examples of a cut, of its tensors, low precision brought to `dtype`.

    Tensors of another length than the batch are no examples, unless one may have several rows. Inputs in half precision
    come from autocast, which the pass does without.
    """

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        theirs = cut is not None and leaf.ndim > 0 and (len(leaf) == cut.whole or (several and cut.divides(leaf)))
        part = cut.rows(leaf) if cut is not None and theirs else leaf
        if leaf.dtype in (torch.bfloat16, torch.float16):
            return part.to(dtype, copy=True)
        return part.clone() if part is leaf else part

    return tree_map(copy, batch)
