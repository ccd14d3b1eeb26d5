"""The protocol of `bprong bench` on a tiny workload: trials, fresh seeds, missing and failing peers, resumption."""

import csv
import dataclasses
import itertools
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bprong.experiments.bench import command, worker
from bprong.experiments.bench.command import Options, bench
from bprong.experiments.bench.plan import FRESH_SEED, Plan
from bprong.experiments.bench.records import Row
from bprong.experiments.bench.rows import read
from bprong.experiments.extras import install_command
from bprong.experiments.runner import OutError
from experiments.bench.tiny_bench import PLAN, Inline, installed

TIMES = ("seconds", "train_seconds", "val_seconds", "megabytes")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(command, "draw", lambda *arguments: {})  # figures are drawn once, by `finished`
    monkeypatch.setattr(worker, "reset_peak", lambda: math.nan)  # searching for garbage takes longer than a tiny run
    with installed():
        yield


def run(out, killed_at=10**6, resume=False, plan=PLAN, **more):
    return bench(Options(plan, out, jobs=1, resume=resume, **more), lambda: Inline(killed_at), log=lambda text: None)


def rows_of(out):
    return read(out / "bench.csv", Row)


def without_times(out):
    with (out / "bench.csv").open() as file:
        return [{k: v for k, v in line.items() if k not in TIMES} for line in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "reset_peak", lambda: 0.0)
        out = tmp_path_factory.mktemp("bench")
        run(out)
        return out


def test_tuned_methods_have_equal_trials_and_automatic_ones_their_runs_and_the_best_is_rerun(finished):
    rows = [row for row in rows_of(finished) if row.workload == "line"]
    for name in ("sgd", "adamw"):
        tuning = [row for row in rows if row.method == name and row.stage == "tuning"]
        fresh = [row for row in rows if row.method == name and row.stage == "test"]
        assert [(row.trial, row.seed) for row in tuning] == [(0, 0), (1, 0)]
        assert [row.seed for row in fresh] == [FRESH_SEED, FRESH_SEED + 1]
        best = min(tuning, key=lambda row: (row.train_steps * row.val_steps, row.train_loss * row.val_loss))
        assert {row.settings for row in fresh} == {best.settings}
    automatic = [row for row in rows if row.method == "automatic"]
    assert [(row.stage, row.seed) for row in automatic] == [
        ("tuning", 0),
        ("tuning", 1),
        ("test", FRESH_SEED),
        ("test", FRESH_SEED + 1),
    ]
    assert len({row.settings for row in automatic}) == 1


def test_a_run_ends_when_both_targets_are_reached(finished):
    reached = [row for row in rows_of(finished) if row.end == "both targets reached"]
    assert reached
    assert all(row.steps == max(row.train_steps, row.val_steps) < 30 for row in reached)
    assert all(0 < row.train_seconds <= row.seconds for row in reached)


def test_a_missing_a_failing_and_an_unsuitable_peer_have_rows_that_say_why(finished):
    ends = {row.method: row.end for row in rows_of(finished) if row.workload == "line" and row.stage == "none"}
    assert ends == {
        "absent": f"not run: package no_such_package is not installed ({install_command('bench')})",
        "broken": "not run: failed: RuntimeError: this peer does not like lines",
        "bn-sgd": "not run: the network has no Batch Normalisation",
    }


def test_methods_of_which_no_trial_reached_a_target_are_not_rerun_and_count_as_missed(finished):
    rows = [row for row in rows_of(finished) if row.workload == "hard" and row.method == "adamw"]
    assert [row.stage for row in rows] == ["tuning", "tuning", "none"]
    assert "no trial reached a target" in rows[-1].end


def test_figures_tables_and_pages_are_written(finished):
    for name in ("profiles", "validation_seconds", "validation_steps", "training_seconds", "training_steps"):
        assert (finished / f"{name}.png").stat().st_size > 10_000
        assert (finished / f"{name}.svg").exists()
    page = (finished / "report.html").read_text()
    assert page.count("<svg ") == 5
    for text in ("Where BPRONG loses", "no_such_package", "Performance profiles", "Peak memory"):
        assert text in page
        assert text in (finished / "benchmark.md").read_text()


