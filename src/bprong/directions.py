"""Gradients → directions of all layers: those of one small shape by one product, the others one by one.

A product of small matrices takes less time than it takes to ask for it, so layers of equal shape are asked together:
their inverses are slices of one tensor, (n, d, d). A wide product fills the cores by itself; stacking it would only
copy gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bprong.preconditioner import Direction, Layer

__all__ = ["SMALL", "Directions", "alike"]

SMALL = 96  # the widest side of a layer that is stacked with others


@dataclass(frozen=True)
class _Stack:
    """n layers of one shape: inverses (n, out, out) and (n, in, in), centres and (UᵀU) c (n, in)."""

    layers: list[Layer]
    RR: Tensor | None
    UU: Tensor | None
    q: Tensor | None

    @classmethod
    def of(cls, layers: list[Layer]) -> _Stack:
        """The layers' own inverses become slices of the stack's, so that they are kept once."""
        for name in ("RR", "UU"):
            if getattr(layers[0], name) is not None:
                for layer, slice_ in zip(layers, torch.stack([getattr(layer, name) for layer in layers]), strict=True):
                    setattr(layer, name, slice_)
        RR, UU = (None if own is None else own._base for own in (layers[0].RR, layers[0].UU))  # type: ignore[union-attr]
        q = None if layers[0].q is None else torch.stack([layer.q for layer in layers if layer.q is not None])
        return cls(layers, RR, UU, q)

    def directions(self, gradients: list[Direction]) -> Iterable[Direction]:
        """As `Preconditioner.direction`, of every layer; all have a gradient of the weight, and all or none of b."""
        g_W = torch.stack([g for g, _ in gradients if g is not None])
        biases = [g for _, g in gradients if g is not None]
        g_b = torch.stack(biases).unsqueeze(-1) if biases else None
        if self.RR is not None:
            g_W, g_b = self.RR @ g_W, None if g_b is None else self.RR @ g_b
        g_W = g_W if self.UU is None else g_W @ self.UU
        if g_b is None:
            return ((g, None) for g in g_W)
        if self.q is not None:
            g_W.baddbmm_(g_b, self.q.unsqueeze(-2), alpha=-1)
        return zip(g_W, g_b.squeeze(-1), strict=True)


class Directions:
    """What the layers' gradients become; to be made anew when an inverse has changed."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        stacks, self._alone = alike(layers)
        self._stacks = [_Stack.of(stack) for stack in stacks]

    def of(self, gradients: Mapping[Tensor, Tensor]) -> dict[Layer, Direction]:
        """By layer, from the gradients of the parameters."""
        found: dict[Layer, Direction] = {}
        for stack in self._stacks:
            own = [layer.gradients(gradients) for layer in stack.layers]
            if _whole(own):
                found.update(zip(stack.layers, stack.directions(own), strict=True))
            else:
                found.update((layer, layer.direction(*g)) for layer, g in zip(stack.layers, own, strict=True))
        for layer in self._alone:
            found[layer] = layer.direction(*layer.gradients(gradients))
        return found


def alike(layers: Iterable[Layer]) -> tuple[list[list[Layer]], list[Layer]]:
    """Layers that can be stacked, by what they have in common, and those that stand alone."""
    sorts: dict[Any, list[Layer]] = {}
    for layer in layers:
        shape = tuple(layer.unit.own(layer.weight).shape)
        small = layer.plain and len(shape) == 2 and not layer.unit.one_hot and max(shape) <= SMALL
        dense = all(inverse is None or isinstance(inverse, Tensor) for inverse in (layer.UU, layer.RR))
        own = (shape, layer.weight.dtype, layer.weight.device, layer.UU is None, layer.RR is None, layer.q is None)
        sorts.setdefault(own if small and dense else layer, []).append(layer)
    several = [sort for sort in sorts.values() if len(sort) > 1]
    return several, [sort[0] for sort in sorts.values() if len(sort) == 1]


def _whole(gradients: list[Direction]) -> bool:
    """Whether every layer has a gradient of its weight, all or none of the bias, and none in half precision."""
    weights, biases = zip(*gradients, strict=True)
    if any(g is None or g.dtype in (torch.float16, torch.bfloat16) for g in weights):
        return False
    return all(g is None for g in biases) or all(g is not None for g in biases)
