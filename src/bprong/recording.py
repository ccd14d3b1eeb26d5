"""Batch → moments: a pass through the network of its own that measures z and δ of chosen layers and leaves no trace.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled. Random numbers, buffers (BatchNorm's running statistics), `.grad`
and the module's mode are afterwards as they were before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bprong.likelihood import Likelihood
from bprong.moments import Moments, error_moments, input_moments

__all__ = ["Fisher", "Measured", "record"]

Fisher = Literal["sampled", "exact", "empirical"]


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
    outputs: list[Tensor] = field(default_factory=list, repr=False)


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
    with _without_trace(model, seed), _tapped(layers, measured), torch.set_grad_enabled(errors):
        output = _tensor_of(_call(model, x))
        likelihood.check(output)
        if errors:
            roots = _roots(output, y, likelihood, fisher)
            _measure_errors(output, roots, likelihood.targets(output), measured)
    for m in measured.values():
        m.outputs.clear()
    return measured


def _roots(output: Tensor, y: Tensor | None, likelihood: Likelihood, fisher: Fisher) -> Iterable[Tensor]:
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


def _measure_errors(output: Tensor, roots: Iterable[Tensor], targets: int, measured: Mapping[str, Measured]) -> None:
    taps = [(m, a) for m in measured.values() for a in m.outputs if a.requires_grad]
    if not taps:
        return
    for root in roots:
        deltas = torch.autograd.grad(output, [a for _, a in taps], root, retain_graph=True, allow_unused=True)
        for (m, _), delta in zip(taps, deltas, strict=True):
            if delta is not None:
                seen = error_moments(delta, targets)
                m.delta = seen if m.delta is None else m.delta.overlay(seen)


@contextmanager
def _tapped(layers: Mapping[str, tuple[nn.Module, bool]], measured: Mapping[str, Measured]) -> Iterator[None]:
    """While it lasts, every call of a layer leaves its inputs' moments and its output behind."""

    def hooks(name: str, centre: bool) -> tuple[Any, Any]:
        m = measured[name]

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            z: Tensor = args[0] if args else kwargs["input"]
            if z.ndim == 0 or z.shape[-1] != module.in_features or z.numel() == 0:
                raise ValueError(
                    f"layer {name!r} takes at least one row of {module.in_features} features; "
                    f"in this batch it was given shape {tuple(z.shape)}"
                )
            seen = input_moments(z, centre)
            m.z = seen if m.z is None else m.z.merge(seen)
            m.probe = z.detach().clone()

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            m.outputs.append(output)
            return output.clone()  # what follows may work in place (ReLU); the copy measured stays as it was

        return before, after

    with ExitStack() as stack:
        for name, (module, centre) in layers.items():
            before, after = hooks(name, centre)
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
