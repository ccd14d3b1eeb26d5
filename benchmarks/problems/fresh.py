"""Ten further small problems, for the default: that of `unseen.py` were run before races and units of features.

Keep them as they are, too: run them once a rule is final, and change no constant because of the result.
"""

from __future__ import annotations

import math
from functools import cache, partial

import torch
import torch.nn.functional as F
from problems import Data, Problem
from problems.data import all_digits, generator
from problems.losses import BITS, SQUARES, sequence_cross_entropy
from problems.networks import mlp
from problems.sixty import small
from torch import Tensor, nn

# Data -----------------------------------------------------------------------------------------------------------------


@cache
def hidden_words(count: int = 1000, length: int = 16, words: int = 24) -> Data:
    """Periodic texts in which a fifth of the words is replaced by word 0; the targets are the hidden words."""
    random = generator(31)
    start, step = (torch.randint(1, words, (count, 1), generator=random) for _ in range(2))
    text = 1 + (start + step * torch.arange(length)) % (words - 1)
    hidden = torch.rand(count, length, generator=random) < 0.2
    return Data(text.masked_fill(hidden, 0), text.masked_fill(~hidden, -100))


@cache
def sets(count: int = 2000, size: int = 12) -> Data:
    """Sets of points in the plane; the targets are the mean distance from their centre, and the largest one."""
    x = torch.randn(count, size, 2, generator=generator(32))
    distances = (x - x.mean(1, keepdim=True)).norm(dim=-1)
    return Data(x, torch.stack([distances.mean(1), distances.amax(1)], 1))


@cache
def halves() -> Data:
    """Digit images at half of their resolution; the target is the image."""
    images = all_digits().x.view(-1, 1, 8, 8)
    return Data(F.avg_pool2d(images, 2), images.flatten(1))


@cache
def series(count: int = 3000, past: int = 48, future: int = 12) -> Data:
    """Sums of two waves and noise, of very different levels; the target is what comes next."""
    random = generator(33)
    t = torch.arange(past + future) / past
    waves = torch.zeros(count, past + future)
    for periods in (3.0, 11.0):
        phase, speed = torch.rand(2, count, 1, generator=random)
        waves += torch.sin(2 * math.pi * (periods * (0.9 + 0.2 * speed) * t + phase))
    level = 20 * torch.randn(count, 1, generator=random)
    values = level + waves + 0.1 * torch.randn(waves.shape, generator=random)
    return Data(values[:, :past], values[:, past:] - level)


@cache
def counts(count: int = 3000, words: int = 300) -> Data:
    """Counts of words, most of them zero; the targets are eight topics that a text may have."""
    random = generator(34)
    topics = torch.rand(count, 8, generator=random) < 0.25
    rates = 0.05 + 0.6 * (torch.rand(8, words, generator=random) < 0.06)
    return Data(torch.poisson(topics.float() @ rates + 0.02, generator=random), topics.float())


@cache
def expert(count: int = 3000) -> Data:
    """States of a pole on a cart; the target is what a controller does that sees them through noise."""
    random = generator(35)
    state = torch.randn(count, 4, generator=random) * torch.tensor([2.0, 1.0, 0.1, 0.5])
    force = state @ torch.tensor([0.3, 0.5, 12.0, 2.0]) + 0.5 * torch.randn(count, generator=random)
    return Data(state, torch.bucketize(force, torch.tensor([-1.5, -0.5, 0.5, 1.5])))


@cache
def spiral(count: int = 2000) -> Data:
    """Points and where a flow has taken them after one unit of time."""
    x = torch.rand(count, 2, generator=generator(36)) * 4 - 2
    y = x
    for _ in range(100):
        y = y + 0.01 * (y**3 @ torch.tensor([[-0.1, -2.0], [2.0, -0.1]]))
    return Data(x, y)


@cache
def mixed_table(count: int = 3000) -> Data:
    """A price by three numbers in their own units and a category of twelve, which is a number from 0 to 11."""
    random = generator(37)
    area = 40 * torch.randn(count, generator=random).exp()
    year = torch.randint(1900, 2024, (count,), generator=random).float()
    distance = 5000 * torch.rand(count, generator=random)
    place = torch.randint(12, (count,), generator=random)
    worth = torch.randn(12, generator=random)[place]
    price = area.log() + 0.01 * (year - 1960) - distance / 4000 + worth + 0.1 * torch.randn(count, generator=random)
    return Data(torch.stack([area, year, distance, place.float()], 1), price[:, None])


@cache
def patterns(count: int = 3000) -> Data:
    """Audio-like waves of 256 samples; the class is the order of three short tones."""
    random = generator(38)
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
    y = torch.randint(6, (count,), generator=random)
    tone = torch.tensor([0.05, 0.11, 0.23])[orders[y]].repeat_interleave(64, dim=1)
    wave = torch.sin(2 * math.pi * tone.cumsum(1))
    x = F.pad(wave, (32, 32)) + 0.5 * torch.randn(count, 256, generator=random)
    return Data(x[:, None], y)


# Networks -------------------------------------------------------------------------------------------------------------


class MaskedLanguageModel(nn.Module):
    """One block of attention without a mask, pre-normalised."""

    def __init__(self, words: int = 24, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x) + self.place))


class DeepSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = mlp([2, 64, 64])
        self.together = mlp([128, 64, 2])

    def forward(self, x: Tensor) -> Tensor:
        z = self.each(x)
        return self.together(torch.cat([z.mean(1), z.amax(1)], -1))


class Flow(nn.Module):
    """Twenty Euler steps of one vector field, so that each of its weights is used twenty times."""

    def __init__(self) -> None:
        super().__init__()
        self.field = mlp([2, 50, 50, 2], nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + self.field(x) / 20
        return x


class Table(nn.Module):
    """Numbers as they are, and an embedding of the category."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(12, 4)
        self.layers = mlp([7, 64, 64, 1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.cat([x[:, :3], self.place(x[:, 3].long())], 1))


class NormalisedResidual(nn.Module):
    """Sixteen narrow blocks with layer normalisation."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(16))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def upsampler() -> nn.Sequential:
    layers = nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(24, 4, 3, padding=1), nn.PixelShuffle(2), nn.Flatten())


def listener() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 12), (12, 16), (16, 24)):
        layers += [nn.Conv1d(inputs, outputs, 9, stride=4, padding=4), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 6))


# Problems -------------------------------------------------------------------------------------------------------------

FRESH: dict[str, Problem] = {
    "masked-words": small(
        "masked language model", MaskedLanguageModel, hidden_words, 64, 300, loss=sequence_cross_entropy
    ),
    "sets": small("sets of points, mean and maximum", DeepSet, sets, 64, 300, **SQUARES),
    "super-resolution": small("images at twice the resolution", upsampler, halves, 64, 300, **SQUARES),
    "forecast": small("time series at different levels", partial(mlp, [48, 96, 96, 12]), series, 128, 300, **SQUARES),
    "topics": small("counts of words, several labels", partial(mlp, [300, 64, 8]), counts, 64, 200, **BITS),
    "imitation": small("a controller's five actions", partial(mlp, [4, 64, 64, 5], nn.Tanh), expert, 64, 300),
    "flow": small("an integrated vector field", Flow, spiral, 64, 300, **SQUARES),
    "mixed-table": small("raw numbers and an embedding", Table, mixed_table, 64, 300, **SQUARES),
    "residual-layernorm": small("sixteen blocks, layer normalisation", NormalisedResidual, all_digits, 64, 300),
    "tones": small("strided convolutions on a wave, Batch Normalisation", listener, patterns, 64, 200),
}
