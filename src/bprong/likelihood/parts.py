"""Which rows of an output the calls of a loss were given, where none of them was given all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bprong.likelihood.families import Likelihood


def rows_of_parts(
    likelihood: Likelihood,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    output: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Targets for all rows of the output, and which of them the calls were given, in their order; None: others.

    inputs, targets: of the calls, with classes in the last dimension
    gradient:        what the user's backward pass left at the output, which is zero at other rows
    """
    width = output.shape[-1]
    if any(given.shape[-1:] != output.shape[-1:] for given in inputs):
        return None
    rows = output.reshape(-1, width)
    row = likelihood.shape_of_targets(rows, targets[0])[1:]
    given = torch.cat([part.reshape(-1, width) for part in inputs])
    y = torch.cat([part.reshape(-1, *row) for part in targets])
    counted = likelihood.not_ignored(y)  # targets that are ignored have no gradient
    if counted is not None:
        given = given[counted]
        y = y[counted]
    is_given = (gradient.reshape(rows.shape) != 0).any(dim=1)
    rows = rows[is_given]
    if len(given) != len(rows):
        return None
    orders = [torch.arange(len(rows), device=rows.device)]
    if len(rows) % len(inputs) == 0:
        orders.append(orders[0].view(len(inputs), -1).T.flatten())  # stacked in dimension 1
    for order in orders:
        if is_equal(given[order], rows):
            y_of_all = y.new_full((len(is_given), *row), 0 if row else likelihood.ignore_index)
            y_of_all[is_given] = y[order]
            return y_of_all.reshape(likelihood.shape_of_targets(output, y)), likelihood.reached(gradient)
    return None


def is_equal(given: Tensor, output: Tensor) -> bool:
    """Whether the values are the same, in the lower precision of both; those that are not a number are."""
    values = output.to(given.dtype).to(output.dtype)
    return torch.allclose(given.detach().to(output.dtype), values, rtol=0, atol=0, equal_nan=True)
