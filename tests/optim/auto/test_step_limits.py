"""The limits in lr="auto" as a user sees them: of steps, of damping, and of the examples that are evaluated."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from automatic import DATA, auto, bound, loss_of
from bprong import WhiteningWarning
from bprong.audit import fisher_factors, fisher_matrices
from bprong.optim.auto.rule import SETTINGS
from bprong.whitening.schedule import evaluation_period
from helpers import assert_close, mlp, quick_cases, snapshot
from training import EXACT, assert_same_path, batches, train


def vector(model):
    """The parameters in the order of `fisher_matrices`: of each layer (b, W) by columns."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    return torch.cat([torch.cat([m.bias[None], m.weight.T]).flatten() for m in layers]).detach().clone()


def moves(model, optimizer, steps):
    """½dᵀFd of each step on all data, with the explicit Fisher matrix, and the losses before."""
    found = []
    losses = []
    for _ in range(steps):
        F_ = fisher_matrices(fisher_factors(model, DATA[0], "cross_entropy"))["exact"]
        before = vector(model)
        losses.append(loss_of(model))
        train(model, optimizer, [DATA])
        d = vector(model) - before
        found.append(float(d @ F_ @ d) / 2)
    return found, losses


def test_predictions_move_no_further_than_the_bound():
    """The bound is a share of the averaged loss, and a part of that for the first steps. It is reached there."""
    model = mlp(5, 4, 3)
    model[2].weight.data *= 8
    optimizer = auto(model, options=EXACT)
    averaged = None
    found, losses = moves(model, optimizer, 10)
    for t, (length, loss) in enumerate(zip(found, losses, strict=True)):
        averaged = loss if averaged is None else SETTINGS.keep * averaged + (1 - SETTINGS.keep) * loss
        most = bound(averaged) * min(1.0, SETTINGS.first_part * 2**t)
        assert length == pytest.approx(most) if t < 3 else length <= 1.000001 * most
    assert losses[-1] < losses[0] / 10


def test_max_step_bounds_the_length_of_every_step_and_is_reached():
    """dᵀFd ≤ max_step² at evaluations; between them it is estimated."""
    model = mlp(5, 4, 3)
    found, losses = moves(model, auto(model, max_step=0.05, options=EXACT), 8)
    lengths = [math.sqrt(2 * x) for x in found]
    parts = [min(1.0, SETTINGS.first_part * 2**t) for t in range(3)]
    assert lengths[:3] == pytest.approx([0.05 * math.sqrt(part) for part in parts], rel=1e-6)
    assert max(lengths) <= 0.05 * (1 + 1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("given", [{"forward_damping": 0.3, "backward_damping": 0.07}, {}])
def test_damping_that_the_user_set_stays(given):
    model = mlp(5, 4, 3)
    optimizer = auto(model, every=1, **given)
    seen = {"forward_damping": set(), "backward_damping": set()}
    for batch in batches(*DATA, 20, 12):
        train(model, optimizer, [batch])
        for key, values in seen.items():
            values |= {round(row[key], 12) for row in optimizer.report().layers}
    assert all(values == {given[key]} if given else len(values) > 10 for key, values in seen.items())


def test_curvature_is_evaluated_on_a_part_of_a_batch_or_on_enough_examples():
    lengths = []

    class Counting(nn.Identity):
        def forward(self, x):
            lengths.append(len(x))
            return x

    model = nn.Sequential(Counting(), nn.Linear(5, 3, dtype=torch.float64))
    optimizer = auto(model, every=100)
    x = torch.randn(800, 5, dtype=torch.float64)
    for size in (800, 800, 100, 40):
        lengths.clear()
        train(model, optimizer, [(x[:size], x[:size, :3].argmax(-1))])
        expected = max(int(size * SETTINGS.evaluated_part), min(size, SETTINGS.evaluated_least))
        assert lengths[-2:] == [expected] * 2  # the last direction, and the loss afterwards


def test_the_period_of_evaluations_is_found_at_the_first_step_and_kept_in_checkpoints():
    """It is computed from operations, so that it is the same after a checkpoint; two directions: Δ and Δ₀."""
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    train(model, optimizer, [DATA])
    period = optimizer._rule.rule.period
    layers = optimizer._whitening.layers.values()
    assert period == evaluation_period(layers, 2, 1.0, SETTINGS.evaluate_share)
    assert period > SETTINGS.evaluate_every
    train(model, optimizer, [DATA])
    other = auto(mlp(5, 4, 3))
    other.load_state_dict(optimizer.state_dict())
    assert other._rule.rule.period == optimizer._rule.rule.period == period


# Losses that F describes badly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1e2, 1e4])
@pytest.mark.parametrize("seed", quick_cases([0, 1], 0))
def test_a_penalty_on_activations_does_not_blow_up(weight, seed):
    """Its gradient is 100 or 10,000 times that of −log p, and F does not include it; the loss still decreases."""
    torch.manual_seed(seed)
    model = mlp(5, 8, 3)
    optimizer = auto(model)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(DATA[0]), DATA[1]) + weight * model[0](DATA[0]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) == losses[0]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_weights_move_and_not_only_biases_if_outputs_are_certain_and_wrong(seed):
    """D is nearly zero then, and with it all the damping that applies to biases."""
    torch.manual_seed(seed)
    model = mlp(5, 3)
    model[0].weight.data *= 1000
    start = loss_of(model)
    before = snapshot(model)
    train(model, auto(model), [DATA])
    W, b = (snapshot(model)[f"0.{name}"] - before[f"0.{name}"] for name in ("weight", "bias"))
    assert (DATA[0] @ W.T).norm() > 0.1 * b.expand(60, 3).norm()
    assert loss_of(model) < start


