"""Batches that are given by `observe`; what users are told if a batch, or the call of its loss, was not seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from bprong.capture.own_pass import examples
from bprong.capture.tape import Batch
from bprong.likelihood.loss import Loss, LossCall, Targets, classes_last

NO_BATCH = """there is no batch to measure: since the last step no call of the model given to the optimizer was \
seen in training mode and with gradients that led to those in .grad.
- Is the model in eval mode? Call its train() first
- Give the module that you call (the compiled one, if it is compiled; not one that contains it, or that it contains)
- If the model is called in another way than model(x), such as by a method or a __call__ of its own, put that into \
`with optimizer.recording() as record:` and call record(output) at a fixed lr
- Where there is no such call, as in eval mode or with lr="auto", use optimizer.observe(x, y) before step()
- If the loss is computed from something other than the first output, name that with options={'output': …}
- If a compiled model computes its loss itself, compute that outside, from what the model returns"""


def with_observed(call: Batch, x: Any, y: Tensor | None, loss: Loss) -> Batch:
    """Return an observed batch; call: the call of the model that may have had the same examples."""
    length = examples(x) if y is None else len(y)
    batch = Batch(x) if call.output is None or len(call.output) != length else replace(call, x=x, measured=None)
    if y is None or batch.targets is not None:
        return batch
    if batch.output is not None:
        rows = y if y.shape == batch.output.shape else classes_last(loss.likelihood, y)
        laid_out_y = loss.likelihood.laid_out(rows, batch.output)
        if laid_out_y is None:
            loss.likelihood.check_targets(batch.output, y)
            return batch
        y = laid_out_y
    return replace(batch, targets=Targets.observed(loss, y))


def unseen_loss(loss: Loss, calls: Iterable[LossCall]) -> str:
    """Return what is said if the targets of a batch are unknown; calls: of loss functions, with the output."""
    names = sorted({f"F.{call.function}" for call in calls})
    called = f"{', '.join(names)} was called, with something else or as another loss"
    return (
        f"the loss that was declared, {loss.name}, was not called with the output of the model: "
        f"{called if names else 'no call of it was seen'}. Declare the loss that you call, and call it with what the "
        f"model returns, or name that with options={{'output': …}}. If the loss is computed in another way, give its "
        f"targets with optimizer.observe(x, y) before step()"
    )
