"""What several processes do together at a refresh: measure as one, find what has drifted, divide factorisations up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import cast

import torch
from torch import Tensor

from bprong.capture.request import LayerMoments
from bprong.capture.weights import WeightMatrix
from bprong.errors import WhiteningError
from bprong.linalg.factors import DESCRIPTION, Damping, Elsewhere, Factor, described, described_shape, description
from bprong.linalg.low_rank import Backoff
from bprong.linalg.moments import Blocks, Moments, float64_device
from bprong.parallel.moments import merged
from bprong.parallel.processes import ALIKE, Ranks, assigned
from bprong.parallel.slices import Sharding
from bprong.whitening.layer import Layer, Side
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import Schedule

Pending = dict[Side, tuple[Layer, Moments, Damping]]  # sides that are due, with what they are factored from
FLAGS = ("measured", "called", "unexplained", "targets")  # what is exchanged about each layer of each rank
NUMBERS = DESCRIPTION + 3  # what is exchanged about each factor: its description, its cost and the backoff of its side


# Moments --------------------------------------------------------------------------------------------------------------


def measured_by_all(
    ranks: Ranks,
    layers: Layers,
    schedule: Schedule,
    weights: Mapping[WeightMatrix, bool],
    measure: Callable[[], Mapping[str, LayerMoments]],
    replicated: Callable[[], Iterable[Tensor | None]],
) -> Mapping[str, LayerMoments]:
    """Return what all ranks have measured, as if one process had measured all of their batches.

    weights:     of the layers to measure, with whether their inputs are centred
    measure:     measures the batches of this rank
    replicated:  tensors that must be the same on all ranks: their gradients, or their parameters
    """
    if ranks.size == 1 or not weights:
        return measure()
    centred = {weight.name: centre for weight, centre in weights.items()}
    measured = dict.fromkeys(centred, LayerMoments())

    def numbers() -> list[float]:
        of_this_rank = measure()
        measured.update(of_this_rank)
        tensors = [tensor.detach() for tensor in replicated() if tensor is not None]
        size = sum(map(float, torch._foreach_norm(tensors))) if tensors else 0.0
        row = [*divmod(schedule.base_seed, 2**32), size]
        for name in centred:
            layer = measured[name]
            row += [name in of_this_rank, layer.called, layer.unexplained, layer.targets]
        return row

    table = ranks.table(3 + len(FLAGS) * len(centred), numbers)
    if not torch.allclose(table[:, 2], table[:1, 2], rtol=ALIKE, equal_nan=True):
        raise RuntimeError(
            f"the gradients or parameters of {ranks.size} processes differ: each would train a model of its own. "
            f"Wrap the model in torch.nn.parallel.DistributedDataParallel, or average gradients before each step"
        )
    schedule.base_seed = int(table[0, 0]) * 2**32 + int(table[0, 1])
    flags = table[:, 3:].sum(dim=0).view(-1, len(FLAGS)).long().tolist()
    of_all = {}
    for name, (is_measured, called, unexplained, targets) in zip(centred, flags, strict=True):
        if is_measured:
            z, delta = _merged_sides(ranks, layers, layers[name], centred[name], measured[name])
            probe = measured[name].probe
            of_all[name] = LayerMoments(z, delta, called > 0, unexplained > 0, targets, probe)
    return of_all


def _merged_sides(
    ranks: Ranks, layers: Layers, layer: Layer, centred: bool, measured: LayerMoments
) -> tuple[Moments | None, Moments | None]:
    """Return the moments of the inputs and of the errors of a layer, of the batches of all ranks."""
    owner = None if layers.sharding is None else layers.sharding.owners[layer.name]
    device = float64_device(layer.weight)
    z = merged(ranks, measured.z, layer.linear.inputs, centred, weight=0.0, device=device, owner=owner)
    # Errors that do not reach the layer are zero.
    targets = float(measured.targets)
    delta = merged(ranks, measured.delta, layer.linear.outputs, False, weight=targets, device=device, owner=owner)
    return z, delta


# Factors --------------------------------------------------------------------------------------------------------------


def drifted(layers: Layers, schedule: Schedule, pending: Pending, ranks: Ranks) -> Pending:
    """Return the sides whose factors are out of date; each is compared with its new moments by its owner."""
    owners = _owners(layers, pending, ranks)

    def drifts_of_this_rank() -> list[float]:
        drifts = []
        for side, (_, moments, epsilon) in pending.items():
            drifts.append(side.drift(moments, epsilon) if owners[side] == ranks.rank else 0.0)
        return drifts

    out_of_date = {}
    for side, drift in zip(pending, ranks.sums(len(pending), drifts_of_this_rank), strict=True):
        if schedule.has_drifted(side, drift):
            out_of_date[side] = pending[side]
    return out_of_date


def _owners(layers: Layers, pending: Pending, ranks: Ranks) -> dict[Side, int]:
    """Return the rank that factors each side."""
    if layers.sharding is not None:
        return {side: layers.sharding.owners[layer.name] for side, (layer, *_) in pending.items()}
    return assigned({side: side.blocks.cost for side in pending}, ranks.size)


def shared_factors(layers: Layers, pending: Pending, ranks: Ranks) -> dict[Side, Factor | WhiteningError]:
    """Return the factors of all sides, each from its owner, and take over whether the owner will try low rank again.

    If the model is sharded, factors stay with their owners, and the other ranks know what they cost.
    """
    owners = _owners(layers, pending, ranks)
    computed: dict[Side, Factor] = {}
    failures: dict[Side, WhiteningError] = {}

    def numbers() -> list[float]:
        owned = {side: item for side, item in pending.items() if owners[side] == ranks.rank}
        computed.update(layers.factors_of_equals(owned))
        for side, (layer, moments, epsilon) in owned.items():
            try:
                computed[side] = computed.get(side) or side.solve(moments, epsilon, layer.like)
            except WhiteningError as reason:
                failures[side] = reason
        row: list[float] = []
        for side in pending:
            factor = computed.get(side)
            row += [*description(factor), *astuple(side.backoff), 0 if factor is None else factor.cost]
        return row

    table = ranks.table(NUMBERS * len(pending), numbers).view(ranks.size, -1, NUMBERS)
    factors: dict[Side, Factor | WhiteningError] = {}
    for i, (side, owner) in enumerate(owners.items()):
        *numbers_of_factor, skip, next_skip, cost = table[owner, i].tolist()
        side.backoff = Backoff(int(skip), int(next_skip))
        factor = computed.get(side)
        like = pending[side][0].like
        if not cost:
            failure = WhiteningError(f"rank {owner}, which factors it, could not do so")
            factors[side] = failures.get(side, failure)
        elif layers.sharding is None:
            factors[side] = _received(ranks, owner, factor, numbers_of_factor, side.blocks, like)
        else:
            factors[side] = factor or Elsewhere(owner, int(cost))
    return factors


def _received(
    ranks: Ranks, owner: int, factor: Factor | None, numbers: Sequence[float], blocks: Blocks, like: Tensor
) -> Factor:
    """Return the factor that its owner has, and that the others know the description of."""
    tensor = like.new_empty(described_shape(numbers)) if factor is None else factor.tensor
    received = ranks.received(tensor, owner)
    return factor or cast(Factor, described(numbers, received, blocks))


# Sharding -------------------------------------------------------------------------------------------------------------


def share_layers(layers: Layers, ranks: Ranks) -> None:
    """Assign the layers that have no owner yet to ranks, and leave what this rank does not own to the others.

    The costliest layer is assigned first, to the rank that has the least to do; layers that share a parameter have one
    owner.
    """
    sharding = layers.sharding or Sharding(ranks, {}, {})
    new = [layer for layer in layers.values() if layer.name not in sharding.owners]
    if not new:
        return
    owners = dict(sharding.owners)
    parameters = dict(sharding.parameters)
    load = [0.0] * ranks.size
    costs = {layer: sum(side.blocks.cost for side in layer.sides) for layer in new}
    for layer in sorted(new, key=lambda layer: -costs[layer]):
        shared = [parameters[p] for p in layer.parameters if p in parameters]
        owner = shared[0] if shared else load.index(min(load))
        load[owner] += costs[layer]
        owners[layer.name] = owner
        parameters |= dict.fromkeys(layer.parameters, owner)
        if owner != ranks.rank:
            for side in layer.sides:
                side.leave_to(owner)
    layers.sharding = Sharding(ranks, owners, parameters)
