"""Batch → moments: a pass through the network of its own that measures z and δ of chosen layers and leaves no trace.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled. Random numbers, buffers (BatchNorm's running statistics), `.grad`
and the module's mode are afterwards as they were before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from bprong.likelihood import Likelihood
from bprong.moments import Moments
from bprong.taps import Call, tapped
from bprong.units import Unit, unit_of

__all__ = [
    "Arguments",
    "Fisher",
    "Measured",
    "errors_of",
    "measure",
    "observed",
    "random_numbers",
    "record",
    "roots_of",
    "tensor_of",
]

Fisher = Literal["sampled", "exact", "empirical"]


class Arguments(NamedTuple):
    """What a model was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Measured:
    """What one pass saw of one layer.

    z:         moments of its inputs, where they were asked for
    delta:     moments of its errors, where they were asked for and reached it
    probe:     the inputs of its last call, to compare the layer's outputs on
    """

    z: Moments | None = None
    delta: Moments | None = None
    probe: Tensor | None = None


def record(
    model: nn.Module,
    layers: Mapping[str, tuple[Unit | nn.Module, bool]],
    x: Any,
    y: Tensor | None,
    *,
    likelihood: Likelihood | None,
    fisher: Fisher,
    inputs: bool = True,
    errors: bool = True,
    counted: Tensor | None = None,
    seed: int,
) -> dict[str, Measured]:
    """Runs `model` on x and measures the layers, given by name with whether their z is centred.

    inputs, errors: which of z and δ to measure; z alone needs no backward pass
    y:        the data's targets; used by fisher="empirical" only
    counted:  which targets the loss does not leave out, the output's last dimension apart; None: it leaves out none
    """
    units = {name: unit_of(name, layer) for name, (layer, _) in layers.items()}
    traced = errors or counted is not None  # which rows errors come back to takes a backward pass as well
    with observed(model, units, x, seed, traced) as (output, calls):
        return measure(
            {name: centre for name, (_, centre) in layers.items()}, output, calls, y,
            likelihood=likelihood, fisher=fisher, inputs=inputs, errors=errors, counted=counted,
        )  # fmt: skip


def measure(
    centred: Mapping[str, bool],
    output: Tensor,
    calls: Sequence[Call],
    y: Tensor | None,
    *,
    likelihood: Likelihood | None,
    fisher: Fisher,
    inputs: bool,
    errors: bool,
    counted: Tensor | None = None,
) -> dict[str, Measured]:
    """The moments of calls that led to an output; without a likelihood, of their inputs alone.

    Where the loss leaves targets out, only the others count: as targets, and of the inputs only the rows that an error
    of theirs comes back to (padding has none, unless it is attended to).
    """
    measured = {name: Measured() for name in centred}
    if likelihood is not None:
        likelihood.check(output)
        counted = likelihood.counted(output, counted)
    elif counted is not None:
        counted = counted.flatten()
    reached: dict[Call, Tensor] = {}
    for call, delta, targets in _errors(output, calls, y, likelihood if errors else None, fisher, counted):
        if counted is not None:
            rows = _reached(call.errors(delta))
            reached[call] = reached[call] | rows if call in reached else rows
        if errors and likelihood is not None:
            m, seen = measured[call.layer], call.error_moments(delta, targets)
            m.delta = seen if m.delta is None else m.delta.overlay(seen)
    for call in calls:
        m = measured[call.layer]
        m.probe = call.z
        if inputs and (z := call.input_moments(centred[call.layer], reached.get(call))) is not None:
            m.z = z if m.z is None else m.z.merge(z)
    return measured


def _reached(delta: Tensor) -> Tensor:
    """Which rows (rows, groups, out) an error comes to; one that cancels but for rounding does not count."""
    size = delta.detach().flatten(1).norm(dim=1)
    least: float = float(size.max()) * torch.finfo(size.dtype).eps ** 0.75
    return torch.gt(size, least)


def _errors(
    output: Tensor,
    calls: Sequence[Call],
    y: Tensor | None,
    likelihood: Likelihood | None,
    fisher: Fisher,
    counted: Tensor | None,
) -> Iterator[tuple[Call, Tensor, int]]:
    """δ of every call, root by root, with the number of targets; without a likelihood, of where errors come to only."""
    if likelihood is None and counted is None:
        return
    roots = [torch.randn_like(output)] if likelihood is None else roots_of(output, y, likelihood, fisher)
    targets = 0 if likelihood is None else likelihood.targets(output)
    if counted is not None:
        rows, targets = counted.view(-1, 1), int(counted.sum())
        roots = ((root.reshape(len(rows), -1) * rows).view_as(root) for root in roots)
    for call, delta in errors_of(output, calls, roots):
        yield call, delta, targets


