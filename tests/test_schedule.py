"""Rewhitening: where statistics come from, what survives a failure, what is refused, how it resumes."""

import io
import math
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
import bprong.rewhitening
from bprong.schedule import PATIENCE, WhiteningWarning, mixed
from bprong.whitening import Whitener, WhiteningError
from helpers import Idle, assert_close, assert_unchanged, classification, layers_of, mlp, snapshot

NOW = {"forward_every": 1, "backward_every": 1, "backward_offset": 0}


def whitened(*widths, lr=0.05, momentum=0.9, dtype=torch.float64, **options):
    model = bprong.whiten_(mlp(*widths, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, optimizer, bprong.Rewhitening(model, optimizer, **options)


def train(model, optimizer, rewhitening, x, y, steps):
    for _ in range(steps):
        rewhitening.step(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("damping", [0.1, 1e-4])
def test_a_thousand_rewhitenings_in_float32_on_rank_deficient_data_drift_below_1e_4(damping):
    """Constant features, dead units, fewer examples than features; the batch, hence U, c and R, changes each time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) @ torch.randn(6, 40, generator=generator)
    x[:, ::5] = 0.7
    model = mlp(40, 30, 20, 10, dtype=torch.float32, phi=nn.ReLU)
    with torch.no_grad():
        model[0].bias[:10] = -100.0  # dead for ever
    before = model(x).detach()
    bprong.whiten_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rewhitening = bprong.Rewhitening(model, optimizer, forward_damping=damping, backward_damping=damping, **NOW)
    for t in range(1000):
        chosen = torch.randint(0, 400, (16,), generator=generator)
        assert len(rewhitening.step(x[chosen])) == 6, t
    drift = float((model(x).detach() - before).norm() / before.norm())
    folded = float((bprong.fold(model)(x).detach() - before).norm() / before.norm())
    print(f"damping {damping}: outputs drifted by {drift:.1e}, folded {folded:.1e}")
    assert 0 < drift < 1e-4
    assert folded < 1e-4


def test_moments_from_a_held_sample_ignore_the_batch():
    x, _ = classification(60, 5, 3)
    held, other = x[:40], x[40:]
    model, _, rewhitening = whitened(5, 4, 3, fisher="exact", samples=held, **NOW)
    rewhitening.step(other)
    assert_close(model[0].c, held.mean(0), 1e-12)
    assert rewhitening.step()  # no batch is needed at all
    model, _, rewhitening = whitened(5, 4, 3, fisher="empirical", samples=(held, torch.zeros(40, dtype=torch.long)))
    for _ in range(51):
        rewhitening.step()


def test_moments_as_a_running_average_over_batches():
    x, _ = classification(60, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, average=0.5, record_every=2, forward_every=5, forward_offset=4)
    for t in range(5):
        rewhitening.step(x[t * 10 : (t + 1) * 10])
    # measured at t = 0, 2, 4 with weights 1/4, 1/2, 1
    means = [x[t * 10 : (t + 1) * 10].mean(0) for t in (0, 2, 4)]
    expected = (means[0] / 4 + means[1] / 2 + means[2]) / 1.75
    assert_close(model[0].c, expected, 1e-12)


def test_an_average_sees_more_directions_than_a_batch():
    x, _ = classification(60, 20, 3)
    _, _, alone = whitened(20, 3, **NOW)
    _, _, averaged = whitened(20, 3, average=0.9, **NOW)
    ranks = [[r.step(x[t * 5 : t * 5 + 5])[0].whitener.rank for t in range(6)] for r in (alone, averaged)]
    assert ranks[0] == [4] * 6
    assert ranks[1] == [4, 9, 14, 19, 20, 20]


def test_empirical_fisher_takes_y_and_says_so_when_it_is_missing():
    x, y = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, fisher="empirical", **NOW)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"give y with the batch, step\(x, y\)"):
        rewhitening.step(x)
    assert_unchanged(before, snapshot(model))
    assert len(rewhitening.step(x, y)) == 4


class Poisson(bprong.Likelihood):
    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.detach().exp())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian", Poisson()])
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_every_likelihood_and_fisher_keeps_the_function(likelihood, fisher):
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, likelihood=likelihood, fisher=fisher, **NOW)
    before = model(x)
    if fisher == "exact" and isinstance(likelihood, Poisson):
        with pytest.raises(TypeError, match="roots"):
            rewhitening.step(x)
    else:
        rewhitening.step(x)
        assert not torch.equal(model[0].R, torch.eye(4, dtype=torch.float64))
    assert_close(model(x), before, 1e-12)


def nan_batch(x):
    x = x.clone()
    x[3, 1] = math.nan
    return x


def test_non_finite_statistics_keep_the_whitener_warn_once_per_layer_and_raise_at_last():
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
    assert_unchanged(before, snapshot(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewhitening.step(nan_batch(x))  # not warned of again
        with pytest.raises(
            WhiteningError, match=f"layer '0', forward whitening, {PATIENCE} times in a row: .*not finite"
        ):
            rewhitening.step(nan_batch(x))
    assert_unchanged(before, snapshot(model))


@pytest.mark.filterwarnings("ignore::bprong.schedule.WhiteningWarning")
def test_one_good_refresh_makes_failures_be_forgotten():
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
def test_a_rewhitening_that_would_change_the_outputs_is_rolled_back(matrix, message, monkeypatch):
    x, y = classification(30, 8, 3, dtype=torch.float32)
    model, optimizer, rewhitening = whitened(8, 8, 8, dtype=torch.float32, **NOW)
    train(model, optimizer, rewhitening, x, y, 2)
    before, momentum = snapshot(model), optimizer.state[model[0].weight_dagger]["momentum_buffer"].clone()

    def unfit(second, *_):
        return Whitener(matrix(len(second)), second, second.diagonal(), second, second)

    monkeypatch.setattr(bprong.rewhitening, "whitener", unfit)
    with pytest.warns(WhiteningWarning) as caught:
        assert rewhitening.step(x) == []
    assert [str(w.message)[:9] for w in caught] == ["layer '0'", "layer '2'"]
    assert re.search(message, str(caught[0].message))
    assert_unchanged(before, snapshot(model))
    assert torch.equal(momentum, optimizer.state[model[0].weight_dagger]["momentum_buffer"])


def test_a_layer_that_is_never_called_is_named():
    model = bprong.whiten_(Idle())
    rewhitening = bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), **NOW)
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
        (torch.zeros(4, 7, dtype=torch.float64), {}, "layer '0' takes rows of 5 features"),
        (torch.zeros(0, 5, dtype=torch.float64), {}, "the batch is empty"),
        (None, {}, "nothing to measure"),
        (torch.ones(4, 5, dtype=torch.float64), {"likelihood": "categorical", "classes": 1}, "use bernoulli"),
        (
            torch.ones(4, 5, dtype=torch.float64),
            {"y": torch.zeros(3, dtype=torch.long), "fisher": "empirical"},
            "shape",
        ),
    ],
)
def test_bad_input_is_a_clear_error_before_anything_is_changed(batch, options, message):
    classes, y = options.pop("classes", 3), options.pop("y", None)
    model, _, rewhitening = whitened(5, 4, classes, **options, **NOW)
    before, state = snapshot(model), rewhitening.state_dict()
    with pytest.raises(ValueError, match=message):
        rewhitening.step(batch, y)
    assert_unchanged(before, snapshot(model))
    assert rewhitening.state_dict() == state  # the iteration did not count


def test_an_optimizer_built_before_whiten_is_refused():
    model = mlp(5, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bprong.whiten_(model)
    with pytest.raises(ValueError, match="layer '0': it was built before whiten_"):
        bprong.Rewhitening(model, optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_every": 0}, "forward_every must be a whole number of at least 1, not 0"),
        ({"forward_every": 2.5}, "whole numbers, not 2.5"),
        ({"backward_every": 10, "backward_offset": 10}, r"0 … backward_every − 1 = 9, not 10"),
        ({"fisher": "true"}, "fisher must be one of .*'sampled'"),
        ({"factorisation": "qr"}, "factorisation must be one of"),
        ({"average": 1.0}, "average must be .* less than 1"),
        ({"record_every": -1, "average": 0.5}, "record_every"),
        ({"record_every": 5}, "give average too"),
        ({"samples": (1, 2, 3)}, "not a tuple of 3"),
        ({"forward_damping": None}, "finite number of at least 0, not None"),
        ({"backward_every": "10"}, "whole numbers, not '10'"),
        ({"likelihood": "softmax"}, "likelihood must be one of"),
        ({"forward_damping": -1}, "damping must be"),
    ],
)
def test_bad_options_are_answered_by_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        whitened(5, 4, 3, **options)


def test_a_model_without_whitened_layers_is_refused():
    model = mlp(5, 3)
    with pytest.raises(ValueError, match="call bprong.whiten_"):
        bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("average", [0.0, 0.8])
def test_resuming_from_a_checkpoint_continues_bit_for_bit(average):
    x, y = classification(40, 5, 3)
    options = {"average": average, "forward_every": 3, "backward_every": 4, "backward_offset": 2}
    straight = whitened(5, 4, 3, **options)
    train(*straight, x, y, 7)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in straight], file)
    train(*straight, x, y, 10)
    file.seek(0)
    torch.manual_seed(99)  # another process has another seed
    resumed = whitened(5, 4, 3, **options)
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*resumed, x, y, 10)
    assert_unchanged(snapshot(straight[0]), snapshot(resumed[0]))
    assert any(layer.U.sum() != layer.in_features for layer in layers_of(resumed[0]))


def test_a_state_of_another_model_is_refused():
    x, _ = classification(40, 5, 3)
    _, _, rewhitening = whitened(5, 4, 3, average=0.5, **NOW)
    rewhitening.step(x)
    _, _, other = whitened(5, 3, average=0.5)
    with pytest.raises(ValueError, match=r"layers this model does not have: \['backward:2', 'forward:2'\]"):
        other.load_state_dict(rewhitening.state_dict())


def test_training_is_undisturbed_between_refreshes_and_dropout_draws_as_without_it():
    """The user's random stream and BatchNorm statistics are those of a loop without Rewhitening."""

    def run(rewhiten):
        torch.manual_seed(2)
        body = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)]
        model = bprong.whiten_(nn.Sequential(*body, nn.Linear(6, 3)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rewhitening = bprong.Rewhitening(model, optimizer, **NOW)
        x, y = classification(30, 5, 3)
        losses = []
        for _ in range(5):
            if rewhiten:
                rewhitening.step(x)
            optimizer.zero_grad()
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
        return torch.stack(losses).detach(), model[1].running_mean

    for ours, plain in zip(run(True), run(False), strict=True):
        assert_close(ours, plain, 1e-12)


def test_under_bf16_autocast_it_trains():
    x, y = classification(64, 5, 3, dtype=torch.float32)
    model, optimizer, rewhitening = whitened(5, 16, 3, dtype=torch.float32, forward_every=5, backward_every=5,
                                             backward_offset=2)  # fmt: skip
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            rewhitening.step(x)
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4


def test_the_backward_offset_is_half_its_period_by_default():
    x, _ = classification(30, 5, 3)
    _, _, rewhitening = whitened(5, 4, 3, forward_every=100, backward_every=np.int64(6))
    assert [t for t in range(8) if {r.side for r in rewhitening.step(x)} == {"backward"}] == [3]


def test_targets_are_drawn_anew_at_every_refresh_and_from_no_stream_of_the_users():
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, **NOW)
    drawn = []
    for _ in range(3):
        rewhitening.step(x)
        drawn.append(model[2].R.clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert mixed(0, 0) not in (0, 1)
    assert len({mixed(seed, t) for seed in range(20) for t in range(20)}) == 400
    assert mixed(1, 0) != mixed(0, 1)


def test_recording_between_refreshes_measures_errors_too():
    x, _ = classification(60, 5, 3)
    _, _, rewhitening = whitened(5, 4, 3, average=0.5, record_every=1, backward_every=5, backward_offset=4)
    for t in range(4):
        rewhitening.step(x[t * 10 : t * 10 + 10])
    assert rewhitening.state_dict()["moments"]["backward:0"]["weight"] == 10 * (1 + 1 / 2 + 1 / 4 + 1 / 8)


def test_forward_only_layers_need_no_backward_pass_and_no_fitting_likelihood():
    model = bprong.whiten_(mlp(5, 1), backward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewhitening = bprong.Rewhitening(model, optimizer, average=0.5, record_every=1)
    assert len(rewhitening.step(torch.randn(9, 5, dtype=torch.float64))) == 1


def test_freezing_the_bias_later_takes_c_back_to_zero_and_the_average_with_it():
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 3, average=0.5, **NOW)
    rewhitening.step(x)
    assert model[0].c.any()
    before = model(x)
    model[0].bias_dagger.requires_grad_(False)
    rewhitening.step(x)
    assert not model[0].c.any()
    assert_close(model(x), before, 1e-12)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="works in one process"):
        whitened(5, 3)


def test_a_state_that_is_none_is_refused():
    _, _, rewhitening = whitened(5, 3)
    with pytest.raises(ValueError, match="has t, seed and moments"):
        rewhitening.load_state_dict({})


def test_parameters_that_are_not_finite_are_called_that():
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 3, **NOW)
    with torch.no_grad():
        model[0].weight_dagger[0, 0] = math.nan
    with pytest.warns(WhiteningWarning, match="its outputs on this batch are not finite"):
        rewhitening.step(x)
