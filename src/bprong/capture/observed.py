"""Batches that are given by `observe`; what users are told if a batch, or the call of its loss, was not seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from bprong.capture.own_pass import examples
from bprong.capture.tape import Batch
from bprong.errors import warn
from bprong.likelihood.loss import Loss, Targets, classes_last


def with_observed(call: Batch, x: Any, y: Tensor | None, loss: Loss) -> Batch:
    """Return an observed batch; call: the call of the model that may have had the same examples."""
    length = examples(x) if y is None else len(y)
    batch = Batch(x) if call.output is None or len(call.output) != length else replace(call, x=x, measured=None)
    if y is None or batch.targets is not None:
        return batch
    if batch.output is not None:
        likelihood = loss.likelihood
        is_laid_out = y.shape == batch.output.shape or not y.is_floating_point()
        laid_out_y = likelihood.laid_out(y if is_laid_out else classes_last(likelihood, y), batch.output)
        if laid_out_y is None:
            likelihood.check_targets(batch.output, y)
            return batch
        y = laid_out_y
    return replace(batch, targets=Targets.observed(loss, y))


# What users are told --------------------------------------------------------------------------------------------------


def no_batch(model: nn.Module, no_output: str | None) -> Exception:
    """Return the error of a step whose batch was not seen: what was seen, and a remedy for each reason.

    no_output: why no output was found in what the model returned
    """
    if no_output is not None:
        return TypeError(no_output)
    kind = type(model).__name__
    trained = []
    for name, child in model.named_children():
        if any(p.grad is not None for p in child.parameters()):
            trained.append(name)
    remedies = [
        "Give the module that you call (the compiled one, if it is compiled)",
        "If the model is called in another way than model(x), such as by a method or a __call__ of its own, put that "
        "into `with optimizer.recording() as record:` and call record(output) at a fixed lr",
        'Where there is no such call, as in eval mode or with lr="auto", use optimizer.observe(x, y) before step()',
        "If the loss is computed from something other than the first output, name that with options={'output': …}",
    ]
    if len(trained) == 1:
        remedies.insert(1, f"If your training step calls its {trained[0]!r} instead, give that")
    if not model.training:
        remedies.insert(0, f"The {kind} is in eval mode: call its train() first")
    listed = "".join(f"\n- {remedy}" for remedy in remedies)
    return RuntimeError(
        f"there is no batch to measure: since the last step no call of the model given to the optimizer, a {kind}, was "
        f"seen in training mode and with gradients that led to those in .grad.{listed}"
    )


def check_loss(
    loss: Loss, batches: Sequence[Batch], functions: Collection[str], needed: bool, is_observed: bool
) -> None:
    """If the targets of a batch are unknown: raise an error where they are needed, and otherwise warn.

    functions: the loss functions that were called with the output
    """
    unknown = [batch for batch in batches if batch.targets is None and (needed or batch.output is not None)]
    # At a fixed rate targets are not needed, and a mean of −log p may be computed by hand.
    if not unknown or not (needed or (loss.kind and not is_observed)):
        return
    calls = "no call of it was seen"
    if functions:
        names = ", ".join(sorted(f"F.{function}" for function in functions))
        calls = f"{names} was called, with something else or as another loss"
    message = (
        f"the loss that was declared, {loss.name}, was not called with the output of the model: {calls}. Declare the "
        f"loss that you call, and call it with what the model returns, or name that with options={{'output': …}}. If "
        f"the loss is computed in another way, give its targets with optimizer.observe(x, y) before step()"
    )
    if needed:
        raise RuntimeError(message)
    warn(message)
