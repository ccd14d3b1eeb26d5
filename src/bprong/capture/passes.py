"""The training calls of a model between two optimizer steps, followed from their forward pass to their backward pass.

forward   The hooks of the model record the calls of the weights that are to be measured, if there are any.
loss      The calls of the loss function that are given the output show its targets.
backward  When the user's backward pass arrives at the output, the recorded calls are measured on its graph. Calls that
          are never back-propagated do not count.
step      The batches whose gradients are in `.grad` are used and forgotten.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from bprong.capture.batches import Batch, examples
from bprong.capture.calls import Calls, as_plain, nodes_behind, recorded_calls
from bprong.capture.gradient_scale import GradientScale
from bprong.capture.listener import Guard, Listener
from bprong.capture.losses import Watch
from bprong.capture.measure import LayerMoments, gathered
from bprong.capture.output import TO_THE_LOSS, Head, Output, laid_out
from bprong.capture.own_pass import Arguments, copy_of, is_own_pass, noted_hooks, recorded_run
from bprong.capture.weights import WeightMatrix
from bprong.contexts import Uninterrupted
from bprong.likelihood.loss import Loss
from bprong.likelihood.targets import LossCall, Targets, targets_of
from bprong.sharding import is_sharded, leaves, local


class Meter(Protocol):
    """Measures recorded calls.

    given: the parameters that are trained
    """

    given: set[Tensor]

    def weights(self) -> list[WeightMatrix]:
        """The weights to record in a forward pass that begins; none: nothing is to be measured."""

    def measure(self, index: int, output: Output, calls: Calls, batch: Batch) -> Mapping[str, LayerMoments]:
        """The moments of recorded calls that led to an output; index: of the batch, since the last step."""


@dataclass(eq=False)
class Pass:
    """A training call of the model.

    arguments:  what the model was called with, until it is known that this is not needed
    originals:  the same as the model itself has it, while it runs; versions: how often each of their tensors had been
                written to
    recording:  closed when the call ends
    calls:      of the weights to measure, until they are measured; None: nothing is to be measured
    retained:   tensors whose gradients the user may have asked to be retained
    structure:  what the model returned, without its tensors, if the output is a rearrangement of them
    place:      address, shape and strides of the output, if that is one tensor
    losses:     the calls of loss functions that were given the output
    gradients:  at each part of the output, or tensor of the structure, summed over the backward passes that reached it
    number:     which of the results of its operation the output is, if that is where a hook is
    task:       the backward pass that reached it last, and whether that pass added to `.grad`

    It must not hold on to the operation that computed the output, whose hook holds on to it.
    """

    arguments: Arguments | None
    originals: Arguments | None
    versions: list[int]
    recording: ExitStack
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


class Batches:
    """The batches a model was trained on since the last optimizer step.

    model:     the root module as the user calls it, compiled or not; it has hooks while this object lives
    loss:      the declared loss; if it is a module, that has a hook too
    head:      finds the output that the loss is computed from
    meter:     measures the calls of the model's weights; None: nothing is measured
    reads:     whether the gradients at outputs are read even if nothing is measured
    keeps:     whether the arguments of calls are kept until the next step
    observed:  the batches given by `observe`, which are measured instead of the calls
    scale:     compares gradients at the end of backward passes with those at the step

    Copies and pickles contain no batches and put hooks of their own on their model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        head: Head,
        meter: Meter | None = None,
        reads: bool = True,
        keeps: bool = True,
    ) -> None:
        self.model = model
        self.loss = loss
        self.head = head
        self.meter = meter
        self.reads = reads
        self.keeps = keeps
        self.observed: list[tuple[Any, Tensor | None]] = []
        self.reached: list[Pass] = []
        self.scale = GradientScale()
        self.unread: str | None = None  # why no output was found in what the model returned
        self.last_loss: LossCall | None = None
        self._leaves = leaves(model) if is_sharded(model) else []
        self._loss_is_inside = True  # until a call shows otherwise
        self._is_opaque = False  # whether calls of weights cannot be seen, as far as was looked
        self._changes_input: bool | None = None  # whether the model writes to what it is called with; None: not known
        self.listener = Listener(self)
        self._watch = Watch(partial(_note, weakref.ref(self)))
        weakref.finalize(self, self._watch.stop)

    def __reduce__(self) -> tuple[type[Batches], tuple[Any, ...]]:
        return Batches, (self.model, self.loss, self.head, self.meter, self.reads, self.keeps)

    @property
    def functions(self) -> set[str]:
        """The loss functions that were given the outputs of the batches."""
        return {f"F.{call.function}" for begun in self.reached for call in begun.losses}

    def stop_watching(self) -> None:
        """Look at calls of loss functions no longer, until the model is called again."""
        self._watch.stop()

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """Measure this batch at the next step, instead of the calls of the model."""
        self.observed.append((x, y))

    def forget(self) -> None:
        """Forget all batches: they were used, or the step was refused."""
        self._watch.stop()
        self.last_loss = None
        self.observed.clear()
        for begun in self.reached:  # the user may still hold on to the output, and its hook to this
            begun.calls = None
            begun.output = None
            begun.losses = []
            begun.measured = None
        self.reached.clear()
        self.listener.compiled = None

    def seen(self) -> list[Batch]:
        """The batches since the last step: those observed or, without any, the calls that a backward pass reached.

        As many calls as observed batches have the gradients of these.
        """
        calls = [self._batch(one) for one in self.reached]
        changed = any(one.originals is not None and one.versions != _versions(one.originals) for one in self.reached)
        if changed and self.keeps and not self.observed:
            raise RuntimeError(
                "the batch was changed in place between the model's call and the step, so it cannot be evaluated. "
                "Call optimizer.observe(x.clone()) before you change it"
            )
        link = self.listener.compiled
        while link is not None:
            arguments, link = link
            calls.append(Batch(Arguments(*arguments)))
        calls = [self._with_loss_inside(call) for call in calls]
        if not self.observed:
            return calls
        same = len(calls) == len(self.observed)
        return [self._observed(x, y, calls[i] if same else Batch()) for i, (x, y) in enumerate(self.observed)]

    def _observed(self, x: Any, y: Tensor | None, call: Batch) -> Batch:
        """An observed batch; call: the call of the model that may have had the same examples."""
        length = examples(x) if y is None else len(y)
        batch = Batch(x) if call.output is None or len(call.output) != length else replace(call, x=x, measured=None)
        if y is None or batch.targets is not None:
            return batch
        if batch.output is not None:
            likelihood = self.loss.likelihood
            is_laid_out = y.shape == batch.output.shape or not y.is_floating_point()
            laid_out_y = likelihood.laid_out(y if is_laid_out else likelihood.classes_last(y), batch.output)
            if laid_out_y is None:
                likelihood.check_targets(batch.output, y)
                return batch
            y = laid_out_y
        return replace(batch, targets=Targets.observed(self.loss, y))

    def _with_loss_inside(self, call: Batch) -> Batch:
        """With the targets of a loss inside of a compiled model, which a pass of our own shows."""
        is_possible = self._loss_is_inside and bool(self.head.functions) and not self._leaves
        if call.targets is not None or call.x is None or not is_possible:
            return call
        model = getattr(self.model, "_orig_mod", self.model)
        with recorded_run(model, [], call.x, seed=0, errors=True, head=self.head) as (parts, calls):
            losses = self.head.inputs(calls.losses)
            values = [t for t in tree_leaves(calls.returned) if isinstance(t, Tensor) and t.ndim == 0]
            self._loss_is_inside = bool(losses) and any(value.requires_grad for value in values)
            if not self._loss_is_inside:
                return call
            gradients = torch.autograd.grad(values[0], parts, allow_unused=True, materialize_grads=True)
        for loss in losses:
            _, loss.gradient = loss.arrived
        arrived = [loss for loss in losses if loss.gradient is not None]
        batch = self._with_targets(call, [part.detach() for part in parts], arrived, lambda: gradients)
        # A factor that the user puts on what the model returns is not known.
        return batch if batch.targets is None else replace(batch, targets=replace(batch.targets, total=None))

    # Forward ----------------------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass | None:
        """When the model is called in training: what is recorded of it; None: nothing."""
        weights = [] if self.meter is None else self.meter.weights()
        if not (weights or self.reads):
            return None
        self._watch.start()
        begun = Pass(None, None, [], ExitStack())
        if weights:
            self._is_opaque = bool(self._leaves) or any(map(_is_compiled, self.model.modules()))
        if weights or self.keeps or self._is_opaque:
            self._keep(begun, args, kwargs)
        if self._is_opaque:
            # They cannot be seen in compiled modules. Errors sent back through a sharded model would make FSDP reduce
            # gradients, and gather parameters as often as this rank's batch asks for.
            begun.calls = Calls(weights, formulas=False)
            begun.calls.opaque = True
        elif weights:
            begun.calls = begun.recording.enter_context(recorded_calls(weights, formulas=False))
            begun.calls.note_masks((args, kwargs))
        return begun

    def _keep(self, begun: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps what the model was called with, for a pass of our own."""
        # Containers are copied, so that the user cannot change them.
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        begun.originals = Arguments(args, kwargs, autocast)
        begun.versions = _versions(begun.originals)
        copies = self.keeps and self._changes_input is not False
        begun.arguments = tree_map_only(Tensor, copy_of, begun.originals) if copies else begun.originals
        begun.recording.enter_context(noted_hooks(self.model))

    def finish(self, begun: Pass, returned: Any) -> None:
        """When the call has returned, or raised an error (None): wait for a backward pass."""
        begun.recording.close()
        if returned is None:
            self.stop_watching()
        if begun.originals is not begun.arguments:
            self._changes_input = begun.versions != _versions(begun.originals)
            begun.originals = None  # what becomes of them does not matter, since there are copies
        if isinstance(self.loss.given, nn.Module) and self.head.inside is None:
            self.head.inside = any(call.is_declared for call in begun.losses)
        try:
            parts = [] if returned is None else self.head.find(returned, begun.losses)
        except TypeError as reason:  # whoever needs the output will say what is missing
            self.unread = str(reason)
            return
        if not parts or not all(part.requires_grad for part in parts):
            return
        leaves, structure = tree_flatten(returned)
        self._take_losses(begun, parts, leaves)
        begun.output = Output.of(parts)
        begun.place = _place(parts[0]) if len(parts) == 1 else ()
        sources = [edge.node for edge in begun.output.edges]
        if callable(self.head.key) and not all(any(part is leaf for leaf in leaves) for part in parts):
            begun.structure = structure  # the loss is computed from the tensors that the output was made of
            parts = leaves
            sources = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        elif len(parts) == 1:
            begun.number = parts[0].output_nr
            begun.output = replace(begun.output, edges=())
        for node in sources:  # for the loss to find the call
            cast(Any, node).metadata[id(self)] = weakref.ref(begun)
        if not any(part.numel() for part in begun.output.parts):
            begun.calls = None
        calls = begun.calls
        triggers = leaves if calls is not None and calls.opaque else []  # the loss of a compiled model may be one
        if calls is not None:
            begun.retained = [*calls.retained, *(weakref.ref(t) for t in leaves if isinstance(t, Tensor))]
            self._loss_is_inside = bool(begun.losses) or (calls.opaque and self._loss_is_inside)
            calls.drop_without_graph()
        if not self.keeps and (calls is None or not self._needs_own_pass(calls)):
            begun.arguments = None
            begun.originals = None
        for i, part in [*enumerate(parts), *((None, leaf) for leaf in triggers)]:
            self._await(begun, i, part)

    def _await(self, begun: Pass, i: int | None, part: Any) -> None:
        """Waits for a backward pass at a part of the output; hooks would gather on a parameter that is returned."""
        if isinstance(part, Tensor) and part.grad_fn is not None:
            hook = partial(_arrive, weakref.ref(self), begun, i)  # which would keep itself alive if it had the tensor
            part.register_hook(hook)  # type: ignore[no-untyped-call]

    def _needs_own_pass(self, calls: Calls) -> bool:
        """Whether statistics may have to come from a pass of our own: a weight was not seen, or code is compiled."""
        called = {call.weight for call in calls}
        missing = any(weight not in called and weight.name not in calls.empty for weight in calls.recorded)
        if calls.opaque and (self.reads or calls.recorded):
            return True  # the loss may be inside
        return missing or (bool(calls.recorded) and _anything_is_compiled())

    def _take_losses(self, begun: Pass, parts: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        """Of the calls of loss functions inside of the model, keeps those of its output, or of what that is made of."""
        nodes = {part.grad_fn for part in parts}
        sources = leaves if callable(self.head.key) else ()
        losses = []
        for call in begun.losses:
            is_source = any(call.input is leaf for leaf in sources)
            if is_source or nodes_behind(call.input, nodes.__contains__, TO_THE_LOSS):
                call.is_whole = len(parts) == 1 and _place(call.input) == _place(parts[0])
                call.input = call.input.detach()
                losses.append(call)
        begun.losses = losses

    def note_loss(self, call: LossCall) -> None:
        """When a loss function was called: it belongs to the calls of the model that its input depends on."""
        self.last_loss = call
        begun = self.listener.innermost
        if begun is not None:
            begun.losses.append(call)
            return
        for node in nodes_behind(call.input, lambda node: id(self) in node.metadata, TO_THE_LOSS):
            begun = node.metadata[id(self)]()
            if begun is not None:
                call.is_whole = bool(begun.place) and begun.place == _place(call.input)
                begun.losses.append(call)
        call.input = call.input.detach()

    # Backward ---------------------------------------------------------------------------------------------------------

    def arrive(self, begun: Pass, part: int | None, gradient: Tensor) -> None:
        """When the user's backward pass arrives at a part of the output of a call.

        If it does not add to `.grad`, it returns gradients, which may be those of the step if no other pass adds to
        `.grad`.
        """
        accumulates = destination(self._leaves or self.model.parameters())
        if begun.output is None or accumulates is None:  # it was used by an earlier step, or this is not training
            return
        if not accumulates and any(one.accumulated for one in self.reached):
            return  # its gradients are for the user's own use
        self.reached = [one for one in self.reached if one.accumulated == accumulates]
        task = torch._C._current_graph_task_id()
        finished = [one for one in self.reached if one.task != task]
        # While gradients accumulate, those of a sharded model are kept at its whole parameters.
        trained = self.model.parameters() if self.meter is None or self._leaves else self.meter.given
        if finished and _all_zero(trained):
            self.reached = [one for one in self.reached if one.task == task]  # other gradients were thrown away
        elif begun.task != task:
            self._gather(finished)
        if begun not in self.reached:
            self.reached.append(begun)
            begun.gradients = {}
            for call in begun.losses:
                if call.arrived != (task, None):  # not counted yet, for another call of the model
                    call.gradient = None
        for call in begun.losses:
            call.count(task)
        if accumulates and self.reads:
            self.scale.expect(list(self.model.parameters()))
        first = begun.task != task
        begun.task = task
        begun.accumulated = accumulates
        if part is not None:
            begun.gradients[part] = begun.gradients.get(part, 0) + gradient.detach()
        if first and begun.calls is not None:
            self._measure(begun)

    def _measure(self, begun: Pass) -> None:
        """Measures the recorded calls on the user's graph, as if the user's backward pass had not begun."""
        calls, output = begun.calls, begun.output
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # otherwise other passes may follow
            begun.calls = None
        if calls is None or output is None or self.meter is None or not calls.recorded or calls.opaque:
            return
        if begun.number is not None:
            output = replace(output, edges=(GradientEdge(torch._C._current_autograd_node(), begun.number),))
        batch = self._batch(begun)
        retained = [(t, t.grad) for t in (ref() for ref in begun.retained) if t is not None and t.retains_grad]
        for tensor, _ in retained:
            tensor.grad = None
        try:
            begun.measured = self.meter.measure(len(self.reached) - 1, output, calls, batch)
        except RuntimeError as reason:
            if "compiled" not in str(reason) or begun.arguments is None:  # compiled functions run backward only once
                raise
        finally:
            for tensor, before in retained:
                tensor.grad = before

    def _gather(self, finished: Sequence[Pass]) -> None:
        """Adds the moments of finished backward passes together, so that one set of them is kept for any number.

        If the gradients of one of them are thrown away, so are those of all the others.
        """
        counting = [one for one in finished if one.measured and self._batch(one).counts]
        for one, following in pairwise(counting):
            one.measured, following.measured = gathered(one.measured or {}, following.measured or {})

    def _batch(self, begun: Pass) -> Batch:
        """A call that a backward pass has reached."""
        batch = Batch(begun.arguments, measured=begun.measured)
        if begun.output is None:
            return batch
        arrived = [call for call in begun.losses if call.gradient is not None]
        declared = [call for call in arrived if call.is_declared]
        losses = declared or [call for call in arrived if call.function in self.head.functions]
        return self._with_targets(batch, begun.output.parts, losses, partial(self._gradients, begun))

    def _with_targets(
        self,
        batch: Batch,
        parts: Sequence[Tensor],
        losses: Sequence[LossCall],
        gradients: Callable[[], Sequence[Tensor] | None],
    ) -> Batch:
        """A batch with its output and targets; gradients: gives those at the parts of the output, if they are known."""
        likelihood = self.loss.likelihood
        class_dim = likelihood.class_dim(parts[0], losses[0].input if losses else None)
        output = laid_out(parts, class_dim)

        def gradient() -> Tensor | None:
            values = gradients()
            return None if values is None else laid_out(values, class_dim)

        targets = targets_of(likelihood, losses, output, gradient) if losses else None
        reached = None
        if targets is None and (values := gradient()) is not None:
            reached = likelihood.reached(values)
        return replace(batch, output=output, class_dim=class_dim, targets=targets, reached=reached)

    def _gradients(self, begun: Pass) -> Sequence[Tensor] | None:
        """At the parts of an output, as if the losses of all backward passes had been summed; None: not yet known."""
        parts = () if begun.output is None else begun.output.parts
        arrivals = len(parts) if begun.structure is None else begun.structure.num_leaves
        if not parts or len(begun.gradients) < arrivals:  # the backward pass has not arrived everywhere yet
            return None
        gradients = [begun.gradients[i] for i in sorted(begun.gradients)]
        if begun.structure is not None:  # what rearranges tensors rearranges their gradients
            gradients = self.head.find(tree_unflatten(gradients, begun.structure))
        return gradients


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor is, how often it was written to, and its layout, which the shape does not change if contiguous."""
    layout = (tensor.numel(),) if tensor.is_contiguous() else (tensor.shape, tensor.stride())
    plain = as_plain(tensor.detach())
    # While there is a weak reference to a storage, no other one has its number.
    storage = StorageWeakRef(plain.untyped_storage())  # type: ignore[no-untyped-call]
    return (storage, plain.storage_offset(), tensor._version, *layout)


def _note(owner: weakref.ref[Batches], call: LossCall) -> None:
    batches = owner()
    if batches is not None and not is_own_pass():
        batches.note_loss(call)


def _is_compiled(module: nn.Module) -> bool:
    call = module._compiled_call_impl
    in_place = call.compiled if isinstance(call, Guard) else call
    return hasattr(module, "_orig_mod") or in_place is not None


def _anything_is_compiled() -> bool:
    """Whether torch.compile was ever used in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])


def _arrive(owner: weakref.ref[Batches], begun: Pass, part: int | None, gradient: Tensor | None) -> None:
    """A hook on a part of the output. It does nothing within a pass of our own over the same graph."""
    batches = owner()
    if batches is not None and gradient is not None and not is_own_pass():
        with Uninterrupted():
            batches.arrive(begun, part, gradient)


def _all_zero(parameters: Iterable[Tensor]) -> bool:
    return not any(p.grad is not None and bool(local(p.grad).any()) for p in sorted(parameters, key=Tensor.numel))


def _versions(batch: Any) -> list[int]:
    """How often each tensor of a batch has been written to."""
    return [t._version for t in tree_leaves(batch) if isinstance(t, Tensor) and not t.is_inference()]


def destination(parameters: Iterable[Tensor]) -> bool | None:
    """Whether the backward pass that is running adds the gradients of any of these parameters to `.grad`.

    False: it returns some of them, as `torch.autograd.grad` does. None: it computes none of them, and is not training,
    such as ∂f/∂x for a gradient penalty.

    >>> found = []
    >>> w, x = (torch.tensor([3.0], requires_grad=True) for _ in range(2))
    >>> f = w * x
    >>> handle = f.register_hook(lambda g: found.append(destination([w])))
    >>> _ = torch.autograd.grad(f.sum(), x, retain_graph=True)
    >>> _ = torch.autograd.grad(f.sum(), w, retain_graph=True)
    >>> f.sum().backward()
    >>> found
    [None, False, True]
    """
    returned = False
    for parameter in (p for p in parameters if p.requires_grad):
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node):
                return True
        except RuntimeError:  # autograd.grad() was asked for this gradient
            returned = True
    return False if returned else None
