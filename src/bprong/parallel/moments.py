"""Moments of the observations of all processes, from those of each."""

from __future__ import annotations

import torch
from torch import Tensor

from bprong.linalg.moments import Blocks, Moments, add_outer
from bprong.parallel.processes import Ranks


def merged(
    ranks: Ranks,
    moments: Moments | None,
    blocks: Blocks,
    centred: bool,
    *,
    weight: float,
    device: torch.device,
    owner: int | None,
) -> Moments | None:
    """Return the moments of the observations of all ranks, as one process would measure them; None: no rank has any.

    moments:  those of this rank; None: it has none
    blocks:   of their side
    weight:   of this rank if it has no moments; targets whose errors do not reach a layer count too
    owner:    the rank that needs them, while the others need their diagonal; None: all ranks need them

    Means are gathered first; each scatter is then moved to the common mean, and these are summed. The whole scatter is
    sent, although it is symmetric, and to all ranks, although one may own it: that is up to twice and R times the bytes
    that are needed, at refreshes only. A rank that is not the owner keeps the diagonal and drops the rest at once.
    """
    scatter = torch.zeros(blocks.shape, dtype=torch.float64, device=device)
    mean = scatter.new_zeros(blocks.shape[:-1])
    if moments is not None:
        weight = moments.weight
        scatter = moments.copy().values
        mean = mean if moments.mean is None else moments.mean.to(torch.float64)
    numbers = torch.tensor([weight, moments is not None], dtype=torch.float64, device=device)
    rows = ranks.gathered(torch.cat([numbers, mean.flatten()]))
    weights, present = rows[:, :2].T
    if not present.any():
        return None
    common = _common_mean(weights * present, rows[:, 2:]).view_as(mean) if centred else None
    if common is not None and moments is not None:
        shift = mean - common
        add_outer(scatter, shift, shift, weight, out=scatter)
    total = Moments(float(weights.sum()), common, ranks.sum_(scatter))
    return total if owner in (None, ranks.rank) else total.thinned()


def _common_mean(weights: Tensor, means: Tensor) -> Tensor:
    """Return the mean of means (ranks, features) of which some have no weight.

    It is written as a step from the mean of one rank, so that a constant feature has a variance of exactly zero.
    """
    first = means[weights.argmax()]
    fractions = weights / weights.sum()
    return first + fractions @ (means - first)
