"""Text for language models: characters of the source code that is installed with Python, so that nothing is downloaded.

The texts are the same for two runs with the same version of Python.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LENGTH = 64  # characters that the language models see
STRIDE = 16  # from one window of the training text to the next
SYMBOLS = 97  # a newline, the 95 printable characters of ASCII, and one symbol for all others


def python_sources() -> list[Path]:
    """The modules of the running Python's standard library that are single files, by name.

    Files with settings of this machine, whose names begin with "_sysconfigdata", are left out.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))


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