def test_results_are_published_for_documentation(finished, tmp_path):
    command.publish(finished, tmp_path)
    assert (tmp_path / "bench.csv").read_bytes() == (finished / "bench.csv").read_bytes()
    pictures = re.findall(r"\]\((.*?)\)", (tmp_path / "benchmark.md").read_text())
    assert len(pictures) == 4
    assert all((tmp_path / picture).exists() for picture in pictures)


@pytest.mark.parametrize("killed_at", [0, 1, 6, 11])
def test_a_benchmark_that_was_interrupted_ends_as_one_that_was_not(killed_at, finished, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, killed_at)
    kept = without_times(tmp_path) if killed_at else []
    assert sum(line["stage"] != "none" for line in kept) == killed_at
    before = {path.name: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    run(tmp_path, resume=True)
    assert without_times(tmp_path) == without_times(finished)
    assert all((tmp_path / "runs" / name).read_bytes() == data for name, data in before.items())


def test_a_finished_benchmark_is_not_run_again_and_draws_the_same_csv(finished):
    written = (finished / "bench.csv").read_bytes()
    run(finished, killed_at=0, resume=True)
    assert (finished / "bench.csv").read_bytes() == written
    run(finished, killed_at=0, draw=True)
    assert (finished / "bench.csv").read_bytes() == written


def test_a_record_of_other_targets_is_not_used(finished, tmp_path, monkeypatch):
    from bprong.experiments.bench.targets import TARGETS, Target

    run(tmp_path, plan=Plan(("line",), ("sgd",), 1, 1))
    with monkeypatch.context() as patch:
        patch.setitem(TARGETS, "line", dict.fromkeys(("tuning", "test"), Target(0.4, 0.4)))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, killed_at=0, resume=True, plan=Plan(("line",), ("sgd",), 1, 1))


def test_a_folder_with_a_benchmark_is_refused_without_resume(finished):
    with pytest.raises(OutError, match="--resume"):
        run(finished)


def test_a_budget_that_has_ended_begins_no_run_and_says_so(tmp_path):
    lines = []
    options = Options(PLAN, tmp_path, budget=1e-9, jobs=1)
    bench(options, Inline, log=lines.append)
    text = "\n".join(lines)
    assert "cut to 1 of 2 trials and 1 of 2 fresh seeds" in text
    assert "the budget ended with" in text
    assert not any((tmp_path / "runs").iterdir())


KILLED = """
import sys
sys.path[:0] = [{tests!r}]
from experiments.bench import tiny_bench
import pathlib
from bprong.experiments.bench.command import Options, bench
from bprong.experiments.bench import worker
worker.reset_peak = lambda: 0.0
with tiny_bench.installed():
    bench(Options(tiny_bench.PLAN, pathlib.Path({out!r}), jobs=1), tiny_bench.Inline)
"""


@pytest.mark.rest
def test_sigkill_loses_at_most_the_run_in_progress(finished, tmp_path):
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", KILLED.format(tests=tests, out=str(tmp_path))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    done = 0
    while done < 3 and process.poll() is None:
        done = len(list((tmp_path / "runs").glob("*.json")))
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert done >= 3
    assert sum(row.stage != "none" for row in rows_of(tmp_path)) >= done - 1  # bench.csv follows the run's own file
    run(tmp_path, resume=True)
    assert without_times(tmp_path) == without_times(finished)


def test_seconds_exclude_measurements(monkeypatch):
    """With clocks that go on by one at each reading and by 1,000 in a measurement, a step takes two."""
    from bprong.experiments.bench import optimizers, timing
    from bprong.experiments.bench.targets import NONE
    from bprong.experiments.bench.training import Run, Start
    from experiments.bench.tiny_bench import LINE

    clock = itertools.count()

    def slow(model, x, y):
        for _ in range(1000):
            next(clock)
        return (model(x) - y).square().mean()

    readings = SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: next(clock))
    monkeypatch.setattr(timing, "time", readings)
    workload = dataclasses.replace(LINE, validation=slow)
    outcome = Run(Start(workload, optimizers.sgd, {"lr": 0.01}, "test", 0, NONE)).complete()
    assert len(outcome.points) > 10
    assert outcome.seconds == 2 * outcome.steps > 0
    assert outcome.end == "step budget used up"
