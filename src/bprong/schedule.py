"""When statistics are measured and whiteners refreshed, how they are averaged, and what happens if that fails.

Fujimoto & Ohira, Algorithm 2: forward-whitening when mod(t, τ₁) = c₁, back-whitening when mod(t, τ₂) = c₂. Algorithm 1
(PRONG) is the same without the second. Both routes, the paper's network and the optimizer, keep to one `Schedule`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from bprong.checks import averaging, one_of, period
from bprong.errors import Fisher
from bprong.moments import Moments
from bprong.recording import Measured
from bprong.whitening import Damping, WhiteningError

__all__ = ["PATIENCE", "SIDES", "Schedule", "Settings", "Side", "WhiteningWarning", "mixed"]

Side = Literal["forward", "backward"]
Pace = Literal["periodic", "drift", "continuous"]
SIDES: tuple[Side, ...] = ("forward", "backward")
SLOWEST = 16  # periods between two looks at a side that does not drift, at most
PATIENCE = 3  # consecutive failures of one side of one layer that are warned about before they are raised


class WhiteningWarning(UserWarning):
    """A layer kept its previous whitener; the message names it and says why."""


@dataclass(frozen=True)
class Settings:
    """What and when, checked: τ and c of both sides, ε of both sides, the Fisher matrix's targets, averaging, seed."""

    periods: Mapping[Side, tuple[int, int]]
    damping: Mapping[Side, Damping]
    fisher: Fisher
    average: float
    record_every: int | None
    seed: int
    refresh: Pace = "periodic"
    overhead: float | None = None  # the share of time that sets the period, instead of the periods above
    rate: float = 0.05  # μ of continuous whitening
    early: tuple[int, ...] = ()  # iterations of looks besides, where a share of time sets the period

    @classmethod
    def of(
        cls,
        *,
        forward_every: int,
        forward_offset: int | None,
        backward_every: int,
        backward_offset: int | None,
        forward_damping: float | Damping,
        backward_damping: float | Damping,
        fisher: str,
        average: float,
        record_every: int | None,
        seed: int | None,
        refresh: str = "periodic",
        overhead: float | None = None,
        rate: float = 0.05,
    ) -> Settings:
        return cls(
            {
                "forward": period("forward", forward_every, forward_offset),
                "backward": period("backward", backward_every, backward_offset),
            },
            {"forward": Damping.of(forward_damping), "backward": Damping.of(backward_damping)},
            one_of("fisher", fisher, get_args(Fisher)),
            *averaging(average, record_every),
            torch.initial_seed() if seed is None else seed,
            one_of("refresh", refresh, get_args(Pace)),
            overhead,
            rate,
        )


