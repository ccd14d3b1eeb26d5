"""What several processes do together at a refresh: measure as one, divide layers and factorisations up.

A process that trains alone calls nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from functools import partial
from typing import cast

import torch
from torch import Tensor

from bprong.capture.request import LayerMoments
from bprong.capture.weights import WeightMatrix
from bprong.errors import WhiteningError
from bprong.linalg.factors import NO_FACTOR, Damping, Factor
from bprong.linalg.low_rank import Backoff, restored
from bprong.linalg.moments import Blocks, Moments, add_outer_, float64_device
from bprong.parallel.processes import ALIKE, Ranks, is_sliced
from bprong.whitening.layer import Layer, Side
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import Schedule

FLAGS = 7  # numbers exchanged about each layer of each rank, by `_flags`
NUMBERS = 5  # exchanged about each factor: those that restore it from its tensor, and the backoff of its side


# Moments --------------------------------------------------------------------------------------------------------------


def measured_by_all(
    ranks: Ranks,
    schedule: Schedule,
    weights: Mapping[WeightMatrix, bool],
    measure: Callable[[], dict[str, LayerMoments]],
    replicated: Iterable[Tensor | None],
) -> dict[str, LayerMoments]:
    """Return what all ranks have measured, as if one process had measured all of their batches.

    weights:     of the layers to measure, with whether their inputs are centred
    measure:     measures the batches of this rank
    replicated:  tensors that must be the same on all ranks: their gradients, or their parameters
    """
    measured: dict[str, LayerMoments] = {}
    with ranks.exchange(2 + FLAGS * len(weights)) as rows:
        measured |= measure()
        tensors = [tensor.detach() for tensor in replicated if not (tensor is None or is_sliced(tensor))]
        size = sum(map(float, torch._foreach_norm(tensors))) if tensors else 0.0
        row = [schedule.base_seed, size]
        for weight in weights:
            row += _flags(measured.get(weight.name))
        rows.append(row)
    table = torch.tensor(rows, dtype=torch.float64, device="cpu")
    if not torch.allclose(table[:, 1], table[:1, 1], rtol=ALIKE, equal_nan=True):
        raise RuntimeError(
            f"the gradients or parameters of {ranks.size} processes differ: each would train a model of its own. "
            f"Wrap the model in torch.nn.parallel.DistributedDataParallel, or average gradients before each step"
        )
    schedule.base_seed = int(table[0, 0])
    flags = table[:, 2:].view(ranks.size, len(weights), FLAGS)
    of_all = {}
    for i, (weight, centred) in enumerate(weights.items()):
        if flags[:, i, 0].any():
            part = measured.get(weight.name, LayerMoments())
            of_all[weight.name] = _merged(ranks, weight, part, flags[:, i], centred)
    return of_all


def _flags(layer: LayerMoments | None) -> list[float]:
    """Return what is exchanged about a layer, FLAGS."""
    if layer is None:
        return [0.0] * FLAGS
    rows = 0.0 if layer.z is None else layer.z.weight
    is_computed = layer.z is not None and layer.z.tails is None
    return [True, rows, layer.delta is not None, layer.called, layer.unexplained, layer.targets, is_computed]


def _merged(ranks: Ranks, weight: WeightMatrix, measured: LayerMoments, flags: Tensor, centred: bool) -> LayerMoments:
    """Return what all ranks have measured of a layer; flags: (ranks, FLAGS).

    If the model is sharded, another rank than the owner keeps the diagonals and drops the rest at once.
    """
    _, rows, errors, called, unexplained, targets, computed = flags.sum(dim=0).tolist()
    of_all = LayerMoments(None, None, called > 0, unexplained > 0, int(targets), measured.probe)
    merged = partial(_merged_moments, ranks, float64_device(weight.weight))
    if rows:
        of_all.z = merged(measured.z, weight.inputs, flags[:, 1], centred, not computed)
    if errors:  # where they do not reach the layer, they are zero
        of_all.delta = merged(measured.delta, weight.outputs, flags[:, 5])
    if ranks.sharded and not ranks.is_own(weight.weight):
        of_all.z = of_all.z and of_all.z.thinned()
        of_all.delta = of_all.delta and of_all.delta.thinned()
    return of_all


def _merged_moments(
    ranks: Ranks,
    device: torch.device,
    moments: Moments | None,
    blocks: Blocks,
    weights: Tensor,
    centred: bool = False,
    tails: bool = False,
) -> Moments:
    """Return the moments of the observations of all ranks; weights: (ranks,).

    Means are gathered first; each scatter is then moved to the common mean, and these are summed. The whole scatter is
    sent, although it is symmetric, and to all ranks, although one may own it: that is up to twice and R times the bytes
    that are needed, at refreshes only.
    """
    if moments is None:
        scatter = torch.zeros(blocks.shape, dtype=torch.float64, device=device)
        zeros = scatter[..., 0].clone()
        moments = Moments(0.0, zeros if centred else None, scatter, tails=torch.stack([zeros, zeros]))
    scatter = moments.copy().values
    mean = moments.mean
    if mean is not None:
        common = _common_mean(weights.to(mean), ranks.gathered(mean).flatten(1)).view_as(mean)
        shift = mean - common
        add_outer_(scatter, shift, float(weights[ranks.rank]))
        mean = common
    sums = ranks.sum_(cast(Tensor, moments.tails)) if tails else None
    return Moments(float(weights.sum()), mean, ranks.sum_(scatter), tails=sums)


def _common_mean(weights: Tensor, means: Tensor) -> Tensor:
    """Return the mean of means (ranks, features) of which some have no weight.

    It is written as a step from the mean of one rank, so that a constant feature has a variance of exactly zero.
    """
    first = means[weights.argmax()]
    fractions = weights / weights.sum()
    return first + fractions @ (means - first)


# Factors --------------------------------------------------------------------------------------------------------------


def shared_factors(
    pending: Mapping[Side, tuple[Layer, Moments, Damping]], ranks: Ranks
) -> dict[Side, Factor | WhiteningError]:
    """Return the factors of all sides, each from its owner, and take over whether the owner will try low rank again.

    pending: the sides that are due, with what they are factored from

    If the model is sharded, the tensors of factors stay with their owners.
    """
    factors: dict[Side, Factor | WhiteningError] = {}
    with ranks.exchange(NUMBERS * len(pending)) as rows:
        row: list[float] = []
        for side, (layer, moments, epsilon) in pending.items():
            numbers = NO_FACTOR
            try:
                if ranks.is_own(layer.weight):
                    factor = side.solve(moments, epsilon, layer.like)
                    factors[side] = factor
                    numbers = factor.numbers
            except WhiteningError as reason:
                factors[side] = reason
            row += [*numbers, *astuple(side.backoff)]
        rows.append(row)
    device = "meta" if ranks.sharded else None
    for i, (side, (layer, *_)) in enumerate(pending.items()):
        owner = ranks.owners[layer.weight]
        *of_factor, skip, next_skip = rows[owner][i * NUMBERS : (i + 1) * NUMBERS]
        side.backoff = Backoff(int(skip), int(next_skip))
        columns = int(of_factor[0])
        if columns == 0:
            factors.setdefault(side, WhiteningError(f"rank {owner}, which factors it, could not do so"))
            continue
        result = factors.get(side)
        shape = (*side.blocks.shape[:-1], columns)
        tensor = result.tensor if isinstance(result, Factor) else layer.like.new_empty(shape, device=device)
        if not ranks.sharded:
            tensor = ranks.received(tensor, owner)
        factors[side] = result or restored(of_factor, tensor, side.blocks)
    return factors


# Owners ---------------------------------------------------------------------------------------------------------------


def share_layers(layers: Layers, ranks: Ranks) -> None:
    """Assign the layers that have no owner yet to ranks; of a sharded model, leave those of others to them.

    The costliest layer is assigned first, to the rank that has the least to do; layers that share a parameter have one
    owner.
    """
    new = [layer for layer in layers.values() if not ranks.owners.keys() >= set(layer.parameters)]
    costs = {layer: layer.cost["refresh"] for layer in new}
    load = [0] * ranks.size
    for layer in sorted(costs, key=costs.__getitem__, reverse=True):
        shared = [ranks.owners[p] for p in layer.parameters if p in ranks.owners]
        owner = shared[0] if shared else load.index(min(load))
        load[owner] += costs[layer]
        ranks.owners |= dict.fromkeys(layer.parameters, owner)
        if ranks.sharded and owner != ranks.rank:
            for side in layer.sides:
                side.leave_to_owner()
    if ranks.sharded:
        layers.sharding = ranks
