"""Which parameters of a model are whitened, how, and at what price: known before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bprong.blocks import MAX_DIM
from bprong.checks import whole
from bprong.reporting import table
from bprong.units import Limits, Unit, units_of

__all__ = ["COVERED", "Coverage", "CoverageRow", "coverage", "covered_units", "fallback_reason", "price"]

COVERED = (
    "Linear, Conv1d, Conv2d, Conv3d, Embedding, MultiheadAttention and the recurrent cells are, with real weights "
    "of their own"
)
FALLBACK = "fallback: Adam"  # the rule of fallback.py
FLOAT64 = 8


@dataclass(frozen=True)
class CoverageRow:
    """What becomes of one parameter.

    treatment  "two-sided", "forward only", "fallback: Adam" or "frozen"; for a side that is not one block also
               ", channel-only", ", diagonal" or ", in blocks"
    reason     why it falls back
    inputs, outputs
               the blocks its two sides are whitened in, e.g. "784", "3 × 64", "25 channels", "500 diagonal"
    memory     bytes kept for it beyond the parameter and its gradient, momentum buffers apart: with exact inverses,
               less where the optimizer finds that those of a low rank do
    refresh    floating-point operations to factor its sides
    per_row    what measuring them takes for each row measured: of a convolution, each position of each example
    step       floating-point operations that a step takes beyond SGD's
    """

    parameter: str
    shape: tuple[int, ...]
    treatment: str
    reason: str = ""
    inputs: str = ""
    outputs: str = ""
    memory: int = 0
    refresh: int = 0
    per_row: int = 0
    step: int = 0


@dataclass(frozen=True)
class Coverage:
    """A row per parameter; prints as a table."""

    rows: list[CoverageRow]

    @property
    def fallback(self) -> dict[str, str]:
        """The parameters that follow Adam's rule instead, with the reason."""
        return {row.parameter: row.reason for row in self.rows if row.treatment == FALLBACK}

    @property
    def memory(self) -> int:
        return sum(row.memory for row in self.rows)

    def __str__(self) -> str:
        header = ["parameter", "shape", "treatment", "inputs", "outputs", "memory", "refresh", "per row", "step", ""]
        lines = [
            [row.parameter, " × ".join(map(str, row.shape)), row.treatment, row.inputs, row.outputs,
             _amount(row.memory, "B"), _amount(row.refresh, "flop"), _amount(row.per_row, "flop"),
             _amount(row.step, "flop"), row.reason]
            for row in self.rows
        ]  # fmt: skip
        sums = {key: sum(getattr(row, key) for row in self.rows) for key in ("memory", "refresh", "step")}
        total = (
            f"in all {_amount(sums['memory'], 'B') or 'nothing'}; {_amount(sums['refresh'], 'flop') or 'nothing'} to "
        )
        total += f"factor all sides at a refresh, {_amount(sums['step'], 'flop') or 'nothing'} more than SGD at a step"
        return "\n".join([table(header, lines, left=(0, 1, 2, 3, 4, 9)), total])


