"""What every torch optimizer owes its users, and BPRONG too: groups, schedulers, checkpoints, copies."""

import copy
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
from bprong.schedule import WhiteningWarning
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from training import EXACT, assert_same_path, batches, train


@pytest.mark.parametrize(("lr_bias", "frozen"), [(0.1, None), (0.01, None), (0.1, "weight"), (0.1, "bias")])
def test_weight_and_bias_in_groups_of_their_own(lr_bias, frozen):
    """Each with its own lr; momentum and all, it is the whitened network with the same groups."""
    x, y = classification(60, 5, 3)
    plain = mlp(5, 3)
    if frozen:
        getattr(plain[0], frozen).requires_grad_(False)
    whitened = bprong.whiten_(copy.deepcopy(plain))
    layer = whitened[0]
    groups = [{"params": [layer.weight_dagger]}, {"params": [layer.bias_dagger], "lr": lr_bias}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.8)
    schedule = {"forward_every": 2, "forward_offset": 0, "backward_every": 5, "backward_offset": 1}
    damping = {"forward_damping": 0.1, "backward_damping": 0.03}
    rewhitening = bprong.Rewhitening(whitened, sgd, fisher="exact", **damping, **schedule)
    params = [{"params": [plain[0].weight]}, {"params": [plain[0].bias], "lr": lr_bias}]
    optimizer = bprong.BPRONG(plain, lr=0.1, momentum=0.8, params=params, **damping, options=EXACT | schedule)
    for xb, yb in batches(x, y, 20, 30):
        rewhitening.step(xb)
        train(whitened, sgd, [(xb, yb)])
        train(plain, optimizer, [(xb, yb)])
    assert_close(plain[0].weight, layer.weight, 1e-9)
    assert_close(plain[0].bias, layer.bias, 1e-9)


def test_every_scheduler_writes_lr_and_is_obeyed():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
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


@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_step_is_as_long_as_the_scheduler_says(name):
    """At whatever lr the scheduler has left in the group, the step is that multiple of the step at lr 1."""
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.0 if name not in ("CyclicLR", "OneCycleLR") else 0.5, every=1,
                              options=EXACT)  # fmt: skip
    scheduler = SCHEDULERS[name](optimizer)
    rates = set()
    for _ in range(4):
        (group,) = optimizer.param_groups
        rates.add(group["lr"])
        before, unit = snapshot(model), copy.deepcopy(model)
        group_lr, beta = group["lr"], group["momentum"]
        if beta == 0:
            train(unit, bprong.BPRONG(unit, lr=1.0, options=EXACT), [(x, y)])
        train(model, optimizer, [(x, y)])
        if beta == 0:
            step = unit[0].weight - before["0.weight"]
            assert_close(model[0].weight - before["0.weight"], group_lr * step, 1e-9)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(rates) > 1


def test_weight_decay_is_decoupled_and_of_ordinary_weights():
    x, y = classification(20, 5, 3)
    plain, decayed = mlp(5, 3), mlp(5, 3)
    decayed.load_state_dict(plain.state_dict())
    start = snapshot(plain)
    train(plain, bprong.BPRONG(plain, lr=0.1, options=EXACT), [(x, y)])
    train(decayed, bprong.BPRONG(decayed, lr=0.1, weight_decay=0.3, options=EXACT), [(x, y)])
    for name, value in snapshot(decayed).items():
        assert_close(value, snapshot(plain)[name] - 0.1 * 0.3 * start[name], 1e-12)


