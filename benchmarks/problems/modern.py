"""The networks people train now, small: language models of characters, a vision transformer, a convolutional network,
and the paper's network with and without Batch Normalisation.

The texts are what is installed with Python and torch, so that nothing is downloaded; they are the same for two runs
with the same versions of both. A Data of a text has rows that overlap, as views that take no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch
from problems import Data, Problem, data
from problems.losses import sequence_cross_entropy
from problems.networks import paper_network, with_batch_norm
from problems.sixty import small
from problems.standard import CONVOLUTIONS
from torch import nn

from bprong.experiments.bench.networks import VisionTransformer, character_gpt
from bprong.experiments.bench.text import encoded, python_sources, windows

WINDOWS = 200  # of the validation text, on which the loss is measured

# Texts ----------------------------------------------------------------------------------------------------------------


def torch_headers() -> list[Path]:
    """The C++ headers of torch's core library, by name."""
    folder = Path(torch.__file__).parent / "include" / "c10"
    return sorted(folder.rglob("*.h"))


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