def roots_of(output: Tensor, y: Tensor | None, likelihood: Likelihood, fisher: Fisher) -> Iterable[Tensor]:
    """Gradients at the output whose outer products add up to (or, drawn, estimate) its Fisher matrix."""
    if not torch.isfinite(output).all():  # nothing can be drawn from it; the errors are as unknown as the output
        return [torch.full_like(output, torch.nan)]
    if fisher == "exact":
        return (root * _signs(root) for root in likelihood.roots(output))
    if fisher == "sampled":
        y = likelihood.sample(output)
    elif y is None:
        raise ValueError(
            'fisher="empirical" takes the data\'s targets: give y with the batch, step(x, y) or observe(x, y)'
        )
    elif not isinstance(y, Tensor):
        raise ValueError(f"targets must be a tensor, not {type(y).__name__}")
    else:
        likelihood.check_targets(output, y)
    leaf = output.detach().requires_grad_()
    return torch.autograd.grad(likelihood.total_nll(leaf, y), leaf)


def _signs(root: Tensor) -> Tensor:
    """±1 for each row of the batch, drawn anew for each root.

    They change nothing where rows are computed independently. Where they are not (BatchNorm in training, sequences
    flattened into rows), errors of different rows would meet with products that the model says are zero on average;
    with random signs they are.
    """
    bits = torch.randint(0, 2, root.shape[:1], device=root.device)
    return (2 * bits - 1).to(root.dtype).view(-1, *(1 for _ in root.shape[1:]))


def errors_of(output: Tensor, calls: Sequence[Call], roots: Iterable[Tensor]) -> Iterator[tuple[Call, Tensor]]:
    """δ of every call that the output depends on, root by root."""
    reached = [call for call in calls if call.a.requires_grad]
    if not reached:
        return
    if not output.requires_grad:
        raise ValueError("the model's output is detached from its layers: no error can be propagated back to them")
    for root in roots:
        deltas = torch.autograd.grad(output, [call.a for call in reached], root, retain_graph=True, allow_unused=True)
        yield from ((call, delta) for call, delta in zip(reached, deltas, strict=True) if delta is not None)


@contextmanager
def observed(
    model: nn.Module, layers: Mapping[str, Unit | nn.Module], x: Any, seed: int, errors: bool
) -> Iterator[tuple[Tensor, list[Call]]]:
    """Runs `model` on x and gives its output with every call of the layers, in order."""
    units = [unit_of(name, layer) for name, layer in layers.items()]
    if errors and torch.is_inference_mode_enabled():
        raise RuntimeError("errors cannot be propagated back inside torch.inference_mode(); leave it for this call")
    with _without_trace(model, seed), torch.set_grad_enabled(errors):
        with tapped(units) as calls, _plainly():
            output = tensor_of(_call(model, x))
        yield output, calls


@contextmanager
def _plainly() -> Iterator[None]:
    """The model as it is written: not compiled, and without re-entrant checkpoints, whose inside has no graph."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(setattr, checkpoint, "CheckpointFunction", checkpoint.CheckpointFunction)
        checkpoint.CheckpointFunction = _NoCheckpoint  # type: ignore[misc,assignment]
        yield


class _NoCheckpoint:
    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def _without_trace(model: nn.Module, seed: int) -> Iterator[None]:
    """Random numbers of its own, and every buffer put back afterwards."""
    # Only buffers that a forward pass writes to would need it, and nothing says which those are.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        if not getattr(module, "buffers_are_constant", False)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with random_numbers(model, seed):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, saved in buffers:
                    buffer.copy_(saved)
                    module._buffers[name] = buffer  # a forward pass may also have put another tensor in its place


@contextmanager
def random_numbers(model: nn.Module, seed: int) -> Iterator[None]:
    """A stream of random numbers from `seed` on the model's devices; torch's own goes on afterwards where it was."""
    accelerators = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)
        for device in accelerators:
            stack.enter_context(torch.random.fork_rng([device.index or 0], device_type=device.type))
            with device:
                torch.get_device_module(device.type).manual_seed(seed)
        yield


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, Tensor) and (x.ndim == 0 or len(x) == 0):
        raise ValueError(f"the batch is empty: its shape is {tuple(x.shape)}")
    if isinstance(x, Arguments):
        return model(*x.args, **x.kwargs)
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


def tensor_of(output: Any) -> Tensor:
    """The tensor a likelihood speaks of: the output itself, its `.logits`, its "logits", or its first element."""
    if hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, Mapping):
        if "logits" not in output:
            raise TypeError(f'the model\'s output is a mapping without "logits"; it has {sorted(map(str, output))}')
        output = output["logits"]
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(f"the model's output must be, carry or begin with a tensor, not {type(output).__name__}")
    return output
