"""Batch → moments: run the model on a batch, record the calls of chosen weights, and measure their z and δ.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled. The run leaves no trace: random number generators, buffers (running
statistics of BatchNorm), `.grad` and the mode of the modules are afterwards what they were before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from bprong.capture.backprop import Fisher, errors_of, of_targets, roots_of, rows_that_count, unexplained
from bprong.capture.calls import (
    SEPARATE_ATTENTION,
    Call,
    Calls,
    merge_moments,
    recorded_calls,
    replace_attribute,
)
from bprong.capture.weights import WeightMatrix, weight_matrix_of
from bprong.likelihood.families import Likelihood
from bprong.linalg.moments import Moments, block_rows

Chosen = bool | Set[str]  # all layers, none, or those named


class Arguments(NamedTuple):
    """What a model was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class LayerMoments:
    """What was measured of one layer.

    z, delta:     moments of its inputs and of its errors; None: not asked for, or nothing reached the layer
    probe:        the input of its last call, on which outputs of the layer can be compared; None: it was not called
    empty:        whether it was called without any row
    unexplained:  whether its weight is also used in ways that were not recorded
    z_rows, delta_rows, targets:
                  for continuous whitening, the rows themselves instead of moments, and the number of targets
    """

    z: Moments | None = None
    delta: Moments | None = None
    probe: Tensor | None = None
    empty: bool = False
    unexplained: bool = False
    z_rows: list[Tensor] = field(default_factory=list)
    delta_rows: list[Tensor] = field(default_factory=list)
    targets: int = 0

    def add_errors(self, call: Call, delta: Tensor, targets: int, rows: bool) -> None:
        """Add the errors of one call, for one gradient at the output."""
        self.targets = targets
        if rows:
            self.delta_rows.append(block_rows(call.errors(delta.detach()), call.weight.outputs))
        else:
            self.delta = merge_moments(self.delta, call.error_moments(delta, targets), Moments.overlay)


def merged(parts: Sequence[LayerMoments]) -> LayerMoments:
    """The moments of several batches, as if they had been one."""
    return LayerMoments(
        z=reduce(merge_moments, (part.z for part in parts)),
        delta=reduce(merge_moments, (part.delta for part in parts)),
        probe=next((part.probe for part in reversed(parts) if part.probe is not None), None),
        empty=any(part.empty for part in parts),
        unexplained=any(part.unexplained for part in parts),
        z_rows=[rows for part in parts for rows in part.z_rows],
        delta_rows=[rows for part in parts for rows in part.delta_rows],
        targets=sum(part.targets for part in parts),
    )


def record(
    model: nn.Module,
    layers: Mapping[str, tuple[WeightMatrix | nn.Module, bool]],
    x: Any,
    y: Tensor | None,
    *,
    likelihood: Likelihood | None,
    fisher: Fisher,
    inputs: Chosen = True,
    errors: Chosen = True,
    rows: bool = False,
    counted: Tensor | None = None,
    class_dim: int | None = None,
    verify: bool = False,
    seed: int,
) -> dict[str, LayerMoments]:
    """Run `model` on x and measure the layers, given by name with whether their z is centred.

    class_dim:  see `laid_out`
    verify:     find out whether all uses of the layers' weights are recorded; for the other arguments see `measure`
    """
    weights = [weight_matrix_of(name, layer) for name, (layer, _) in layers.items()]
    with recorded_run(model, weights, x, seed, bool(errors) or counted is not None or verify) as (output, calls):
        measured = measure(
            {name: centre for name, (_, centre) in layers.items()}, laid_out(output, class_dim), calls, y,
            likelihood=likelihood, fisher=fisher, inputs=inputs, errors=errors, rows=rows, counted=counted,
        )  # fmt: skip
        missed = unexplained(output, calls) if verify else ()
        return {name: replace(m, unexplained=name in missed) for name, m in measured.items()}


def measure(
    centred: Mapping[str, bool], output: Tensor, calls: Calls, y: Tensor | None, *,
    likelihood: Likelihood | None, fisher: Fisher, inputs: Chosen, errors: Chosen, rows: bool = False,
    counted: Tensor | None = None,
) -> dict[str, LayerMoments]:  # fmt: skip
    """The moments of recorded calls that led to an output.

    centred:     the layers to measure, by name, and whether their z is centred
    y:           the targets of the data, used by fisher="empirical" only
    likelihood:  None: measure inputs only
    inputs, errors: of which layers to measure z, and δ; inputs alone need no backward pass
    rows:        keep the rows themselves instead of their moments
    counted:     which targets the loss counts, without the output's last dimension; None: all
    """
    measured = {name: LayerMoments(empty=name in calls.empty) for name in centred}
    if likelihood is not None:
        likelihood.check(output)
        counted = likelihood.counted(output, counted)
    counted = None if counted is None else counted.flatten()
    counted_rows = {} if counted is None else rows_that_count(output, calls, counted)
    for call in calls:
        m = measured[call.weight.name]
        m.probe = call.z
        if _is_chosen(call.weight.name, inputs) and rows:
            m.z_rows += [block_rows(z, call.weight.inputs) for z in call.counted_inputs(counted_rows.get(call))]
        elif _is_chosen(call.weight.name, inputs):
            m.z = merge_moments(m.z, call.input_moments(centred[call.weight.name], counted_rows.get(call)))
    if errors and likelihood is not None:
        roots = roots_of(output, y, likelihood, fisher)
        targets = likelihood.targets(output)
        if counted is not None:
            roots = map(partial(of_targets, counted=counted), roots)
            targets = int(counted.sum())
        for call, delta in errors_of(output, [call for call in calls if _is_chosen(call.weight.name, errors)], roots):
            measured[call.weight.name].add_errors(call, delta, targets, rows)
    return measured


