"""Stock model → the paper's network and back: `whiten_` and `fold`, both without changing what the model computes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar, get_args

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from bprong.blocks import MAX_DIM
from bprong.layers import WhitenedConv2d, WhitenedLayer, WhitenedLinear

__all__ = ["fold", "is_wrapper", "whiten_", "whitened_layers"]

M = TypeVar("M", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]
Stock = nn.Linear | nn.Conv2d


def whiten_(
    model: M,
    filter_fn: Filter | None = None,
    *,
    backward: bool = True,
    max_dim: int = MAX_DIM,
    channels: bool = False,
) -> M:
    """Replaces every `nn.Linear` and `nn.Conv2d` of a model by a whitened layer that computes the same; returns it.

    filter_fn(module, name): which of them, by default all; backward=False: forward-only layers (PRONG).
    Sides wider than `max_dim` are whitened in blocks, those of a convolution by its channels, which all taps of the
    kernel share; channels=True: every convolution so.

    Build the optimizer afterwards: the layers have new parameters. Subclasses are left alone, since what they compute,
    or who reads their weight, is not known.

    >>> model = whiten_(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> [type(m).__name__ for m in model]
    ['WhitenedLinear', 'ReLU', 'WhitenedLinear']
    """
    _refuse_wrapped(model)
    if not isinstance(max_dim, int) or max_dim < 1:
        raise ValueError(f"max_dim must be a whole number of at least 1, not {max_dim!r}")
    fit = dict(_fit_layers(model))
    chosen = {name: module for name, module in fit.items() if filter_fn is None or filter_fn(module, name)}
    if not chosen:
        raise ValueError(
            f"nothing to whiten: of {len(fit)} nn.Linear and nn.Conv2d in {type(model).__name__} none was chosen"
        )
    owners = _owners(model)
    for name, module in chosen.items():  # everything is checked before anything is changed
        _refuse_unfit(module, name, owners)
    for name, module in chosen.items():
        model.set_submodule(name, _whitened(module, backward, max_dim, channels))
    return model


def _fit_layers(model: nn.Module) -> Iterator[tuple[str, Stock]]:
    for name, module in model.named_modules():
        if isinstance(module, Stock) and type(module) in get_args(Stock):
            yield name, module


def _whitened(module: Stock, backward: bool, max_dim: int, channels: bool) -> WhitenedLayer:
    if isinstance(module, nn.Conv2d):
        return WhitenedConv2d.from_conv(module, backward, max_dim=max_dim, channels=channels)
    return WhitenedLinear.from_linear(module, backward, max_dim=max_dim)


def fold(model: M) -> M:
    """A copy of `model` with a stock layer in place of every whitened one, computing the same.

    Its classes and the keys of its `state_dict` are those the model had before `whiten_`.

    >>> fold(whiten_(nn.Sequential(nn.Linear(4, 3)))).state_dict().keys()
    odict_keys(['0.weight', '0.bias'])
    """
    stock: dict[int, nn.Module] = {id(layer): layer.to_stock() for _, layer in whitened_layers(model)}
    return copy.deepcopy(model, stock)  # deepcopy takes what its memo holds as the copy already made


def whitened_layers(model: nn.Module) -> Iterator[tuple[str, WhitenedLayer]]:
    """Every whitened layer with its name."""
    for name, module in model.named_modules():
        if isinstance(module, WhitenedLayer):
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


def _refuse_unfit(module: Stock, name: str, owners: dict[int, list[str]]) -> None:
    """The reasons why one layer cannot be replaced without changing what the model computes or learns."""
    if not name:
        raise ValueError(
            f"a bare nn.{type(module).__name__} cannot be replaced in place; wrap it: nn.Sequential(layer)"
        )
    if module.weight.is_complex():
        raise ValueError(f"{name}: its weight is complex; whitening is defined for real ones only. Leave it out")
    if set(dict(module.named_parameters())) - {"weight", "bias"}:
        raise ValueError(
            f"{name}: its weight is computed from other parameters (weight or spectral norm); leave it out"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(f"{name}: it carries hooks, which a new layer would lose; remove them or leave the layer out")
    for kind in ("weight", "bias"):
        sharing = owners[id(getattr(module, kind))]
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
