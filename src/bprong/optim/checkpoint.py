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
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bprong.linalg.factors import DESCRIPTION, described_shape, described_state, description
from bprong.linalg.moments import float64_device
from bprong.sharding import Form, Sharding, from_owners
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
    demoted:  the names of those that follow the fallback rule
    schedule: the state of the schedule
    rule:     that of the step rule
    kinds:    the names of the classes of the optimizer and of its rule
    """
    rule = dict(rule)
    flags = rule.pop("moved", [False] * len(parameters))
    pending = rule.pop("pending", None)
    entries: list[State] = [{"moved": flag} for flag in flags]
    for entry, p, direction in zip(entries, parameters, pending or [], strict=bool(pending)):
        entry["has_pending"] = direction is not None
        entry["pending"] = torch.zeros_like(p) if direction is None else direction
    places = {id(p): i for i, p in enumerate(parameters)}
    for layer in layers:
        if (place := _place(layer, places)) >= 0:
            of_parameter = entries[place].setdefault("layers", {})
            of_parameter[str(len(of_parameter))] = _packed_layer(layer, layer.name not in demoted)
    kind, rule_kind = kinds
    numbers = {"schedule": _without_none(schedule), "rule": _without_none(rule)}
    entries[0]["optimizer"] = {kind: {rule_kind: numbers}}
    return entries


def unpacked(
    parameters: Sequence[Tensor], layers: Sequence[Layer], entries: Mapping[int, State], kinds: tuple[str, str]
) -> tuple[State, State]:
    """The states of the whitening and of the rule; raises ValueError if they are those of another kind of optimizer.

    kinds: the names of the classes of the optimizer and of its step rule
    """
    numbers = _numbers_of(entries, *kinds)
    whitening: State = {"schedule": _with_none(numbers["schedule"]), "demoted": [], "layers": {}}
    rule = _with_none(numbers.get("rule", {}))
    if any("pending" in entry for entry in entries.values()):
        rule["moved"] = [i in entries and bool(entries[i]["moved"]) for i in range(len(parameters))]
        present = [i in entries and bool(entries[i]["has_pending"]) for i in range(len(parameters))]
        rule["pending"] = [entries[i]["pending"] if has else None for i, has in enumerate(present)]
    places = {id(p): i for i, p in enumerate(parameters)}
    saved = {i: entry.get("layers", {}) for i, entry in entries.items()}
    restored = 0
    counts = Counter[int]()
    for layer in layers:
        place = _place(layer, places)
        packed_layer = saved.get(place, {}).get(str(counts[place]))
        counts[place] += 1
        if packed_layer is None:  # not this optimizer's to train
            whitening["layers"][layer.name] = layer.state_dict()
            continue
        restored += 1
        state = _unpacked_layer(layer, packed_layer)
        if state is None:
            whitening["demoted"].append(layer.name)
        else:
            whitening["layers"][layer.name] = state
    total = sum(map(len, saved.values()))
    expected = sum(counts.values()) - counts[-1]
    if not restored == total == expected:
        raise ValueError(f"the state has {total} layers, and this model has {expected} that are whitened")
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
    return dict(numbers)


def check_demoted(
    parameters: Sequence[Tensor], layers: Sequence[Layer], demoted: Sequence[str], state_dict: State
) -> None:
    """Raises ValueError if layers that follow the fallback rule have no averages for it.

    demoted:    the names of these layers
    state_dict: torch's own
    """
    names = _names(state_dict)
    states = {p: state_dict["state"].get(name, {}) for p, name in zip(parameters, names, strict=False)}
    chosen = [layer for layer in layers if layer.name in demoted]
    if chosen and not any("exp_avg" in states.get(p, {}) for layer in chosen for p in layer.parameters):
        raise ValueError(
            f"the state lacks Adam's averages of layer {chosen[0].name!r}, which was left to the fallback rule during "
            f"training. torch.distributed.checkpoint cannot know that: use torch.save for this model"
        )


# torch's own state ----------------------------------------------------------------------------------------------------


def with_entries(state_dict: State, entries: Sequence[State]) -> State:
    """torch's own state with our entries, in the order of the parameters."""
    states: dict[int, State] = {}
    for i, entry in enumerate(entries):
        states[i] = {key: value for key, value in state_dict["state"].get(i, {}).items() if key != KEY}
        states[i][KEY] = entry
    return state_dict | {"state": states}


def without_entries(state_dict: State) -> tuple[dict[int, State], State]:
    """Our entries, by the place of their parameter, and torch's own state without them."""
    states = state_dict["state"]
    entries = {i: states[name][KEY] for i, name in enumerate(_names(state_dict)) if KEY in states.get(name, {})}
    others = {name: {k: v for k, v in state.items() if k != KEY} for name, state in states.items()}
    return entries, state_dict | {"state": {name: state for name, state in others.items() if state}}


