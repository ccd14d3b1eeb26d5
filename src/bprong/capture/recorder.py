"""The training calls of a model between two optimizer steps, followed from their forward pass to their backward pass.

forward   The hooks of the model record the calls of the weights that are to be measured, if there are any.
loss      The calls of the loss function that are given the output show its targets.
backward  When the user's backward pass arrives at the output, the recorded calls are measured on its graph. Calls that
          are never back-propagated do not count.
step      The batches whose gradients are in `.grad` are used and forgotten.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from bprong.capture.calls import recorded_calls
from bprong.capture.listener import Listener, is_compiled, is_own_pass, uninterrupted, unwatch, watch
from bprong.capture.measure import Meter, merged
from bprong.capture.observed import NO_BATCH, unseen_loss, with_observed
from bprong.capture.tape import Batch, Tape, copy_of_output, nodes_behind
from bprong.errors import warn
from bprong.likelihood.loss import LossCall
from bprong.parallel.processes import ALIKE, Ranks, local
from bprong.parallel.slices import leaves

ROUNDING = 1e-3  # the relative difference up to which two factors are one; a few times eps in lower precision


class Recorder:
    """The batches a model was trained on since the last optimizer step.

    model:     the root module as the user calls it, compiled or not; its calls are listened to while this object lives
    meter:     measures the calls of the model's weights; measures: whether it does so at this step
    trained:   the parameters that are trained
    reads:     whether the targets of every batch are needed, even if nothing is measured
    keeps:     whether the arguments of calls are kept until the next step
    observed:  the batches (x, y) given by `observe`, which are measured at the next step instead of the calls
    scale:     compares gradients at the end of backward passes with those at the step

    Copies and pickles contain no batches and put a hook of their own on their model.
    """

    def __init__(self, model: nn.Module, meter: Meter, reads: bool, keeps: bool) -> None:
        self.model = model
        self.meter = meter
        self.loss = meter.loss
        self.head = meter.head
        self.reads = reads
        self.keeps = keeps
        self.measures = True
        self.trained: Collection[Tensor] = list(model.parameters())
        self.observed: list[tuple[Any, Tensor | None]] = []
        self.reached: list[Tape] = []
        self._accumulates = False  # whether the passes that reached them added to `.grad`
        self.scale = GradientScale()
        self._waits = False  # whether a call since the last step waits for its loss and its backward pass
        self._leaves = leaves(model)
        self._no_output: str | None = None  # why no output was found in what the model returned
        self._loss_was_checked = False
        self.listener = Listener(self)
        weakref.finalize(self, unwatch, id(self))

    def __reduce__(self) -> tuple[type[Recorder], tuple[Any, ...], dict[str, Any]]:
        return (
            Recorder,
            (self.model, self.meter, self.reads, self.keeps),
            {"measures": self.measures, "trained": self.trained},
        )

    def stop_watching(self) -> None:
        """Look at calls of loss functions no longer, until the model is called again."""
        unwatch(id(self))

    def forget(self) -> None:
        """Forget all batches: they were used, or the step was refused."""
        self.stop_watching()
        self._waits = False
        self.observed.clear()
        for tape in self.reached:
            tape.release()
        self.reached.clear()

    # Forward ----------------------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tape | None:
        """When the model is called in training: return what is recorded of it; None: nothing."""
        weights = self.meter.request().weights if self.measures else ()
        if not (weights or self.reads):
            return None
        watch(id(self), partial(_tell, weakref.WeakMethod(self.note_loss)))
        tape = Tape()
        if weights or self.keeps:
            tape.keep(self.model, args, kwargs)
        # Calls cannot be seen in compiled modules. Errors sent back through a sharded model would make FSDP reduce
        # gradients, and gather parameters as often as this rank's batch asks for.
        if weights and not (self._leaves or any(map(is_compiled, self.model.modules()))):
            tape.calls = tape.recording.enter_context(recorded_calls(weights, formulas=False))
            tape.calls.note_masks((args, kwargs))
        return tape

    def finish(self, tape: Tape, returned: Any) -> None:
        """When the call has returned, or raised an error (None): wait for a backward pass."""
        tape.recording.close()
        if returned is None:
            if not self._waits:
                self.stop_watching()
            return
        if isinstance(self.loss.given, nn.Module) and self.head.inside is None:
            self.head.inside = any(call.is_declared for call in tape.losses)
        output: Tensor | None
        try:
            output = self.head.find(returned, tape.losses)
        except TypeError as reason:  # whoever needs the output will say what is missing
            self._no_output = str(reason)
            # Without a declared loss the output itself is not needed, but a place where a backward pass arrives.
            tensors = tree_leaves(returned) if self.loss.is_undeclared else []
            output = next((t for t in tensors if getattr(t, "grad_fn", None) is not None), None)
        if output is not None and output.grad_fn is not None:  # hooks would gather on a parameter
            self._wait(tape, output, returned)

    def _wait(self, tape: Tape, output: Tensor, returned: Any) -> None:
        """Wait for a backward pass at the output."""
        self._waits = True
        tape.output = copy_of_output(output)
        tape.number = output.output_nr
        if tape.calls is not None:
            tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
            tape.calls.retained += map(weakref.ref, tensors)
        cast(Any, output.grad_fn).metadata[id(self)] = weakref.ref(tape)  # for a loss to find the call
        hook = partial(_tell, weakref.WeakMethod(self.arrive), tape)  # no tensor, which would be a cycle
        output.register_hook(hook)  # type: ignore[no-untyped-call]
        losses = tape.losses
        tape.losses = []
        for call in losses:
            _attach(call, id(self))

    def note_loss(self, call: LossCall) -> None:
        """When a loss function was called: it belongs to the calls of the model that its input depends on."""
        if isinstance(self.loss.given, nn.Module):
            call.is_declared = _is_running(self.loss.given, sys._getframe())
        tape = self.listener.thread.tape
        if tape is None:
            _attach(call, id(self))
        else:  # its output is not known yet
            tape.losses.append(call)

    # Backward ---------------------------------------------------------------------------------------------------------

    def arrive(self, tape: Tape, gradient: Tensor | None) -> None:
        """When the user's backward pass arrives at the output of a call.

        If it does not add to `.grad`, it returns gradients, which may be those of the step if no other pass adds to
        `.grad`.
        """
        accumulates = destination(self._leaves or self.model.parameters())
        if gradient is None or tape.output is None or accumulates is None:  # a step has used it, or it is no training
            return
        if accumulates != self._accumulates:
            if self.reached and self._accumulates:
                return  # its gradients are for the user's own use
            self.reached = []
            self._accumulates = accumulates
        task = torch._C._current_graph_task_id()
        self._sort_reached(task)
        if tape not in self.reached:
            self.reached.append(tape)
            tape.gradients.clear()
        tape.gradients[task] = gradient.detach().clone()  # of which autograd may make somebody's `.grad`
        if accumulates and self.reads:
            self.scale.expect(self.model.parameters())
        tape.measure(self.meter, len(self.reached) - 1)
        measured = (tape.measured or {}).values()
        if measured and not self.keeps and all(layer.called for layer in measured):
            tape.arguments = None

    def _sort_reached(self, task: int) -> None:
        """When a backward pass arrives: drop calls whose gradients were thrown away; add the moments of others up."""
        finished = [tape for tape in self.reached if task not in tape.gradients]
        # While gradients accumulate, those of a sharded model are kept at its whole parameters.
        if finished and _all_zero(self.model.parameters() if self._leaves else self.trained):
            self.reached = [tape for tape in self.reached if tape not in finished]
            return
        # One set of moments is kept for any number of passes. If the gradients of one of them are thrown away, so are
        # those of all the others.
        counting = [tape for tape in finished if tape.measured and tape.batch(self.loss).counts]
        for one, following in pairwise(counting):
            following.measured = merged([one.measured or {}, following.measured or {}])
            one.measured = {}

    # Step -------------------------------------------------------------------------------------------------------------

    def take(self, *, needed: bool, counting: bool, shared: bool) -> list[Batch]:
        """Return the batches since the last step, without empty ones.

        needed:    raise an error if there is none, or if targets are unknown that the rule reads
        counting:  those of them whose loss counts any of its targets, since a mean of nothing is not finite
        shared:    whether other processes may have such batches if this one has none
        """
        batches = self.seen()
        if needed and not batches:
            raise TypeError(self._no_output) if self._no_output else RuntimeError(NO_BATCH)
        batches = [batch for batch in batches if batch.output is None or batch.output.numel()]
        if needed:
            self._check_loss(all(batch.targets is not None for batch in batches))
        if not counting:
            return batches
        return [batch for batch in batches if batch.counts] or ([] if shared else batches)

    def _check_loss(self, is_known: bool) -> None:
        """If the targets of some batches are unknown, raise an error where they are needed, and otherwise warn once.

        At a fixed rate they are not needed, and a mean of −log p may be computed by hand.
        """
        if not is_known:
            message = unseen_loss(self.loss, [call for tape in self.reached for call in tape.losses])
            if self.reads:
                raise RuntimeError(message)
            if self.loss.kind and not (self.observed or self._loss_was_checked):
                warn(message)
        self._loss_was_checked = True

    def seen(self) -> list[Batch]:
        """Return the batches since the last step: those observed or, without any, the calls that errors reached.

        As many calls as observed batches have the gradients of these.
        """
        calls = [tape.batch(self.loss) for tape in self.reached]
        if not self.observed:
            return calls
        same = calls if len(calls) == len(self.observed) else [Batch()] * len(self.observed)
        return [with_observed(call, x, y, self.loss) for call, (x, y) in zip(same, self.observed, strict=True)]


def _tell(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    """Call a method of a recorder that may be gone, but not within a pass of our own."""
    tell = method()
    if tell is not None and not is_own_pass():
        with uninterrupted():
            tell(*arguments)


def _attach(call: LossCall, key: int) -> None:
    """Give a call of a loss function to the calls of a model that its input depends on; key: of these in the graph."""
    for node in nodes_behind(call.input, lambda node: key in node.metadata):
        tape = node.metadata[key]()
        if tape is not None:
            call.is_whole = call.input.grad_fn is node and call.input.output_nr == tape.number
            tape.losses.append(call)
    call.input = call.input.detach()


def _is_running(module: nn.Module, frame: FrameType | None) -> bool:
    """Return whether a call of a module is among those that have led to a frame."""
    code = type(module).forward.__code__
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is module):
        frame = frame.f_back
    return frame is not None


def _all_zero(parameters: Iterable[Tensor]) -> bool:
    return not any(p.grad is not None and bool(local(p.grad).any()) for p in sorted(parameters, key=Tensor.numel))


def destination(parameters: Iterable[Tensor]) -> bool | None:
    """Return whether the backward pass that is running adds the gradients of any of these parameters to `.grad`.

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


