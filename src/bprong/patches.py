"""What a convolution multiplies its weight by: the patches of its input, one row for each output position.

a = W z + b at every position, z the patch (channels of a group × taps of the kernel) that the kernel lies on there. So
a convolution is a linear layer on rows of patches, and everything said of z and δ holds for it. Padding comes first:
the zeros at the border are part of z.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Geometry", "geometry_of", "patch_rows", "patches"]


@dataclass(frozen=True)
class Geometry:
    """Where a convolution's kernel lies on its input; `padding` is of zeros, (before, after) for each dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
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
        kernel = tuple(kernel)
        stride, dilation = _each(stride, kernel), _each(dilation, kernel)
        if padding == "same":  # of an odd total, torch puts the larger half at the end
            total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            both = tuple((t // 2, t - t // 2) for t in total)
        else:
            both = tuple((p, p) for p in _each(0 if isinstance(padding, str) else padding, kernel))
        return cls(kernel, stride, both, dilation, groups)

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        product = 1
        for k in self.kernel:
            product *= k
        return product


def patches(z: Tensor, geometry: Geometry) -> Tensor:
    """(N, C, *size) or (C, *size) → (N, positions, groups, C/groups · taps), ordered as the weight's own entries are.

    >>> import torch
    >>> patches(torch.arange(4.0).view(1, 1, 4), Geometry.of([2])).flatten(2).tolist()
    [[[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]]
    """
    windows = _windows(z, geometry)
    return windows.flatten(1, len(geometry.kernel)).flatten(3)


def patch_rows(z: Tensor, geometry: Geometry, most: int) -> Iterator[Tensor]:
    """The same as rows (rows, groups, C/groups · taps), in their order, some `most` numbers at a time.

    Patches overlap, so that all of them at once may take many times the memory of the image they are cut from.
    """
    windows, n = _windows(z, geometry), len(geometry.kernel)
    lines = windows.shape[1]
    each = windows[:1, :1].numel()
    examples = max(1, most // (each * lines))
    step = lines if examples > 1 else max(1, most // each)
    for example in range(0, len(windows), examples):
        for line in range(0, lines, step):
            part = windows[example : example + examples, line : line + step]
            yield part.flatten(0, n).flatten(2)


def _windows(z: Tensor, geometry: Geometry) -> Tensor:
    """(N, *positions, groups, C/groups, *taps): a view of the padded input."""
    n = len(geometry.kernel)
    if z.ndim == n + 1:
        z = z.unsqueeze(0)
    z = F.pad(z, [p for both in reversed(geometry.padding) for p in both])
    z = z.reshape(len(z), geometry.groups, -1, *z.shape[2:])
    for dim, (k, s, d) in enumerate(zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)):
        z = z.unfold(3 + dim, d * (k - 1) + 1, s)[..., ::d]  # the taps of this dimension come last
    return z.movedim((1, 2), (n + 1, n + 2))


def _each(value: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    return (value,) * len(kernel) if isinstance(value, int) else tuple(value)


def geometry_of(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Geometry:
    """Of a module as it calls `F.conv`: with another padding mode than zeros it pads its input before that."""
    padding = module.padding if module.padding_mode == "zeros" else 0
    return Geometry.of(module.kernel_size, module.stride, padding, module.dilation, module.groups)
