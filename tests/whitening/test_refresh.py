"""The refresh loop: what it refreshes, what survives a failure, and when a failure is raised."""

import math
import re
import warnings

import pytest
import torch
from torch import nn

import bprong
import bprong.network.rewhitening
from bprong.capture.request import LayerMoments
from bprong.capture.weights import weight_matrices_of
from bprong.errors import WhiteningError, WhiteningWarning
from bprong.linalg.factors import Damping
from bprong.linalg.roots import Root
from bprong.whitening.layer import PATIENCE, Layer
from bprong.whitening.layers import Layers
from bprong.whitening.refresh import refresh, update
from bprong.whitening.schedule import Periods, Schedule
from helpers import (
    Idle,
    assert_close,
    assert_same_state,
    assert_unchanged,
    classification,
    error_moments,
    input_moments,
    snapshot,
)
from training import train_whitened as train
from training import whitened

NOW = {"forward_every": 1, "backward_every": 1, "backward_offset": 0}


# The loop itself ------------------------------------------------------------------------------------------------------


def made(backward=(1, 0), **others):
    """Two layers of one shape, and a schedule by which their forward sides are due at every step."""
    layers = Layers(Layer(weight_matrices_of(str(i), nn.Linear(4, 3).double())[0]) for i in range(2))
    periods = Periods(1, 0, *backward, **others)
    return layers, Schedule(layers, periods)


def measured(layers, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    rows = scale * torch.randn(30, 7, dtype=torch.float64, generator=generator)
    return {name: LayerMoments(input_moments(rows[:, :4]), error_moments(rows[:, 4:], 30)) for name in layers}


def damping(layer, side):
    return Damping(0.1 if side is layer.forward else 0.03)


def test_every_side_that_was_measured_is_taken_with_its_damping():
    layers, schedule = made()
    schedule.t = 5
    schedule.plan()
    taken = []
    updated = update(layers, measured(layers), 0.0)
    refresh(updated, schedule, damping, lambda *arguments: taken.append(arguments))
    assert [(layer.name, side.name, epsilon.value) for layer, side, _, epsilon, _ in taken] == [
        ("0", "forward", 0.1), ("0", "backward", 0.03), ("1", "forward", 0.1), ("1", "backward", 0.03),
    ]  # fmt: skip
    assert all(moments is side.moments for _, side, moments, _, _ in taken)
    assert all(side.refreshed_at == 5 for layer in layers.values() for side in layer.sides)
    assert all(factor is None for *_, factor in taken), "a process that trains alone shares no factors"


def test_only_sides_that_are_due_are_refreshed():
    layers, schedule = made(backward=(2, 1))
    taken = []
    updated = update(layers, measured(layers), 0.0)
    refresh(updated, schedule, damping, lambda layer, side, *_: taken.append(side.name))
    assert taken == ["forward", "forward"]
    assert layers["0"].backward.refreshed_at is None
    assert layers["0"].backward.moments is not None, "it was measured"


def test_by_drift_only_sides_that_have_moved_are_refreshed():
    layers, schedule = made(refresh="drift")

    def take(layer, side, moments, epsilon, factor):
        taken.append(side)
        layer.take(side, moments, epsilon, factor)

    for scale, sides in ((1.0, 4), (1.0, 0), (2.0, 4)):
        taken = []
        refresh(update(layers, measured(layers, scale=scale), 0.0), schedule, damping, take)
        assert len(taken) == sides


@pytest.mark.filterwarnings("ignore::bprong.errors.WhiteningWarning")
def test_a_side_that_fails_does_not_stop_the_others():
    layers, schedule = made()

    def take(layer, side, *_):
        if layer.name == "0" and side is layer.forward:
            raise WhiteningError("no reason")

    refresh(update(layers, measured(layers), 0.0), schedule, damping, take)
    assert layers["0"].forward.failures == 1
    assert layers["0"].forward.refreshed_at is None
    assert layers["0"].backward.refreshed_at == layers["1"].forward.refreshed_at == 0


# Failures in the paper's network --------------------------------------------------------------------------------------


def nan_batch(x):
    x = x.clone()
    x[3, 1] = math.nan
    return x


def test_statistics_that_are_not_finite_keep_the_whitener_warn_once_for_each_layer_and_raise_at_last():
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, **NOW)
    rewhitening.step(x)
    before = snapshot(model)
    with pytest.warns(WhiteningWarning) as caught:
        assert rewhitening.step(nan_batch(x)) == []
    messages = [str(w.message) for w in caught]
    assert len(messages) == 2
    assert "layer '0' keeps its previous forward whitener: the statistics are not finite" in messages[0]
    assert "layer '2'" in messages[1]
    assert {w.filename for w in caught} == {__file__}, "the warning names the user's line"
    assert_unchanged(before, snapshot(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewhitening.step(nan_batch(x))  # no second warning
        with pytest.raises(
            WhiteningError, match=f"layer '0', forward whitening, {PATIENCE} times in a row: .*not finite"
        ):
            rewhitening.step(nan_batch(x))
    assert_unchanged(before, snapshot(model))


@pytest.mark.filterwarnings("ignore::bprong.errors.WhiteningWarning")
def test_failures_are_counted_in_a_row():
    x, _ = classification(30, 5, 3)
    _, _, rewhitening = whitened(5, 4, 3, **NOW)
    for _ in range(3):
        for _ in range(PATIENCE - 1):
            assert rewhitening.step(nan_batch(x)) == []
        assert len(rewhitening.step(x)) == 4


def test_a_bad_batch_does_not_enter_the_running_average():
    x, _ = classification(30, 5, 3)
    _, _, rewhitening = whitened(5, 4, 3, average=0.9, **NOW)
    rewhitening.step(x)
    with pytest.warns(WhiteningWarning):
        rewhitening.step(nan_batch(x))
    assert len(rewhitening.step(x)) == 4


def test_a_failing_factorisation_keeps_the_whitener(monkeypatch):
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, **NOW)
    rewhitening.step(x)
    before = snapshot(model)

    def fail(*_):
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.warns(WhiteningWarning) as caught:
        assert rewhitening.step(x) == []
    assert ["no convergence" in str(w.message) for w in caught] == [True, True]
    assert_unchanged(before, snapshot(model))


def test_a_singular_moment_without_damping_keeps_the_whitener():
    x, _ = classification(30, 5, 3)
    x[:, 2] = 1.0
    model, _, rewhitening = whitened(5, 4, 3, forward_damping=0.0, **NOW)
    before = model(x)
    with pytest.warns(WhiteningWarning, match="layer '0'.*span 4 of 5 directions.*larger damping"):
        rewhitening.step(x)
    assert torch.equal(model[0].U, torch.eye(5, dtype=torch.float64))
    assert_close(model(x), before, 1e-12)


def hilbert(d):
    """Invertible, but not in float32: its condition number at d = 8 is 1e10."""
    return torch.tensor([[1 / (i + j + 1) for j in range(d)] for i in range(d)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (hilbert, r"change its outputs on this batch by .* relative, more than torch.float32 allows"),
        (lambda d: torch.zeros(d, d), "its new coordinates cannot be inverted"),
        (lambda d: torch.full((d, d), math.nan), "change its outputs on this batch by nan"),
    ],
    ids=["ill-conditioned", "singular", "nan"],
)
def test_a_refresh_that_would_change_the_outputs_is_undone(matrix, message, monkeypatch):
    x, y = classification(30, 8, 3, dtype=torch.float32)
    model, optimizer, rewhitening = whitened(8, 8, 8, dtype=torch.float32, **NOW)
    train(model, optimizer, rewhitening, x, y, 2)
    before = snapshot(model)
    momentum = optimizer.state[model[0].weight_dagger]["momentum_buffer"].clone()

    def unfit(second, *_):
        return Root(matrix(len(second)), second.diagonal(), second)

    monkeypatch.setattr(bprong.network.rewhitening, "root_of", unfit)
    with pytest.warns(WhiteningWarning) as caught:
        assert rewhitening.step(x) == []
    assert [str(w.message)[:9] for w in caught] == ["layer '0'", "layer '2'"]
    assert re.search(message, str(caught[0].message))
    assert_unchanged(before, snapshot(model))
    assert torch.equal(momentum, optimizer.state[model[0].weight_dagger]["momentum_buffer"])


def test_parameters_that_are_not_finite_are_named_as_the_cause():
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 3, **NOW)
    with torch.no_grad():
        model[0].weight_dagger[0, 0] = math.nan
    with pytest.warns(WhiteningWarning) as said:
        rewhitening.step(x)
    assert "its outputs on this batch are not finite" in str(said[0].message)