# The factor on gradients ----------------------------------------------------------------------------------------------


class GradientScale:
    """Clipping and the unscaling of mixed precision multiply all gradients by one number.

    Norms of gradients at the end of a backward pass are compared with those at the step.
    """

    def __init__(self) -> None:
        self._noted: dict[Tensor, Tensor] = {}  # the norms of the gradients of parameters

    def expect(self, parameters: Iterable[Tensor]) -> None:
        """Within a backward pass: note the norms of the gradients when it ends.

        Processes average their gradients in a callback at the end of the backward pass; a callback that a callback
        queues comes after it.
        """
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, partial(self.note, list(parameters))))

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note the norms of the gradients as they are now."""
        self._noted = _norms({p: p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse})

    def compare(self, gradients: Mapping[Tensor, Tensor], ranks: Ranks) -> tuple[float, float | None]:
        """Return the sum of the norms of some gradients, and the factor since the last backward pass.

        That is None if gradients differ in it, and 1 if nothing was noted. Their device is waited for once.
        """
        noted = self._noted
        self._noted = {}
        norms = _norms(gradients)
        tensors = [*norms.values(), *(noted.get(p, torch.zeros_like(norm)) for p, norm in norms.items())]
        numbers = torch.stack([norm.to(tensors[0].device) for norm in tensors]).tolist()
        now, before = numbers[: len(norms)], numbers[len(norms) :]
        ratios = [a / b for a, b in zip(now, before, strict=True) if 0 < a < math.inf and 0 < b < math.inf]
        lowest = min(ratios, default=math.inf)
        highest = max(ratios, default=0.0)
        if ranks.size > 1:
            sizes, all_lowest, all_highest = ranks.table([sum(before), lowest, highest]).unbind(dim=1)
            # Who averages gradients by hand does so after the norms were noted, which then differ between ranks.
            if not (ranks.sharded or torch.allclose(sizes, sizes[:1], rtol=ALIKE)):
                return sum(now), 1.0
            lowest = float(all_lowest.min())
            highest = float(all_highest.max())
        tolerance = max(ROUNDING, 4 * max(torch.finfo(norm.dtype).eps for norm in norms.values()))
        return sum(now), None if highest > (1 + tolerance) * lowest else highest or 1.0


def _norms(gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return the norms of gradients as this process has them, whole or slices of them."""
    values = list(gradients.values())
    slices = values if values and type(values[0]) is Tensor else [local(g) for g in values]
    return dict(zip(gradients, torch._foreach_norm(slices), strict=True)) if slices else {}
