"""The networks of the experiments: the paper's fully connected one, with or without batch normalisation, a small
convolutional network and a small transformer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from bprong.experiments.data import LONGEST, PAD, SYMBOLS

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def perceptron(widths: Sequence[int], activation: str, seed: int) -> nn.Sequential:
    """A fully connected network: Linear, activation, …, Linear, with torch's initialisation drawn from `seed`.

    >>> [type(m).__name__ for m in perceptron([4, 3, 2], "tanh", seed=0)]
    ['Linear', 'Tanh', 'Linear']
    """
    modules: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(widths):
            modules += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules[:-1])


def with_batch_norm(plain: nn.Sequential) -> nn.Sequential:
    """The same layers with a BatchNorm1d inserted between each hidden layer and its activation."""
    modules: list[nn.Module] = []
    for module in plain:
        if not isinstance(module, nn.Linear):
            modules.append(nn.BatchNorm1d(modules[-1].out_features))  # type: ignore[arg-type]
        modules.append(module)
    return nn.Sequential(*modules)


def digits_convnet(seed: int) -> nn.Sequential:
    """A network for 8×8 digits: a plain, a strided and a grouped convolution, then a linear layer.

    torch's default initialisation is drawn from `seed`.

    >>> digits_convnet(seed=0)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=4), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip


class SequenceTransformer(nn.Module):
    """A transformer encoder: tokens (batch × length, PAD at the end) to logits (batch × length × symbols).

    Token and position embeddings are added. Attention ignores the padding. The output layer is not tied to the
    embedding.
    """

    def __init__(self, width: int = 64, heads: int = 4, hidden: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(SYMBOLS + 1, width)
        self.position = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, SYMBOLS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.encoder(z, src_key_padding_mask=tokens == PAD))
        return logits


def sequence_transformer(seed: int) -> SequenceTransformer:
    """Two encoder layers of width 64, four heads, no dropout; torch's default initialisation is drawn from `seed`.

    >>> sequence_transformer(seed=0)(torch.tensor([[3, 1, 2, 0]])).shape
    torch.Size([1, 4, 33])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SequenceTransformer()
