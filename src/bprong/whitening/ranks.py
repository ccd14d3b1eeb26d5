"""What several processes do together at a refresh: measure as one, find what has drifted, divide factorisations up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from bprong.capture.measure import LayerMoments
from bprong.distributed import ALIKE, Contribution, Ranks, assigned, merged, shared
from bprong.errors import WhiteningError
from bprong.linalg.damped_inverse import Damping
from bprong.linalg.factors import Factor
from bprong.linalg.moments import Moments
from bprong.sharding import Sharding
from bprong.whitening.layer import Layer
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import Schedule
from bprong.whitening.side import Backoff, Side

Pending = dict[Side, tuple[Layer, Moments, Damping]]  # sides that are due, with what they are factored from
Centred = Mapping[str, bool]  # the layers to measure, by name, and whether their inputs are centred
FLAGS = ("measured", "called", "empty", "unexplained", "targets")  # what is exchanged about each layer of each rank


def _flags(measured: Mapping[str, LayerMoments], names: Iterable[str]) -> list[float]:
    """Return the `FLAGS` of each layer, one after the other."""
    flags: list[float] = []
    for name in names:
        layer = measured.get(name, LayerMoments())
        flags += map(float, (name in measured, layer.called, layer.empty, layer.unexplained, layer.targets))
    return flags


def measured_by_all(
    ranks: Ranks,
    layers: Layers,
    schedule: Schedule,
    centred: Centred,
    measure: Callable[[], Mapping[str, LayerMoments]],
    replicated: Callable[[], Iterable[Tensor | None]],
) -> Mapping[str, LayerMoments]:
    """Return what all ranks have measured, as if one process had measured all of their batches.

    measure:     measures the batches of this rank
    replicated:  tensors that must be the same on all ranks: their gradients, or their parameters
    """
    if ranks.size == 1 or not centred:
        return measure()
    measured: dict[str, LayerMoments] = {}

    def numbers() -> list[float]:
        measured.update(measure())
        tensors = [tensor.detach() for tensor in replicated() if tensor is not None]
        size = sum(map(float, torch._foreach_norm(tensors))) if tensors else 0.0
        return [*divmod(schedule.base_seed, 2**32), size, *_flags(measured, centred)]

    table = ranks.table(3 + len(FLAGS) * len(centred), numbers)
    if not torch.allclose(table[:, 2], table[:1, 2], rtol=ALIKE, equal_nan=True):
        raise RuntimeError(
            f"the gradients or parameters of {ranks.size} processes differ: each would train a model of its own. "
            f"Wrap the model in torch.nn.parallel.DistributedDataParallel, or average gradients before each step"
        )
    schedule.base_seed = int(table[0, 0]) * 2**32 + int(table[0, 1])
    return _merged_over_ranks(ranks, layers, centred, measured, table[:, 3:])


def _merged_over_ranks(
    ranks: Ranks, layers: Layers, centred: Centred, measured: Mapping[str, LayerMoments], flags: Tensor
) -> dict[str, LayerMoments]:
    """Return the moments of the batches of all ranks; flags: (ranks, layers · FLAGS) what `_flags` gives on each."""
    contributions = []
    for name, is_centred in centred.items():
        layer = measured.get(name, LayerMoments())
        linear = layers[name].linear
        owner = None if layers.sharding is None else layers.sharding.owners[name]
        rows = 0.0 if layer.z is None else layer.z.weight
        contributions.append(Contribution(linear.inputs, is_centred, rows, layer.z, owner))
        targets = layer.targets if layer.delta is None else layer.delta.weight  # errors that do not reach it are zero
        contributions.append(Contribution(linear.outputs, False, float(targets), layer.delta, owner))
    moments = merged(ranks, contributions, layers[next(iter(centred))].weight)
    sums = flags.reshape(ranks.size, -1, len(FLAGS)).sum(dim=0).tolist()
    of_all = {}
    for i, name in enumerate(centred):
        is_measured, called, empty, unexplained, targets = sums[i]
        if is_measured:
            of_all[name] = LayerMoments(
                z=moments[2 * i], delta=moments[2 * i + 1], called=called > 0, empty=empty > 0,
                unexplained=unexplained > 0, targets=int(targets), probe=measured.get(name, LayerMoments()).probe,
            )  # fmt: skip
    return of_all


def drifted(layers: Layers, schedule: Schedule, pending: Pending, ranks: Ranks) -> Pending:
    """Return the sides whose factors are out of date; each is compared with its new moments by its owner."""
    owners = _owners(layers, pending, ranks)

    def own_drifts() -> list[float]:
        drifts = []
        for side, (_, moments, epsilon) in pending.items():
            drifts.append(side.drift(moments, epsilon) if owners[side] == ranks.rank else 0.0)
        return drifts

    drifts = dict(zip(pending, ranks.sums(len(pending), own_drifts), strict=True))
    return {side: item for side, item in pending.items() if schedule.has_drifted(side, drifts[side])}


def _owners(layers: Layers, pending: Pending, ranks: Ranks) -> dict[Side, int]:
    """Return the rank that factors each side."""
    if layers.sharding is not None:
        return {side: layers.sharding.owners[layer.name] for side, (layer, *_) in pending.items()}
    return assigned({side: side.blocks.cost for side in pending}, ranks.size)


def shared_factors(layers: Layers, pending: Pending, ranks: Ranks) -> dict[Side, Factor | WhiteningError]:
    """Return the factors of all sides, each from its owner, and take over whether the owner will try low rank again."""
    owners = _owners(layers, pending, ranks)

    def solve(sides: Sequence[Side]) -> dict[Side, Factor | WhiteningError]:
        factors: dict[Side, Factor | WhiteningError] = {}
        factors |= layers.factors_of_equals({side: pending[side] for side in sides})
        for side in sides:
            layer, moments, epsilon = pending[side]
            try:
                factors[side] = factors.get(side) or side.solve(moments, epsilon, layer.like)
            except WhiteningError as reason:
                factors[side] = reason
        return factors

    like = {side: (side.blocks, layer.like) for side, (layer, *_) in pending.items()}
    factors = shared(ranks, owners, like, solve, everywhere=layers.sharding is None)
    backoffs = ranks.table(2 * len(pending), lambda: [x for side in pending for x in astuple(side.backoff)])
    for i, side in enumerate(pending):
        skip, next_skip = backoffs[owners[side], 2 * i : 2 * i + 2].tolist()
        side.backoff = Backoff(int(skip), int(next_skip))
    return factors


# Sharding -------------------------------------------------------------------------------------------------------------


def share_layers(layers: Layers, ranks: Ranks) -> None:
    """Assign the layers that have no owner yet to ranks, and leave what this rank does not own to the others."""
    old_owners = {} if layers.sharding is None else layers.sharding.owners
    new = [layer for layer in layers.values() if layer.name not in old_owners]
    if not new:
        return
    groups = _tied(layers.values())
    costs: dict[str, float] = {}
    for layer in new:
        group = groups[layer.name]
        if group not in old_owners:
            costs[group] = costs.get(group, 0.0) + sum(side.blocks.cost for side in layer.sides)
    by_group = {**assigned(costs, ranks.size), **old_owners}
    owners = {name: by_group[groups[name]] for name in layers}
    parameters = {p: owners[layer.name] for layer in layers.values() for p in layer.parameters}
    layers.sharding = Sharding(ranks, owners, parameters)
    for layer in new:
        if not layers.is_own(layer):
            for side in layer.sides:
                side.leave_to(owners[layer.name])


def _tied(layers: Iterable[Layer]) -> dict[str, str]:
    """Return, for each layer by name, the first of the layers that have a parameter of it: they get one owner."""
    first: dict[Tensor, str] = {}
    groups = {}
    for layer in layers:
        groups[layer.name] = next((first[p] for p in layer.parameters if p in first), layer.name)
        first |= dict.fromkeys(layer.parameters, groups[layer.name])
    return groups
