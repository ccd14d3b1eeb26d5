"""Stock model → the paper's network and back: `whiten_` and `fold`, both without changing what the model computes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from bprong.layers import WhitenedLinear

__all__ = ["fold", "is_wrapper", "whiten_", "whitened_layers"]

M = TypeVar("M", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]


def whiten_(model: M, filter_fn: Filter | None = None, *, backward: bool = True) -> M:
    """Replaces every `nn.Linear` in `model` by a `WhitenedLinear` that computes the same; returns `model`.

    filter_fn(module, name): which of them, by default all; backward=False: forward-only layers (PRONG).
    Build the optimizer afterwards: the layers have new parameters. Subclasses of `nn.Linear` are left alone, since what
    they compute, or who reads their weight, is not known.

    >>> model = whiten_(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> [type(m).__name__ for m in model]
    ['WhitenedLinear', 'ReLU', 'WhitenedLinear']
    """
    _refuse_wrapped(model)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    chosen = {name: linear for name, linear in linears.items() if filter_fn is None or filter_fn(linear, name)}
    if not chosen:
        raise ValueError(f"nothing to whiten: of {len(linears)} nn.Linear in {type(model).__name__} none was chosen")
    owners = _owners(model)
    for name, linear in chosen.items():  # everything is checked before anything is changed
        _refuse_unfit(linear, name, owners)
    for name, linear in chosen.items():
        model.set_submodule(name, WhitenedLinear.from_linear(linear, backward))
    return model


def fold(model: M) -> M:
    """A copy of `model` with stock `nn.Linear` in place of every `WhitenedLinear`, computing the same.

    Its classes and the keys of its `state_dict` are those the model had before `whiten_`.

    >>> fold(whiten_(nn.Sequential(nn.Linear(4, 3)))).state_dict().keys()
    odict_keys(['0.weight', '0.bias'])
    """
    stock: dict[int, nn.Module] = {id(layer): layer.to_linear() for _, layer in whitened_layers(model)}
    return copy.deepcopy(model, stock)  # deepcopy takes what its memo holds as the copy already made


def whitened_layers(model: nn.Module) -> Iterator[tuple[str, WhitenedLinear]]:
    """Every whitened layer with its name."""
    for name, module in model.named_modules():
        if isinstance(module, WhitenedLinear):
            yield name, module


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_wrapper(module):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which already holds the parameters that "
                f"whiten_ would replace; give the inner model"
            )


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module trains its inner model on several devices."""
    # By name, because importing torch.distributed.fsdp takes seconds.
    sharded = any("FSDP" in kind.__name__ or "FullySharded" in kind.__name__ for kind in type(module).__mro__)
    return sharded or isinstance(module, (DataParallel, DistributedDataParallel))


def _refuse_unfit(linear: nn.Linear, name: str, owners: dict[int, list[str]]) -> None:
    """The reasons why one layer cannot be replaced without changing what the model computes or learns."""
    if not name:
        raise ValueError("a bare nn.Linear cannot be replaced in place; wrap it: nn.Sequential(linear)")
    if linear.weight.is_complex():
        raise ValueError(f"{name}: its weight is complex; whitening is defined for real ones only. Leave it out")
    if set(dict(linear.named_parameters())) - {"weight", "bias"}:
        raise ValueError(
            f"{name}: its weight is computed from other parameters (weight or spectral norm); leave it out"
        )
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        raise ValueError(f"{name}: it carries hooks, which a new layer would lose; remove them or leave the layer out")
    for kind in ("weight", "bias"):
        sharing = owners[id(getattr(linear, kind))]
        if len(sharing) > 1:
            raise ValueError(
                f"{name}: its {kind} is shared (tied) by {', '.join(sharing)}; two layers cannot both whiten one "
                f"parameter. Leave them out with filter_fn"
            )


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Every name under which each parameter is reached."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return names
