"""Which rows of a call count: not those of targets that the loss ignores, and not the padding of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bprong.capture.calls import Call
from bprong.linalg.moments import at_least_float32


def nonzero_rows(call: Call, delta: Tensor) -> Tensor:
    """Return a mask (rows,) of the rows with an error; errors that cancel up to rounding do not count."""
    rows = call.errors(delta).detach()
    size = rows.to(at_least_float32(rows.dtype)).norm(dim=1)
    return torch.gt(size, float(size.max()) * torch.finfo(size.dtype).eps ** 0.75)


def counted_rows(
    calls: Sequence[Call],
    reached: Mapping[Call, Tensor],
    counted: Tensor | None,
    targets: torch.Size,
    masks: Iterable[Tensor],
) -> dict[Call, Tensor]:
    """Return masks (rows,) of the rows that count, of the calls in which some do not.

    A row belongs to the targets whose errors reach it. If none do, as behind a dead ReLU, its place decides: it
    belongs to the target at the same place, if rows are laid out as targets are, and otherwise to those of its
    example.

    reached:  the rows that errors of targets that count came back to
    counted:  which targets count; None: all
    targets:  the shape (examples, …) that they have at the output
    masks:    tensors that may be masks of positions, or lengths of sequences
    """
    rows = {}
    if counted is not None:
        examples = targets[0] if targets and counted.numel() == targets.numel() else counted.numel()
        for call in calls:
            rows_reached = reached.get(call, counted.new_zeros(call.rows))
            rows[call] = rows_reached | _placed(call, counted.view(examples, -1), rows_reached)
    used: dict[torch.Size, Tensor] = {}
    for call, rows_reached in reached.items():
        if call.positions is not None:
            used[call.positions] = rows_reached | used.get(call.positions, False)
    padding = _padding(masks, used) if used else {}
    for call in calls:
        if call.positions in padding:
            rows[call] = ~padding[call.positions] & rows.get(call, True)
    return rows


def _placed(call: Call, targets: Tensor, reached: Tensor) -> Tensor:
    """Return a mask (rows,) of the rows at the place of a target that counts.

    targets: (examples, positions) which count; reached: (rows,) those that errors came back to
    """
    each = len(reached) // len(targets)
    if each != targets.shape[1] and len(targets) in call.shape[: call.feature_dim][:2]:
        targets = targets.any(dim=1, keepdim=True).expand(-1, each)  # those of whole examples
    if targets.numel() != len(reached):
        return reached
    # Batch-first or time-first? Take the layout that agrees with most of the rows that errors came back to.
    layouts = (targets.flatten(), targets.T.flatten())
    return max(layouts, key=lambda layout: int((layout & reached).sum()))


def _padding(masks: Iterable[Tensor], used: Mapping[torch.Size, Tensor]) -> dict[torch.Size, Tensor]:
    """Return which positions of sequences are padding, (rows,), by the shape of the positions.

    A mask of positions tells it: one that the model or its attention is given, as lengths or position by position, or
    that of an embedding with a `padding_idx`. Errors tell which of its two values stands for padding: in no layer do
    they come back to any position that has it. Errors alone cannot tell, because none come back to a position that
    loses a maximum either.

    used: the positions that errors came back to
    """
    padding: dict[torch.Size, Tensor] = {}
    for values in masks:
        for marked in _marked(values, used):
            for mask in (marked, marked.T):  # batch-first, or time-first
                if mask.shape in used:
                    positions = mask.flatten().to(used[mask.shape].device)
                    if not bool((positions & used[mask.shape]).any()):
                        padding[mask.shape] = positions | padding.get(mask.shape, False)
    return padding


def _marked(values: Tensor, shapes: Iterable[torch.Size]) -> list[Tensor]:
    """Return the positions (B, T) that a mask may mean, or that are beyond lengths of sequences (B,).

    Of attention's mask (B, …, queries, keys): the keys that any query looks at, or that none does.
    """
    if values.ndim == 1:
        longest = {size for shape in shapes for size in shape}
        return [torch.arange(length, device=values.device) >= values.unsqueeze(1) for length in longest]
    if values.numel() == 0:
        return []
    low, high = values.aminmax()
    mask = values == high
    if not bool((mask ^ (values == low)).all()):  # it does not have two values
        return []
    mask = mask if values.ndim == 2 else mask.flatten(1, -2).any(dim=1)
    return [mask, ~mask]
