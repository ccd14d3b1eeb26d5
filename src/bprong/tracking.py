"""One side of one layer under continuous whitening: its steps, how white it stays, when it must be anchored anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bprong.continuous import (
    LOOKED_AT,
    Factor,
    Share,
    centred_rows,
    distance,
    distance_of,
    downdated,
    factor,
    projected,
    share,
)
from bprong.moments import finite
from bprong.whitening import Damping

__all__ = ["DRIFT", "Rows", "Track"]

DRIFT = 2.0  # how many times farther from white than after the last anchor a side may come to be
SMOOTHING = 0.2  # of the distances, each of which is one batch's estimate
SETTLING = 20  # steps after an anchor that tell how white it left the side, and how much the estimates scatter
CERTAINTY = 4.0  # standard errors by which a drift must stand out


@dataclass(frozen=True)
class Rows:
    """A batch's rows of one side: values (n, d), of which weight · n⁻¹ Σ vvᵀ is the second moment."""

    values: Tensor
    weight: float

    @property
    def second(self) -> Tensor:
        """Rows whose outer products add up to the second moment."""
        return self.values * math.sqrt(self.weight / len(self.values))


@dataclass
class Track:
    """What outlives a step, apart from U, c and R: plain values, and the variances where the damping needs them."""

    turn: int = 0
    age: int = -1  # steps since the last exact factorisation; −1: there was none
    base: float = 0.0
    scatter: float = 0.0
    smoothed: float = 0.0
    variance: Tensor | None = None

    @property
    def anchored(self) -> bool:
        return self.age >= 0

    @property
    def off_white(self) -> float:
        """‖U(Ž+ε)Uᵀ − I‖ / ‖I‖ of the batches seen of late."""
        return math.sqrt(max(self.smoothed, 0.0))

    def anchor(self, second: Tensor) -> None:
        """An exact factorisation of a second moment was taken."""
        self.age, self.variance = 0, second.diagonal().clone()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any], device: torch.device) -> Track:
        variance = state["variance"]
        return cls(**{**state, "variance": None if variance is None else variance.to(device)})

    def step(
        self, U: Tensor, c: Tensor | None, rows: Rows, mu: float, damping: Damping
    ) -> tuple[Factor, Tensor] | None:
        """T and the new mean (unless c is None: c as zeros), or None where an exact factorisation is called for."""
        V, centre, damped = self._given(U, c, rows, mu, damping)
        whitened = V @ U.mT
        extra = None if damped is None else (U[:, damped.index] * damped.sizes).mT
        fair = None if extra is None or damped is None else extra / math.sqrt(damped.turns)
        self._look(distance(_seen(whitened, c is not None, rows, mu), fair))
        if self.drifted(len(V), U.shape[-1], mu):
            return None
        self.turn, self.age = self.turn + 1, self.age + 1
        return factor(whitened if extra is None else torch.cat([whitened, extra]), mu), centre

    def move(
        self, UU: Tensor, c: Tensor | None, rows: Rows, mu: float, damping: Damping
    ) -> tuple[Tensor, Tensor] | None:
        """The same of an inverse UU = UᵀU of which no root is known: its successor and the new mean, or None."""
        V, centre, damped = self._given(UU, c, rows, mu, damping)
        n, d = len(rows.values), len(UU)
        most = n if len(V) <= d else min(n, LOOKED_AT)  # of more rows than coordinates, those alone that are looked at
        P, gram = projected(UU, torch.cat([V[:most], V[n:]]), damped)
        self._look(_distance(d, gram, damped, partial(_seen, centred=c is not None, rows=rows, mu=mu)))
        if self.drifted(len(V), d, mu):
            return None
        if len(V) > d:
            P, gram = projected(UU, torch.linalg.qr(V, mode="r").R, damped)
        found = downdated(UU, P, gram, mu)
        if not finite(found) or not bool((found.diagonal() > 0).all()):
            return None
        self.turn, self.age = self.turn + 1, self.age + 1
        return found, centre

    def _given(
        self, U: Tensor, c: Tensor | None, rows: Rows, mu: float, damping: Damping
    ) -> tuple[Tensor, Tensor, Share | None]:
        """The rows of the step, the new mean, and the coordinates whose turn it is to be damped."""
        V, centre = (rows.second, U.new_zeros(U.shape[-1])) if c is None else centred_rows(rows.values, c, mu)
        return V, centre, share(U.shape[-1], self._epsilon(V, mu, damping), mu, self.turn, U)

    def _epsilon(self, V: Tensor, mu: float, damping: Damping) -> Tensor | float:
        if damping.relative_to == "one":
            return damping.value
        fresh = V.square().sum(dim=0).to(torch.float64)
        self.variance = fresh if self.variance is None else (1 - mu) * self.variance + mu * fresh
        return damping.value * damping.unit(self.variance)

    def _look(self, seen: float) -> None:
        """Takes note of how white a batch is in coordinates that were chosen without it."""
        self.smoothed = seen if self.age == 0 else self.smoothed + SMOOTHING * (seen - self.smoothed)
        if self.age == 0:
            self.base = self.scatter = 0.0
        if self.age < SETTLING:
            away = seen - self.base
            self.base += away / (self.age + 1)
            self.scatter += away * (seen - self.base)

    def drifted(self, n: int, d: int, mu: float) -> bool:
        """Whether the side is, beyond doubt, DRIFT times farther from white than after the last anchor.

        And than the running average of white rows would be: over n(2−μ)/μ of them it is off by d/n · μ/(2−μ), squared.
        """
        if self.age < SETTLING:
            return False
        least = max(self.base, d / n * mu / (2 - mu), 0.01)
        error = math.sqrt(self.scatter / (SETTLING - 1) * SMOOTHING / (2 - SMOOTHING))
        return not self.smoothed <= DRIFT**2 * least + CERTAINTY * error  # written so that NaN has drifted


def _seen(whitened: Tensor, centred: bool, rows: Rows, mu: float) -> Tensor:
    """The rows z† = U (z − c) about the old mean, which knows nothing of the batch, from those of the step."""
    n = len(rows.values)
    if not centred:
        return whitened * math.sqrt(n)
    return whitened[:-1] * math.sqrt(n) + whitened[-1:] / math.sqrt(1 - mu)


def _distance(d: int, gram: Tensor, damped: Share | None, seen: Callable[[Tensor], Tensor]) -> float:
    """As `distance`, from V UU Vᵀ with the damping's rows last; `seen` takes the other rows to those looked at."""
    if damped is None:
        return distance_of(d, seen(seen(gram).mT)[:LOOKED_AT, :LOOKED_AT])
    n = len(gram) - len(damped.index)
    ours, cross = seen(seen(gram[:n, :n]).mT), seen(gram[:n, n:])
    # what is in the step is turns times its share of the coordinates
    cross, corner = cross[:LOOKED_AT] / math.sqrt(damped.turns), gram[n:, n:] / damped.turns
    return distance_of(d, ours[:LOOKED_AT, :LOOKED_AT], cross, corner)
