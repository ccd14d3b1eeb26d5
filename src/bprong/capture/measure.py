"""Calls → moments: z and δ of the layers of a model, measured in the passes that the user makes or in its own.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.backprop import Graph, normal, of_targets, roots_of
from bprong.capture.batches import Batch, Subset, copied, examples
from bprong.capture.calls import Call, Calls, recorded_calls
from bprong.capture.output import Head, Output
from bprong.capture.own_pass import random_numbers, recorded_run
from bprong.capture.padding import counted_rows, nonzero_rows
from bprong.capture.request import LayerMoments, Request
from bprong.capture.weights import WeightMatrix
from bprong.contexts import own_pass, timed, without_autocast
from bprong.likelihood.families import drawing, mixed
from bprong.likelihood.loss import Loss, Targets
from bprong.linalg.moments import Sums
from bprong.parallel.processes import ALONE, Ranks
from bprong.parallel.slices import is_sliced


def merged(batches: Iterable[Mapping[str, LayerMoments] | None]) -> dict[str, LayerMoments]:
    """Return the moments of several batches by layer, the earlier batches first, as if they had been one."""
    total: dict[str, LayerMoments] = {}
    for measured in batches:
        for name, layer in (measured or {}).items():
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
    """Run `model` on x and measure its layers; head: finds the output; for class_dim see `output.laid_out`."""
    needs_graph = bool(request.errors) or counted is not None or request.verify
    with recorded_run(model, request.weights, x, request.seed, needs_graph, head) as (parts, calls):
        measured = measure(request, Output.of(parts, class_dim), calls, y, counted)
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
    if request.likelihood is not None:
        request.likelihood.check(output.values)
    graph = Graph(output)
    calls = graph.leading(recorded)
    called = recorded.empty | {call.weight.name for call in calls}
    centred = {weight.name: centre for weight, centre in request.weights.items() if weight in recorded.recorded}
    measured = {name: LayerMoments(called=name in called) for name in centred}
    with recorded.quiet():
        reached = _add_errors(measured, request, graph, calls, y, counted)
        unexplained = graph.unexplained(calls) if request.verify else set()
    rows: Mapping[Call, Tensor] = {}
    if counted is not None or reached:
        rows = counted_rows(calls, reached, counted, output.values.shape[:-1], recorded.masks)
    sums = {name: Sums(centre, request.rows) for name, centre in centred.items()}
    for call in calls:
        if call.weight.name in request.inputs:
            call.add_inputs(sums[call.weight.name], rows.get(call))
    for name, layer in measured.items():
        layer.z = sums[name].moments() if sums[name].rows else None
        layer.unexplained = name in unexplained
    return measured


def _add_errors(
    measured: Mapping[str, LayerMoments],
    request: Request,
    graph: Graph,
    calls: Sequence[Call],
    y: Tensor | None,
    counted: Tensor | None,
) -> dict[Call, Tensor]:
    """Measure δ; return masks (rows,) of the rows that errors came back to, of the calls where that decides."""
    values = graph.output.values
    roots: Iterable[Tensor] = () if counted is None else [normal(values)]
    targets = 0
    if request.errors and request.likelihood is not None:
        roots = roots_of(values, y, request.likelihood, request.fisher)
        targets = request.likelihood.targets(values)
    if counted is not None:
        roots = map(partial(of_targets, counted=counted), roots)
        targets = int(counted.sum())
    else:
        calls = [call for call in calls if call.weight.name in request.errors]
    sums: dict[str, Sums] = defaultdict(partial(Sums, centre=False, keep_rows=request.rows))
    reached: dict[Call, Tensor] = {}

    def take(call: Call, delta: Tensor) -> None:
        if counted is not None or call.positions is not None:
            reached[call] = nonzero_rows(call, delta) | reached.get(call, False)
        if call.weight.name in request.errors:
            call.add_errors(delta, sums[call.weight.name])

    for root in roots:
        graph.send_back(calls, root, take)
    for name in request.errors & measured.keys():
        measured[name].targets = targets
        if name in sums:
            measured[name].delta = sums[name].moments(float(targets))
    return reached


class Meter:
    """Measures the layers of a model that are requested.

    request:   returns what is to be measured at this step
    recorded:  what the user's own forward passes have measured since the last step
    seconds:   the time spent, under "statistics"
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        head: Head,
        request: Callable[[], Request],
        seconds: dict[str, float],
        ranks: Ranks = ALONE,
    ) -> None:
        self.request = request
        self.recorded: list[dict[str, LayerMoments]] = []
        self._seconds = seconds
        self._model = model
        self._loss = loss
        self._head = head
        self._ranks = ranks

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry no batches."""
        return self.__dict__ | {"recorded": []}

    def measure(self, index: int, output: Output, calls: Calls, batch: Batch) -> dict[str, LayerMoments]:
        """Measure calls recorded in the user's own pass; index: of the batch, since the last step."""
        request = self.request()
        output = replace(output, class_dim=batch.class_dim)
        device = output.values.device
        seed = self._seed(request, index)
        is_ours = type(self._loss.likelihood).__module__.startswith("bprong.")
        numbers = drawing(seed, device) if is_ours else random_numbers(self._model, seed)  # torch's own generator
        autocast = without_autocast(device.type)
        with timed(self._seconds, "statistics"), own_pass(), numbers, torch.enable_grad(), autocast:
            return measure(request, output, calls, _data_targets(request, batch), batch.counted)

    def moments(
        self, batches: Sequence[Batch], request: Request, parameters: Mapping[Tensor, Tensor]
    ) -> dict[str, LayerMoments]:
        """Return the moments of the requested layers over all batches since the last step.

        parameters: the whole ones of a sharded model

        A batch that could not be measured in the user's own pass is run through the model again. So are all batches
        for a layer that none of their calls reached, although it has a gradient.
        """
        called = {name for name, layer in merged(batch.measured for batch in batches).items() if layer.called}
        missing = set(with_gradient(weight for weight in request.weights if weight.name not in called))
        by_batch = list(self.recorded)
        for i, batch in enumerate(() if by_batch else batches):
            measured = dict(batch.measured or {})
            is_wanted = batch.measured is None and request.is_due
            weights = {
                weight.of(parameters): centre
                for weight, centre in request.weights.items()
                if is_wanted or weight.name in missing
            }
            if batch.x is not None and weights:
                measured |= self._run_again(i, batch, replace(request, weights=weights))
            by_batch.append(measured)
        names = {weight.name for weight in request.weights}
        return {name: layer for name, layer in merged(by_batch).items() if name in names}

    def _run_again(self, index: int, batch: Batch, request: Request) -> dict[str, LayerMoments]:
        count = examples(batch.x)
        x = copied(batch.x, Subset(count, count), next(iter(request.weights)).weight.dtype)
        y = _data_targets(request, batch)
        request = replace(request, seed=self._seed(request, index))
        with torch.enable_grad():
            return record(self._model, request, x, y, batch.counted, self._head, batch.class_dim)

    def _seed(self, request: Request, index: int) -> int:
        """Return the seed of the targets drawn for a batch; no other batch of this step has it, on any rank."""
        return mixed(request.seed, index * self._ranks.size + self._ranks.rank)

    @contextmanager
    def recording(self) -> Iterator[Callable[..., None]]:
        """Record the calls of all weights in this context; the function it yields measures an output of theirs."""
        with recorded_calls(self.request().weights) as calls:

            def measure_output(returned: Any, y: Tensor | None = None) -> None:
                if calls.recorded:
                    targets = None if y is None else Targets.observed(self._loss, y)
                    output = Output.of(self._head.find(returned))
                    self.recorded.append(self.measure(len(self.recorded), output, calls, Batch(targets=targets)))
                    calls.clear()

            yield measure_output


def _data_targets(request: Request, batch: Batch) -> Tensor | None:
    """Return the targets of the data, if they are needed."""
    return batch.targets.y if request.fisher == "empirical" and batch.targets is not None else None


def with_gradient(weights: Iterable[WeightMatrix]) -> list[str]:
    """Return the names of the weights with a gradient, or whose bias has one, that is not zero, or sharded."""
    names = []
    for weight in weights:
        for part, parameter in ((weight.own, weight.weight), (weight.vector, weight.bias)):
            gradient = None if parameter is None else parameter.grad
            if gradient is not None and (is_sliced(gradient) or bool(part(gradient).any())):
                names.append(weight.name)
                break
    return names
