"""The networks of `many_problems.py`; their weights are drawn from torch's own generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Maker = Callable[[int], nn.Module]  # of a normalisation, by its number of features


def mlp(
    sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, norm: Maker | None = None
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(inputs, outputs))
        if i < len(sizes) - 2:
            layers += [norm(outputs)] if norm else []
            layers.append(activation())
    return nn.Sequential(*layers)


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """All weights and biases times `factor`."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def dropout_mlp() -> nn.Sequential:
    first, second = (nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5)), (nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(*first, *second, nn.Linear(128, 10))


# Convolutions ---------------------------------------------------------------------------------------------------------


def convnet() -> nn.Sequential:
    convolutions = nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(400, 10))


def convnet_bn_dropout() -> nn.Sequential:
    first = nn.Conv2d(1, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Dropout(0.3), nn.Linear(400, 10))


def small_convnet() -> nn.Sequential:
    convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(288, 10))


class ConvBlock(nn.Module):
    def __init__(self, channels: int, norm: Maker) -> None:
        super().__init__()
        first = nn.Conv2d(channels, channels, 3, padding=1), norm(channels), nn.ReLU()
        self.inner = nn.Sequential(*first, nn.Conv2d(channels, channels, 3, padding=1), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def resnet(norm: Maker) -> nn.Sequential:
    first = nn.Conv2d(1, 12, 3, padding=1), norm(12), nn.ReLU()
    blocks = ConvBlock(12, norm), ConvBlock(12, norm)
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


# Blocks of linear layers ----------------------------------------------------------------------------------------------


class LinearBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = mlp([width, width, width])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def deep_residual() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 48), *(LinearBlock(48) for _ in range(25)), nn.Linear(48, 10))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = mlp([tokens, 32, tokens], nn.GELU), mlp([width, 64, width], nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.token_norm(x).mT).mT
        return x + self.channels(self.channel_norm(x))


class Mixer(nn.Module):
    """Of the sixteen 7×7 patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(49, 32)
        self.blocks = nn.Sequential(MixerBlock(16, 32), MixerBlock(16, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.view(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
        return self.head(self.norm(self.blocks(self.embed(patches))).mean(1))


class TwoHeads(nn.Module):
    """One of which is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp([64, 64, 64])
        self.head, self.unused = nn.Linear(64, 10), nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


class VAE(nn.Module):
    """`kl`: the divergence of the last batch's codes from the prior, a part of the loss."""

    kl: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp([784, 128, 16], nn.Tanh), mlp([8, 128, 784], nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        self.kl = -0.5 * (1 + log_variance - mean * mean - log_variance.exp()).sum(1).mean()
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())


# Sequences ------------------------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """A causal transformer of two layers; `tied`: the head's weight is the embedding's."""

    def __init__(self, tied: bool, words: int = 32, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.norm(self.blocks(self.embed(x) + self.positions, mask=mask, is_causal=True)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], words: int = 12, width: int = 24) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(words, 16), kind(16, width, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(x))[0][:, -1])


class Bag(nn.Module):
    """A perceptron on the mean of words' embeddings."""

    def __init__(self, words: int = 500) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 16), mlp([16, 32, 4])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(1))
