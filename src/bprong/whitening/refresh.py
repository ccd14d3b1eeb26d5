"""The one refresh loop: measure → update the running moments → refresh the factors.

`update` and `refresh` serve both routes, which differ in what they do with new moments: the paper's network changes
coordinates, the optimizer puts a new factor into force. `Whitening` runs the loop for a model that is not modified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batch, Subset, copied, examples, without_listening
from bprong.capture.calls import recorded_calls
from bprong.capture.measure import (
    LayerMoments,
    check_reached,
    measure,
    merged,
    random_numbers,
    record,
    tensor_of,
    with_gradient,
    without_errors,
)
from bprong.errors import WhiteningError, warn
from bprong.likelihood.families import Likelihood, nontrivial
from bprong.linalg.damped_inverse import Damping
from bprong.linalg.factors import Factor
from bprong.linalg.moments import Moments
from bprong.whitening.layers import Layer, Layers
from bprong.whitening.schedule import Schedule, mixed, period_for
from bprong.whitening.side import Side

SEEN_IN_PART = "its weight is also used in a way that cannot be recorded"

Updated = dict[Side, tuple[Layer, Moments]]
Damper = Callable[[Layer, Side], Damping]
# Puts new moments of a side into force; the factor is given if it was computed together with others.
Take = Callable[[Layer, Side, Moments, Damping, Factor | None], None]
Centred = Mapping[str, bool]  # the layers to measure, by name, and whether their inputs are centred


def update(layers: Layers, measured: Mapping[str, LayerMoments], keep: float) -> Updated:
    """Adds what was measured to the running averages; gives the sides measured with the moments to factor."""
    return {
        side: (layers[name], moments)
        for name, layer_moments in measured.items()
        for side, moments in layers[name].update(layer_moments, keep)
    }


def refresh(layers: Layers, updated: Updated, schedule: Schedule, damping: Damper, take: Take) -> None:
    """Refreshes the sides that are due: all of them, or by drift those whose moments have moved.

    A side that cannot be refreshed keeps its factor, with a warning, and raises after several failures in a row.
    """
    for name in schedule.due:
        pending = {side: (*found, damping(found[0], side)) for side, found in updated.items() if side.name == name}
        if schedule.settings.refresh == "drift":
            pending = {side: found for side, found in pending.items() if schedule.has_drifted(side, *found[1:])}
        together = layers.factors_of_equals(pending)
        for side, (layer, moments, epsilon) in pending.items():
            try:
                take(layer, side, moments, epsilon, together.get(side))
            except WhiteningError as reason:
                layer.failed(side, reason)
                continue
            side.refreshed_at = schedule.t
            side.failures = 0
    layers.changed()


class Whitening:
    """The layers of a model that is not modified: measured, checked and refreshed as the schedule asks.

    examples:  the largest number of examples of a batch to measure; None: all
    covered:   the parameters of all layers
    demoted:   the names of layers that follow the fallback rule, since not every use of their weight can be recorded;
               `reasons` says so for each of their parameters
    idle:      the names of layers that were never measured: no batch reached them, or they are not trained
    recorded:  what the user's own forward passes have measured since the last step
    seconds:   the time spent, by purpose
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        layers: Layers,
        schedule: Schedule,
        examples: int | None = None,
    ) -> None:
        self.layers = layers
        self.schedule = schedule
        self.covered = layers.parameters
        self.demoted: list[str] = []
        self.reasons: dict[Tensor, str] = {}
        self.idle: set[str] = set()
        self.recorded: list[dict[str, LayerMoments]] = []
        self.seconds = {"statistics": 0.0, "factorisation": 0.0, "step": 0.0}
        self._model = model
        self._likelihood = likelihood
        self._examples = examples

    def refresh(
        self,
        batches: Sequence[Batch],
        trained: Collection[Tensor],
        due: bool,
        first_measured: Callable[[Mapping[str, LayerMoments]], None],
        damping: Damper,
        take: Take,
    ) -> None:
        """Measures and refreshes the layers with trained parameters; an error changes nothing.

        batches:         those since the last step
        due:             whether the schedule asks for it; if not, only layers are refreshed that are used for the first
                         time, which would otherwise follow their plain gradient until the next refresh
        first_measured:  receives the moments of layers that were measured for the first time
        """
        fresh = all(side.refreshed_at is None for layer in self.layers.values() for side in layer.sides)
        centred = self._centred(trained)
        newly_used = [] if fresh else [name for name in self._newly_used(batches) if name in centred]
        if not due:
            centred = {name: centred[name] for name in newly_used}
        if not centred:
            return
        new = set(centred) if fresh else self.idle & centred.keys()
        with self.schedule.unscheduled(bool(newly_used)):
            with self._timed("statistics"):
                measured = self._checked(self._measure(batches, centred, verify=fresh or bool(newly_used)), new)
                updated = update(self.layers, measured, self.schedule.settings.average)
                unmeasured = {layer.name for layer in self.layers.values() if layer.forward.moments is None}
                self.idle |= unmeasured - centred.keys()  # frozen ones, which may be trained later
                if new:
                    first_measured({name: found for name, found in measured.items() if name in new})
            with self._timed("factorisation"):
                refresh(self.layers, updated, self.schedule, damping, take)
        overhead = self.schedule.settings.overhead
        if overhead is not None and self.schedule.every is None:
            seen = [self.layers[name] for name, found in measured.items() if found.z is not None]
            self.schedule.every = period_for(seen, overhead)

    def _newly_used(self, batches: Sequence[Batch]) -> list[str]:
        """The layers that no refresh has reached and that have a gradient now, of a batch that was seen."""
        found = with_gradient(layer.linear for layer in self.layers.values() if layer.name in self.idle)
        return found if found and (batches or self.recorded) else []

    def _centred(self, trained: Collection[Tensor]) -> dict[str, bool]:
        """The layers with trained parameters, and whether their inputs are centred.

        Without a trained bias nothing is centred, because training W would then amount to adding a bias.
        """
        layers = [layer for layer in self.layers.values() if any(p in trained for p in layer.parameters)]
        return {layer.name: layer.bias in trained for layer in layers}

    # Measuring --------------------------------------------------------------------------------------------------------

    def _measure(self, batches: Sequence[Batch], centred: Centred, verify: bool) -> dict[str, LayerMoments]:
        """The moments of these layers over all batches since the last step.

        verify: find out whether every use of their weights is recorded
        """
        masks = [batch.counted(self._likelihood) for batch in batches]
        masked = any(nontrivial(mask) is not None for mask in masks)
        found = self.recorded or [
            self._measure_batch(i, batch, mask if masked else None, centred, verify and i == 0)
            for i, (batch, mask) in enumerate(zip(batches, masks, strict=True))
        ]
        return {name: merged([batch[name] for batch in found]) for name in centred}

    def _measure_batch(
        self, index: int, batch: Batch, counted: Tensor | None, centred: Centred, verify: bool
    ) -> dict[str, LayerMoments]:
        dtype = next(iter(self.layers.values())).weight.dtype
        whole = examples(batch.x)
        subset = Subset(self._examples or whole, whole)
        y = batch.targets.y if self.schedule.settings.fisher == "empirical" and batch.targets is not None else None
        y, counted = copied((y, counted), subset, dtype, several=True)
        with without_listening(), torch.enable_grad():
            return record(
                self._model, {name: (self.layers[name].linear, centre) for name, centre in centred.items()},
                copied(batch.x, subset, dtype), y, counted=counted, class_dim=batch.class_dim, verify=verify,
                seed=mixed(self.schedule.seed, index), **self._what_to_measure(),
            )  # fmt: skip

    def _what_to_measure(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "likelihood": self._likelihood if schedule.two_sided else None,
            "fisher": schedule.settings.fisher,
            "inputs": schedule.measured("forward"),
            "errors": schedule.measured("backward"),
        }

    @contextmanager
    def recording(self, trained: Collection[Tensor]) -> Iterator[Callable[..., None]]:
        """Records the calls of all weights in this context; the function it yields measures an output of theirs."""
        if not self.schedule.wanted:
            yield lambda output, y=None: None
            return
        centred = self._centred(trained)
        with recorded_calls(self.layers[name].linear for name in centred) as calls:

            def measure_output(output: Any, y: Tensor | None = None) -> None:
                with random_numbers(self._model, mixed(self.schedule.seed, len(self.recorded))):
                    counted = nontrivial(self._likelihood.not_ignored(y)) if isinstance(y, Tensor) else None
                    found = measure(centred, tensor_of(output), calls, y, counted=counted, **self._what_to_measure())
                    self.recorded.append(found)
                calls.clear()

            yield measure_output

    def _checked(self, measured: dict[str, LayerMoments], new: set[str]) -> dict[str, LayerMoments]:
        """What was measured; of layers measured for the first time, only those that can be whitened."""
        first = {name: found for name, found in measured.items() if name in new}
        if first:
            self.idle = (self.idle - new) | check_reached(first, {n: self.layers[n].linear for n in first})
        for name in without_errors(first):
            layer = self.layers[name]
            if layer.backward.name in self.schedule.wanted:
                layer.warn(layer.backward, "no error reaches it from the model's output; forward whitening only")
        for name in [name for name, found in first.items() if found.unexplained]:
            del measured[name]
            self.demote(name)
        return measured

    def demote(self, name: str, quiet: bool = False) -> None:
        """Leaves a layer, and every layer that shares a parameter with it, to the fallback rule."""
        if name not in self.layers:
            return
        layer = self.layers.pop(name)
        self.layers.changed()
        self.demoted.append(name)
        self.idle.discard(name)
        self.covered -= set(layer.parameters)
        self.reasons |= dict.fromkeys(layer.parameters, SEEN_IN_PART)
        if not quiet:
            warn(f"layer {name!r} follows the fallback rule: {SEEN_IN_PART}")
        for other in list(self.layers.values()):
            if not self.covered.issuperset(other.parameters):
                self.demote(other.name, quiet)

    @contextmanager
    def _timed(self, purpose: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += time.perf_counter() - start

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry no batches."""
        return self.__dict__ | {"recorded": []}

    def state_dict(self) -> dict[str, Any]:
        """Everything that shapes the path: tensors and plain values only."""
        return {
            "schedule": self.schedule.state_dict(),
            "demoted": list(self.demoted),
            "idle": sorted(self.idle),
            "layers": {name: layer.state_dict() for name, layer in self.layers.items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a state does not belong to the layers of this model."""
        if not {"schedule", "demoted", "idle", "layers"} <= set(state):
            raise ValueError(f"the whitening state has schedule, demoted, idle and layers; this has {sorted(state)}")
        if set(state["layers"]) != set(self.layers) - set(state["demoted"]):
            raise ValueError(f"the state has layers {sorted(state['layers'])}; this model has {sorted(self.layers)}")
        for name, saved in state["layers"].items():
            self.layers[name].check_state(saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        for name in state["demoted"]:
            self.demote(name, quiet=True)
        self.idle = set(state["idle"])
        self.schedule.load_state_dict(state["schedule"])
        for name, saved in state["layers"].items():
            self.layers[name].load_state_dict(saved)
        self.layers.changed()
