"""A layer is two sides and a centre c; its gradients and directions in the coordinates of its matrix.

    ΔW = −η (RᵀR) (g_W − g_b cᵀ) (UᵀU),   Δb = −η (RᵀR) g_b − ΔW c      with  UᵀU = (Ž+ε₁I)⁻¹,  RᵀR = (D+ε₂I)⁻¹

This is SGD in whitened coordinates, written in ordinary ones: it needs the factors of both sides and no added layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.capture.request import LayerMoments
from bprong.capture.weights import WeightMatrix
from bprong.errors import WhiteningError, warn
from bprong.linalg.damped_inverse import RootSolver
from bprong.linalg.factors import Factor
from bprong.linalg.moments import Moments, feature_means
from bprong.whitening.side import Side, Solver

WeightAndBias = tuple[Tensor | None, Tensor | None]  # of W and of b: their gradients, or these preconditioned

FLOAT32 = torch.float32.itemsize  # gradients in lower precision are converted to the factors' float32
PATIENCE = 3  # consecutive failures after which an error is raised instead of a warning


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
        self.parameters = [p for p in (linear.weight, linear.bias) if p is not None]
        self.forward = Side("forward", linear.inputs, solver)
        self.backward = Side("backward", linear.outputs, solver)
        self.sides = (self.forward, self.backward) if backward else (self.forward,)
        self.c: Tensor | None = None
        self.step_norm: float | None = None
        self._warned: set[str] = set()

    @property
    def like(self) -> Tensor:
        """What factors are like: the weight, in at least float32, since in bfloat16 they become indefinite."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return torch.empty(0, dtype=dtype, device=self.weight.device)

    def convert(self, dtype: torch.dtype) -> None:
        """Converts the factors and the centre, because the weight has another precision now."""
        for side in self.sides:
            side.factor = None if side.factor is None else side.factor.to(dtype)
        self.c = None if self.c is None else self.c.to(dtype)

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

    def take(self, side: Side, moments: Moments, factor: Factor) -> None:
        """Puts a new factor into force and, if it is the inputs', a new centre."""
        side.factor = factor
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

    # Gradients → directions → steps -----------------------------------------------------------------------------------

    def gradients(self, gradients: Mapping[Tensor, Tensor]) -> WeightAndBias:
        """The gradients of W, as a matrix, and of b, as a vector; None for a parameter that has none.

        In half precision they are converted to the factors' float32.
        """
        g_W = gradients.get(self.weight)
        g_b = None if self.bias is None else gradients.get(self.bias)
        if g_b is not None and g_b.dtype.itemsize < FLOAT32:
            g_b = g_b.float()
        if g_W is not None and g_W.dtype.itemsize < FLOAT32:
            g_W = g_W.float()
        linear = self.linear
        if not linear.is_plain:
            g_b = None if g_b is None else linear.vector(g_b)
            g_W = None if g_W is None else linear.matrix(linear.own(g_W))
        return g_W, g_b

    def write(self, d_W: Tensor | None, d_b: Tensor | None, into: dict[Tensor, Tensor]) -> None:
        """Writes a step, seen from the centre c, in ordinary coordinates: d_W, and d_b − d_W c.

        into: steps by parameter, of which this layer may have a part only
        """
        linear = self.linear
        if d_W is not None:
            shaped = d_W if linear.is_plain else linear.shaped(d_W)
            if linear.rows is None:
                into[self.weight] = shaped
            else:
                linear.own(_zeros_once(into, self.weight, shaped)).copy_(shaped)
        if d_b is None or self.bias is None:
            return
        if d_W is not None and self.c is not None and linear.is_plain:
            into[self.bias] = torch.addmv(d_b, d_W, self.c, alpha=-1)
            return
        if d_W is not None and self.c is not None:
            d_b = d_b - linear.times(shaped, self.c)
        if linear.bias_rows is None:
            into[self.bias] = d_b.reshape(self.bias.shape)
        else:
            linear.vector(_zeros_once(into, self.bias, d_b)).copy_(d_b)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors only."""
        state: dict[str, Any] = {side.name: side.state_dict() for side in self.sides}
        return state if self.c is None else state | {"c": self.c}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a state belongs to a layer of another shape."""
        for side in self.sides:
            shape = side.blocks.shape
            saved = state.get(side.name, {"factor": torch.empty(0)})
            for kind in ("factor", "scatter"):
                if kind in saved and saved[kind].shape[:-1] != shape[:-1]:
                    raise ValueError(
                        f"layer {self.name!r}: the state's {side.name} {kind} has shape {tuple(saved[kind].shape)}, "
                        f"and this layer's has {shape}"
                    )
        c = state.get("c")
        inputs = self.linear.inputs.groups * self.linear.inputs.features
        if c is not None and c.numel() != inputs:
            raise ValueError(
                f"layer {self.name!r}: the state's centre has shape {tuple(c.shape)}, and this layer has {inputs} "
                f"inputs"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        like = self.like
        for side in self.sides:
            side.load_state_dict(state[side.name], like)
        self.c = state["c"].to(like) if "c" in state else None


def _zeros_once(into: dict[Tensor, Tensor], parameter: Tensor, like: Tensor) -> Tensor:
    """The entry of a parameter, which starts at zero."""
    if parameter not in into:
        into[parameter] = like.new_zeros(parameter.shape)
    return into[parameter]
