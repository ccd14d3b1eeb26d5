"""The benchmarks: rows, tables and timing of the harness, and that every script starts."""

import doctest
import importlib
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from harness import command_line, methods, recipes, training
from problems import Data, Problem
from torch import nn

from bprong.experiments.bench import muon, rows, search, tables, timing

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))


@dataclass(frozen=True)
class Row:
    name: str
    count: int
    value: float
    other: float = 0.5


def test_rows_are_read_as_they_were_written(tmp_path):
    written = [Row("a, b", 1, 0.25), Row("c", 2, math.inf), Row("d", 3, -1e-9, 2.0)]
    rows.write(tmp_path / "new" / "rows.csv", written, rows.columns_of(Row))
    assert rows.read(tmp_path / "new" / "rows.csv", Row) == written
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.csv"]


def test_a_missing_column_takes_its_default_and_an_empty_cell_is_nan(tmp_path):
    rows.write(tmp_path / "rows.csv", [Row("a", 1, math.nan, 9.0)], ["name", "count", "value"])
    assert (tmp_path / "rows.csv").read_text() == "name,count,value\na,1,\n"
    (row,) = rows.read(tmp_path / "rows.csv", Row)
    assert math.isnan(row.value)
    assert row.other == 0.5


def test_a_log_resumes(tmp_path):
    assert rows.Log(tmp_path / "rows.csv", Row).rows == []
    rows.Log(tmp_path / "rows.csv", Row).add([Row("a", 1, 1.0)])
    log = rows.Log(tmp_path / "rows.csv", Row)
    log.add([Row("b", 1, 2.0), Row("a", 2, 3.0)])
    assert rows.Log(tmp_path / "rows.csv", Row).grouped("name") == {
        ("a",): [Row("a", 1, 1.0), Row("a", 2, 3.0)],
        ("b",): [Row("b", 1, 2.0)],
    }


@pytest.mark.parametrize(
    ("file", "script"),
    [
        *((f"auto-{name}.csv", "auto_autoencoder") for name in ("autoencoder", "hold")),
        ("auto-many.csv", "sixty_problems"),
        ("continuous.csv", "continuous_whitening"),
        ("feature-units.csv", "feature_units"),
        ("cost.csv", "width_cost"),
        ("modern.csv", "modern_networks"),
        ("safe-rates.csv", "safe_rates"),
        ("scikit-learn.csv", "sklearn_scores"),
        ("recipes.csv", "recipe_search"),
        ("spectral-choices.csv", "spectral_choices"),
        ("statistics-price.csv", "statistics_price"),
        ("sweep.csv", "damping_sweep"),
    ],
)
def test_results_in_docs_have_the_columns_of_their_script(file, script):
    module = importlib.import_module(script)
    columns = getattr(module, "COLUMNS", rows.columns_of(module.Row))
    assert (ROOT / "docs" / file).read_text().partition("\n")[0] == ",".join(columns)
    assert rows.read(ROOT / "docs" / file, module.Row)


def test_interleaved_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    spent = timing.interleaved(calls, rounds=3)
    assert "".join(order) == "abcabcabc"
    assert {name: len(seconds) for name, seconds in spent.items()} == {"a": 3, "b": 3, "c": 3}


def test_interleaved_calls_stop_when_the_budget_is_spent_but_not_before_the_least_rounds():
    order = []
    timing.interleaved({"a": lambda: order.append("a")}, rounds=9, budget=-1.0, least_rounds=2)
    assert order == ["a", "a"]


@pytest.mark.parametrize(
    "module",
    [command_line, rows, search, tables, timing, training, importlib.import_module("statistics_price")],
    ids=lambda module: module.__name__,
)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_help_and_a_quick_mode(script, capsys):
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(script).main(["--help"])
    assert exit_.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_no_script_shadows_a_module():
    ours = {path.stem for path in (ROOT / "src" / "bprong").rglob("*.py")}
    taken = ours | set(sys.stdlib_module_names) | set(packages_distributions())
    assert not taken & {*SCRIPTS, "harness", "problems"}


@pytest.mark.rest
def test_scripts_run_as_modules_find_the_harness():
    command = [sys.executable, "-c", "import benchmarks, harness.training"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_a_quick_run_writes_rows_and_is_not_repeated(tmp_path, capsys):
    script = importlib.import_module("sixty_problems")
    arguments = ["--quick", "--only", "iris-raw", "--out", str(tmp_path)]
    script.main(arguments)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| `iris-raw`: "))
    assert line.endswith("| 0 of 1 |")  # runs of lr="auto" that diverged or raised an exception
    written = (tmp_path / "auto-many.csv").read_text()
    assert written.count("\n") == 1 + 6  # lr="auto" and five learning rates of Adam
    script.main(arguments)
    assert (tmp_path / "auto-many.csv").read_text() == written


@pytest.mark.rest
def test_a_race_is_not_run_twice_and_says_which_methods_cannot_run(tmp_path, capsys, monkeypatch):
    script = importlib.import_module("modern_networks")
    monkeypatch.setitem(script.METHODS, "soap", replace(script.METHODS["soap"], needs="no_such_package"))
    arguments = ["--quick", "--only", "vit", "--methods", "adamw,muon,soap", "--out", str(tmp_path)]
    script.main(arguments)
    printed = capsys.readouterr().out
    assert printed.count("not run: package no_such_package is not installed") == 1
    assert "Target: training loss " in printed
    written = (tmp_path / "modern.csv").read_text()
    found = rows.read(tmp_path / "modern.csv", script.Row)
    assert [(row.method, row.steps, row.seed) for row in found[:3]] == [
        ("adamw", 4, 0),
        ("adamw", 4, 0),
        ("adamw", 4, 1),
    ]
    assert {row.method for row in found} == {"adamw", "muon"}
    script.main(arguments)
    assert (tmp_path / "modern.csv").read_text() == written
    script.main([*arguments, "--rates"])
    assert "| vit | Muon, float32 | " in capsys.readouterr().out


def lines(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 12, bias=False), nn.Linear(12, 6), nn.Linear(6, 3))


