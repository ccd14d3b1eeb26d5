"""Layers of one shape, preconditioned together.

    (RᵀR)(g_W − g_b cᵀ)(UᵀU)  and  (RᵀR) g_b        with  UᵀU = (Ž+ε₁I)⁻¹,  RᵀR = (D+ε₂I)⁻¹

A product of small matrices takes less time than its call, so n layers of equal shape are treated as one layer of n
groups: their factors are slices of one tensor (n, d, d). A layer that shares its shape with no other is a stack of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from bprong.linalg.blocks import Blocks
from bprong.linalg.factors import Dense, Factor, precondition
from bprong.whitening.layer import Layer, WeightAndBias
from bprong.whitening.side import Side

Item = TypeVar("Item")

GROUPED_UP_TO = 96  # features: a wider product uses the cores by itself, and stacking it would only copy gradients


class Stack:
    """One layer, or several of equal shape.

    left:  RᵀR of all of them; right: UᵀU; None: the identity
    c:     their centres; None: nothing is centred
    dtype: of the factors; None: there are none
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.left = _shared_factor([layer.backward for layer in layers])
        self.right = _shared_factor([layer.forward for layer in layers])
        self.c = layers[0].c if len(layers) == 1 else stacked([layer.c for layer in layers])
        factor = self.left or self.right
        self.dtype = None if factor is None else factor.dtype

    def directions(self, gradients: Mapping[Tensor, Tensor]) -> dict[Layer, WeightAndBias]:
        """The preconditioned gradients of each layer, the bias as seen from the centre c."""
        if len(self.layers) == 1:
            (layer,) = self.layers
            g_W, g_b = layer.gradients(gradients)
            self._follow_dtype(g_b if g_W is None else g_W)
            return {layer: precondition(self.left, self.right, self.c, g_W, g_b)}
        weights, biases = zip(*(layer.gradients(gradients) for layer in self.layers), strict=True)
        if any(
            len({g is None for g in kind}) > 1 for kind in (weights, biases)
        ):  # some have a gradient, some have none
            parts = [Stack([layer]).directions(gradients) for layer in self.layers]
            return {layer: direction for part in parts for layer, direction in part.items()}
        self._follow_dtype(biases[0] if weights[0] is None else weights[0])
        d_W, d_b = precondition(self.left, self.right, self.c, stacked(weights), stacked(biases))
        nothing = [None] * len(self.layers)
        return dict(
            zip(
                self.layers,
                zip(nothing if d_W is None else d_W, nothing if d_b is None else d_b, strict=True),
                strict=True,
            )
        )

    def _follow_dtype(self, gradient: Tensor | None) -> None:
        """Converts the factors if the gradient has another precision than they, because the model was converted."""
        if gradient is None or self.dtype is None or gradient.dtype is self.dtype:
            return
        for layer in self.layers:
            layer.convert(gradient.dtype)
        self.__init__(self.layers)  # type: ignore[misc]


def stacks_of(layers: Iterable[Layer]) -> list[Stack]:
    """The layers in stacks, each at the place of the first of them."""
    return [Stack(equals) for equals in equal({layer: _shape_of_small(layer) or layer for layer in layers})]


def equal(shapes: Mapping[Item, object]) -> list[list[Item]]:
    """The items of equal shape together."""
    groups: dict[object, list[Item]] = {}
    for item, shape in shapes.items():
        groups.setdefault(shape, []).append(item)
    return list(groups.values())


def is_small(side: Side) -> bool:
    return not side.blocks.lead and side.blocks.size <= GROUPED_UP_TO and side.solver in ("auto", "exact")


def _shape_of_small(layer: Layer) -> object:
    """What layers have in common that can share their products; None for a layer that cannot share them."""
    both = (layer.forward, layer.backward)
    if len(layer.linear.shape) != 2 or layer.linear.one_hot or not all(map(is_small, both)):
        return None
    shape = (layer.forward.blocks, layer.backward.blocks, layer.weight.dtype, layer.weight.device)
    return shape, tuple(side.factor is None for side in both), layer.c is None


def _shared_factor(sides: Sequence[Side]) -> Factor | None:
    """The factors as one of several groups; the sides' own become slices of it, so that they are kept once."""
    if len(sides) == 1:
        return sides[0].factor
    inverses = stacked([cast(Dense, side.factor).inverse for side in sides if side.factor is not None])
    if inverses is None:
        return None
    for side, inverse in zip(sides, inverses, strict=True):
        side.factor = Dense(inverse, side.blocks)
    return Dense(inverses, Blocks(sides[0].blocks.size, groups=len(sides)))


def stacked(tensors: Iterable[Tensor | None]) -> Tensor | None:
    """The tensors as one, without those that are None; None if there is no other."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
