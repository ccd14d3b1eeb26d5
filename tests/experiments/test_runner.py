"""The runner: equal starts and batches for all methods, resuming, divergence, progress."""

import csv
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import bprong
from bprong.cli import main
from bprong.experiments.data import Dataset, load
from bprong.experiments.methods import METHODS, Problem, TrainingState, WhiteningSettings
from bprong.experiments.models import perceptron, with_batch_norm
from bprong.experiments.progress import Progress
from bprong.experiments.records import read_results
from bprong.experiments.runner import Experiment, OutError, run
from bprong.experiments.training import Config, ResumeError, load_trained, train_epoch
from bprong.experiments.verdict import verdict
from experiments.processes import running_after_a_while
from helpers import assert_close, quick_cases

QUICK = {"forward_every": 10, "backward_every": 10, "backward_offset": 5}


@pytest.fixture(scope="module")
def digits():
    return load("digits")


class Messages(Progress):
    def __init__(self):
        self.lines = []

    def message(self, line):
        self.lines.append(line)


class Shown(Progress):
    def __init__(self):
        self.lines = []

    def show(self, *line):
        self.lines.append(line)


def without_seconds(rows):
    return [(r.method, r.seed, r.epoch, r.step, r.train_loss, r.val_loss, r.val_accuracy) for r in rows]


@pytest.mark.rest
def test_all_methods_start_equal_and_bprong_has_the_lowest_loss_on_digits(digits, tmp_path):
    rows = run(Config(epochs=3, seeds=2, whitening=QUICK), digits, tmp_path, Progress())
    assert len(rows) == 8 * 2 * 4
    assert rows == read_results(tmp_path / "results.csv")
    first = {(r.method, r.seed): r.train_loss for r in rows if r.epoch == 0}
    for seed in (0, 1):
        assert first["prong", seed] == pytest.approx(first["sgd", seed], rel=1e-6)
        assert first["bprong", seed] == pytest.approx(first["sgd", seed], rel=1e-6)
        assert first["bprong-fast", seed] == first["sgd", seed]
    assert first["sgd", 0] != first["sgd", 1]
    last = {(r.method, r.seed): r.train_loss for r in rows if r.epoch == 3}
    assert last["bprong", 0] < last["prong", 0] < last["sgd", 0]
    assert last["bprong-fast", 0] < last["prong", 0]
    assert all(r.step == r.epoch * 14 for r in rows)
    assert all(r.seconds > 0 for r in rows if r.epoch > 0)


def test_all_methods_see_the_same_batches_in_the_same_order(digits, tmp_path, monkeypatch):
    from bprong.experiments import training

    seen = []
    original = training.train_epoch

    def recorded(state, x, y, order, batch, network=None):
        if len(order) > 2 * batch:  # the warm-up is shorter
            seen.append(order)
        return original(state, x, y, order, batch)

    monkeypatch.setattr(training, "train_epoch", recorded)
    run(Config(methods=("sgd", "bn"), epochs=2), digits, tmp_path, Progress())
    first, second, third, fourth = seen
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)
    assert sorted(first.tolist()) == list(range(len(digits.x_train)))


