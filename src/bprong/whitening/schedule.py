"""When sides are measured and refreshed.

Fujimoto & Ohira, Algorithm 2: forward-whitening when mod(t, τ₁) = c₁, back-whitening when mod(t, τ₂) = c₂. Algorithm 1
(PRONG) is the same without the second. Both routes, the paper's network and the optimizer, follow one `Schedule`. The
optimizer can also choose the period from a share of run time, and measure a side less often while it does not drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bprong.capture.request import Fisher
from bprong.checks import integer, number, one_of, period
from bprong.likelihood.families import mixed
from bprong.whitening.layer import SIDES, Layer, Side, SideName

Mode = Literal["periodic", "drift"]

DRIFT = 0.2  # ‖U(Ž+ε)Uᵀ − I‖ / ‖I‖ above which a factor is out of date
LONGEST_INTERVAL = 16  # periods between two measurements of a side that does not drift, at most
EARLY_PARTS = (8, 4, 2)  # everything is measured after an eighth, a quarter and half of the first period too
SHORTEST_PERIOD = 10  # steps between two refreshes, however cheap they are

# The cost model behind `period_for` and `evaluation_period`, in operations of a float32 product, of which two cores
# make about 2·10¹¹ a second.
STEP_CALLS = 4e7  # the calls that train a layer and precondition its gradient
PASS_CALLS = 2e7  # the calls of a forward pass through a layer
DUAL_PASSES = 3  # forward passes that take the time of one with dual numbers
MEASURING_CALLS = 2e8  # the calls that measure a layer
FACTORING_CALLS = 7e7  # the calls that factor a side
DOUBLE_PRECISION = 3.4  # measured when all moments were summed in float64; large batches are now summed faster
FACTORISATION = 2.2  # factorisations run slower than products


@dataclass(frozen=True)
class Periods:
    """Periods of the two sides, where one for both will not do; an optimizer takes them as `every`.

    forward_every, forward_offset, backward_every, backward_offset
                   the paper's τ₁, c₁, τ₂, c₂; backward_every None: as forward_every
    record_every:  measure all sides, without refreshing them, every so many steps too; None: never
    refresh:       "periodic": refresh every side at its period; "drift": at each period measure the sides that have
                   been drifting, and refresh those that have drifted
    """

    forward_every: int
    forward_offset: int = 0
    backward_every: int | None = None
    backward_offset: int = 0
    record_every: int | None = None
    refresh: Mode = "periodic"


@dataclass(frozen=True)
class Settings:
    """When sides are measured and refreshed, and from which targets.

    periods:       (τ, c) of each side
    fisher:        targets behind D
    average:       the factor on a running average's weight at each measurement; 0: no average
    record_every:  steps between measurements without a refresh; None: there are none
    seed:          of sampled targets
    refresh:       "periodic": every side at its period; "drift": those sides that have drifted
    early_steps:   further steps at which everything is measured, if `overhead` determines the period,
    early_parts:   and parts of the first period after which it is measured: a half is 2
    overhead:      the share of run time that determines the period instead of `periods`; None: `periods` hold
    """

    periods: Mapping[SideName, tuple[int, int]]
    fisher: Fisher = "sampled"
    average: float = 0.0
    record_every: int | None = None
    seed: int = 0
    refresh: Mode = "periodic"
    overhead: float | None = None
    early_steps: tuple[int, ...] = ()
    early_parts: tuple[int, ...] = EARLY_PARTS

    @classmethod
    def checked(
        cls,
        *,
        forward: tuple[int, int | None],
        backward: tuple[int, int | None],
        fisher: Fisher,
        average: float,
        record_every: int | None,
        seed: int | None,
        **others: Any,
    ) -> Settings:
        """From what a user gave: (every, offset) of both sides, and the rest."""
        one_of("fisher", fisher, ("sampled", "exact", "empirical"))
        number("average", average, 0, 1)
        if record_every is not None:
            period("record", record_every, 0)
            if average == 0:
                raise ValueError("record_every measures for a running average: give average too, e.g. average=0.9")
        periods: dict[SideName, tuple[int, int]] = {
            "forward": period("forward", *forward),
            "backward": period("backward", *backward),
        }
        return cls(
            periods,
            fisher,
            average,
            record_every,
            torch.initial_seed() if seed is None else integer("seed", seed, 0),
            **others,
        )


class Schedule:
    """The clock of a run: which sides are due at step t."""

    def __init__(self, settings: Settings, layers: Mapping[str, Layer]) -> None:
        self.settings = settings
        self.t = 0
        self.every: int | None = None  # the period that `overhead` determined; None before the first refresh
        self.base_seed = settings.seed
        self._layers = layers
        self.sides = tuple(name for name in SIDES if any(self._all(name)))
        self.two_sided = self.sides == SIDES  # errors are whitened too

    @property
    def due(self) -> list[SideName]:
        """The sides to refresh at this step; by drift, those that are measured in some layer."""
        return [name for name in self.sides if self._is_due(name) and self._is_due(name, self._shortest(name))]

    @property
    def wanted(self) -> list[SideName]:
        """The sides to measure at this step: those due, and all if it is one of `record_every`."""
        every = self.settings.record_every
        return list(self.sides) if every is not None and self.t % every == 0 else self.due

    def next_wanted(self) -> int:
        """The first step from t on at which a side is measured, as long as intervals stay what they are."""
        steps = {self.t + (-self.t) % self.settings.record_every} if self.settings.record_every is not None else set()
        for name in self.sides:
            every, offset = self.settings.periods[name] if self.every is None else (self.every, 0)
            steps.add(self.t + (offset - self.t) % (every * self._shortest(name)))
        steps.update(t for t in self._early_steps() if t >= self.t)
        return min(steps)

    def measured(self, name: SideName) -> set[str]:
        """The names of the layers whose side of this name is measured at this step."""
        if name not in self.wanted:
            return set()
        periodic = self.settings.refresh == "periodic"
        return {layer.name for layer, side in self._all(name) if periodic or self._is_due(name, side.interval or 1)}

    def has_drifted(self, side: Side, drift: float) -> bool:
        """Whether the factor of a side that has drifted this far is out of date.

        A side that has not drifted is measured half as often from now on, one that has twice as often.
        """
        side.last_drift = drift if side.factor is not None else None
        drifted = not drift <= DRIFT  # NaN counts as drift, for the refresh to report
        if not self._all_due:
            interval = side.interval or 1
            side.interval = max(1, interval // 2) if drifted else min(LONGEST_INTERVAL, 2 * interval)
        return drifted

    @property
    def seed(self) -> int:
        """The seed of the targets sampled at this step."""
        return mixed(self.base_seed, self.t)

    def _all(self, name: SideName) -> Iterator[tuple[Layer, Side]]:
        """The sides of this name, each with its layer."""
        return ((layer, side) for layer in self._layers.values() for side in layer.sides if side.name == name)

    def _shortest(self, name: SideName) -> int:
        """The shortest interval of the sides of this name, of which the others are multiples; 1 if none has one."""
        return min((side.interval for _, side in self._all(name) if side.interval is not None), default=1)

    def _is_due(self, name: SideName, interval: int = 1) -> bool:
        """Whether a side of this name is due that is measured once in so many periods."""
        every, offset = self.settings.periods[name] if self.every is None else (self.every, 0)
        return self._all_due or (self.t - offset) % (every * interval) == 0

    @property
    def _all_due(self) -> bool:
        """Whether every side is due."""
        return self.t in self._early_steps()

    def _early_steps(self) -> set[int]:
        """The steps at which every side is due: the first one, and some early in the first period."""
        if self.settings.overhead is None:
            return set()
        parts = [] if self.every is None else [self.every // part for part in self.settings.early_parts]
        return {0, *parts, *self.settings.early_steps}

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "seed": self.base_seed, "every": self.every}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not {"t", "seed", "every"} <= set(state):
            raise ValueError(f"the state of a schedule has t, seed and every; this one has {sorted(state)}")
        self.t = state["t"]
        self.base_seed = state["seed"]
        self.every = state["every"] if self.settings.overhead is not None else None  # else the user has given a period


def period_for(layers: Iterable[Layer], overhead: float) -> int:
    """Steps between refreshes of all layers such that these take the share `overhead` of run time.

    Operations are counted, not timed, so that a run is the same on every machine and after every checkpoint. Each layer
    has been refreshed once; its rows are those of that measurement.

    >>> from bprong.capture.weights import weight_matrices_of
    >>> from bprong.linalg.factors import Dense
    >>> layer = Layer(weight_matrices_of("", torch.nn.Linear(784, 100))[0])
    >>> layer.forward.observations = 100.0
    >>> for side in layer.sides:
    ...     side.factor = Dense(torch.eye(side.blocks.size), side.blocks)
    >>> [period_for([layer], share) for share in (0.05, 0.1, 0.2)]
    [246, 117, 52]
    """
    layers = list(layers)
    refreshing = 0.0
    for layer in layers:
        rows = layer.forward.observations
        cost = layer.linear.cost(backward=layer.backward in layer.sides)
        refreshing += MEASURING_CALLS + 4 * rows * layer.linear.numel + DOUBLE_PRECISION * rows * cost["per_row"]
        refreshing += len(layer.sides) * FACTORING_CALLS + FACTORISATION * cost["refresh"]
    return max(SHORTEST_PERIOD, _period(refreshing, layers, overhead))


def evaluation_period(layers: Iterable[Layer], directions: int, part: float, share: float) -> int:
    """Steps between evaluations of a quadratic model such that these take a share of run time.

    directions: each takes a forward pass with dual numbers; the loss afterwards takes a plain one
    part:       of the batch that is evaluated

    As in `period_for`, operations are counted, and each layer has been refreshed once.
    """
    layers = list(layers)
    passes = DUAL_PASSES * directions + 1
    evaluating = sum(passes * (PASS_CALLS + 2 * part * x.forward.observations * x.linear.numel) for x in layers)
    return _period(evaluating, layers, share)


def _period(operations: float, layers: Sequence[Layer], share: float) -> int:
    """Steps in which something that takes these operations is to be done once, for it to take a share of run time."""
    training = 0.0
    for layer in layers:
        applied = sum(side.factor.cost for side in layer.sides if side.factor is not None)
        training += STEP_CALLS + (6 * layer.forward.observations + applied) * layer.linear.numel
    return math.ceil(operations * (1 - share) / (share * max(training, 1.0)))
