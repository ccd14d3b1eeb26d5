"""The layers of a model by name, and their directions as those of whole parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor

from bprong.linalg.damped_inverse import Damping, inverses_of_equals
from bprong.linalg.factors import Dense, Factor
from bprong.linalg.moments import Moments
from bprong.parallel.slices import Sharding
from bprong.whitening.layer import Layer, WeightAndBias
from bprong.whitening.side import Side
from bprong.whitening.stacks import Stack, equal, is_small, stacks_of

Value = TypeVar("Value")
BiasTerm = tuple[
    float, float, Tensor, Tensor
]  # the rates of W and of b, the gradient of b, and its direction seen from c


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

    def steps(
        self, gradients: Mapping[Tensor, Tensor], rates: Mapping[Tensor, float], biases: list[BiasTerm] | None = None
    ) -> dict[Tensor, Tensor]:
        """The preconditioned gradients by parameter, in ordinary coordinates; to be subtracted, times `units(rates)`.

        rates:  the learning rate of each parameter, since a step of W moves b at the rate of W; empty: they are equal
        biases: is filled with what `squared_length` needs of layers whose bias has another rate than their weight
        """
        return self.by_parameter(gradients, self.directions, rates, biases)

    def units(self, rates: Mapping[Tensor, float]) -> dict[Tensor, float]:
        """The rate of each step. A bias whose own is zero has that of its weight, with which centring moves it."""
        units = dict(rates)
        for layer in self.values():
            if layer.bias is not None and _ratio(layer, rates) == math.inf:
                units[layer.bias] = rates[layer.weight]
        return units

    def by_parameter(
        self,
        values: Mapping[Tensor, Tensor],
        compute: Callable[[Mapping[Tensor, Tensor]], Mapping[Layer, WeightAndBias]],
        rates: Mapping[Tensor, float],
        biases: list[BiasTerm] | None = None,
    ) -> dict[Tensor, Tensor]:
        """Directions of layers as directions of whole parameters, of which several layers may have a part.

        values:   of the parameters, such as gradients
        compute:  gives the directions of layers from them; each process does so for those that it has the factors of
        """
        directions: dict[Tensor, Tensor] = {}
        sharding = self.sharding
        if sharding is not None:
            covered = self.parameters
            values = {p: value for p, value in values.items() if p in covered}
        whole_values = values if sharding is None else sharding.collected(values)
        for layer, (d_W, d_b) in compute(whole_values).items():
            ratio = _ratio(layer, rates) if rates else 1.0
            layer.write(d_W, d_b, directions, ratio)
            if biases is not None and ratio != 1.0 and d_b is not None:
                _, g_b = layer.gradients(whole_values)
                biases.append((rates[layer.weight], rates[cast(Tensor, layer.bias)], cast(Tensor, g_b), d_b))
        return directions if sharding is None else sharding.distributed(directions, values)

    def directions(self, gradients: Mapping[Tensor, Tensor]) -> dict[Layer, WeightAndBias]:
        """The preconditioned gradients of the layers that this process has the factors of."""
        stacks = self.cached("stacks", self._own_stacks)
        directions: dict[Layer, WeightAndBias] = {}
        for stack in stacks:
            directions |= stack.directions(gradients)
        return directions

    def _own_stacks(self) -> list[Stack]:
        return stacks_of([layer for layer in self.values() if self.is_own(layer)])

    def factors_of_equals(self, sides: Mapping[Side, tuple[Layer, Moments, Damping]]) -> dict[Side, Factor]:
        """The exact factors of those of the sides that can be factored with others of the same shape."""
        shapes = {
            side: (side.blocks, layer.weight.dtype, layer.weight.device)
            for side, (layer, _, damping) in sides.items()
            if is_small(side) and damping.relative_to != "variance"
        }
        factors: dict[Side, Factor] = {}
        for equals in equal(shapes):
            if len(equals) == 1:
                continue
            layers, moments, dampings = zip(*(sides[side] for side in equals), strict=True)
            like = layers[0].like
            inverses = inverses_of_equals([own.second for own in moments], dampings, like.dtype)
            for side, inverse in zip(equals, inverses, strict=False):  # none if they could not be factored together
                factors[side] = Dense(inverse.to(like), side.blocks)
        return factors

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": {}, "sharding": None}


def _ratio(layer: Layer, rates: Mapping[Tensor, float]) -> float:
    """Of the learning rate of the weight to that of the bias; infinite if only the bias has a rate of zero."""
    if layer.bias is None or layer.bias not in rates or layer.weight not in rates:
        return 1.0
    weight, bias = rates[layer.weight], rates[layer.bias]
    return 1.0 if weight == bias else weight / bias if bias else math.inf
