"""Batch → moments → preconditioner: the statistics behind an optimizer, measured in a pass of their own.

A pre-hook on the root keeps references to the batches seen since the last step. When a refresh is due they are run
again, eagerly, with recording switched on; targets are drawn from the model's output and errors propagated back.
Ordinary steps carry no per-layer hooks, so in-place activations, checkpointing, torch.compile and autocast cannot
disturb them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bprong.auto import Auto
from bprong.coverage import COVERED, covered_units, fallback_reason
from bprong.cut import Cut, examples
from bprong.directions import Directions
from bprong.likelihood import Likelihood, likelihood_of, some
from bprong.listening import Batch, Listener, copied, gradient_of, mask_by, together, told, unheard, whole
from bprong.moments import wide
from bprong.preconditioner import Direction, Layer
from bprong.reached import check_reached, trained, without_errors
from bprong.recording import Measured, measure, merged, random_numbers, record, tensor_of
from bprong.refreshing import Carry, Refreshing
from bprong.reporting import Report, Stopwatch
from bprong.schedule import SIDES, Schedule, Settings, WhiteningWarning, mixed
from bprong.solver import Solver
from bprong.taps import tapped
from bprong.units import Limits

__all__ = ["Recorder", "Statistics"]

SEEN_IN_PART = "its weight is used in other ways too, which cannot be seen"
PASSING = ("observed", "_recorded", "_heard", "_directions")  # what lasts from one step to the next at most
YOUNG = 4  # looks at the statistics before the first period is over, besides the early ones
Recorder = Callable[..., None]
Centred = Mapping[str, bool]  # the layers to measure, by name, and whether their inputs are centred


class Statistics:
    """Listens to a model, measures it when that is due, and keeps every layer's preconditioner."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        settings: Settings,
        *,
        examples: int | None,
        limits: Limits,
        solver: Solver,
        backward: bool,
        auto: Auto | None = None,
    ) -> None:
        self.root, self.auto = model, auto
        self.model = getattr(model, "_orig_mod", model)  # a compiled model is measured as it was written
        units, exact_first = covered_units(self.model, limits), len(settings.early) + YOUNG if settings.early else 0
        self.layers = {unit.name: Layer(unit, solver, exact_first) for unit in units}
        if not self.layers:
            raise ValueError(f"{type(self.model).__name__} has no layer that could be whitened: {COVERED}")
        self.covered = {p for layer in self.layers.values() for p in (layer.weight, layer.bias) if p is not None}
        self.given_up: list[str] = []
        self._lost: dict[Tensor, str] = {}
        self._idle: set[str] = set()  # layers that no statistics have reached yet
        self.schedule = Schedule(settings, SIDES if backward else ("forward",))
        self._refreshing = Refreshing(self.layers, self.schedule, auto)
        self.watch = Stopwatch()
        self.likelihood = likelihood_of(likelihood)
        self._examples = examples
        self.observed: list[Batch] = []
        self._heard: list[tuple[Any, Any]] | None = None
        self._recorded: list[dict[str, Measured]] = []
        self._directions: Directions | None = None
        self._listen()

    def directions(self, gradients: Mapping[Tensor, Tensor]) -> dict[Layer, Direction]:
        """What the gradients of the layers become."""
        if self._directions is None:
            self._directions = Directions(self.layers.values())
        return self._directions.of(gradients)

    def _listen(self) -> None:
        self.due = bool(self.schedule.wanted)  # whether the next step measures, found out once for all who ask
        self._listener = Listener()
        self._listener.attach(self.root, self)
        self._attend()

    def _attend(self) -> None:
        """What the listener keeps until the next step; it must not hold on to this object."""
        self._listener.wanted = self.due or self.auto is not None or bool(self._idle)
        self._listener.read = (
            whole if self.auto is not None else gradient_of if self._empirical else mask_by(self.likelihood)
        )

    def heard(self) -> list[tuple[Any, Any]]:
        """The calls since the last step, each with what was kept of what was left at its output."""
        self._heard = self._listener.take() if self._heard is None else self._heard
        return self._heard

    def advance(self) -> None:
        """A step was made."""
        self.schedule.t += 1
        self.forget()
        self.due = bool(self.schedule.wanted)
        self._attend()

    def forget(self) -> None:
        """What was seen since the last step: it was used, or the step was refused."""
        self._heard = None
        self.observed.clear()
        self._recorded.clear()
        self._listener.last = None

    def observe(self, x: Any, y: Tensor | None) -> None:
        if self._listener.wanted:
            self.observed.append((x, y, self.likelihood.left_in(y) if isinstance(y, Tensor) else None))

    @property
    def woken(self) -> list[str]:
        """Layers that were idle at all refreshes and have a gradient in this step, of a batch that was seen."""
        if not self._idle or self._fresh:
            return []
        found = trained(layer for name, layer in self.layers.items() if name in self._idle)
        return found if found and (self.observed or self._recorded or self.heard()) else []

    def refresh(self, centred: Centred, carry: Carry) -> None:
        """Measures and refreshes what this step asks for, in the layers given; an error changes nothing."""
        schedule, woken = self.schedule, self.woken
        if not self.due:  # without an inverse a layer would follow its plain gradient until the next look
            centred = {name: centred[name] for name in woken if name in centred}
        if not centred:
            return
        self._directions = None
        with schedule.besides(bool(woken)), self.watch.on("statistics"):
            new = set(centred) if self._fresh else self._idle & centred.keys()
            measured = self._measure(centred, new)
            for name, m in measured.items():
                self.layers[name].look(m.z, m.delta)
            schedule.average_(measured)
            for name, m in measured.items():
                self.layers[name].note(m)
            if self.auto is not None and new:
                known = self.auto.relative
                self.auto.look({name: m for name, m in measured.items() if name in new})
                self.auto.relative |= known
        with schedule.besides(bool(woken)), self.watch.on("factorisation"):
            for side in schedule.due:
                self._refreshing.refresh(side, measured, centred, carry)
        self._refreshing.pace(measured)

    def _measure(self, centred: Centred, new: set[str]) -> dict[str, Measured]:
        passes = self._recorded or [self._pass(i, x, y, centred, c) for i, (x, y, c) in enumerate(self._batches())]
        if not passes:
            raise RuntimeError(
                "a refresh is due and no batch was seen since the last step: the model given to the optimizer was not "
                "called in training mode with gradients. If you train in eval mode or call it in another way, use "
                "optimizer.observe(x) or optimizer.recording(); if it was compiled, give the compiled model"
            )
        measured = {name: merged([seen[name] for seen in passes]) for name in centred}
        if new:
            first = {name: m for name, m in measured.items() if name in new}
            self._idle = (self._idle - new) | check_reached(first, self.layers)
            for name in without_errors(first) if "backward" in self.schedule.wanted else ():
                self.schedule.warn(name, "backward", "no error reaches it from the output looked at; forward only")
            for name in [name for name, m in first.items() if m.unexplained]:
                del measured[name]
                self._give_up(name)
        return measured

    @property
    def _fresh(self) -> bool:
        """Whether nothing was refreshed yet."""
        return not any(layer.refreshed_at for layer in self.layers.values())

    def _give_up(self, name: str, warn: bool = True) -> None:
        """What does more than can be seen follows the fallback rule, with all that it shares parameters with."""
        if name not in self.layers:
            return
        layer = self.layers.pop(name)
        self.given_up.append(name)
        shared = {p for p in (layer.weight, layer.bias) if p is not None}
        self.covered -= shared
        self._lost |= dict.fromkeys(shared, SEEN_IN_PART)
        if warn:
            message = f"layer {name!r} follows Adam's rule: {SEEN_IN_PART}"
            warnings.warn(message, WhiteningWarning, stacklevel=6)
        for other in [other.name for other in self.layers.values() if {other.weight, other.bias} & shared]:
            self._give_up(other, warn)

    @property
    def _empirical(self) -> bool:
        return self.schedule.settings.fisher == "empirical"

    def _batches(self) -> list[Batch]:
        """What was given or heard since the last step."""
        how = (self.likelihood, self._empirical, "backward" in self.schedule.sides)
        return together(self.observed or [(call, *told(read, *how)) for call, read in self.heard()])

    def _pass(
        self, index: int, x: Any, y: Tensor | None, centred: Centred, counted: Tensor | None = None
    ) -> dict[str, Measured]:
        layers: dict[str, tuple[Any, bool]] = {name: (self.layers[name].unit, c) for name, c in centred.items()}
        dtype = next(iter(self.layers.values())).weight.dtype
        cut = None if self._examples is None else Cut(self._examples, examples(x))
        x, (y, counted) = copied(x, cut, dtype), copied((y, counted), cut, dtype, several=True)
        with unheard(), torch.enable_grad():
            heard = not self.observed and not self._empirical
            verify = index == 0 and (self._fresh or bool(self.woken))
            return record(
                self.model, layers, x, y, counted=counted, heard=heard, verify=verify,
                seed=mixed(self.schedule.seed, index), **self._how(),
            )  # fmt: skip

    def _how(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "likelihood": self.likelihood if "backward" in schedule.sides else None,
            "fisher": schedule.settings.fisher,
            "inputs": schedule.looked_at("forward", self.layers),
            "errors": schedule.looked_at("backward", self.layers),
            "rows": self._refreshing.followed,
        }

    @contextmanager
    def recording(self, centred: Centred) -> Iterator[Recorder]:
        """Taps the layers while it lasts; what it yields takes an output that the taps led to. Nothing unless due."""
        if not self.schedule.wanted:
            yield lambda output, y=None: None
            return
        with tapped(self.layers[name].unit for name in centred) as calls:

            def take(output: Any, y: Tensor | None = None) -> None:
                with random_numbers(self.model, mixed(self.schedule.seed, len(self._recorded))):
                    counted = some(self.likelihood.left_in(y)) if isinstance(y, Tensor) else None
                    seen = measure(centred, tensor_of(output), calls, y, counted=counted, **self._how())
                    self._recorded.append(seen)
                calls.clear()

            yield take

    def name_of(self, parameter: Tensor) -> str:
        return next(
            (name for name, p in self.model.named_parameters() if p is parameter), "a parameter outside the model"
        )

    def report(self, trained: list[Tensor]) -> Report:
        shares = self.watch.shares()  # first: finding ranks takes time of its own
        rows = [layer.row(self.schedule.t, self._refreshing.damping) for layer in self.layers.values()]
        outside = [p for p in trained if p not in self.covered]
        fallback = {self.name_of(p): self._lost.get(p) or fallback_reason(self.model, p) for p in outside}
        return Report(self.schedule.t, rows, fallback, shares, {} if self.auto is None else self.auto.told())

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.state_dict(),
            "given_up": list(self.given_up),
            "idle": sorted(self._idle),
            "tracks": self._refreshing.state_dict(),
            "layers": {name: layer.state_dict() for name, layer in self.layers.items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where a state is not of this model's layers."""
        if not {"schedule", "layers"} <= set(state):
            raise ValueError(f"whitening has schedule and layers; this one has {sorted(state)}")
        if set(state["layers"]) != set(self.layers) - set(state.get("given_up", ())):
            raise ValueError(f"the state is of layers {sorted(state['layers'])}; this model has {sorted(self.layers)}")
        for name, kept in state["layers"].items():
            self.layers[name].check(kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self._directions = None
        for name in state.get("given_up", ()):
            self._give_up(name, warn=False)
        self._idle = set(state.get("idle", ()))
        devices = {name: wide(layer.weight[:0]).device for name, layer in self.layers.items()}
        self.schedule.load_state_dict(state["schedule"], devices)
        self._refreshing.load_state_dict(state.get("tracks", {}))
        for name, kept in state["layers"].items():
            layer = self.layers[name]
            layer.load(kept, layer.like)
            layer.moments = {side: m for side in SIDES if (m := self.schedule.averages(name, side)) is not None}
        self.forget()
        self.due = bool(self.schedule.wanted)
        self._attend()

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v for k, v in self.__dict__.items() if k not in ("_listener", "_observed", "_recorded", "_directions")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, observed=[], _recorded=[], _heard=None, _directions=None)
        self._listen()
