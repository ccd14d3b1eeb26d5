"""Where the optimizer's statistics come from, what it reports, and which arguments it takes."""

import copy
import gc
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.schedule import WhiteningWarning
from helpers import assert_close, classification, mlp, snapshot
from training import EXACT, assert_same_path, batches, train


def test_observe_and_empirical_labels():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options={"fisher": "empirical", "average": 0.0})
    optimizer.observe(x, y)
    train(model, optimizer, [(x, y)])
    start = mlp(5, 3)
    with pytest.raises(ValueError, match="give y with the batch"):
        train(start, bprong.BPRONG(start, options={"fisher": "empirical"}), [(x, y)])


def test_training_in_eval_mode_asks_for_observe():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3).eval()
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    with pytest.raises(RuntimeError, match=r"no batch was seen.*optimizer.observe\(x\)"):
        train(model, optimizer, [(x, y)])
    optimizer.observe(x)
    train(model, optimizer, [(x, y)])
    assert optimizer.report().steps == 1


def test_recording_a_forward_pass_of_the_users_own():
    x, y = classification(20, 5, 3)
    called, pieces = (mlp(5, 4, 3) for _ in range(2))
    pieces.load_state_dict(called.state_dict())
    first, second = (bprong.BPRONG(m, lr=0.1, options=EXACT) for m in (called, pieces))
    train(called, first, [(x, y)])
    with second.recording() as record:
        output = pieces[2](torch.tanh(pieces[0](x)))
        record(output)
    F.cross_entropy(output, y).backward()
    second.step()
    assert_same_path(snapshot(pieces), snapshot(called))


@pytest.mark.parametrize("wrap", [lambda o: (o, 1), lambda o: {"logits": o}, lambda o: type("O", (), {"logits": o})()])
def test_outputs_that_carry_the_tensor(wrap):
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return wrap(self.inner(x))

    plain = mlp(5, 4, 3)
    model = Wrapped(copy.deepcopy(plain))
    x, y = classification(20, 5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    for _ in range(2):
        optimizer.zero_grad()
        model(x)
        F.cross_entropy(model.inner(x), y).backward()
        optimizer.step()
    train(plain, bprong.BPRONG(plain, lr=0.1, options=EXACT), [(x, y)] * 2)
    assert_same_path(snapshot(model), snapshot(plain))


def test_measuring_on_a_part_of_the_batch():
    x, y = classification(40, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT | {"examples": 10})
    train(model, optimizer, [(x, y)])
    assert_close(optimizer.statistics.layers["0"].c, x[:10].mean(0), 1e-12)


def test_periods_offsets_and_averages():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3)
    options = {"average": 0.5, "record_every": 2, "forward_offset": 4, "backward_every": 3, "backward_offset": 1}
    optimizer = bprong.BPRONG(model, lr=0.0, every=5, options=options)
    data = list(batches(x, y, 10, 6))
    ages = []
    for batch in data:
        train(model, optimizer, [batch])
        ages.append(tuple(optimizer.report().layers[0].get(f"{side}_age") for side in ("forward", "backward")))
    assert ages == [(None, None), (None, 1), (None, 2), (None, 3), (1, 1), (2, 2)]
    means = [data[t][0].mean(0) for t in (0, 2, 4)]
    assert_close(optimizer.statistics.layers["0"].c, (means[0] / 4 + means[1] / 2 + means[2]) / 1.75, 1e-12)


def test_bad_statistics_keep_the_preconditioner_and_warn():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, every=1, options=EXACT)
    train(model, optimizer, [(x, y)])
    kept = optimizer.statistics.layers["0"].UU.clone()
    bad = x.clone()
    bad[0, 0] = float("nan")
    optimizer.observe(bad)
    with pytest.warns(WhiteningWarning, match="layer '0' keeps its previous forward whitener"):
        train(model, optimizer, [(x, y)])
    assert torch.equal(optimizer.statistics.layers["0"].UU, kept)


def test_the_report_is_plain_data_and_prints_as_a_table():
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, every=4)
    train(model, optimizer, batches(x, y, 20, 6))
    report = optimizer.report()
    row = report.layers[0]
    assert row["layer"] == "0"
    assert row["forward_rank"] == "5/5"
    assert row["forward_age"] == row["backward_age"] == 2
    assert row["forward_damping"] == pytest.approx(0.2)
    assert row["step_norm"] > 0
    assert row["forward_from_white"] >= 0
    assert set(report.time) == {"statistics", "factorisation", "step"}
    assert 0 < sum(report.time.values()) < 1
    assert str(report).splitlines()[1].split() == (
        [
            "layer",
            "rank",
            "z",
            "rank",
            "δ",
            "ε",
            "z",
            "ε",
            "δ",
            "age",
            "z",
            "age",
            "δ",
            "z",
            "off",
            "white",
            "δ",
            "off",
            "white",
            "step",
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1}, "lr must be a finite number of at least 0, not -1"),
        ({"momentum": 1}, "less than 1, not 1"),
        ({"nesterov": True}, "nesterov needs a momentum"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"every": 0}, "forward_every must be a whole number of at least 1"),
        ({"likelihood": "softmax"}, "likelihood must be one of"),
        ({"options": {"fischer": "exact"}}, "options has no 'fischer'; it takes fisher, forward_every"),
        ({"options": {"fisher": "true"}}, "fisher must be one of"),
    ],
)
def test_bad_arguments_are_answered_by_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        bprong.BPRONG(mlp(5, 3), **arguments)


def test_at_most_twelve_arguments():
    assert len(inspect.signature(bprong.BPRONG).parameters) <= 12


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="Conv2d has no nn.Linear"):
        bprong.BPRONG(nn.Conv2d(1, 1, 1))


def test_without_a_bias_nothing_is_centred():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3, bias=False)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    train(model, optimizer, [(x, y)])
    assert optimizer.statistics.layers["0"].c is None
    damped = x.T @ x / 60 + 0.2 * torch.eye(5, dtype=torch.float64)
    assert_close(optimizer.statistics.layers["0"].UU, torch.linalg.inv(damped), 1e-10)


def test_the_hook_goes_with_the_optimizer():
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model)
    assert len(model._forward_pre_hooks) == 1
    del optimizer
    gc.collect()
    assert not model._forward_pre_hooks
