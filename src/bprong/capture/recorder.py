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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves

from bprong.capture.batches import Batch
from bprong.capture.calls import Calls, recorded_calls
from bprong.capture.gradient_scale import GradientScale
from bprong.capture.listener import Guard, Listener
from bprong.capture.losses import Watch
from bprong.capture.measure import Meter, merged
from bprong.capture.output import TO_THE_LOSS, Head, Output, nodes_behind
from bprong.capture.reader import BatchReader
from bprong.capture.tape import Tape, place_of
from bprong.contexts import Uninterrupted, is_own_pass
from bprong.likelihood.loss import Loss, LossCall
from bprong.parallel.slices import is_sharded, leaves, local


class Recorder:
    """The batches a model was trained on since the last optimizer step.

    model:     the root module as the user calls it, compiled or not; it has hooks while this object lives
    loss:      the declared loss; if it is a module, that has a hook too
    head:      finds the output that the loss is computed from
    meter:     measures the calls of the model's weights; measures: whether it does so at this step
    trained:   the parameters that are trained; None: all
    reads:     whether the targets of every batch are needed, even if nothing is measured
    keeps:     whether the arguments of calls are kept until the next step
    reader:    makes batches of what was recorded
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
        self.measures = meter is not None
        self.trained: set[Tensor] | None = None
        self.reached: list[Tape] = []
        self.scale = GradientScale()
        self.last_loss: LossCall | None = None
        self._waits = False  # whether a call since the last step waits for its loss and its backward pass
        self.reader = BatchReader(model, loss, head, reads)
        self._leaves = leaves(model) if is_sharded(model) else []
        self.reader.loss_is_inside = not self._leaves
        self._is_opaque = False  # whether calls of weights cannot be seen, as far as was looked
        self._changes_input: bool | None = None  # whether the model writes to what it is called with; None: not known
        self.listener = Listener(self)
        self._watch = Watch(partial(_note, weakref.ref(self)))
        weakref.finalize(self, self._watch.stop)

    def __reduce__(self) -> tuple[type[Recorder], tuple[Any, ...], dict[str, Any]]:
        arguments = (self.model, self.loss, self.head, self.meter, self.reads, self.keeps)
        return Recorder, arguments, {"measures": self.measures, "trained": self.trained}

    def stop_watching(self) -> None:
        """Look at calls of loss functions no longer, until the model is called again."""
        self._watch.stop()

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """Measure this batch at the next step, instead of the calls of the model."""
        self.reader.observed.append((x, y))

    def forget(self) -> None:
        """Forget all batches: they were used, or the step was refused."""
        self._watch.stop()
        self._waits = False
        self.last_loss = None
        self.reader.observed.clear()
        for tape in self.reached:
            tape.release()
        self.reached.clear()
        self.listener.compiled = None

    def seen(self) -> list[Batch]:
        """The batches since the last step: those observed or, without any, the calls that a backward pass reached."""
        self._check_unchanged()
        return self.reader.read(self.reached, self.listener.compiled)

    def take(self, **conditions: bool) -> list[Batch]:
        """The batches that a step needs; see `BatchReader.take`."""
        self._check_unchanged()
        return self.reader.take(self.reached, self.listener.compiled, **conditions)

    def _check_unchanged(self) -> None:
        if self.keeps and not self.reader.observed and any(tape.is_changed for tape in self.reached):
            raise RuntimeError(
                "the batch was changed in place between the model's call and the step, so it cannot be evaluated. "
                "Call optimizer.observe(x.clone()) before you change it"
            )

    # Forward ----------------------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tape | None:
        """When the model is called in training: what is recorded of it; None: nothing."""
        weights = list(self.meter.request().weights) if self.measures and self.meter is not None else []
        if not (weights or self.reads):
            return None
        self._watch.start()
        tape = Tape()
        if weights:
            self._is_opaque = bool(self._leaves) or any(map(_is_compiled, self.model.modules()))
        if weights or self.keeps or self._is_opaque:
            tape.keep(self.model, args, kwargs, copies=self.keeps and self._changes_input is not False)
        if self._is_opaque:
            # They cannot be seen in compiled modules. Errors sent back through a sharded model would make FSDP reduce
            # gradients, and gather parameters as often as this rank's batch asks for.
            tape.calls = Calls(weights, formulas=False)
            tape.calls.opaque = True
        elif weights:
            tape.calls = tape.recording.enter_context(recorded_calls(weights, formulas=False))
            tape.calls.note_masks((args, kwargs))
        return tape

    def finish(self, tape: Tape, returned: Any) -> None:
        """When the call has returned, or raised an error (None): wait for a backward pass."""
        tape.recording.close()
        if returned is None and not self._waits:
            self.stop_watching()
        if tape.originals is not tape.arguments:
            self._changes_input = tape.is_changed
            tape.originals = None  # what becomes of them does not matter, since there are copies
        if isinstance(self.loss.given, nn.Module) and self.head.inside is None:
            self.head.inside = any(call.is_declared for call in tape.losses)
        try:
            parts = [] if returned is None else self.head.find(returned, tape.losses)
        except TypeError as reason:  # whoever needs the output will say what is missing
            self.reader.no_output = str(reason)
            # Without a declared loss the output itself is not needed, but a place where a backward pass arrives.
            tensors = tree_leaves(returned) if self.loss.is_undeclared else []
            parts = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad][:1]
        if parts and all(part.requires_grad for part in parts):
            self._wait(tape, parts, returned)

    def _wait(self, tape: Tape, parts: Sequence[Tensor], returned: Any) -> None:
        """Waits for a backward pass at the parts of the output, or at the tensors that they are made of."""
        self._waits = True
        tensors, structure = tree_flatten(returned)
        is_function = callable(self.head.key)
        if tape.losses:
            tape.take_losses(parts, tensors if is_function else ())
        tape.output = Output.of(parts)
        tape.place = place_of(parts[0]) if len(parts) == 1 else ()
        sources = [edge.node for edge in tape.output.edges]
        if is_function and not all(any(part is leaf for leaf in tensors) for part in parts):
            tape.structure = structure  # the loss is computed from the tensors that the output was made of
            parts = tensors
            sources = [leaf.grad_fn for leaf in tensors if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        elif len(parts) == 1:
            tape.number = parts[0].output_nr
            tape.output = replace(tape.output, edges=())
        for node in sources:  # for the loss to find the call
            cast(Any, node).metadata[id(self)] = weakref.ref(tape)
        if not any(part.numel() for part in tape.output.parts):
            tape.calls = None
        calls = tape.calls
        if calls is not None:
            tape.retained = [*calls.retained, *(weakref.ref(t) for t in tensors if isinstance(t, Tensor))]
            self.reader.loss_is_inside = bool(tape.losses) or (calls.opaque and self.reader.loss_is_inside)
            calls.drop_without_graph()
        if not self.keeps and (calls is None or not _needs_own_pass(calls, self.reads)):
            tape.arguments = None
            tape.originals = None
        for i, part in enumerate(parts):
            _await(self, tape, i, part)
        if calls is not None and calls.opaque:  # the loss of a compiled model may be one of its tensors
            for leaf in tensors:
                _await(self, tape, None, leaf)

    def note_loss(self, call: LossCall) -> None:
        """When a loss function was called: it belongs to the calls of the model that its input depends on."""
        self.last_loss = call
        running = self.listener.innermost
        if running is not None:
            running.losses.append(call)
            return
        for node in nodes_behind(call.input, lambda node: id(self) in node.metadata, TO_THE_LOSS):
            tape = node.metadata[id(self)]()
            if tape is not None:
                call.is_whole = bool(tape.place) and tape.place == place_of(call.input)
                tape.losses.append(call)
        call.input = call.input.detach()

    # Backward ---------------------------------------------------------------------------------------------------------

    def arrive(self, tape: Tape, part: int | None, gradient: Tensor) -> None:
        """When the user's backward pass arrives at a part of the output of a call.

        If it does not add to `.grad`, it returns gradients, which may be those of the step if no other pass adds to
        `.grad`.
        """
        accumulates = destination(self._leaves or self.model.parameters())
        if tape.output is None or accumulates is None:  # it was used by an earlier step, or this is not training
            return
        if not accumulates and any(one.accumulated for one in self.reached):
            return  # its gradients are for the user's own use
        task = torch._C._current_graph_task_id()
        is_first = tape.task != task
        if self.reached:
            self._sort_reached(accumulates, task, is_first)
        is_new = tape not in self.reached
        if is_new:
            self.reached.append(tape)
            tape.gradients = {}
        tape.count_losses(task, afresh=is_new)
        if accumulates and self.reads:
            self.scale.expect(list(self.model.parameters()))
        tape.task = task
        tape.accumulated = accumulates
        if part is not None:
            tape.gradients[part] = tape.gradients.get(part, 0) + gradient.detach()
        if is_first and tape.calls is not None:
            tape.measure(self.meter, len(self.reached) - 1, self.loss, self.head)

    def _sort_reached(self, accumulates: bool, task: int, is_first: bool) -> None:
        """Drops the calls whose gradients were thrown away or were not for `.grad`; adds the moments of others up.

        is_first: whether the backward pass arrives at a call for the first time
        """
        self.reached = [tape for tape in self.reached if tape.accumulated == accumulates]
        finished = [tape for tape in self.reached if tape.task != task]
        # While gradients accumulate, those of a sharded model are kept at its whole parameters.
        trained = self.model.parameters() if self.trained is None or self._leaves else self.trained
        if finished and _all_zero(trained):
            self.reached = [tape for tape in self.reached if tape.task == task]
        elif is_first:
            # One set of moments is kept for any number of passes. If the gradients of one of them are thrown away, so
            # are those of all the others.
            counting = [tape for tape in finished if tape.measured and tape.batch(self.loss, self.head).counts]
            for one, following in pairwise(counting):
                following.measured = merged([one.measured or {}, following.measured or {}])
                one.measured = {}


def _await(recorder: Recorder, tape: Tape, i: int | None, part: Any) -> None:
    """Waits for a backward pass at a part of the output; hooks would gather on a parameter that is returned."""
    if isinstance(part, Tensor) and part.grad_fn is not None:
        hook = partial(_arrive, weakref.ref(recorder), tape, i)  # which would keep itself alive if it had the tensor
        part.register_hook(hook)  # type: ignore[no-untyped-call]


def _note(owner: weakref.ref[Recorder], call: LossCall) -> None:
    recorder = owner()
    if recorder is not None and not is_own_pass():
        with Uninterrupted():
            recorder.note_loss(call)


def _arrive(owner: weakref.ref[Recorder], tape: Tape, part: int | None, gradient: Tensor | None) -> None:
    """A hook on a part of the output. It does nothing within a pass of our own over the same graph."""
    recorder = owner()
    if recorder is not None and gradient is not None and not is_own_pass():
        with Uninterrupted():
            recorder.arrive(tape, part, gradient)


def _needs_own_pass(calls: Calls, reads: bool) -> bool:
    """Whether statistics may have to come from a pass of our own: a weight was not seen, or code is compiled.

    reads: whether targets are needed too
    """
    if calls.opaque and (reads or calls.recorded):
        return True  # the loss may be inside
    called = {call.weight for call in calls}
    if any(weight not in called and weight.name not in calls.empty for weight in calls.recorded):
        return True
    return bool(calls.recorded) and _anything_is_compiled()


def _is_compiled(module: nn.Module) -> bool:
    call = module._compiled_call_impl
    in_place = call.compiled if isinstance(call, Guard) else call
    return hasattr(module, "_orig_mod") or in_place is not None


def _anything_is_compiled() -> bool:
    """Whether torch.compile was ever used in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])


def _all_zero(parameters: Iterable[Tensor]) -> bool:
    return not any(p.grad is not None and bool(local(p.grad).any()) for p in sorted(parameters, key=Tensor.numel))


def destination(parameters: Iterable[Tensor]) -> bool | None:
    """Whether the backward pass that is running adds the gradients of any of these parameters to `.grad`.

    False: it returns some of them, as `torch.autograd.grad` does. None: it computes none of them, and is not training,
    such as ∂f/∂x for a gradient penalty.

    >>> destinations = []
    >>> w, x = (torch.tensor([3.0], requires_grad=True) for _ in range(2))
    >>> f = w * x
    >>> handle = f.register_hook(lambda g: destinations.append(destination([w])))
    >>> _ = torch.autograd.grad(f.sum(), x, retain_graph=True)
    >>> _ = torch.autograd.grad(f.sum(), w, retain_graph=True)
    >>> f.sum().backward()
    >>> destinations
    [None, False, True]
    """
    returned = False
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node):
                return True
        except RuntimeError:  # autograd.grad() was asked for this gradient
            returned = True
    return False if returned else None
