"""The batches a model was trained on since the last optimizer step, kept by two hooks on the root module.

Layers carry no hooks, so in-place activations, checkpointing, torch.compile and autocast do not disturb anything.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from bprong.capture.calls import replace_attribute
from bprong.capture.measure import Arguments, tensor_of
from bprong.likelihood.families import Likelihood


@dataclass(frozen=True)
class Subset:
    """`count` of the `whole` examples of a batch, evenly spread, because a batch may be sorted.

    Outputs, gradients and targets may have several rows for each example.

    >>> Subset(2, 4).rows(torch.arange(8)).tolist()  # two rows for each example
    [0, 1, 4, 5]
    """

    count: int
    whole: int

    @property
    def everything(self) -> bool:
        return self.count >= self.whole

    def divides(self, tensor: Tensor) -> bool:
        """Whether the tensor can have the same number of rows for each example."""
        return tensor.ndim > 0 and 0 < self.whole <= len(tensor) and len(tensor) % self.whole == 0

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of the chosen examples; the tensor itself if all examples are chosen."""
        if self.everything:
            return tensor
        chosen = torch.arange(self.count, device=tensor.device) * self.whole // self.count
        return tensor.reshape(self.whole, len(tensor) // self.whole, *tensor.shape[1:])[chosen].flatten(0, 1)


class Batch(NamedTuple):
    """A batch to measure.

    x, y:      what the model is called with, and the targets of the data; None: unknown
    counted:   which targets the loss counts, without the output's last dimension; None: all
    inferred:  whether `counted` was inferred from zero gradients, which a perfectly predicted target also has
    """

    x: Any
    y: Tensor | None = None
    counted: Tensor | None = None
    inferred: bool = False

    def copied(self, count: int | None, dtype: torch.dtype) -> Batch:
        """A copy of `count` of its examples (None: of all), in which low precision is converted to `dtype`."""
        whole = examples(self.x)
        subset = Subset(count or whole, whole)
        y, counted = copied((self.y, self.counted), subset, dtype, several=True)
        return Batch(copied(self.x, subset, dtype), y, counted, self.inferred)


@dataclass(frozen=True)
class OutputGradient:
    """The gradient that the user's backward pass left at an output; value: of the loss, where it can be found."""

    output: Tensor
    gradient: Tensor
    value: Tensor | None = None

    def __add__(self, other: OutputGradient) -> OutputGradient:
        """Of two backward passes through one output, as if the losses had been summed."""
        value = None if self.value is None or other.value is None else self.value + other.value
        return OutputGradient(self.output, self.gradient + other.gradient, value)


class Batches:
    """The batches a model was trained on since the last optimizer step.

    model:           the root module as the user calls it, compiled or not; it has the hooks while this object lives
    keep_gradients:  keep the gradient at the output of each call, from which the targets and the loss can be found; if
                     False, keep only which targets count, which takes less memory
    listener:        its hooks; `listener.wanted` says whether calls are kept until the next step
    observed:        the batches given by `observe`, which are measured instead of the calls

    Copies and pickles contain no batches and put hooks of their own on their model.
    """

    def __init__(self, model: nn.Module, likelihood: Likelihood, keep_gradients: bool, wanted: bool = True) -> None:
        self.model = model
        self.likelihood = likelihood
        self.observed: list[Batch] = []
        self.listener = Listener(wanted, keep_gradients, likelihood)
        self.listener.attach(model, self)

    def __reduce__(self) -> tuple[type[Batches], tuple[Any, ...]]:
        return Batches, (self.model, self.likelihood, self.listener.keep_gradients, self.listener.wanted)

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """Measure this batch at the next step, instead of the calls of the model."""
        if self.listener.wanted:
            self.observed.append(Batch(x, y, self.likelihood.not_ignored(y) if isinstance(y, Tensor) else None))

    def calls(self) -> list[tuple[Arguments, Any]]:
        """The calls of the model since the last step, in order, each with what was read off its output's gradient.

        That is an `OutputGradient`, or which targets count, or a message why that cannot be told; None: no gradient.
        """
        kept: list[tuple[Arguments, Any]] = []
        link = self.listener.last
        while link is not None:
            arguments, versions, found, link = link
            if versions and versions != _versions(arguments):
                raise RuntimeError(
                    "the batch was changed in place between the model's call and the step, so it cannot be measured. "
                    "Call optimizer.observe(x.clone()) before you change it"
                )
            kept.append((Arguments(*arguments), _sum(found)))
        return kept[::-1]

    def forget(self) -> None:
        """Forget all batches: they were used, or the step was refused."""
        self.observed.clear()
        self.listener.last = None

    def to_measure(self, empirical: bool, backward: bool) -> list[Batch]:
        """The batches that were observed or, without any, those of the model's calls.

        Batches in which no target counts are left out. If all targets of all batches count, no batch has a mask.

        empirical: read the targets of the data off the gradients; backward: errors will be measured, so raise an error
        where the likelihood cannot tell which targets count
        """
        found = self.observed or [self._batch(call, read, empirical, backward) for call, read in self.calls()]
        found = [batch for batch in found if batch.counted is None or batch.counted.any()] or found
        unmasked = all(batch.counted is None or batch.counted.all() for batch in found)
        return [batch._replace(counted=None) for batch in found] if unmasked else found

    def _batch(self, call: Arguments, read: Any, empirical: bool, backward: bool) -> Batch:
        """A call with the targets of the data, if `empirical`, and with which targets count."""
        if isinstance(read, OutputGradient) and empirical:
            y = self.likelihood.targets_behind(read.gradient)
            return Batch(call, y, self.likelihood.not_ignored(y))
        mask = self.likelihood.counted_in(read.gradient) if isinstance(read, OutputGradient) else read
        if isinstance(mask, str) and backward:
            raise ValueError(mask)
        return Batch(call, None, mask if isinstance(mask, Tensor) else None, inferred=True)


class Listener:
    """Two hooks on a model that keep references to the arguments of its training calls, while they are wanted.

    Calls in eval mode or without gradients are validation and are not kept. The calls form a linked list, because
    torch.compile traces these hooks and would compile again for each length of a Python list.

    likelihood: None for the copy in a copied or unpickled model, which has no optimizer yet, so that it keeps nothing
    """

    paused = False  # for all listeners: calls that measure are not training

    def __init__(
        self, wanted: bool = False, keep_gradients: bool = False, likelihood: Likelihood | None = None
    ) -> None:
        self.wanted = wanted
        self.keep_gradients = keep_gradients
        self.likelihood = likelihood
        self.last: Any = None

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.wanted and not Listener.paused and module.training and torch.is_grad_enabled():
            compiling = torch.compiler.is_compiling()
            # Containers are copied, so that the user cannot change them.
            arguments = (args, kwargs) if compiling else tree_map(lambda leaf: leaf, (args, kwargs))
            self.last = (arguments, _versions(arguments), [], self.last)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """When the call has returned: read the gradient at its output once there is one."""
        if torch.compiler.is_compiling() or Listener.paused or not (self.wanted and module.training and self.last):
            return
        with suppress(TypeError):  # of an output without a tensor; whoever measures it will say what is missing
            tensor = tensor_of(output)
            if tensor.requires_grad:  # a hook that kept the tensor itself would keep itself alive
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    partial(self._read, module, self.last[2], tensor.detach())
                )

    def _read(self, module: nn.Module, found: list[Any], output: Tensor, gradient: Tensor) -> None:
        if reaches(module.parameters()) and self.likelihood is not None:
            g = gradient.detach()
            found.append(
                OutputGradient(output, g, running_loss()) if self.keep_gradients else self.likelihood.counted_in(g)
            )

    def attach(self, model: nn.Module, owner: object) -> None:
        """Listen to the model as long as the owner lives; remove hooks that were copied with the model."""
        for hooks, with_kwargs in (
            (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs),
            (model._forward_hooks, model._forward_hooks_with_kwargs),
        ):
            for key, hook in list(hooks.items()):
                if isinstance(copy := getattr(hook, "__self__", hook), Listener) and copy.likelihood is None:
                    del hooks[key], with_kwargs[key]
        weakref.finalize(owner, model.register_forward_pre_hook(self, with_kwargs=True).remove)
        weakref.finalize(owner, model.register_forward_hook(self.after, with_kwargs=True).remove)


