"""The layers of a model by name, those of equal shape stacked, and their natural gradients by whole parameter.

    ΔW = −η (RᵀR)(g_W − g_b cᵀ)(UᵀU),   Δb = −η (RᵀR) g_b − ΔW c      with  UᵀU = (Ž+ε₁I)⁻¹,  RᵀR = (D+ε₂I)⁻¹

This is SGD in whitened coordinates, written in ordinary ones: it needs the factors of both sides and no added layer.
A product of small matrices takes less time than its call, so n layers of equal shape are treated as one layer of n
groups: their factors are slices of one tensor (n, d, d). A layer that shares its shape with no other is a stack of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from bprong.linalg.factors import Dense, Factor, precondition
from bprong.linalg.moments import Blocks, at_least_float32
from bprong.parallel.processes import Ranks
from bprong.whitening.layer import Layer, Side

WeightAndBias = tuple[Tensor | None, Tensor | None]  # of W and of b: their gradients, or these preconditioned
Values = Mapping[Tensor, Tensor]  # by parameter: gradients, or what is made of them
Rates = Mapping[Tensor, float]  # learning rates by parameter
Pairs = Mapping[Layer, WeightAndBias]  # by layer: gradients, or what is made of them


STACKED_UP_TO = 96  # features: a wider product uses the cores by itself, and stacking it would only copy gradients


class Layers(dict[str, Layer]):
    """The layers of a model by name. Small ones of one shape are applied together."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        super().__init__((layer.name, layer) for layer in layers)
        self.sharding: Ranks | None = None  # None: every process has all factors
        self._stacks: list[Stack] = []
        self._stacked: list[object] = []  # what the stacks were made of

    @property
    def parameters(self) -> set[Tensor]:
        return {p for layer in self.values() for p in layer.parameters}

    def natural_gradients(self, gradients: Values, rates: Rates | None = None) -> dict[Tensor, Tensor]:
        """The preconditioned gradients by parameter, in ordinary coordinates.

        rates: what is multiplied by numbers for each parameter: the steps of W and, as seen from the centre, of b
        """
        return self.by_parameter(gradients, partial(self._preconditioned, rates=rates))

    def by_parameter(
        self, values: Values, compute: Callable[[Pairs], Mapping[Layer, WeightAndBias]]
    ) -> dict[Tensor, Tensor]:
        """What is computed of layers as values of whole parameters, of which several layers may have a part.

        values:   of the parameters, such as gradients
        compute:  makes of the values of layers others; each process does so for the layers that it has the factors of
        """
        into: dict[Tensor, Tensor] = {}
        sharding = self.sharding
        if sharding is not None:  # layers may have been left to the fallback rule since parameters were assigned
            covered = self.parameters
            values = {p: value for p, value in values.items() if p in covered}
        whole_values = values if sharding is None else sharding.collected(values)
        pairs = {}
        for layer in self.values():
            g_W, g_b = values_of(layer, whole_values)
            if g_W is not None or g_b is not None:
                pairs[layer] = g_W, g_b
        for layer, (d_W, d_b) in compute(pairs).items():
            write_(into, layer, d_W, d_b)
        return into if sharding is None else sharding.distributed(into, values)

    def in_units(self, direction: Values) -> Values:
        """A direction in the units that the features of the data are in."""
        weights = {layer.weight for layer in self.values() if layer.forward.units is not None}
        changed = {p: step for p, step in direction.items() if p in weights}
        return {**direction, **self.by_parameter(changed, _times_units)}

    def _preconditioned(self, pairs: Pairs, rates: Rates | None = None) -> dict[Layer, WeightAndBias]:
        """The natural gradients of layers."""
        preconditioned: dict[Layer, WeightAndBias] = {}
        for stack in self.stacks(pairs):
            preconditioned |= stack.precondition(pairs)
        if rates is None:
            return preconditioned
        for layer, (d_W, d_b) in preconditioned.items():
            multiply = torch.mul if d_W is pairs[layer][0] else Tensor.mul_  # a gradient stays what it is
            step_of_W = None if d_W is None else multiply(d_W, rates[layer.weight])
            preconditioned[layer] = step_of_W, None if d_b is None else d_b * rates[cast(Tensor, layer.bias)]
        return preconditioned

    def stacks(self, pairs: Pairs) -> list[Stack]:
        """These layers by shape and by which of their values are present, kept until factors or values change."""
        if self._stacked != _parts(pairs):
            groups: dict[object, list[Layer]] = {}
            for layer, (g_W, g_b) in pairs.items():
                groups.setdefault((_shape_of_small(layer), g_W is None, g_b is None), []).append(layer)
            self._stacks = list(map(Stack, groups.values()))
            self._stacked = _parts(pairs)
        return self._stacks

    def __getstate__(self) -> dict[str, Any]:
        return {"_stacks": [], "_stacked": [], "sharding": None}


