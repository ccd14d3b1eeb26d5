"""The data of the problems: generated, scikit-learn's, or MNIST. They are the same for every seed of a run."""

from __future__ import annotations

from functools import cache

import torch
from problems import Data
from sklearn import datasets

from bprong.experiments.bench.data import generator
from bprong.experiments.data import Dataset, load, sequences_to_sort

NOISE = 0.1  # of the regression's targets, so the least mean squared error is 0.01


# Images ---------------------------------------------------------------------------------------------------------------


def _split(data: Dataset) -> Data:
    return Data(data.x_train, data.y_train, data.x_test, data.y_test)


@cache
def mnist() -> Data:
    """All 60,000 training images, and the 10,000 test images for validation."""
    return _split(load("mnist"))


def mnist_autoencoding() -> Data:
    """MNIST with the images as their own targets."""
    x, _, x_val, _ = mnist()
    return Data(x, x, x_val, x_val)


@cache
def small_mnist(count: int = 5000, scale: float = 1.0) -> Data:
    """The first `count` training images of MNIST, with pixels from 0 to `scale`."""
    x, y, *_ = mnist()
    return Data(x[:count].view(-1, 784) * scale, y[:count])


def small_mnist_images(scale: float = 1.0) -> Data:
    x, y, *_ = small_mnist(3000, scale)
    return Data(x.view(-1, 1, 28, 28), y)


def small_mnist_autoencoding() -> Data:
    x = small_mnist(3000).x.clamp(0, 1)
    return Data(x, x)


@cache
def digits() -> Data:
    """scikit-learn's 8×8 digits: 1,437 to train on, 360 to validate."""
    return _split(load("digits"))


@cache
def digit_images() -> Data:
    """The same as images with one channel."""
    x, y, x_val, y_val = _split(load("digits"))
    return Data(x.view(-1, 1, 8, 8), y, x_val.view(-1, 1, 8, 8), y_val)


@cache
def all_digits() -> Data:
    """All 1,797 of scikit-learn's digits."""
    data = datasets.load_digits()
    return Data(torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target))


def all_digit_images() -> Data:
    return Data(all_digits().x.view(-1, 1, 8, 8), all_digits().y)


@cache
def mislabelled(count: int) -> Data:
    """The first `count` digits; 40 % of them have a label drawn at random."""
    x = all_digits().x[:count]
    y = all_digits().y[:count].clone()
    random = generator(9)
    wrong = torch.rand(count, generator=random) < 0.4
    y[wrong] = torch.randint(10, (int(wrong.sum()),), generator=random)
    return Data(x, y)


# Tables ---------------------------------------------------------------------------------------------------------------


@cache
def tabular(name: str, standardised: bool = False) -> Data:
    """A table of scikit-learn's. Features are raw unless `standardised`."""
    data = getattr(datasets, f"load_{name}")()
    x = torch.tensor(data.data, dtype=torch.float32)
    return Data((x - x.mean(0)) / x.std(0) if standardised else x, torch.tensor(data.target))


def diabetes(scale: float = 20.0) -> Data:
    """Ten features of standard deviation `scale`/21; raw targets from 25 to 346."""
    x, y, *_ = tabular("diabetes")
    return Data(x * scale, y.float()[:, None])


def cancer_bits() -> Data:
    x, y, *_ = tabular("breast_cancer", standardised=True)
    return Data(x, y.float())


def wine_with_constants() -> Data:
    """The standardised wine data, a column of fives, one of zeros, and the first three columns again."""
    x, y, *_ = tabular("wine", standardised=True)
    return Data(torch.cat([x, torch.ones(len(x), 2) * torch.tensor([5.0, 0.0]), x[:, :3]], 1), y)


@cache
def badly_scaled() -> Data:
    """20 columns with scales from 1e-4 to 1e4; targets linear in the standardised columns, with noise; 2,500 rows."""
    random = generator(0)
    z = torch.randn(2500, 20, generator=random)
    y = z @ torch.randn(20, 1, generator=random) + NOISE * torch.randn(2500, 1, generator=random)
    x = z * torch.logspace(-4, 4, 20)
    return Data(x[:2000], y[:2000], x[2000:], y[2000:])


