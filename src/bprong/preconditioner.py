"""Whitener → step, for a layer of the user's own: what SGD in whitened coordinates does to W and b.

    ΔW = −η (RᵀR) (g_W − g_b cᵀ) (UᵀU),   Δb = −η (RᵀR) g_b − ΔW c      with  UᵀU = (Ž+ε₁I)⁻¹,  RᵀR = (D+ε₂I)⁻¹

Only the inverses matter, so none of their roots is formed and no layer is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from bprong.blocks import Blocks
from bprong.lowrank import LowRank, restored, saved, shape_of
from bprong.moments import Moments, outer
from bprong.recording import Measured
from bprong.schedule import Side
from bprong.solver import Attempts, Inverse, Solver, solve
from bprong.units import Unit
from bprong.whitening import Damping, rank

__all__ = ["Direction", "Layer", "Preconditioner", "distance_from_white"]

PROBES = 32
Direction = tuple[Tensor | None, Tensor | None]  # of W and of b: gradients, or what they become


@dataclass(eq=False)
class Preconditioner:
    """The inverses of one layer, on its device, in its weight's dtype or at least float32; None: the identity.

    inputs, outputs: the blocks of either side
    UU:       (in, in) (Ž+ε₁)⁻¹, or as its blocks are shaped
    c:        (in,) E[z], or (groups, in); None where nothing is centred
    q:        (UᵀU) c
    RR:       (out, out) (D+ε₂)⁻¹, or as its blocks are shaped
    moments:  what they were made from, by side
    refreshed_at: the step at which each side was refreshed
    attempts: when low rank is worth another try, by side
    exact_first: refreshes before the first try, where they follow each other too soon for it to pay
    white:    how far from white the last batch measured was, in the coordinates then in force, by side; continuously,
              the last few, damping included
    level:    the mean eigenvalue of each side as last measured, and the observations behind it
    units:    (in,) the variances that the forward damping is relative to, where it is relative to them
    step_norm: the length of the weight's step at the last refresh
    """

    inputs: Blocks
    outputs: Blocks
    solver: Solver = "exact"
    exact_first: int = 0
    UU: Inverse | None = None
    c: Tensor | None = None
    q: Tensor | None = None
    RR: Inverse | None = None
    moments: dict[Side, Moments] = field(default_factory=dict)
    refreshed_at: dict[Side, int] = field(default_factory=dict)
    attempts: dict[Side, Attempts] = field(default_factory=dict)
    white: dict[Side, float] = field(default_factory=dict)
    step_norm: float | None = None
    level: dict[Side, tuple[float, float]] = field(default_factory=dict)
    units: Tensor | None = None

    def load(self, kept: Mapping[str, Any], like: Tensor) -> None:
        """What `UU`, `c`, `RR` and `refreshed_at` were when they were saved."""
        self.UU, self.RR = (restored(kept[key], like) for key in ("UU", "RR"))
        self._centre(None if kept["c"] is None else kept["c"].to(like))
        self.refreshed_at, self.white, self.moments = dict(kept["refreshed_at"]), {}, {}
        self.level, self.units = dict(kept.get("level", {})), kept.get("units")
        self.attempts = {side: Attempts(**attempts) for side, attempts in kept.get("attempts", {}).items()}

    @cached_property
    def plain(self) -> bool:
        """Whether both sides are one block."""
        return self.outputs.lead == 0 and self.inputs.lead == 0 and self.inputs.taps == 1

    def direction(self, g_W: Tensor | None, g_b: Tensor | None) -> Direction:
        """(RᵀR)(g_W − g_b cᵀ)(UᵀU) and (RᵀR) g_b: the step for W, and for b as seen from the centre c.

        Gradients are matrices and vectors as `Unit.matrix` and `Unit.vector` give them.

        The bias itself then moves by the second minus the first times c; they are kept apart because weight and bias
        may have learning rates of their own. Gradients in half precision are brought to the inverses' float32.
        """
        UU, RR = self.UU, self.RR
        kept = UU if UU is not None else RR
        if kept is not None:
            g_W = g_W if g_W is None or g_W.dtype == kept.dtype else g_W.to(kept.dtype)
            g_b = g_b if g_b is None or g_b.dtype == kept.dtype else g_b.to(kept.dtype)
        if g_b is not None and RR is not None:
            g_b = RR @ g_b if self.plain else self.outputs.from_left(RR, g_b.unsqueeze(-1)).squeeze(-1)
        if g_W is not None:
            g_W = self._from_both_sides(g_W)
            if g_b is not None and self.q is not None:  # −(RᵀR) g_b cᵀ (UᵀU)
                g_W = g_W.addr_(g_b, self.q, alpha=-1) if g_W.ndim == 2 else g_W.sub_(outer(g_b, self.q))
        return g_W, g_b

    def _from_both_sides(self, g_W: Tensor) -> Tensor:
        """(RᵀR) g_W (UᵀU); where one block is multiplied, without asking how."""
        UU, RR = self.UU, self.RR
        if RR is not None:
            g_W = RR @ g_W if self.plain else self.outputs.from_left(RR, g_W)
            if isinstance(UU, LowRank) and g_W.ndim == 2:
                return UU.right_(g_W)  # it is no longer the user's gradient
        if UU is not None:
            g_W = g_W @ UU if self.plain else self.inputs.from_right(g_W, UU)
        return g_W

    def centred(self, g_W: Tensor, g_b: Tensor | None) -> Tensor:
        """g_W − g_b cᵀ = E[δ (z−c)ᵀ]."""
        if g_b is None or self.c is None:
            return g_W
        return torch.addr(g_W, g_b, self.c, alpha=-1) if g_W.ndim == 2 else g_W - outer(g_b, self.c)

    def look(self, z: Moments | None, delta: Moments | None) -> None:
        """Notes how far from white a batch is in the coordinates in force."""
        if z is not None:
            self.white["forward"] = distance_from_white(self.UU, z.second_in(_precision(self.UU)))
        if delta is not None:
            self.white["backward"] = distance_from_white(self.RR, delta.second_in(_precision(self.RR)))

    def drift(self, side: Side, moments: Moments, damping: Damping) -> float:
        """How far the inverse in force is from that of new moments: ‖U(Ž+ε)Uᵀ − I‖ / ‖I‖."""
        inverse = self.UU if side == "forward" else self.RR
        damped = moments.second_in(_precision(inverse))
        damped.diagonal(dim1=-2, dim2=-1).add_(damping.value * damping.scale(damped))
        return distance_from_white(inverse, damped)

    def refresh(
        self, side: Side, moments: Moments, damping: Damping, like: Tensor, found: Inverse | None = None
    ) -> None:
        """Takes the inverse for new moments; raises WhiteningError, with nothing changed, where there is none."""
        if found is None:
            attempts = self.attempts.setdefault(side, Attempts(self.exact_first))
            solver, start = attempts.solver(self.solver), self.RR if side == "backward" else self.UU
            found = solve(moments.scatter, damping, like, solver, start, moments.weight)
            attempts.took(solver, found)
        self.moments[side] = moments
        if side == "forward":
            relative = damping.relative_to == "variance" and moments.scatter.ndim == 2
            self.units = (moments.scatter.diagonal() / moments.weight).to(like) if relative else None
        self.take(side, found, None if moments.mean is None else self.inputs.features_of(moments.mean).to(like))

    def take(self, side: Side, found: Inverse, c: Tensor | None) -> None:
        """A new inverse of one side, with the centre of the inputs where it is theirs."""
        if side == "backward":
            self.RR = found
        else:
            self.UU = found
            self._centre(c)

    def _centre(self, c: Tensor | None) -> None:
        self.c = c
        self.q = None if c is None or self.UU is None else self.inputs.from_right(c.unsqueeze(-2), self.UU).squeeze(-2)


class Layer(Preconditioner):
    """A unit of the user's model with its preconditioner."""

    def __init__(self, unit: Unit, solver: Solver, exact_first: int = 0) -> None:
        super().__init__(unit.forward, unit.backward, solver, exact_first)
        self.unit, self.name, self.weight, self.bias = unit, unit.name, unit.weight, unit.bias

    def note(self, measured: Measured) -> None:
        """The mean eigenvalue of each side measured, and how many observations are behind it."""
        for side, moments in (("forward", measured.z), ("backward", measured.delta)):
            if moments is not None:
                self.level[cast(Side, side)] = (
                    float(moments.scatter.diagonal(dim1=-2, dim2=-1).mean()) / moments.weight,
                    moments.weight,
                )

    @property
    def like(self) -> Tensor:
        """What the inverses are like: the weight, in at least float32, since in bfloat16 they turn indefinite."""
        return self.weight.new_empty(0, dtype=torch.promote_types(self.weight.dtype, torch.float32))

    def gradients(self, gradients: Mapping[Tensor, Tensor]) -> Direction:
        """Of weight and bias as matrix and vector, each where it is trained and has one."""
        g_W, g_b = (None if p is None else gradients.get(p) for p in (self.weight, self.bias))
        unit = self.unit
        return None if g_W is None else unit.matrix(unit.own(g_W)), None if g_b is None else unit.vector(g_b)

    def ordinary(self, d_W: Tensor | None, d_b: Tensor | None, whole: dict[Tensor, Tensor]) -> None:
        """Writes the step that a direction means, −d_W and −(d_b − d_W c), to where the parameters' steps are kept."""
        unit = self.unit
        if d_W is not None:
            shaped = unit.shaped(d_W)
            if unit.rows is None:
                whole[self.weight] = -shaped
            else:
                unit.own(whole.setdefault(self.weight, torch.zeros_like(self.weight))).copy_(-shaped)
        if d_b is not None and self.bias is not None:
            total = d_b if d_W is None or self.c is None else d_b - unit.times(shaped, self.c)
            unit.vector(whole.setdefault(self.bias, torch.zeros_like(self.bias))).copy_(-total)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        kept = {"UU": saved(self.UU), "c": self.c, "RR": saved(self.RR), "units": self.units}
        attempts = {side: asdict(attempts) for side, attempts in self.attempts.items()}
        return kept | {"refreshed_at": dict(self.refreshed_at), "attempts": attempts, "level": dict(self.level)}

    def check(self, kept: Mapping[str, Any]) -> None:
        """Raises ValueError where what was saved is of other sizes."""
        for key, blocks in (("UU", self.inputs), ("RR", self.outputs)):
            shape = shape_of(kept[key])
            if shape is not None and shape != blocks.shape:
                raise ValueError(f"layer {self.name!r}: the state's {key} is for {shape[0]}, the layer's for {blocks}")

    def row(self, t: int, damping: Callable[[Layer, Side], Damping]) -> dict[str, Any]:
        """For the report at step t."""
        row: dict[str, Any] = {"layer": self.name, "step_norm": self.step_norm}
        row |= {"forward_form": str(self.inputs), "backward_form": str(self.outputs)}
        for side, refreshed_at in self.refreshed_at.items():
            row |= {f"{side}_age": t - refreshed_at, f"{side}_from_white": self.white.get(side)}
            if (moments := self.moments.get(side)) is not None:
                second, own = moments.second, damping(self, side)
                row |= {
                    f"{side}_rank": f"{rank(second)}/{second.diagonal(dim1=-2, dim2=-1).numel()}",
                    f"{side}_damping": float((own.value * own.scale(second)).mean()),
                }
        return row


