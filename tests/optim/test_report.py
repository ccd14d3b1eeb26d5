"""The report: plain data, a table that explains itself, numbers for loggers, at little cost."""

import math

import pytest
import torch
from torch import nn

import bprong
from bprong.optim import Periods
from bprong.optim.report import COLUMNS, Report
from helpers import classification, mlp
from training import EXACT, batches, literal, train


def reported(kind=bprong.BPRONG, steps=6, **arguments):
    """The report of a small model after some steps, at the fifth of which everything was refreshed."""
    model = nn.Sequential(*mlp(5, 4, 3), nn.LayerNorm(3, dtype=torch.float64))
    optimizer = kind(model, "cross_entropy", **({"lr": 0.1, "every": 4, "max_step": None} | arguments))
    train(model, optimizer, batches(*classification(60, 5, 3), 20, steps))
    return optimizer.report()


def test_the_report_is_plain_data():
    report = reported()
    assert report.steps == 6
    row = report.layers[0]
    assert row["layer"] == "0"
    assert row["forward_factor"] == "exact 5"
    assert row["backward_factor"] == "exact 4"
    assert row["forward_age"] == row["backward_age"] == 2
    assert row["forward_damping"] == pytest.approx(0.2)
    assert row["backward_damping"] == pytest.approx(0.015)
    assert row["step_norm"] > 0
    assert row["forward_drift"] is None, "sides that are refreshed periodically are not tested for drift"
    assert set(report.fallback) == {"3.weight", "3.bias"}
    assert report.rule == {}
    assert set(report.time) == {"statistics", "factorisation", "step"}
    assert 0 < sum(report.time.values()) < 1


def test_the_drift_is_that_of_the_last_test():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3)
    periods = Periods(1, refresh="drift")
    optimizer = literal(model, "cross_entropy", lr=0.0, every=periods, forward_damping=1e-9, options=EXACT)
    train(model, optimizer, [(x, y)])
    assert optimizer.report().layers[0]["forward_drift"] is None, "there was no factor yet"
    train(model, optimizer, [(x, y)])
    assert optimizer.report().layers[0]["forward_drift"] < 1e-6
    train(model, optimizer, [(x * 2, y)])
    assert optimizer.report().layers[0]["forward_drift"] == pytest.approx(3, rel=1e-3), "Ž is four times as large"


def test_the_printed_table_explains_its_columns():
    lines = str(reported(every=Periods(4, refresh="drift"))).splitlines()
    assert lines[0] == "6 steps"
    headings = [f"{heading} {letter}" for heading, _ in COLUMNS.values() for letter in "zδ"]
    assert lines[1].split() == " ".join(["layer", *headings, "step"]).split()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "2"]
    for heading, explanation in COLUMNS.values():
        assert f"{heading}: {explanation}" in lines
    assert any(line.startswith("step: ") for line in lines)
    assert "not whitened (Adam): 3.weight (in LayerNorm)" in lines
    assert lines[-1].startswith("share of time since the first step: statistics ")


def test_columns_that_nothing_is_known_of_are_left_out():
    lines = str(reported(bprong.PRONG)).splitlines()
    assert "δ" not in lines[1]
    assert "age z" in " ".join(lines[1].split())
    fresh = str(bprong.BPRONG(mlp(5, 3), "cross_entropy", lr=0.01).report()).splitlines()
    assert fresh[0] == "0 steps"
    assert fresh[1].split() == ["layer", "factor", "z", "factor", "δ"]
    assert fresh[2].split() == ["0", "identity", "5", "identity", "3"]


def test_the_factor_column_says_how_a_side_is_inverted():
    model = nn.Sequential(nn.Linear(400, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, every=2)
    x = torch.randn(60, 400) * torch.linspace(1, 12, 400).pow(-2) * 5
    train(model, optimizer, [(x, torch.zeros(60, dtype=torch.long))])
    rank = optimizer._whitening.layers["0"].forward.factor.B.shape[1]
    assert optimizer.report().layers[0]["forward_factor"] == f"rank {rank} of 400"
    small = bprong.BPRONG(mlp(6, 4), "cross_entropy", lr=0.01, options={"max_dim": 3}).report().layers[0]
    assert small["forward_factor"] == "identity 6 diagonal"


def test_the_numbers_of_lr_auto_are_reported():
    report = reported(lr="auto", every=None)
    assert set(report.rule) == {"alpha", "mu", "lambda", "ratio"}
    line = next(line for line in str(report).splitlines() if line.startswith("step rule: "))
    names = [part.split()[0] for part in line.removeprefix("step rule: ").split(", ")]
    assert names == ["α", "μ", "λ", "actual/predicted"]


@pytest.mark.parametrize("arguments", [{}, {"lr": "auto", "every": None}])
def test_scalars_are_one_flat_dictionary_of_floats(arguments):
    report = reported(**arguments)
    scalars = report.scalars()
    assert all(type(name) is str and type(value) is float for name, value in scalars.items())
    assert all(math.isfinite(value) for value in scalars.values())
    assert scalars["steps"] == 6
    assert scalars["0/forward_age"] == report.layers[0]["forward_age"]
    assert scalars["2/step_norm"] == report.layers[1]["step_norm"]
    assert scalars["time/step"] == report.time["step"]
    numbers = [v for row in report.layers for v in row.values() if isinstance(v, (int, float))]
    numbers += [v for part in (report.time, report.rule) for v in part.values() if v is not None]
    assert len(scalars) == 1 + len(numbers)


def test_scalars_leave_out_what_is_not_known_yet():
    scalars = bprong.BPRONG(mlp(5, 3), "cross_entropy", lr="auto").report().scalars()
    assert set(scalars) == {"steps", "time/statistics", "time/factorisation", "time/step", "rule/lambda"}
    assert Report(3, [], {}, {}, {"ratio": None}).scalars() == {"steps": 3.0}


def test_a_report_needs_no_factorisation(monkeypatch):
    """It costs no more than a few steps, however wide the layers are."""
    model = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    train(model, optimizer, [(torch.randn(100, 60), torch.randint(60, (100,)))])

    def refuse(*_, **__):
        raise AssertionError("a report must not factor anything")

    for name in ("eigh", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "cholesky_ex", "inv", "matrix_rank", "solve"):
        monkeypatch.setattr(torch.linalg, name, refuse)
    monkeypatch.setattr(torch, "matmul", refuse)
    monkeypatch.setattr(torch.Tensor, "__matmul__", refuse)
    report = optimizer.report()
    assert str(report)
    assert report.scalars()
    with pytest.raises(AssertionError, match="must not factor"):
        torch.eye(2) @ torch.eye(2)
