"""Which parameters of a model the method covers, and which follow the fallback rule."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn

__all__ = ["covered_layers", "fallback_reason"]


def covered_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every `nn.Linear` with parameters of its own, by name.

    Subclasses are left out, since what they compute, or who reads their weight, is not known; and so are layers that
    share a parameter (tied weights), whose gradient is not the product of one z and one δ.
    """
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and set(dict(module.named_parameters())) <= {"weight", "bias"}
        and not module.weight.is_complex()
        and all(owners[id(p)] == 1 for p in module.parameters())
    }


def fallback_reason(model: nn.Module, parameter: Tensor) -> str:
    """Why a parameter is not covered."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is parameter]
    if len(names) > 1:
        return f"tied: {', '.join(names)}"
    if not names:
        return "not the model's"
    kind = type(model.get_submodule(names[0].rpartition(".")[0]))
    return "in a Linear that the optimizer was not built with" if kind is nn.Linear else f"in {kind.__name__}"
