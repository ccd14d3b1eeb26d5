"""Batch → moments: a pass through the network of its own that measures z and δ of chosen layers and leaves no trace.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled. Random numbers, buffers (BatchNorm's running statistics), `.grad`
and the module's mode are afterwards as they were before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from bprong.errors import Fisher, errors_of, of_targets, roots_of, rows_that_count
from bprong.likelihood import Likelihood
from bprong.moments import Moments
from bprong.taps import Call, Calls, tapped
from bprong.units import Unit, unit_of
from bprong.verify import unexplained

__all__ = [
    "Arguments", "Measured", "measure", "merged", "observed", "random_numbers", "record",
    "tensor_of",
]  # fmt: skip


Chosen = bool | Set[str]


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
    called:    whether it was called at all, if only with no row
    unexplained: whether its weight does more than was seen
    z_rows, delta_rows, targets: the rows themselves in their place, where those were asked for
    """

    z: Moments | None = None
    delta: Moments | None = None
    probe: Tensor | None = None
    called: bool = False
    unexplained: bool = False
    z_rows: list[Tensor] = field(default_factory=list)
    delta_rows: list[Tensor] = field(default_factory=list)
    targets: int = 0

    def take_errors(self, call: Call, delta: Tensor, targets: int, rows: bool) -> None:
        self.targets = targets
        if rows:
            self.delta_rows.append(call.error_rows(delta))
        else:
            seen = call.error_moments(delta, targets)
            self.delta = seen if self.delta is None else self.delta.overlay(seen)


def record(
    model: nn.Module,
    layers: Mapping[str, tuple[Unit | nn.Module, bool]],
    x: Any,
    y: Tensor | None,
    *,
    likelihood: Likelihood | None,
    fisher: Fisher,
    inputs: Chosen = True,
    errors: Chosen = True,
    rows: Chosen = False,
    counted: Tensor | None = None,
    heard: bool = False,
    verify: bool = False,
    seed: int,
) -> dict[str, Measured]:
    """Runs `model` on x and measures the layers, given by name with whether their z is centred.

    inputs, errors: which of z and δ to measure, of all layers or of those named; z alone needs no backward pass
    y:        the data's targets; used by fisher="empirical" only
    counted:  which targets the loss does not leave out, the output's last dimension apart; None: it leaves out none
    heard:    that was read off a gradient, in which a target the model is certain of looks like one left out
    rows:     of which layers to keep the rows themselves instead of their moments
    verify:   find out whether all that the layers' weights do is seen
    """
    units = {name: unit_of(name, layer) for name, (layer, _) in layers.items()}
    with observed(model, units, x, seed, bool(errors) or counted is not None or verify) as (output, calls):
        measured = measure(
            {name: centre for name, (_, centre) in layers.items()}, output, calls, y,
            likelihood=likelihood, fisher=fisher, inputs=inputs, errors=errors, rows=rows, counted=counted, heard=heard,
        )  # fmt: skip
        for name in unexplained(output, calls) if verify else ():
            measured[name].unexplained = True
        return measured


def merged(seen: list[Measured]) -> Measured:
    """Of several batches, as if they had been one."""
    all_ = seen[0]
    for m in seen[1:]:
        all_ = Measured(
            m.z if all_.z is None else all_.z if m.z is None else all_.z.merge(m.z),
            m.delta if all_.delta is None else all_.delta if m.delta is None else all_.delta.merge(m.delta),
            all_.probe if m.probe is None else m.probe,
            all_.called or m.called,
            all_.unexplained or m.unexplained,
            all_.z_rows + m.z_rows,
            all_.delta_rows + m.delta_rows,
            all_.targets + m.targets,
        )
    return all_


def _among(name: str, chosen: Chosen) -> bool:
    return chosen if isinstance(chosen, bool) else name in chosen


def measure(
    centred: Mapping[str, bool],
    output: Tensor,
    calls: Calls,
    y: Tensor | None,
    *,
    likelihood: Likelihood | None,
    fisher: Fisher,
    inputs: Chosen,
    errors: Chosen,
    rows: Chosen = False,
    counted: Tensor | None = None,
    heard: bool = False,
) -> dict[str, Measured]:
    """The moments of calls that led to an output; without a likelihood, of their inputs alone."""
    measured = {name: Measured(called=name in calls.idle) for name in centred}
    counts: dict[Call, Tensor] = {}
    if likelihood is not None:
        likelihood.check(output)
        counted = likelihood.counted(output, counted)
    if counted is not None:
        counted = counted.flatten()
        if heard and likelihood is not None:
            (drawn,) = roots_of(output, None, likelihood, "sampled")
            counted = counted | ~drawn.reshape(len(counted), -1).any(dim=1)
        counts = rows_that_count(output, calls, counted)
    for call in calls:
        m = measured[call.layer]
        m.probe, m.called = call.z, True
        if not _among(call.layer, inputs):
            continue
        if _among(call.layer, rows):
            m.z_rows += call.input_rows(counts.get(call))
        elif (z := call.input_moments(centred[call.layer], counts.get(call))) is not None:
            m.z = z if m.z is None else m.z.merge(z)
    if errors and likelihood is not None:
        roots: Iterable[Tensor] = roots_of(output, y, likelihood, fisher)
        targets = likelihood.targets(output)
        if counted is not None:
            roots, targets = (of_targets(root, counted) for root in roots), int(counted.sum())
        for call, delta in errors_of(output, [call for call in calls if _among(call.layer, errors)], roots):
            measured[call.layer].take_errors(call, delta, targets, _among(call.layer, rows))
    return measured


@contextmanager
def observed(
    model: nn.Module, layers: Mapping[str, Unit | nn.Module], x: Any, seed: int, errors: bool
) -> Iterator[tuple[Tensor, Calls]]:
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
    """The model as it is written: not compiled, and without checkpoints, whose inside has no graph or is run again."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, stand_in in (
            ("CheckpointFunction", _NoCheckpoint),
            ("_checkpoint_without_reentrant_generator", _once),
        ):
            stack.callback(setattr, checkpoint, name, getattr(checkpoint, name))
            setattr(checkpoint, name, stand_in)
        yield


class _NoCheckpoint:
    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _once(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What surrounds a function whose inside is not to be computed again."""
    yield


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
