"""A training call of a model, from its forward pass to the batch it becomes: arguments, output, targets, moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from bprong.capture.listener import noted_hooks
from bprong.likelihood.families import nontrivial
from bprong.likelihood.loss import Loss, LossCall, Targets, targets_of
from bprong.linalg.moments import at_least_float32
from bprong.parallel.processes import is_sliced

if TYPE_CHECKING:
    from bprong.capture.calls import Calls
    from bprong.capture.measure import Meter
    from bprong.capture.request import LayerMoments

Key = str | int

TO_THE_LOSS = 200  # operations, at most, between an output and its loss

# The output that the loss is computed from ----------------------------------------------------------------------------


@dataclass
class Head:
    """Finds the tensor that the loss is computed from.

    key:        of the output in what the model returns: a key or attribute, or an index; None: the logits or the first
                tensor or, if a loss inside of the model does not depend on that, its input
    functions:  the names of torch's functions that may be this loss
    inside:     whether it is the input of a loss inside of the model; None: not known yet

    >>> Head().find({"logits": torch.zeros(2, 3), "features": torch.zeros(2, 8)}).shape
    torch.Size([2, 3])
    """

    key: Key | None = None
    functions: frozenset[str] = frozenset()
    inside: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, (str, int, NoneType)):
            raise TypeError(
                f"output must be a key, an attribute or an index of what the model returns, not {self.key!r}. If it is "
                f"something else, return it from your model's forward"
            )

    def find(self, returned: Any, losses: Sequence[LossCall] = ()) -> Tensor:
        """Return the output; losses: the calls of loss functions inside of the model."""
        output = _chosen(returned, self.key)
        inputs = [] if self.key is not None else self._inputs(losses)
        if inputs and self.inside is None and torch.is_grad_enabled():
            node = getattr(output, "grad_fn", None)
            self.inside = node is None or not any(nodes_behind(tensor, lambda one: one is node) for tensor in inputs)
        if inputs and self.inside is not False:
            if len(inputs) > 1:
                raise TypeError(
                    f"the model computes losses of {len(inputs)} tensors of one size. Return these as one tensor, such "
                    f"as torch.stack(tensors, 1), from its forward or that of a wrapper, and compute the loss of that"
                )
            return inputs[0]
        if not isinstance(output, Tensor) or output.ndim == 0:
            what = "a number" if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise TypeError(
                f"the loss must be computed from a tensor that the model returns, not {what}. {_advice(returned)}"
            )
        return output

    def _inputs(self, losses: Sequence[LossCall]) -> list[Tensor]:
        """Return the largest tensors that calls which may be those of the loss were given."""
        inputs = {}
        for call in losses:
            is_computed = call.input.requires_grad or not torch.is_grad_enabled()
            if call.function in self.functions and call.input.ndim > 0 and is_computed:
                inputs[call.input.data_ptr(), call.input.numel()] = call.input
        largest = max(map(Tensor.numel, inputs.values()), default=0)
        return [tensor for tensor in inputs.values() if tensor.numel() == largest]


def _chosen(returned: Any, key: Key | None) -> Any:
    match returned:
        case object(logits=logits) | {"logits": logits} | [logits, *_] if key is None:
            return logits
        case _ if key is None:
            return returned
    try:
        by_name = isinstance(key, str) and not isinstance(returned, Mapping)
        return getattr(returned, str(key)) if by_name else returned[key]
    except (LookupError, AttributeError, TypeError) as reason:
        raise TypeError(f"the model returns nothing under options['output'] = {key!r}. {_advice(returned)}") from reason


def _advice(returned: Any) -> str:
    names = sorted(map(str, returned)) if isinstance(returned, Mapping) else []
    has = f"The model returns {', '.join(names)}. " if names else ""
    return f"{has}Name it with options={{'output': …}}: a key, an attribute or an index"


@dataclass(frozen=True)
class Output:
    """The tensor that a loss is computed from.

    tensor:     a copy of it
    edge:       where it is in the autograd graph; None: in none. Later operations may change it in place
    class_dim:  see `laid_out`
    """

    tensor: Tensor
    edge: GradientEdge | None
    class_dim: int | None

    @classmethod
    def of(cls, output: Tensor, class_dim: int | None) -> Output:
        edge = get_gradient_edge(output) if output.requires_grad else None
        return cls(copy_of_output(output), edge, class_dim)

    @cached_property
    def values(self) -> Tensor:
        """The output, laid out, in at least float32."""
        values = laid_out(self.tensor, self.class_dim)
        return values.to(at_least_float32(values.dtype))

    def gradients(self, root: Tensor, wanted: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
        """Propagate a gradient at the values back; None: it does not reach there. The graph remains usable."""
        dim = -1 if self.class_dim is None else self.class_dim
        root = root.reshape(self.tensor.movedim(dim, -1).shape).movedim(-1, dim).to(self.tensor.dtype)
        edge = cast(GradientEdge, self.edge)
        return torch.autograd.grad([edge], wanted, [root], retain_graph=True, allow_unused=True)


def copy_of_output(output: Tensor) -> Tensor:
    """Return a copy of an output without its history."""
    return as_plain(output.detach().clone())


def laid_out(output: Tensor, class_dim: int | None) -> Tensor:
    """Return an output with classes in this dimension as (B, positions, classes); None: as it is."""
    return output if class_dim is None else output.movedim(class_dim, -1).flatten(1, -2)


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor without what a user's subclass adds to its operations; nested and sharded tensors unchanged."""
    if type(tensor) is Tensor or tensor.is_nested or is_sliced(tensor):
        return tensor
    return tensor.as_subclass(Tensor)


