"""Calls → moments: z and δ of the layers of a model, measured in the passes that the user makes or in its own.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.backprop import Graph, normal, of_targets, roots_of
from bprong.capture.calls import Call, Calls, recorded_calls
from bprong.capture.listener import own_pass, without_autocast
from bprong.capture.own_pass import WHOLE, random_numbers, rows_of, run_alone
from bprong.capture.padding import counted_rows, nonzero_rows
from bprong.capture.request import LayerMoments, Request
from bprong.capture.tape import Batch, Head, Output
from bprong.capture.weights import WeightMatrix
from bprong.likelihood.families import drawing, mixed
from bprong.likelihood.loss import Loss, Targets
from bprong.linalg.moments import Sums, to_float64
from bprong.parallel.processes import ALONE, Ranks, is_sliced


@contextmanager
def timed(seconds: dict[str, float], purpose: str) -> Iterator[None]:
    """Add the time that the context takes."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[purpose] += time.perf_counter() - start


def merged(batches: Iterable[Mapping[str, LayerMoments]]) -> dict[str, LayerMoments]:
    """Return the moments of several batches by layer, the earlier batches first, as if they had been one."""
    total: dict[str, LayerMoments] = {}
    for measured in batches:
        for name, layer in measured.items():
            total[name] = total[name].merge(layer) if name in total else layer
    return total


def record(
    model: nn.Module,
    request: Request,
    x: Any,
    y: Tensor | None = None,
    counted: Tensor | None = None,
    head: Head | None = None,
    class_dim: int | None = None,
) -> dict[str, LayerMoments]:
    """Run `model` on x and measure its layers; head: finds the output; for class_dim see `tape.laid_out`."""
    needs_graph = bool(request.errors) or counted is not None or request.verify
    with run_alone(model, x, request.seed, needs_graph, head, recorded_calls(request.weights)) as (output, calls):
        calls.note_masks(x)
        measured = measure(request, Output.of(output, class_dim), calls, y, counted)
        for call in calls:
            measured[call.weight.name].probe = call.z
        return measured


def measure(
    request: Request, output: Output, recorded: Calls, y: Tensor | None, counted: Tensor | None
) -> dict[str, LayerMoments]:
    """Return the moments of recorded calls that led to an output.

    y:        the targets of the data, used by fisher="empirical" only
    counted:  which targets the loss counts, without the output's last dimension; None: all
    """
    targets = 0
    roots: Iterable[Tensor] = () if counted is None else [normal(output.values)]
    if request.likelihood is not None:
        request.likelihood.check(output.values)
        targets = request.likelihood.targets(output.values) if counted is None else int(counted.sum())
        if request.errors:
            roots = roots_of(output.values, y, request.likelihood, request.fisher)
    computed = {call.weight.name for call in recorded if not call.of_data}
    inputs = {}
    for weight, centre in request.weights.items():
        if weight in recorded.recorded:
            inputs[weight.name] = Sums(centre, request.rows, tails=weight.name not in computed)
    errors = {name: Sums(False, request.rows) for name in inputs}
    reached: dict[Call, Tensor] = {}  # the rows that errors came back to, of calls where that decides which rows count
    graph = Graph(output, recorded)

    def take(call: Call, delta: Tensor) -> None:
        if counted is not None or call.positions is not None:
            reached[call] = nonzero_rows(call, delta) | reached.get(call, False)
        if call.weight.name in request.errors:
            call.add_errors(to_float64(delta) if request.precise else delta, errors[call.weight.name])

    with recorded.quiet():
        for root in roots:
            graph.send_back(of_targets(root, counted), take)
    rows: Mapping[Call, Tensor] = {}
    if counted is not None or reached:
        rows = counted_rows(graph.calls, reached, counted, output.values.shape[:-1], recorded.masks)
    for call in graph.calls:
        if call.weight.name in request.inputs:
            call.add_inputs(inputs[call.weight.name], rows.get(call))
    measured = {}
    for name, z in inputs.items():
        measured[name] = LayerMoments(
            z.moments(),
            errors[name].moments(float(targets)),
            called=name in recorded.called,
            unexplained=name in graph.unexplained,
            targets=targets if name in request.errors else 0,
        )
    return measured