@cache
def separable() -> Data:
    random = generator(1)
    x = torch.randn(400, 20, generator=random)
    return Data(x, (x @ torch.randn(20, generator=random) > 0).long())


@cache
def unrelated() -> Data:
    """Labels that are independent of x, in more rows than a small network can memorise."""
    random = generator(7)
    return Data(torch.randn(20_000, 20, generator=random), torch.randint(4, (20_000,), generator=random))


@cache
def imbalanced() -> Data:
    """Two classes, the second rare."""
    random = generator(3)
    x = torch.randn(2000, 20, generator=random)
    score = x @ torch.randn(20, generator=random) / 4.5
    return Data(x, (score + torch.randn(2000, generator=random) * 0.3 > 1.6).long())


@cache
def rare_labels() -> Data:
    """Forty binary targets a row, few of them 1."""
    random = generator(3)
    x = torch.randn(2000, 20, generator=random)
    scores = x @ torch.randn(20, 40, generator=random) / 4.5
    return Data(x, (scores + torch.randn(2000, 40, generator=random) * 0.2 > 2.3).float())


# Functions ------------------------------------------------------------------------------------------------------------


@cache
def smooth() -> Data:
    x = torch.randn(1000, 8, generator=generator(2))
    return Data(x, torch.sin(x[:, :1] * 2) + x[:, 1:2])


@cache
def large_targets() -> Data:
    x = torch.randn(1000, 8, generator=generator(2))
    return Data(x, 1e4 * (torch.sin(x[:, :1] * 2) + x[:, 1:2] * x[:, 2:3] + 3))


@cache
def heavy_tailed() -> Data:
    """Noise that is a normal number divided by a uniform one, so that a few targets are hundreds away."""
    random = generator(2)
    x = torch.randn(1000, 8, generator=random)
    noise = torch.randn(1000, 1, generator=random) / torch.rand(1000, 1, generator=random).clamp(min=1e-3)
    return Data(x, torch.sin(x[:, :1] * 2) + x[:, 1:2] + 0.3 * noise)


@cache
def sinusoid() -> Data:
    x = torch.linspace(-3, 3, 200)[:, None]
    return Data(x, torch.sin(4 * x))


@cache
def thirty_outputs() -> Data:
    random = generator(3)
    x = torch.randn(1000, 10, generator=random)
    return Data(x, torch.tanh(x @ torch.randn(10, 30, generator=random)))


# Sequences ------------------------------------------------------------------------------------------------------------


@cache
def sequences() -> Data:
    """Padded sequences of 4 to 12 symbols; the target is the sorted sequence."""
    return Data(*sequences_to_sort(4096, seed=0), *sequences_to_sort(1024, seed=1))


@cache
def markov_text(words: int = 32, length: int = 16, count: int = 1024) -> Data:
    """Sequences of a Markov chain, half of which repeat themselves from word 8 on; the target is the next word."""
    random = generator(5)
    chances = torch.softmax(3 * torch.randn(words, words, generator=random), -1)
    s = torch.zeros(count, length + 1, dtype=torch.long)
    s[:, 0] = torch.randint(words, (count,), generator=random)
    for t in range(length):
        s[:, t + 1] = torch.multinomial(chances[s[:, t]], 1, generator=random)[:, 0]
    s[:, 8:] = s[:, 8:].where(torch.rand(count, 1, generator=random) < 0.5, s[:, : length + 1 - 8])
    return Data(s[:, :-1].contiguous(), s[:, 1:].contiguous())


@cache
def third_last() -> Data:
    """Sequences of fifteen words; the class is the third last word modulo four."""
    x = torch.randint(12, (1000, 15), generator=generator(4))
    return Data(x, x[:, -3] % 4)


@cache
def word_bags(words: int = 500) -> Data:
    """Ten words a row, the k-th word with frequency 1/k; the class is the one with the largest sum of word scores."""
    random = generator(8)
    x = torch.multinomial(1 / torch.arange(1, words + 1).float(), 30_000, True, generator=random).view(3000, 10)
    return Data(x, torch.randn(words, 4, generator=random)[x].sum(1).argmax(1))
