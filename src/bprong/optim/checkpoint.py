"""The state of the optimizer in the form of a checkpoint: tensors in the states of the parameters, and nothing else.

`torch.distributed.checkpoint` keeps torch's own two keys only, and loads into tensors of a fresh optimizer, so that
shapes must depend on the model alone. Moments and factors are therefore stored whole, with zeros where there are none,
and all plain values as JSON in a tensor of bytes. Each parameter has an entry KEY:

    flags     whether the last step moved it, and whether it has a pending direction (lr="auto")
    pending   that direction
    layers    of a weight, or of a bias whose weight is not trained: by number, the moments, factors and centres of its
              layers, and their plain values
    plain     of the first parameter: the plain values of the optimizer
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bprong.linalg.moments import float64_device
from bprong.sharding import Form, Sharding, from_owners
from bprong.whitening.layer import Layer
from bprong.whitening.side import Side

KEY = "bprong"
BYTES = {"optimizer": 4096, "layer": 2048}  # room for plain values
State = dict[str, Any]


def packed(
    parameters: Sequence[Tensor], layers: Sequence[Layer], whitening: State, rule: State, kind: str
) -> list[State]:
    """An entry for each parameter.

    layers:     all layers that the optimizer could whiten, whether their state is among `whitening` or not
    whitening:  the state of the whitening, by layer
    rule:       that of the step rule
    kind:       the name of the optimizer's class
    """
    rule = dict(rule)
    moved = rule.pop("moved", [False] * len(parameters))
    pending = rule.pop("pending", None)
    found: list[State] = [
        {"flags": torch.tensor([own, pending is not None and pending[i] is not None], dtype=torch.uint8, device="cpu")}
        for i, own in enumerate(moved)
    ]
    for entry, p, direction in zip(found, parameters, pending or [], strict=bool(pending)):
        entry["pending"] = torch.zeros_like(p) if direction is None else direction
    places = {id(p): i for i, p in enumerate(parameters)}
    for layer in layers:
        if (place := _place(layer, places)) >= 0:
            own_layers = found[place].setdefault("layers", {})
            own_layers[str(len(own_layers))] = _packed_layer(layer, whitening["layers"].get(layer.name))
    plain = {"class": kind, "rule": rule, "schedule": whitening["schedule"]}
    found[0]["plain"] = _text(plain, BYTES["optimizer"])
    return found


def unpacked(
    parameters: Sequence[Tensor], layers: Sequence[Layer], entries: Mapping[int, State]
) -> tuple[State, State, str]:
    """The states of the whitening and of the rule, and the class of the optimizer, from the entries of parameters."""
    plain = _values(entries[0]["plain"])
    whitening: State = {"schedule": plain["schedule"], "demoted": [], "layers": {}}
    rule = plain["rule"]
    if any("pending" in entry for entry in entries.values()):
        flags = [entries[i]["flags"].tolist() if i in entries else [0, 0] for i in range(len(parameters))]
        rule["moved"] = [bool(own) for own, _ in flags]
        rule["pending"] = [entries[i]["pending"] if has else None for i, (_, has) in enumerate(flags)]
    places = {id(p): i for i, p in enumerate(parameters)}
    saved = {i: entry.get("layers", {}) for i, entry in entries.items()}
    found = 0
    numbers = Counter[int]()
    for layer in layers:
        place = _place(layer, places)
        own = saved.get(place, {}).get(str(numbers[place]))
        numbers[place] += 1
        found += own is not None
        state = layer.state_dict() if own is None else _unpacked_layer(own)  # not this optimizer's to train
        if state is None:
            whitening["demoted"].append(layer.name)
        else:
            whitening["layers"][layer.name] = state
    total = sum(map(len, saved.values()))
    own_total = sum(numbers.values()) - numbers[-1]
    if not found == total == own_total:
        raise ValueError(f"the state has {total} layers, and this model has {own_total} that are whitened")
    return whitening, rule, plain["class"]


def checked(
    parameters: Sequence[Tensor], layers: Sequence[Layer], entries: Mapping[int, State], kind: str, rule_kind: str
) -> tuple[State, State]:
    """The states of the whitening and of the rule; raises ValueError if they are not those of this kind of optimizer.

    kind, rule_kind: the names of the classes of the optimizer and of its step rule
    """
    if "plain" not in entries.get(0, {}):
        raise ValueError(
            f"the state is not that of {kind}, but another optimizer's. Make a new {kind} instead of loading it"
        )
    whitening, rule, saved = unpacked(parameters, layers, entries)
    if saved != kind:
        raise ValueError(f"the state is not that of {kind}, but that of {saved}. Make a new {saved} and load it")
    if (saved_rule := rule.pop("type")) != rule_kind:
        raise ValueError(
            f"the state has the step rule {saved_rule}, and this optimizer has {rule_kind}: make it with the same "
            f'step ("natural" or "spectral"), and with lr="auto" or a number as the saved one was'
        )
    return whitening, rule


def check_demoted(
    parameters: Sequence[Tensor], layers: Sequence[Layer], demoted: Sequence[str], state_dict: State
) -> None:
    """Raises ValueError if layers that follow the fallback rule have no averages for it.

    demoted:    the names of these layers
    state_dict: torch's own
    """
    names = _names(state_dict)
    kept = {p: state_dict["state"].get(name, {}) for p, name in zip(parameters, names, strict=False)}
    chosen = [layer for layer in layers if layer.name in demoted]
    if chosen and not any("exp_avg" in kept.get(p, {}) for layer in chosen for p in layer.parameters):
        raise ValueError(
            f"the state lacks Adam's averages of layer {chosen[0].name!r}, which was left to the fallback rule during "
            f"training. torch.distributed.checkpoint cannot know that: use torch.save for this model"
        )


# torch's own state ----------------------------------------------------------------------------------------------------


def with_entries(state_dict: State, entries: Sequence[State]) -> State:
    """torch's own state with our entries, in the order of the parameters."""
    own = {i: {k: v for k, v in state_dict["state"].get(i, {}).items() if k != KEY} for i in range(len(entries))}
    return state_dict | {"state": {i: own[i] | {KEY: entry} for i, entry in enumerate(entries)}}


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
    numbers = Counter[int]()
    found = [dict(entry) for entry in entries]
    for layer in layers:
        place = _place(layer, places)
        number = str(numbers[place])
        numbers[place] += 1
        if place < 0 or layer.name not in sharding.owners:
            continue
        tensors, structure = tree_flatten(entries[place]["layers"][number])
        own = dict(enumerate(tensors))
        owners = dict.fromkeys(own, sharding.owners[layer.name])
        received = from_owners(sharding.ranks, owners, {i: Form.of(t) for i, t in own.items()}, own)
        found[place]["layers"] = found[place]["layers"] | {number: tree_unflatten(received.values(), structure)}
    return found


