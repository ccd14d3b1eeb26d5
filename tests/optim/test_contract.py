"""What users expect of every torch optimizer: groups, schedulers, checkpoints, copies, devices."""

import copy
import gc
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers

import bprong
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from training import EXACT, batches, literal, train

# Groups and schedulers ------------------------------------------------------------------------------------------------


def test_a_learning_rate_of_zero_from_a_scheduler_stops_training():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options=EXACT)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.0 if t > 2 else 1.0)
    for _ in range(3):
        train(model, optimizer, [(x, y)])
        scheduler.step()
    before = snapshot(model)
    train(model, optimizer, [(x, y)])
    assert_unchanged(before, snapshot(model))


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda t: 0.5**t),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.5),
    "StepLR": lambda o: schedulers.StepLR(o, 1),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.StepLR(o, 1)], optimizer=o),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5), schedulers.StepLR(o, 1)], milestones=[2]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # of torch 2.6 at its own SequentialLR
@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_step_is_as_long_as_the_scheduler_says(name):
    """At the lr that the scheduler has left in the group, the step is that multiple of the step at lr 1."""
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    momentum = 0.5 if name in ("CyclicLR", "OneCycleLR") else 0.0  # these two change the momentum as well
    optimizer = literal(model, "cross_entropy", lr=0.1, momentum=momentum, every=1, options=EXACT)
    scheduler = SCHEDULERS[name](optimizer)
    rates = set()
    for _ in range(4):
        (group,) = optimizer.param_groups
        lr = group["lr"]
        rates.add(lr)
        before = snapshot(model)
        unit = copy.deepcopy(model)
        if not group["momentum"]:
            train(unit, literal(unit, "cross_entropy", lr=1.0, options=EXACT), [(x, y)])
        train(model, optimizer, [(x, y)])
        if not group["momentum"]:
            step = unit[0].weight - before["0.weight"]
            assert_close(model[0].weight - before["0.weight"], lr * step, 1e-9)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(rates) > 1


def test_add_param_group_hooks_and_unknown_keys():
    x, y = classification(20, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(
        model, "cross_entropy", params=[{"params": [*model[0].parameters()], "note": "first"}], lr=0.1
    )
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = snapshot(model[2])
    train(model, optimizer, [(x, y)])
    assert_unchanged(before, snapshot(model[2]))
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    train(model, optimizer, [(x, y)])
    assert not torch.equal(before["weight"], model[2].weight)
    assert called == [1, 1]
    assert optimizer.state_dict()["param_groups"][0]["note"] == "first"


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"momentum": 3.0}, {"weight_decay": -1.0}])
def test_the_numbers_of_groups_are_checked(bad):
    model = mlp(5, 3)
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be a finite number"):
        bprong.BPRONG(model, "cross_entropy", lr=0.01, params=[{"params": list(model.parameters()), **bad}])


def test_zero_gradients_during_training_are_a_step_like_any_other():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, momentum=0.9, weight_decay=0.1)
    train(model, optimizer, [(x, y)])
    before = snapshot(model)
    for p in model.parameters():
        p.grad.zero_()
    optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight), "momentum and decay go on"
    assert optimizer.report().steps == 2


@pytest.mark.parametrize("way", ["frozen", "not given"])
def test_layers_that_are_not_trained_are_neither_measured_nor_in_the_state(way):
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    params = None if way == "frozen" else list(model[2].parameters())
    model[0].requires_grad_(way != "frozen")
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, momentum=0.9, every=2, params=params)
    train(model, optimizer, batches(x, y, 20, 5))
    assert optimizer._whitening.layers["0"].forward.factor is None
    assert optimizer._whitening.layers["2"].forward.factor is not None
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(optimizer.state) <= set(model.parameters())


def test_two_optimizers_on_one_model_do_not_measure_each_others_passes():
    x, y = classification(40, 5, 3)
    model = mlp(5, 4, 3)
    first = bprong.BPRONG(model, "cross_entropy", lr=0.1, params=model[0].parameters(), options=EXACT)
    second = bprong.BPRONG(model, "cross_entropy", lr=0.1, params=model[2].parameters(), options=EXACT)
    F.cross_entropy(model(x), y).backward()
    first.step()
    second.step()
    assert second._whitening.layers["2"].forward.moments.weight == 40


# Checkpoints ----------------------------------------------------------------------------------------------------------

RESUME = """
import sys, torch
sys.path[:0] = sys.argv[1:3]
from test_contract import resumable
from training import train
model, optimizer, data = resumable()
saved = torch.load(sys.argv[3], weights_only=True)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
train(model, optimizer, data[37:87])
torch.save(model.state_dict(), sys.argv[4])
"""


def resumable():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = mlp(5, 6, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, momentum=0.9, every=7, options={"average": 0.8})
    return model, optimizer, list(batches(*classification(90, 5, 3, dtype=torch.float32), 20, 87))


def test_a_run_resumed_in_a_new_process_continues_bit_for_bit(tmp_path):
    model, optimizer, data = resumable()
    train(model, optimizer, data[:37])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, data[37:])
    here = Path(__file__).parent
    files = [tmp_path / "saved.pt", tmp_path / "done.pt"]
    command = [sys.executable, "-c", RESUME, *map(str, (here, here.parent, *files))]
    subprocess.run(command, check=True, timeout=120)
    assert_unchanged(torch.load(tmp_path / "done.pt", weights_only=True), model.state_dict())


