"""The rows z that a convolution multiplies its weight by: patches of its input, one for each output position.

a = W z + b at every position, where z is the patch (channels of a group × kernel positions) under the kernel. So a
convolution is a linear layer on rows of patches. The input is padded first: zeros at the border are part of z. A
transposed convolution, which is not covered, is a linear layer whose outputs are patches, added up where they overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    """Where a convolution's kernel lies on its input; `padding` is by zeros, as `F.pad` takes it."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Geometry:
        """From the arguments of `F.conv1d`, `F.conv2d`, `F.conv3d`."""
        n = len(kernel)
        dilation = _each(dilation, n)
        if padding == "same":
            totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        else:
            totals = [2 * number for number in _each(0 if isinstance(padding, str) else padding, n)]
        zeros: list[int] = []  # before and after, from the last dimension on
        for total in reversed(totals):
            zeros += [total // 2, (total + 1) // 2]  # if it is odd, torch puts the larger half at the end
        return cls(tuple(kernel), _each(stride, n), tuple(zeros), dilation, groups)


def geometry_of(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Geometry:
    """The geometry with which a module calls `F.conv`: padding other than by zeros is done before that call."""
    padding = module.padding if module.padding_mode == "zeros" else 0
    return Geometry.of(module.kernel_size, module.stride, padding, module.dilation, module.groups)


def patch_rows(z: Tensor, geometry: Geometry, most: int) -> Iterator[Tensor]:
    """The patches of z (N, C, *size) or (C, *size) as rows (rows, groups, C/groups · kernel positions), in chunks.

    Patches overlap, so all of them at once may take many times the memory of z. A chunk has `most` rows, or those of
    one line of an example. Features are in the order of the weight's entries.

    >>> next(patch_rows(torch.arange(4.0).view(1, 1, 4), Geometry.of([2]), most=100)).flatten(1).tolist()
    [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    """
    n = len(geometry.kernel)
    z = nn.functional.pad(z if z.ndim == n + 2 else z.unsqueeze(0), geometry.padding)
    z = z.reshape(len(z), geometry.groups, -1, *z.shape[2:])
    for dim, (k, s, d) in enumerate(zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)):
        z = z.unfold(3 + dim, d * (k - 1) + 1, s)[..., ::d]  # the kernel positions of this dimension come last
    patches = z.movedim((1, 2), (n + 1, n + 2))  # (N, *output positions, groups, C/groups, *kernel positions), a view
    positions = patches.shape[1 : n + 1]
    for part in torch.split(patches, max(1, most // positions.numel())):
        lines = len(part) * positions[1:].numel()
        for chunk in torch.split(part, max(1, most // lines), dim=1):  # a single example may be too large
            yield chunk.flatten(0, n).flatten(2)


def _each(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """One value for each dimension of the kernel."""
    return (value,) * n if isinstance(value, int) else tuple(value)
