"""Where the optimizer's statistics come from, what it reports, and which arguments it takes."""

import copy
import gc
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.schedule import PATIENCE, WhiteningWarning
from helpers import Woken, assert_close, classification, mlp, snapshot
from training import EXACT, assert_same_path, batches, train

LOSSES = {
    "categorical": F.cross_entropy,
    "bernoulli": lambda output, y: F.binary_cross_entropy_with_logits(output, F.one_hot(y, 3).to(output.dtype)),
}


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("likelihood", LOSSES)
def test_the_datas_targets_come_from_observe_or_from_the_gradient_at_the_output(likelihood, scale):
    """However the user's loss is reduced or scaled: only where the gradient is least, or negative, is read."""
    x, y = classification(20, 5, 3)
    found = []
    for observed in (True, False):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        options = {"fisher": "empirical", "average": 0.0}
        optimizer = bprong.BPRONG(model, lr=0.1, likelihood=likelihood, options=options)
        if observed:
            optimizer.observe(x, y if likelihood == "categorical" else F.one_hot(y, 3))
        (scale * LOSSES[likelihood](model(x), y)).backward()
        optimizer.step()
        found.append([optimizer.statistics.layers[name].RR for name in ("0", "2")])
    for ours, expected in zip(found[1], found[0], strict=True):
        assert_close(ours, expected, 1e-12)


def test_positions_that_the_loss_ignores_are_not_targets():
    x, y = classification(20, 5, 3)
    y[::3] = -100
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options={"fisher": "empirical", "average": 0.0})
    with torch.no_grad():
        p = model(x).softmax(-1)
    train(model, optimizer, [(x, y)])
    delta = (p - F.one_hot(y.clamp(min=0), 3)) * (y >= 0)[:, None]
    counted = y >= 0
    layer = optimizer.statistics.layers["0"]
    assert_close(layer.moments["backward"].second, delta.T @ delta / counted.sum(), 1e-12)
    assert_close(layer.c, x[counted].mean(0), 1e-12)


def test_gaussian_targets_cannot_be_read_off_a_gradient_of_unknown_scale():
    x, _ = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, likelihood="gaussian", options={"fisher": "empirical"})
    F.mse_loss(model(x), torch.zeros(20, 3, dtype=torch.float64)).backward()
    with pytest.raises(ValueError, match="cannot be read off the gradients of Gaussian: give them"):
        optimizer.step()


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
    assert_close(optimizer.statistics.layers["0"].c, x[::4].mean(0), 1e-12)


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
        ({"options": {"examples": 0}}, "'examples'. must be a whole number, of at least 1"),
        ({"options": {"seed": "a"}}, "'seed'. must be a whole number"),
        ({"options": {"average": None}}, "average must be a finite number"),
        ({"max_step": 0}, "max_step must be a finite number above 0, not 0"),
    ],
)
def test_bad_arguments_are_answered_by_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        bprong.BPRONG(mlp(5, 3), **arguments)


def test_zero_is_no_bound_where_denormals_are_flushed_either():
    torch.set_flush_denormal(True)
    with pytest.raises(ValueError, match="max_step must be"):
        bprong.BPRONG(mlp(5, 3), max_step=0)


def test_at_most_twelve_arguments():
    assert len(inspect.signature(bprong.BPRONG).parameters) <= 12


def test_a_model_without_layers_to_whiten_is_refused():
    with pytest.raises(ValueError, match="BatchNorm2d has no layer that could be whitened: Linear, Conv1d"):
        bprong.BPRONG(nn.BatchNorm2d(1))


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


def test_parameters_instead_of_the_model_are_refused():
    with pytest.raises(TypeError, match="takes the model itself, to measure it, not a generator"):
        bprong.BPRONG(mlp(5, 3).parameters())


def test_batches_of_refused_steps_are_forgotten():
    x, y = classification(20, 5, 3)
    bad = x.clone()
    bad[0, 0] = float("nan")
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    with pytest.warns(WhiteningWarning, match="step 0 refused"):
        train(model, optimizer, [(bad, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [(x, y)])
    assert_close(optimizer.statistics.layers["0"].c, x.mean(0), 1e-12)


def test_refusals_are_counted_in_a_row_only():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1)
    for _ in range(PATIENCE + 1):
        train(model, optimizer, [(x, y)])
        model[0].weight.grad.fill_(float("nan"))
        with pytest.warns(WhiteningWarning, match="refused"):
            optimizer.step()


def test_what_was_observed_or_recorded_serves_one_step():
    x, y = classification(60, 5, 3)
    for way in ("observe", "record"):
        model = mlp(5, 3)
        optimizer = bprong.BPRONG(model, lr=0.0, every=1, options=EXACT)
        if way == "observe":
            optimizer.observe(x[:10])
        else:
            with optimizer.recording() as record:
                record(model[0](x[:10]))
        train(model, optimizer, [(x[20:40], y[20:40])])
        assert_close(optimizer.statistics.layers["0"].c, x[:10].mean(0), 1e-12)
        train(model, optimizer, [(x[20:40], y[20:40])])
        assert_close(optimizer.statistics.layers["0"].c, x[20:40].mean(0), 1e-12)


def test_targets_are_cut_with_their_batch():
    x, y = classification(40, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options={"fisher": "empirical", "average": 0.0, "examples": 10})
    optimizer.observe(x, y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.statistics.layers["0"].moments["backward"].weight == 10


def test_after_loading_it_listens_when_that_is_due():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, every=2, options=EXACT)
    train(model, optimizer, [(x, y)])
    early = copy.deepcopy(optimizer.state_dict())  # step 1: nothing due
    train(model, optimizer, [(x, y)])
    due = copy.deepcopy(optimizer.state_dict())  # step 2: due
    optimizer.load_state_dict(early)
    optimizer.load_state_dict(due)
    train(model, optimizer, [(x + 1, y)])
    assert_close(optimizer.statistics.layers["0"].c, (x + 1).mean(0), 1e-12)


def test_recording_leaves_the_random_stream_alone_and_takes_several_batches():
    x, y = classification(40, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options={"average": 0.0})
    before = torch.random.get_rng_state()
    with optimizer.recording() as record:
        for part in x.chunk(2):
            record(model[2](torch.tanh(model[0](part))))
    assert torch.equal(before, torch.random.get_rng_state())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    layer = optimizer.statistics.layers["0"]
    assert layer.moments["forward"].weight == 40
    assert_close(layer.c, x.mean(0), 1e-12)
    with optimizer.recording() as record:  # nothing is due: nothing is tapped
        assert not model[0]._forward_hooks
        record(model(x))


def test_micro_batches_draw_targets_of_their_own():
    x, _ = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options={"average": 0.0})
    twice = optimizer.statistics
    seen = [twice._pass(i, x, None, {"0": True})["0"].delta.second for i in range(2)]
    assert not torch.equal(*seen)


