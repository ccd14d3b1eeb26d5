"""Reading data files safely: every read has a size limit, and a malformed IDX file raises an error that names it."""

from __future__ import annotations

import gzip
import importlib
import io
import math
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from bprong.experiments.extras import install_command

Array = np.ndarray[Any, np.dtype[Any]]

FILES = {  # the four parts of a data set, under the names of MNIST's files
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
READ_ERRORS = (OSError, EOFError, zlib.error)  # raised when a file, compressed or not, cannot be read


class DataError(ValueError):
    """Data cannot be used; the message says what was found, in which file, and what is required."""


def require(condition: bool | np.bool_, message: str) -> None:
    """Raise DataError with this message unless the condition holds."""
    if not condition:
        raise DataError(message)


def import_extra(module: str) -> Any:
    """Import a module that only the experiments need; the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is required but not installed: {install_command('experiments')}") from error


def read(path: Path, limit: int) -> bytearray:
    """Read a file of at most `limit` bytes; a file ending in .gz or .tgz is decompressed."""
    try:
        with path.open("rb") as file:
            return read_stream(gzip.GzipFile(fileobj=file) if path.suffix in (".gz", ".tgz") else file, path, limit)
    except READ_ERRORS as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def read_stream(stream: io.BufferedIOBase, where: str | Path, limit: int, seconds: float = math.inf) -> bytearray:
    """Read a stream to its end; DataError if it exceeds `limit` bytes or takes longer than `seconds`."""
    raw = bytearray()
    deadline = time.monotonic() + seconds
    while chunk := stream.read1(1 << 16):  # read1 returns after one read, so a slow server cannot delay the time check
        raw += chunk
        require(len(raw) <= limit, f"{where}: larger than {limit} bytes, the most that is accepted")
        require(time.monotonic() <= deadline, f"{where}: received only {len(raw)} bytes in {seconds:g} s")
    return raw


def find_idx(directory: Path) -> dict[str, Path]:
    """Find the IDX files of a data set, by their name in `FILES`; "-idx" or ".idx", uncompressed preferred over .gz."""
    found = {}
    for name in FILES.values():
        pattern = name.rsplit("-idx", 1)[0] + "[-.]idx[0-9]-ubyte"
        for file in sorted(directory.glob(pattern + ".gz")) + sorted(directory.glob(pattern)):
            if file.is_file():  # some unzip tools wrap each file in a folder of the same name
                found[name] = file
    return found


def parse_idx(raw: bytes | bytearray, where: str | Path) -> Array:
    """Parse an IDX file: two zero bytes, a type, the number of dimensions, the dimensions, the values (big-endian)."""
    known = len(raw) >= 4 and raw[:2] == b"\0\0" and raw[2] in IDX_TYPES and 1 <= raw[3] <= 32
    types = " ".join(f"{code:02x}" for code in IDX_TYPES)
    require(
        known,
        f"{where}: starts with '{bytes(raw[:4]).hex(' ')}'; an IDX file requires 00 00, a type ({types}) and 1 to 32 "
        f"dimensions",
    )
    dtype = np.dtype(IDX_TYPES[raw[2]])
    header = 4 + 4 * raw[3]
    require(len(raw) >= header, f"{where}: {len(raw)} bytes; a header of {raw[3]} dimensions requires {header}")
    shape = tuple(np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist())
    require(0 not in shape, f"{where}: shape {shape} is empty; at least one value is required")
    size = header + math.prod(shape) * dtype.itemsize
    require(len(raw) == size, f"{where}: {len(raw)} bytes; shape {shape} of {dtype.name} requires {size}")
    return np.frombuffer(raw, dtype, offset=header).reshape(shape)