class Schedule:
    """The clock of a run: what is due, the running averages, and which layers failed how often."""

    def __init__(self, settings: Settings, sides: tuple[Side, ...]) -> None:
        self.settings, self.sides = settings, sides
        self.t, self._seed = 0, settings.seed
        self.every: int | None = None
        self._moments: dict[tuple[str, Side], Moments] = {}
        self._failures: Counter[tuple[str, Side]] = Counter()
        self._warned: set[str] = set()
        self._besides = False  # a look of its own, whatever the clock says
        self._slow: dict[tuple[str, Side], int] = {}  # by how many periods looks at a side are apart

    def pace(self, every: int) -> None:
        """Sets the period of both sides, where a share of time decides it: found at the first refresh."""
        self.every = every

    def _period(self, side: Side) -> tuple[int, int]:
        return self.settings.periods[side] if self.every is None else (self.every, 0)

    @contextmanager
    def besides(self, look: bool) -> Iterator[None]:
        """All sides are due while a look lasts that is made besides those of the clock."""
        self._besides = look
        try:
            yield
        finally:
            self._besides = False

    @property
    def _early(self) -> bool:
        """Whether statistics are young: at the start, and after an eighth, a quarter and half of the first period."""
        if self._besides or self.settings.overhead is None:
            return self._besides
        first = set() if self.every is None else {self.every >> k for k in (1, 2, 3)}
        return self.t == 0 or self.t in first.union(self.settings.early)

    @property
    def due(self) -> list[Side]:
        """The sides to refresh at this iteration; by drift, those of which some layer is to be looked at."""
        if self._early:
            return list(self.sides)
        due = [side for side in self.sides if self.t % self._period(side)[0] == self._period(side)[1]]
        return [side for side in due if not self._slow or any(self.looks(*key) for key in self._slow if key[1] == side)]

    def looks(self, name: str, side: Side) -> bool:
        """Whether a side of a layer is looked at, now that its side is due at all."""
        every, offset = self._period(side)
        return self._early or (self.t - offset) % (every * self._slow.get((name, side), 1)) == 0

    def looked_at(self, side: Side, names: Iterable[str]) -> bool | set[str]:
        """The layers of which a side is measured at this iteration; True: all."""
        if side not in self.wanted or self.settings.refresh == "periodic":
            return side in self.wanted
        return {name for name in names if self.looks(name, side)}

    def drifted(self, name: str, side: Side, drifted: bool) -> None:
        """What a look has shown: a side that stays where it is is looked at half as often, one that moves twice."""
        if self._early:
            return
        slow = self._slow.get((name, side), 1)
        self._slow[name, side] = max(1, slow // 2) if drifted else min(SLOWEST, 2 * slow)

    @property
    def wanted(self) -> list[Side]:
        """The sides to measure at this iteration: those due, and all when a running average is fed."""
        every = self.settings.record_every
        return list(self.sides) if every is not None and self.t % every == 0 else self.due

    @property
    def seed(self) -> int:
        """Of the targets drawn at this iteration."""
        return mixed(self._seed, self.t)

    def average_(self, measured: Mapping[str, Measured]) -> None:
        """Replaces what was measured by the running averages it now belongs to, if they are kept."""
        if self.settings.average:
            for name, m in measured.items():
                m.z, m.delta = self._averaged(name, "forward", m.z), self._averaged(name, "backward", m.delta)

    def _averaged(self, name: str, side: Side, new: Moments | None) -> Moments | None:
        """The running average with the new batch in it, unless that batch is not finite."""
        old = self._moments.get((name, side))
        if new is None or not new.finite:
            return new
        if old is not None and (old.mean is None) == (new.mean is None):
            new = old.average(new, self.settings.average)
        self._moments[name, side] = new
        return new

    def averages(self, name: str, side: Side) -> Moments | None:
        """The running average of one side of a layer, if one is kept."""
        return self._moments.get((name, side))

    def succeeded(self, name: str, side: Side) -> None:
        self._failures[name, side] = 0

    def failed(self, name: str, side: Side, reason: WhiteningError) -> None:
        """Warns once for a layer; raises when one side of it has failed PATIENCE times in a row."""
        self._failures[name, side] += 1
        if self._failures[name, side] >= PATIENCE:
            raise WhiteningError(f"layer {name!r}, {side} whitening, {PATIENCE} times in a row: {reason}") from reason
        self.warn(name, side, reason)

    def warn(self, name: str, side: Side, reason: object) -> None:
        if name not in self._warned:
            self._warned.add(name)
            message = f"layer {name!r} keeps its previous {side} whitener: {reason}"
            warnings.warn(message, WhiteningWarning, stacklevel=5)

    def state_dict(self) -> dict[str, Any]:
        """Everything that shapes what comes next: tensors and plain values only."""
        moments = {
            f"{side}:{name}": {"weight": m.weight, "mean": m.mean, "scatter": m.scatter}
            for (name, side), m in self._moments.items()
        }
        slow = {f"{side}:{name}": slow for (name, side), slow in self._slow.items()}
        return {"t": self.t, "seed": self._seed, "moments": moments, "slow": slow, "every": self.every}

    def load_state_dict(self, state: Mapping[str, Any], devices: Mapping[str, torch.device]) -> None:
        """Goes on where `state_dict` was taken; `devices` says where each layer's moments belong."""
        if not {"t", "seed", "moments"} <= set(state):
            raise ValueError(f"the state of a schedule has t, seed and moments; this one has {sorted(state)}")
        known = {f"{side}:{name}": (name, side) for name in devices for side in SIDES}
        if unknown := set(state["moments"]) - set(known):
            raise ValueError(f"the state speaks of layers this model does not have: {sorted(unknown)}")
        self._moments = {known[key]: _moments(m, devices[known[key][0]]) for key, m in state["moments"].items()}
        self._slow = {known[key]: slow for key, slow in state.get("slow", {}).items()}
        self.t, self._seed, self.every = state["t"], state["seed"], state.get("every")
        self._failures.clear()


def _moments(saved: Mapping[str, Any], device: torch.device) -> Moments:
    mean = saved["mean"]
    return Moments(saved["weight"], None if mean is None else mean.to(device), saved["scatter"].to(device))


def mixed(seed: int, t: int) -> int:
    """A seed for iteration t that shares no stream with the user's own seed, whatever small numbers both are."""
    return (seed * 0x9E3779B97F4A7C15 + t * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
