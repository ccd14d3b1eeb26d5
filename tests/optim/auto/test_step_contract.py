"""lr="auto" as a torch optimizer: groups, schedulers, checkpoints, copies, refused gradients and the report."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from automatic import DATA, auto, loss_of
from bprong import WhiteningWarning
from bprong.optim.auto.rule import SETTINGS
from helpers import assert_close, assert_unchanged, mlp, quick_cases, snapshot
from training import batches, train

# Learning rates -------------------------------------------------------------------------------------------------------


def test_the_groups_lr_starts_at_one_and_arguments_without_effect_are_refused():
    assert auto(mlp(5, 3)).param_groups[0]["lr"] == 1.0
    with pytest.raises(ValueError, match="a number or \"auto\", not 'automatic'"):
        bprong.BPRONG(mlp(5, 3), "cross_entropy", lr="automatic")
    with pytest.raises(ValueError, match="leave out momentum=0.9"):
        auto(mlp(5, 3), momentum=0.9)


@pytest.mark.parametrize("start", [0, 7, 23])
def test_at_lr_zero_nothing_moves(start):
    """From the beginning and in mid-training, momentum included; training continues when lr is raised again."""
    model = mlp(5, 4, 3)
    optimizer = auto(model, step="natural")  # spectral steps are noisy once these few examples are learnt
    train(model, optimizer, batches(*DATA, 20, start))
    before = snapshot(model)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, batches(*DATA, 20, 7))
    assert_unchanged(before, snapshot(model))
    optimizer.param_groups[0]["lr"] = 1.0
    reached = loss_of(model)
    train(model, optimizer, batches(*DATA, 20, 20))
    assert loss_of(model) < reached


def test_the_quadratic_model_includes_the_learning_rates_of_groups():
    """A layer at lr 0 is as good as frozen; at 0.1 predictions of the loss remain good, so λ stays small."""
    model = mlp(5, 4, 3)
    frozen = copy.deepcopy(model)
    optimizer = auto(model, params=[{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}])
    train(model, optimizer, batches(*DATA, 20, 30))
    other = auto(frozen, params=frozen[2].parameters())
    train(frozen, other, batches(*DATA, 20, 30))
    for name, value in snapshot(frozen).items():
        assert_close(snapshot(model)[name], value, 1e-6, name)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, batches(*DATA, 20, 30))
    assert optimizer.report().rule["lambda"] < 0.05


# Checkpoints and copies -----------------------------------------------------------------------------------------------


KEPT = [(0.0, torch.float64), (0.01, torch.float64), (0.0, torch.bfloat16)]


@pytest.mark.parametrize("t", quick_cases([1, 7, 21, 23, 25], 7, 23))
@pytest.mark.parametrize(("decay", "dtype"), quick_cases(KEPT, KEPT[1]))
def test_training_resumes_bit_for_bit(t, decay, dtype):
    """Right after an evaluation (1, 7, 21) and between two (23, 25); the LayerNorm follows Adam's rule."""

    def made():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
        return model, auto(model, weight_decay=decay)

    data = list(batches(DATA[0].to(dtype), DATA[1], 20, 40))
    model, optimizer = made()
    train(model, optimizer, data[:t])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, data[t:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = made()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, data[t:])
    assert_unchanged(snapshot(model), snapshot(other))
    assert resumed.report().rule == optimizer.report().rule


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("t", quick_cases([4, 22], 22))
def test_copies_continue_alike(clone, t):
    """Gradients are clipped, which the copy must notice at its own parameters."""

    def clipped(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    model = mlp(5, 4, 3)
    optimizer = auto(model)
    data = list(batches(*DATA, 20, 35))
    clipped(model, optimizer, data[:t])
    other, other_optimizer = clone((model, optimizer))
    clipped(model, optimizer, data[t:])
    clipped(other, other_optimizer, data[t:])
    assert_unchanged(snapshot(model), snapshot(other))


@pytest.mark.parametrize("t", quick_cases([0, 3, 22], 3))
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(t):
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    data = list(batches(*DATA, 20, 35))
    train(model, optimizer, data[:t])
    other, undisturbed = copy.deepcopy((model, optimizer))
    optimizer.zero_grad()
    (F.cross_entropy(model(data[0][0]), data[0][1]) * float("nan")).backward()
    with pytest.warns(WhiteningWarning, match="nothing was changed"):
        optimizer.step()
    train(model, optimizer, data[t:])
    train(other, undisturbed, data[t:])
    assert_unchanged(snapshot(other), snapshot(model))


# The report -----------------------------------------------------------------------------------------------------------


def test_the_report_shows_the_coefficients_of_the_step_for_lr_auto_only():
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    unknown = dict.fromkeys(("alpha", "mu", "ratio"))
    assert optimizer.report().rule == unknown | {"lambda": SETTINGS.initial_lambda, "multiplier": 1.0}
    train(model, optimizer, batches(*DATA, 20, 3))
    shown = optimizer.report().rule
    assert shown["alpha"] > 0
    assert 0 <= shown["mu"] <= SETTINGS.most_momentum
    assert shown["ratio"] > 0
    line = f"α {shown['alpha']:.3g}, μ {shown['mu']:.3g}, λ {shown['lambda']:.3g}, actual/predicted"
    assert line in str(optimizer.report())
    scalars = optimizer.report().scalars()
    assert all(scalars[f"rule/{name}"] == value for name, value in shown.items())
    explicit = bprong.BPRONG(mlp(5, 3), "cross_entropy", lr=0.1).report()
    assert explicit.rule == {}
    assert "actual/predicted" not in str(explicit)


# Undoing a step -------------------------------------------------------------------------------------------------------


class Cliff(nn.Module):
    """Its output is linear in small changes of the weight and far off after larger ones."""

    def __init__(self, steep):
        super().__init__()
        self.layer = nn.Linear(5, 3).double()
        self.steep = steep
        self.register_buffer("start", self.layer.weight.detach().clone())

    def forward(self, x):
        far = (self.layer.weight - self.start).square().sum()
        return self.layer(x) * (1 - self.steep * far)


def test_a_step_that_raises_the_loss_much_is_undone_and_training_continues():
    model = Cliff(1e6)
    optimizer = auto(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhiteningWarning)  # the weight is used in two ways
        before = snapshot(model)
        start = loss_of(model)
        train(model, optimizer, [DATA])
        assert_close(model.layer.weight, before["layer.weight"], 1e-12)
        assert optimizer.report().rule["lambda"] > SETTINGS.initial_lambda
        for _ in range(40):
            train(model, optimizer, [DATA])
            assert loss_of(model) < start + 0.2
        assert loss_of(model) < start
