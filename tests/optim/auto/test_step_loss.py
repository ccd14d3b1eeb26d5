"""lr="auto" with a loss whose scale changes, or that contains more than a multiple of −log p."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automatic import DATA, auto
from bprong import WhiteningWarning
from helpers import assert_unchanged, mlp, snapshot
from training import EXACT, assert_same_path, batches, train

torch.manual_seed(0)
NUMBERS = (DATA[0], torch.tanh(DATA[0] @ torch.randn(5, 3).double()) + 0.1 * torch.randn(60, 3).double())
KINDS = {"categorical": (DATA, F.cross_entropy), "gaussian": (NUMBERS, F.mse_loss)}


def path(start, kind, steps, loss=None, every_step=lambda model, optimizer, t: None):
    """The parameters of a copy after some steps; loss: a function of the output, y, the step and the model."""
    model = copy.deepcopy(start)
    optimizer = auto(model, likelihood=kind, options=EXACT)
    data, plain = KINDS[kind]
    for t, (x, y) in enumerate(batches(*data, 20, steps)):
        optimizer.zero_grad()
        (plain(model(x), y) if loss is None else loss(model(x), y, t, model)).backward()
        every_step(model, optimizer, t)
        optimizer.step()
    return snapshot(model)


# A scale that changes -------------------------------------------------------------------------------------------------

WEIGHTS = {
    "rises": lambda t: 30.0 if t >= 25 else 1.0,
    "falls": lambda t: 1.0 if t >= 25 else 30.0,
    "grows": lambda t: 4.0 ** (t // 11),
    "shrinks": lambda t: 0.25 ** (t // 11),
}


CHANGES = [(kind, name, True) for kind in KINDS for name in WEIGHTS]
CHANGES += [("gaussian", name, False) for name in WEIGHTS] + [("categorical", name, False) for name in WEIGHTS][:2]


@pytest.mark.parametrize(("kind", "name", "unscaled"), CHANGES)
def test_the_weight_of_the_loss_may_change(kind, name, unscaled):
    """Also between evaluations, and whether or not gradients are divided by it, as in mixed precision.

    If they are not, a change smaller than the losses of batches differ is noticed at the next evaluation only.
    """
    start = mlp(5, 4, 3)
    weight = WEIGHTS[name]
    plain = KINDS[kind][1]

    def divide(model, optimizer, t):
        for p in model.parameters():
            p.grad /= weight(t) if unscaled else 1.0

    ours = path(start, kind, 60, lambda f, y, t, model: weight(t) * plain(f, y), divide)
    assert_same_path(ours, path(start, kind, 60), 1e-6)


def test_mixed_precision_whose_scale_grows_does_not_diverge():
    model = mlp(5, 8, 3, dtype=torch.float32)
    x, y = (t.float() for t in NUMBERS)
    optimizer = auto(model, likelihood="gaussian")
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=20)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert max(losses[100:]) < 0.1 * losses[0]


# More than a multiple of −log p ---------------------------------------------------------------------------------------

MORE = {
    "a constant": lambda model: 1000.0,
    "a penalty": lambda model: 0.1 * sum(p.abs().sum() for p in model.parameters()),
}


@pytest.mark.parametrize("name", MORE)
def test_a_penalty_does_not_change_the_scale_found_for_a_squared_error(name):
    """There is one warning, and the path is that of given targets, which leave no doubt about the scale."""
    start = mlp(5, 16, 3)
    more = MORE[name]

    def loss(f, y, t, model):
        return F.mse_loss(f, y) + more(model)

    given = batches(*NUMBERS, 20, 30)
    expected = path(start, "gaussian", 30, loss, lambda model, optimizer, t: optimizer.observe(*next(given)))
    with pytest.warns(WhiteningWarning, match=r"more than a multiple of −log p.*observe\(x, y\)") as warned:
        ours = path(start, "gaussian", 30, loss)
    assert len(warned) == 1
    assert_same_path(ours, expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_with_respect_to_the_input_is_not_read_as_a_loss(kind):
    """It enters the loss with a factor of zero here, so the path is that of the loss alone."""
    start = mlp(5, 4, 3)
    plain = KINDS[kind][1]
    model = copy.deepcopy(start)
    optimizer = auto(model, likelihood=kind, options=EXACT)
    for given, y in batches(*KINDS[kind][0], 20, 30):
        x = given.clone().requires_grad_()
        optimizer.zero_grad()
        f = model(x)
        (slope,) = torch.autograd.grad(f.sum(), x, create_graph=True)
        (plain(f, y) + 0 * slope.square().mean()).backward()
        optimizer.step()
    assert_same_path(snapshot(model), path(start, kind, 30), 1e-9)


def test_one_warning_if_targets_can_no_longer_be_recovered():
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    train(model, optimizer, batches(*DATA, 20, 10))
    assert optimizer.report().rule["ratio"] is not None
    with pytest.warns(WhiteningWarning, match="can no longer recover the targets") as warned:
        train(
            model, optimizer, batches(*DATA, 20, 25), loss=lambda f, y: F.cross_entropy(f, y) + 0.1 * f.square().mean()
        )
    assert len(warned) == 1
    assert optimizer.report().rule["ratio"] is None


# Shapes and number of calls -------------------------------------------------------------------------------------------


def test_one_number_for_one_example():
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    data = [(x[None], x[:1]) for x in DATA[0]]
    before = F.mse_loss(model(DATA[0]), DATA[0][:, 0]).item()
    train(model, auto(model, likelihood="gaussian"), data, loss=F.mse_loss)
    assert F.mse_loss(model(DATA[0]), DATA[0][:, 0]).item() < 0.1 * before


@pytest.mark.parametrize("windows", [[(5, 3, 5, 3), (5,)], [(5, 5, 5, 5), (20,)]])
def test_means_accumulated_over_any_number_of_calls(windows):
    """A sum of means is a mean times the number of calls, also if every step has the same number of targets."""
    ends = []
    model = mlp(5, 4, 3)
    for divided in (True, False):
        other = copy.deepcopy(model)
        optimizer = auto(other, options=EXACT)
        for t in range(36):
            optimizer.zero_grad()
            for i, n in enumerate(window := windows[t // 3 % 2]):
                chosen = (torch.arange(n) + 7 * t + 20 * i) % 60
                loss = F.cross_entropy(other(DATA[0][chosen]), DATA[1][chosen])
                (loss / (len(window) if divided else 1)).backward()
            optimizer.step()
        ends.append(snapshot(other))
    assert_same_path(ends[1], ends[0], 1e-6)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 3, 8, 23])
def test_training_resumes_bit_for_bit_with_the_same_certainty_of_the_scale(t):
    """A guess (1, 3) or an estimate that batches agree on (8, 23), for a factor that nobody would write."""

    def made():
        torch.manual_seed(3)
        model = mlp(5, 4, 3)
        return model, auto(model, likelihood="gaussian")

    def loss(f, y):
        return 7.3123 * F.mse_loss(f, y)

    data = list(batches(*NUMBERS, 20, 40))
    model, optimizer = made()
    train(model, optimizer, data[:t], loss=loss)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, data[t:], loss=loss)
    file.seek(0)
    other, resumed = made()
    for each, state in zip((other, resumed), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(state)
    train(other, resumed, data[t:], loss=loss)
    assert_unchanged(snapshot(model), snapshot(other))
