"""Errors δ: gradients at a network's output that stand for its targets, what comes back of them, and to which rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from bprong.likelihood import Likelihood
from bprong.taps import Call

__all__ = ["Fisher", "errors_of", "of_targets", "roots_of", "rows_that_count"]

Fisher = Literal["sampled", "exact", "empirical"]


def roots_of(output: Tensor, y: Tensor | None, likelihood: Likelihood, fisher: Fisher) -> Iterable[Tensor]:
    """Gradients at the output whose outer products add up to (or, drawn, estimate) its Fisher matrix."""
    if not torch.isfinite(output).all():  # nothing can be drawn from it; the errors are as unknown as the output
        return [torch.full_like(output, torch.nan)]
    if fisher == "exact":
        return (root * _signs(root) for root in likelihood.roots(output))
    if fisher == "sampled":
        y = likelihood.sample(output)
    elif y is None:
        raise ValueError(
            'fisher="empirical" takes the data\'s targets: give y with the batch, step(x, y) or observe(x, y)'
        )
    elif not isinstance(y, Tensor):
        raise ValueError(f"targets must be a tensor, not {type(y).__name__}")
    else:
        likelihood.check_targets(output, y)
    leaf = output.detach().requires_grad_()
    return torch.autograd.grad(likelihood.total_nll(leaf, y), leaf)


def _signs(root: Tensor) -> Tensor:
    """±1 for each row of the batch, drawn anew for each root.

    They change nothing where rows are computed independently. Where they are not (BatchNorm in training, sequences
    flattened into rows), errors of different rows would meet with products that the model says are zero on average;
    with random signs they are.
    """
    bits = torch.randint(0, 2, root.shape[:1], device=root.device)
    return (2 * bits - 1).to(root.dtype).view(-1, *(1 for _ in root.shape[1:]))


def errors_of(output: Tensor, calls: Sequence[Call], roots: Iterable[Tensor]) -> Iterator[tuple[Call, Tensor]]:
    """δ of every call that the output depends on, root by root."""
    reached = [call for call in calls if call.a.requires_grad]
    if not reached:
        return
    if not output.requires_grad:
        raise ValueError("the model's output is detached from its layers: no error can be propagated back to them")
    for root in roots:
        deltas = torch.autograd.grad(output, [call.a for call in reached], root, retain_graph=True, allow_unused=True)
        yield from ((call, delta) for call, delta in zip(reached, deltas, strict=True) if delta is not None)


def rows_that_count(output: Tensor, calls: Sequence[Call], counted: Tensor) -> dict[Call, Tensor]:
    """Which rows of each call belong to targets that count, (rows,): padding, which only others depend on, does not.

    A row belongs to what errors come back to it from. Where none do, as behind a dead ReLU, its place decides: its own
    target, if rows are laid out as targets are, else its example's.
    """
    root = torch.randn_like(output)
    from_counted, from_others = (_reached(output, calls, of_targets(root, mask)) for mask in (counted, ~counted))
    grid = counted.view(output.shape[:-1]) if counted.numel() == output[..., 0].numel() else counted
    found = {}
    for call in calls:
        nowhere = counted.new_zeros(math.prod(call.lead))
        own, others = from_counted.get(call, nowhere), from_others.get(call, nowhere)
        # Which dimension is time is told by the layout that agrees best with the rows of which more is known.
        place = max(_places(call, grid), key=lambda place: int((place & own).sum() - (place & others & ~own).sum()))
        found[call] = own | (place & ~others)
    return found


def _reached(output: Tensor, calls: Sequence[Call], root: Tensor) -> dict[Call, Tensor]:
    """Which rows an error comes back to; one that cancels but for rounding does not count."""
    found = {}
    for call, delta in errors_of(output, calls, [root]):
        size = call.errors(delta).detach().flatten(1).norm(dim=1)
        found[call] = torch.gt(size, float(size.max()) * torch.finfo(size.dtype).eps ** 0.75)
    return found


def _places(call: Call, grid: Tensor) -> Iterator[Tensor]:
    """Of the rows of a call, which stand where a target that counts does, for each way they may be laid out."""
    rows = math.prod(call.lead)
    examples = grid.flatten(1).any(dim=1) if grid.ndim > 1 else grid
    if rows == grid.numel():
        yield grid.flatten()
        yield grid.T.flatten() if grid.ndim == 2 else grid.flatten()
    elif rows % len(examples) == 0 and len(examples) in call.lead[:2]:
        yield examples.repeat_interleave(rows // len(examples))
        yield examples.repeat(rows // len(examples))
    else:
        yield grid.new_ones(rows)


def of_targets(root: Tensor, counted: Tensor) -> Tensor:
    """A gradient at the output, of the targets that count alone."""
    return (root.reshape(len(counted), -1) * counted.view(-1, 1)).view_as(root)
