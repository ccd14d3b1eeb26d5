"""When sides are measured and refreshed.

Fujimoto & Ohira, Algorithm 2: forward-whitening when mod(t, τ₁) = c₁, back-whitening when mod(t, τ₂) = c₂. Algorithm 1
(PRONG) is the same without the second. Both routes, the paper's network and the optimizer, follow one `Schedule`. The
optimizer can also choose the period from a share of run time, and measure a side less often while it does not drift.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
                   the paper's τ₁, c₁, τ₂, c₂; backward_every None: as forward_every; an offset None: half the period
    refresh        "periodic": refresh every side at its period; "drift": at each period measure the sides that have
                   been drifting, and refresh those that have drifted
    """

    forward_every: int
    forward_offset: int = 0
    backward_every: int | None = None
    backward_offset: int | None = 0
    refresh: Mode = "periodic"

    def of(self, side: SideName) -> tuple[int, int]:
        """Return τ and c of a side."""
        if side == "forward":
            return period("forward", self.forward_every, self.forward_offset)
        every = self.forward_every if self.backward_every is None else self.backward_every
        return period("backward", every, self.backward_offset)


class Schedule:
    """The clock of a run, and what is due at the next step that measures anything, and from which targets.

    fisher:       the targets behind D
    average:      the factor on a running average's weight at each measurement; 0: no average
    seed:         of sampled targets; None: torch's initial seed
    overhead:     the share of run time that determines the period; None: `periods` hold
    early_steps:  further steps at which everything is measured, if `overhead` determines the period,
    early_parts:  and parts of the first period after which it is measured: a half is 2

    t:          the step
    every:      the period that `overhead` determined; None before the first refresh
    base_seed:  of the targets that are sampled in this run; `seed` is that of step t
    two_sided:  whether errors are whitened too
    next:       the first step from t on at which a side is measured; −1: there is none to measure
    measured:   the names of the layers whose inputs, and whose errors, are measured at that step
    """

    def __init__(
        self, layers: Mapping[str, Layer], periods: Periods, fisher: Fisher = "sampled", average: float = 0.0,
        seed: int | None = None, overhead: float | None = None,
        early_steps: tuple[int, ...] = (), early_parts: tuple[int, ...] = EARLY_PARTS,
    ) -> None:  # fmt: skip
        self.periods = periods
        self.fisher = one_of("fisher", fisher, get_args(Fisher))
        self.average = number("average", average, 0, 1)
        seed = torch.initial_seed() if seed is None else integer("seed", seed, 0)
        self.base_seed = seed % 2**53  # which processes can exchange as a float64
        self.overhead = overhead
        self.t = 0
        self.every: int | None = None
        self._start = 0
        self._early_steps = early_steps
        self._early_parts = early_parts
        self._layers = layers
        names = {side.name for layer in layers.values() for side in layer.sides}
        self.two_sided = "backward" in names
        self._periods = {name: periods.of(name) for name in SIDES if name in names}
        self.plan()

    def plan(self) -> None:
        """Look ahead from step t; to be called once that step was made, and when layers or intervals changed."""
        sides = [(layer.name, side) for layer in self._layers.values() for side in layer.sides]
        early = [step for step in self._early() if step >= self.t]
        steps = [*early]
        for name in self._periods:
            intervals = [side.interval for _, side in sides if side.name == name and side.interval is not None]
            steps.append(self._due_at(name, min(intervals, default=1)))
        self.next = min(steps) if sides else -1
        self.measured: dict[SideName, set[str]] = {name: set() for name in SIDES}
        for layer, side in sides:
            if self.next in early or self._due_at(side.name, side.interval or 1) == self.next:
                self.measured[side.name].add(layer)

    def _early(self) -> list[int]:
        """Steps at which everything is measured whatever the periods are."""
        if self.overhead is None:
            return []
        parts = [] if self.every is None else [self.every // part for part in self._early_parts]
        return [self._start + step for step in (0, *parts, *self._early_steps)]

    @property
    def is_due(self) -> bool:
        """Whether something is measured at this step."""
        return self.t == self.next

    @property
    def refreshed(self) -> list[SideName]:
        """The sides to refresh at this step; by drift, those that are measured in some layer."""
        return [name for name in SIDES if self.measured[name]] if self.is_due else []

    def has_drifted(self, side: Side, drift: float) -> bool:
        """Whether the factor of a side that has drifted this far is out of date.

        A side that has not drifted is measured half as often from now on, one that has twice as often.
        """
        side.last_drift = drift if side.factor is not None else None
        drifted = not drift <= DRIFT  # NaN counts as drift, for the refresh to report
        if self.t not in self._early():
            interval = side.interval or 1
            side.interval = max(1, interval // 2) if drifted else min(LONGEST_INTERVAL, 2 * interval)
        return drifted

    @property
    def seed(self) -> int:
        """The seed of the targets sampled at this step."""
        return mixed(self.base_seed, self.t)

    def _due_at(self, name: SideName, interval: int) -> int:
        """The first step from t on at which a side is due that is measured once in so many periods."""
        every, offset = self._periods[name] if self.every is None else (self.every, 0)
        return self.t + (offset - self.t) % (every * interval)

    def restart(self, start: int) -> None:
        """Measure again as often as at the beginning of a run, from this step on."""
        self._start = start
        self.plan()

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "seed": self.base_seed, "every": self.every, "start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.t = state["t"]
        self._start = state["start"]
        self.base_seed = state["seed"]
        self.every = state["every"] if self.overhead is not None else None  # else the user has given a period
        self.plan()


def period_for(layers: Collection[Layer], overhead: float) -> int:
    """Steps between refreshes of all layers such that these take the share `overhead` of run time.

    Operations are counted, not timed, so that a run is the same on every machine and after every checkpoint. Each layer
    has been refreshed once; its rows are those of that measurement.

    >>> from bprong.capture.weights import weight_matrices_of
    >>> from bprong.linalg.factors import Dense
    >>> from bprong.linalg.moments import Moments
    >>> layer = Layer(weight_matrices_of("", torch.nn.Linear(784, 100))[0])
    >>> for side in layer.sides:
    ...     second = torch.eye(side.blocks.size)
    ...     side.moments = Moments(100.0, None, second)
    ...     side.factor = Dense(second, side.blocks)
    >>> [period_for([layer], share) for share in (0.05, 0.1, 0.2)]
    [246, 117, 52]
    """
    refreshing = 0.0
    for layer in layers:
        rows = layer.forward.observations
        cost = layer.cost
        refreshing += MEASURING_CALLS + 4 * rows * layer.linear.numel + DOUBLE_PRECISION * rows * cost["per_row"]
        refreshing += len(layer.sides) * FACTORING_CALLS + FACTORISATION * cost["refresh"]
    return max(SHORTEST_PERIOD, _period(refreshing, layers, overhead))


def evaluation_period(layers: Collection[Layer], directions: int, part: float, share: float) -> int:
    """Steps between evaluations of a quadratic model such that these take a share of run time.

    directions: each takes a forward pass with dual numbers; the loss afterwards takes a plain one
    part:       of the batch that is evaluated

    As in `period_for`, operations are counted, and each layer has been refreshed once.
    """
    passes = DUAL_PASSES * directions + 1
    evaluating = sum(passes * (PASS_CALLS + 2 * part * x.forward.observations * x.linear.numel) for x in layers)
    return _period(evaluating, layers, share)


def _period(operations: float, layers: Collection[Layer], share: float) -> int:
    """Steps in which something that takes these operations is to be done once, for it to take a share of run time."""
    training = 0.0
    for layer in layers:
        applied = sum(side.factor.cost for side in layer.sides if side.factor is not None)
        training += STEP_CALLS + (6 * layer.forward.observations + applied) * layer.linear.numel
    return math.ceil(operations * (1 - share) / (share * max(training, 1.0)))
