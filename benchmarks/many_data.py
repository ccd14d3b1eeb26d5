"""The data of `many_problems.py`: made, scikit-learn's, or MNIST's first images; the same for every seed of a run."""

from __future__ import annotations

from functools import cache

import torch
from sklearn import datasets
from torch import Tensor

from bprong.experiments.data import load

Data = tuple[Tensor, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Images ---------------------------------------------------------------------------------------------------------------


@cache
def mnist(count: int = 5000, scale: float = 1.0) -> Data:
    """The first so many, pixels from 0 to `scale`."""
    data = load("mnist")
    return data.x_train[:count].view(-1, 784) * scale, data.y_train[:count]


def mnist_images(scale: float = 1.0) -> Data:
    x, y = mnist(3000, scale)
    return x.view(-1, 1, 28, 28), y


def mnist_itself() -> Data:
    """Images as their own targets."""
    x = mnist(3000)[0].clamp(0, 1)
    return x, x


@cache
def digits() -> Data:
    """All 1,797 of scikit-learn's."""
    data = datasets.load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def digit_images() -> Data:
    x, y = digits()
    return x.view(-1, 1, 8, 8), y


@cache
def mislabelled(count: int) -> Data:
    """The first so many digits, 40 % of them with a label drawn anew."""
    x, y = digits()
    x, y, random = x[:count], y[:count].clone(), generator(9)
    wrong = torch.rand(count, generator=random) < 0.4
    y[wrong] = torch.randint(10, (int(wrong.sum()),), generator=random)
    return x, y


# Tables ---------------------------------------------------------------------------------------------------------------


@cache
def tabular(name: str, standardised: bool = False) -> Data:
    """A table of scikit-learn's, its features as they are unless `standardised`."""
    data = getattr(datasets, f"load_{name}")()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    return ((x - x.mean(0)) / x.std(0) if standardised else x), y


def diabetes(scale: float = 20.0) -> Data:
    """Ten features of standard deviation `scale`/21; targets from 25 to 346, as they are."""
    x, y = tabular("diabetes")
    return x * scale, y.float()[:, None]


def cancer_bits() -> Data:
    x, y = tabular("breast_cancer", standardised=True)
    return x, y.float()


def wine_with_constants() -> Data:
    """The standardised wine, a column of fives, one of zeros, and the first three columns again."""
    x, y = tabular("wine", standardised=True)
    return torch.cat([x, torch.ones(len(x), 2) * torch.tensor([5.0, 0.0]), x[:, :3]], 1), y


@cache
def separable() -> Data:
    random = generator(1)
    x = torch.randn(400, 20, generator=random)
    return x, (x @ torch.randn(20, generator=random) > 0).long()


@cache
def unrelated() -> Data:
    """Labels that have nothing to do with x, of more rows than a small network can learn by heart."""
    random = generator(7)
    return torch.randn(20_000, 20, generator=random), torch.randint(4, (20_000,), generator=random)


@cache
def imbalanced() -> Data:
    """Two classes, the second rare."""
    random = generator(3)
    x = torch.randn(2000, 20, generator=random)
    score = x @ torch.randn(20, generator=random) / 4.5
    return x, (score + torch.randn(2000, generator=random) * 0.3 > 1.6).long()


@cache
def rare_labels() -> Data:
    """Forty bits a row, few of them set."""
    random = generator(3)
    x = torch.randn(2000, 20, generator=random)
    scores = x @ torch.randn(20, 40, generator=random) / 4.5
    return x, (scores + torch.randn(2000, 40, generator=random) * 0.2 > 2.3).float()


# Functions ------------------------------------------------------------------------------------------------------------


@cache
def smooth() -> Data:
    x = torch.randn(1000, 8, generator=generator(2))
    return x, torch.sin(x[:, :1] * 2) + x[:, 1:2]


@cache
def large() -> Data:
    x = torch.randn(1000, 8, generator=generator(2))
    return x, 1e4 * (torch.sin(x[:, :1] * 2) + x[:, 1:2] * x[:, 2:3] + 3)


@cache
def heavy_tailed() -> Data:
    """Noise that is a normal number by a uniform one: a few targets are hundreds away."""
    random = generator(2)
    x = torch.randn(1000, 8, generator=random)
    noise = torch.randn(1000, 1, generator=random) / torch.rand(1000, 1, generator=random).clamp(min=1e-3)
    return x, torch.sin(x[:, :1] * 2) + x[:, 1:2] + 0.3 * noise


@cache
def sinusoid() -> Data:
    x = torch.linspace(-3, 3, 200)[:, None]
    return x, torch.sin(4 * x)


@cache
def thirty_outputs() -> Data:
    random = generator(3)
    x = torch.randn(1000, 10, generator=random)
    return x, torch.tanh(x @ torch.randn(10, 30, generator=random))


# Sequences ------------------------------------------------------------------------------------------------------------


@cache
def text(words: int = 32, length: int = 16, count: int = 1024) -> Data:
    """A Markov chain's, half of its sequences repeating themselves from word 8 on; the target is the next word."""
    random = generator(5)
    chances = torch.softmax(3 * torch.randn(words, words, generator=random), -1)
    s = torch.zeros(count, length + 1, dtype=torch.long)
    s[:, 0] = torch.randint(words, (count,), generator=random)
    for t in range(length):
        s[:, t + 1] = torch.multinomial(chances[s[:, t]], 1, generator=random)[:, 0]
    s[:, 8:] = s[:, 8:].where(torch.rand(count, 1, generator=random) < 0.5, s[:, : length + 1 - 8])
    return s[:, :-1].contiguous(), s[:, 1:].contiguous()


@cache
def third_last() -> Data:
    """Fifteen words; the class is the third last one's remainder by four."""
    x = torch.randint(12, (1000, 15), generator=generator(4))
    return x, x[:, -3] % 4


@cache
def bags(words: int = 500) -> Data:
    """Ten words a row, the k-th as frequent as 1/k; the class is that with the largest sum of the words' scores."""
    random = generator(8)
    x = torch.multinomial(1 / torch.arange(1, words + 1).float(), 30_000, True, generator=random).view(3000, 10)
    return x, torch.randn(words, 4, generator=random)[x].sum(1).argmax(1)
