"""The state of the optimizer in the form of a checkpoint: tensors and numbers in the states of the parameters.

`torch.distributed.checkpoint` keeps torch's own two keys only, and loads into a fresh optimizer, so that keys and
shapes must depend on the model alone. Moments and factors are therefore stored whole, with zeros where there are none,
and NaN stands for a number that is not known yet. Each parameter has an entry KEY:

    moved, has_pending
               whether the last step moved it, and whether it has a pending direction (lr="auto")
    pending    that direction
    layers     of a weight, or of a bias whose weight is not trained: by number, the moments, factors and centres of its
               layers, and a tensor of numbers about them
    optimizer  of the first parameter: by the class of the optimizer and by its step rule, the numbers of the schedule
               and of the rule
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bprong.linalg.factors import DESCRIPTION, described_shape, described_state, description
from bprong.linalg.moments import feature_means, float64_device
from bprong.parallel.slices import Sharding
from bprong.whitening.layer import Layer
from bprong.whitening.side import Side

KEY = "bprong"
State = dict[str, Any]


def packed(
    parameters: Sequence[Tensor], layers: Sequence[Layer], demoted: Collection[str], schedule: State, rule: State,
    kinds: tuple[str, str],
) -> list[State]:  # fmt: skip
    """An entry for each parameter.

    layers:   all layers that the optimizer could whiten
    demoted:  the names of those that follow the fallback rule, and have no state
    schedule: the state of the schedule
    rule:     that of the step rule
    kinds:    the names of the classes of the optimizer and of its rule
    """
    rule = dict(rule)
    flags = rule.pop("moved", [False] * len(parameters))
    directions = rule.pop("pending", [])
    entries: list[State] = [{"moved": flag} for flag in flags]
    for entry, p, direction in zip(entries, parameters, directions, strict=bool(directions)):
        entry["has_pending"] = direction is not None
        entry["pending"] = torch.zeros_like(p) if direction is None else direction
    for layer, (place, number) in _places(parameters, layers).items():
        entries[place].setdefault("layers", {})[number] = _packed_layer(layer, layer.name not in demoted)
    kind, rule_kind = kinds
    entries[0]["optimizer"] = {kind: {rule_kind: tree_map(_without_none, {"schedule": schedule, "rule": rule})}}
    return entries


def unpacked(
    parameters: Sequence[Tensor], layers: Sequence[Layer], entries: Mapping[int, State], kinds: tuple[str, str]
) -> tuple[State, State]:
    """The states of the whitening and of the rule; raises ValueError if they are those of another kind of optimizer.

    kinds: the names of the classes of the optimizer and of its step rule
    """
    numbers = _numbers_of(entries, *kinds)
    rule = numbers.get("rule", {})
    if any("pending" in entry for entry in entries.values()):
        rule["moved"] = []
        rule["pending"] = []
        for i in range(len(parameters)):
            entry = entries.get(i, {"moved": False, "has_pending": False})
            rule["moved"].append(bool(entry["moved"]))
            rule["pending"].append(entry["pending"] if entry["has_pending"] else None)
    places = _places(parameters, layers)
    saved = {}
    for i, entry in entries.items():
        for number, packed_layer in entry.get("layers", {}).items():
            saved[i, number] = packed_layer
    if saved.keys() != set(places.values()):
        raise ValueError(f"the state has {len(saved)} layers, and this model has {len(places)} that are whitened")
    whitening: State = {"schedule": numbers["schedule"], "demoted": [], "layers": {}}
    for layer in layers:
        # Without a place it is not this optimizer's to train.
        state = _unpacked_layer(layer, saved[places[layer]]) if layer in places else layer.state_dict()
        if state is None:
            whitening["demoted"].append(layer.name)
        else:
            whitening["layers"][layer.name] = state
    return whitening, rule


def _numbers_of(entries: Mapping[int, State], kind: str, rule_kind: str) -> State:
    """The numbers of the schedule and of the rule; raises ValueError if they are those of another kind."""
    if "optimizer" not in entries.get(0, {}):
        raise ValueError(
            f"the state is not that of {kind}, but another optimizer's. Make a new {kind} instead of loading it"
        )
    ((saved, by_rule),) = entries[0]["optimizer"].items()
    if saved != kind:
        raise ValueError(f"the state is not that of {kind}, but that of {saved}. Make a new {saved} and load it")
    ((saved_rule, numbers),) = by_rule.items()
    if saved_rule != rule_kind:
        raise ValueError(
            f"the state has the step rule {saved_rule}, and this optimizer has {rule_kind}: make it with the same "
            f'step ("natural" or "spectral"), and with lr="auto" or a number as the saved one was'
        )
    return cast(State, tree_map(_with_none, numbers))


def check_demoted(
    parameters: Sequence[Tensor], layers: Sequence[Layer], demoted: Sequence[str], state_dict: State
) -> None:
    """Raises ValueError if layers that follow the fallback rule have no averages for it.

    demoted:    the names of these layers
    state_dict: torch's own
    """
    chosen = [layer for layer in layers if layer.name in demoted]
    averaged = set()
    for p, name in zip(parameters, _names(state_dict), strict=False):
        if "exp_avg" in state_dict["state"].get(name, {}):
            averaged.add(p)
    if chosen and averaged.isdisjoint(p for layer in chosen for p in layer.parameters):
        raise ValueError(
            f"the state lacks Adam's averages of layer {chosen[0].name!r}, which was left to the fallback rule during "
            f"training. torch.distributed.checkpoint cannot know that: use torch.save for this model"
        )


# torch's own state ----------------------------------------------------------------------------------------------------


def with_entries(state_dict: State, entries: Sequence[State]) -> State:
    """torch's own state with our entries, in the order of the parameters."""
    states = {i: {**state_dict["state"].get(i, {}), KEY: entry} for i, entry in enumerate(entries)}
    return state_dict | {"state": states}