def test_our_muon_is_torchs_but_for_its_rounding():
    ours = lines(0)[1]
    theirs = lines(0)[1]
    optimizers = [
        muon.Muon(nn.Sequential(ours, nn.Linear(6, 1)), lr=0.02, rest_lr=0.0, weight_decay=0.1),
        torch.optim.Muon([theirs.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    before = ours.weight.detach().clone()
    for step in range(3):
        gradient = torch.randn(6, 12, generator=torch.Generator().manual_seed(step))
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    assert (ours.weight - theirs.weight).norm() < 0.03 * (theirs.weight - before).norm()


def test_muon_takes_packed_projections_apart_and_leaves_the_last_layer_to_adamw():
    model = lines(0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = muon.Muon(model, lr=1.0, rest_lr=0.5)
    model(torch.randn(7, 4)).square().sum().backward()
    optimizer.step()
    steps = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
    gradient = model[0].weight.grad
    for part, own in zip(steps[0].chunk(3), gradient.chunk(3), strict=True):  # 12 = 3 · 4 rows
        torch.testing.assert_close(part, -0.2 * 4**0.5 * muon.orthogonalised(own))
    for other in steps[2:]:
        torch.testing.assert_close(other.abs(), torch.full_like(other, 0.5), rtol=1e-3, atol=0)


def flat(average, noise=False, steps=50):
    """A run of AdamW whose learning rate falls along a cosine; with `noise`, nothing can be learned."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=random)
    y = torch.randint(3, (64,), generator=random) if noise else (x[:, 0] > 0).long()
    problem = Problem("a line", lines, lambda: Data(x, y), 16, steps)
    settings = {"lr": 0.01, "schedule": "cosine", "warmup": 0.1, "average": average}
    return recipes.Training(problem, methods.METHODS["adamw"], settings, steps, seed=0)


def test_a_recipe_follows_its_schedule_and_averages_the_last_weights():
    run = flat(average=0.04)
    plain = flat(average=0.0)
    weights = []
    for _ in range(50):
        run.step()
        weights.append(run.model[0].weight.detach().clone())
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * search.factor("cosine", 0.1, 49, 50))
    expected = weights[34]
    for weight in weights[35:]:  # eight spans of two steps
        expected = expected.lerp(weight, 0.5)
    torch.testing.assert_close(run.average[0].weight.detach(), expected)
    assert plain.run().train_loss < plain.recent[0]
    torch.testing.assert_close(plain.model[0].weight.detach(), weights[-1])


def test_a_run_that_ends_above_the_untrained_loss_has_diverged():
    run = flat(average=0.0, noise=True)
    run.rates = [1e3, 1e3]
    assert run.run() == recipes.DIVERGED


@pytest.mark.rest
def test_the_price_of_statistics_is_measured_for_two_codes_in_turns(tmp_path, capsys):
    before = tmp_path / "before"
    before.mkdir()
    (before / "src").symlink_to(ROOT / "src")
    script = importlib.import_module("statistics_price")
    arguments = ["--quick", "--threads", "1", "--only", "transformer", "--out", str(tmp_path)]
    script.main([*arguments, "--before", str(before)])
    measured = rows.read(tmp_path / "statistics-price.csv", script.Row)
    memory = [row for row in measured if row.measure == "megabytes"]
    assert [(row.measure, row.code, row.round) for row in measured] == [
        *(("megabytes", code, 0) for code in ("before", "now")),
        *(("milliseconds", code, i) for i in range(2) for code in ("before", "now")),
    ]
    assert memory[0].user == memory[1].user > 0  # what is allocated does not depend on the moment
    assert capsys.readouterr().out.count("| transformer |") == 3  # one line for time, two for memory
    with pytest.raises(SystemExit):
        script.main([*arguments, "--before", str(tmp_path / "missing")])


def test_peaks_of_memory_are_those_of_the_last_step_above_what_is_live_before_it():
    script = importlib.import_module("statistics_price")
    events = [("pass", 0), ("[memory]", 4_000_000), ("[memory]", -4_000_000), ("step", 0), ("[memory]", 1_000_000)]
    assert script.peaks_of(events) == script.Peaks(live=0.0, passes=4.0, step=1.0, garbage=0.0)
    again = [*events, ("collect", 0), ("[memory]", -250_000), ("collected", 0), *events]
    assert script.peaks_of(again) == script.Peaks(live=0.75, passes=4.0, step=1.0, garbage=0.25)
