"""IDX files are read under any of their usual names; malformed files are refused."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import data_world
from bprong.experiments.data import load
from bprong.experiments.files import DataError, parse_idx
from data_world import IDX_CODES, KEYS, NAMES, idx, is_small_set, put, small_set

free = settings(deadline=None, database=None)
world = data_world.world  # a fixture
mnist = data_world.mnist  # a fixture

arrays = hnp.arrays(
    st.sampled_from([np.dtype(code) for code in IDX_CODES]), hnp.array_shapes(min_dims=1, max_dims=4, max_side=4)
)


# --- IDX ---


@free
@given(arrays)
def test_idx_round_trip(array: np.ndarray) -> None:
    found = parse_idx(idx(array), "file")
    assert found.shape == array.shape
    assert found.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    assert found.astype(array.dtype).tobytes() == array.tobytes()


@free
@given(arrays, st.data())
def test_idx_of_the_wrong_length_is_refused(array: np.ndarray, draw: st.DataObject) -> None:
    raw = idx(array)
    cut = draw.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:cut], raw + b"\0" * (1 + cut)):
        with pytest.raises(DataError, match=r"^file: .*requires"):
            parse_idx(wrong, "file")


def test_the_error_states_the_required_length() -> None:
    with pytest.raises(DataError, match=r"11 bytes; shape \(4,\) of uint8 requires 12"):
        parse_idx(idx(np.zeros(4, np.uint8))[:-1], "file")


@pytest.mark.parametrize("start", ["", "0000", "00000a01", "01000801", "00010801", "00000800", "00000821", "1f8b0800"])
def test_idx_with_a_wrong_header_is_refused(start: str) -> None:
    with pytest.raises(DataError, match=r"starts with .*IDX file requires 00 00"):
        parse_idx(bytes.fromhex(start) + (b"\0\0\0\1" * 33 + b"\0" if len(start) == 8 else b""), "file")


@pytest.mark.parametrize("shape", [(0,), (2**32 - 1, 0, 2**32 - 1, 2**32 - 1)], ids=["small", "enormous"])
def test_empty_idx_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="empty"):
        parse_idx(struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape), "file")


def test_idx_with_an_enormous_shape_is_refused_without_allocating() -> None:
    with pytest.raises(DataError, match=r"requires \d{19}"):
        parse_idx(struct.pack(">BBBB2I", 0, 0, 8, 2, 2**31, 2**31), "file")


# --- finding and unzipping ---


@pytest.mark.parametrize("spelling", ["-idx{}-ubyte", ".idx{}-ubyte", "-idx{}-ubyte.gz", ".idx{}-ubyte.gz"])
def test_user_idx_directory(tmp_path: Path, spelling: str) -> None:
    for key, name in zip(KEYS, NAMES, strict=True):
        raw = idx(small_set()[key])
        file = tmp_path / (name.split("-idx")[0] + spelling.format(3 if key[0] == "x" else 1))
        file.write_bytes(gzip.compress(raw, mtime=0) if spelling.endswith("gz") else raw)
    found = load(str(tmp_path))
    assert is_small_set(found)
    assert (found.name, found.features, found.classes, found.notice) == (tmp_path.name, 20, 3, None)


def test_uncompressed_idx_files_are_preferred_and_folders_ignored(tmp_path: Path, mnist: dict[str, bytes]) -> None:
    put(tmp_path, mnist)
    (tmp_path / (NAMES[0] + ".gz")).write_bytes(b"not gzip")
    (tmp_path / NAMES[0].replace("-idx", ".idx")).mkdir()
    assert is_small_set(load(tmp_path))


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-9], lambda raw: b"text" + raw, lambda raw: raw[:12] + raw[14:]],
    ids=["end lost", "text before", "hole"],
)
def test_damaged_gzip(tmp_path: Path, mnist: dict[str, bytes], damage: Callable[[bytes], bytes]) -> None:
    files = dict(list(mnist.items())[1:]) | {NAMES[0] + ".gz": damage(gzip.compress(mnist[NAMES[0]], mtime=0))}
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: cannot be read"):
        load(put(tmp_path, files))
