"""How far apart refreshes are: what measuring and factoring take beside what training takes, and the share allowed.

Operations are counted, not timed: a run is then the same run on every machine, busy or idle, and after every
checkpoint. What calls take beside arithmetic, and how much slower than float32 products other operations are, was
measured on two cores (docs/cost.md); the share that comes of it is near the one asked for, not exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from bprong.coverage import price
from bprong.lowrank import LowRank
from bprong.preconditioner import Layer
from bprong.solver import Inverse

__all__ = ["LEAST", "interval"]

# In operations of a float32 product, of which two cores make some 2·10¹¹ a second.
STEPPED = 4e7  # the calls that train a layer and precondition its gradient
MEASURED = 2e8  # the calls that measure a layer
FACTORED = 7e7  # the calls that factor a side
DOUBLE = 3.4  # moments are summed in float64
SOLVED = 2.2  # factorisations run slower than products
LEAST = 10  # steps between two refreshes, however cheap they are


def interval(seen: Iterable[tuple[Layer, float]], overhead: float, backward: bool = True) -> int:
    """Steps between refreshes of all layers that take the share `overhead` of all time, from the rows that each saw.

    >>> import torch
    >>> from bprong.units import units_of
    >>> layer = Layer(units_of("", torch.nn.Linear(784, 100))[0], "exact")
    >>> layer.UU, layer.RR = torch.eye(784), torch.eye(100)
    >>> [interval([(layer, 100.0)], share) for share in (0.05, 0.1, 0.2)]
    [246, 117, 52]
    """
    training = refreshing = 0.0
    for layer, rows in seen:
        cost, sides = price(layer.unit, backward), 2 if backward else 1
        weights = layer.unit.own(layer.weight).numel()
        training += STEPPED + 6 * rows * weights + weights * sum(map(_applied, (layer.UU, layer.RR)))
        refreshing += MEASURED + 4 * rows * weights + DOUBLE * rows * cost["per_row"]
        refreshing += sides * FACTORED + SOLVED * cost["refresh"]
    return max(LEAST, math.ceil(refreshing * (1 - overhead) / (overhead * training))) if training else LEAST


def _applied(inverse: Inverse | None) -> int:
    """Operations for each weight that a product with an inverse takes."""
    if inverse is None:
        return 0
    return 4 * inverse.rank if isinstance(inverse, LowRank) else 2 * inverse.shape[-1]
