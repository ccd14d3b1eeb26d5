"""Which layers statistics reach: a layer may be idle, but not trained without being seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from bprong.preconditioner import Layer
from bprong.recording import Measured

__all__ = ["check_reached", "trained", "without_errors"]


def trained(layers: Iterable[Layer]) -> list[str]:
    """Those with a gradient in this step, other than zero."""
    return [layer.name for layer in layers if any(_has_gradient(p) for p in (layer.weight, layer.bias))]


def _has_gradient(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.grad is not None and bool(parameter.grad.any())


def check_reached(measured: Mapping[str, Measured], layers: Mapping[str, Layer]) -> set[str]:
    """The layers that were not called, which must be idle."""
    idle = {name for name, m in measured.items() if not m.called}
    if missing := trained(layers[name] for name in measured if name in idle):
        raise RuntimeError(
            f"no statistics reached {', '.join(map(repr, missing))}: not called when the model is. A layer that is "
            f"used in another way is not covered: freeze it, or train it with another optimizer"
        )
    return idle


def without_errors(measured: Mapping[str, Measured]) -> list[str]:
    """The layers that were called, and that no error came back to."""
    return [name for name, m in measured.items() if m.probe is not None and not (m.delta or m.delta_rows)]
