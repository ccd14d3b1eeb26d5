"""Batch → moments → preconditioner: the statistics behind an optimizer, measured in a pass of their own.

A pre-hook on the root keeps references to the batches seen since the last step. When a refresh is due they are run
again, eagerly, with recording switched on; targets are drawn from the model's output and errors propagated back.
Ordinary steps carry no per-layer hooks, so in-place activations, checkpointing, torch.compile and autocast cannot
disturb them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from bprong.coverage import covered_layers, fallback_reason
from bprong.likelihood import Likelihood, likelihood_of
from bprong.listening import Listener
from bprong.moments import wide
from bprong.preconditioner import Preconditioner
from bprong.recording import Measured, first_rows, measure, record, tapped, tensor_of
from bprong.reporting import Report, Stopwatch
from bprong.schedule import SIDES, Schedule, Settings, Side
from bprong.whitening import Damping, WhiteningError, rank

__all__ = ["Expert", "Layer", "Recorder", "Statistics"]

Recorder = Callable[..., None]


@dataclass(frozen=True)
class Expert:
    """Expert settings of an optimizer, given as `options={…}`.

    fisher            targets behind D: "sampled", "exact" or "empirical" (the data's; then `observe(x, y)`)
    forward_every, forward_offset, backward_every, backward_offset
                      the paper's τ₁, c₁, τ₂, c₂; by default both sides together, every `every` steps
    average           what the running average of the statistics keeps at each new measurement; 0: no average
    record_every      measure, without refreshing, every so many steps too
    examples          measure on this many examples of a batch at most
    seed              of the targets drawn; by default torch's initial seed
    """

    fisher: str = "sampled"
    forward_every: int | None = None
    forward_offset: int = 0
    backward_every: int | None = None
    backward_offset: int = 0
    average: float = 0.9
    record_every: int | None = None
    examples: int | None = None
    seed: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Expert:
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options or {} if name not in known]
        if unknown:
            raise ValueError(f"options has no {', '.join(map(repr, unknown))}; it takes {', '.join(known)}")
        return cls(**options or {})

    def settings(self, every: int, forward_damping: float | Damping, backward_damping: float | Damping) -> Settings:
        return Settings.of(
            forward_every=every if self.forward_every is None else self.forward_every,
            backward_every=every if self.backward_every is None else self.backward_every,
            forward_offset=self.forward_offset, backward_offset=self.backward_offset,
            forward_damping=forward_damping, backward_damping=backward_damping,
            fisher=self.fisher, average=self.average, record_every=self.record_every, seed=self.seed,
        )  # fmt: skip


class Layer(Preconditioner):
    """A covered layer of the user's model with its preconditioner."""

    def __init__(self, name: str, module: nn.Linear) -> None:
        super().__init__()
        self.name, self.module = name, module
        self.weight: Tensor = module.weight  # looked up once: a module's attributes are slow to reach
        self.bias: Tensor | None = module.bias

    def gradients(self, groups: Mapping[Tensor, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Of weight and bias, each where it is trained and has one."""
        g_W, g_b = (None if p is None or p not in groups else p.grad for p in (self.weight, self.bias))
        return g_W, g_b


class Statistics:
    """Listens to a model, measures it when that is due, and keeps every layer's preconditioner."""

    def __init__(
        self, model: nn.Module, likelihood: str | Likelihood, settings: Settings, examples: int | None, backward: bool
    ) -> None:
        self.root = model
        self.model = getattr(model, "_orig_mod", model)  # a compiled model is measured as it was written
        self.layers = {name: Layer(name, module) for name, module in covered_layers(self.model).items()}
        if not self.layers:
            raise ValueError(f"{type(self.model).__name__} has no nn.Linear that could be whitened")
        self.covered = {p for layer in self.layers.values() for p in (layer.weight, layer.bias) if p is not None}
        self.schedule = Schedule(settings, SIDES if backward else ("forward",))
        self.watch = Stopwatch()
        self._likelihood = likelihood_of(likelihood)
        self._examples = examples
        self._observed: list[tuple[Any, Tensor | None]] = []
        self._recorded: list[dict[str, Measured]] = []
        self._listen()

    def _listen(self) -> None:
        self._listener = Listener(wanted=bool(self.schedule.wanted))
        self._listener.attach(self.root, self)

    def advance(self) -> None:
        """A step was made."""
        self.schedule.t += 1
        self._observed.clear()
        self._recorded.clear()
        self._listener.take()
        self._listener.wanted = bool(self.schedule.wanted)

    def observe(self, x: Any, y: Tensor | None) -> None:
        if self.schedule.wanted:
            self._observed.append((x, y))

    def refresh_if_due(self, centred: Callable[[Layer], bool], carry: Callable[[Layer, Tensor | None], None]) -> None:
        """Measures and refreshes what this step asks for; an error changes nothing."""
        schedule = self.schedule
        if not schedule.wanted:
            return
        with self.watch.on("statistics"):
            measured = self._measure(centred)
            schedule.average_(measured)
        with self.watch.on("factorisation"):
            for side in schedule.due:
                for name, m in measured.items():
                    self._refresh(self.layers[name], side, m, carry)

    def _measure(self, centred: Callable[[Layer], bool]) -> dict[str, Measured]:
        batches = self._observed or [(call, None) for call in self._listener.take()]
        passes = self._recorded or [self._pass(x, y, centred) for x, y in batches]
        if not passes:
            raise RuntimeError(
                "a refresh is due and no batch was seen since the last step: the model given to the optimizer was not "
                "called in training mode with gradients. If you train in eval mode or call it in another way, use "
                "optimizer.observe(x) or optimizer.recording(); if it was compiled, give the compiled model"
            )
        measured = {name: _merged([seen[name] for seen in passes]) for name in self.layers}
        if self.schedule.t == min(offset for _, offset in self.schedule.settings.periods.values()):
            self._check_reached(measured)
        return measured

    def _check_reached(self, measured: Mapping[str, Measured]) -> None:
        """At the first refresh every trained layer must have been seen: later, one may be idle for a while."""
        missing = [n for n, m in measured.items() if m.probe is None and self.layers[n].weight.requires_grad]
        if missing:
            raise RuntimeError(
                f"no statistics reached {', '.join(map(repr, missing))}: not called when the model is. A layer that is "
                f"used in another way is not covered: freeze it, or train it with another optimizer"
            )

    def _pass(self, x: Any, y: Tensor | None, centred: Callable[[Layer], bool]) -> dict[str, Measured]:
        wanted = self._listener.wanted
        self._listener.wanted = False  # this call is ours
        try:
            layers = {name: (layer.module, centred(layer)) for name, layer in self.layers.items()}
            x, y = first_rows((x, y), self._examples)
            with torch.enable_grad():
                return record(self.model, layers, x, y, seed=self.schedule.seed, **self._how())
        finally:
            self._listener.wanted = wanted

    def _how(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "likelihood": self._likelihood if "backward" in schedule.sides else None,
            "fisher": schedule.settings.fisher,
            "inputs": "forward" in schedule.wanted,
            "errors": "backward" in schedule.wanted,
        }

    @contextmanager
    def recording(self, centred: Callable[[Layer], bool]) -> Iterator[Recorder]:
        """Taps the layers while it lasts; what it yields takes the output that the taps led to."""
        with tapped({name: layer.module for name, layer in self.layers.items()}) as calls:

            def take(output: Any, y: Tensor | None = None) -> None:
                if self.schedule.wanted:
                    centres = {name: centred(layer) for name, layer in self.layers.items()}
                    self._recorded.append(measure(centres, tensor_of(output), calls, y, **self._how()))

            yield take

    def _refresh(self, layer: Layer, side: Side, m: Measured, carry: Callable[[Layer, Tensor | None], None]) -> None:
        moments = m.z if side == "forward" else m.delta
        if moments is None:
            return
        c_before = layer.c
        try:
            layer.refresh(side, moments, self.schedule.settings.damping[side], layer.weight)
        except WhiteningError as reason:
            self.schedule.failed(layer.name, side, reason)
            return
        layer.refreshed_at[side] = self.schedule.t
        self.schedule.succeeded(layer.name, side)
        if side == "forward":
            carry(layer, c_before)

    def name_of(self, parameter: Tensor) -> str:
        return next(
            (name for name, p in self.model.named_parameters() if p is parameter), "a parameter outside the model"
        )

    def report(self, trained: list[Tensor]) -> Report:
        rows = [self._row(layer) for layer in self.layers.values()]
        outside = [p for p in trained if p not in self.covered]
        fallback = {self.name_of(p): fallback_reason(self.model, p) for p in outside}
        return Report(self.schedule.t, rows, fallback, self.watch.shares())

    def _row(self, layer: Layer) -> dict[str, Any]:
        row: dict[str, Any] = {"layer": layer.name, "step_norm": layer.step_norm}
        for side in self.schedule.sides:
            if side in layer.moments:
                second = layer.moments[side].second
                damping = self.schedule.settings.damping[side]
                row |= {
                    f"{side}_rank": f"{rank(second)}/{len(second)}",
                    f"{side}_damping": float((damping.value * damping.scale(second)).mean()),
                    f"{side}_age": self.schedule.t - layer.refreshed_at[side],
                    f"{side}_from_white": layer.white[side],
                }
        return row

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.state_dict(),
            "layers": {
                name: {"UU": layer.UU, "c": layer.c, "RR": layer.RR, "refreshed_at": dict(layer.refreshed_at)}
                for name, layer in self.layers.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        shapes = {name: tuple(layer.weight.shape) for name, layer in self.layers.items()}
        if set(state["layers"]) != set(shapes):
            raise ValueError(f"the state is of layers {sorted(state['layers'])}; this model has {sorted(shapes)}")
        devices = {name: wide(layer.weight[:0]).device for name, layer in self.layers.items()}
        self.schedule.load_state_dict(state["schedule"], devices)
        for name, saved in state["layers"].items():
            self.layers[name].load(saved)
        self._listener.wanted = bool(self.schedule.wanted)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_listener", "_observed", "_recorded")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _observed=[], _recorded=[])
        self._listen()


def _merged(seen: list[Measured]) -> Measured:
    """Of several batches, as if they had been one."""
    merged = seen[0]
    for m in seen[1:]:
        merged = Measured(
            m.z if merged.z is None else merged.z if m.z is None else merged.z.merge(m.z),
            m.delta if merged.delta is None else merged.delta if m.delta is None else merged.delta.merge(m.delta),
            merged.probe if m.probe is None else m.probe,
        )
    return merged
