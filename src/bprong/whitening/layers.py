"""A layer is two sides and a centre c; what it does to gradients.

    ΔW = −η (RᵀR) (g_W − g_b cᵀ) (UᵀU),   Δb = −η (RᵀR) g_b − ΔW c      with  UᵀU = (Ž+ε₁I)⁻¹,  RᵀR = (D+ε₂I)⁻¹

This is SGD in whitened coordinates, written in ordinary ones: it needs the factors of both sides and no added layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from bprong.capture.measure import LayerMoments
from bprong.capture.weights import WeightMatrix
from bprong.errors import WhiteningError, warn
from bprong.linalg.blocks import Blocks
from bprong.linalg.damped_inverse import Damping, RootSolver, inverses_of_equals
from bprong.linalg.factors import Dense, Factor, shape_of_state
from bprong.linalg.moments import Moments, add_outer, feature_means
from bprong.sharding import Sharding
from bprong.whitening.side import Side, Solver

Item = TypeVar("Item")
WeightAndBias = tuple[Tensor | None, Tensor | None]  # of W and of b: their gradients, or these preconditioned

GROUPED_UP_TO = 96  # features: a wider product uses the cores by itself, and grouping it would only copy gradients
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

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def follow_dtype(self) -> bool:
        """Converts the factors if the weight has another precision now; whether it had."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        changed = [side for side in self.sides if side.factor is not None and side.factor.dtype is not dtype]
        for side in changed:
            side.factor = None if side.factor is None else side.factor.to(dtype)
        self.c = None if self.c is None else self.c.to(dtype)
        return bool(changed)

    def update(self, measured: LayerMoments, keep: float) -> Iterator[tuple[Side, Moments]]:
        """Adds what was measured to the running averages; gives each side measured with the moments to factor.

        What was measured is released, because factoring takes memory too.
        """
        found = ((self.forward, measured.z), (self.backward, measured.delta))
        measured.z = None
        measured.delta = None
        for side, moments in found:
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
        linear = self.linear
        g_b = None if g_b is None else _at_least_float32(linear.vector(g_b))
        return None if g_W is None else _at_least_float32(linear.gradient(linear.own(g_W), g_b, self.c)), g_b

    def direction(self, gradients: Mapping[Tensor, Tensor]) -> WeightAndBias:
        return precondition(self.backward.factor, self.forward.factor, self.c, *self.gradients(gradients))

    def centred(self, g_W: Tensor, g_b: Tensor | None) -> Tensor:
        """g_W − g_b cᵀ = E[δ (z−c)ᵀ]."""
        return g_W if g_b is None or self.c is None else add_outer(g_W, g_b, self.c, -1)

    def write(self, d_W: Tensor | None, d_b: Tensor | None, into: dict[Tensor, Tensor], ratio: float = 1.0) -> None:
        """Writes a direction, seen from the centre c, in ordinary coordinates: d_W, and d_b − ratio · d_W c.

        into:   directions by parameter, of which this layer may have a part only
        ratio:  of the learning rate of W to that of b; infinite: b follows the centre alone, −d_W c
        """
        linear = self.linear
        if d_W is not None:
            shaped = linear.shaped(d_W)
            if linear.rows is None:
                into[self.weight] = shaped
            else:
                linear.own(_zeros_once(into, self.weight, shaped)).copy_(shaped)
        if d_b is None or self.bias is None:
            return
        if ratio == math.inf:
            d_b = torch.zeros_like(d_b)
            ratio = 1.0
        if d_W is not None and self.c is not None:
            d_b = _minus_product(d_b, linear, shaped, self.c, ratio)
        if linear.bias_rows is None:
            into[self.bias] = d_b.reshape(self.bias.shape)
        else:
            linear.vector(_zeros_once(into, self.bias, d_b)).copy_(d_b)

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
        self.c = None if state["c"] is None else state["c"].to(like)