def without_entries(state_dict: State) -> tuple[dict[int, State], State]:
    """Our entries, by the place of their parameter, and torch's own state without them."""
    entries = {}
    states = {}
    places = {name: i for i, name in enumerate(_names(state_dict))}
    for name, state in state_dict["state"].items():
        others = dict(state)
        if KEY in others:
            entries[places[name]] = others.pop(KEY)
        if others:
            states[name] = others
    return entries, state_dict | {"state": states}


def _names(state_dict: State) -> list[Any]:
    """The names of the parameters in a state, which may be numbers."""
    return [name for group in state_dict["param_groups"] for name in group["params"]]


# Layers ---------------------------------------------------------------------------------------------------------------


def _places(parameters: Sequence[Tensor], layers: Sequence[Layer]) -> dict[Layer, tuple[int, str]]:
    """The place of the parameter whose entry has a layer, and the number that it has there.

    That is its weight or, if that is not trained, its bias; without either, a layer has no place.
    """
    indices = {p: i for i, p in enumerate(parameters)}
    counts = Counter[int]()
    places = {}
    for layer in layers:
        trained = [indices[p] for p in layer.parameters if p in indices]
        if trained:
            place = trained[0]
            places[layer] = place, str(counts[place])
            counts[place] += 1
    return places


def exchanged_layers(
    entries: list[State], parameters: Sequence[Tensor], layers: Sequence[Layer], sharding: Sharding
) -> list[State]:
    """The entries with each layer from the rank that owns it; to be called by all ranks."""
    for layer, (place, number) in _places(parameters, layers).items():
        if layer.name in sharding.owners:
            receive = partial(sharding.ranks.received, owner=sharding.owners[layer.name])
            own_layers = entries[place]["layers"]
            own_layers[number] = tree_map(receive, tree_map(torch.clone, own_layers[number]))
    return entries


def _packed_layer(layer: Layer, whitened: bool) -> State:
    """The tensors of a layer; whitened: False if it follows the fallback rule."""
    inputs = layer.linear.inputs
    no_centre = feature_means(layer.like.new_zeros(inputs.shape[:-1]), inputs)
    entry: State = {
        "numbers": torch.tensor([whitened, layer.c is not None], dtype=torch.float64, device="cpu"),
        "c": no_centre if layer.c is None else layer.c,
    }
    for side in layer.sides:
        entry[side.name] = _packed_side(side, layer.like)
    return entry


def _packed_side(side: Side, like: Tensor) -> State:
    """Its moments and factor, with zeros where there are none, and all numbers in one tensor."""
    shape = side.blocks.shape
    scatter = torch.zeros(shape, dtype=torch.float64, device=float64_device(like))
    mean = scatter.new_zeros(shape[:-1])
    numbers = [*side.numbers().values(), None, False]
    moments = side.moments
    if moments is not None:
        numbers[-2:] = [moments.weight, moments.mean is not None]
        mean = mean if moments.mean is None else moments.mean
        scatter = (
            scatter if moments.diagonal else moments.copy().values
        )  # of another rank's layers the diagonal is here
    factor = like.new_zeros(shape)
    for tensor in () if side.factor is None else side.factor.tensors().values():
        factor[..., : tensor.shape[-1]] = tensor  # of low rank: its columns, and zeros to the right of them
    values = [*map(_without_none, numbers), *description(side.factor)]
    return {
        "scatter": scatter,
        "mean": mean,
        "factor": factor,
        "numbers": torch.tensor(values, dtype=torch.float64, device="cpu"),
    }


def _unpacked_layer(layer: Layer, entry: State) -> State | None:
    """The state of a layer; None if it follows the fallback rule."""
    whitened, centred = entry["numbers"].tolist()
    if not whitened:
        return None
    sides = {side.name: _unpacked_side(side, entry[side.name]) for side in layer.sides}
    return {"c": entry["c"] if centred else None} | sides


def _unpacked_side(side: Side, entry: State) -> State:
    values = entry["numbers"].tolist()
    described = values[-DESCRIPTION:]
    *numbers, weight, has_mean = map(_with_none, values[:-DESCRIPTION])
    moments = None
    if weight is not None:
        moments = {"weight": weight, "mean": entry["mean"] if has_mean else None, "scatter": entry["scatter"]}
    factor = entry["factor"]
    columns = described_shape(described)[-1:]
    if columns and columns[0] < factor.shape[-1]:
        factor = factor[..., : columns[0]].clone()
    return {
        "moments": moments,
        "factor": described_state(described, factor),
        "numbers": dict(zip(side.numbers(), numbers, strict=True)),
    }


# Numbers --------------------------------------------------------------------------------------------------------------


def _without_none(value: Any) -> Any:
    """A number, or NaN for None; of Python's own types, which torch.load can read.

    >>> tree_map(_without_none, {"t": 3, "loss": None, "parts": {"last": 0.5}})
    {'t': 3, 'loss': nan, 'parts': {'last': 0.5}}
    """
    if value is None:
        return math.nan
    return float(value) if isinstance(value, float) else value


def _with_none(number: Any) -> Any:
    """The inverse of `_without_none`."""
    return None if math.isnan(number) else number
