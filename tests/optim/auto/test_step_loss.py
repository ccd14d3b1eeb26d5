"""lr="auto" with a loss that has a factor, which may change, or that contains more than what was declared."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automatic import DATA, auto, loss_of
from helpers import assert_unchanged, mlp, quick_cases, snapshot
from training import EXACT, assert_same_path, batches, train

torch.manual_seed(0)
NUMBERS = (DATA[0], torch.tanh(DATA[0] @ torch.randn(5, 3).double()) + 0.1 * torch.randn(60, 3).double())
KINDS = {"cross_entropy": (DATA, F.cross_entropy), "mse": (NUMBERS, F.mse_loss)}


def path(start, kind, steps, loss=None, every_step=lambda model, optimizer, t: None, declared=None):
    """The parameters of a copy after some steps; loss: a function of the output, y, the step and the model."""
    model = copy.deepcopy(start)
    optimizer = auto(model, declared or kind, options=EXACT)
    data, plain = KINDS[kind]
    for t, (x, y) in enumerate(batches(*data, 20, steps)):
        optimizer.zero_grad()
        (plain(model(x), y) if loss is None else loss(model(x), y, t, model)).backward()
        every_step(model, optimizer, t)
        optimizer.step()
    return snapshot(model)


# A factor that changes ------------------------------------------------------------------------------------------------

WEIGHTS = {
    "rises": lambda t: 32.0 if t >= 25 else 1.0,
    "falls": lambda t: 1.0 if t >= 25 else 32.0,
    "grows": lambda t: 4.0 ** (t // 11),
    "shrinks": lambda t: 0.25 ** (t // 11),
}


@pytest.mark.parametrize("name", quick_cases(WEIGHTS, "rises"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_that_gradients_are_divided_by_does_not_matter(kind, name):
    """As in mixed precision, where it is a power of two; also if it changes between evaluations."""
    start = mlp(5, 4, 3)
    weight = WEIGHTS[name]
    plain = KINDS[kind][1]

    def divide(model, optimizer, t):
        for p in model.parameters():
            p.grad /= weight(t)

    ours = path(start, kind, 60, lambda f, y, t, model: weight(t) * plain(f, y), divide)
    assert_same_path(ours, path(start, kind, 60), 1e-6)


@pytest.mark.parametrize("name", quick_cases(WEIGHTS, "rises"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_of_the_loss_may_change(kind, name):
    start = mlp(5, 4, 3)
    weight = WEIGHTS[name]
    loss = {"cross_entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss}[kind]()
    for declared in (loss, kind):
        ours = path(start, kind, 60, lambda f, y, t, model: weight(t) * loss(f, y), declared=declared)
        assert_same_path(ours, path(start, kind, 60), 1e-6)


@pytest.mark.parametrize(
    ("declared", "clip"),
    [
        ("mse", None),
        pytest.param(nn.MSELoss(), None, marks=pytest.mark.rest),
        pytest.param(nn.MSELoss(), 0.1, marks=pytest.mark.rest),
    ],
)
def test_mixed_precision_whose_scale_grows_does_not_diverge(declared, clip):
    """Without a warning, also if gradients are clipped after they were unscaled."""
    model = mlp(5, 8, 3, dtype=torch.float32)
    x, y = (t.float() for t in NUMBERS)
    optimizer = auto(model, declared)
    criterion = F.mse_loss if declared == "mse" else declared
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=20)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert max(losses[100:]) < 0.1 * losses[0]


# More than what was declared ------------------------------------------------------------------------------------------

MORE = {
    "a constant": lambda model: 1000.0,
    "a penalty": lambda model: 0.1 * sum(p.abs().sum() for p in model.parameters()),
}


@pytest.mark.parametrize("name", MORE)
def test_a_penalty_on_parameters_does_not_disturb_what_is_known_of_the_loss(name):
    """The path is that of observed targets, and there is no warning."""
    start = mlp(5, 16, 3)
    more = MORE[name]

    def loss(f, y, t, model):
        return F.mse_loss(f, y) + more(model)

    given = batches(*NUMBERS, 20, 30)
    expected = path(start, "mse", 30, loss, lambda model, optimizer, t: optimizer.observe(*next(given)))
    assert_same_path(path(start, "mse", 30, loss), expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_with_respect_to_the_input_is_not_read_as_a_loss(kind):
    """It enters the loss with a factor of zero here, so the path is that of the loss alone."""
    start = mlp(5, 4, 3)
    plain = KINDS[kind][1]
    ends = []
    for is_differentiated in (True, False):
        model = copy.deepcopy(start)
        optimizer = auto(model, kind, options=EXACT)
        for given, y in batches(*KINDS[kind][0], 20, 30):
            x = given.clone().requires_grad_()  # in both, as it is then no data whose features have units
            optimizer.zero_grad()
            f = model(x)
            loss = plain(f, y)
            if is_differentiated:
                (slope,) = torch.autograd.grad(f.sum(), x, create_graph=True)
                loss = loss + 0 * slope.square().mean()
            loss.backward()
            optimizer.step()
        ends.append(snapshot(model))
    assert_same_path(*ends, 1e-9)


def test_a_penalty_on_the_output_may_be_added_in_mid_training():
    """Without a warning."""
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    before = loss_of(model)
    train(model, optimizer, batches(*DATA, 20, 10))
    train(model, optimizer, batches(*DATA, 20, 25), loss=lambda f, y: F.cross_entropy(f, y) + 0.1 * f.square().mean())
    assert loss_of(model) < before


# Shapes and number of calls -------------------------------------------------------------------------------------------


def test_one_number_for_one_example():
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    data = [(x[None], x[:1]) for x in DATA[0]]
    before = F.mse_loss(model(DATA[0]), DATA[0][:, 0]).item()
    train(model, auto(model, "mse"), data, loss=F.mse_loss)
    assert F.mse_loss(model(DATA[0]), DATA[0][:, 0]).item() < 0.1 * before


@pytest.mark.parametrize("windows", [[(5, 3, 5, 3), (5,)], pytest.param([(5, 5, 5, 5), (20,)], marks=pytest.mark.rest)])
@pytest.mark.parametrize("kind", quick_cases(KINDS, "mse"))
def test_means_accumulated_over_any_number_of_calls(kind, windows):
    """A sum of means is a mean times the number of calls, also if every step has the same number of targets.

    Without a warning, because both are common.
    """
    ends = []
    model = mlp(5, 4, 3)
    x, y = KINDS[kind][0]
    criterion = nn.MSELoss() if kind == "mse" else F.cross_entropy
    for divided in (True, False):
        other = copy.deepcopy(model)
        optimizer = auto(other, criterion, options=EXACT)
        for t in range(36):
            optimizer.zero_grad()
            for i, n in enumerate(window := windows[t // 3 % 2]):
                chosen = (torch.arange(n) + 7 * t + 20 * i) % 60
                loss = criterion(other(x[chosen]), y[chosen])
                (loss / (len(window) if divided else 1)).backward()
            optimizer.step()
        ends.append(snapshot(other))
    assert_same_path(ends[1], ends[0], 1e-6)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", quick_cases([1, 3, 8, 23], 8))
def test_training_resumes_bit_for_bit_with_a_factor_on_the_loss(t):
    mse = nn.MSELoss()

    def made():
        torch.manual_seed(3)
        model = mlp(5, 4, 3)
        return model, auto(model, mse)

    def loss(f, y):
        return 7.3123 * mse(f, y)

    def ends():
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
        return snapshot(model), snapshot(other)

    whole, resumed = ends()
    assert_unchanged(whole, resumed)