class Precise(bprong.Likelihood):
    """Numbers of a known standard deviation, with a constant added to −log p."""

    def __init__(self, constant):
        self.constant = constant

    def nll(self, output, y):
        return (output - y).square().sum(-1) / (2 * 0.3**2) + self.constant

    def sample(self, output):
        return output + 0.3 * torch.randn_like(output)


@pytest.mark.parametrize("constant", quick_cases([-1000.0, -1.0, 1000.0], -1000.0))
def test_a_constant_in_a_users_own_likelihood_does_not_matter(constant):
    """−log p of a density may be negative, so no share of it bounds a step."""
    y = torch.tanh(DATA[0][:, :3])
    ends = []
    for likelihood in (Precise(0.0), Precise(constant)):
        torch.manual_seed(0)
        model = mlp(5, 6, 3)
        optimizer = auto(model, likelihood)
        for xb, yb in batches(DATA[0], y, 20, 35):
            optimizer.zero_grad()
            likelihood.nll(model(xb), yb).mean().backward()
            optimizer.observe(xb, yb)
            optimizer.step()
        ends.append(snapshot(model))
    assert_same_path(ends[1], ends[0], 1e-6)


# Parameters that are added later --------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", quick_cases([5, 15, 25], 15))
def test_uncovered_parameters_that_are_added_move_from_the_next_evaluation_on(t):
    """They follow Adam's direction, which had no coefficient before. Step 5 is evaluated, then 20 and 30."""
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    model[1].requires_grad_(False)
    optimizer = auto(model, step="natural")
    moved = []
    for step, batch in enumerate(batches(*DATA, 20, 35)):
        if step == t:
            optimizer.add_param_group({"params": model[1].requires_grad_().parameters()})
        before = model[1].weight.detach().clone()
        train(model, optimizer, [batch])
        if not torch.equal(model[1].weight, before):
            moved.append(step)
    assert moved[0] == {5: 5, 15: 20, 25: 30}[t]


def test_the_coefficient_of_adams_direction_is_a_learning_rate():
    """Adam's first direction is the sign of the gradient, so that it is the length of the first step."""
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    before = [p.detach().clone() for p in model[1].parameters()]
    optimizer = auto(model, options={"fisher": "exact"})
    train(model, optimizer, [DATA])
    beta = optimizer._rule.rule.coefficients["adam"]
    assert 0 < beta <= SETTINGS.most_fallback
    for p, old in zip(model[1].parameters(), before, strict=True):
        assert_close(p - old, -beta * p.grad.sign(), 1e-5)