class Stack:
    """One layer, or several of equal shape.

    left:  RᵀR of all of them; right: UᵀU; None: the identity
    c:     their centres; None: nothing is centred
    u:     the units that right is in, and `units` by layer; None: those of z
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.left = _shared_factor([layer.backward for layer in layers])
        self.right = _shared_factor([layer.forward for layer in layers])
        self.c = stacked([layer.c for layer in layers])
        self.units = [layer.u for layer in layers]
        self.u = stacked(self.units)

    def precondition(self, pairs: Pairs) -> dict[Layer, WeightAndBias]:
        """The preconditioned gradients of each layer, the bias as seen from the centre c."""
        layers = self.layers
        if len(layers) == 1:
            return {layers[0]: precondition(self.left, self.right, self.c, *pairs[layers[0]], self.u)}
        weights, biases = zip(*[pairs[layer] for layer in layers], strict=True)
        steps = precondition(self.left, self.right, self.c, stacked(weights), stacked(biases), self.u)
        d_W, d_b = [[None] * len(layers) if step is None else step for step in steps]
        return dict(zip(layers, zip(d_W, d_b, strict=True), strict=True))


def values_of(layer: Layer, values: Values) -> WeightAndBias:
    """The values of W, as a matrix, and of b, as a vector, in at least float32; None for one without."""
    linear = layer.linear
    parts: list[Tensor | None] = []
    for p, part_of in ((layer.weight, linear.matrix), (layer.bias, linear.vector)):
        value = None if p is None else values.get(p)
        if value is not None:
            value = value if linear.is_plain else part_of(value)
            value = value.to(at_least_float32(value.dtype))
        parts.append(value)
    return parts[0], parts[1]


def write_(into: dict[Tensor, Tensor], layer: Layer, d_W: Tensor | None, d_b: Tensor | None) -> None:
    """Writes a step, seen from the centre c, in ordinary coordinates: d_W, and d_b − d_W c.

    into: steps by parameter, of which this layer may have a part only
    """
    linear = layer.linear
    if not (d_b is None or d_W is None or layer.c is None):
        c = layer.c.to(d_W.dtype)
        is_one = d_W.ndim == 2
        d_b = torch.addmv(d_b, d_W, c, alpha=-1) if is_one else d_b - (d_W @ c.unsqueeze(-1)).squeeze(-1)
    for p, part_of, step in ((layer.weight, linear.matrix, d_W), (layer.bias, linear.vector, d_b)):
        if p is None or step is None:
            continue
        if linear.is_plain:
            into[p] = step
        else:
            part_of(into.setdefault(p, step.new_zeros(p.shape))).copy_(step)


def _parts(pairs: Pairs) -> list[object]:
    """What stacks are made of: layers, their factors, and which of their values are present."""
    parts: list[object] = []
    for layer, (g_W, g_b) in pairs.items():
        parts += layer, layer.forward.factor, layer.backward.factor, g_W is None, g_b is None
    return parts


def _times_units(pairs: Pairs) -> dict[Layer, WeightAndBias]:
    products: dict[Layer, WeightAndBias] = {}
    for layer, (d_W, _) in pairs.items():
        u = layer.u
        products[layer] = d_W if u is None or d_W is None else d_W * u, None
    return products


def _is_small(side: Side) -> bool:
    return not side.blocks.lead and side.blocks.size <= STACKED_UP_TO and side.solver in ("auto", "exact")


def _shape_of_small(layer: Layer) -> object:
    """What layers have in common that can share their products; a layer that cannot share them itself."""
    sides = (layer.forward, layer.backward)
    if layer.linear.ndim != 2 or layer.linear.one_hot or not all(map(_is_small, sides)):
        return layer
    of_sides = [(side.blocks, side.factor is None) for side in sides]
    return layer.weight.dtype, layer.weight.device, layer.c is None, layer.forward.units is None, *of_sides


def _shared_factor(sides: Sequence[Side]) -> Factor | None:
    """The factors as one of several groups; the sides' own become slices of it, so that they are kept once."""
    if len(sides) == 1 or sides[0].factor is None:
        return sides[0].factor
    inverses = torch.stack([cast(Dense, side.factor).inverse for side in sides])
    for side, inverse in zip(sides, inverses, strict=True):
        side.factor = Dense(inverse, side.blocks)
    return Dense(inverses, Blocks(sides[0].blocks.size, groups=len(sides)))


def stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one, a single one as it is; None if they are None."""
    if len(tensors) == 1 or tensors[0] is None:
        return tensors[0]
    return torch.stack(cast(tuple[Tensor, ...], tensors))
