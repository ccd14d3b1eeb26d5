"""The batches a model was trained on since the last optimizer step, kept by hooks on the root module and on its loss.

Layers carry no hooks, so in-place activations, checkpointing, torch.compile and autocast do not disturb anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from bprong.capture.calls import replace_attribute
from bprong.capture.measure import Arguments, laid_out, tensor_of
from bprong.likelihood.families import Likelihood
from bprong.likelihood.loss import Loss
from bprong.likelihood.targets import Targets, read_targets


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


@dataclass(frozen=True)
class OutputGradient:
    """An output and the gradient that the user's backward pass left there, with classes in the last dimension.

    class_dim: where the model has the classes, if they were moved (`measure.laid_out`)
    """

    output: Tensor
    gradient: Tensor
    class_dim: int | None = None


@dataclass(frozen=True)
class Batch:
    """A batch that the model was trained on, or that was observed.

    x        what the model is called with
    left     what the user's backward pass left at the output; None: unknown
    given    the targets that the loss may have been given: observed, or those of the loss module's calls
    targets  what the loss is of the output, once it was read; None: unknown
    """

    x: Any
    left: OutputGradient | None = None
    given: tuple[Tensor, ...] = ()
    targets: Targets | None = None

    def read(self, loss: Loss, assumed: Sequence[float] = (1.0,)) -> Batch:
        """With the targets of the data; assumed: see `read_targets`."""
        if self.left is not None:
            return replace(self, targets=read_targets(loss, self.left.output, self.left.gradient, self.given, assumed))
        known = [Targets(loss, y, loss.likelihood.not_ignored(y)) for y in self.given]
        return replace(self, targets=known[0] if known else None)

    @property
    def class_dim(self) -> int | None:
        return None if self.left is None else self.left.class_dim

    def counted(self, likelihood: Likelihood) -> Tensor | None:
        """Which targets the loss counts, without the output's last dimension; None: all, as far as is known."""
        if self.targets is not None:
            return self.targets.counted
        return None if self.left is None else likelihood.counted_in(self.left.output, self.left.gradient)

    def counts(self, likelihood: Likelihood) -> bool:
        """Whether the loss counts any of its targets, as far as is known."""
        if self.left is None or bool(self.left.gradient.any()):
            return True
        return bool(likelihood.counted_in(self.left.output, self.left.gradient).any())

    def subset(self, count: int) -> Subset:
        """`count` of the examples; all, if outputs or targets do not have equally many rows for each example."""
        subset = Subset(count, examples(self.x))
        rows = [] if self.left is None else [self.left.output]
        rows += [] if self.targets is None else [self.targets.y]
        return subset if all(map(subset.divides, rows)) else Subset(subset.whole, subset.whole)


class Batches:
    """The batches a model was trained on since the last optimizer step.

    model:     the root module as the user calls it, compiled or not; it has the hooks while this object lives
    loss:      the declared loss; if it is a module, that has a hook too
    listener:  its hooks; `listener.wanted` says whether calls are kept until the next step
    observed:  the batches given by `observe`, which are measured instead of the calls

    Copies and pickles contain no batches and put hooks of their own on their model.
    """

    def __init__(self, model: nn.Module, loss: Loss, wanted: bool = True) -> None:
        self.model = model
        self.loss = loss
        self.observed: list[Batch] = []
        self.listener = Listener(wanted, loss.likelihood)
        self.listener.attach(self)

    def __reduce__(self) -> tuple[type[Batches], tuple[Any, ...]]:
        return Batches, (self.model, self.loss, self.listener.wanted)

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """Measure this batch at the next step, instead of the calls of the model."""
        if self.listener.wanted:
            self.observed.append(Batch(x, given=() if y is None else (y,)))

    def seen(self) -> list[Batch]:
        """The batches since the last step: those observed or, without any, the calls that a backward pass reached.

        If no call was reached, all of them. As many calls as observed batches have the gradients of these.
        """
        calls = self._calls(measured=not self.observed)
        if not self.observed:
            reached = [call for call in calls if call.left is not None] or calls
            if all(len(call.given) == 1 for call in reached):
                return reached
            given = tuple(y for call in reached for y in call.given)  # of several calls before their losses
            return [replace(call, given=given) for call in reached]
        lefts = [call.left for call in calls] if len(calls) == len(self.observed) else [None] * len(self.observed)
        return [
            replace(batch, left=left if left is not None and len(left.output) == _length(batch) else None)
            for batch, left in zip(self.observed, lefts, strict=True)
        ]

    def _calls(self, measured: bool) -> list[Batch]:
        """All calls since the last step; measured: their arguments will be used, so these must not have changed."""
        kept: list[Batch] = []
        link = self.listener.last
        while link is not None:
            arguments, versions, gradients, given, link = link
            if measured and versions and versions != _versions(arguments):
                raise RuntimeError(
                    "the batch was changed in place between the model's call and the step, so it cannot be measured. "
                    "Call optimizer.observe(x.clone()) before you change it"
                )
            kept.append(Batch(Arguments(*arguments), _left(gradients, self.loss.likelihood), tuple(given)))
        return kept[::-1]

    def forget(self) -> None:
        """Forget all batches: they were used, or the step was refused."""
        self.observed.clear()
        self.listener.last = None

    def forget_reached(self) -> None:
        """Forget the calls that a backward pass has reached: their gradients were set to zero."""
        waiting = []
        link = self.listener.last
        while link is not None:
            waiting += [] if link[2] else [link[:-1]]
            link = link[-1]
        self.listener.last = None
        for call in reversed(waiting):
            self.listener.last = (*call, self.listener.last)