def coverage(
    model: nn.Module, *, backward: bool = True, max_dim: int = MAX_DIM, channels: bool = False, strict: bool = False
) -> Coverage:
    """What `BPRONG(model)` does with each parameter of a model, and what that takes, before anything is allocated.

    backward            False: as for `PRONG`
    max_dim, channels   as in the optimizer's options
    strict              raise ValueError if any trainable parameter falls back to Adam's rule

    >>> found = coverage(nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10), nn.LayerNorm(10)))
    >>> found.rows[0].treatment, found.rows[0].inputs, found.fallback
    ('two-sided', '784', {'3.weight': 'in LayerNorm', '3.bias': 'in LayerNorm'})
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"coverage takes a model, not a {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)
    limits = Limits(whole("max_dim", max_dim, 1), channels)
    units: dict[int, list[Unit]] = {}
    for unit in covered_units(model, limits):
        for parameter in (unit.weight, unit.bias):
            units.setdefault(id(parameter), []).append(unit)
    found = Coverage([_row(model, name, p, units.get(id(p), []), backward) for name, p in model.named_parameters()])
    if strict and found.fallback:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in found.fallback.items())
        raise ValueError(f"{len(found.fallback)} of {len(found.rows)} parameters are not whitened: {reasons}")
    return found


def _row(model: nn.Module, name: str, parameter: Tensor, units: list[Unit], backward: bool) -> CoverageRow:
    shape, size = tuple(parameter.shape), parameter.element_size()
    if not parameter.requires_grad:
        return CoverageRow(name, shape, "frozen")
    if not units:
        reason = fallback_reason(model, parameter)
        return CoverageRow(name, shape, FALLBACK, reason, memory=2 * parameter.numel() * size)
    treatment = "two-sided" if backward else "forward only"
    if all(unit.weight is not parameter for unit in units) and any(unit.weight.requires_grad for unit in units):
        return CoverageRow(name, shape, treatment, "with its weight")
    first, many = units[0], f"{len(units)} × " if len(units) > 1 else ""
    outputs = f"{many}{first.backward}" if backward else ""
    total = Counter[str]()
    for unit in units:
        total.update(price(unit, backward))
    return CoverageRow(name, shape, treatment + _form(first, backward), "", f"{many}{first.forward}", outputs, **total)


def _form(unit: Unit, backward: bool) -> str:
    if unit.forward.taps > 1:
        return ", channel-only"
    split = {side.size for side in (unit.forward, unit.backward)[: 1 + backward] if side.count > 1}
    return ", diagonal" if split == {1} else ", in blocks" if split else ""


def price(unit: Unit, backward: bool) -> dict[str, int]:
    """Of one unit: what is kept in float64 and as inverses, and the arithmetic of factoring and of applying them."""
    kept = torch.promote_types(unit.weight.dtype, torch.float32).itemsize
    inputs, outputs = unit.forward, unit.backward
    centred = unit.bias is not None and unit.bias.requires_grad
    mean = inputs.groups * inputs.count * inputs.size
    sides = [inputs, outputs] if backward else [inputs]
    entries = sum(side.entries for side in sides)
    weights = inputs.groups * inputs.features * outputs.features
    return {
        "memory": entries * (FLOAT64 + kept) + centred * (mean * FLOAT64 + inputs.groups * inputs.features * kept),
        "refresh": sum(2 * side.entries * side.size for side in sides),  # Cholesky d³/3, its inverse 2d³/3; twice that
        "per_row": sum(2 * side.entries for side in sides),
        "step": 2 * weights * sum(side.size for side in sides),
    }


def covered_units(model: nn.Module, limits: Limits | None = None) -> Iterator[Unit]:
    """Every unit with parameters of its own, in the order of the model's modules.

    Subclasses of known layers are left out, since what they compute, or who reads their weight, is not known; and so
    are layers that share a parameter (tied weights), whose gradient is not the product of one z and one δ.
    """
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if any(isinstance(p, nn.UninitializedParameter) for p in own):
            raise ValueError(f"{name!r} has parameters without a shape yet (lazy); call the model on a batch first")
        if any(names[id(p)] > 1 or p.is_complex() for p in own):
            continue
        units = units_of(name, module, limits)
        used = {id(p) for unit in units for p in (unit.weight, unit.bias) if p is not None}
        # A weight that is computed from other parameters (weight norm, spectral norm) is none itself.
        if used <= {id(p) for p in own} and (isinstance(module, nn.MultiheadAttention) or len(used) == len(own)):
            yield from units


def fallback_reason(model: nn.Module, parameter: Tensor) -> str:
    """Why a parameter is not covered."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is parameter]
    if len(names) > 1:
        return f"tied: {', '.join(names)}"
    if not names:
        return "not the model's"
    module = model.get_submodule(names[0].rpartition(".")[0])
    if isinstance(module, nn.Embedding) and type(module) is nn.Embedding:
        return "in an Embedding with scale_grad_by_freq or sparse=True"
    if parameter.is_complex():
        return "complex"
    if any(parameter is p for unit in covered_units(model) for p in (unit.weight, unit.bias)):
        return f"in a {type(module).__name__} that the optimizer was not built with"
    return f"in {type(module).__name__}"


def _amount(value: float, unit: str) -> str:
    """
    >>> _amount(0, "B"), _amount(999, "B"), _amount(2_460_000, "flop")
    ('', '999 B', '2.46 Mflop')
    """
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}" if value else ""
