"""One side of one layer: its running moments, its factor, and how the factor is computed from the moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from bprong.linalg.blocks import Blocks
from bprong.linalg.damped_inverse import Damping, RootSolver
from bprong.linalg.factors import (
    DESCRIPTION,
    Elsewhere,
    Factor,
    LowRank,
    described,
    description,
    distance_from_white,
    exact_factor,
    low_rank,
)
from bprong.linalg.moments import Moments, float64_device

SideName = Literal["forward", "backward"]
SIDES: tuple[SideName, ...] = ("forward", "backward")
Solver = Literal["auto", "exact", "low-rank"]  # the paper's network has solvers of its own (`RootSolver`)

# Low rank pays for wide sides with small ranks. A step through a side of d features, with n rows on the other side,
# takes 2nd² operations exactly and 4ndk with rank k; products with a narrow factor run at about 0.7 of the speed of
# square ones (benchmarks/width_cost.py), and a large rank takes longer to find than Cholesky's factor.
LOW_RANK_FROM = 256  # features
LOW_RANK_SHARE = 0.25  # the largest rank, relative to the features
LOW_RANK_ERROR = 0.5  # the largest relative difference of a step from the exact one (`LowRank.error`)
LONGEST_BACKOFF = 16  # refreshes
SAMPLING = 0.1  # times tr/N: the sampling error of eigenvalues from N observations


@dataclass
class Backoff:
    """Low rank is not tried for `skip` refreshes, and if it then fails again, not for the following `next_skip`."""

    skip: int = 0
    next_skip: int = 2

    def tries(self) -> bool:
        if self.skip == 0:
            return True
        self.skip -= 1
        return False

    def record(self, found: bool) -> None:
        self.skip = 0 if found else self.next_skip
        self.next_skip = 2 if found else min(2 * self.next_skip, LONGEST_BACKOFF)


@dataclass(eq=False)
class Side:
    """One side of one layer: its inputs z ("forward") or its errors δ ("backward").

    moments:          the running average of what was measured
    factor:           (Ž+ε)⁻¹ or (D+ε)⁻¹; None: the identity
    refreshed_at:     the step at which the factor was last computed
    mean_eigenvalue:  of the moments; `observations` is the number of rows or targets behind it
    last_drift:       what `drift` returned when the factor was last compared with new moments
    interval:         periods between two measurements, by drift; None before the first one
    failures:         consecutive refreshes that failed
    """

    name: SideName
    blocks: Blocks
    solver: Solver | RootSolver = "exact"
    backoff: Backoff = field(default_factory=Backoff)
    moments: Moments | None = None
    factor: Factor | None = None
    refreshed_at: int | None = None
    mean_eigenvalue: float | None = None
    observations: float = 0.0
    last_drift: float | None = None
    interval: int | None = None
    failures: int = 0

    @property
    def of_inputs(self) -> bool:
        """Whether this is the side of the inputs z; otherwise it is that of the errors δ."""
        return self.name == "forward"

    def update(self, new: Moments, keep: float) -> Moments:
        """Adds a measurement to the running average, which keeps `keep` of its weight; returns what to factor.

        A measurement that is not finite does not enter the average. It is returned as it is, for its factorisation to
        report the failure.
        """
        if new.finite:
            if keep and self.moments is not None and (self.moments.mean is None) == (new.mean is None):
                new = self.moments.average_(new, keep)
            elif keep:
                new = new.copy()  # which the next measurement is added to, in place
            self.moments = new
            self.mean_eigenvalue = float(new.variances.mean())
        self.observations = new.weight
        return new

    def leave_to(self, owner: int) -> None:
        """Leaves the side to another process: of its moments the diagonal remains, of its factor the cost."""
        if self.moments is not None and not self.moments.diagonal:
            self.moments = self.moments.thinned()
        if self.factor is not None:
            self.factor = Elsewhere(owner, self.factor.cost, self.factor.dtype)

    def drift(self, moments: Moments, damping: Damping) -> float:
        """How far the factor is from that of new moments: ‖U(Ž+ε)Uᵀ − I‖ / ‖I‖; infinite without a factor."""
        if self.factor is None:
            return float("inf")
        damped = moments.second_in(self.factor.dtype)
        diagonal = damped.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(damping.amounts(diagonal))
        return distance_from_white(self.factor, damped)

    def damping_for_few(self, damping: Damping) -> Damping:
        """The damping with 0.1 tr/N added, because N observations leave the eigenvalues uncertain."""
        if self.mean_eigenvalue is None or not self.observations or self.blocks.size == 1:
            return damping
        features = self.blocks.size * self.blocks.count
        unit = self.mean_eigenvalue if damping.relative_to == "one" else 1.0
        return replace(damping, value=damping.value + SAMPLING * unit * features / self.observations)

    def solve(self, moments: Moments, damping: Damping, like: Tensor) -> Factor:
        """The factor of new moments, like a tensor; raises WhiteningError if there is none."""
        factor = self._low_rank(moments, damping, like) if self._tries_low_rank(damping) else None
        return exact_factor(moments, damping, self.blocks, like) if factor is None else factor

    def _tries_low_rank(self, damping: Damping) -> bool:
        """Low rank is for one block that is damped alike in all directions, and wide unless the user asked for it."""
        if self.blocks.lead or damping.relative_to == "variance":
            return False
        wide = self.solver == "auto" and self.blocks.size >= LOW_RANK_FROM
        return self.solver == "low-rank" or (wide and self.backoff.tries())

    def _low_rank(self, moments: Moments, damping: Damping, like: Tensor) -> Factor | None:
        epsilon = float(damping.amounts(moments.variances)[0])
        largest_rank = int(LOW_RANK_SHARE * self.blocks.size) if self.solver == "auto" else self.blocks.size - 1
        start = self.factor.B if isinstance(self.factor, LowRank) else None
        factor = low_rank(moments.second_in(like.dtype).to(like), epsilon, LOW_RANK_ERROR, largest_rank, start)
        self.backoff.record(factor is not None)
        return factor

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of its moments and of its factor, as far as they are here, and one of all numbers."""
        numbers = [*(getattr(self, name) for name in _NUMBERS), *astuple(self.backoff), None, False]
        state = {}
        moments = self.moments
        if moments is not None:
            numbers[-2:] = [moments.weight, moments.mean is not None]
            if moments.mean is not None:
                state["mean"] = moments.mean
            if not moments.diagonal:  # otherwise another process has the rest of it
                state["scatter"] = moments.copy().values
        if self.factor is not None and self.factor.kind:
            # A slice of a group's inverses is saved as a tensor of its own: torch.save would store the whole group.
            tensor = self.factor.tensor
            state["factor"] = tensor if tensor._base is None else tensor.clone()
        values = [math.nan if number is None else number for number in numbers]
        state["numbers"] = torch.tensor([*values, *description(self.factor)], dtype=torch.float64, device="cpu")
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], like: Tensor) -> None:
        """Restore what `state_dict` returned; tensors that its numbers do not speak of are ignored."""
        values = state["numbers"].tolist()
        *numbers, skip, next_skip, weight, has_mean = values[:-DESCRIPTION]
        for (name, kind), number in zip(_NUMBERS.items(), numbers, strict=True):
            setattr(self, name, None if math.isnan(number) else kind(number))
        self.backoff = Backoff(int(skip), int(next_skip))
        self.last_drift = None
        self.failures = 0
        self.moments = None
        if not math.isnan(weight):
            device = float64_device(like)
            mean = state["mean"].to(device) if has_mean else None
            self.moments = Moments(weight, mean, state["scatter"].to(device, copy=True))
        self.factor = None
        if values[-DESCRIPTION]:
            self.factor = described(values[-DESCRIPTION:], state["factor"].to(like), self.blocks)


_NUMBERS = {"refreshed_at": int, "mean_eigenvalue": float, "observations": float, "interval": int}