def test_the_bound_on_a_step_is_in_the_fisher_metric():
    """With exact statistics of the batch and hardly any damping, ‖Δ‖² = Δᵀ G̃ Δ, here of one gaussian layer."""
    x, _ = classification(60, 5, 3)
    y = 10 * torch.randn(60, 3, dtype=torch.float64)
    for bound in (0.01, 1e9):
        model = mlp(5, 3)
        start = snapshot(model)
        optimizer = bprong.BPRONG(
            model,
            lr=0.5,
            likelihood="gaussian",
            forward_damping=1e-12,
            backward_damping=1e-12,
            max_step=bound,
            options=EXACT,
        )
        loss = ((model(x) - y) ** 2 / 2).sum(-1).mean()
        loss.backward()
        optimizer.step()
        moved_W, moved_b = model[0].weight - start["0.weight"], model[0].bias - start["0.bias"]
        change = x @ moved_W.T + moved_b  # of the outputs: a gaussian's Fisher metric is their mean square
        length = float(change.square().sum(-1).mean().sqrt().detach())
        assert length == pytest.approx(bound, rel=1e-6) if bound < 1 else length > 0.1


def test_add_param_group_hooks_and_unknown_keys():
    x, y = classification(20, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, params=[{"params": [*model[0].parameters()], "note": "first"}], lr=0.1)
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


RESUME = """
import sys, torch, bprong
sys.path.insert(0, sys.argv[1])
from test_optimizer_contract import resumable
model, optimizer, data = resumable()
saved = torch.load(sys.argv[2], weights_only=True)
model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
from training import train
train(model, optimizer, data[37:87])
torch.save(model.state_dict(), sys.argv[3])
"""


def resumable():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = mlp(5, 6, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, lr=0.05, momentum=0.9, every=7, options={"record_every": 3, "average": 0.8})
    return model, optimizer, list(batches(*classification(90, 5, 3, dtype=torch.float32), 20, 87))


def test_resumed_in_a_new_process_it_goes_on_bit_for_bit(tmp_path):
    model, optimizer, data = resumable()
    train(model, optimizer, data[:37])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, data[37:])
    tests = str(Path(__file__).parent)
    command = [sys.executable, "-c", RESUME, tests, str(tmp_path / "saved.pt"), str(tmp_path / "done.pt")]
    subprocess.run(command, check=True, timeout=120)
    assert_unchanged(torch.load(tmp_path / "done.pt", weights_only=True), model.state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle_give_an_independent_pair_on_the_same_path(clone):
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.9, every=3)
    train(model, optimizer, batches(x, y, 20, 4))
    other, other_optimizer = clone((model, optimizer))
    train(model, optimizer, batches(x, y, 20, 7))
    train(other, other_optimizer, batches(x, y, 20, 7))
    assert_unchanged(snapshot(model), snapshot(other))
    assert other is not model


def test_a_state_of_another_model_is_refused_and_one_without_whitening_is_said():
    optimizer = bprong.BPRONG(mlp(5, 4, 3))
    with pytest.raises(ValueError, match=r"layers \['0', '2', '4'\]; this model has \['0', '2'\]"):
        optimizer.load_state_dict(bprong.BPRONG(mlp(5, 4, 4, 3)).state_dict())
    state = optimizer.state_dict()
    state.pop("whitening")
    with pytest.warns(WhiteningWarning, match="statistics begin anew"):
        optimizer.load_state_dict(state)


def test_state_is_plain_and_float64_moments_stay_float64():
    x, y = classification(60, 5, 3, dtype=torch.float32)
    model = mlp(5, 4, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, lr=0.1)
    train(model, optimizer, batches(x, y, 20, 3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    moments = optimizer.state_dict()["whitening"]["schedule"]["moments"]
    assert {m["scatter"].dtype for m in moments.values()} == {torch.float64}
    assert optimizer.report().steps == 3


@pytest.mark.parametrize("held", ["frozen", "not held"])
def test_layers_it_does_not_train_are_neither_measured_nor_in_its_state(held):
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    params = None if held == "frozen" else list(model[2].parameters())
    model[0].requires_grad_(held != "frozen")
    optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.9, every=2, params=params)
    train(model, optimizer, batches(x, y, 20, 5))
    assert optimizer.statistics.layers["0"].UU is None
    assert optimizer.statistics.layers["2"].UU is not None
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(optimizer.state) <= set(model.parameters())


def test_momentum_is_carried_at_a_refresh_where_lr_is_zero():
    """A warm-up from zero, or a cosine's end: as if lr were there but very small."""
    x, y = classification(60, 5, 3)
    ends = []
    for tiny in (0.0, 1e-30):
        torch.manual_seed(1)
        model = mlp(5, 3)
        optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.9, every=2, options=EXACT)
        for t, batch in enumerate(batches(x, y, 20, 8)):
            optimizer.param_groups[0]["lr"] = tiny if t == 4 else 0.1
            train(model, optimizer, [batch])
        ends.append(snapshot(model))
    assert_same_path(ends[0], ends[1])


