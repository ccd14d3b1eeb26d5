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


def together(sides: Mapping[Layer, Moments], damping: Damping) -> dict[Layer, Tensor]:
    """The inverses of sides that can be factored with others; the rest, and what fails here, is factored alone."""
    found: dict[Layer, Tensor] = {}
    for layers in _alike(sides):
        seconds = [sides[layer].second for layer in layers]
        units = torch.stack([damping.scale(second) for second in seconds])
        like = layers[0].like
        try:
            inverses = inverse(torch.stack(seconds), damping, like.dtype, units).to(like)
        except WhiteningError:  # alone, each will say for itself what is wrong, or that nothing is
            continue
        found.update(zip(layers, inverses, strict=True))
    return found


def _alike(sides: Mapping[Layer, Moments]) -> list[list[Layer]]:
    sorts: dict[Any, list[Layer]] = {}
    for layer, moments in sides.items():
        shape = moments.scatter.shape
        if len(shape) == 2 and shape[0] <= SMALL and layer.solver != "low-rank":
            sorts.setdefault((shape, layer.like.dtype, layer.like.device), []).append(layer)
    return [layers for layers in sorts.values() if len(layers) > 1]