def _is_chosen(name: str, chosen: Chosen) -> bool:
    return chosen if isinstance(chosen, bool) else name in chosen


# Which layers were reached --------------------------------------------------------------------------------------------


def with_gradient(weights: Iterable[WeightMatrix]) -> list[str]:
    """The names of the weights with a gradient, of themselves or of their bias, that is not zero."""
    return [
        weight.name
        for weight in weights
        if any(p is not None and p.grad is not None and bool(p.grad.any()) for p in (weight.weight, weight.bias))
    ]


def check_reached(measured: Mapping[str, LayerMoments], weights: Mapping[str, WeightMatrix]) -> set[str]:
    """The names of the layers that were not called; an error if one of them has a gradient all the same."""
    idle = {name for name, m in measured.items() if m.probe is None and not m.empty}
    if missing := with_gradient(weights[name] for name in measured if name in idle):
        raise RuntimeError(
            f"no statistics reached {', '.join(map(repr, missing))}: not called through model(...), but with a "
            f"gradient. Such layers cannot be whitened: freeze them, or train them with another optimizer"
        )
    return idle


def without_errors(measured: Mapping[str, LayerMoments]) -> list[str]:
    """The names of the layers that were called and that no error came back to."""
    return [name for name, m in measured.items() if m.probe is not None and not (m.delta or m.delta_rows)]


# A run of the model that leaves no trace ------------------------------------------------------------------------------


@contextmanager
def recorded_run(
    model: nn.Module, weights: Iterable[WeightMatrix], x: Any, seed: int, errors: bool
) -> Iterator[tuple[Tensor, Calls]]:
    """Run `model` on x and return its output and every call of the weights; errors: with an autograd graph."""
    if errors and torch.is_inference_mode_enabled():
        raise RuntimeError("errors cannot be propagated back inside torch.inference_mode(); leave it for this call")
    with _without_trace(model, seed), torch.set_grad_enabled(errors):
        with recorded_calls(weights) as calls, ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # otherwise nothing was compiled, and importing it takes seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for place, name, stand_in in _AS_WRITTEN:
                replace_attribute(stack, place, name, stand_in)
            output = tensor_of(_call(model, x))
        yield output, calls


_AS_WRITTEN: list[tuple[Any, str, Any]] = [  # modules are run without fused attention and without checkpoints
    SEPARATE_ATTENTION,
    # Checkpoints, reentrant or not: the function is called once, with nothing around it.
    (
        checkpoint,
        "CheckpointFunction",
        SimpleNamespace(apply=lambda function, preserve_rng_state, *args: function(*args)),
    ),
    (checkpoint, "_checkpoint_without_reentrant_generator", lambda *args, **kwargs: (None for _ in range(1))),
]


@contextmanager
def _without_trace(model: nn.Module, seed: int) -> Iterator[None]:
    """Use separate random numbers, and restore every buffer afterwards."""
    # Only buffers that a forward pass writes to need it, but nothing says which those are.
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
                    module._buffers[name] = buffer  # a forward pass may have replaced it by another tensor


@contextmanager
def random_numbers(model: nn.Module, seed: int) -> Iterator[None]:
    """Draw random numbers from `seed` on the model's devices; afterwards torch's generators continue as before."""
    accelerators = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        torch.default_generator.manual_seed(seed)
        for device in accelerators:
            stack.enter_context(torch.random.fork_rng([device.index or 0], device_type=device.type))
            with device:
                torch.get_device_module(device.type).manual_seed(seed)
        yield


def _call(model: nn.Module, x: Any) -> Any:
    """The model's output on a tensor, on a tuple or mapping of arguments, or on `Arguments`."""
    if isinstance(x, Tensor) and (x.ndim == 0 or len(x) == 0):
        raise ValueError(f"the batch is empty: its shape is {tuple(x.shape)}")
    if isinstance(x, Arguments):
        return model(*x.args, **x.kwargs)
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


def laid_out(output: Tensor, class_dim: int | None) -> Tensor:
    """An output with classes in this dimension as (B, positions, classes); None: as it is."""
    return output if class_dim is None else output.movedim(class_dim, -1).flatten(1, -2)


def tensor_of(output: Any) -> Tensor:
    """The tensor that the likelihood is about: the output itself, its `.logits`, its "logits", or its first element."""
    match output:
        case object(logits=found) | {"logits": found} | [found, *_]:
            output = found
        case Mapping():
            raise TypeError(f'the model\'s output is a mapping without "logits"; it has {sorted(map(str, output))}')
    if not isinstance(output, Tensor):
        raise TypeError(f"the model's output must be, carry or begin with a tensor, not {type(output).__name__}")
    return output
