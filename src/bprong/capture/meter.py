"""Measures the layers of a model: in the passes that the user makes, and where these do not show them in its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batch, Subset, copied, examples
from bprong.capture.calls import Calls, recorded_calls
from bprong.capture.measure import LayerMoments, Measurement, measure, merged, record, with_gradient
from bprong.capture.output import Head, Output
from bprong.capture.own_pass import random_numbers
from bprong.capture.weights import WeightMatrix
from bprong.contexts import own_pass, timed, without_autocast
from bprong.likelihood.loss import Loss
from bprong.likelihood.random_numbers import drawing, mixed
from bprong.likelihood.targets import Targets
from bprong.parallel.processes import ALONE, Ranks


@dataclass(frozen=True)
class Request:
    """What is to be measured at a step.

    weights:  of the layers to measure, with whether their z is centred
    wanted:   of which of them the inputs and the errors, and how
    seed:     of the targets that are drawn at this step
    is_due:   whether all batches are measured; otherwise those layers that have a gradient and no factors yet
    """

    weights: Mapping[WeightMatrix, bool]
    wanted: Measurement
    seed: int
    is_due: bool

    @property
    def centred(self) -> dict[str, bool]:
        """The layers to measure, by name, with whether their z is centred."""
        return {weight.name: centre for weight, centre in self.weights.items()}


class Requests(Protocol):
    """Says what is to be measured at this step."""

    def request(self) -> Request: ...


class Meter:
    """Measures the layers of a model that are requested.

    recorded:  what the user's own forward passes have measured since the last step
    seconds:   the time spent, under "statistics"
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        head: Head,
        requests: Requests,
        seconds: dict[str, float],
        ranks: Ranks = ALONE,
    ) -> None:
        self.recorded: list[dict[str, LayerMoments]] = []
        self._seconds = seconds
        self._model = model
        self._loss = loss
        self._head = head
        self._requests = requests
        self._ranks = ranks

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry no batches."""
        return self.__dict__ | {"recorded": []}

    def weights(self) -> list[WeightMatrix]:
        """The weights to record in a forward pass that begins."""
        return list(self._requests.request().weights)

    def measure(self, index: int, output: Output, calls: Calls, batch: Batch) -> dict[str, LayerMoments]:
        """The moments of calls that were recorded in the user's own pass; index: of the batch, since the last step."""
        request = self._requests.request()
        centred = {weight.name: centre for weight, centre in request.weights.items() if weight in calls.recorded}
        output = replace(output, class_dim=batch.class_dim)
        device = output.values.device
        seed = self._seed(request, index)
        is_ours = type(self._loss.likelihood).__module__.startswith("bprong.")
        numbers = drawing(seed, device) if is_ours else random_numbers(self._model, seed)  # torch's own generator
        autocast = without_autocast(device.type)
        with timed(self._seconds, "statistics"), own_pass(), numbers, torch.enable_grad(), autocast:
            return measure(centred, output, calls, _data_targets(request, batch), request.wanted, batch.counted)

    def moments(
        self, batches: Sequence[Batch], request: Request, parameters: Mapping[Tensor, Tensor]
    ) -> dict[str, LayerMoments]:
        """The moments of the requested layers over all batches since the last step.

        parameters: the whole ones of a sharded model

        A batch that could not be measured in the user's own pass is run through the model again. So are all batches
        for a layer that none of their calls reached, although it has a gradient.
        """
        by_batch = list(self.recorded)
        called = set()
        for batch in batches:
            for name, layer in (batch.measured or {}).items():
                if layer.called or layer.empty:
                    called.add(name)
        missing = set(with_gradient(weight for weight in request.weights if weight.name not in called))
        for i, batch in enumerate(() if by_batch else batches):
            moments = dict(batch.measured or {})
            names = request.centred.keys() if batch.measured is None and request.is_due else missing
            if batch.x is not None and names:
                weights = {}
                for weight, centre in request.weights.items():
                    if weight.name in names:
                        weights[weight.of(parameters)] = centre
                moments |= self._run_again(i, batch, weights, request)
            by_batch.append(moments)
        parts = {name: [moments[name] for moments in by_batch if name in moments] for name in request.centred}
        return {name: merged(moments) for name, moments in parts.items() if moments}

    def _run_again(
        self, index: int, batch: Batch, weights: Mapping[WeightMatrix, bool], request: Request
    ) -> dict[str, LayerMoments]:
        count = examples(batch.x)
        x = copied(batch.x, Subset(count, count), next(iter(weights)).weight.dtype)
        with torch.enable_grad():
            return record(
                self._model, weights, x, _data_targets(request, batch), request.wanted,
                counted=batch.counted, class_dim=batch.class_dim, head=self._head, seed=self._seed(request, index),
            )  # fmt: skip

    def _seed(self, request: Request, index: int) -> int:
        """The seed of the targets sampled for a batch; no other batch of this step has it, on any rank."""
        return mixed(request.seed, index * self._ranks.size + self._ranks.rank)

    @contextmanager
    def recording(self) -> Iterator[Callable[..., None]]:
        """Records the calls of all weights in this context; the function it yields measures an output of theirs."""
        with recorded_calls(self.weights()) as calls:

            def measure_output(returned: Any, y: Tensor | None = None) -> None:
                if calls.recorded:
                    targets = None if y is None else Targets.observed(self._loss, y)
                    output = Output.of(self._head.find(returned))
                    self.recorded.append(self.measure(len(self.recorded), output, calls, Batch(targets=targets)))
                    calls.clear()

            yield measure_output


def _data_targets(request: Request, batch: Batch) -> Tensor | None:
    """The targets of the data, if they are needed."""
    is_needed = request.wanted.fisher == "empirical" and batch.targets is not None
    return batch.targets.y if is_needed else None  # type: ignore[union-attr]
