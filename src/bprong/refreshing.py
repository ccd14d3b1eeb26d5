"""What was measured → inverses: which sides of which layers are refreshed, by a factorisation or by a step.

By the clock every side that was measured is factored, by drift those that have moved. Continuously, a side is factored
once, its anchor, and from then on moved by the rows of each batch measured (`tracking.py`),

    UU = S⁻¹,   S ← (1−μ) S + μ (VᵀV + ε's share),   c ← (1−μ) c + μ z̄,

until it has drifted from white and is anchored anew. So are layers whose sides are one block each, convolutions apart;
other layers are refreshed as by drift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bprong import factoring
from bprong.auto import Auto
from bprong.moments import Moments, error_moments, finite, input_moments, wide
from bprong.pace import interval
from bprong.preconditioner import Layer
from bprong.recording import Measured
from bprong.schedule import SIDES, Schedule, Side
from bprong.tracking import Rows, Track
from bprong.whitening import Damping, LinAlgError, WhiteningError

__all__ = ["Carry", "Refreshing"]

DRIFT = 0.2  # ‖U(Ž+ε)Uᵀ − I‖ / ‖I‖ of a whitener made for other statistics, above which it is made anew
Carry = Callable[[Layer, Tensor | None], None]  # what a new centre does to velocities, from the centre before


class Refreshing:
    """Keeps the inverses of an optimizer's layers up to date."""

    def __init__(self, layers: Mapping[str, Layer], schedule: Schedule, auto: Auto | None = None) -> None:
        self._layers, self._schedule, self._auto = layers, schedule, auto
        self._tracks: dict[tuple[str, Side], Track] = {}
        continuous = schedule.settings.refresh == "continuous"
        self.followed = {name for name, layer in layers.items() if continuous and _can_be_moved(layer)}
        for name in self.followed:
            layers[name].solver = "exact"  # a step takes the inverse itself

    def damping(self, layer: Layer, side: Side) -> Damping:
        """ε of a side: what was given, or what the quadratic model's λ makes of it."""
        own = self._schedule.settings.damping[side]
        return own if self._auto is None else self._auto.damping(layer, side) or own

    def refresh(self, side: Side, measured: Mapping[str, Measured], centred: Mapping[str, bool], carry: Carry) -> None:
        """Refreshes one side of what was measured; what cannot be keeps its inverse, and the schedule is told."""
        moved: dict[Layer, Moments] = {}
        for name, m in measured.items():
            moments = m.z if side == "forward" else m.delta
            if moments is None and name in self.followed:
                moments = self._followed(name, side, m, centred[name], carry)
            if moments is not None and self._moved(self._layers[name], side, moments):
                moved[self._layers[name]] = moments
        ready = factoring.together(moved, {layer: self.damping(layer, side) for layer in moved})
        for layer, moments in moved.items():
            self._factor(layer, side, moments, carry, ready.get(layer))

    def pace(self, measured: Mapping[str, Measured]) -> None:
        """Sets the period, if it is a share of time and this is the first refresh."""
        overhead, schedule = self._schedule.settings.overhead, self._schedule
        if overhead is not None and schedule.every is None:
            seen = [(self._layers[name], m.z.weight) for name, m in measured.items() if m.z is not None]
            schedule.pace(interval(seen, overhead, "backward" in schedule.sides))

    def _moved(self, layer: Layer, side: Side, moments: Moments) -> bool:
        """Whether a side is to be refreshed: always, or if it has drifted from what its inverse was made for."""
        settings = self._schedule.settings
        if settings.refresh == "periodic" or layer.name in self.followed:
            return True
        moved = side not in layer.refreshed_at or layer.drift(side, moments, self.damping(layer, side)) > DRIFT
        self._schedule.drifted(layer.name, side, moved)
        return moved

    def _factor(self, layer: Layer, side: Side, moments: Moments, carry: Carry, found: Tensor | None) -> None:
        c_before = layer.c
        try:
            layer.refresh(side, moments, self.damping(layer, side), layer.like, found)
        except WhiteningError as reason:
            self._schedule.failed(layer.name, side, reason)
            return
        if layer.name in self.followed:
            self._tracks.setdefault((layer.name, side), Track()).anchor(moments.second)
        self._done(layer, side, c_before, carry)

    def _done(self, layer: Layer, side: Side, c_before: Tensor | None, carry: Carry) -> None:
        layer.refreshed_at[side] = self._schedule.t
        self._schedule.succeeded(layer.name, side)
        if side == "forward":
            carry(layer, c_before)

    # Continuously -----------------------------------------------------------------------------------------------------

    def _followed(self, name: str, side: Side, m: Measured, centred: bool, carry: Carry) -> Moments | None:
        """Moves a side by the rows of a batch; returns their moments where it must be factored instead."""
        found = [rows for rows in (m.z_rows if side == "forward" else m.delta_rows) if len(rows)]
        if not found or (side == "backward" and not m.targets):
            return None  # idle in this batch
        self._schedule.drifted(name, side, True)  # it is looked at whenever its side is due
        layer, values = self._layers[name], torch.cat(found).detach()
        weight = 1.0 if side == "forward" else len(values) / m.targets
        if self._step(layer, side, Rows(values.to(layer.like), weight), centred and side == "forward", carry):
            return None
        return input_moments(values, centred) if side == "forward" else error_moments(values, m.targets)

    def _step(self, layer: Layer, side: Side, rows: Rows, centred: bool, carry: Carry) -> bool:
        """Whether a side could be moved; not without an anchor, from a batch that is not finite, or once it drifted."""
        track, inverse = self._tracks.get((layer.name, side)), layer.UU if side == "forward" else layer.RR
        c = layer.c if side == "forward" else None
        if track is None or not isinstance(inverse, Tensor) or (c is not None) != centred or not finite(rows.values):
            return False
        settings = self._schedule.settings
        try:
            found = track.move(inverse, c, rows, settings.rate, self.damping(layer, side))
        except LinAlgError:
            return False
        layer.white[side] = track.off_white
        if found is None:
            return False
        layer.take(side, found[0], found[1] if centred else None)
        self._done(layer, side, c, carry)
        return True

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step apart from the inverses: tensors and plain values only."""
        return {f"{side}:{name}": track.state_dict() for (name, side), track in self._tracks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sides that the state does not know are anchored when they are next measured."""
        self._tracks = {
            (name, side): Track.of(state[f"{side}:{name}"], wide(layer.weight[:0]).device)
            for name, layer in self._layers.items()
            for side in SIDES
            if name in self.followed and f"{side}:{name}" in state
        }


def _can_be_moved(layer: Layer) -> bool:
    """Both sides one block, z not one-hot; and no convolution, whose patches are many more than its features."""
    return layer.plain and not layer.unit.one_hot and layer.weight.ndim == 2
