"""What users are told if a batch, or the call of its loss, was not seen."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def not_called(model: nn.Module) -> str:
    """Return the error message of a step whose batch was not seen: what was seen, and a remedy for each reason."""
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
    return (
        f"there is no batch to measure: since the last step no call of the model given to the optimizer, a {kind}, was "
        f"seen in training mode and with gradients that led to those in .grad.{listed}"
    )


def not_seen(loss: str, functions: Collection[str]) -> str:
    """Return what is said if the declared loss was not called; functions: the loss functions that were."""
    calls = "no call of it was seen"
    if functions:
        calls = f"{', '.join(sorted(functions))} was called, with something else or as another loss"
    return (
        f"the loss that was declared, {loss}, was not called with the output of the model: {calls}. Declare the loss "
        f"that you call, and call it with what the model returns, or name that with options={{'output': …}}. If the "
        f"loss is computed in another way, give its targets with optimizer.observe(x, y) before step()"
    )
