"""A training call of a model: what its forward pass recorded, and what backward passes have brought back to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_map_only, tree_unflatten

from bprong.capture.batches import Batch
from bprong.capture.calls import Calls
from bprong.capture.measure import Meter
from bprong.capture.output import TO_THE_LOSS, Head, Output, as_plain, laid_out, nodes_behind
from bprong.capture.own_pass import Arguments, copy_of, noted_hooks
from bprong.capture.request import LayerMoments
from bprong.likelihood.loss import Loss, LossCall, targets_of


@dataclass(eq=False)
class Tape:
    """A training call of the model.

    arguments:  what the model was called with, until it is known that this is not needed
    originals:  the same as the model itself has it, while it runs; versions: how often each of their tensors had been
                written to
    recording:  closed when the call ends
    calls:      of the weights to measure, until they are measured; None: nothing is to be measured
    output:     None: there is none yet, or a step has used it
    retained:   tensors whose gradients the user may have asked to be retained
    structure:  what the model returned, without its tensors, if the output is a rearrangement of them
    place:      address, shape and strides of the output, if that is one tensor
    losses:     the calls of loss functions that were given the output
    gradients:  at each part of the output, or tensor of the structure, summed over the backward passes that reached it
    measured:   the moments of its layers
    number:     which of the results of its operation the output is, if that is where a hook is
    task:       the backward pass that reached it last, and whether that pass added to `.grad`

    It must not hold on to the operation that computed the output, whose hook holds on to it.
    """

    arguments: Arguments | None = None
    originals: Arguments | None = None
    versions: list[int] = field(default_factory=list)
    recording: ExitStack = field(default_factory=ExitStack)
    calls: Calls | None = None
    output: Output | None = None
    retained: Sequence[weakref.ref[Tensor]] = ()
    structure: TreeSpec | None = None
    place: tuple[Any, ...] = ()
    losses: list[LossCall] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    measured: Mapping[str, LayerMoments] | None = None
    number: int | None = None
    task: int = -1
    accumulated: bool = False

    def keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], copies: bool) -> None:
        """Keeps what the model was called with, for a pass of our own; copies: of its tensors."""
        # Containers are copied, so that the user cannot change them.
        device = next((p.device.type for p in model.parameters()), "cpu")
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        self.originals = Arguments(args, kwargs, autocast)
        self.versions = _versions(self.originals)
        self.arguments = tree_map_only(Tensor, copy_of, self.originals) if copies else self.originals
        self.recording.enter_context(noted_hooks(model))

    @property
    def is_changed(self) -> bool:
        """Whether what the model was called with was written to, where there is no copy of it."""
        return self.originals is not None and self.versions != _versions(self.originals)

    def take_losses(self, parts: Sequence[Tensor], sources: Sequence[Any]) -> None:
        """Of the calls of loss functions inside of the model, keeps those of its output, or of what that is made of."""
        nodes = {part.grad_fn for part in parts}
        losses = []
        for call in self.losses:
            is_source = any(call.input is leaf for leaf in sources)
            if is_source or nodes_behind(call.input, nodes.__contains__, TO_THE_LOSS):
                call.is_whole = len(parts) == 1 and place_of(call.input) == place_of(parts[0])
                call.input = call.input.detach()
                losses.append(call)
        self.losses = losses

    def count_losses(self, task: int, afresh: bool) -> None:
        """Counts the gradients that a backward pass brought to the losses; afresh: only these."""
        for call in self.losses:
            number, gradient = call.arrived
            if afresh and not (number == task and gradient is None):  # not counted yet, for another call of the model
                call.gradient = None
            call.count(task)

    def batch(self, loss: Loss, head: Head) -> Batch:
        """The batch that the model was called with, with its output and targets."""
        batch = Batch(self.arguments, measured=self.measured)
        if self.output is None:
            return batch
        arrived = [call for call in self.losses if call.gradient is not None]
        declared = [call for call in arrived if call.is_declared]
        losses = declared or [call for call in arrived if call.function in head.functions]
        return with_targets(batch, loss, self.output.parts, losses, lambda: self._gradients(head))

    def _gradients(self, head: Head) -> Sequence[Tensor] | None:
        """At the parts of the output, as if the losses of all backward passes had been summed; None: not yet known."""
        parts = () if self.output is None else self.output.parts
        arrivals = len(parts) if self.structure is None else self.structure.num_leaves
        if not parts or len(self.gradients) < arrivals:  # the backward pass has not arrived everywhere yet
            return None
        gradients = [self.gradients[i] for i in sorted(self.gradients)]
        if self.structure is not None:  # what rearranges tensors rearranges their gradients
            gradients = head.find(tree_unflatten(gradients, self.structure))
        return gradients

    def measure(self, meter: Meter | None, index: int, loss: Loss, head: Head) -> None:
        """Measures the recorded calls on the user's graph, as if the user's backward pass had not begun.

        index: of the batch, since the last step
        """
        calls, output = self.calls, self.output
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # otherwise other passes may follow
            self.calls = None
        if calls is None or output is None or meter is None or not calls.recorded or calls.opaque:
            return
        if self.number is not None:
            output = replace(output, edges=(GradientEdge(torch._C._current_autograd_node(), self.number),))
        retained = [(t, t.grad) for t in (ref() for ref in self.retained) if t is not None and t.retains_grad]
        for tensor, _ in retained:
            tensor.grad = None
        try:
            self.measured = meter.measure(index, output, calls, self.batch(loss, head))
        except RuntimeError as reason:
            if "compiled" not in str(reason) or self.arguments is None:  # compiled functions run backward only once
                raise
        finally:
            for tensor, before in retained:
                tensor.grad = before

    def release(self) -> None:
        """A step has used it. The user may still hold on to the output, and its hook to this."""
        self.calls = None
        self.output = None
        self.losses = []
        self.measured = None


def with_targets(
    batch: Batch,
    loss: Loss,
    parts: Sequence[Tensor],
    losses: Sequence[LossCall],
    gradients: Callable[[], Sequence[Tensor] | None],
) -> Batch:
    """A batch with its output and targets; gradients: gives those at the parts of the output, if they are known."""
    likelihood = loss.likelihood
    class_dim = loss.class_dim(parts[0], losses[0].input if losses else None)
    output = laid_out(parts, class_dim)

    def gradient() -> Tensor | None:
        values = gradients()
        return None if values is None else laid_out(values, class_dim)

    targets = targets_of(likelihood, losses, output, gradient) if losses else None
    reached = None
    if targets is None and (values := gradient()) is not None:
        reached = likelihood.reached(values)
    return replace(batch, output=output, class_dim=class_dim, targets=targets, reached=reached)


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor is, how often it was written to, and its layout, which the shape does not change if contiguous."""
    layout = (tensor.numel(),) if tensor.is_contiguous() else (tensor.shape, tensor.stride())
    plain = as_plain(tensor.detach())
    # While there is a weak reference to a storage, no other one has its number.
    storage = StorageWeakRef(plain.untyped_storage())  # type: ignore[no-untyped-call]
    return (storage, plain.storage_offset(), tensor._version, *layout)


def _versions(batch: Any) -> list[int]:
    """How often each tensor of a batch has been written to."""
    return [t._version for t in tree_leaves(batch) if isinstance(t, Tensor) and not t.is_inference()]