def _precision(inverse: Inverse | None) -> torch.dtype:
    return torch.float64 if inverse is None else inverse.dtype


def distance_from_white(inverse: Inverse | None, second: Tensor) -> float:
    """‖U Ž Uᵀ − I‖ / ‖I‖ for any root U of the inverse: the eigenvalues of UŽUᵀ are those of (UᵀU) Ž.

    Of wide sides it is estimated: E‖…v‖² over random v is the squared norm, to some percent with few of them.
    """
    if inverse is not None:  # for people to read: the layer's own precision is enough
        second = second.to(inverse.dtype)
    if second.ndim == 2 and len(second) > 4 * PROBES:
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(len(second), PROBES, generator=generator, dtype=torch.float32).to(second)
        w = second @ v
        w = w if inverse is None else inverse @ w  # Mv, and ‖UŽUᵀ − I‖² = tr (M−I)² = E vᵀ(M−I)²v
        again = second @ (w - v)
        again = (again if inverse is None else inverse @ again) - (w - v)
        squared = float((v * again).sum()) / PROBES
        return math.sqrt(max(squared, 0.0) / len(second))
    product = second if inverse is None else inverse @ second
    diagonal = product.diagonal(dim1=-2, dim2=-1)
    d = diagonal.numel()
    squared = float((product * product.mT).sum()) - 2 * float(diagonal.sum()) + d
    return math.sqrt(max(squared, 0.0) / d)