def test_the_state_is_plain_and_its_moments_stay_float64():
    x, y = classification(60, 5, 3, dtype=torch.float32)
    model = mlp(5, 4, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    train(model, optimizer, batches(x, y, 20, 3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    weights = [optimizer.state_dict()["state"][i]["bprong"]["layers"]["0"] for i in (0, 2)]
    sides = [weight[side] for weight in weights for side in ("forward", "backward")]
    assert {side["scatter"].dtype for side in sides} == {torch.float64}
    assert optimizer.report().steps == 3


def test_a_state_of_another_model_is_refused():
    optimizer = bprong.BPRONG(mlp(5, 4, 3), "cross_entropy", lr=0.01)
    with pytest.raises(ValueError, match="the state has 3 layers, and this model has 2 that are whitened"):
        optimizer.load_state_dict(bprong.BPRONG(mlp(5, 4, 4, 3), "cross_entropy", lr=0.01).state_dict())


def test_a_state_of_other_widths_is_refused_and_nothing_changes():
    x, y = classification(60, 5, 3)
    wide = mlp(5, 8, 3)
    trained = bprong.BPRONG(wide, "cross_entropy", lr=0.01, momentum=0.9)
    train(wide, trained, [(x, y)])
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, momentum=0.9)
    message = r"layer '0': the state's backward factor has shape \(8, 8\), and this layer's has \(4, 4\)"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(trained.state_dict())
    assert optimizer.report().steps == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_loads_into_a_model_of_another_dtype(dtype):
    x, y = classification(60, 5, 3, dtype=torch.float32)
    model = mlp(5, 4, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, momentum=0.9)
    train(model, optimizer, batches(x, y, 20, 3))
    other = mlp(5, 4, 3, dtype=dtype)
    loaded = bprong.BPRONG(other, "cross_entropy", lr=0.05, momentum=0.9)
    loaded.load_state_dict(optimizer.state_dict())
    train(other, loaded, [(x.to(dtype), y)] * 2)
    assert loaded.report().steps == 5
    factor = loaded._whitening.layers["0"].forward.factor
    assert factor.inverse.dtype is torch.promote_types(dtype, torch.float32)
    assert_close(factor.inverse, optimizer._whitening.layers["0"].forward.factor.inverse, 1e-6)


# Copies and devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle_give_an_independent_pair_on_the_same_path(clone):
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, momentum=0.9, every=3)
    train(model, optimizer, batches(x, y, 20, 4))
    other, other_optimizer = clone((model, optimizer))
    train(model, optimizer, batches(x, y, 20, 7))
    train(other, other_optimizer, batches(x, y, 20, 7))
    assert_unchanged(snapshot(model), snapshot(other))
    assert other is not model


def test_copies_between_forward_and_step_contain_no_batches():
    x, _ = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    empty = len(pickle.dumps((model, optimizer)))
    optimizer.observe(torch.randn(5000, 5, dtype=torch.float64))
    with optimizer.recording() as record:
        record(model(x))
    F.cross_entropy(model(torch.randn(5000, 5, dtype=torch.float64)), torch.zeros(5000, dtype=torch.long)).backward()
    model.zero_grad()
    assert optimizer._recorder.observed
    assert optimizer._meter.recorded
    assert len(pickle.dumps((model, optimizer))) < empty + 10_000
    _, copied = copy.deepcopy((model, optimizer))
    assert not copied._meter.recorded
    assert not copied._recorder.observed
    assert not copied._recorder.seen()


def test_repeated_copies_do_not_accumulate_listeners():
    model = mlp(5, 3)
    pair = (model, bprong.BPRONG(model, "cross_entropy", lr=0.01))
    for _ in range(3):
        pair = copy.deepcopy(pair)
    listener = pair[0]._compiled_call_impl.__self__
    assert listener is pair[1]._recorder.listener
    assert listener._compiled_call_impl is None


def test_what_listens_to_a_model_goes_with_the_optimizer():
    model = mlp(5, 3)
    before = vars(model).copy()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    assert vars(model) != before
    del optimizer
    gc.collect()
    assert {name: value for name, value in vars(model).items() if name != "_compiled_call_impl"} == before
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
@pytest.mark.parametrize("loss", [F.cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss])
def test_devices(fisher, loss):
    """Everything is made where the parameters are: with `meta` as the default device, a tensor made without naming a
    device would not mix with theirs."""
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    x, y = classification(20, 5, 3, dtype=torch.float32)
    y = y if loss is F.cross_entropy else F.one_hot(y, 3).float()
    damping = bprong.Damping(0.1, "variance")
    with torch.device("meta"):
        optimizer = bprong.BPRONG(
            model, loss, lr=0.1, momentum=0.9, every=2, max_step=1.0, forward_damping=damping,
            options={"fisher": fisher},
        )  # fmt: skip
        train(model, optimizer, [(x, y)] * 5, loss=loss)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, [(x, y)] * 3, loss=loss)
        assert "LayerNorm" in str(optimizer.report())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_checkpoint_of_another_step_rule_is_refused_with_nothing_changed():
    model = mlp(5, 4, 3)
    x, y = classification(20, 5, 3)
    fixed = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    train(model, fixed, [(x, y)])
    automatic = bprong.BPRONG(model, "cross_entropy", lr="auto")
    with pytest.raises(ValueError, match="step rule FixedRate, and this is BPRONG with the step rule Automatic"):
        automatic.load_state_dict(fixed.state_dict())
    assert automatic.param_groups[0]["lr"] == 1.0
    with pytest.raises(ValueError, match="step rule Automatic, and this is BPRONG with the step rule FixedRate"):
        fixed.load_state_dict(automatic.state_dict())
    assert fixed.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("lr", [0.01, "auto"])
def test_another_default_device_does_not_disturb_wide_layers(lr):
    """Random directions and small matrices of our own are made on the CPU, whatever the default device is."""
    model = nn.Sequential(nn.Linear(300, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=2)
    x, y = classification(30, 300, 3)
    with torch.device("meta"):
        train(model, optimizer, [(x.float(), y)] * 3)
    assert all(p.isfinite().all() for p in model.parameters())