@contextmanager
def without_listening() -> Iterator[None]:
    """For calls of a model that are not its training: no listener keeps them."""
    with ExitStack() as stack:
        replace_attribute(stack, Listener, "paused", True)
        yield


def _sum(found: list[Any]) -> Any:
    """Of several backward passes through one output: masks are joined, gradients add up, a message is kept."""
    messages = (read for read in found if isinstance(read, str))
    return next(messages, None) or (sum(found[1:], start=found[0]) if found else None)


def _versions(batch: Any) -> list[int]:
    """How often each tensor of a batch has been written to; empty, because unknown, while torch.compile traces."""
    tensors = () if torch.compiler.is_compiling() else tree_leaves(batch)
    return [leaf._version for leaf in tensors if isinstance(leaf, Tensor) and not leaf.is_inference()]


def examples(x: Any) -> int:
    """The number of examples of a batch: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim > 0), 1)


def copied(batch: Any, subset: Subset, dtype: torch.dtype, *, several: bool = False) -> Any:
    """A copy of a subset of the examples of a batch, in which low precision is converted to `dtype`.

    Tensors of another length than the batch are not examples and are copied whole, unless `several` rows may belong to
    one example. Inputs in half precision come from autocast, which is off when a batch is measured.
    """

    def copy(leaf: Tensor) -> Tensor:
        part = subset.rows(leaf) if subset.divides(leaf) and (several or len(leaf) == subset.whole) else leaf
        return part.to(dtype if leaf.dtype in (torch.bfloat16, torch.float16) else leaf.dtype, copy=part is leaf)

    return tree_map_only(Tensor, copy, batch)


# The backward pass that is running ------------------------------------------------------------------------------------


def _running_passes() -> Iterator[tuple[tuple[Any, ...], tuple[Tensor, ...], tuple[Any, ...]]]:
    """Of each backward pass that is running in this thread: the losses, their factors, and the inputs asked for.

    The innermost pass comes first. On a CPU hooks run in the thread that called backward(), so its passes are found in
    the frames of that thread. On accelerators hooks run in another thread, and nothing is found.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is graph._engine_run_backward.__code__:  # every backward pass goes through this function
            yield frame.f_locals["t_outputs"], frame.f_locals["args"][0], frame.f_locals["args"][3]


