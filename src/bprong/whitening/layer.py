"""A layer is two sides and a centre c. It chooses by which solver and in which precision its factors are made.

    UᵀU = (Ž+ε₁I)⁻¹,   RᵀR = (D+ε₂I)⁻¹,   c = E[z]

A side has its running moments, its factor, and the choice of how the factor is computed from the moments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bprong.capture.request import LayerMoments
from bprong.capture.weights import WeightMatrix
from bprong.errors import WhiteningError, warn
from bprong.linalg.factors import NO_FACTOR, Damping, Factor, distance_from_white, factor_by_cholesky
from bprong.linalg.low_rank import (
    LOW_RANK_FROM,
    LOW_RANK_SHARE,
    Backoff,
    LowRank,
    low_rank,
    restored,
)
from bprong.linalg.moments import Blocks, Moments, at_least_float32, diagonal, feature_means, float64_device
from bprong.linalg.roots import RootSolver, factor_by_eigenvalues

SideName = Literal["forward", "backward"]
SIDES: tuple[SideName, ...] = ("forward", "backward")
Solver = Literal["auto", "exact", "low-rank"]  # the paper's network has solvers of its own (`RootSolver`)

PATIENCE = 3  # consecutive failures after which an error is raised instead of a warning
SAMPLING = 0.1  # times tr/N: the sampling error of eigenvalues from N observations


@dataclass(eq=False)
class Side:
    """One side of one layer: its inputs z ("forward") or its errors δ ("backward").

    moments:          the running average of what was measured
    factor:           (Ž+ε)⁻¹ or (D+ε)⁻¹; None: the identity
    units:            the units of the features that the factor is in; None: as they are
    refreshed_at:     the step at which the factor was last computed
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
    units: Tensor | None = None
    refreshed_at: int | None = None
    last_drift: float | None = None
    interval: int | None = None
    failures: int = 0

    @property
    def of_inputs(self) -> bool:
        """Whether this is the side of the inputs z; otherwise it is that of the errors δ."""
        return self.name == "forward"

    @property
    def mean_eigenvalue(self) -> float | None:
        """That of the moments."""
        return None if self.moments is None else self.moments.mean_eigenvalue

    @property
    def observations(self) -> float:
        """The number of rows, or targets, behind the moments."""
        return 0.0 if self.moments is None else self.moments.weight

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
        return new

    def leave_to_owner(self) -> None:
        """Leaves the side to another process: of its moments the diagonal remains, of its factor the numbers."""
        if self.moments is not None:
            self.moments = self.moments.thinned()
        if self.factor is not None:
            self.factor = restored(self.factor.numbers, self.factor.tensor.to("meta"), self.blocks)

    def drift(self, moments: Moments, damping: Damping) -> float:
        """How far the factor is from that of new moments: ‖U(Ž+ε)Uᵀ − I‖ / ‖I‖; infinite without a factor."""
        if self.factor is None:
            return float("inf")
        damped = moments.in_units(self.units).second_in(self.factor.tensor.dtype)
        old, new = (1.0 if units is None else units for units in (self.units, damping.units(moments)))
        diagonal(damped).add_(damping.amounts(moments.variances) * (new / old) ** 2)
        return distance_from_white(self.factor, damped)

    def damping_for_few(self, damping: Damping) -> Damping:
        """The damping with 0.1 tr/N added, because N observations leave the eigenvalues uncertain."""
        if self.mean_eigenvalue is None or self.blocks.size == 1:
            return damping
        features = self.blocks.size * self.blocks.count
        unit = self.mean_eigenvalue if damping.relative_to == "one" else 1.0
        return replace(damping, value=damping.value + SAMPLING * unit * features / self.observations)

    def solve(self, moments: Moments, damping: Damping, like: Tensor) -> Factor:
        """The factor of new moments, like a tensor; raises WhiteningError if there is none."""
        moments = moments.in_units(damping.units(moments))
        return (
            self._solve_by_low_rank(moments, damping, like)
            or factor_by_cholesky(moments, damping, self.blocks, like)
            or factor_by_eigenvalues(moments, damping, self.blocks, like)
        )

    def _solve_by_low_rank(self, moments: Moments, damping: Damping, like: Tensor) -> LowRank | None:
        """The low-rank factor; None: it is not tried, the side is not one block, or its spectrum is flat."""
        size = self.blocks.size
        is_chosen = self.solver == "low-rank"
        is_wide = self.solver == "auto" and size >= LOW_RANK_FROM
        if self.blocks.lead or not (is_chosen or (is_wide and self.backoff.tries())):
            return None
        epsilon = float(damping.amounts(moments.variances)[0])
        largest_rank = size - 1 if is_chosen else int(LOW_RANK_SHARE * size)
        start = self.factor.B if isinstance(self.factor, LowRank) else None
        factor = low_rank(moments.second_in(like.dtype).to(like), epsilon, damping.rank_error, largest_rank, start)
        self.backoff.record(factor is not None)
        return factor

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self, like: Tensor) -> dict[str, Tensor]:
        """Its moments, its factor and all numbers, as tensors whose shapes depend on the blocks alone.

        NaN stands for what is not known, or is on another process. A factor of low rank takes the first columns.
        """
        shape = self.blocks.shape
        in_double = like.to(float64_device(like), torch.float64)
        moments = self.moments or Moments(math.nan, None, in_double.new_full(shape, math.nan))
        tensor = None if self.factor is None else self.factor.tensor
        of_factor = NO_FACTOR if self.factor is None else self.factor.numbers
        numbers = [self.refreshed_at, self.interval, *astuple(self.backoff), moments.weight, *of_factor]
        values = [math.nan if number is None else number for number in numbers]
        return {
            "scatter": _or_nan(moments.scatter, shape, in_double),
            "mean": _or_nan(moments.mean, shape[:-1], in_double),
            "tails": _or_nan(moments.tails, (2, *shape[:-1]), in_double),
            "units": _or_nan(self.units, shape[:-1], in_double),
            "factor": _or_nan(tensor, shape, like),
            "numbers": torch.tensor(values, dtype=torch.float64, device="cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Tensor], like: Tensor) -> None:
        """Restore what `state_dict` returned."""
        refreshed_at, interval, skip, next_skip, weight, *of_factor = state["numbers"].tolist()
        device = float64_device(like)
        scatter = state["scatter"].to(device, copy=True)
        mean, tails, units = [_unless_nan(state[name].to(device)) for name in ("mean", "tails", "units")]
        self.moments = None if math.isnan(weight) else Moments(weight, mean, scatter, tails=tails)
        self.units = units
        self.factor = restored(of_factor, state["factor"].to(like), self.blocks) if of_factor[0] else None
        self.refreshed_at = None if math.isnan(refreshed_at) else int(refreshed_at)
        self.interval = None if math.isnan(interval) else int(interval)
        self.backoff = Backoff(int(skip), int(next_skip))
        self.last_drift = None
        self.failures = 0


def _or_nan(values: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """A copy of values as the first columns of a tensor of this shape; NaN for what is not known, or not here."""
    whole = like.new_full(shape, math.nan)
    if values is not None and not values.is_meta and values.shape[:-1] == whole.shape[:-1]:
        whole[..., : values.shape[-1]] = values
    return whole


def _unless_nan(values: Tensor) -> Tensor | None:
    """These values, or None if NaN stands for them."""
    return None if values.isnan().any() else values


class Layer:
    """A weight with its bias, whitened on both sides.

    linear:     the weight as a matrix that acts on rows
    sides:      the sides that are whitened: both, or the forward one alone (PRONG)
    c:          (in,) E[z], or (groups, in); None if nothing is centred
    step_norm:  the length of the weight's step at the last refresh
    """

    def __init__(
        self,
        linear: WeightMatrix,
        solver: Solver | RootSolver = "exact",
        *,
        backward: bool = True,
    ) -> None:
        self.linear = linear
        self.name = linear.name
        self.weight = linear.weight
        self.bias = linear.bias
        self.parameters = linear.parameters
        self.forward = Side("forward", linear.inputs, solver)
        self.backward = Side("backward", linear.outputs, solver)
        self.sides = (self.forward, self.backward) if backward else (self.forward,)
        self.c: Tensor | None = None
        self.step_norm: float | None = None
        self._warned: set[str] = set()

    @property
    def cost(self) -> dict[str, int]:
        """What whitening it takes (`WeightMatrix.cost`)."""
        return self.linear.cost(backward=self.backward in self.sides)

    @property
    def like(self) -> Tensor:
        """What factors and centres are stored like: the weight, in the precision that they are computed in."""
        return torch.empty(0, dtype=at_least_float32(self.weight.dtype), device=self.weight.device)

    @property
    def u(self) -> Tensor | None:
        """The units that the forward factor is in: (1, in), or (groups, 1, in); None: those of z."""
        units = self.forward.units
        return None if units is None else feature_means(units, self.forward.blocks).unsqueeze(-2).to(self.like)

    def update(self, measured: LayerMoments, keep: float) -> Iterator[tuple[Side, Moments]]:
        """Adds what was measured to the running averages; gives each side measured with the moments to factor.

        What was measured is released, because factoring takes memory too.
        """
        measured_sides = ((self.forward, measured.z), (self.backward, measured.delta))
        measured.z = None
        measured.delta = None
        for side, moments in measured_sides:
            if moments is not None and side in self.sides:
                yield side, side.update(moments, keep)

    def take(self, side: Side, moments: Moments, damping: Damping, factor: Factor | None = None) -> None:
        """Puts the factor of new moments into force and, if they are the inputs', a new centre.

        factor: if another process has computed it; raises WhiteningError if there is none
        """
        side.factor = factor or side.solve(moments, damping, self.like)
        side.units = damping.units(moments)
        if side.of_inputs:
            self.c = None if moments.mean is None else feature_means(moments.mean, side.blocks).to(self.like)

    def failed(self, side: Side, reason: WhiteningError, quiet: bool = False) -> None:
        """Warns, unless `quiet`; raises when the side has failed PATIENCE times in a row."""
        side.failures += 1
        if side.failures >= PATIENCE:
            message = f"layer {self.name!r}, {side.name} whitening, {PATIENCE} times in a row: {reason}"
            raise WhiteningError(f"{message}. Check its inputs, or give a larger damping") from reason
        if not quiet:
            self.warn(side, reason)

    def warn(self, side: Side, reason: object) -> None:
        """Warns that a side keeps its factor, once for each side and reason."""
        kind = side.name + re.sub(r"[-+.e\d]", "", str(reason))  # without numbers
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"layer {self.name!r} keeps its previous {side.name} whitener: {reason}")

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors only, whose shapes depend on the layer alone."""
        like = self.like
        state: dict[str, Any] = {side.name: side.state_dict(like) for side in self.sides}
        return state | {"c": self._unknown_centre if self.c is None else self.c}

    @property
    def _unknown_centre(self) -> Tensor:
        """NaN, in the shape of c."""
        blocks = self.linear.inputs
        return feature_means(self.like.new_full(blocks.shape[:-1], math.nan), blocks)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a state belongs to a layer of another shape."""
        shapes = [(f"{side.name} factor", state[side.name]["factor"], side.blocks.shape) for side in self.sides]
        for part, saved, shape in [*shapes, ("centre", state["c"], self._unknown_centre.shape)]:
            if saved.shape != shape:
                raise ValueError(
                    f"layer {self.name!r}: the state's {part} has shape {tuple(saved.shape)}, and this layer's has "
                    f"{tuple(shape)}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        like = self.like
        for side in self.sides:
            side.load_state_dict(state[side.name], like)
        self.c = _unless_nan(state["c"].to(like))
