"""Rewhitening: where its statistics come from, which arguments it takes, how it resumes."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.weights import weight_matrices_of
from bprong.linalg.moments import Limits
from bprong.whitening.layer import Layer
from helpers import assert_close, assert_unchanged, classification, layers_of, mlp, snapshot
from training import train_whitened as train
from training import whitened

NOW = {"forward_every": 1, "backward_every": 1, "backward_offset": 0}


@pytest.mark.parametrize(
    ("damping", "refreshes"),
    [
        pytest.param(0.1, 1000, marks=pytest.mark.rest),
        pytest.param(1e-4, 1000, marks=pytest.mark.rest),
        (1e-4, 150),
    ],
)
def test_a_thousand_refreshes_in_float32_on_rank_deficient_data_move_outputs_by_less_than_1e_4(damping, refreshes):
    """Constant features, dead units, fewer examples than features; the batch, hence U, c and R, changes each time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) @ torch.randn(6, 40, generator=generator)
    x[:, ::5] = 0.7
    model = mlp(40, 30, 10, dtype=torch.float32, phi=nn.ReLU)
    with torch.no_grad():
        model[0].bias[:10] = -100.0  # dead units
    before = model(x).detach()
    bprong.whiten_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rewhitening = bprong.Rewhitening(
        model, optimizer, "cross_entropy", forward_damping=damping, backward_damping=damping, **NOW
    )
    for t in range(refreshes):
        chosen = torch.randint(0, 400, (16,), generator=generator)
        assert len(rewhitening.step(x[chosen])) == 4, t
    moved = float((model(x).detach() - before).norm() / before.norm())
    folded = float((bprong.fold(model)(x).detach() - before).norm() / before.norm())
    print(f"damping {damping}: outputs moved by {moved:.1e}, folded {folded:.1e}")
    assert 0 < moved < 1e-4
    assert folded < 1e-4


# Statistics -----------------------------------------------------------------------------------------------------------


def test_moments_as_a_running_average_over_batches():
    x, _ = classification(60, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, average=0.5, forward_every=2)
    for t in range(5):
        rewhitening.step(x[t * 10 : (t + 1) * 10])
    # measured at t = 0, 2, 4 with weights 1/4, 1/2, 1
    means = [x[t * 10 : (t + 1) * 10].mean(0) for t in (0, 2, 4)]
    expected = (means[0] / 4 + means[1] / 2 + means[2]) / 1.75
    assert_close(model[0].c, expected, 1e-12)


def test_an_average_spans_more_directions_than_a_batch():
    x, _ = classification(60, 20, 3)
    _, _, alone = whitened(20, 3, **NOW)
    _, _, averaged = whitened(20, 3, average=0.9, **NOW)
    ranks = [[r.step(x[t * 5 : t * 5 + 5])[0].root.rank for t in range(6)] for r in (alone, averaged)]
    assert ranks[0] == [4] * 6
    assert ranks[1] == [4, 9, 14, 19, 20, 20]


def test_the_empirical_fisher_matrix_needs_y():
    x, y = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, fisher="empirical", **NOW)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"needs the targets of the data: give them, step\(x, y\)"):
        rewhitening.step(x)
    assert_unchanged(before, snapshot(model))
    assert len(rewhitening.step(x, y)) == 4


class Poisson(bprong.Likelihood):
    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.detach().exp())


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits", "mse", Poisson()])
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_every_likelihood_and_fisher_keeps_the_function(loss, fisher):
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, loss=loss, fisher=fisher, **NOW)
    before = model(x)
    if fisher == "exact" and isinstance(loss, Poisson):
        with pytest.raises(TypeError, match="roots"):
            rewhitening.step(x)
    else:
        rewhitening.step(x)
        assert not torch.equal(model[0].R, torch.eye(4, dtype=torch.float64))
    assert_close(model(x), before, 1e-12)