def precondition(
    left: Factor | None, right: Factor | None, c: Tensor | None, g_W: Tensor | None, g_b: Tensor | None
) -> WeightAndBias:
    """(RᵀR)(g_W − g_b cᵀ)(UᵀU) and (RᵀR) g_b: the step for W, and for b as seen from the centre c.

    left: RᵀR; right: UᵀU; None: the identity, or nothing centred

    The bias moves by the second minus the first times c. They are kept apart because weight and bias may have learning
    rates of their own.
    """
    if left is not None:
        g_W = g_W if g_W is None else left.left(g_W)
        g_b = g_b if g_b is None else left.left(g_b)
    if g_W is None or right is None:
        return g_W, g_b
    mine = None if left is None else g_W  # what may be overwritten: not the user's own gradient
    if g_b is not None and c is not None:
        g_W = add_outer(g_W, g_b, c, -1, out=mine)
    return right.right(g_W, overwrite=mine is not None), g_b


def _zeros_once(into: dict[Tensor, Tensor], parameter: Tensor, like: Tensor) -> Tensor:
    """The entry of a parameter, which starts at zero."""
    if parameter not in into:
        into[parameter] = like.new_zeros(parameter.shape)
    return into[parameter]


def _minus_product(d_b: Tensor, linear: WeightMatrix, W: Tensor, c: Tensor, factor: float) -> Tensor:
    """d_b − factor · W c."""
    if W.ndim == 2 and not (linear.transposed or linear.computed or linear.inputs.groups > 1):
        return torch.addmv(d_b, W.to(d_b.dtype), c.to(d_b.dtype), alpha=-factor)
    return d_b - factor * linear.times(W, c)


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype.itemsize >= torch.float32.itemsize else values.float()


class Layers(dict[str, Layer]):
    """The layers of a model by name. Small ones of one shape are factored and applied together.

    A product of small matrices takes less time than its call, so n layers of equal shape are treated as one layer of n
    groups: their factors are slices of one tensor (n, d, d).
    """

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        super().__init__((layer.name, layer) for layer in layers)
        self.sharding: Sharding | None = None  # None: every process has all factors
        self._groups: list[tuple[list[Layer], Callable[..., WeightAndBias]]] | None = None

    @property
    def parameters(self) -> set[Tensor]:
        return {p for layer in self.values() for p in layer.parameters}

    def changed(self) -> None:
        """To be called when a factor has changed or a layer was removed."""
        self._groups = None

    def is_own(self, layer: Layer) -> bool:
        """Whether this process has the factors of a layer."""
        return self.sharding is None or self.sharding.is_own(layer.name)

    def steps(self, gradients: Mapping[Tensor, Tensor], rates: Mapping[Tensor, float]) -> dict[Tensor, Tensor]:
        """The preconditioned gradients by parameter, in ordinary coordinates; to be subtracted, times `units(rates)`.

        rates: the learning rate of each parameter, since a step of W moves b at the rate of W
        """
        return self.by_parameter(gradients, self.directions, rates)

    def units(self, rates: Mapping[Tensor, float]) -> dict[Tensor, float]:
        """What steps are to be multiplied by: the learning rates, but that of W for a bias whose own is zero."""
        found = dict(rates)
        for layer in self.values():
            if layer.bias is not None and _ratio(layer, rates) == math.inf:
                found[layer.bias] = rates[layer.weight]
        return found

    def by_parameter(
        self,
        values: Mapping[Tensor, Tensor],
        compute: Callable[[Mapping[Tensor, Tensor]], Mapping[Layer, WeightAndBias]],
        rates: Mapping[Tensor, float],
    ) -> dict[Tensor, Tensor]:
        """Directions of layers as directions of whole parameters, of which several layers may have a part.

        values:   of the parameters, such as gradients
        compute:  gives the directions of layers from them; each process does so for those that it has the factors of
        """
        found: dict[Tensor, Tensor] = {}
        sharding = self.sharding
        if sharding is not None:
            covered = self.parameters
            values = {p: value for p, value in values.items() if p in covered}
        for layer, (d_W, d_b) in compute(values if sharding is None else sharding.collected(values)).items():
            layer.write(d_W, d_b, found, _ratio(layer, rates))
        return found if sharding is None else sharding.distributed(found, values)

    def directions(self, gradients: Mapping[Tensor, Tensor]) -> dict[Layer, WeightAndBias]:
        """The preconditioned gradients of the layers that this process has the factors of."""
        if any([layer.follow_dtype() for layer in self.values()]):  # noqa: C419  # all of them
            self.changed()
        if self._groups is None:
            own = [layer for layer in self.values() if self.is_own(layer)]
            shapes = {layer: shape for layer in own if (shape := _shape_of_small(layer)) is not None}
            self._groups = [(layers, _precondition_of(layers)) for layers in _equal(shapes)]
        found: dict[Layer, WeightAndBias] = {}
        for layers, together in self._groups:
            found |= _directions_of(layers, together, gradients)
        own = [layer for layer in self.values() if self.is_own(layer)]
        return {layer: found.get(layer) or layer.direction(gradients) for layer in own}

    def factors_of_equals(self, sides: Mapping[Side, tuple[Layer, Moments, Damping]]) -> dict[Side, Factor]:
        """The exact factors of those of the sides that can be factored with others of the same shape."""
        shapes = {
            side: (side.blocks, layer.weight.dtype, layer.weight.device)
            for side, (layer, _, damping) in sides.items()
            if _is_small(side) and damping.relative_to != "variance"
        }
        found: dict[Side, Factor] = {}
        for several in _equal(shapes):
            layers, moments, dampings = zip(*(sides[side] for side in several), strict=True)
            like = layers[0].like
            inverses = inverses_of_equals([own.second for own in moments], dampings, like.dtype)
            for side, inverse in zip(several, inverses, strict=False):  # none if they could not be factored together
                found[side] = Dense(inverse.to(like), side.blocks)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_groups": None, "sharding": None}