def test_zero_gradients_in_mid_training_are_a_step_like_any_other():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.9, weight_decay=0.1)
    train(model, optimizer, [(x, y)])
    before = snapshot(model)
    for p in model.parameters():
        p.grad.zero_()
    optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight)  # momentum goes on, decay too
    assert optimizer.report().steps == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_loads_into_a_model_of_another_dtype(dtype):
    x, y = classification(60, 5, 3, dtype=torch.float32)
    model = mlp(5, 4, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, lr=0.05, momentum=0.9)
    train(model, optimizer, batches(x, y, 20, 3))
    other = mlp(5, 4, 3, dtype=dtype)
    loaded = bprong.BPRONG(other, lr=0.05, momentum=0.9)
    loaded.load_state_dict(optimizer.state_dict())
    train(other, loaded, [(x.to(dtype), y)] * 2)
    assert loaded.report().steps == 5
    assert loaded.report().layers[0]["forward_rank"] == "5/5"


def test_a_state_of_other_widths_is_refused_with_nothing_changed():
    x, y = classification(60, 5, 3)
    wide = mlp(5, 8, 3)
    trained = bprong.BPRONG(wide, momentum=0.9)
    train(wide, trained, [(x, y)])
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, momentum=0.9)
    with pytest.raises(ValueError, match="layer '0': the state's RR is for 8, the layer's for 4"):
        optimizer.load_state_dict(trained.state_dict())
    assert optimizer.report().steps == 0
    with pytest.raises(ValueError, match="schedule and layers"):
        optimizer.load_state_dict(optimizer.state_dict() | {"whitening": {}})


def test_bias_and_fallback_are_decayed_by_their_own_groups():
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)).double()
    x, y = classification(20, 5, 3)
    start = snapshot(model)
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.0},
        {"params": [model[0].bias], "weight_decay": 0.5},
        {"params": [model[1].weight, model[1].bias], "weight_decay": 0.25},
    ]
    plain = copy.deepcopy(model)
    train(plain, bprong.BPRONG(plain, lr=0.1, options=EXACT), [(x, y)])
    train(model, bprong.BPRONG(model, lr=0.1, params=groups, options=EXACT), [(x, y)])
    for name, decay in (("0.weight", 0), ("0.bias", 0.5), ("1.weight", 0.25)):
        assert_close(snapshot(model)[name], snapshot(plain)[name] - 0.1 * decay * start[name], 1e-12, name)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"momentum": 3.0}, {"weight_decay": -1.0}])
def test_numbers_of_groups_are_checked(bad):
    model = mlp(5, 3)
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be a finite number"):
        bprong.BPRONG(model, params=[{"params": list(model.parameters()), **bad}])


def test_two_optimizers_on_one_model_do_not_hear_each_others_passes():
    x, y = classification(40, 5, 3)
    model = mlp(5, 4, 3)
    first = bprong.BPRONG(model, lr=0.1, params=model[0].parameters(), options=EXACT)
    second = bprong.BPRONG(model, lr=0.1, params=model[2].parameters(), options=EXACT)
    F.cross_entropy(model(x), y).backward()
    first.step()
    second.step()
    assert second.statistics.layers["2"].moments["forward"].weight == 40


def test_copies_of_a_pair_do_not_pile_up_hooks():
    pair = (model := mlp(5, 3), bprong.BPRONG(model))
    for _ in range(3):
        pair = copy.deepcopy(pair)
    assert len(pair[0]._forward_pre_hooks) == 1