def running_loss() -> Tensor | None:
    """The loss that is being differentiated, times the factor given to backward(), if it is found and has one element.

    The gradient at an output determines the loss only in part, and a hook is given nothing else. If one backward pass
    runs inside another, as for a checkpoint, the loss is that of the outer pass.

    >>> found = []
    >>> w = torch.tensor([3.0], requires_grad=True)
    >>> handle = w.register_hook(lambda g: found.append(running_loss()))
    >>> (2 * w).sum().backward()
    >>> found
    [tensor(6.)]
    """
    for losses, factors, _ in _running_passes():
        if len(losses) == 1 and isinstance(losses[0], Tensor) and losses[0].numel() == 1:
            return (losses[0].detach() * factors[0].detach()).reshape(())
    return None


def reaches(parameters: Iterable[Tensor]) -> bool:
    """Whether the running backward pass computes gradients of any of these parameters, as far as can be found out.

    A pass that asks for other gradients only, such as ∂f/∂x for a gradient penalty, is not training.

    >>> found = []
    >>> w, x = (torch.tensor([3.0], requires_grad=True) for _ in range(2))
    >>> f = w * x
    >>> handle = f.register_hook(lambda g: found.append(reaches([w])))
    >>> _ = torch.autograd.grad(f.sum(), x, create_graph=True)
    >>> f.sum().backward()
    >>> found
    [False, True]
    """
    asked = next((inputs for *_, inputs in _running_passes()), ())  # none: all that require a gradient
    tensors = [id(leaf) for leaf in asked if isinstance(leaf, Tensor)]
    return len(tensors) < len(asked) or not asked or any(id(p) in tensors for p in parameters)
