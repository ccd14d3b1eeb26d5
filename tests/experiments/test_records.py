"""Records: exact round trips, atomic writes, and medians that count diverged seeds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bprong.experiments.records import (
    COLUMNS,
    RecordError,
    Row,
    curve,
    divergence_epochs,
    label,
    method_names,
    read_results,
    remove_temporary_files,
    seed_count,
    write_atomically,
    write_json,
    write_results,
)
from experiments.made_up_runs import INF, NAN, run_of

HEADER = "method,seed,epoch,step,seconds,train_loss,val_loss,val_accuracy"


names = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=8)
rows_strategy = st.lists(
    st.builds(
        Row, names, st.integers(0, 9), st.integers(0, 99), st.integers(0, 10**9),
        *[st.floats() for _ in range(4)],
    ),
    unique_by=lambda row: (row.method, row.seed, row.epoch), max_size=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records")


@given(rows=rows_strategy)
def test_results_are_read_back_exactly(folder, rows):
    write_results(folder / "results.csv", rows)
    assert repr(read_results(folder / "results.csv")) == repr(rows)  # repr: nan is not equal to itself


def test_columns_of_results_csv(folder):
    write_results(folder / "results.csv", [Row("sgd", 0, 1, 600, 1.5, NAN, INF, 0.1)])
    assert (folder / "results.csv").read_text() == f"{HEADER}\nsgd,0,1,600,1.5,nan,inf,0.1\n"
    assert ",".join(COLUMNS) == HEADER


def test_numpy_scalars_are_written_as_numbers(folder):
    write_results(folder / "results.csv", [Row("sgd", np.int64(3), 1, 600, np.float64(0.1), np.float32(0.5), 1, 1.0)])
    assert read_results(folder / "results.csv") == [Row("sgd", 3, 1, 600, 0.1, 0.5, 1.0, 1.0)]


GOOD = "sgd,0,1,600,1.5,0.3,0.4,0.9"


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("", 1, "expected 'method,"),
        ("method,seed\n", 1, "the columns are 'method,seed'"),
        (f"{HEADER}\n{GOOD}\nsgd,0,2\n", 3, "3 values; expected 8"),
        (f"{HEADER}\n{GOOD},7\n", 2, "9 values"),
        (f"{HEADER}\n{GOOD}\n\n", 3, "0 values"),
        (f"{HEADER}\nsgd,0,1,600,soon,0.3,0.4,0.9\n", 2, "seconds is 'soon'; expected a number"),
        (f"{HEADER}\nsgd,0,1.5,600,1,0.3,0.4,0.9\n", 2, "epoch is '1.5'; expected an integer"),
        (f"{HEADER}\n,0,1,600,1.5,0.3,0.4,0.9\n", 2, "no name"),
        (f"{HEADER}\n{GOOD}\n{GOOD}\n", 3, "already appears in line 2"),
    ],
)
def test_the_error_for_a_malformed_file_names_its_line(folder, text, line, complaint):
    path = folder / "results.csv"
    path.write_text(text)
    with pytest.raises(RecordError) as caught:
        read_results(path)
    assert f"{path}, line {line}: " in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("raw", [b"\xff\xfe", HEADER.encode() + b'\n"sgd,0'])
def test_a_file_that_is_not_csv_is_refused(folder, raw):
    (folder / "results.csv").write_bytes(raw)
    with pytest.raises(RecordError, match="not a CSV file"):
        read_results(folder / "results.csv")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(record=st.dictionaries(st.text(st.characters()), plain, max_size=4))
def test_json_is_read_back_exactly(folder, record):
    write_json(folder / "run.json", record)
    assert json.loads((folder / "run.json").read_bytes().decode()) == record


def test_values_that_json_cannot_represent_become_strings(folder):
    write_json(folder / "run.json", {"ε": INF, "at": Path("a/b"), "pair": (1, NAN), 3: "name\udc80"})
    raw = (folder / "run.json").read_text()
    assert "ε" in raw
    assert json.loads(raw, parse_constant=pytest.fail) == {
        "ε": "inf", "at": str(Path("a/b")), "pair": [1, "nan"], "3": "name\udc80",
    }  # fmt: skip


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "results.csv"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_on_disk_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    done = []
    fsync = os.fsync
    replace = os.replace

    def seen_fsync(descriptor):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def seen_replace(source, target):
        assert source.read_bytes() == b"new"
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    write_atomically(tmp_path / "results.csv", b"new")
    if Path("/proc/self/fd").is_dir():
        assert done == ["file", "rename", "folder"]
    assert done.index("rename") > 0


def test_only_the_temporary_files_of_a_killed_run_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # as if killed before it could clean up
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "run.json", b"half")
    monkeypatch.undo()
    (tmp_path / ".mine.tmp").touch()
    assert len(list(tmp_path.iterdir())) == 2
    remove_temporary_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".mine.tmp"]


def test_files_get_the_permissions_of_the_umask(tmp_path):
    write_atomically(tmp_path / "a", b"")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_methods_and_labels():
    assert method_names(run_of({"sgd": [1.0], "mine": [1.0], "bn": [1.0]})) == ["sgd", "mine", "bn"]
    assert [label(name) for name in ("bn", "bprong-auto", "adam", "mine", "-")] == [
        "BN", "BPRONG-auto", "Adam", "mine", "-",
    ]  # fmt: skip


def test_a_curve_is_median_minimum_and_maximum_over_seeds():
    losses = (0.3, 0.1, 0.7)
    rows = [row for seed in range(3) for row in run_of({"bn": [2.0, losses[seed]]}, seed, pace=seed + 1)]
    last = curve(rows, "bn", "train_loss")[-1]
    assert (last.epoch, last.step, last.seconds) == (1, 600, 2.0)
    assert (last.median, last.low, last.high, last.seeds) == (0.3, 0.1, 0.7, 3)
    assert curve(rows, "bn", "val_accuracy")[-1].median == 1 / 1.3


def seeds_of(*losses):
    return [row for seed, values in enumerate(losses) for row in run_of({"bn": list(values)}, seed)]


def test_a_diverged_seed_counts_as_infinitely_bad_to_the_end_of_the_run():
    rows = seeds_of([2.0, 1.0, 0.5], [2.0, NAN], [2.0, 1.2, 0.7])
    assert [point.median for point in curve(rows, "bn", "train_loss")] == [2.0, 1.2, 0.7]
    assert [point.high for point in curve(rows, "bn", "train_loss")] == [2.0, INF, INF]
    assert curve(rows, "bn", "val_accuracy")[-1].low == -INF
    rows = seeds_of([2.0, 1.0, 0.5], [2.0, NAN], [2.0, INF])
    assert [point.median for point in curve(rows, "bn", "val_loss")] == [2.0, INF, INF]
    assert divergence_epochs(rows, "bn") == {1: 1, 2: 1}
    assert divergence_epochs(rows, "sgd") == {}
    assert seed_count(rows) == 3


def test_a_method_with_all_seeds_diverged_counts_as_infinitely_bad_to_the_end_of_the_run():
    rows = run_of({"sgd": [2.0, 1.5, 1.2], "bn": [2.0, NAN]}, val={"sgd": [2.0, 1.5, 1.2], "bn": [2.0, 0.4]})
    assert [point.median for point in curve(rows, "bn", "val_loss")] == [2.0, INF, INF]
    assert [point.step for point in curve(rows, "bn", "val_loss")] == [0, 600, 1200]


def test_a_seed_that_has_not_reached_an_epoch_is_left_out():
    rows = seeds_of([2.0, 1.0, 0.5], [2.0, 1.2])
    assert [(point.median, point.seeds) for point in curve(rows, "bn", "train_loss")] == [(2.0, 2), (1.1, 2), (0.5, 1)]
    assert curve(rows, "sgd", "train_loss") == []


@given(st.lists(st.lists(st.floats(0.01, 9) | st.just(NAN), min_size=2, max_size=5), min_size=1, max_size=4))
def test_the_median_lies_in_the_band_and_the_order_of_rows_does_not_matter(losses):
    rows = seeds_of(*losses)
    points = curve(rows, "bn", "train_loss")
    assert all(point.low <= point.median <= point.high for point in points)
    assert curve(rows[::-1], "bn", "train_loss") == points
