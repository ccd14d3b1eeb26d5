"""Optimizer classes for frameworks that make the optimizer themselves, from a class, parameters and settings."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def factory(kind: Any, model: nn.Module | type[nn.Module], loss: Any, arguments: Mapping[str, Any]) -> type[Optimizer]:
    """Return a class that makes optimizers of this kind from parameters and settings, as `BPRONG.factory` says."""

    class Factory(Optimizer):
        """What it makes is a plain `BPRONG` or `PRONG`, so that copies, pickles and checkpoints know nothing of it."""

        def __new__(cls, params: Any, **settings: Any) -> Any:
            rate = {"lr": settings.pop("lr")} if "lr" in settings else {}
            groups = Optimizer(params, rate).param_groups  # each with the framework's learning rate or its own
            parameters = [p for group in groups for p in group["params"]]
            module = model if isinstance(model, nn.Module) else _owner(set(parameters), model)
            members = set(module.parameters())
            for p in [p for p in parameters if p not in members]:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is not one of the {type(module).__name__} that the factory "
                    f"is for. If the framework makes or copies the model, give the factory its class"
                )
            optimizer = kind(module, loss, params=groups, **arguments, **settings)
            optimizer.defaults |= rate  # for groups that are added later
            return optimizer

    return Factory


def _owner(parameters: set[Tensor], kind: type[nn.Module]) -> nn.Module:
    """The module of a class that has most of these parameters and fewest others; of several, the outermost."""

    def fit(module: nn.Module) -> tuple[int, int, int]:
        members = set(module.parameters())
        return len(members & parameters), -len(members), len(list(module.modules()))

    modules: list[nn.Module] = [x for x in gc.get_objects() if issubclass(type(x), kind)]
    if not modules:
        raise ValueError(f"there is no {kind.__name__}, whose parameters the framework would give to the optimizer")
    return max(modules, key=fit)
