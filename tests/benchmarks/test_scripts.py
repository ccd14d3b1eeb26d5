"""The benchmarks: rows, tables and timing of the harness, and that every script starts."""

import doctest
import importlib
import math
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from harness import command_line, rows, tables, timing, training

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
        *((f"auto-{name}.csv", "auto_paper") for name in ("autoencoder", "deep", "general", "hold", "paper")),
        ("auto-many.csv", "sixty_problems"),
        ("continuous.csv", "continuous_whitening"),
        ("cost.csv", "width_cost"),
        ("layers.csv", "layer_races"),
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
    [command_line, rows, tables, timing, training, importlib.import_module("statistics_price")],
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


def test_scripts_run_as_modules_find_the_harness():
    command = [sys.executable, "-c", "import benchmarks, harness.rows"]
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
