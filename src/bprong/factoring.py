"""Moments → inverses of many sides at once: those of one small shape by one factorisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.directions import SMALL
from bprong.moments import Moments
from bprong.preconditioner import Layer
from bprong.whitening import Damping, WhiteningError, inverse

__all__ = ["together"]


def together(sides: Mapping[Layer, Moments], damping: Mapping[Layer, Damping]) -> dict[Layer, Tensor]:
    """The inverses of sides that can be factored with others; the rest, and what fails here, is factored alone."""
    found: dict[Layer, Tensor] = {}
    for layers in _alike(sides, damping):
        seconds = [sides[layer].second for layer in layers]
        dampings = [damping[layer] for layer in layers]
        units = torch.stack([d.value * d.scale(second) for d, second in zip(dampings, seconds, strict=True)])
        like = layers[0].like
        try:
            inverses = inverse(torch.stack(seconds), 1.0, like.dtype, units).to(like)
        except WhiteningError:  # alone, each will say for itself what is wrong, or that nothing is
            continue
        found.update(zip(layers, inverses, strict=True))
    return found


def _alike(sides: Mapping[Layer, Moments], damping: Mapping[Layer, Damping]) -> list[list[Layer]]:
    sorts: dict[Any, list[Layer]] = {}
    for layer, moments in sides.items():
        shape = moments.scatter.shape
        common = (
            damping[layer].relative_to != "variance"
        )  # else each is scaled by units of its own before it is factored
        if common and len(shape) == 2 and shape[0] <= SMALL and layer.solver != "low-rank":
            sorts.setdefault((shape, layer.like.dtype, layer.like.device), []).append(layer)
    return [layers for layers in sorts.values() if len(layers) > 1]
