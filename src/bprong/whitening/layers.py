"""The layers of a model by name, and their natural gradients as those of whole parameters.

    (RᵀR)(g_W − g_b cᵀ)(UᵀU)  and  (RᵀR) g_b        with  UᵀU = (Ž+ε₁I)⁻¹,  RᵀR = (D+ε₂I)⁻¹

A product of small matrices takes less time than its call, so n layers of equal shape are treated as one layer of n
groups: their factors are slices of one tensor (n, d, d). A layer that shares its shape with no other is a stack of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from bprong.linalg.factors import Damping, Dense, Factor, factors_of_equals, precondition
from bprong.linalg.moments import Blocks, Moments
from bprong.parallel.slices import Sharding
from bprong.whitening.layer import Layer, Side, WeightAndBias

Value = TypeVar("Value")
Values = Mapping[Tensor, Tensor]  # by parameter: gradients, or what is made of them
Rates = Mapping[Tensor, float]  # learning rates by parameter


STACKED_UP_TO = 96  # features: a wider product uses the cores by itself, and stacking it would only copy gradients


class Layers(dict[str, Layer]):
    """The layers of a model by name. Small ones of one shape are factored and applied together."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        super().__init__((layer.name, layer) for layer in layers)
        self.sharding: Sharding | None = None  # None: every process has all factors
        self._cache: dict[object, Any] = {}

    @property
    def parameters(self) -> set[Tensor]:
        return {p for layer in self.values() for p in layer.parameters}

    def changed(self) -> None:
        """To be called when a factor has changed or a layer was removed."""
        self._cache.clear()

    def cached(self, key: object, make: Callable[[], Value]) -> Value:
        """What is made of the factors once, until they change."""
        if key not in self._cache:
            self._cache[key] = make()
        value: Value = self._cache[key]
        return value

    def is_own(self, layer: Layer) -> bool:
        """Whether this process has the factors of a layer."""
        return self.sharding is None or self.sharding.is_own(layer.name)

    def natural_gradients(self, gradients: Values, rates: Rates | None = None) -> dict[Tensor, Tensor]:
        """The preconditioned gradients by parameter, in ordinary coordinates.

        rates: what is multiplied by numbers for each parameter: the steps of W and, as seen from the centre, of b
        """
        return self.by_parameter(gradients, partial(self._preconditioned, rates=rates))

    def by_parameter(
        self, values: Values, compute: Callable[[Values], Mapping[Layer, WeightAndBias]]
    ) -> dict[Tensor, Tensor]:
        """What is computed of layers as values of whole parameters, of which several layers may have a part.

        values:   of the parameters, such as gradients
        compute:  gives that of layers from them; each process does so for those that it has the factors of
        """
        into: dict[Tensor, Tensor] = {}
        sharding = self.sharding
        if sharding is not None:
            covered = self.parameters
            values = {p: value for p, value in values.items() if p in covered}
        whole_values = values if sharding is None else sharding.collected(values)
        for layer, (d_W, d_b) in compute(whole_values).items():
            layer.write(d_W, d_b, into)
        return into if sharding is None else sharding.distributed(into, values)

    def _preconditioned(self, gradients: Values, rates: Rates | None = None) -> dict[Layer, WeightAndBias]:
        """The natural gradients of the layers that this process has the factors of."""
        preconditioned: dict[Layer, WeightAndBias] = {}
        for stack in self.cached("stacks", self._own_stacks):
            preconditioned |= stack.precondition(gradients)
        if rates is None:
            return preconditioned
        scaled: dict[Layer, WeightAndBias] = {}
        for layer, (d_W, d_b) in preconditioned.items():
            step_of_W = None if d_W is None else d_W * rates[layer.weight]
            scaled[layer] = step_of_W, None if d_b is None else d_b * rates[cast(Tensor, layer.bias)]
        return scaled

    def _own_stacks(self) -> list[Stack]:
        groups: dict[object, list[Layer]] = {}
        for layer in self.values():
            if self.is_own(layer):
                groups.setdefault(_shape_of_small(layer), []).append(layer)
        return list(map(Stack, groups.values()))

    def factors_of_equals(self, sides: Mapping[Side, tuple[Layer, Moments, Damping]]) -> dict[Side, Factor]:
        """The exact factors of those of the sides that can be factored with others of the same shape."""
        groups: dict[object, list[Side]] = {}
        for side, (layer, _, damping) in sides.items():
            if _is_small(side) and damping.relative_to != "variance":
                shape = (side.blocks, layer.weight.dtype, layer.weight.device)
                groups.setdefault(shape, []).append(side)
        factors: dict[Side, Factor] = {}
        for equals in groups.values():
            if len(equals) > 1:
                layers, moments, dampings = zip(*[sides[side] for side in equals], strict=True)
                together = factors_of_equals(moments, dampings, equals[0].blocks, layers[0].like)
                factors |= dict(zip(equals, together, strict=False))
        return factors

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": {}, "sharding": None}


class Stack:
    """One layer, or several of equal shape.

    left:  RᵀR of all of them; right: UᵀU; None: the identity
    c:     their centres; None: nothing is centred
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.left = _shared_factor([layer.backward for layer in layers])
        self.right = _shared_factor([layer.forward for layer in layers])
        self.c = _stacked([layer.c for layer in layers])

    def precondition(self, gradients: Values) -> dict[Layer, WeightAndBias]:
        """The preconditioned gradients of each layer, the bias as seen from the centre c."""
        pairs = [layer.gradients(gradients) for layer in self.layers]
        if len(pairs) == 1:
            return {self.layers[0]: precondition(self.left, self.right, self.c, *pairs[0])}
        weights, biases = zip(*pairs, strict=True)
        if None in weights or (None in biases and any(g is not None for g in biases)):
            preconditioned: dict[Layer, WeightAndBias] = {}  # they differ in what they have
            for layer in self.layers:
                preconditioned |= Stack([layer]).precondition(gradients)
            return preconditioned
        d_W, d_b = precondition(self.left, self.right, self.c, _stacked(weights), _stacked(biases))
        steps_of_biases = [None] * len(pairs) if d_b is None else d_b
        return dict(zip(self.layers, zip(cast(Tensor, d_W), steps_of_biases, strict=True), strict=True))


def _is_small(side: Side) -> bool:
    return not side.blocks.lead and side.blocks.size <= STACKED_UP_TO and side.solver in ("auto", "exact")


def _shape_of_small(layer: Layer) -> object:
    """What layers have in common that can share their products; a layer that cannot share them itself."""
    both = (layer.forward, layer.backward)
    if len(layer.linear.shape) != 2 or layer.linear.one_hot or not all(map(_is_small, both)):
        return layer
    shape = (layer.forward.blocks, layer.backward.blocks, layer.weight.dtype, layer.weight.device)
    return shape, tuple(side.factor is None for side in both), layer.c is None


def _shared_factor(sides: Sequence[Side]) -> Factor | None:
    """The factors as one of several groups; the sides' own become slices of it, so that they are kept once."""
    if len(sides) == 1 or sides[0].factor is None:
        return sides[0].factor
    inverses = torch.stack([cast(Dense, side.factor).inverse for side in sides])
    for side, inverse in zip(sides, inverses, strict=True):
        side.factor = Dense(inverse, side.blocks)
    return Dense(inverses, Blocks(sides[0].blocks.size, groups=len(sides)))


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one, a single one as it is; None if they are None."""
    if len(tensors) == 1 or tensors[0] is None:
        return tensors[0]
    return torch.stack(cast(tuple[Tensor, ...], tensors))
