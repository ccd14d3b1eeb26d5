"""Ten small problems that no constant of lr="auto" was chosen on. Each stands for a class of uses that the sixty lack.

Keep them unseen: train them with lr="auto" only once its rule is final, and change no constant because of the result.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from problems import Data, Problem
from problems.data import all_digits, generator
from problems.losses import BITS, SQUARES, sequence_cross_entropy
from problems.networks import Residual, mlp
from problems.sixty import small
from torch import Tensor, nn

from bprong.experiments.bench.networks import VisionTransformer

IGNORED = -100  # the target that torch's cross-entropy leaves out
NODES = 1000
USERS = 200
ITEMS = 100
LEAST_DISTILLED = 0.3586  # the mean entropy of the teacher's probabilities

# Images ---------------------------------------------------------------------------------------------------------------


@cache
def noisy_digits(copies: int = 2, noise: float = 0.4) -> Data:
    """Digit images with normal noise on every pixel; the target is the image without noise."""
    clean = all_digits().x.repeat(copies, 1)
    return Data((clean + noise * torch.randn(clean.shape, generator=generator(21))).view(-1, 1, 8, 8), clean)


@cache
def shapes(count: int = 400, size: int = 16) -> Data:
    """Noisy images of a square, a disc and a cross, equally bright; a pixel's class is its topmost shape, or 0."""
    random = generator(22)
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1)
    y = torch.zeros(count, size, size, dtype=torch.long)
    for shape in (1, 2, 3):
        centres = torch.randint(3, size - 3, (count, 1, 1, 2), generator=random)
        near, far = (grid - centres).abs().sort(-1).values.unbind(-1)
        inside = {1: far <= 2, 2: near**2 + far**2 <= 8, 3: (near == 0) & (far <= 3)}[shape]
        y[inside] = shape
    return Data((y > 0).float()[:, None] + 0.5 * torch.randn(count, 1, size, size, generator=random), y)


@cache
def digit_pairs(count: int = 4000) -> Data:
    """Pairs of digit images; the target is 1 for two images of the same digit, which is about half of the pairs."""
    x, y, *_ = all_digits()
    random = generator(23)
    first = torch.randint(len(x), (count,), generator=random)
    second = torch.randint(len(x), (count,), generator=random)
    equal = torch.multinomial((y[first, None] == y).float(), 1, generator=random)[:, 0]
    second = second.where(torch.rand(count, generator=random) < 0.5, equal)
    return Data(torch.stack([x[first], x[second]], 1), (y[first] == y[second]).float()[:, None])


@cache
def turned_digits() -> Data:
    """Every digit image twice, turned by a random number of quarter turns."""
    images = all_digits().x.view(-1, 8, 8).repeat(2, 1, 1)
    turned = torch.stack([images.rot90(turns, (1, 2)) for turns in range(4)])
    turns = torch.randint(4, (len(images),), generator=generator(24))
    return Data(turned[turns, torch.arange(len(images))].flatten(1), all_digits().y.repeat(2))


@cache
def teacher() -> Tensor:
    """Class probabilities of every digit: the classes of all other digits, weighted by a Gaussian of the distance."""
    x, y, *_ = all_digits()
    similarity = -(torch.cdist(x, x) ** 2) / 0.7
    return similarity.fill_diagonal_(-math.inf).softmax(1) @ F.one_hot(y, 10).float()


def numbered_digits() -> Data:
    """Digits whose target is their row in `teacher()`, since the harness compares targets with predicted classes.

    The accuracy it computes from them has no meaning.
    """
    return Data(all_digits().x, torch.arange(len(all_digits().x)))


def distillation(logits: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(logits, teacher()[rows])


def denoiser() -> nn.Sequential:
    """A code of 32 numbers, by strided convolutions, and transposed convolutions back to 64 pixels."""
    encoder = nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1), nn.ReLU()
    decoder = nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
    return nn.Sequential(*encoder, *decoder, nn.Flatten())


class UNet(nn.Module):
    """A class per pixel, from features at full and at half resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = self._stage(1, 8)
        self.coarse = nn.Sequential(nn.MaxPool2d(2), self._stage(8, 16), self._stage(16, 16), nn.Upsample(None, 2))
        self.joint = self._stage(24, 8)
        self.head = nn.Conv2d(8, 4, 1)

    @staticmethod
    def _stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.head(self.joint(torch.cat([fine, self.coarse(fine)], 1))).movedim(1, -1)


class Siamese(nn.Module):
    """Compares two images by one embedding, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = mlp([64, 128, 128, 16])
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.unbind(1)
        return self.head((self.embed(first) - self.embed(second)).abs())


