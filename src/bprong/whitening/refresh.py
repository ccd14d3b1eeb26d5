"""Moments → factors: update the running moments, refresh the factors.

`update` and `refresh` serve both routes, which differ in what they do with new moments: the paper's network changes
coordinates, the optimizer puts a new factor into force. `Whitening` runs the loop for a model that is not
modified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from bprong.capture.measure import has_gradient, timed
from bprong.capture.request import LayerMoments, Request
from bprong.errors import WhiteningError, warn
from bprong.likelihood.families import Likelihood
from bprong.linalg.factors import Damping, Factor
from bprong.linalg.moments import Moments
from bprong.parallel.processes import ALONE, Ranks
from bprong.whitening.layer import Layer, Side
from bprong.whitening.layers import Layers
from bprong.whitening.ranks import measured_by_all, share_layers, shared_factors
from bprong.whitening.schedule import Schedule, period_for

SEEN_IN_PART = "its weight is used in a way that cannot be recorded"

Damper = Callable[[Layer, Side], Damping]


def update(layers: Layers, measured: Mapping[str, LayerMoments], keep: float) -> dict[Side, tuple[Layer, Moments]]:
    """Adds what was measured to the running averages; gives the sides measured with the moments to factor."""
    return {
        side: (layers[name], moments)
        for name, layer_moments in measured.items()
        for side, moments in layers[name].update(layer_moments, keep)
    }


def refresh(
    updated: Mapping[Side, tuple[Layer, Moments]],
    schedule: Schedule,
    damping: Damper,
    take: Callable[[Layer, Side, Moments, Damping, Factor | None], None] = Layer.take,
    new: Collection[str] = (),
    ranks: Ranks = ALONE,
) -> None:
    """Refreshes the sides that are due: all of them, or by drift those whose moments have moved.

    take:  puts new moments of a side into force, and their factor, if several processes share factors
    new:   the names of layers that are due whatever the schedule says
    ranks: the processes that share the work, if layers have owners

    A side that cannot be refreshed keeps its factor, with a warning, and raises after several failures in a row.
    """
    due = schedule.refreshed
    pending: dict[Side, tuple[Layer, Moments, Damping]] = {}
    for side, (layer, moments) in updated.items():
        if side.name in due or layer.name in new:
            pending[side] = layer, moments, damping(layer, side)
    if schedule.periods.refresh == "drift":
        pending = _drifted(pending, schedule, ranks)
    factors = shared_factors(pending, ranks) if ranks.owners else {}
    failed = set()
    for side, (layer, moments, epsilon) in pending.items():
        factor = factors.get(side)
        try:
            if isinstance(factor, WhiteningError):
                raise factor
            take(layer, side, moments, epsilon, factor)
        except WhiteningError as reason:
            layer.failed(side, reason, quiet=layer in failed)  # both sides of a layer often fail for one reason
            failed.add(layer)
        else:
            side.refreshed_at = schedule.t
            side.failures = 0


def _drifted(
    pending: dict[Side, tuple[Layer, Moments, Damping]], schedule: Schedule, ranks: Ranks
) -> dict[Side, tuple[Layer, Moments, Damping]]:
    """The sides whose factors are out of date; each is compared with its new moments by its owner."""
    drifts = []
    for side, (layer, moments, epsilon) in pending.items():
        drifts.append(side.drift(moments, epsilon) if ranks.is_own(layer.weight) else 0.0)
    out_of_date = {}
    for side, drift in zip(pending, ranks.sums(drifts), strict=True):
        if schedule.has_drifted(side, drift):
            out_of_date[side] = pending[side]
    return out_of_date


class Whitening:
    """The layers of a model that is not modified: which of them are measured, refreshed, and left to other rules.

    given:     the parameters of the optimizer; those that require gradients are trained
    due:       whether the schedule asks for a measurement at this step
    demoted:   layers that follow the fallback rule, since not every use of their weight can be recorded, by name
    unused:    the names of layers without factors after the first refresh: no batch reached them, or they are not
               trained. The first step that trains one measures it, so that it does not follow its plain gradient
    ranks:     the processes that train the model together
    seconds:   the time spent, by purpose
    """

    def __init__(self, likelihood: Likelihood, layers: Layers, schedule: Schedule, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.given: set[Tensor] = set()
        self.layers = layers
        self.schedule = schedule
        self.demoted: dict[str, Layer] = {}
        self.unused: set[str] = set()
        self.seconds = {"statistics": 0.0, "factorisation": 0.0, "step": 0.0}
        self._likelihood = likelihood
        self.attend()

    def cover(self, layers: Mapping[str, Layer]) -> None:
        """Adds layers that the model did not have before, and replaces those whose weight is another one now."""
        demoted = self.reasons.keys()
        covered = {}
        for name, layer in layers.items():
            present = self.layers.get(name, layer)
            if present is not layer and present.weight is layer.weight:
                covered[name] = present
            elif not self.given.isdisjoint(layer.parameters) and demoted.isdisjoint(layer.parameters):
                covered[name] = layer
        self.layers.clear()
        self.layers.update(covered)  # in the order of the model
        self.share()
        self.attend()

    def attend(self) -> None:
        """Finds out at which step something is to be measured next, and whether it is this one."""
        self.schedule.plan()
        self.due = self.schedule.is_due
        new = {layer.name for layer in self.layers.values() if layer.forward.moments is None}
        self.unused = new if len(new) < len(self.layers) else set()

    @property
    def measures(self) -> bool:
        """Whether this step refreshes something, as far as all ranks know it: gradients are the same on all of them."""
        return self.due or any(has_gradient(self.layers[name].linear) for name in self.unused)

    def request(self) -> Request:
        """What is to be measured: all layers that are trained or, if nothing is due, those of them without factors.

        Without a trained bias nothing is centred, because training W would then amount to adding a bias.
        """
        schedule = self.schedule
        inputs = set(self.unused)
        errors = set(self.unused if schedule.two_sided else ())
        if self.due:
            inputs |= schedule.measured["forward"]
            errors |= schedule.measured["backward"]
        weights = {}
        verify = False
        for name, layer in self.layers.items():  # in the same order on all ranks
            trained = {p for p in layer.parameters if p.requires_grad and p in self.given}
            if trained and (name in inputs or name in errors):
                weights[layer.linear] = layer.bias in trained
                verify = verify or layer.forward.moments is None
        likelihood = self._likelihood if schedule.two_sided else None
        return Request(weights, inputs, errors, likelihood, schedule.fisher, schedule.seed, verify=verify)

    def measured(self, request: Request, measure: Callable[[], dict[str, LayerMoments]]) -> dict[str, LayerMoments]:
        """What all processes have measured; measure: gives that of this process."""
        self.share()
        if self.ranks.size == 1:
            return measure()
        gradients = (layer.weight.grad for layer in self.layers.values())
        return measured_by_all(self.ranks, self.schedule, request.weights, measure, gradients)

    def refresh(self, measured: Mapping[str, LayerMoments], damping: Damper) -> None:
        """Refreshes the layers that are due from what was measured; an error changes nothing."""
        new = {name for name in measured if self.layers[name].forward.moments is None}
        schedule = self.schedule
        with timed(self.seconds, "statistics"):
            measured = self._checked(measured, new)
            if not measured:
                return
            updated = update(self.layers, measured, schedule.average)
        with timed(self.seconds, "factorisation"):
            refresh(updated, schedule, damping, new=new & self.unused, ranks=self.ranks)
        if schedule.overhead is not None and schedule.every is None:
            measured_layers = [layer for side, (layer, _) in updated.items() if side.of_inputs]
            schedule.every = period_for(measured_layers, schedule.overhead)

    def share(self) -> None:
        """Assigns each layer to one of several processes, which factors it."""
        if self.ranks.sharded or self.ranks.size > 1:
            share_layers(self.layers, self.ranks)

    def _checked(self, measured: Mapping[str, LayerMoments], new: set[str]) -> dict[str, LayerMoments]:
        """What was measured; of layers measured for the first time, only those that can be whitened."""
        unexplained = []
        for name in filter(new.__contains__, measured):  # in the order of the model
            first = measured[name]
            linear = self.layers[name].linear
            if first.z is not None and first.delta is None and first.targets:
                warn(
                    f"layer {name!r} is trained, but whitened on the side of its inputs only: no error reaches "
                    f"{name}.weight from the output that the declared loss is computed from. It reaches your loss in "
                    f"another way, such as a second head. Nothing needs to be done if that is intended"
                )
            is_missed = not first.called and has_gradient(linear)
            if is_missed and linear.registered:
                raise ValueError(
                    f"{name}: registered, but its weight is not used as that of the layer that it was said to be like. "
                    f"See transposed= and stacked= of bprong.register"
                )
            if is_missed or first.unexplained:
                unexplained.append(name)
        for layer in self.demote(unexplained):
            warn(
                f"layer {layer.name!r} follows the fallback rule: {SEEN_IN_PART}. If your loop calls the model several "
                f"times for one loss, such as once for each step of time, put these calls into one module or into "
                f"`with optimizer.recording()`"
            )
        return {
            name: layer for name, layer in measured.items() if name in self.layers and (layer.called or name not in new)
        }

    def demote(self, names: Iterable[str]) -> list[Layer]:
        """Leaves layers, and every layer that shares a parameter with them, to the fallback rule; returns them all."""
        parameters = {p for name in names for p in self.layers[name].parameters}
        demoted: list[Layer] = []
        while sharing := [layer for layer in self.layers.values() if not parameters.isdisjoint(layer.parameters)]:
            for layer in sharing:
                self.demoted[layer.name] = self.layers.pop(layer.name)
                parameters.update(layer.parameters)
            demoted += sharing
        return demoted

    @property
    def reasons(self) -> dict[Tensor, str]:
        """Why the parameters of layers that were left to the fallback rule follow it."""
        parameters = {p for layer in self.demoted.values() for p in layer.parameters}
        return dict.fromkeys(parameters & self.given, SEEN_IN_PART)

    def load_state_dict(self, schedule: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores the states of the schedule and of layers; one that is empty follows the fallback rule."""
        self.schedule.load_state_dict(schedule)
        self.demote([name for name, state in layers.items() if not state and name in self.layers])
        for name, layer in self.layers.items():
            if name in layers:
                layer.load_state_dict(layers[name])
            if self.schedule.periods.refresh == "periodic":
                for side in layer.sides:
                    side.interval = None  # of a run that refreshed by drift
        self.ranks.owners.clear()
        self.share()
        self.attend()