def _ratio(layer: Layer, rates: Mapping[Tensor, float]) -> float:
    """Of the learning rate of the weight to that of the bias; infinite if only the bias has a rate of zero."""
    if layer.bias is None or layer.bias not in rates or layer.weight not in rates:
        return 1.0
    weight, bias = rates[layer.weight], rates[layer.bias]
    return 1.0 if weight == bias else weight / bias if bias else math.inf


def _equal(shapes: Mapping[Item, object]) -> list[list[Item]]:
    """The items of equal shape, where there are several."""
    equal: dict[object, list[Item]] = {}
    for item, shape in shapes.items():
        equal.setdefault(shape, []).append(item)
    return [items for items in equal.values() if len(items) > 1]


def _is_small(side: Side) -> bool:
    return not side.blocks.lead and side.blocks.size <= GROUPED_UP_TO and side.solver in ("auto", "exact")


def _shape_of_small(layer: Layer) -> object:
    """What layers have in common that can share their products; None for a layer that cannot share them."""
    both = (layer.forward, layer.backward)
    if len(layer.linear.shape) != 2 or layer.linear.one_hot or not all(map(_is_small, both)):
        return None
    shape = (layer.forward.blocks, layer.backward.blocks, layer.weight.dtype, layer.weight.device)
    return shape, tuple(side.factor is None for side in both), layer.c is None


def _precondition_of(layers: Sequence[Layer]) -> Callable[..., WeightAndBias]:
    """`precondition` for layers of one shape together, as for one layer of several groups."""
    left = _shared([layer.backward for layer in layers])
    right = _shared([layer.forward for layer in layers])
    return partial(precondition, left, right, _stacked([layer.c for layer in layers]))


def _directions_of(
    layers: Sequence[Layer], together: Callable[..., WeightAndBias], gradients: Mapping[Tensor, Tensor]
) -> dict[Layer, WeightAndBias]:
    """The preconditioned gradients of layers of one shape; none if some of these have no gradient."""
    weights, biases = zip(*(layer.gradients(gradients) for layer in layers), strict=True)
    if any(len({g is None for g in kind}) > 1 for kind in (weights, biases)):
        return {}
    found = together(_stacked(weights), _stacked(biases))
    d_W, d_b = (repeat(None, len(layers)) if d is None else d for d in found)
    return dict(zip(layers, zip(d_W, d_b, strict=True), strict=True))


def _shared(sides: Sequence[Side]) -> Factor | None:
    """The factors as one of several groups; the sides' own become slices of it, so that they are kept once."""
    stacked = _stacked([cast(Dense, side.factor).inverse for side in sides if side.factor is not None])
    if stacked is None:
        return None
    for side, inverse in zip(sides, stacked, strict=True):
        side.factor = Dense(inverse, side.blocks)
    return Dense(stacked, Blocks(sides[0].blocks.size, groups=len(sides)))


def _stacked(tensors: Iterable[Tensor | None]) -> Tensor | None:
    """The tensors as one, without those that are None; None if there is no other."""
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(found) if found else None
