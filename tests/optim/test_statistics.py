"""Where the optimizer's statistics come from: which batches, which targets, which precision."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.errors import WhiteningWarning
from bprong.optim import Periods
from bprong.whitening.layer import PATIENCE
from helpers import Woken, assert_close, classification, mlp, snapshot
from training import EXACT, assert_same_path, batches, literal, train

LOSSES = {
    "cross_entropy": F.cross_entropy,
    "bce_with_logits": lambda output, y: F.binary_cross_entropy_with_logits(output, F.one_hot(y, 3).to(output.dtype)),
    "mse": lambda output, y: F.mse_loss(output, F.one_hot(y, 3).to(output.dtype)),
}


def layer_of(optimizer, name="0"):
    return optimizer._whitening.layers[name]


# Targets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_targets_of_the_data_come_from_observe_or_from_the_call_of_the_loss(loss, scale):
    """They do not depend on a factor on the loss."""
    x, y = classification(20, 5, 3)
    found = []
    for observed in (True, False):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        options = {"fisher": "empirical", "average": 0.0}
        optimizer = bprong.BPRONG(model, loss, lr=0.1, options=options)
        if observed:
            optimizer.observe(x, y if loss == "cross_entropy" else F.one_hot(y, 3))
        (scale * LOSSES[loss](model(x), y)).backward()
        optimizer.step()
        found.append([layer_of(optimizer, name).backward.factor.inverse for name in ("0", "2")])
    for ours, expected in zip(found[1], found[0], strict=True):
        assert_close(ours, expected, 1e-12)


def test_positions_that_the_loss_ignores_are_not_targets():
    x, y = classification(20, 5, 3)
    y[::3] = -100
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options={"fisher": "empirical", "average": 0.0})
    with torch.no_grad():
        p = model(x).softmax(-1)
    train(model, optimizer, [(x, y)])
    delta = (p - F.one_hot(y.clamp(min=0), 3)) * (y >= 0)[:, None]
    counted = y >= 0
    layer = layer_of(optimizer)
    assert_close(layer.backward.moments.second, delta.T @ delta / counted.sum(), 1e-12)
    assert_close(layer.c, x[counted].mean(0), 1e-12)


def test_the_numbers_of_the_data_come_from_the_call_of_the_loss():
    """D = E[(f − y)(f − y)ᵀ]"""
    x, _ = classification(20, 5, 3)
    y = torch.randn(20, 3, dtype=torch.float64)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "mse", lr=0.01, options={"fisher": "empirical", "average": 0.0})
    with torch.no_grad():
        delta = model(x) - y
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert_close(layer_of(optimizer).backward.moments.second, delta.T @ delta / 20, 1e-12)


def test_micro_batches_draw_targets_of_their_own():
    """Two equal micro-batches: if they drew the same targets, D would be that of one of them."""
    x, y = classification(20, 5, 3)
    seconds = []
    for batches_of_one_step in (1, 2):
        torch.manual_seed(0)
        model = mlp(5, 3)
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.0, options={"average": 0.0})
        for _ in range(batches_of_one_step):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        moments = layer_of(optimizer).backward.moments
        assert moments.weight == 20 * batches_of_one_step
        seconds.append(moments.second)
    assert float((seconds[0] - seconds[1]).norm()) > 1e-3 * float(seconds[0].norm())


# Batches --------------------------------------------------------------------------------------------------------------


def test_training_in_eval_mode_needs_observe():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3).eval()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options=EXACT)
    with pytest.raises(RuntimeError, match=r"(?s)no batch to measure.*recording\(\).*observe\(x, y\)"):
        train(model, optimizer, [(x, y)])
    optimizer.observe(x)
    train(model, optimizer, [(x, y)])
    assert optimizer.report().steps == 1


def test_recording_a_forward_pass_of_the_users_own():
    x, y = classification(20, 5, 3)
    called = mlp(5, 4, 3)
    pieces = copy.deepcopy(called)
    first, second = (bprong.BPRONG(m, "cross_entropy", lr=0.1, options=EXACT) for m in (called, pieces))
    train(called, first, [(x, y)])
    with second.recording() as record:
        output = pieces[2](torch.tanh(pieces[0](x)))
        record(output)
    F.cross_entropy(output, y).backward()
    second.step()
    assert_same_path(snapshot(pieces), snapshot(called))


def test_recording_takes_the_second_dimension_of_images_for_classes():
    x = torch.randn(6, 2, 5, 7, dtype=torch.float64)
    y = torch.arange(6 * 35).view(6, 5, 7) % 3
    called = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    recorded = copy.deepcopy(called)
    first, second = (bprong.BPRONG(m, "cross_entropy", lr=0.1, options=EXACT) for m in (called, recorded))
    train(called, first, [(x, y)])
    with second.recording() as record:
        output = recorded(x)
        record(output)
    F.cross_entropy(output, y).backward()
    second.step()
    assert_same_path(snapshot(recorded), snapshot(called))


def test_recording_leaves_the_random_stream_alone_and_takes_several_batches():
    x, y = classification(40, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options={"average": 0.0})
    before = torch.random.get_rng_state()
    with optimizer.recording() as record:
        for part in x.chunk(2):
            record(model[2](torch.tanh(model[0](part))))
    assert torch.equal(before, torch.random.get_rng_state())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    layer = layer_of(optimizer)
    assert layer.forward.moments.weight == 40
    assert_close(layer.c, x.mean(0), 1e-12)
    with optimizer.recording() as record:  # nothing is due, so nothing is recorded
        assert not model[0]._forward_hooks
        record(model(x))
    assert not optimizer._meter.recorded


@pytest.mark.parametrize("wrap", [lambda o: (o, 1), lambda o: {"logits": o}, lambda o: type("O", (), {"logits": o})()])
def test_outputs_that_contain_the_tensor(wrap):
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return wrap(self.inner(x))

    plain = mlp(5, 4, 3)
    model = Wrapped(copy.deepcopy(plain))
    x, y = classification(20, 5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options=EXACT)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(x)
        logits = output.logits if hasattr(output, "logits") else output[0 if isinstance(output, tuple) else "logits"]
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    train(plain, bprong.BPRONG(plain, "cross_entropy", lr=0.1, options=EXACT), [(x, y)] * 2)
    assert_same_path(snapshot(model), snapshot(plain))


def test_a_batch_that_was_observed_or_recorded_serves_one_step():
    x, y = classification(60, 5, 3)
    for way in ("observe", "record"):
        model = mlp(5, 3)
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.0, every=1, options=EXACT)
        if way == "observe":
            optimizer.observe(x[:10])
        else:
            with optimizer.recording() as record:
                record(model[0](x[:10]))
        train(model, optimizer, [(x[20:40], y[20:40])])
        assert_close(layer_of(optimizer).c, x[:10].mean(0), 1e-12)
        train(model, optimizer, [(x[20:40], y[20:40])])
        assert_close(layer_of(optimizer).c, x[20:40].mean(0), 1e-12)


def test_after_loading_a_state_batches_are_kept_if_a_refresh_is_due():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, every=2, options=EXACT)
    train(model, optimizer, [(x, y)])
    early = copy.deepcopy(optimizer.state_dict())  # step 1: nothing due
    train(model, optimizer, [(x, y)])
    due = copy.deepcopy(optimizer.state_dict())  # step 2: due
    optimizer.load_state_dict(early)
    optimizer.load_state_dict(due)
    train(model, optimizer, [(x + 1, y)])
    assert_close(layer_of(optimizer).c, (x + 1).mean(0), 1e-12)


def test_batches_of_refused_steps_are_forgotten():
    x, y = classification(20, 5, 3)
    bad = x.clone()
    bad[0, 0] = float("nan")
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options=EXACT)
    with pytest.warns(WhiteningWarning, match="step 0 refused"):
        train(model, optimizer, [(bad, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [(x, y)])
    assert_close(layer_of(optimizer).c, x.mean(0), 1e-12)


def test_refused_steps_are_counted_in_a_row():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    for _ in range(PATIENCE + 1):
        train(model, optimizer, [(x, y)])
        model[0].weight.grad.fill_(float("nan"))
        with pytest.warns(WhiteningWarning, match="refused"):
            optimizer.step()


def test_a_batch_may_be_changed_in_place_before_the_step():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    for lr in (0.1, "auto"):
        buffer = x.clone()
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr)
        train(model, optimizer, [(x, y)])
        F.cross_entropy(model(buffer), y).backward()
        buffer.zero_()
        optimizer.step()
        assert torch.allclose(layer_of(optimizer).c, x.mean(0))


def test_a_model_that_works_in_place_does_not_change_the_users_batch_when_it_is_measured():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, x):
            return self.layer(x.mul_(0.5))

    x, y = classification(20, 5, 3)
    model = Scaling()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    optimizer.observe(x)
    before = x.clone()
    F.cross_entropy(model(x.clone()), y).backward()
    optimizer.step()
    assert torch.equal(x, before)


def test_containers_can_be_changed_after_the_call():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, batch):
            return self.layer(batch.pop("x"))

    x, y = classification(20, 5, 3)
    model = Named()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    F.cross_entropy(model({"x": x}), y).backward()
    optimizer.step()
    assert optimizer.report().steps == 1


# Refreshes ------------------------------------------------------------------------------------------------------------


def test_periods_offsets_and_averages():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3)
    periods = Periods(forward_every=2, forward_offset=1, backward_every=3, backward_offset=1)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.0, every=periods, options={"average": 0.5})
    data = list(batches(x, y, 10, 6))
    ages = []
    for batch in data:
        train(model, optimizer, [batch])
        ages.append(tuple(optimizer.report().layers[0].get(f"{side}_age") for side in ("forward", "backward")))
    assert ages == [(None, None), (1, 1), (2, 2), (1, 3), (2, 1), (1, 2)]
    means = [data[t][0].mean(0) for t in (1, 3, 5)]
    assert_close(layer_of(optimizer).c, (means[0] / 4 + means[1] / 2 + means[2]) / 1.75, 1e-12)


def test_bad_statistics_keep_the_factor_and_warn():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, every=1, options=EXACT)
    train(model, optimizer, [(x, y)])
    kept = layer_of(optimizer).forward.factor
    bad = x.clone()
    bad[0, 0] = float("nan")
    optimizer.observe(bad)
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(WhiteningWarning, match="layer '0' keeps its previous forward whitener") as said:
        optimizer.step()
    assert said[0].filename == __file__, "the warning names the user's line"
    assert layer_of(optimizer).forward.factor is kept


def test_without_a_bias_nothing_is_centred():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3, bias=False)
    optimizer = literal(model, "cross_entropy", lr=0.1, options=EXACT)
    train(model, optimizer, [(x, y)])
    assert layer_of(optimizer).c is None
    damped = x.T @ x / 60 + 0.2 * torch.eye(5, dtype=torch.float64)
    assert_close(layer_of(optimizer).forward.factor.inverse, torch.linalg.inv(damped), 1e-10)


def test_an_auxiliary_head_is_whitened_forward_only_with_a_warning():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 4)
            self.main = nn.Linear(4, 3)
            self.aux = nn.Linear(4, 3)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.main(h), self.aux(h)

    x, y = classification(20, 5, 3, dtype=torch.float32)
    model = Heads()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    main, aux = model(x)
    (F.cross_entropy(main, y) + F.cross_entropy(aux, y)).backward()
    with pytest.warns(
        WhiteningWarning, match="layer 'aux' is trained, but whitened on the side of its inputs only"
    ) as said:
        optimizer.step()
    assert said[0].filename == __file__, "the warning names the user's line"
    assert layer_of(optimizer, "aux").forward.factor is not None
    assert layer_of(optimizer, "aux").backward.factor is None


def test_prong_with_an_offset_checks_its_first_refresh_too():
    x, y = classification(20, 5, 3, dtype=torch.float32)
    model = Woken(by_hand=True)
    model.awake = True
    optimizer = bprong.PRONG(model, lr=0.1, every=Periods(5, forward_offset=2))
    train(model, optimizer, [(x, y)] * 2)
    with pytest.warns(WhiteningWarning, match="layer 'idle' follows the fallback rule"):
        train(model, optimizer, [(x, y)])


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_a_step_inside_autocast(inputs):
    x, y = classification(20, 5, 3, dtype=torch.float32)
    model = mlp(5, 4, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, momentum=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer, [(x.to(inputs), y)] * 3)
    assert layer_of(optimizer).forward.factor.inverse.dtype is torch.float32


def test_bfloat16_parameters_have_float32_factors():
    x, y = classification(60, 20, 3, dtype=torch.bfloat16)
    model = mlp(20, 8, 3, dtype=torch.bfloat16)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, momentum=0.9)
    train(model, optimizer, [(x, y)] * 3)
    factor = layer_of(optimizer).forward.factor
    assert factor.inverse.dtype is torch.float32
    assert float(torch.linalg.eigvalsh(factor.inverse).min()) > 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_statistics_that_are_not_finite_are_reported_by_drift_too():
    """NaN compares as not drifted, so that the factors would silently be kept forever."""
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, every=Periods(1, refresh="drift"))
    x, y = classification(20, 5, 3)
    train(model, optimizer, [(x, y)])
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.observe(torch.full_like(x, torch.nan))
    with pytest.warns(
        bprong.WhiteningWarning, match="keeps its previous forward whitener: the statistics are not finite"
    ):
        optimizer.step()


def test_a_layer_that_is_unfrozen_later_is_measured_at_once():
    model = mlp(5, 4, 3)
    model[0].requires_grad_(False)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, params=model.parameters(), every=50)
    x, y = classification(20, 5, 3)
    train(model, optimizer, [(x, y)] * 3)
    layer = optimizer._whitening.layers["0"]
    assert layer.forward.factor is None
    assert not optimizer._meter.request().weights  # a frozen layer costs nothing
    model[0].requires_grad_(True)
    train(model, optimizer, [(x, y)] * 2)
    assert layer.forward.refreshed_at == 3
    assert layer.backward.refreshed_at == 3
