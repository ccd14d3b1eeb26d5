"""A layer is two sides and a centre c; what it does to gradients.

    ΔW = −η (RᵀR) (g_W − g_b cᵀ) (UᵀU),   Δb = −η (RᵀR) g_b − ΔW c      with  UᵀU = (Ž+ε₁I)⁻¹,  RᵀR = (D+ε₂I)⁻¹

This is SGD in whitened coordinates, written in ordinary ones: it needs the factors of both sides and no added layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor

from bprong.capture.measure import LayerMoments
from bprong.capture.weights import WeightMatrix
from bprong.errors import WhiteningError, warn
from bprong.linalg.blocks import Blocks
from bprong.linalg.damped_inverse import Damping, RootSolver, inverses_of_equals
from bprong.linalg.factors import Dense, Factor, shape_of_state
from bprong.linalg.moments import Moments, feature_means
from bprong.whitening.side import Backoff, Side, Solver

WeightAndBias = tuple[Tensor | None, Tensor | None]  # of W and of b: their gradients, or these preconditioned

GROUPED_UP_TO = 96  # features: a wider product uses the cores by itself, and grouping it would only copy gradients
PATIENCE = 3  # consecutive failures after which an error is raised instead of a warning


class Layer:
    """A weight with its bias, whitened on both sides.

    linear:     the weight as a matrix that acts on rows
    sides:      the sides that are whitened: both, or the forward one alone (PRONG)
    c:          (in,) E[z], or (groups, in); None if nothing is centred
    q:          (UᵀU) c
    step_norm:  the length of the weight's step at the last refresh
    """

    def __init__(
        self,
        linear: WeightMatrix,
        solver: Solver | RootSolver = "exact",
        *,
        backward: bool = True,
        exact_first: int = 0,
    ) -> None:
        """exact_first: refreshes before low rank is tried; early ones follow each other too soon for it to pay."""
        self.linear = linear
        self.name = linear.name
        self.weight = linear.weight
        self.bias = linear.bias
        self.forward = Side("forward", linear.inputs, solver, Backoff(exact_first))
        self.backward = Side("backward", linear.outputs, solver, Backoff(exact_first))
        self.sides = (self.forward, self.backward) if backward else (self.forward,)
        self.c: Tensor | None = None
        self.q: Tensor | None = None
        self.step_norm: float | None = None
        self._warned = False

    @property
    def like(self) -> Tensor:
        """What factors are like: the weight, in at least float32, since in bfloat16 they become indefinite."""
        return self.weight.new_empty(0, dtype=torch.promote_types(self.weight.dtype, torch.float32))

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def update(self, measured: LayerMoments, keep: float) -> Iterator[tuple[Side, Moments]]:
        """Adds what was measured to the running averages; gives each side measured with the moments to factor."""
        for side, moments in ((self.forward, measured.z), (self.backward, measured.delta)):
            if moments is not None and side in self.sides:
                yield side, side.update(moments, keep)

    def take(self, side: Side, moments: Moments, damping: Damping, factor: Factor) -> None:
        """Puts a new factor into force and, if it is the inputs', a new centre."""
        side.factor = factor
        if not side.of_inputs:
            return
        relative = damping.relative_to == "variance" and moments.scatter.ndim == 2
        side.damping_units = moments.variances.to(self.like) if relative else None
        self._centre(None if moments.mean is None else feature_means(moments.mean, side.blocks).to(self.like))

    def _centre(self, c: Tensor | None) -> None:
        self.c = c
        factor = self.forward.factor
        self.q = None if c is None or factor is None else factor.right(c.unsqueeze(-2)).squeeze(-2)

    def failed(self, side: Side, reason: WhiteningError) -> None:
        """Warns; raises when the side has failed PATIENCE times in a row."""
        side.failures += 1
        if side.failures >= PATIENCE:
            message = f"layer {self.name!r}, {side.name} whitening, {PATIENCE} times in a row: {reason}"
            raise WhiteningError(f"{message}. Check its inputs, or give a larger damping") from reason
        self.warn(side, reason)

    def warn(self, side: Side, reason: object) -> None:
        """Warns that a side keeps its factor, once for each layer."""
        if not self._warned:
            self._warned = True
            warn(f"layer {self.name!r} keeps its previous {side.name} whitener: {reason}")

    # Gradients → directions → steps -----------------------------------------------------------------------------------

    def gradients(self, gradients: Mapping[Tensor, Tensor]) -> WeightAndBias:
        """The gradients of W, as a matrix, and of b, as a vector; None for a parameter that has none."""
        g_W = gradients.get(self.weight)
        g_b = None if self.bias is None else gradients.get(self.bias)
        linear = self.linear
        return None if g_W is None else linear.matrix(linear.own(g_W)), None if g_b is None else linear.vector(g_b)

    def direction(self, gradients: Mapping[Tensor, Tensor]) -> WeightAndBias:
        return precondition(self.backward.factor, self.forward.factor, self.q, *self.gradients(gradients))

    def centred(self, g_W: Tensor, g_b: Tensor | None) -> Tensor:
        """g_W − g_b cᵀ = E[δ (z−c)ᵀ]."""
        return g_W if g_b is None or self.c is None else _minus_outer_(g_W.clone(), g_b, self.c)

    def write_step(self, d_W: Tensor | None, d_b: Tensor | None, steps: dict[Tensor, Tensor]) -> None:
        """Writes the step that a direction stands for, −d_W and −(d_b − d_W c), into the steps of the parameters."""
        linear = self.linear
        if d_W is not None:
            shaped = linear.shaped(d_W)
            if linear.rows is None:
                steps[self.weight] = -shaped
            else:
                linear.own(steps.setdefault(self.weight, torch.zeros_like(self.weight))).copy_(-shaped)
        if d_b is not None and self.bias is not None:
            total = d_b if d_W is None or self.c is None else d_b - linear.times(shaped, self.c)
            linear.vector(steps.setdefault(self.bias, torch.zeros_like(self.bias))).copy_(-total)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {"c": self.c} | {side.name: side.state_dict() for side in self.sides}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a state belongs to a layer of another shape."""
        for side in self.sides:
            saved = state.get(side.name, {})
            shapes = {
                "factor": saved.get("factor") and shape_of_state(saved["factor"]),
                "scatter": saved.get("moments") and tuple(saved["moments"]["scatter"].shape),
            }
            for kind, shape in shapes.items():
                if side.name not in state or shape not in (None, side.blocks.shape):
                    raise ValueError(
                        f"layer {self.name!r}: the state's {side.name} {kind} has shape {shape}, and this layer's has "
                        f"{side.blocks.shape}"
                    )
        inputs = self.linear.inputs.groups * self.linear.inputs.features
        if state["c"] is not None and state["c"].numel() != inputs:
            raise ValueError(
                f"layer {self.name!r}: the state's centre has shape {tuple(state['c'].shape)}, and this layer has "
                f"{inputs} inputs"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        like = self.like
        for side in self.sides:
            side.load_state_dict(state[side.name], like)
        self._centre(None if state["c"] is None else state["c"].to(like))


def precondition(
    left: Factor | None, right: Factor | None, q: Tensor | None, g_W: Tensor | None, g_b: Tensor | None
) -> WeightAndBias:
    """(RᵀR)(g_W − g_b cᵀ)(UᵀU) and (RᵀR) g_b: the step for W, and for b as seen from the centre c.

    left: RᵀR; right: UᵀU; q: (UᵀU) c; None: the identity, or nothing centred

    The bias moves by the second minus the first times c. They are kept apart because weight and bias may have learning
    rates of their own. Gradients in half precision are converted to the factors' float32.
    """
    factor = left if right is None else right
    if factor is not None:
        g_W = g_W if g_W is None or g_W.dtype == factor.dtype else g_W.to(factor.dtype)
        g_b = g_b if g_b is None or g_b.dtype == factor.dtype else g_b.to(factor.dtype)
    if left is not None:
        g_W = g_W if g_W is None else left.left(g_W)
        g_b = g_b if g_b is None else left.left(g_b)
    if g_W is None or right is None:
        return g_W, g_b
    g_W = right.right(g_W, overwrite=left is not None)  # which the user's own gradient must not be
    return g_W if g_b is None or q is None else _minus_outer_(g_W, g_b, q), g_b


def _minus_outer_(M: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """M − abᵀ in place, for each group if there are several."""
    if M.ndim == 2:
        return M.addr_(a, b, alpha=-1)
    return M.baddbmm_(a.unsqueeze(-1), b.unsqueeze(-2), alpha=-1)


class Layers(dict[str, Layer]):
    """The layers of a model by name. Small ones of one shape are factored and applied together.

    A product of small matrices takes less time than its call, so n layers of equal shape are treated as one layer of n
    groups: their factors are slices of one tensor (n, d, d).
    """

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        super().__init__((layer.name, layer) for layer in layers)
        self._groups: list[_Group] | None = None

    @property
    def parameters(self) -> set[Tensor]:
        return {p for layer in self.values() for p in layer.parameters}

    def changed(self) -> None:
        """To be called when a factor has changed or a layer was removed."""
        self._groups = None

    def directions(self, gradients: Mapping[Tensor, Tensor]) -> dict[Layer, WeightAndBias]:
        """The preconditioned gradients of every layer."""
        if self._groups is None:
            self._groups = [_Group(layers) for layers in self._equal()]
        found: dict[Layer, WeightAndBias] = {}
        for group in self._groups:
            if group.single is None:
                found.update(group.directions(gradients))
            else:
                found[group.single] = group.single.direction(gradients)
        return found

    def factors_of_equals(self, sides: Mapping[Side, tuple[Layer, Moments, Damping]]) -> dict[Side, Factor]:
        """The exact factors of those of the sides that can be factored with others of the same shape."""
        found: dict[Side, Factor] = {}
        equal: dict[Any, list[Side]] = {}
        for side, (layer, _, damping) in sides.items():
            if _is_small(side) and damping.relative_to != "variance":
                like = layer.like
                equal.setdefault((side.blocks, like.dtype, like.device), []).append(side)
        for several in [several for several in equal.values() if len(several) > 1]:
            like = sides[several[0]][0].like
            dampings = [sides[side][2] for side in several]
            inverses = inverses_of_equals([sides[side][1].second for side in several], dampings, like.dtype)
            for side, inverse in zip(several, inverses, strict=False):  # none if they could not be factored together
                found[side] = Dense(inverse.to(like), side.blocks)
        return found

    def _equal(self) -> list[list[Layer]]:
        """The layers, those that can share their products in one list."""
        equal: dict[Any, list[Layer]] = {}
        for layer in self.values():
            own: Any = layer
            both = (layer.forward, layer.backward)
            if layer.weight.ndim == 2 and not layer.linear.one_hot and all(map(_is_small, both)):
                factors = tuple(side.factor is None for side in both)
                shape = (layer.forward.blocks, layer.backward.blocks, layer.weight.dtype, layer.weight.device)
                own = (shape, factors, layer.q is None)
            equal.setdefault(own, []).append(layer)
        return list(equal.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"_groups": None}


def _is_small(side: Side) -> bool:
    return not side.blocks.lead and side.blocks.size <= GROUPED_UP_TO and side.solver in ("auto", "exact")


class _Group:
    """Layers of one shape whose directions are computed by one product, or a single layer of any shape."""

    def __init__(self, layers: list[Layer]) -> None:
        self.single = layers[0] if len(layers) == 1 else None
        self._layers = layers
        if self.single is None:
            self._left = self._stacked([layer.backward for layer in layers])
            self._right = self._stacked([layer.forward for layer in layers])
            centres = [layer.q for layer in layers if layer.q is not None]
            self._q = torch.stack(centres) if centres else None

    @staticmethod
    def _stacked(sides: list[Side]) -> Factor | None:
        """The factors as one of several groups; the sides' own become slices of it, so that they are kept once."""
        inverses = [cast(Dense, side.factor).inverse for side in sides if side.factor is not None]
        if not inverses:
            return None
        stacked = torch.stack(inverses)
        for side, inverse in zip(sides, stacked, strict=True):
            side.factor = Dense(inverse, side.blocks)
        return Dense(stacked, Blocks(sides[0].blocks.size, groups=len(sides)))

    def directions(self, gradients: Mapping[Tensor, Tensor]) -> Iterator[tuple[Layer, WeightAndBias]]:
        own = [layer.gradients(gradients) for layer in self._layers]
        weights = [g_W for g_W, _ in own if g_W is not None]
        biases = [g_b for _, g_b in own if g_b is not None]
        if len(weights) < len(own) or len(biases) not in (0, len(own)):
            return ((layer, layer.direction(gradients)) for layer in self._layers)
        g_b = torch.stack(biases) if biases else None
        d_W, d_b = precondition(self._left, self._right, self._q, torch.stack(weights), g_b)
        d_bs = repeat(None) if d_b is None else d_b
        return zip(self._layers, zip(cast(Tensor, d_W), d_bs, strict=False), strict=True)