@dataclass(eq=False)
class Meter:
    """Measures the layers of a model that are requested.

    loss:      as it is declared
    head:      finds the output that the loss is computed from
    request:   returns what is to be measured at this step
    seconds:   the time spent, under "statistics"
    recorded:  what the user's own forward passes have measured since the last step
    """

    model: nn.Module
    loss: Loss
    head: Head
    request: Callable[[], Request]
    seconds: dict[str, float]
    ranks: Ranks = ALONE
    recorded: list[dict[str, LayerMoments]] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry no batches."""
        return self.__dict__ | {"recorded": []}

    def measure(self, index: int, output: Output, calls: Calls, batch: Batch) -> dict[str, LayerMoments]:
        """Measure calls recorded in the user's own pass; index: of the batch, since the last step."""
        request = self.request()
        device = output.values.device
        seed = self._seed(request, index)
        is_ours = type(self.loss.likelihood).__module__.startswith("bprong.")
        numbers = drawing(seed, device) if is_ours else random_numbers(self.model, seed)  # torch's own generator
        autocast = without_autocast(device.type)
        with timed(self.seconds, "statistics"), own_pass(), numbers, torch.enable_grad(), autocast:
            return measure(request, output, calls, batch.y, batch.counted)

    def moments(
        self, batches: Sequence[Batch], request: Request, parameters: Mapping[Tensor, Tensor]
    ) -> dict[str, LayerMoments]:
        """Return the moments of the requested layers over all batches since the last step.

        parameters: the whole ones of a sharded model

        A batch that could not be measured in the user's own pass is run through the model again. So are all batches
        for a layer that none of their calls reached, although it has a gradient.
        """
        called = {name for batch in batches for name, layer in (batch.measured or {}).items() if layer.called}
        measured = list(self.recorded)
        for i, batch in enumerate(() if measured else batches):
            weights = {}
            for weight, centre in request.weights.items():
                if batch.measured is None or (weight.name not in called and has_gradient(weight)):
                    weights[weight.of(parameters)] = centre
            again: Mapping[str, LayerMoments] = {}
            if batch.x is not None and weights:
                x = rows_of(batch.x, WHOLE, next(iter(weights)).weight.dtype)
                request_again = replace(request, weights=weights, seed=self._seed(request, i))
                with torch.enable_grad():
                    again = record(self.model, request_again, x, batch.y, batch.counted, self.head, batch.class_dim)
            measured.append({**(batch.measured or {}), **again})
        names = {weight.name for weight in request.weights}
        return {name: layer for name, layer in merged(measured).items() if name in names}

    def _seed(self, request: Request, index: int) -> int:
        """Return the seed of the targets drawn for a batch; no other batch of this step has it, on any rank."""
        return mixed(request.seed, index * self.ranks.size + self.ranks.rank)

    @contextmanager
    def recording(self) -> Iterator[Callable[..., None]]:
        """Record the calls of all weights in this context; the function it yields measures an output of theirs."""
        with recorded_calls(self.request().weights) as calls:

            def measure_output(returned: Any, y: Tensor | None = None) -> None:
                if calls.recorded:
                    targets = None if y is None else Targets.observed(self.loss, y)
                    tensor = self.head.find(returned)
                    output = Output.of(tensor, self.loss.class_dim(tensor, None))
                    self.recorded.append(self.measure(len(self.recorded), output, calls, Batch(targets=targets)))
                    calls.clear()

            yield measure_output


def has_gradient(weight: WeightMatrix) -> bool:
    """Return whether a weight or its bias has a gradient that is not zero, or sharded."""
    for part, parameter in ((weight.own, weight.weight), (weight.vector, weight.bias)):
        gradient = None if parameter is None else parameter.grad
        if gradient is not None and (is_sliced(gradient) or bool(part(gradient).any())):
            return True
    return False
