"""The state of the optimizer in the form of a checkpoint: tensors and numbers in the states of the parameters.

`torch.distributed.checkpoint` keeps torch's own two keys only, and loads into a fresh optimizer, so that keys and
shapes must depend on the model alone. NaN stands for what is not known yet. Each parameter has an entry KEY:

    pending    its pending direction, and has_pending: whether there is one (lr="auto")
    layers     of a weight, or of a bias whose weight is not trained: by number, the states of its layers, and whether
               each is whitened
    optimizer  of the first parameter: the numbers of the schedule and of the step rule, by the kinds of optimizer and
               rule
    averages   of the first parameter: those of the weights, if there are any
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bprong.optim.rules import StepRule
from bprong.whitening.layer import Layer
from bprong.whitening.refresh import Whitening

KEY = "bprong"
AVERAGES = "averages"
State = dict[str, Any]


def packed(kind: str, parameters: list[Tensor], whitening: Whitening, rule: StepRule) -> list[State]:
    """An entry for each parameter; to be called by all ranks.

    kind: the name of the class of the optimizer
    """
    numbers = rule.state_dict(parameters)
    entries: list[State] = [{} for _ in parameters]
    for entry, p, direction in zip(entries, parameters, numbers.pop("pending", ()), strict=False):
        entry["has_pending"] = direction is not None
        entry["pending"] = torch.zeros_like(p) if direction is None else direction
    ranks = whitening.ranks
    for layer, (place, number) in _places(parameters, whitening).items():
        state = layer.state_dict()
        if ranks.sharded and layer.weight in ranks.owners:
            state = tree_map(partial(ranks.received, owner=ranks.owners[layer.weight]), state)
        state["whitened"] = layer.name in whitening.layers
        entries[place].setdefault("layers", {})[number] = state
    numbers = {"schedule": whitening.schedule.state_dict(), "rule": numbers}
    entries[0]["optimizer"] = {_kind(kind, rule): tree_map(_without_none, numbers)}
    return entries


def unpacked(
    kind: str, parameters: list[Tensor], whitening: Whitening, rule: StepRule, entries: Sequence[State]
) -> tuple[State, State, dict[str, State]]:
    """The states of the schedule, of the rule and of each layer, which is empty if it follows the fallback rule.

    Raises ValueError if they are those of another kind of optimizer, or of another model.
    """
    expected = _kind(kind, rule)
    ((saved, numbers),) = entries[0].get("optimizer", {"another optimizer": {}}).items()
    if saved != expected:
        raise ValueError(
            f"the state is that of {saved}, and this is {expected}: make the optimizer with the same class, the same "
            f'step ("natural" or "spectral"), and lr="auto" or a number as the saved one was'
        )
    numbers = tree_map(_with_none, numbers)
    rule_state = numbers.get("rule", {})
    rule_state["pending"] = [entry["pending"] if entry.get("has_pending") else None for entry in entries]
    states = {(i, number): state for i, e in enumerate(entries) for number, state in e.get("layers", {}).items()}
    places = _places(parameters, whitening)
    if states.keys() != set(places.values()):
        raise ValueError(f"the state has {len(states)} layers, and this model has {len(places)} that are whitened")
    layers = {}
    for layer, place in places.items():
        state = states[place]
        layers[layer.name] = state if state["whitened"] else {}
        if state["whitened"]:
            layer.check_state(state)
    return numbers["schedule"], rule_state, layers


def check_demoted(layers: Iterable[Layer], parameters: Sequence[Tensor], state_dict: State) -> None:
    """Raises ValueError if layers that follow the fallback rule have no averages for it in torch's own state."""
    states = dict(zip(parameters, map(state_dict["state"].get, _names(state_dict)), strict=False))
    for layer in layers:
        if not any("exp_avg" in (states.get(p) or {}) for p in layer.parameters):
            raise ValueError(
                f"the state lacks Adam's averages of layer {layer.name!r}, which was left to the fallback rule during "
                f"training. torch.distributed.checkpoint cannot know that: use torch.save for this model"
            )


def _kind(name: str, rule: StepRule) -> str:
    """What the states of two optimizers must have in common."""
    return f"{name} with the step rule {rule.kind}"


# torch's own state ----------------------------------------------------------------------------------------------------


def with_entries(state_dict: State, entries: Sequence[State]) -> State:
    """torch's own state with our entries, in the order of the parameters."""
    states = {i: {**state_dict["state"].get(i, {}), KEY: entry} for i, entry in enumerate(entries)}
    return state_dict | {"state": states}


def without_entries(state_dict: State) -> tuple[list[State], State]:
    """Our entries, in the order of the parameters, and torch's own state without them."""
    states = {name: dict(state) for name, state in state_dict["state"].items()}  # names may be numbers
    entries = [states.get(name, {}).pop(KEY, {}) for name in _names(state_dict)]
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
