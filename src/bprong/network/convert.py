"""`whiten_` turns a stock model into the paper's network and `fold` turns it back; neither changes the function."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from bprong.checks import integer
from bprong.linalg.moments import MAX_DIM
from bprong.network.layers import Stock, WhitenedConv2d, WhitenedLayer, WhitenedLinear
from bprong.parallel.slices import wrapper_of

M = TypeVar("M", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WHITENED: dict[type[nn.Module], type[WhitenedLayer]] = {nn.Linear: WhitenedLinear, nn.Conv2d: WhitenedConv2d}


def whiten_(
    model: M,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    backward: bool = True,
    max_dim: int = MAX_DIM,
) -> M:
    """Replace every `nn.Linear` and `nn.Conv2d` of a model by a whitened layer with the same function; return it.

    filter_fn   filter_fn(module, name) says whether to replace a layer; by default all are replaced
    backward    False: forward-only layers (PRONG)
    max_dim     a side with more features is whitened in blocks

    Build the optimizer afterwards, since the layers have new parameters. Subclasses are not replaced, because what they
    compute and who reads their weight is not known.

    >>> model = whiten_(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> [type(m).__name__ for m in model]
    ['WhitenedLinear', 'ReLU', 'WhitenedLinear']
    """
    integer("max_dim", max_dim, 1)
    chosen: dict[str, Stock] = {}
    for name, module in model.named_modules():
        if type(module) in _WHITENED and (filter_fn is None or filter_fn(module, name)):
            chosen[name] = module
    if not chosen:
        raise ValueError(f"nothing to whiten: no nn.Linear or nn.Conv2d of {type(model).__name__} was chosen")
    _refuse_unfit(model, chosen)  # check everything before changing anything
    for name, module in chosen.items():
        model.set_submodule(name, _WHITENED[type(module)](module, backward, max_dim=max_dim))
    return model


def fold(model: M) -> M:
    """Return a copy of `model` with a stock layer of the same function in place of every whitened one.

    It has the classes and `state_dict` keys that the model had before `whiten_`.

    >>> fold(whiten_(nn.Sequential(nn.Linear(4, 3)))).state_dict().keys()
    odict_keys(['0.weight', '0.bias'])
    """
    memo = {id(layer): layer.to_stock() for layer in whitened_layers(model).values()}
    return copy.deepcopy(model, memo)  # which takes the entries of its memo for copies already made


def whitened_layers(model: nn.Module) -> dict[str, WhitenedLayer]:
    """Return the whitened layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, WhitenedLayer)}


def _refuse_unfit(model: nn.Module, chosen: Mapping[str, Stock]) -> None:
    """Raise ValueError if a layer cannot be replaced without changing what the model computes or learns."""
    for name, wrapper in model.named_modules():
        if wrapper_of(wrapper):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(wrapper).__name__}, which already holds the parameters "
                f"that whiten_ would replace; give the inner model"
            )
    names = defaultdict(list)  # every name under which each parameter is reached
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for name, module in chosen.items():
        if not name:
            raise ValueError(f"a bare nn.{type(module).__name__} cannot be replaced in place; wrap it in nn.Sequential")
        parameters = dict(module.named_parameters())
        reasons = []
        if module.weight.is_complex():
            reasons.append("its weight is complex, and only real layers can be whitened")
        if not parameters.keys() <= {"weight", "bias"}:
            reasons.append("its weight is computed from other parameters (like weight norm)")
        if any(getattr(module, hooks) for hooks in _HOOKS):
            reasons.append("it has hooks, which a new layer would lose")
        for key, p in parameters.items():
            if len(names[p]) > 1:
                reasons.append(f"its {key} is shared (tied) by {', '.join(names[p])}; only one layer can whiten it")
        if reasons:
            raise ValueError(f"{name}: {'; '.join(reasons)}. Leave it out by filter_fn")