def nodes_behind(value: Tensor, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the wanted operations that a value was computed by, among those close to it."""
    nodes: list[Any] = [] if value.grad_fn is None else [value.grad_fn]  # torch's stubs lack some of their attributes
    matches = []
    for node in nodes:  # which grows meanwhile
        if wanted(node):
            matches.append(node)
        elif len(nodes) < TO_THE_LOSS:
            nodes += [before for before, _ in node.next_functions if before is not None and before not in nodes]
    return matches


# What the model was called with ---------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """What a model was called with; autocast: the precision of autocast at that time, if it was on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None = None


def copy_of(value: Any) -> Any:
    """Return a copy of an input without its history; of other things than tensors, the thing itself."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


# The call -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A batch that the model was trained on, or that was observed.

    x          what the model is called with; None: not kept
    output     what it returned, with classes in the last dimension; None: unknown
    class_dim  where the model has the classes, if they were moved (`laid_out`)
    targets    what the loss is of the output; None: unknown
    reached    which targets a gradient came back to, where their loss was not seen
    measured   the moments of its layers, if they were measured in the user's own pass
    """

    x: Any = None
    output: Tensor | None = None
    class_dim: int | None = None
    targets: Targets | None = None
    reached: Tensor | None = None
    measured: Mapping[str, LayerMoments] | None = None

    @property
    def y(self) -> Tensor | None:
        """The targets of the data, if they are known."""
        return None if self.targets is None else self.targets.y

    @property
    def counted(self) -> Tensor | None:
        """Which targets the loss counts, without the output's last dimension; None: all, as far as is known."""
        return nontrivial(self.reached) if self.targets is None else self.targets.counted

    @property
    def counts(self) -> bool:
        """Whether the loss counts any of its targets, as far as is known."""
        mask = self.reached if self.targets is None else self.targets.mask
        return mask is None or bool(mask.any())


@dataclass(eq=False)
class Tape:
    """A training call of the model.

    arguments:  copies of what the model was called with, if they may be needed
    recording:  closed when the call ends
    calls:      of the weights to measure, until they are measured; None: nothing is to be measured
    output:     a copy of it; None: there is none yet, or a step has used it
    number:     which of the results of its operation it is
    losses:     the calls of loss functions that were given the output
    gradients:  at the output, by the number of the backward pass that brought it, of the passes that count
    measured:   the moments of its layers

    It must not hold on to the operation that computed the output, whose hook holds on to it.
    """

    arguments: Arguments | None = None
    recording: ExitStack = field(default_factory=ExitStack)
    calls: Calls | None = None
    output: Tensor | None = None
    number: int = 0
    losses: list[LossCall] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    measured: Mapping[str, LayerMoments] | None = None

    def keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the model was called with, for a pass of our own: copies, which nobody changes meanwhile."""
        device = next(model.parameters()).device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.arguments = Arguments(tree_map(copy_of, args), tree_map(copy_of, kwargs), autocast)
        self.recording.enter_context(noted_hooks(model))

    def batch(self, loss: Loss) -> Batch:
        """Return the batch that the model was called with, with its output and targets."""
        returned = cast(Tensor, self.output)
        arrived = [call for call in self.losses if call.count(self.gradients)]
        declared = [call for call in arrived if call.is_declared]
        losses = declared or [call for call in arrived if call.function in loss.functions]
        class_dim = loss.class_dim(returned, losses[0].input if losses else None)
        output = laid_out(returned, class_dim)
        gradient = laid_out(cast(Tensor, sum(self.gradients.values())), class_dim)
        targets = targets_of(loss.likelihood, losses, output, gradient) if losses else None
        reached = loss.likelihood.reached(gradient) if targets is None else None
        return Batch(self.arguments, output, class_dim, targets, reached, self.measured)

    def measure(self, meter: Meter, index: int) -> None:
        """Measure the recorded calls on the user's graph, as if the user's backward pass had not begun.

        index: of the batch, since the last step
        """
        calls = self.calls
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # otherwise other passes may follow
            self.calls = None
        if calls is None or self.output is None or calls.opaque or not self.output.numel():
            return
        batch = self.batch(meter.loss)
        edge = GradientEdge(torch._C._current_autograd_node(), self.number)
        try:
            self.measured = meter.measure(index, Output(self.output, edge, batch.class_dim), calls, batch)
        except RuntimeError as reason:
            if "compiled" not in str(reason):  # compiled functions run backward only once
                raise

    def release(self) -> None:
        """Forget all, since a step has used it. The user may still hold on to the output, and its hook to this."""
        self.calls = None
        self.output = None
        self.losses = []
        self.measured = None
