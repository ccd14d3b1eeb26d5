"""Networks of the workloads: perceptrons, thirty layers, convolutions, transformers, a physics-informed network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.experiments.bench.data import POISSON_SCALE, generator
from bprong.experiments.bench.text import LENGTH, SYMBOLS
from bprong.experiments.models import digits_convnet, perceptron

Normalisation = Callable[[int], nn.Module]  # makes a normalisation layer for a number of features
DEEP = [64] * 30 + [10]  # thirty linear layers
AUTOENCODER = [784, 200, 100, 50, 12, 50, 100, 200, 784]
POISSON = [2, 48, 48, 48, 1]


def mlp(
    sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, norm: Normalisation | None = None
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(inputs, outputs))
        if i < len(sizes) - 2:
            layers += [norm(outputs)] if norm else []
            layers.append(activation())
    return nn.Sequential(*layers)


def deep_tanh(seed: int) -> nn.Sequential:
    """Thirty layers without normalisation or skip connections, tanh, initialised as by Xavier."""
    return _initialised(perceptron(DEEP, "tanh", seed), nn.init.xavier_normal_, seed)


def deep_relu(seed: int) -> nn.Sequential:
    """The same with ReLU, initialised as by He."""

    def he(weight: Tensor, generator: torch.Generator) -> Tensor:
        return nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)

    return _initialised(perceptron(DEEP, "relu", seed), he, seed)


def _initialised(network: nn.Sequential, draw_: Callable[..., Tensor], seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    for layer in network:
        if isinstance(layer, nn.Linear):
            draw_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
    return network


class Residual(nn.Module):
    """x + inner(x), followed by an activation."""

    def __init__(self, inner: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.activation(x + self.inner(x))
        return output


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class VisionTransformer(nn.Module):
    """Two blocks on the sixteen 2×2 patches of a digit image and a class token, which the head reads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(17, width) * 0.02)
        self.blocks = nn.Sequential(*(self._branch(i % 2 == 0, width) for i in range(4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _branch(attends: bool, width: int) -> nn.Module:
        inner = Attention(width, 4) if attends else mlp([width, 2 * width, width], nn.GELU)
        return Residual(nn.Sequential(nn.LayerNorm(width), inner), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        patches = x.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.embed(patches)], 1)
        logits: Tensor = self.head(self.norm(self.blocks(tokens + self.positions)[:, 0]))
        return logits


class CausalAttention(nn.Module):
    """Attention to what came before, with a linear layer each for queries, keys, values and the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """Attention and a perceptron, each normalised before it and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class CharacterGPT(nn.Module):
    """A causal transformer of characters: learned positions, normalisation first, a head of its own."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.positions(places))))
        return logits


def character_gpt(seed: int, width: int = 96, depth: int = 3, heads: int = 4) -> CharacterGPT:
    """Weights are drawn with standard deviation 0.02, biases are 0."""
    model = CharacterGPT(width, depth, heads)
    random = generator(100 + seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=random)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def autoencoder(seed: int) -> nn.Sequential:
    """tanh after every layer except the code and the output, initialised as by Xavier.

    With torch's default initialisation Adam stays at the mean image for hundreds of steps.
    """
    return without_activation_of_code(_initialised(perceptron(AUTOENCODER, "tanh", seed), nn.init.xavier_normal_, seed))


def without_activation_of_code(network: nn.Sequential) -> nn.Sequential:
    """A perceptron without the activation after its narrowest layer."""
    widths = [module.out_features if isinstance(module, nn.Linear) else math.inf for module in network]
    code = widths.index(min(widths))
    return nn.Sequential(*(module for i, module in enumerate(network) if i != code + 1))


def digits_convnet_bn(seed: int) -> nn.Sequential:
    """`digits_convnet` with Batch Normalisation between each convolution and its activation."""
    modules: list[nn.Module] = []
    for module in digits_convnet(seed):
        modules.append(module)
        if isinstance(module, nn.Conv2d):
            modules.append(nn.BatchNorm2d(module.out_channels))
    return nn.Sequential(*modules)


def vision_transformer(seed: int) -> VisionTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VisionTransformer()


class PoissonNetwork(nn.Module):
    """A network n with tanh gives u = b n on the unit square, b = 16 x₁(1−x₁)x₂(1−x₂); returns Δu / scale.

    Values, both first derivatives and the Laplacian go through the layers together, as four rows a point ("forward
    Laplacian"), so that a step needs no derivative of a derivative. Layers have no bias: their inputs have one more
    coordinate, which is 1 for values and 0 for derivatives.
    """

    def __init__(self, widths: Sequence[int], scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m + 1, n, bias=False) for m, n in pairwise(widths))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        value, first, second, laplacian = self._jet(x).unbind(1)
        (b, db, ddb) = border_factor(x)
        gradients = torch.cat([first, second], 1)
        total = b * laplacian + 2 * (db * gradients).sum(1, keepdim=True) + ddb * value
        return total / self.scale

    def solution(self, x: Tensor) -> Tensor:
        """u (rows × 1)."""
        return border_factor(x)[0] * self._jet(x)[:, 0]

    def _jet(self, x: Tensor) -> Tensor:
        """n, ∂n/∂x₁, ∂n/∂x₂ and Δn (points × 4 × 1)."""
        unit = torch.eye(2).expand(len(x), 2, 2)
        jet = torch.cat([2 * x[:, None] - 1, 2 * unit, torch.zeros(len(x), 1, 2)], 1)
        one = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 4, 1).expand(len(x), 4, 1)
        for i, layer in enumerate(self.layers):
            jet = layer(torch.cat([jet, one], 2))
            jet = _tanh(jet) if i < len(self.layers) - 1 else jet
        return jet


def _tanh(jet: Tensor) -> Tensor:
    """tanh of a jet of value, derivatives and Laplacian (points × 4 × width)."""
    value = torch.tanh(jet[:, :1])
    slope = 1 - value * value
    first = slope * jet[:, 1:3]
    laplacian = slope * jet[:, 3:] - 2 * value * slope * jet[:, 1:3].square().sum(1, keepdim=True)
    return torch.cat([value, first, laplacian], 1)


def border_factor(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """b = 16 x₁(1−x₁)x₂(1−x₂), its gradient and its Laplacian: rows × 1, rows × 2, rows × 1."""
    p = 4 * x * (1 - x)
    dp = 4 - 8 * x
    b = p[:, :1] * p[:, 1:]
    return b, dp * p.flip(1), -8 * p.sum(1, keepdim=True)


def poisson_network(seed: int) -> PoissonNetwork:
    """2-48-48-48-1, initialised as by Xavier, with biases zero."""
    model = PoissonNetwork(POISSON, POISSON_SCALE)
    random = generator(300 + seed)
    for layer in model.layers:
        assert isinstance(layer, nn.Linear)
        nn.init.xavier_normal_(layer.weight, generator=random)
        nn.init.zeros_(layer.weight[:, -1])
    return model
