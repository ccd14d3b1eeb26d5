"""The networks of the problems. Some take a seed for their weights; the others draw from torch's generator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.experiments.bench.networks import Normalisation, Residual, deep_relu, deep_tanh, mlp  # noqa: F401
from bprong.experiments.models import digits_convnet, perceptron, sequence_transformer, with_batch_norm  # noqa: F401

PAPER = [784, 100, 100, 100, 10]
AUTOENCODER = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
# Networks of a seed ---------------------------------------------------------------------------------------------------


def paper_network(seed: int) -> nn.Sequential:
    return perceptron(PAPER, "relu", seed)


def autoencoder(seed: int) -> nn.Sequential:
    """tanh after every layer except the code and the output."""
    plain = perceptron(AUTOENCODER, "tanh", seed)
    code = 2 * (AUTOENCODER.index(30) - 1)
    return nn.Sequential(*(module for i, module in enumerate(plain) if i != code + 1))


# Perceptrons ----------------------------------------------------------------------------------------------------------


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """All weights and biases times `factor`."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def dropout_mlp() -> nn.Sequential:
    first = nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5)
    second = nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5)
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


def resnet(norm: Normalisation) -> nn.Sequential:
    def convolution(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 12, 3, padding=1), norm(12)]

    def block() -> nn.Module:
        return Residual(nn.Sequential(*convolution(12), nn.ReLU(), *convolution(12)), nn.ReLU())

    head = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*convolution(1), nn.ReLU(), block(), block(), *head, nn.Linear(12, 10))


# Blocks of linear layers ----------------------------------------------------------------------------------------------


def deep_residual() -> nn.Sequential:
    blocks = (Residual(mlp([48, 48, 48]), nn.Identity()) for _ in range(25))
    return nn.Sequential(nn.Linear(64, 48), *blocks, nn.Linear(48, 10))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(width)
        self.channel_norm = nn.LayerNorm(width)
        self.tokens = mlp([tokens, 32, tokens], nn.GELU)
        self.channels = mlp([width, 64, width], nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.token_norm(x).mT).mT
        return x + self.channels(self.channel_norm(x))


class Mixer(nn.Module):
    """An MLP-Mixer of the sixteen 7×7 patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(49, 32)
        self.blocks = nn.Sequential(MixerBlock(16, 32), MixerBlock(16, 32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.view(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
        return self.head(self.norm(self.blocks(self.embed(patches))).mean(1))


class TwoHeads(nn.Module):
    """A network with two heads, one of which is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp([64, 64, 64])
        self.head = nn.Linear(64, 10)
        self.unused = nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


class VAE(nn.Module):
    """A variational autoencoder. `kl`, a part of the loss, is the divergence of the last codes from the prior."""

    kl: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp([784, 128, 16], nn.Tanh)
        self.decoder = mlp([8, 128, 784], nn.Tanh)

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
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.norm(self.blocks(self.embed(x) + self.positions, mask=mask, is_causal=True)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], words: int = 12, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 16)
        self.cell = kind(16, width, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(x))[0][:, -1])


class Bag(nn.Module):
    """A perceptron of the mean embedding of the words."""

    def __init__(self, words: int = 500) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 16)
        self.head = mlp([16, 32, 4])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(1))
