"""Processes of torch.distributed end with 0 if they were successful, and with another exit code if they were not."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import launch
import leaving
import pytest

HERE = Path(__file__).parent


def test_a_process_ends_well_while_a_thread_of_gloo_frees_a_tensor():
    """At the normal exit of the interpreter it aborts: "terminate called without an active exception"."""
    assert launch.run(2, "held_up:fully_sharded") == [["rank 0 of 2", "rank 1 of 2"]]


@pytest.mark.rest
def test_an_error_of_one_rank_ends_all():
    with pytest.raises(AssertionError, match=r"rank 1 ended with 1\n(.*\n)*.*ArithmeticError: of this rank alone"):
        launch.run(2, "held_up:fails_on_one_rank", timeout=120)


def test_ranks_that_do_not_end_are_named_and_killed():
    with pytest.raises(AssertionError, match="after 0 s these ranks had not ended: 0, 1"):
        launch.run(2, "held_up:does_not_end", timeout=0)


def test_no_process_outlives_a_test_that_is_interrupted(tmp_path):
    with pytest.raises(KeyboardInterrupt), launch.started(tmp_path, 2, ["held_up:does_not_end"]) as processes:
        raise KeyboardInterrupt
    assert [process.returncode for process in processes] == [-9, -9]


def test_what_was_printed_is_written_before_a_process_leaves():
    code = "import sys, leaving; print('out', end=''); print('err', end='', file=sys.stderr); leaving.leave(); print(1)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("out", "err")


def test_coverage_is_saved(monkeypatch):
    calls = []
    measurement = SimpleNamespace(stop=lambda: calls.append("stop"), save=lambda: calls.append("save"))
    coverage = SimpleNamespace(Coverage=SimpleNamespace(current=lambda: measurement))
    monkeypatch.setitem(sys.modules, "coverage", coverage)
    leaving.save_coverage()
    assert calls == ["stop", "save"]