def test_a_batch_changed_in_place_before_the_step_is_refused():
    x, y = classification(20, 5, 3)
    model, buffer = mlp(5, 3), x.clone()
    optimizer = bprong.BPRONG(model, lr=0.1)
    F.cross_entropy(model(buffer), y).backward()
    buffer.zero_()
    with pytest.raises(RuntimeError, match="changed in place between the model's call and the step"):
        optimizer.step()


def test_a_model_that_works_in_place_on_its_input_does_not_touch_the_users_batch_in_our_pass():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, x):
            return self.layer(x.mul_(0.5))

    x, y = classification(20, 5, 3)
    model = Scaling()
    optimizer = bprong.BPRONG(model, lr=0.1)
    optimizer.observe(x)
    before = x.clone()
    F.cross_entropy(model(x.clone()), y).backward()
    optimizer.step()
    assert torch.equal(x, before)


def test_containers_changed_after_the_call_do_not_matter():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, batch):
            return self.layer(batch.pop("x"))

    x, y = classification(20, 5, 3)
    model = Named()
    optimizer = bprong.BPRONG(model, lr=0.1)
    batch = {"x": x}
    F.cross_entropy(model(batch), y).backward()
    optimizer.step()
    assert optimizer.report().steps == 1


def test_an_auxiliary_head_is_whitened_forward_only_and_said_so():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.main, self.aux = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.main(h), self.aux(h)

    x, y = classification(20, 5, 3, dtype=torch.float32)
    model = Heads()
    optimizer = bprong.BPRONG(model, lr=0.1)
    main, aux = model(x)
    (F.cross_entropy(main, y) + F.cross_entropy(aux, y)).backward()
    with pytest.warns(WhiteningWarning, match="layer 'aux'.*no error reaches it.*forward only"):
        optimizer.step()
    assert optimizer.statistics.layers["aux"].UU is not None
    assert optimizer.statistics.layers["aux"].RR is None


def test_prong_with_an_offset_checks_its_first_refresh_too():
    x, y = classification(20, 5, 3, dtype=torch.float32)
    model = Woken(by_hand=True)
    model.awake = True
    optimizer = bprong.PRONG(model, lr=0.1, every=5, options={"forward_offset": 2})
    train(model, optimizer, [(x, y)] * 2)
    with pytest.raises(RuntimeError, match="no statistics reached 'idle'"):
        train(model, optimizer, [(x, y)])


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_a_step_inside_autocast(inputs):
    x, y = classification(20, 5, 3, dtype=torch.float32)
    model = mlp(5, 4, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer, [(x.to(inputs), y)] * 3)
    assert optimizer.statistics.layers["0"].UU.dtype is torch.float32


def test_bfloat16_parameters_keep_float32_inverses():
    x, y = classification(60, 20, 3, dtype=torch.bfloat16)
    model = mlp(20, 8, 3, dtype=torch.bfloat16)
    optimizer = bprong.BPRONG(model, lr=0.05, momentum=0.9)
    train(model, optimizer, [(x, y)] * 3)
    UU = optimizer.statistics.layers["0"].UU
    assert UU.dtype is torch.float32
    assert float(torch.linalg.eigvalsh(UU).min()) > 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_distance_from_white_is_the_last_batchs_own():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.0, every=1, forward_damping=1e-9, options={"average": 0.9, "fisher": "exact"})
    train(model, optimizer, [(x, y)] * 2)
    assert optimizer.report().layers[0]["forward_from_white"] < 1e-6
    train(model, optimizer, [(x * 2, y)])
    assert optimizer.report().layers[0]["forward_from_white"] == pytest.approx(3, rel=1e-3)  # Ž is four times as large


def test_a_linear_added_later_is_named_so():
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model)
    model.append(nn.Linear(3, 3, dtype=torch.float64))
    optimizer.add_param_group({"params": model[1].parameters()})
    assert optimizer.report().fallback["1.weight"] == "in a Linear that the optimizer was not built with"