def _length(batch: Batch) -> int:
    return len(batch.given[0]) if batch.given else examples(batch.x)


def _left(gradients: Sequence[tuple[Tensor, Tensor]], likelihood: Likelihood) -> OutputGradient | None:
    """Of all backward passes through one output, as if their losses had been summed; None: there was none.

    Gradients that are not finite belong to a step that was skipped.
    """
    if not gradients:
        return None
    output = gradients[0][0]
    gradient = sum((g for _, g in gradients[1:]), start=gradients[0][1])
    if not bool(torch.isfinite(gradient).all()):
        return None
    class_dim = likelihood.class_dim(output, gradient)
    return OutputGradient(laid_out(output, class_dim), laid_out(gradient, class_dim), class_dim)


class Listener:
    """Hooks on a model and on its loss that keep references to the arguments of training calls, while they are wanted.

    Calls in eval mode or without gradients are validation and are not kept. The calls form a linked list, because
    torch.compile traces these hooks and would compile again for each length of a Python list.

    likelihood: None for the copy in a copied or unpickled model, which has no optimizer yet, so that it keeps nothing
    """

    paused = False  # for all listeners: calls that measure are not training

    def __init__(self, wanted: bool = False, likelihood: Likelihood | None = None) -> None:
        self.wanted = wanted
        self.likelihood = likelihood
        self.last: Any = None

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.wanted and not Listener.paused and module.training and torch.is_grad_enabled():
            compiling = torch.compiler.is_compiling()
            # Containers are copied, so that the user cannot change them.
            arguments = (args, kwargs) if compiling else tree_map(lambda leaf: leaf, (args, kwargs))
            self.last = (arguments, _versions(arguments), [], [], self.last)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """When the call has returned: read the gradient at its output once there is one."""
        if torch.compiler.is_compiling() or Listener.paused or not (self.wanted and module.training and self.last):
            return
        with suppress(TypeError):  # of an output without a tensor; whoever measures it will say what is missing
            tensor = tensor_of(output)
            if tensor.requires_grad and tensor.ndim > 0:  # a hook that kept the tensor itself would keep itself alive
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    partial(_read, list(module.parameters()), self.last[2], tensor.detach())
                )

    def after_loss(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """When the loss was computed: keep its targets, for the last call of the model."""
        if torch.compiler.is_compiling() or Listener.paused or not (self.wanted and self.last):
            return
        y = kwargs.get("target", args[-1] if args else None)
        if isinstance(y, Tensor) and isinstance(value, Tensor) and value.requires_grad:
            self.last[3].append(y.detach())

    def attach(self, owner: Batches) -> None:
        """Listen to the model and its loss as long as the owner lives; remove hooks that were copied with them."""
        loss = owner.loss.given
        _remove_copies(owner.model)
        handles = [
            owner.model.register_forward_pre_hook(self, with_kwargs=True),
            owner.model.register_forward_hook(self.after, with_kwargs=True),
        ]
        if isinstance(loss, nn.Module):
            _remove_copies(loss)
            handles.append(loss.register_forward_hook(self.after_loss, with_kwargs=True))
        for handle in handles:
            weakref.finalize(owner, handle.remove)


def _remove_copies(module: nn.Module) -> None:
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(copy := getattr(hook, "__self__", hook), Listener) and copy.likelihood is None:
                del hooks[key], with_kwargs[key]


def _read(parameters: list[Tensor], gradients: list[tuple[Tensor, Tensor]], output: Tensor, gradient: Tensor) -> None:
    if reaches(parameters):
        gradients.append((output, gradient.detach()))


@contextmanager
def without_listening() -> Iterator[None]:
    """For calls of a model that are not its training: no listener keeps them."""
    with ExitStack() as stack:
        replace_attribute(stack, Listener, "paused", True)
        yield


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


def reaches(parameters: Iterable[Tensor]) -> bool:
    """Whether the backward pass that is running computes gradients of any of these parameters.

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
    try:
        return any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in parameters if p.requires_grad)
    except RuntimeError:  # autograd.grad() was asked for the gradient of a parameter
        return True
