"""What several processes do together at a refresh: measure as one, find what has drifted, divide factorisations up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from bprong.capture.measure import LayerMoments
from bprong.distributed import ALIKE, Ranks, Share, assigned, merged, shared
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
FLAGS = ("known", "called", "empty", "unexplained", "targets")  # what is exchanged about each layer of each rank


def _flags(found: Mapping[str, LayerMoments], names: Iterable[str]) -> list[float]:
    own = ((name in found, found.get(name, LayerMoments())) for name in names)
    return [float(x) for known, m in own for x in (known, m.called, m.empty, m.unexplained, m.targets)]


def measured_by_all(
    ranks: Ranks,
    layers: Layers,
    schedule: Schedule,
    centred: Centred,
    own: Callable[[], Mapping[str, LayerMoments]],
    alike: Callable[[], Iterable[Tensor | None]],
) -> Mapping[str, LayerMoments]:
    """What all ranks have measured together, as if one process had measured all of their batches.

    own:    measures the batches of this rank
    alike:  tensors that must be the same on all ranks: their gradients, or their parameters
    """
    if ranks.size == 1 or not centred:
        return own()
    found: dict[str, LayerMoments] = {}

    def numbers() -> list[float]:
        found.update(own())
        tensors = [tensor.detach() for tensor in alike() if tensor is not None]
        size = sum(float(norm) for norm in torch._foreach_norm(tensors)) if tensors else 0.0
        return [*divmod(schedule.base_seed, 2**32), size, *_flags(found, centred)]

    table = ranks.table(3 + len(FLAGS) * len(centred), numbers)
    if not torch.allclose(table[:, 2], table[:1, 2], rtol=ALIKE, equal_nan=True):
        raise RuntimeError(
            f"the gradients or parameters of {ranks.size} processes differ: each would train a model of its own. "
            f"Wrap the model in torch.nn.parallel.DistributedDataParallel, or average gradients before each step"
        )
    schedule.base_seed = int(table[0, 0]) * 2**32 + int(table[0, 1])
    return _merged_over_ranks(ranks, layers, centred, found, table[:, 3:])


def _merged_over_ranks(
    ranks: Ranks, layers: Layers, centred: Centred, found: Mapping[str, LayerMoments], flags: Tensor
) -> dict[str, LayerMoments]:
    """The moments of all ranks together; flags: (ranks, layers · FLAGS) what `_flags` gives on each of them."""
    shares = []
    for name, is_centred in centred.items():
        own = found.get(name, LayerMoments())
        linear = layers[name].linear
        owner = None if layers.sharding is None else layers.sharding.owners[name]
        shares.append(Share(linear.inputs, is_centred, 0.0 if own.z is None else own.z.weight, own.z, owner))
        weight = own.targets if own.delta is None else own.delta.weight  # errors that do not reach it are zero
        shares.append(Share(linear.outputs, False, float(weight), own.delta, owner))
    moments = merged(ranks, shares, layers[next(iter(centred))].weight)
    by_layer = flags.reshape(ranks.size, -1, len(FLAGS)).sum(dim=0).tolist()
    return {
        name: LayerMoments(
            z=z, delta=delta, called=called > 0, empty=empty > 0, unexplained=unexplained > 0, targets=int(targets),
            probe=found[name].probe if name in found else None,
        )
        for name, z, delta, (known, called, empty, unexplained, targets) in zip(
            centred, moments[::2], moments[1::2], by_layer, strict=True
        )
        if known
    }  # fmt: skip


def drifted(layers: Layers, schedule: Schedule, pending: Pending, ranks: Ranks) -> Pending:
    """The sides whose factors are out of date; each is compared with its new moments by its owner."""
    owners = _owners(layers, pending, ranks)

    def drifts() -> list[float]:
        return [
            side.drift(moments, epsilon) if owners[side] == ranks.rank else 0.0
            for side, (_, moments, epsilon) in pending.items()
        ]

    found = ranks.sums(len(pending), drifts)
    return {
        side: pending[side] for side, drift in zip(pending, found, strict=True) if schedule.has_drifted(side, drift)
    }


def _owners(layers: Layers, pending: Pending, ranks: Ranks) -> dict[Side, int]:
    """The rank that factors each side."""
    if layers.sharding is not None:
        return {side: layers.sharding.owners[layer.name] for side, (layer, *_) in pending.items()}
    return assigned({side: side.blocks.cost for side in pending}, ranks.size)


def shared_factors(layers: Layers, pending: Pending, ranks: Ranks) -> dict[Side, Factor | WhiteningError]:
    """The factors of all sides, each from its owner, and whether its owner will try low rank next time."""
    owners = _owners(layers, pending, ranks)

    def solve(sides: Sequence[Side]) -> dict[Side, Factor | WhiteningError]:
        found: dict[Side, Factor | WhiteningError] = {}
        found |= layers.factors_of_equals({side: pending[side] for side in sides})
        for side in sides:
            layer, moments, epsilon = pending[side]
            try:
                found[side] = found.get(side) or side.solve(moments, epsilon, layer.like)
            except WhiteningError as reason:
                found[side] = reason
        return found

    like = {side: (side.blocks, layer.like) for side, (layer, *_) in pending.items()}
    factors = shared(ranks, owners, like, solve, everywhere=layers.sharding is None)
    backoffs = ranks.table(2 * len(pending), lambda: [x for side in pending for x in astuple(side.backoff)])
    for i, side in enumerate(pending):
        skip, next_skip = backoffs[owners[side], 2 * i : 2 * i + 2].tolist()
        side.backoff = Backoff(int(skip), int(next_skip))
    return factors


# Sharding -------------------------------------------------------------------------------------------------------------


def share_layers(layers: Layers, ranks: Ranks) -> None:
    """Assigns the layers that have no owner yet to ranks, and leaves what this rank does not own to the others."""
    known = {} if layers.sharding is None else layers.sharding.owners
    new = [layer for layer in layers.values() if layer.name not in known]
    if not new:
        return
    groups = _sharing(layers.values())
    costs = dict.fromkeys((groups[layer.name] for layer in new if groups[layer.name] not in known), 0.0)
    for layer in new:
        if groups[layer.name] in costs:
            costs[groups[layer.name]] += sum(side.blocks.cost for side in layer.sides)
    by_group = {**assigned(costs, ranks.size), **known}
    owners = {name: by_group[groups[name]] for name in layers}
    parameters = {p: owners[layer.name] for layer in layers.values() for p in layer.parameters}
    layers.sharding = Sharding(ranks, owners, parameters)
    for layer in new:
        for side in () if layers.is_own(layer) else layer.sides:
            side.leave_to(owners[layer.name])


def _sharing(layers: Iterable[Layer]) -> dict[str, str]:
    """For each layer, by name, the first of the layers that it shares a parameter with: they have one owner."""
    first: dict[Tensor, str] = {}
    found = {}
    for layer in layers:
        found[layer.name] = next((first[p] for p in layer.parameters if p in first), layer.name)
        first |= dict.fromkeys(layer.parameters, found[layer.name])
    return found
