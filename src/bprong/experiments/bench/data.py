"""Data of the workloads, each in two splits: "tuning", on which settings are chosen, and "test".

MNIST is the only data that may have to be downloaded. Everything else is made, or comes with scikit-learn and Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bprong.experiments.bench.text import encoded, python_sources, windows
from bprong.experiments.data import load

Split = Literal["tuning", "test"]
SPLITS: tuple[Split, Split] = ("tuning", "test")
WINDOWS = 128  # of the validation text
SCALES = (0.03, 30.0)  # of the features of `badly_scaled`
NOISE = 0.1


class Data(NamedTuple):
    """Training rows, and validation rows."""

    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(x: Tensor, y: Tensor, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Full batches without end, shuffled in every epoch; the same for all methods of a seed."""
    random = generator(seed)
    while batch >= len(x):
        yield x, y
    while True:
        for chosen in torch.split(torch.randperm(len(x), generator=random), batch):
            if len(chosen) == batch:
                yield x[chosen], y[chosen]


@cache
def mnist(split: Split) -> Data:
    """20,000 images to train on and 2,000 to validate on; both splits are disjoint parts of MNIST's training images."""
    whole = load("mnist")
    first = 0 if split == "tuning" else 30_000
    x = whole.x_train[first : first + 22_000]
    y = whole.y_train[first : first + 22_000]
    return Data(x[:20_000], y[:20_000], x[20_000:], y[20_000:])


def mnist_autoencoding(split: Split) -> Data:
    """The same images as their own targets."""
    x, _, x_val, _ = mnist(split)
    return Data(x, x, x_val, x_val)


@cache
def digits(split: Split) -> Data:
    """scikit-learn's 1,797 digits of 8×8 pixels, 1,437 of them to train on; each split divides them anew."""
    whole = load("digits")
    x = torch.cat([whole.x_train, whole.x_test])
    y = torch.cat([whole.y_train, whole.y_test])
    order = torch.randperm(len(x), generator=generator(SPLITS.index(split)))
    x = x[order]
    y = y[order]
    return Data(x[:1437], y[:1437], x[1437:], y[1437:])


def digit_images(split: Split) -> Data:
    """The digits as images with one channel."""
    x, y, x_val, y_val = digits(split)
    return Data(x.view(-1, 1, 8, 8), y, x_val.view(-1, 1, 8, 8), y_val)


@cache
def python_text(split: Split) -> Data:
    """Characters of Python's standard library: every second file is in the other split, every tenth validates."""
    files = python_sources()[SPLITS.index(split) :: 2]
    x, y = windows(torch.cat([encoded(path) for i, path in enumerate(files) if i % 10 != 9]))
    x_val, y_val = windows(torch.cat([encoded(path) for path in files[9::10]]))
    places = torch.linspace(0, len(x_val) - 1, WINDOWS).long()
    return Data(x, y, x_val[places], y_val[places])


def poisson_solution(x: Tensor) -> Tensor:
    """u(x₁, x₂) (rows × 1), zero on the border of the unit square: two waves of different frequency."""
    first, second = x.unbind(-1)
    low = torch.sin(math.pi * first) * torch.sin(math.pi * second)
    high = torch.sin(3 * math.pi * first) * torch.sin(2 * math.pi * second)
    return (low + 0.5 * high)[:, None]


def poisson_source(x: Tensor) -> Tensor:
    """f = Δu of `poisson_solution`, divided by its greatest coefficient 2π² · 13/4."""
    first, second = x.unbind(-1)
    low = -2 * math.pi**2 * torch.sin(math.pi * first) * torch.sin(math.pi * second)
    high = -13 * math.pi**2 * torch.sin(3 * math.pi * first) * torch.sin(2 * math.pi * second)
    return (low + 0.5 * high)[:, None] / POISSON_SCALE


POISSON_SCALE = 6.5 * math.pi**2


@cache
def collocation(split: Split) -> Data:
    """3,000 random points of the unit square with f; 900 points of a grid with u, which is not used in training."""
    x = torch.rand(3000, 2, generator=generator(100 + SPLITS.index(split)))
    side = (torch.arange(30) + 0.5) / 30
    x_val = torch.cartesian_prod(side, side)
    return Data(x, poisson_source(x), x_val, poisson_solution(x_val))


@cache
def badly_scaled(split: Split) -> Data:
    """20 features with scales from 0.03 to 30; the target is a smooth function of the standardised features.

    The function is the same in both splits; rows and noise are drawn anew. 20,000 rows to train on, 1,000 to validate.
    """
    weights = torch.randn(3, 20, generator=generator(0)) / math.sqrt(20)
    random = generator(200 + SPLITS.index(split))
    z = torch.randn(21_000, 20, generator=random)
    a, b, c = (z @ weights.T * 1.5).unbind(1)
    y = (a + torch.sin(2 * b) + b * c)[:, None] + NOISE * torch.randn(21_000, 1, generator=random)
    x = z * torch.logspace(math.log10(SCALES[0]), math.log10(SCALES[1]), 20)
    return Data(x[:20_000], y[:20_000], x[20_000:], y[20_000:])