def _names(state_dict: State) -> list[Any]:
    """The names of the parameters in a state, which may be numbers."""
    return [name for group in state_dict["param_groups"] for name in group["params"]]


def exchanged_layers(
    entries: Sequence[State], parameters: Sequence[Tensor], layers: Sequence[Layer], sharding: Sharding
) -> list[State]:
    """The entries with each layer from the rank that owns it; to be called by all ranks."""
    places = {id(p): i for i, p in enumerate(parameters)}
    counts = Counter[int]()
    exchanged = [dict(entry) for entry in entries]
    for layer in layers:
        place = _place(layer, places)
        number = str(counts[place])
        counts[place] += 1
        if place < 0 or layer.name not in sharding.owners:
            continue
        leaves, structure = tree_flatten(entries[place]["layers"][number])
        tensors = dict(enumerate(leaves))
        owners = dict.fromkeys(tensors, sharding.owners[layer.name])
        received = from_owners(sharding.ranks, owners, {i: Form.of(t) for i, t in tensors.items()}, tensors)
        whole_layer = tree_unflatten(received.values(), structure)
        exchanged[place]["layers"] = exchanged[place]["layers"] | {number: whole_layer}
    return exchanged


def _place(layer: Layer, places: Mapping[int, int]) -> int:
    """The place of the parameter whose entry has the layer: its weight or, if that is not trained, its bias; or −1."""
    return next((places[id(p)] for p in layer.parameters if id(p) in places), -1)


# A layer --------------------------------------------------------------------------------------------------------------


def _packed_layer(layer: Layer, whitened: bool) -> State:
    """The tensors of a layer; whitened: False if it follows the fallback rule."""
    centre = layer.c if whitened else None
    entry: State = {
        "numbers": torch.tensor([whitened, centre is not None], dtype=torch.float64, device="cpu"),
        "c": _centre_like(layer) if centre is None else centre,
    }
    for side in layer.sides:
        entry[side.name] = _packed_side(side if whitened else Side(side.name, side.blocks), layer.like)
    return entry


def _centre_like(layer: Layer) -> Tensor:
    inputs = layer.linear.inputs
    shape = (inputs.groups, inputs.features) if inputs.groups > 1 else (inputs.features,)
    return torch.zeros(shape, dtype=layer.like.dtype, device=layer.like.device)


def _packed_side(side: Side, like: Tensor) -> State:
    """Its moments and factor, with zeros where there are none, and all numbers in one tensor."""
    shape = side.blocks.shape
    moments = side.moments
    mean = None if moments is None else moments.mean
    exact = torch.zeros(0, dtype=torch.float64, device=float64_device(like))
    scatter = exact.new_zeros(shape)
    if moments is not None and not moments.diagonal:  # of another rank's layers the diagonal is here
        scatter = moments.copy().values
    factor = like.new_zeros(shape)
    for tensor in () if side.factor is None else side.factor.tensors().values():
        factor[..., : tensor.shape[-1]] = tensor  # of low rank: its columns, and zeros to the right of them
    numbers = [*side.numbers().values(), None if moments is None else moments.weight, float(mean is not None)]
    values = [math.nan if number is None else float(number) for number in numbers] + description(side.factor)
    return {
        "scatter": scatter,
        "mean": exact.new_zeros(shape[:-1]) if mean is None else mean,
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
    *numbers, weight, has_mean = [None if math.isnan(value) else value for value in values[:-DESCRIPTION]]
    moments = None
    if weight is not None:
        moments = {"weight": weight, "mean": entry["mean"] if has_mean else None, "scatter": entry["scatter"]}
    described = values[-DESCRIPTION:]
    columns = described_shape(described)[-1:]
    factor = entry["factor"]
    if columns and columns[0] < factor.shape[-1]:
        factor = factor[..., : columns[0]].clone()
    return {
        "moments": moments,
        "factor": described_state(described, factor),
        "numbers": dict(zip(side.numbers(), numbers, strict=True)),
    }


# Numbers --------------------------------------------------------------------------------------------------------------


def _without_none(values: Mapping[str, Any]) -> State:
    """Numbers with NaN for None, also in mappings among them; of Python's own types, which torch.load can read.

    >>> _without_none({"t": 3, "loss": None, "parts": {"last": 0.5}})
    {'t': 3, 'loss': nan, 'parts': {'last': 0.5}}
    """
    numbers: State = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers[name] = _without_none(value)
        elif value is None or isinstance(value, float):
            numbers[name] = math.nan if value is None else float(value)
        else:
            numbers[name] = value
    return numbers


def _with_none(numbers: Mapping[str, Any]) -> State:
    """The inverse of `_without_none`."""
    values: State = {}
    for name, number in numbers.items():
        if isinstance(number, Mapping):
            values[name] = _with_none(number)
        else:
            values[name] = None if math.isnan(number) else number
    return values
