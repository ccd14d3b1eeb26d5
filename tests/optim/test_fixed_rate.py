"""The rule of an explicit learning rate: momentum, groups of their own, decay, and a bound on the step."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.errors import WhiteningWarning
from bprong.optim import Periods
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from training import EXACT, assert_same_path, batches, literal, train


@pytest.mark.parametrize(("lr_bias", "frozen"), [(0.1, None), (0.01, None), (0.1, "weight"), (0.1, "bias")])
def test_weight_and_bias_in_groups_of_their_own(lr_bias, frozen):
    """Each with its own lr, with momentum: the path is that of the whitened network with the same groups."""
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
    rewhitening = bprong.Rewhitening(whitened, sgd, "cross_entropy", fisher="exact", **damping, **schedule)
    params = [{"params": [plain[0].weight]}, {"params": [plain[0].bias], "lr": lr_bias}]
    optimizer = literal(
        plain, "cross_entropy", lr=0.1, momentum=0.8, params=params, **damping, every=Periods(**schedule), options=EXACT
    )
    for xb, yb in batches(x, y, 20, 30):
        rewhitening.step(xb)
        train(whitened, sgd, [(xb, yb)])
        train(plain, optimizer, [(xb, yb)])
    assert_close(plain[0].weight, layer.weight, 1e-9)
    assert_close(plain[0].bias, layer.bias, 1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_identity_factors_it_is_torchs_sgd(momentum):
    """Damping so large that (Ž+ε)⁻¹ and (D+ε)⁻¹ are multiples of the identity, and no bias that would be centred."""
    x, y = classification(60, 5, 3)
    ours = mlp(5, 6, 3, bias=False)
    theirs = copy.deepcopy(ours)
    huge = 1e12
    settings = {"momentum": momentum}
    optimizer = literal(
        ours,
        "cross_entropy",
        lr=0.1 * huge**2,
        forward_damping=huge,
        backward_damping=huge,
        every=3,
        momentum=momentum,
        options=EXACT,
    )
    train(ours, optimizer, batches(x, y, 20, 10))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, **settings), batches(x, y, 20, 10))
    assert_same_path(snapshot(ours), snapshot(theirs), 1e-9)


def test_weight_decay_is_decoupled_and_acts_on_ordinary_weights():
    x, y = classification(20, 5, 3)
    plain = mlp(5, 3)
    decayed = copy.deepcopy(plain)
    start = snapshot(plain)
    train(plain, bprong.BPRONG(plain, "cross_entropy", lr=0.1, options=EXACT), [(x, y)])
    train(decayed, bprong.BPRONG(decayed, "cross_entropy", lr=0.1, weight_decay=0.3, options=EXACT), [(x, y)])
    for name, value in snapshot(decayed).items():
        assert_close(value, snapshot(plain)[name] - 0.1 * 0.3 * start[name], 1e-12)


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
    train(plain, bprong.BPRONG(plain, "cross_entropy", lr=0.1, options=EXACT), [(x, y)])
    train(model, bprong.BPRONG(model, "cross_entropy", lr=0.1, params=groups, options=EXACT), [(x, y)])
    for name, decay in (("0.weight", 0), ("0.bias", 0.5), ("1.weight", 0.25)):
        assert_close(snapshot(model)[name], snapshot(plain)[name] - 0.1 * decay * start[name], 1e-12, name)


@pytest.mark.parametrize("bound", [0.01, 1e9])
def test_the_bound_on_a_step_is_in_the_fisher_metric(bound):
    """With exact statistics of the batch and hardly any damping, ‖Δ‖² = Δᵀ G̃ Δ, here of one gaussian layer."""
    x, _ = classification(60, 5, 3)
    y = 10 * torch.randn(60, 3, dtype=torch.float64)
    model = mlp(5, 3)
    start = snapshot(model)
    optimizer = bprong.BPRONG(
        model, lr=0.5, loss="gaussian", forward_damping=1e-12, backward_damping=1e-12, max_step=bound,
        options=EXACT,
    )  # fmt: skip
    loss = ((model(x) - y) ** 2 / 2).sum(-1).mean()
    loss.backward()
    optimizer.step()
    moved_W = model[0].weight - start["0.weight"]
    moved_b = model[0].bias - start["0.bias"]
    change = x @ moved_W.T + moved_b  # of the outputs: a gaussian's Fisher metric is their mean square
    length = float(change.square().sum(-1).mean().sqrt().detach())
    assert length == pytest.approx(bound, rel=1e-6) if bound < 1 else length > 0.1


SCHEDULES = {
    "none": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 10)),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=41),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bound_includes_momentum(schedule):
    """Also while a scheduler raises the learning rate, which multiplies velocities from lower ones."""
    x, _ = classification(60, 5, 3)
    y = 10 * x[:, :3]
    model = mlp(5, 3)
    options = EXACT
    optimizer = bprong.BPRONG(model, "gaussian", lr=1.0, momentum=0.9, options=options)
    scheduler = SCHEDULES[schedule](optimizer)
    lengths = []
    for _ in range(40):
        before = model(x).detach()
        train(model, optimizer, [(x, y)], loss=lambda a, y: ((a - y) ** 2 / 2).sum(-1).mean())
        scheduler.step()
        change = model(x).detach() - before
        lengths.append(float(change.square().sum(-1).mean().sqrt()))
    assert 0.05 < max(lengths) < 0.1001


def test_the_bound_holds_for_gradients_whose_squares_overflow():
    x, y = classification(60, 5, 3, dtype=torch.float32)
    steps = []
    for size in (1e10, 1e25):
        torch.manual_seed(0)
        model = mlp(5, 4, 3, dtype=torch.float32)
        start = snapshot(model)
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.5, options=EXACT)
        (size * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        steps.append(torch.cat([(value - start[name]).flatten() for name, value in snapshot(model).items()]))
    assert_close(steps[1], steps[0], 1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_bounded_step_keeps_its_direction(bias):
    x, y = classification(60, 5, 3)
    steps = []
    for max_step in (1e9, 0.01):
        torch.manual_seed(0)
        model = mlp(5, 4, 3, bias=bias)
        start = snapshot(model)
        train(model, bprong.BPRONG(model, "cross_entropy", lr=0.5, max_step=max_step, options=EXACT), [(x, y)])
        steps.append(torch.cat([(value - start[name]).flatten() for name, value in snapshot(model).items()]))
    ratio = float(steps[1].norm() / steps[0].norm())
    assert ratio < 0.5
    assert_close(steps[1], ratio * steps[0], 1e-12)


def test_momentum_is_carried_at_a_refresh_at_which_lr_is_zero():
    """In a warm-up from zero, or at the end of a cosine: as if lr were positive but very small."""
    x, y = classification(60, 5, 3)
    ends = []
    for tiny in (0.0, 1e-30):
        torch.manual_seed(1)
        model = mlp(5, 3)
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, momentum=0.9, every=2, options=EXACT)
        for t, batch in enumerate(batches(x, y, 20, 8)):
            optimizer.param_groups[0]["lr"] = tiny if t == 4 else 0.1
            train(model, optimizer, [batch])
        ends.append(snapshot(model))
    assert_same_path(ends[0], ends[1])


def test_a_refresh_leaves_the_velocity_of_the_bias_what_it_is():
    """It is a velocity in ordinary coordinates, which a new centre does not change."""
    x, y = classification(60, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, momentum=0.5, every=2, options=EXACT)
    train(model, optimizer, [(x, y)] * 2)
    layer = optimizer._whitening.layers["0"]

    before = optimizer.state[layer.bias]["momentum_buffer"].clone()
    c = layer.c.clone()
    optimizer.observe(x + 1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_close(layer.c, c + 1, 1e-12)
    assert_close(optimizer.state[layer.bias]["momentum_buffer"], 0.5 * before, 1e-12)


def test_prong_takes_the_same_steps_for_every_loss_that_is_declared_or_none():
    """It measures no errors. A wrong declaration is pointed out all the same."""
    x, y = classification(60, 5, 3)
    ends = []
    for loss in (None, "cross_entropy", "mse"):
        torch.manual_seed(0)
        model = mlp(5, 4, 3)
        optimizer = bprong.PRONG(model, loss, lr=0.1, every=3)
        with pytest.warns(WhiteningWarning, match='"mse"') if loss == "mse" else nullcontext():
            train(model, optimizer, batches(x, y, 20, 7), loss=F.cross_entropy)
        ends.append(snapshot(model))
    for end in ends[1:]:
        assert_unchanged(ends[0], end)


def test_a_bias_that_is_frozen_for_a_while_follows_the_papers_network():
    """Without a trained bias nothing is centred; the momentum of the bias follows the centre to zero and back."""
    x, y = classification(60, 5, 3)
    plain = mlp(5, 3)
    whitened = bprong.whiten_(copy.deepcopy(plain))
    layer = whitened[0]
    sgd = torch.optim.SGD(whitened.parameters(), lr=0.05, momentum=0.8)
    schedule = {"forward_every": 2, "backward_every": 2, "backward_offset": 0}
    damping = {"forward_damping": 0.1, "backward_damping": 0.03}
    rewhitening = bprong.Rewhitening(whitened, sgd, "cross_entropy", fisher="exact", **damping, **schedule)
    optimizer = literal(plain, "cross_entropy", lr=0.05, momentum=0.8, every=2, options=EXACT, **damping)
    for t, (xb, yb) in enumerate(batches(x, y, 20, 14)):
        for bias in (layer.bias_dagger, plain[0].bias):
            bias.requires_grad_(not 4 <= t < 8)
        rewhitening.step(xb)
        train(whitened, sgd, [(xb, yb)])
        train(plain, optimizer, [(xb, yb)])
        assert (optimizer._whitening.layers["0"].c is None) == (4 <= t < 8)
        assert_close(plain[0].weight, layer.weight, 1e-9, f"weight at {t}")
        assert_close(plain[0].bias, layer.bias, 1e-9, f"bias at {t}")


def length_in_the_fisher_metric(model, start, x):
    """Of the change of one gaussian layer: the root mean square change of its outputs."""
    change = x @ (model[0].weight - start["0.weight"]).T + model[0].bias - start["0.bias"]
    return float(change.square().sum(-1).mean().sqrt().detach())


@pytest.mark.parametrize("ratio", [0.0, 0.03, 30.0])
def test_the_bound_holds_if_biases_have_another_rate(ratio):
    """The centre couples weight and bias: ΔW moves b by −ΔW c, at the rate of W."""
    x = 5 + classification(60, 5, 3)[0]
    y = 10 * x[:, :3]
    model = mlp(5, 3)
    start = snapshot(model)
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 50.0 * ratio}]
    options = {"forward_damping": 1e-12, "backward_damping": 1e-12, "options": EXACT}
    optimizer = bprong.BPRONG(model, "gaussian", lr=50.0, params=groups, **options)
    ((model(x) - y) ** 2 / 2).sum(-1).mean().backward()
    optimizer.step()
    assert length_in_the_fisher_metric(model, start, x) == pytest.approx(0.1, rel=1e-6)


def by_hand(optimizer):
    optimizer.param_groups[0]["lr"] *= 0.1


def by_plateau(optimizer):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(1.0)


@pytest.mark.parametrize("lower", [by_hand, by_plateau])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_rate_that_is_lowered_lowers_bounded_steps(lower, resumed):
    x = classification(60, 5, 3)[0]
    y = 100 * x[:, :3]
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "gaussian", lr=50.0, options=EXACT)

    def length():
        start = snapshot(model)
        train(model, optimizer, [(x, y)], loss=lambda a, y: ((a - y) ** 2 / 2).sum(-1).mean())
        return length_in_the_fisher_metric(model, start, x)

    before = length()
    if resumed:
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = bprong.BPRONG(model, "gaussian", lr=50.0, options=EXACT)
        optimizer.load_state_dict(state)
    lower(optimizer)
    assert length() == pytest.approx(before * optimizer.param_groups[0]["lr"] / 50, rel=0.05)


def test_the_bound_keeps_adams_part_of_a_step_at_any_rate():
    """Parameters that are not whitened move as far at lr=1000 as at lr=10."""
    x, y = classification(60, 5, 3)
    moved = []
    for lr in (10.0, 1000.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4, dtype=torch.float64), nn.LayerNorm(4, dtype=torch.float64), mlp(4, 3))
        train(model, bprong.BPRONG(model, "cross_entropy", lr=lr, options=EXACT), [(x, y)])
        moved.append(float((model[1].weight - 1).abs().max().detach()))
    assert moved[0] < 0.5
    assert moved[1] == pytest.approx(moved[0], rel=1e-6)


@pytest.mark.filterwarnings("ignore::bprong.WhiteningWarning")  # most numbers are not whitened
def test_large_complex_parameters_follow_adam():
    """The square of a complex number is no size."""
    model = mlp(5, 3)
    model.filter = nn.Parameter(torch.randn(200, 100, dtype=torch.complex128))
    x, y = classification(60, 5, 3)
    start = model.filter.detach().clone()
    for max_step in (0.1, None):
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, max_step=max_step, options=EXACT)
        for _ in range(2):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + model.filter.abs().square().mean()).backward()
            optimizer.step()
    assert not torch.equal(model.filter, start)
