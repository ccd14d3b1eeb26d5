"""What was recorded, or observed, since the last step → the batches behind its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bprong.capture.advice import not_called, not_seen
from bprong.capture.batches import Batch, examples
from bprong.capture.output import Head
from bprong.capture.own_pass import Arguments, recorded_run
from bprong.capture.tape import Tape, with_targets
from bprong.errors import warn
from bprong.likelihood.loss import Loss, Targets, classes_last


class BatchReader:
    """Makes batches of recorded calls.

    model:     the root module as the user calls it
    loss:      the declared loss
    head:      finds the output that the loss is computed from
    reads:     whether the targets of every batch are needed, even if nothing is measured
    observed:  the batches given by `observe`, which are measured instead of the calls
    no_output: why no output was found in what the model returned
    loss_is_inside: whether the model may compute its loss itself
    """

    def __init__(self, model: nn.Module, loss: Loss, head: Head, reads: bool) -> None:
        self.observed: list[tuple[Any, Tensor | None]] = []
        self.no_output: str | None = None
        self.loss_is_inside = True  # until a call shows otherwise
        self._model = model
        self._loss = loss
        self._head = head
        self._reads = reads
        self._loss_was_seen = False  # or what is to be said of it was said

    def take(self, tapes: Sequence[Tape], compiled: Any, *, needed: bool, counting: bool, shared: bool) -> list[Batch]:
        """The batches since the last step, without empty ones.

        needed:    raise an error if there is none, or if the declared loss was not seen and its targets are needed
        counting:  those of them whose loss counts any of its targets, since a mean of nothing is not finite
        shared:    whether other processes may have such batches if this one has none
        """
        batches = self.read(tapes, compiled)
        if needed and not batches:
            raise TypeError(self.no_output) if self.no_output else RuntimeError(not_called(self._model))
        batches = [batch for batch in batches if batch.output is None or batch.output.numel()]
        if needed and not self._loss_was_seen:
            self._check_loss(tapes, batches)
        if not counting:
            return batches
        return [batch for batch in batches if batch.counts] or ([] if shared else batches)

    def _check_loss(self, tapes: Sequence[Tape], batches: Sequence[Batch]) -> None:
        """If no call of the declared loss was seen: raises where its targets are needed, and otherwise warns, once."""
        is_unknown = any(batch.targets is None and batch.output is not None for batch in batches)
        # At a fixed rate targets are not needed, and a mean of −log p may be computed by hand.
        expected = self._loss.functions if self._reads else self._loss.kind and not self.observed
        if is_unknown and expected:
            functions = {f"F.{call.function}" for tape in tapes for call in tape.losses}
            message = not_seen(self._loss.name, functions)
            if self._reads:
                raise RuntimeError(message)
            warn(message)
        self._loss_was_seen = True

    def read(self, tapes: Sequence[Tape], compiled: Any) -> list[Batch]:
        """The batches since the last step: those observed or, without any, the calls that a backward pass reached.

        compiled: the calls of a compiled model, as a linked list

        As many calls as observed batches have the gradients of these.
        """
        calls = [tape.batch(self._loss, self._head) for tape in tapes]
        link = compiled
        while link is not None:
            arguments, link = link
            calls.append(Batch(Arguments(*arguments)))
        calls = [call if call.targets is not None else self._with_loss_inside(call) for call in calls]
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
            likelihood = self._loss.likelihood
            is_laid_out = y.shape == batch.output.shape or not y.is_floating_point()
            laid_out_y = likelihood.laid_out(y if is_laid_out else classes_last(likelihood, y), batch.output)
            if laid_out_y is None:
                likelihood.check_targets(batch.output, y)
                return batch
            y = laid_out_y
        return replace(batch, targets=Targets.observed(self._loss, y))

    def _with_loss_inside(self, call: Batch) -> Batch:
        """With the targets of a loss inside of a compiled model, which a pass of our own shows."""
        if call.x is None or not self.loss_is_inside or not self._head.functions:
            return call
        model = getattr(self._model, "_orig_mod", self._model)
        with recorded_run(model, [], call.x, seed=0, errors=True, head=self._head) as (parts, calls):
            losses = self._head.inputs(calls.losses)
            values = [t for t in tree_leaves(calls.returned) if isinstance(t, Tensor) and t.ndim == 0]
            self.loss_is_inside = bool(losses) and any(value.requires_grad for value in values)
            if not self.loss_is_inside:
                return call
            gradients = torch.autograd.grad(values[0], parts, allow_unused=True, materialize_grads=True)
        for loss in losses:
            _, loss.gradient = loss.arrived
        arrived = [loss for loss in losses if loss.gradient is not None]
        batch = with_targets(call, self._loss, [part.detach() for part in parts], arrived, lambda: gradients)
        # A factor that the user puts on what the model returns is not known.
        return batch if batch.targets is None else replace(batch, targets=replace(batch.targets, total=None))
