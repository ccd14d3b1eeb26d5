"""The networks people train now, small: language models of characters, a vision transformer, a convolutional network,
and the paper's network with and without Batch Normalisation.

The texts are what is installed with Python and torch, so that nothing is downloaded; they are the same for two runs
with the same versions of both. A Data of a text has rows that overlap, as views that take no memory.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from problems import Data, Problem, data
from problems.data import generator
from problems.losses import sequence_cross_entropy
from problems.networks import paper_network, with_batch_norm
from problems.sixty import small
from problems.standard import CONVOLUTIONS
from problems.unseen import VisionTransformer
from torch import Tensor, nn

LENGTH = 64  # characters that the language models see
STRIDE = 16  # from one window of the training text to the next
SYMBOLS = 97  # a newline, the 95 printable characters of ASCII, and one symbol for all others
WINDOWS = 200  # of the validation text, on which the loss is measured

# Texts ----------------------------------------------------------------------------------------------------------------


def python_sources() -> list[Path]:
    """The modules of the running Python's standard library that are single files, by name.

    Files with settings of this machine, whose names begin with "_sysconfigdata", are left out.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))


def torch_headers() -> list[Path]:
    """The C++ headers of torch's core library, by name."""
    folder = Path(torch.__file__).parent / "include" / "c10"
    return sorted(folder.rglob("*.h"))


def encoded(path: Path) -> Tensor:
    """The characters of a file as numbers from 0 to 96: newline, the printable characters of ASCII, any other.

    A file ends with the symbol for other characters.
    """
    codes = torch.frombuffer(bytearray(path.read_bytes() + b"\0"), dtype=torch.uint8).long()
    printable = (codes >= 32) & (codes < 127)
    return torch.where(printable, codes - 31, torch.where(codes == 10, 0, SYMBOLS - 1))


def windows(text: Tensor) -> tuple[Tensor, Tensor]:
    """At every STRIDE-th place of a text: LENGTH characters, and the character that follows each of them."""
    return text[:-1].unfold(0, LENGTH, STRIDE), text[1:].unfold(0, LENGTH, STRIDE)


def split_text(files: Sequence[Path]) -> Data:
    """The windows of the first nine tenths of the files; WINDOWS evenly spaced windows of the others."""
    kept = len(files) * 9 // 10
    x, y = windows(torch.cat([encoded(path) for path in files[:kept]]))
    x_val, y_val = windows(torch.cat([encoded(path) for path in files[kept:]]))
    places = torch.linspace(0, len(x_val) - 1, WINDOWS).long()
    return Data(x, y, x_val[places], y_val[places])


@cache
def python_text() -> Data:
    return split_text(python_sources())


@cache
def header_text() -> Data:
    return split_text(torch_headers())


# Networks -------------------------------------------------------------------------------------------------------------


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
        return self.output(mixed.transpose(1, 2).flatten(2))


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
        return x + self.mlp(self.mlp_norm(x))


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
        return self.head(self.norm(self.blocks(self.embed(x) + self.positions(places))))


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


def paper_network_bn(seed: int) -> nn.Sequential:
    """The paper's network with Batch Normalisation before every ReLU."""
    return with_batch_norm(paper_network(seed))


# Problems -------------------------------------------------------------------------------------------------------------

MODERN: dict[str, Problem] = {
    "gpt": Problem(
        "GPT, characters of Python's standard library", character_gpt, python_text, 16, 800, loss=sequence_cross_entropy
    ),
    "gpt-other": Problem(
        "smaller GPT, characters of torch's C++ headers", partial(character_gpt, width=64, depth=2), header_text, 16,
        800, loss=sequence_cross_entropy
    ),
    "vit": small("vision transformer, digits", VisionTransformer, data.digits, 64, 200),
    "conv": CONVOLUTIONS,
    "paper": Problem("paper's network, three epochs", paper_network, data.mnist, 100, 1800),
    "paper-bn": Problem("the same with Batch Normalisation", paper_network_bn, data.mnist, 100, 1800),
}  # fmt: skip
