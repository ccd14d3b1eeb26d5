"""Is everything a weight does in a network seen? Its gradient must be the sum over its calls of δ zᵀ.

A weight that is also used in a way no tap sees (an embedding's, multiplied by hand as the output layer; that of a
convolution, transposed) has statistics of a part of what it does, and would be whitened wrongly without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bprong.moments import wide, widened
from bprong.taps import Call
from bprong.units import Unit

__all__ = ["unexplained"]

TOLERANCE = 1e-2  # far above float32's rounding, far below a use that was missed


def unexplained(output: Tensor, calls: Sequence[Call]) -> set[str]:
    """The names of the units called whose weight's gradient, of a random function of the output, is not Σ δ zᵀ."""
    units = {call.unit for call in calls if call.a.requires_grad and call.unit.weight.requires_grad}
    seen = [call for call in calls if call.unit in units]
    if not seen or not output.requires_grad:
        return set()
    weights = list(dict.fromkeys(unit.weight for unit in units))
    root = torch.randn_like(output)
    found = torch.autograd.grad(
        output, [*weights, *(call.a for call in seen)], root, retain_graph=True, allow_unused=True
    )
    gradients = dict(zip(weights, found[: len(weights)], strict=True))
    sums: dict[Unit, Tensor] = {}
    for call, delta in zip(seen, found[len(weights) :], strict=True):
        if delta is not None:
            sums[call.unit] = _product(call, delta) + sums.get(call.unit, 0)
    return {unit.name for unit in units if not _explained(unit, gradients[unit.weight], sums.get(unit))}


def _explained(unit: Unit, gradient: Tensor | None, product: Tensor | None) -> bool:
    if gradient is None or product is None:
        return gradient is None
    expected = wide(unit.matrix(unit.own(gradient)))
    off = float((expected.reshape(product.shape) - product).norm())
    return off <= TOLERANCE * float(expected.norm() + product.norm()) or not expected.isfinite().all()


def _product(call: Call, delta: Tensor) -> Tensor:
    """Σ δ zᵀ over the rows of a call: (groups, out, in)."""
    errors, start = widened(call.errors(delta.detach())), 0
    blocks = call.unit.forward
    total = errors.new_zeros(blocks.groups, errors.shape[-1], blocks.features)
    for rows in call.inputs():
        part = errors[start : start + len(rows)]
        start += len(rows)
        if call.unit.one_hot:
            total[0].index_add_(1, rows.to(total.device), part[:, 0].T)
        else:
            total += torch.einsum("rgo,rgi->goi", part, widened(rows))
    return total
