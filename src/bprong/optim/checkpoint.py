"""The state of the optimizer in the form of a checkpoint: tensors and numbers in the states of the parameters.

`torch.distributed.checkpoint` keeps torch's own two keys only, and loads into a fresh optimizer, so that keys and
shapes must depend on the model alone. Moments and factors are therefore stored whole, with zeros where there are none,
and NaN stands for a number that is not known yet. Each parameter has an entry KEY:

    pending    its pending direction, and has_pending: whether there is one (lr="auto")
    layers     of a weight, or of a bias whose weight is not trained: by number, the states of its layers, and a tensor
               that tells whether each is whitened and centred
    optimizer  of the first parameter: by the class of the optimizer and by its step rule, the numbers of the schedule
               and of the rule
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bprong.linalg.moments import feature_means, float64_device
from bprong.optim.rules import StepRule
from bprong.whitening.layer import Layer, Side
from bprong.whitening.refresh import Whitening

KEY = "bprong"
State = dict[str, Any]


def packed(kind: str, parameters: list[Tensor], whitening: Whitening, rule: StepRule) -> list[State]:
    """An entry for each parameter; to be called by all ranks.

    kind: the name of the class of the optimizer
    """
    numbers = rule.state_dict(parameters)
    directions = numbers.pop("pending", [])
    entries: list[State] = [{} for _ in parameters]
    for entry, p, direction in zip(entries, parameters, directions, strict=bool(directions)):
        entry["has_pending"] = direction is not None
        entry["pending"] = torch.zeros_like(p) if direction is None else direction
    for layer, (place, number) in _places(parameters, whitening).items():
        entries[place].setdefault("layers", {})[number] = _packed_layer(layer, whitening)
    numbers = {"schedule": whitening.schedule.state_dict(), "rule": numbers}
    entries[0]["optimizer"] = {kind: {rule.kind: tree_map(_without_none, numbers)}}
    return entries


def unpacked(
    kind: str, parameters: list[Tensor], whitening: Whitening, rule: StepRule, entries: Mapping[int, State]
) -> tuple[State, State, dict[str, State]]:
    """The states of the schedule, of the rule and of each layer, which is empty if it follows the fallback rule.

    Raises ValueError if they are those of another kind of optimizer, or of another model.
    """
    numbers = _numbers_of(entries, kind, rule.kind)
    rule_state = numbers.get("rule", {})
    if any("pending" in entry for entry in entries.values()):
        by_place = [entries.get(i, {}) for i in range(len(parameters))]
        rule_state["pending"] = [entry["pending"] if entry.get("has_pending") else None for entry in by_place]
    saved = {(i, number): state for i, entry in entries.items() for number, state in entry.get("layers", {}).items()}
    places = _places(parameters, whitening)
    if saved.keys() != set(places.values()):
        raise ValueError(f"the state has {len(saved)} layers, and this model has {len(places)} that are whitened")
    layers = {}
    for layer, place in places.items():
        state = dict(saved[place])
        whitened, centred = state.pop("numbers").tolist()
        if not centred:
            del state["c"]
        layers[layer.name] = state if whitened else {}
        if whitened:
            layer.check_state(state)
    return numbers["schedule"], rule_state, layers


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


def check_demoted(parameters: Sequence[Tensor], demoted: Sequence[Layer], state_dict: State) -> None:
    """Raises ValueError if layers that follow the fallback rule have no averages for it.

    state_dict: torch's own
    """
    states = dict(zip(parameters, map(state_dict["state"].get, _names(state_dict)), strict=False))
    if demoted and not any("exp_avg" in (states.get(p) or {}) for layer in demoted for p in layer.parameters):
        raise ValueError(
            f"the state lacks Adam's averages of layer {demoted[0].name!r}, which was left to the fallback rule during "
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


def _places(parameters: Sequence[Tensor], whitening: Whitening) -> dict[Layer, tuple[int, str]]:
    """The place of the parameter whose entry has a layer, and the number that it has there.

    That is its weight or, if that is not trained, its bias; without either, a layer has no place.
    """
    indices = {p: i for i, p in enumerate(parameters)}
    counts = Counter[int]()
    places = {}
    for layer in [*whitening.layers.values(), *whitening.demoted.values()]:
        trained = [indices[p] for p in layer.parameters if p in indices]
        if trained:
            place = trained[0]
            places[layer] = place, str(counts[place])
            counts[place] += 1
    return places


def _packed_layer(layer: Layer, whitening: Whitening) -> State:
    """The state of a layer, with zeros where it has nothing; if it has an owner, from that rank."""
    state = layer.state_dict()
    flags = [layer.name in whitening.layers, layer.c is not None]
    inputs = layer.linear.inputs
    c = feature_means(layer.like.new_zeros(inputs.shape[:-1]), inputs)
    entry: State = {"numbers": torch.tensor(flags, dtype=torch.float64, device="cpu"), "c": _filled(c, state.get("c"))}
    for side in layer.sides:
        entry[side.name] = _packed_side(side, state[side.name], layer.like)
    ranks = whitening.ranks
    if ranks.sharded and layer.name in ranks.owners:
        entry = tree_map(partial(ranks.received, owner=ranks.owners[layer.name]), entry)
    return entry


def _packed_side(side: Side, state: Mapping[str, Tensor], like: Tensor) -> State:
    shape = side.blocks.shape
    scatter = torch.zeros(shape, dtype=torch.float64, device=float64_device(like))
    room = {"scatter": scatter, "mean": scatter.new_zeros(shape[:-1]), "factor": like.new_zeros(shape)}
    entry = {name: _filled(zeros, state.get(name)) for name, zeros in room.items()}
    return entry | {"numbers": state["numbers"]}


def _filled(zeros: Tensor, values: Tensor | None) -> Tensor:
    """Zeros with some values in their first columns, as a factor of low rank has them."""
    if values is not None:
        zeros[..., : values.shape[-1]] = values
    return zeros


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