def test_the_loop_is_plain_gradient_descent(digits):
    """train_epoch with SGD compared with the update written by hand."""
    plain, other = (perceptron([64, 10], "relu", seed=1) for _ in range(2))
    state = METHODS["sgd"].prepare(Problem(plain, 0.1, digits.x_train, digits.y_train, 1, WhiteningSettings()))
    order = torch.arange(50)
    assert train_epoch(state, digits.x_train, digits.y_train, order, batch=20) == 2
    for chosen in (order[:20], order[20:40]):
        loss = torch.nn.functional.cross_entropy(other(digits.x_train[chosen]), digits.y_train[chosen])
        grads = torch.autograd.grad(loss, list(other.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(other.parameters(), grads, strict=True):
                parameter.sub_(gradient, alpha=0.1)
    assert_close(plain[0].weight, other[0].weight, 1e-6)


def test_a_batch_larger_than_the_data_is_one_update(digits):
    state = METHODS["sgd"].prepare(
        Problem(perceptron([64, 10], "relu", 0), 0.1, digits.x_train, digits.y_train, 0, WhiteningSettings())
    )
    assert train_epoch(state, digits.x_train, digits.y_train, torch.arange(30), batch=100) == 1


def test_batch_norm_comes_before_each_activation():
    kinds = [type(m).__name__ for m in with_batch_norm(perceptron([4, 3, 3, 2], "tanh", 0))]
    assert kinds == ["Linear", "BatchNorm1d", "Tanh", "Linear", "BatchNorm1d", "Tanh", "Linear"]


def test_building_a_perceptron_does_not_advance_the_global_generator():
    before = torch.random.get_rng_state()
    a = perceptron([4, 3], "relu", seed=7)
    b = perceptron([4, 3], "relu", seed=7)
    assert torch.equal(a[0].weight, b[0].weight)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_diverging_method_is_reported_and_the_others_continue(digits, tmp_path):
    messages = Messages()
    wild = {"forward_damping": 1e-8, "backward_damping": 1e-8, **QUICK}
    rows = run(Config(("sgd", "bprong"), epochs=4, lr=1.0, whitening=wild), digits, tmp_path, messages)
    bprong_rows = [r for r in rows if r.method == "bprong"]
    assert not math.isfinite(bprong_rows[-1].train_loss)
    assert len([r for r in rows if r.method == "sgd"]) == 5
    assert any("bprong, seed 0: diverged in epoch" in line for line in messages.lines)
    again = run(Config(("sgd", "bprong"), epochs=4, lr=1.0, whitening=wild), digits, tmp_path, Progress(), resume=True)
    assert len(again) == len(rows)  # a diverged trial is not taken up again


def test_resuming_can_add_epochs_seeds_and_methods(digits, tmp_path):
    whole = run(Config(("sgd", "bprong"), epochs=3, seeds=2, whitening=QUICK), digits, tmp_path / "whole", Progress())
    run(Config(("bprong",), epochs=1, whitening=QUICK), digits, tmp_path / "parts", Progress())
    parts = run(
        Config(("sgd", "bprong"), epochs=3, seeds=2, whitening=QUICK),
        digits,
        tmp_path / "parts",
        Progress(),
        resume=True,
    )
    assert without_seconds(parts) == without_seconds(whole)


def test_the_drop_in_optimizer_resumes_through_a_refresh_bit_for_bit(digits, tmp_path):
    """Refreshes are 100 steps apart and an epoch has 14 steps: resume before and after the second refresh."""
    config = Config(("bprong-fast",), epochs=9)
    whole = run(config, digits, tmp_path / "whole", Progress())
    for epochs in (2, 8, 9):
        parts = run(replace(config, epochs=epochs), digits, tmp_path / "parts", Progress(), resume=True)
    assert without_seconds(parts) == without_seconds(whole)


def test_the_drop_in_optimizer_uses_its_defaults_only(digits, tmp_path, monkeypatch):
    """Neither the paper's settings nor the global seed affect it; changed defaults cannot be resumed."""
    config = Config(("bprong-fast",), epochs=1)
    rows = run(config, digits, tmp_path, Progress())
    torch.manual_seed(77)
    again = run(replace(config, whitening={"forward_damping": 9.0}), digits, tmp_path / "again", Progress())
    assert without_seconds(again) == without_seconds(rows)
    model = perceptron([64, 100, 100, 100, 10], "relu", seed=0)
    state = TrainingState(model, bprong.BPRONG(model, "cross_entropy", lr=0.01, max_step=None, options={"seed": 0}))
    order = torch.randperm(len(digits.x_train), generator=torch.Generator().manual_seed(1))
    train_epoch(state, digits.x_train, digits.y_train, order, 100)
    loss = torch.nn.functional.cross_entropy(model.eval()(digits.x_train), digits.y_train)
    assert float(loss.detach()) == pytest.approx(rows[-1].train_loss, rel=1e-6)
    later = METHODS["bprong-fast"]
    monkeypatch.setitem(METHODS, "bprong-fast", replace(later, defaults={**later.defaults, "every": 7}))
    with pytest.raises(ResumeError, match=r"optimizer.every was (None|\d+), now 7"):
        run(config, digits, tmp_path, Progress(), resume=True)


def test_an_error_of_the_drop_in_optimizer_counts_as_divergence(digits, tmp_path):
    poisoned = Dataset("some", digits.x_train.clone(), digits.y_train, digits.x_test, digits.y_test)
    poisoned.x_train[200:] *= 1e30
    messages = Messages()
    rows = run(Config(("sgd", "bprong-fast"), epochs=2, lr=1.0), poisoned, tmp_path, messages)
    assert not math.isfinite(rows[-1].train_loss)
    assert any("bprong-fast, seed 0: diverged in epoch" in line for line in messages.lines)


def test_resuming_with_other_settings_is_refused_and_nothing_is_written(digits, tmp_path):
    run(Config(("bprong",), epochs=1, whitening=QUICK), digits, tmp_path, Progress())
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ResumeError, match="lr was 0.01, now 0.02.*forward_every was 10, now 20"):
        run(
            Config(("bprong",), 2, lr=0.02, whitening=QUICK | {"forward_every": 20}), digits, tmp_path, Progress(), True
        )
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_checkpoint_with_the_solver_under_its_former_name_can_be_resumed(digits, tmp_path):
    run(Config(("prong",), epochs=1, whitening=QUICK), digits, tmp_path, Progress())
    path = tmp_path / "checkpoints" / "prong-0.pt"
    saved = torch.load(path, weights_only=True)
    saved["identity"]["factorisation"] = saved["identity"].pop("solver")
    torch.save(saved, path)
    config = Config(("prong",), epochs=2, whitening=QUICK)
    assert run(config, digits, tmp_path, Progress(), resume=True)[-1].epoch == 2
    with pytest.raises(ResumeError, match="solver was eigh, now cholesky"):
        run(replace(config, whitening=QUICK | {"solver": "cholesky"}), digits, tmp_path, Progress(), resume=True)


def test_a_wrong_setting_raises_before_anything_is_written(digits, tmp_path):
    with pytest.raises(ValueError, match="forward_offset"):
        run(
            Config(("prong",), whitening={"forward_every": 5, "forward_offset": 5}),
            digits,
            tmp_path / "new",
            Progress(),
        )
    assert not (tmp_path / "new").exists()


def test_statistics_on_a_fixed_sample_are_reproducible(digits, tmp_path):
    config = Config(("bprong",), epochs=1, whitening=QUICK | {"statistics": 500})
    a, b = (run(config, digits, tmp_path / name, Progress()) for name in ("a", "b"))
    assert without_seconds(a) == without_seconds(b)


def test_a_trained_network_is_loaded_with_stock_layers(digits, tmp_path):
    methods = ("bn", "bprong", "bprong-fast", "bprong-recipe", "bn-recipe")
    rows = run(Config(methods, epochs=1, whitening=QUICK), digits, tmp_path, Progress())
    for method in methods:
        model = load_trained(tmp_path / "checkpoints" / f"{method}-0.pt", digits)
        loss = torch.nn.functional.cross_entropy(model(digits.x_test), digits.y_test)
        expected = next(r.val_loss for r in rows if r.method == method and r.epoch == 1)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    other = Dataset("other", digits.x_train + 1, digits.y_train, digits.x_test, digits.y_test)
    with pytest.raises(ResumeError, match="trained on digits, which differs from the data given, other"):
        load_trained(tmp_path / "checkpoints" / "bn-0.pt", other)
    with pytest.raises(ResumeError, match="no such checkpoint"):
        load_trained(tmp_path / "none.pt", digits)


COMMAND = ["reproduce", "--data", "digits"]
PROCESS = [sys.executable, "-m", "bprong.cli", *COMMAND]


def without_times(folder):
    with (folder / "results.csv").open() as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def size_of_results(folder):
    path = folder / "results.csv"
    return path.stat().st_size if path.exists() else 0


def kill_while_it_trains(command, out, seconds):
    """Start a run, and kill it so many seconds after its next epoch; return whether it was still running."""
    before = size_of_results(out)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while size_of_results(out) <= before and process.poll() is None:
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def killed_and_resumed(options, jobs, tmp_path):
    """Kill a run once for each number of processes, resume it, and compare it with one that was not killed."""
    assert main([*COMMAND, *options, "--jobs", "1", "--out", str(tmp_path / "whole")]) == 0
    out = tmp_path / "killed"
    resume = [*PROCESS, *options, "--resume", "--out", out, "--jobs"]
    choose = random.Random(5)
    killed = [kill_while_it_trains([*resume, number], out, choose.uniform(0.0, 0.3)) for number in jobs]
    assert sum(killed) >= len(jobs) / 2
    last = subprocess.run([*resume, "1"], capture_output=True, timeout=600, check=True, text=True)
    assert "resuming at " in last.stdout or "all epochs are trained" in last.stdout
    assert "Report:" in last.stdout
    assert without_times(out) == without_times(tmp_path / "whole")
    assert not list(out.rglob("*.tmp"))


@pytest.mark.rest
def test_a_run_killed_at_random_moments_resumes_to_the_same_results(tmp_path):
    killed_and_resumed(["--epochs", "12", "--methods", "sgd,bn,bprong,bprong-fast,bn-recipe"], ["2", "1"], tmp_path)


@pytest.mark.rest
def test_a_run_of_all_methods_killed_at_five_moments_resumes_to_the_same_results(tmp_path):
    killed_and_resumed(["--epochs", "20", "--seeds", "2"], ["2"] * 5, tmp_path)


@pytest.mark.parametrize("jobs", quick_cases(["1", "2"], "1"))
def test_an_interrupted_run_keeps_finished_epochs_and_exits_with_130(jobs, digits, tmp_path):
    """Ctrl-C reaches all processes of a terminal."""
    out = tmp_path / "run"
    command = [*PROCESS, "--epochs", "200", "--methods", "sgd,bprong", "--jobs", jobs, "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while size_of_results(out) < 500:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "\nbprong reproduce: interrupted; finished work is saved, --resume continues\n"
    assert running_after_a_while(group=process.pid) == []
    assert len(read_results(out / "results.csv")) > 2
    files = {path.name for path in out.rglob("*") if path.is_file()}
    assert {"results.csv"} <= files <= {"results.csv", "sgd-0.pt", "bprong-0.pt", ".lock"}
    experiment = Experiment(Config(("sgd", "bprong"), epochs=200), digits, out, Progress())
    experiment.load()
    assert max(row.epoch for row in experiment.rows()) >= 1


@pytest.mark.rest
def test_the_losses_do_not_depend_on_the_number_of_processes(digits, tmp_path):
    config = Config(epochs=2)
    one = run(config, digits, tmp_path / "one", Progress())
    two = run(config, digits, tmp_path / "two", Progress(), jobs=2)
    assert without_seconds(two) == without_seconds(one)
    assert read_results(tmp_path / "two" / "results.csv") == two
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"results.csv", "checkpoints", ".lock"}


def test_a_quick_look_at_few_images_whitens(digits):
    """An epoch of digits has 14 updates, and the periods of MNIST are 100."""
    config = Config(epochs=2)
    assert config.whitening_of("bprong", digits) == replace(
        METHODS["bprong"].whitening, forward_every=7, backward_every=7, backward_offset=3
    )
    given = replace(config, whitening={"forward_every": 100})
    assert given.whitening_of("bprong", digits).forward_every == 100
    longer = replace(config, batch=14)
    assert longer.whitening_of("bprong", digits) == METHODS["bprong"].whitening


def test_a_quick_look_has_its_chance(digits, tmp_path):
    rows = run(Config(("sgd", "bn", "prong", "bprong"), epochs=2), digits, tmp_path, Progress())
    assert [claim.holds for claim in verdict(rows)][:2] == [True, True]
    assert next(row.val_accuracy for row in rows if (row.method, row.epoch) == ("bprong", 2)) > 0.7


def test_a_resumed_run_says_where_it_resumes(digits, tmp_path):
    messages = Messages()
    run(Config(("sgd", "bn"), epochs=2), digits, tmp_path, messages)
    assert messages.lines == []
    run(Config(("sgd", "bn"), epochs=4, seeds=2), digits, tmp_path, messages, resume=True)
    run(Config(("sgd", "bn"), epochs=5, seeds=2), digits, tmp_path, messages, resume=True)
    run(Config(("sgd", "bn"), epochs=5, seeds=2), digits, tmp_path, messages, resume=True)
    assert messages.lines == ["resuming at epoch 3 of 4", "resuming at epoch 5 of 5", "all epochs are trained"]


@pytest.mark.rest
def test_denormals_are_flushed_on_every_thread():
    code = (
        "import torch; from bprong.experiments.reproduce import set_up_torch; from bprong.experiments.data import load;"
        "set_up_torch(2); load('digits'); x = torch.full((4_000_000,), 1e-30) * 1e-10; print(int((x != 0).sum()))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_a_resumed_run_keeps_the_rows_of_other_methods_and_epochs(digits, tmp_path):
    run(Config(("sgd", "bn"), epochs=2), digits, tmp_path, Progress())
    rows = run(Config(("sgd",), epochs=1), digits, tmp_path, Progress(), resume=True)
    assert {(r.method, r.epoch) for r in rows} == {(m, e) for m in ("sgd", "bn") for e in range(3)}
    assert rows == read_results(tmp_path / "results.csv")


@pytest.mark.parametrize("damage", [lambda raw: raw[:3000], lambda raw: b"", lambda raw: b"{}"])
def test_a_damaged_checkpoint_is_named(damage, digits, tmp_path):
    run(Config(("sgd",), epochs=1), digits, tmp_path, Progress())
    path = tmp_path / "checkpoints" / "sgd-0.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ResumeError, match="sgd-0.pt is not a checkpoint of a run, or is damaged; delete it"):
        run(Config(("sgd",), epochs=2), digits, tmp_path, Progress(), resume=True)


def test_other_data_of_the_same_name_and_size_are_refused(digits, tmp_path):
    run(Config(("sgd",), epochs=1), digits, tmp_path, Progress())
    other = Dataset(digits.name, digits.x_train.flip(0), digits.y_train, digits.x_test, digits.y_test)
    with pytest.raises(ResumeError, match="fingerprint was"):
        run(Config(("sgd",), epochs=2), other, tmp_path, Progress(), resume=True)


def test_two_runs_in_one_folder_are_refused(digits, tmp_path):
    from bprong.experiments import runner

    with runner.locked(tmp_path), pytest.raises(OutError, match="another run is writing to"):
        run(Config(("sgd",), epochs=1), digits, tmp_path, Progress())


def test_another_method_trains_first_in_each_epoch(digits, tmp_path):
    shown = Shown()
    run(Config(("sgd", "bn"), epochs=2), digits, tmp_path, shown)
    names = ["BN epoch 1/2", "SGD epoch 1/2", "SGD epoch 2/2", "BN epoch 2/2"]
    assert [running for *_, running in shown.lines] == names
    assert [(done, total) for done, total, *_ in shown.lines] == [(n, 4) for n in range(4)]


@pytest.mark.parametrize(
    ("config", "y", "message"),
    [
        (Config(("bn",), batch=1), None, "at least two examples per batch; use --batch 2 or leave out bn"),
        (Config(("sgd", "bn-recipe"), batch=1), None, "at least two examples per batch.*leave out bn-recipe"),
        (Config(("sgd",)), 0, "only one class"),
    ],
)
def test_settings_that_would_fail_later_are_refused_at_once(config, y, message, digits, tmp_path):
    labels = (digits.y_train, digits.y_test) if y is None else (digits.y_train * 0, digits.y_test * 0)
    data = Dataset("some", digits.x_train, labels[0], digits.x_test, labels[1])
    with pytest.raises(ValueError, match=message):
        run(config, data, tmp_path / "new", Progress())
    assert not (tmp_path / "new").exists()