def test_a_layer_that_is_never_called_is_named():
    model = bprong.whiten_(Idle())
    rewhitening = bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), "cross_entropy", **NOW)
    x = torch.randn(8, 5)
    with pytest.warns(WhiteningWarning, match="layer 'idle'.*no statistics reached it; is it used"):
        done = rewhitening.step(x)
    assert {r.layer for r in done} == {"used"}
    model.idle.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * PATIENCE):
            rewhitening.step(x)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (torch.zeros(4, 7, dtype=torch.float64), {}, r"of 5 inputs was given a tensor of shape \(4, 7\)"),
        (torch.zeros(0, 5, dtype=torch.float64), {}, "the batch is empty"),
        (
            torch.ones(4, 5, dtype=torch.float64),
            {"loss": "cross_entropy", "classes": 1},
            "declare nn.BCEWithLogitsLoss",
        ),
        (
            torch.ones(4, 5, dtype=torch.float64),
            {"y": torch.zeros(3, dtype=torch.long), "fisher": "empirical"},
            "shape",
        ),
    ],
)
def test_an_unfit_batch_raises_before_anything_is_changed(batch, options, message):
    options = dict(options)
    classes = options.pop("classes", 3)
    y = options.pop("y", None)
    model, _, rewhitening = whitened(5, 4, classes, **options, **NOW)
    before = snapshot(model)
    state = rewhitening.state_dict()
    with pytest.raises(ValueError, match=message):
        rewhitening.step(batch, y)
    assert_unchanged(before, snapshot(model))
    assert_same_state(rewhitening.state_dict(), state)  # the iteration did not count