# Undoing an update ----------------------------------------------------------------------------------------------------


def after_an_update(**arguments):
    """A network, its optimizer and a batch after 25 steps, with the parameters before the last of them."""
    torch.manual_seed(0)
    model = mlp(5, 8, 3)
    x = torch.randn(60, 5, dtype=torch.float64)
    batch = (x, x[:, :3].argmax(-1))
    optimizer = auto(model, **arguments)
    train(model, optimizer, [batch] * 24)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, [batch])
    return model, optimizer, batch, before


def test_an_update_after_which_the_loss_blew_up_is_undone_by_the_next_step():
    """Evaluations see the loss at every tenth step only; that of a batch is compared with the first at every step."""
    model, optimizer, batch, before = after_an_update()
    for p in model.parameters():
        wrong = 100 * torch.randn_like(p)
        p.data += wrong
        optimizer.state[p]["last_update"] += wrong
    train(model, optimizer, [batch])
    for p, old in zip(model.parameters(), before, strict=True):
        assert_close(p, old, 1e-10)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    train(model, optimizer, [batch] * 50)
    assert F.cross_entropy(model(batch[0]), batch[1]) < loss / 2


def test_after_an_undone_update_the_brake_is_released_by_evaluations_only():
    """At the step after each, which compares slopes."""
    model, optimizer, batch, _ = after_an_update()
    rule = optimizer._rule.rule
    for p in model.parameters():
        wrong = 100 * torch.randn_like(p)
        p.data += wrong
        optimizer.state[p]["last_update"] += wrong
    train(model, optimizer, [batch])
    assert rule.brake == SETTINGS.undone_part
    evaluated = False
    for t in range(25, 125):  # the step that was undone is not counted
        before = rule.brake
        compares, evaluated = evaluated, rule.evaluates(t)
        train(model, optimizer, [batch])
        assert before <= rule.brake <= 1 if compares else rule.brake == before
    assert rule.brake == 1


@pytest.mark.parametrize("decay", [0.0, 50.0])
def test_two_gradients_in_a_row_that_are_not_finite_undo_the_last_update(decay):
    """A single one may be the fault of its batch and changes nothing. The decay before the update is undone too."""
    model, optimizer, batch, before = after_an_update(weight_decay=decay)
    now = [p.detach().clone() for p in model.parameters()]
    for expected in (now, before):
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.nan)
        with pytest.warns(WhiteningWarning, match="not finite"):
            optimizer.step()
        for p, values in zip(model.parameters(), expected, strict=True):
            assert_close(p, values, 1e-10)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    train(model, optimizer, [batch] * 50)
    assert F.cross_entropy(model(batch[0]), batch[1]) < loss / 2


def test_only_what_the_last_step_moved_is_undone_also_after_a_checkpoint():
    """The last layer has no gradient at the last step, and keeps its update of the step before."""
    model = mlp(5, 8, 3)
    optimizer = auto(model)
    train(model, optimizer, [DATA] * 3)
    before = snapshot(model)
    optimizer.zero_grad()
    F.cross_entropy(model(DATA[0]), DATA[1]).backward()
    for p in model[2].parameters():
        p.grad = None
    optimizer.step()
    moved = {name for name, values in snapshot(model).items() if not torch.equal(values, before[name])}
    assert moved == {"0.weight", "0.bias"}
    resumed = auto(model)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.nan)
        with pytest.warns(WhiteningWarning, match="not finite"):
            resumed.step()
    assert_same_path(snapshot(model), before)


def test_a_first_example_that_is_fitted_by_chance_does_not_stop_training():
    """The losses of most other examples are more than ten times its loss. No update is to blame for that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    x = DATA[0]
    y = x[:, 0]
    model[0].bias.data += (y[:1] - model(x[:1]) + 0.01).detach()
    before = F.mse_loss(model(x), y).item()
    train(model, auto(model, "mse"), [(x[i : i + 1], y[i : i + 1]) for i in range(60)] * 4, loss=F.mse_loss)
    assert F.mse_loss(model(x), y).item() < 0.5 * before
