"""The report: plain data, a table that explains itself, numbers for loggers, at little cost."""

import math

import pytest
import torch
from torch import nn

import bprong
from bprong.optim import Periods
from bprong.optim.report import COLUMNS, Report, by_block
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
    assert "not whitened (Adam): 3.weight, 3.bias (in LayerNorm)" in lines
    assert lines[-2].startswith("share of time since the first step: statistics ")
    assert lines[-1] == "judgement: training normally"


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
    assert set(report.rule) == {"alpha", "mu", "lambda", "ratio", "multiplier"}
    line = next(line for line in str(report).splitlines() if line.startswith("step rule: "))
    names = [part.split()[0] for part in line.removeprefix("step rule: ").split(", ")]
    assert names == ["α", "μ", "λ", "actual/predicted", "multiplier"]


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
    rule = {"rule/lambda", "rule/multiplier"}
    assert set(scalars) == {"steps", "time/statistics", "time/factorisation", "time/step"} | rule
    assert Report(3, [], {}, {}, {"ratio": None}).scalars() == {"steps": 3.0}


def test_loggers_get_the_multiplier_of_schedules():
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy")
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.25, 5)
    train(model, optimizer, [classification(60, 5, 3)])
    assert scheduler.get_last_lr() == [0.25]
    assert optimizer.report().scalars()["rule/multiplier"] == 0.25


# Blocks ---------------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(blocks)]
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(layers)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        z = self.first(x)
        for block in self.blocks:
            z = block(z)
        return self.last(z[:, 0])


def transformers_report(blocks):
    torch.manual_seed(0)
    model = Transformer(blocks)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, every=Periods(1, refresh="drift"))
    data = [(torch.randn(30, 4, 5), torch.randint(3, (30,))) for _ in range(3)]
    train(model, optimizer, data)
    return optimizer.report()


def test_the_layers_of_a_transformer_are_printed_by_block():
    """With the largest numbers of their layers; the data, also for loggers, has each layer."""
    report = transformers_report(2)
    lines = str(report).splitlines()
    assert [line.split("  ")[0].strip() for line in map(str.lstrip, lines[2:6])] == [
        "first", "blocks.0 (6 layers)", "blocks.1 (6 layers)", "last"
    ]  # fmt: skip
    assert len(report.layers) == 14
    assert "blocks.0.linear1/step_norm" in report.scalars()
    members = [row for row in report.layers if row["layer"].startswith("blocks.1.")]
    block = by_block(report.layers)[2]
    assert block["forward_factor"] == "exact"
    for key in ("step_norm", "forward_age", "forward_drift", "backward_damping"):
        assert block[key] == max(row[key] for row in members)
    assert any("largest values of their layers" in line for line in lines)


def test_a_deep_transformer_takes_a_line_for_each_block():
    lines = str(transformers_report(12)).splitlines()
    assert len(lines) < 12 + 16
    assert max(map(len, lines)) <= 120


def test_parameters_on_adam_are_printed_by_reason():
    fallback = dict.fromkeys("abcd", "in LayerNorm") | {"e": "in LSTM"}
    lines = str(Report(3, [{"layer": "0"}], fallback, {}, {})).splitlines()
    assert "not whitened (Adam): a, b, c, … (in LayerNorm)" in lines
    assert "not whitened (Adam): e (in LSTM)" in lines


@pytest.mark.parametrize(
    "names",
    [["0", "2", "4"], ["net.0", "net.2"], ["a.0.fc", "a.1.fc"], ["layer1", "layer2"], ["conv1.weight", "conv1.bias"]],
)
def test_layers_that_are_alone_in_their_module_keep_their_names(names):
    rows = [{"layer": name, "step_norm": None} for name in names]
    assert by_block(rows) == rows


def test_what_is_known_of_some_layers_of_a_block_is_shown():
    rows = [
        {"layer": "h.0.q", "forward_factor": "identity 4", "forward_age": None, "step_norm": None},
        {"layer": "h.0.k", "forward_factor": "exact 4", "forward_age": 3, "step_norm": None},
    ]
    (block,) = by_block(rows)
    expected = {"layer": "h.0 (2 layers)", "forward_factor": "exact, identity", "forward_age": 3, "step_norm": None}
    assert block == expected


# The judgement --------------------------------------------------------------------------------------------------------


def test_before_the_first_step_nothing_is_judged():
    assert bprong.BPRONG(mlp(5, 3), "cross_entropy").report().judgement == "no step was made yet"


@pytest.mark.parametrize("arguments", [{"lr": "auto", "every": None}, {"every": Periods(4, refresh="drift")}])
def test_normal_training_is_called_so(arguments):
    for steps in (1, 6, 40):
        assert reported(steps=steps, **arguments).judgement == "training normally"


def report_after_growth(size, period=30):
    """The report at the third time that statistics were due, since when the inputs have become so much larger."""
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3, phi=nn.Identity)
    every = Periods(period, refresh="drift")
    optimizer = literal(model, "cross_entropy", lr=0.0, every=every, forward_damping=1e-9, options=EXACT)
    train(model, optimizer, [(x, y)] * 2 * period + [(size * x, y)])
    return optimizer.report()


def test_refreshes_are_too_rare_when_most_sides_have_changed_by_more_than_they_were():
    """Steps along such directions are twice as long as the new statistics ask for, which gains nothing any more."""
    assert report_after_growth(1.1).judgement == "training normally"
    report = report_after_growth(4.0)
    assert report.judgement.startswith("refreshes too rare: statistics change by ")
    assert str(report).endswith(report.judgement)
    assert report_after_growth(4.0, period=5).judgement == "training normally", "the first steps change statistics"
    one = {"layer": "a", "forward_drift": 9.0, "backward_drift": None}
    others = {"layer": "b", "forward_drift": 0.1, "backward_drift": 0.3}
    assert Report(99, [one, others], {}, {}, {}).judgement == "training normally"  # one side of three
    assert Report(99, [one], {}, {}, {}).judgement.startswith("refreshes too rare")


def after_blow_ups(gaps):
    """The report of a run in which updates were made so large that they were undone, after these numbers of steps."""
    torch.manual_seed(0)
    model = mlp(5, 8, 3)
    x = torch.randn(60, 5, dtype=torch.float64)
    batch = (x, x[:, :3].argmax(-1))
    optimizer = bprong.BPRONG(model, "cross_entropy", step="natural", every=100)
    for gap in gaps:
        train(model, optimizer, [batch] * gap)
        for p in model.parameters():
            wrong = 100 * torch.randn_like(p)
            p.data += wrong
            optimizer.state[p]["last_update"] += wrong
        train(model, optimizer, [batch])
    return optimizer.report()


def test_three_undone_steps_in_sixty_are_often():
    """They and the steps that undo them are a tenth."""
    report = after_blow_ups([25, 5, 5])
    assert report.undone == 3
    assert report.judgement.startswith("steps undone often: 3 of the last 60;")
    for gaps in ([25, 5], [25, 5, 60]):
        report = after_blow_ups(gaps)
        assert report.undone < 3
        assert report.judgement == "training normally"


def test_what_was_tried_is_printed(monkeypatch):
    monkeypatch.setattr("bprong.optim.auto.race.Rival.verdict", lambda rival: (0.5, 0.01))
    report = reported(steps=25, lr="auto", every=None)
    (result,) = report.races
    assert "natural steps go on" in result
    assert f"race: {result}" in str(report).splitlines()


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
