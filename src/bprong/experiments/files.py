"""Files read safely: nothing without a limit, and what is no IDX file is refused with its name and what is required."""

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

__all__ = ["FILES", "UNREADABLE", "Array", "DataError", "extra", "find_idx", "parse_idx", "read", "read_all", "require"]

Array = np.ndarray[Any, np.dtype[Any]]

FILES = {  # a set in IDX files, under the names that MNIST gave them
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
UNREADABLE = (OSError, EOFError, zlib.error)  # what reading a file, zipped or not, may fail with


class DataError(ValueError):
    """Data that cannot be used: what was found, in which file, and what is required."""


def require(condition: bool | np.bool_, message: str) -> None:
    """DataError, unless the condition holds."""
    if not condition:
        raise DataError(message)


def extra(module: str) -> Any:
    """Import what only the experiments need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is needed here and missing: pip install 'bprong[experiments]'") from error


def read(path: Path, limit: int) -> bytearray:
    """A file, unzipped if its name says that it is zipped."""
    try:
        with path.open("rb") as file:
            return read_all(gzip.GzipFile(fileobj=file) if path.suffix in (".gz", ".tgz") else file, path, limit)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def read_all(stream: io.BufferedIOBase, where: str | Path, limit: int, seconds: float = math.inf) -> bytearray:
    """All of a stream, which may neither pass `limit` bytes nor take longer than `seconds`."""
    raw, deadline = bytearray(), time.monotonic() + seconds
    while chunk := stream.read1(1 << 16):  # one read of what lies below, so that a trickle cannot outlast the deadline
        raw += chunk
        require(len(raw) <= limit, f"{where}: longer than {limit} bytes, which is the most that is read")
        require(time.monotonic() <= deadline, f"{where}: only {len(raw)} bytes after {seconds:g} s")
    return raw


def find_idx(directory: Path) -> dict[str, Path]:
    """Those of the four IDX files that are there, in either spelling, with any number of dimensions, plain or .gz."""
    found = {}
    for name in FILES.values():
        pattern = name.rsplit("-idx", 1)[0] + "[-.]idx[0-9]-ubyte"
        for file in sorted(directory.glob(pattern + ".gz")) + sorted(directory.glob(pattern)):
            if file.is_file():  # some unzip tools wrap each file in a folder of the same name
                found[name] = file
    return found


def parse_idx(raw: bytes | bytearray, where: str | Path) -> Array:
    """The array in an IDX file: 0, 0, type, number of dimensions, the dimensions, the values; all big-endian."""
    known = len(raw) >= 4 and raw[:2] == b"\0\0" and raw[2] in IDX_TYPES and 1 <= raw[3] <= 32
    start, types = bytes(raw[:4]).hex(" "), " ".join(f"{code:02x}" for code in IDX_TYPES)
    require(known, f"{where}: starts with '{start}'; IDX requires 00 00, a type ({types}) and 1 to 32 dimensions")
    dtype, header = np.dtype(IDX_TYPES[raw[2]]), 4 + 4 * raw[3]
    require(len(raw) >= header, f"{where}: {len(raw)} bytes; its header of {raw[3]} dimensions requires {header}")
    shape = tuple(np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist())
    require(0 not in shape, f"{where}: its header says {shape}, which is empty; at least one value is required")
    size = header + math.prod(shape) * dtype.itemsize
    require(len(raw) == size, f"{where}: {len(raw)} bytes; its header, {shape} of {dtype.name}, requires {size}")
    return np.frombuffer(raw, dtype, offset=header).reshape(shape)
