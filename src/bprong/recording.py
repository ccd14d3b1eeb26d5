"""Batch → moments: a pass through the network of its own that measures z and δ of chosen layers and leaves no trace.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled. Random numbers, buffers (BatchNorm's running statistics), `.grad`
and the module's mode are afterwards as they were before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bprong.likelihood import Likelihood
from bprong.moments import Moments, error_moments, input_moments

__all__ = ["Call", "Fisher", "Measured", "errors_of", "observed", "record", "roots_of"]

Fisher = Literal["sampled", "exact", "empirical"]


class Call(NamedTuple):
    """One call of a layer: its name, its input z (a copy) and its output a (in the graph)."""

    layer: str
    z: Tensor
    a: Tensor


@dataclass
class Measured:
    """What one pass saw of one layer.

    z:         moments of its inputs
    delta:     moments of its errors, where they were asked for and reached it
    probe:     the inputs of its last call, to compare the layer's outputs on
    """

    z: Moments | None = None
    delta: Moments | None = None
    probe: Tensor | None = None


def record(
    model: nn.Module,
    layers: Mapping[str, tuple[nn.Module, bool]],
    x: Any,
    y: Tensor | None,
    *,
    likelihood: Likelihood,
    fisher: Fisher,
    errors: bool,
    seed: int,
) -> dict[str, Measured]:
    """Runs `model` on x and measures the layers, given by name with whether their z is centred.

    errors=False measures z alone and needs no backward pass. y, the data's targets, is used by fisher="empirical" only.
    """
    measured = {name: Measured() for name in layers}
    with observed(model, {name: module for name, (module, _) in layers.items()}, x, seed, errors) as (output, calls):
        likelihood.check(output)
        for call in calls:
            m, centre = measured[call.layer], layers[call.layer][1]
            seen = input_moments(call.z, centre)
            m.z, m.probe = seen if m.z is None else m.z.merge(seen), call.z
        if errors:
            roots, targets = roots_of(output, y, likelihood, fisher), likelihood.targets(output)
            for call, delta in errors_of(output, calls, roots):
                m, seen = measured[call.layer], error_moments(delta, targets)
                m.delta = seen if m.delta is None else m.delta.overlay(seen)
    return measured


def roots_of(output: Tensor, y: Tensor | None, likelihood: Likelihood, fisher: Fisher) -> Iterable[Tensor]:
    """Gradients at the output whose outer products add up to (or, drawn, estimate) its Fisher matrix."""
    if not torch.isfinite(output).all():  # nothing can be drawn from it; the errors are as unknown as the output
        return [torch.full_like(output, torch.nan)]
    if fisher == "exact":
        return likelihood.roots(output)
    if fisher == "sampled":
        y = likelihood.sample(output)
    elif y is None:
        raise ValueError('fisher="empirical" takes the data\'s targets: call step(x, y)')
    else:
        likelihood.check_targets(output, y)
    leaf = output.detach().requires_grad_()
    return torch.autograd.grad(likelihood.total_nll(leaf, y), leaf)


def errors_of(output: Tensor, calls: Sequence[Call], roots: Iterable[Tensor]) -> Iterator[tuple[Call, Tensor]]:
    """δ of every call that the output depends on, root by root."""
    reached = [call for call in calls if call.a.requires_grad]
    if not reached:
        return
    for root in roots:
        deltas = torch.autograd.grad(output, [call.a for call in reached], root, retain_graph=True, allow_unused=True)
        yield from ((call, delta) for call, delta in zip(reached, deltas, strict=True) if delta is not None)


@contextmanager
def observed(
    model: nn.Module, layers: Mapping[str, nn.Module], x: Any, seed: int, errors: bool
) -> Iterator[tuple[Tensor, list[Call]]]:
    """Runs `model` on x and gives its output with every call of the layers, in order."""
    with _without_trace(model, seed), torch.set_grad_enabled(errors):
        calls: list[Call] = []
        with _tapped(layers, calls):
            output = _tensor_of(_call(model, x))
        yield output, calls


@contextmanager
def _tapped(layers: Mapping[str, nn.Module], calls: list[Call]) -> Iterator[None]:
    """While it lasts, every call of a layer leaves its input and output behind."""

    def hooks(name: str) -> tuple[Any, Any]:
        inputs: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            z: Tensor = args[0] if args else kwargs["input"]
            if z.ndim == 0 or z.shape[-1] != module.in_features or z.numel() == 0:
                raise ValueError(
                    f"layer {name!r} takes at least one row of {module.in_features} features; "
                    f"in this batch it was given shape {tuple(z.shape)}"
                )
            inputs.append(z.detach().clone())

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            calls.append(Call(name, inputs.pop(), output))
            return output.clone()  # what follows may work in place (ReLU); the output kept stays as it was

        return before, after

    with ExitStack() as stack:
        for name, module in layers.items():
            before, after = hooks(name)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def _without_trace(model: nn.Module, seed: int) -> Iterator[None]:
    """Random numbers of its own, and every buffer put back afterwards."""
    # Only buffers that a forward pass writes to would need it, and nothing says which those are.
    buffers = [
        (b, b.clone()) for module in model.modules() if not _inert(module) for b in module.buffers(recurse=False)
    ]
    accelerators = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in accelerators}:
            indices = [device.index or 0 for device in accelerators if device.type == kind]
            stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
        torch.manual_seed(seed)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)


def _inert(module: nn.Module) -> bool:
    return bool(getattr(module, "buffers_are_constant", False))


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, Tensor) and (x.ndim == 0 or len(x) == 0):
        raise ValueError(f"the batch is empty: its shape is {tuple(x.shape)}")
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


def _tensor_of(output: Any) -> Tensor:
    """The tensor a likelihood speaks of: the output itself, its `.logits`, its "logits", or its first element."""
    if hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(f"the model's output must be, carry or begin with a tensor, not {type(output).__name__}")
    return output