def _place(layer: Layer, places: Mapping[int, int]) -> int:
    """The place of the parameter whose entry has the layer: its weight or, if that is not trained, its bias; or −1."""
    return next((places[id(p)] for p in layer.parameters if id(p) in places), -1)


# A layer --------------------------------------------------------------------------------------------------------------


def _packed_layer(layer: Layer, state: State | None) -> State:
    """None: the layer follows the fallback rule."""
    like = layer.like
    centre = None if state is None else state["c"]
    found: State = {"c": _centre_like(layer) if centre is None else centre}
    plain: State = {"whitened": state is not None, "centred": centre is not None}
    for side in layer.sides:
        found[side.name], plain[side.name] = _packed_side(side, None if state is None else state[side.name], like)
    return found | {"plain": _text(plain, BYTES["layer"])}


def _centre_like(layer: Layer) -> Tensor:
    inputs = layer.linear.inputs
    shape = (inputs.groups, inputs.features) if inputs.groups > 1 else (inputs.features,)
    return torch.zeros(shape, dtype=layer.like.dtype, device=layer.like.device)


def _packed_side(side: Side, state: State | None, like: Tensor) -> tuple[State, State]:
    plain = {key: value for key, value in (state or {}).items() if key not in ("moments", "factor")}
    moments = (state or {}).get("moments")
    factor = (state or {}).get("factor")
    shape = side.blocks.shape
    exact = like.new_zeros(0, dtype=torch.float64, device=float64_device(like))
    mean = None if moments is None else moments["mean"]
    scatter = None if moments is None else moments["scatter"]  # of another rank's layers the diagonal is here
    found = {
        "scatter": exact.new_zeros(shape) if scatter is None or scatter.shape != shape else scatter,
        "mean": exact.new_zeros(shape[:-1]) if mean is None else mean,
        "factor": like.new_zeros(shape) if factor is None or "B" in factor else factor["inverse"],
    }
    if factor is not None and "B" in factor:  # of low rank: its columns, and zeros to the right of them
        found["factor"][:, : factor["B"].shape[1]] = factor["B"]
        plain["low_rank"] = {"rank": factor["B"].shape[1], "s": factor["s"], "error": factor["error"]}
    plain |= {"has_factor": factor is not None, "has_mean": mean is not None}
    return found, plain | {"weight": None if moments is None else moments["weight"]}


def _unpacked_layer(saved: State) -> State | None:
    plain = _values(saved["plain"])
    if not plain["whitened"]:
        return None
    sides = {name: _unpacked_side(saved[name], plain[name]) for name in ("forward", "backward") if name in saved}
    return {"c": saved["c"] if plain["centred"] else None} | sides


def _unpacked_side(saved: State, plain: State) -> State:
    state = dict(plain)
    low_rank = state.pop("low_rank", None)
    factor = {"inverse": saved["factor"]}
    if low_rank is not None:
        columns = saved["factor"][:, : low_rank["rank"]].clone()
        factor = {"B": columns, "s": low_rank["s"], "error": low_rank["error"]}
    mean = saved["mean"] if state.pop("has_mean") else None
    weight = state.pop("weight")
    moments = None if weight is None else {"weight": weight, "mean": mean, "scatter": saved["scatter"]}
    return state | {"factor": factor if state.pop("has_factor") else None, "moments": moments}


# Plain values ---------------------------------------------------------------------------------------------------------


def _text(values: State, size: int) -> Tensor:
    """Plain values as JSON in `size` bytes, filled up with spaces; numbers are restored exactly.

    >>> _values(_text({"t": 3, "loss": 0.1, "period": None}, 64))
    {'t': 3, 'loss': 0.1, 'period': None}
    """
    text = json.dumps(values).encode()
    if len(text) > size:
        raise ValueError(f"the plain values of the optimizer take {len(text)} bytes, more than {size}")
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8).clone()


def _values(text: Tensor) -> State:
    found: State = json.loads(bytes(text.cpu().tolist()))
    return found