class Experts(nn.Module):
    """The mean output of four perceptrons, weighted by the softmax of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(mlp([64, 32, 10]) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * self.gate(x).softmax(-1)[:, None]).sum(-1)


# Graphs, ratings, sequences and functions -----------------------------------------------------------------------------


@cache
def graph() -> tuple[Tensor, Data]:
    """The normalised adjacency matrix of a graph, and its nodes: 40 words each, and one of six classes.

    Nodes of a class are more often neighbours and have more words in common. Half of them are labelled.
    """
    random = generator(25)
    y = torch.randint(6, (NODES,), generator=random)
    chances = torch.full((NODES, NODES), 0.003).masked_fill(y[:, None] == y, 0.012)
    upper = (torch.rand(NODES, NODES, generator=random) < chances).float().triu(1)
    edges = upper + upper.T + torch.eye(NODES)
    degrees = edges.sum(0)
    common = 0.03 + 0.06 * (torch.rand(6, 40, generator=random) < 0.2)
    words = (torch.rand(NODES, 40, generator=random) < common[y]).float()
    labelled = torch.rand(NODES, generator=random) < 0.5
    return edges / (degrees[:, None] * degrees).sqrt(), Data(words, y.where(labelled, IGNORED))


def nodes() -> Data:
    return graph()[1]


@cache
def ratings(count: int = 6000) -> Data:
    """A user and an item a row; the target is a rating from 1 to 5: a mean, a bilinear part and noise, rounded."""
    random = generator(26)
    user = torch.randint(USERS, (count,), generator=random)
    item = torch.randint(ITEMS, (count,), generator=random)
    tastes = torch.randn(USERS, 4, generator=random)
    kinds = torch.randn(ITEMS, 4, generator=random)
    score = 3.5 + 0.5 * (tastes[user] * kinds[item]).sum(1) + 0.3 * torch.randn(count, generator=random)
    return Data(torch.stack([user, item], 1), score.round().clamp(1, 5)[:, None])


@cache
def tagged(count: int = 1000, length: int = 32) -> Data:
    """Words of a hidden Markov chain; the targets are its states. Sequences of 12 or more words, padded with word 0."""
    random = generator(27)
    moves = torch.softmax(2 * torch.randn(5, 5, generator=random) + 2 * torch.eye(5), 1)
    emits = torch.softmax(1.5 * torch.randn(5, 20, generator=random), 1)
    y = torch.randint(5, (count, length), generator=random)
    for t in range(1, length):
        y[:, t] = torch.multinomial(moves[y[:, t - 1]], 1, generator=random)[:, 0]
    x = 1 + torch.multinomial(emits[y.flatten()], 1, generator=random).view(count, length)
    padding = torch.arange(length) >= torch.randint(12, length + 1, (count, 1), generator=random)
    return Data(x.masked_fill(padding, 0), y.masked_fill(padding, IGNORED))


@cache
def string(count: int = 3000) -> Data:
    """The deflection of a vibrating string at a place and a time, both from −1 to 1: four damped harmonics."""
    x = 2 * torch.rand(count, 2, generator=generator(28)) - 1
    place, time = ((x + 1) / 2).split(1, 1)
    harmonics = torch.tensor([1.0, 2.0, 3.0, 5.0])
    swing = torch.cos(2 * math.pi * harmonics * time) * torch.exp(-0.3 * harmonics * time)
    return Data(x, (torch.sin(math.pi * harmonics * place) * swing / harmonics.sqrt()).sum(1, keepdim=True))


class GraphConvolutions(nn.Module):
    """Two layers, each followed by an average over the neighbours of every node."""

    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", graph()[0])
        self.hidden = nn.Linear(40, 16)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.adjacency @ self.head(F.relu(self.adjacency @ self.hidden(x)))


class TwoTowers(nn.Module):
    """The inner product of what one network makes of the user and another one of the item."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(USERS, 16), mlp([16, 32, 8]))
        self.item = nn.Sequential(nn.Embedding(ITEMS, 16), mlp([16, 32, 8]))
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        user, item = x.unbind(1)
        return (self.user(user) * self.item(item)).sum(1, keepdim=True) + self.mean


class Tagger(nn.Module):
    """Residual convolutions along the sequence, their taps 1, 2 and 4 words apart."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, width, padding_idx=0)
        self.blocks = nn.Sequential(*(self._block(width, dilation) for dilation in (1, 2, 4)))
        self.head = nn.Linear(width, 5)

    @staticmethod
    def _block(width: int, dilation: int) -> nn.Module:
        convolution = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        return Residual(nn.Sequential(convolution, nn.ReLU(), nn.Conv1d(width, width, 1)), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x).mT).mT)


class Sine(nn.Module):
    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * x)


def siren(frequency: float = 5.0) -> nn.Sequential:
    """A perceptron with sines, initialised as by Sitzmann et al. (2020), for whom the frequency is 30."""
    network = mlp([2, 64, 64, 64, 1], lambda: Sine(frequency))
    for i, layer in enumerate(module for module in network if isinstance(module, nn.Linear)):
        inputs = layer.in_features
        bound = math.sqrt(6 / inputs) / frequency if i else 1 / inputs
        nn.init.uniform_(layer.weight, -bound, bound)
    return network


# Problems -------------------------------------------------------------------------------------------------------------

UNSEEN: dict[str, Problem] = {
    "vision-transformer": small("patches, attention and a class token", VisionTransformer, all_digits, 64, 200),
    "graph-convolutions": small(
        "nodes of one graph, half of them labelled, full batch", GraphConvolutions, nodes, NODES, 250
    ),
    "two-towers": small("recommender: ratings by two embeddings", TwoTowers, ratings, 128, 400, **SQUARES),
    "temporal-tagger": small(
        "dilated convolutions, a tag for every word, padding", Tagger, tagged, 32, 250, loss=sequence_cross_entropy
    ),
    "denoiser": small("denoising autoencoder, transposed convolutions", denoiser, noisy_digits, 64, 300, **SQUARES),
    "segmentation": small(
        "U-Net with Batch Normalisation, a class for every pixel", UNet, shapes, 32, 150, loss=sequence_cross_entropy
    ),
    "siamese": small("one network for both images of a pair", Siamese, digit_pairs, 64, 400, **BITS),
    "soft-experts": small("mixture of four experts, softly gated", Experts, turned_digits, 64, 400),
    "siren": small("sine activations, a vibrating string", siren, string, 128, 400, **SQUARES),
    "distillation": small(
        "a teacher's probabilities as targets", lambda: mlp([64, 96, 96, 10], nn.GELU), numbered_digits, 64, 400,
        loss=distillation, floor=LEAST_DISTILLED
    ),
}  # fmt: skip