def test_targets_are_drawn_anew_at_every_refresh():
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3, **NOW)
    drawn = []
    for _ in range(3):
        rewhitening.step(x)
        drawn.append(model[2].R.clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("loss", [None, "cross_entropy"])
def test_forward_only_layers_need_no_backward_pass_and_no_fitting_likelihood(loss):
    model = bprong.whiten_(mlp(5, 1), backward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewhitening = bprong.Rewhitening(model, optimizer, loss, average=0.5)
    assert len(rewhitening.step(torch.randn(9, 5, dtype=torch.float64))) == 1


def test_when_the_bias_is_frozen_the_centre_returns_to_zero_and_the_average_starts_anew():
    x, _ = classification(30, 5, 3)
    model, _, rewhitening = whitened(5, 3, average=0.5, **NOW)
    rewhitening.step(x)
    assert model[0].c.any()
    before = model(x)
    model[0].bias_dagger.requires_grad_(False)
    rewhitening.step(x)
    assert not model[0].c.any()
    assert_close(model(x), before, 1e-12)


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_every": 0}, "forward_every must be a whole number of at least 1, not 0"),
        ({"backward_every": 10, "backward_offset": 10}, r"backward_offset must be .* less than 10, not 10"),
        ({"fisher": "true"}, "fisher must be one of .*'sampled'"),
        ({"solver": "qr"}, "solver must be one of .*'cholesky'.*, not 'qr'"),
        ({"average": 1.0}, "average must be .* less than 1"),
        ({"forward_damping": None}, "finite number of at least 0, not None"),
        ({"forward_damping": -1}, "damping must be"),
        ({"loss": "softmax"}, "loss cannot be 'softmax'. Give the loss that you minimise: nn.CrossEntropyLoss"),
        ({"seed": "a"}, "seed must be a whole number of at least 0, not 'a'"),
        ({"seed": 1.5}, "seed must be a whole number of at least 0, not 1.5"),
    ],
)
def test_errors_about_arguments_say_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        whitened(5, 4, 3, **options)


def test_the_defaults_of_the_backward_side_are_those_documented():
    x, _ = classification(30, 5, 3)
    explicit = {"fisher": "sampled", "backward_damping": 0.03, "forward_damping": 0.1}
    found = []
    for options in ({}, explicit):
        torch.manual_seed(0)
        model, _, rewhitening = whitened(5, 4, 3, seed=1, **NOW, **options)
        rewhitening.step(x)
        found.append(snapshot(model))
    assert_unchanged(*found)


def test_the_default_backward_offset_is_half_its_period():
    x, _ = classification(30, 5, 3)
    _, _, rewhitening = whitened(5, 4, 3, forward_every=100, backward_every=np.int64(6))
    assert [t for t in range(8) if {r.side for r in rewhitening.step(x)} == {"backward"}] == [3]


def test_an_optimizer_built_before_whiten_is_refused():
    model = mlp(5, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bprong.whiten_(model)
    with pytest.raises(ValueError, match="layer '0': it was built before whiten_"):
        bprong.Rewhitening(model, optimizer, "cross_entropy")


def test_a_model_without_whitened_layers_is_refused():
    model = mlp(5, 3)
    with pytest.raises(ValueError, match="call bprong.whiten_"):
        bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), "cross_entropy")


# State ----------------------------------------------------------------------------------------------------------------


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


def test_the_centre_of_a_layer_of_another_width_is_refused():
    """Both widths are whitened in three blocks of three, so their factors and moments have the same shapes."""
    narrow, wide = (Layer(weight_matrices_of("0", nn.Linear(width, 2), Limits(5))[0]) for width in (7, 8))
    state = wide.state_dict()
    wide.check_state(state)
    with pytest.raises(
        ValueError, match=r"layer '0': the state's centre has shape \(8,\), and this layer's has \(7,\)"
    ):
        narrow.check_state(state)


# Training -------------------------------------------------------------------------------------------------------------


def test_refreshes_leave_the_users_random_stream_and_batch_statistics_alone():
    """Dropout draws, and BatchNorm averages, as in a loop without Rewhitening."""

    def run(rewhiten):
        torch.manual_seed(2)
        body = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)]
        model = bprong.whiten_(nn.Sequential(*body, nn.Linear(6, 3)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", **NOW)
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


def test_everything_is_on_the_device_of_the_parameters():
    """With `meta` as the default device, a tensor made without naming a device would not mix with the others."""
    model = mlp(5, 4, 3, dtype=torch.float32)
    x, y = classification(20, 5, 3, dtype=torch.float32)
    with torch.device("meta"):
        bprong.whiten_(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for solver in ("eigh", "cholesky", "symmetric"):
            rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", solver=solver, average=0.5, **NOW)
            train(model, optimizer, rewhitening, x, y, 2)
        model.load_state_dict(bprong.whiten_(bprong.fold(model)).state_dict())
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
