"""Whitening at a lower price: layers of one shape together, a period by a share of time, low rank not tried in vain."""

import io
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong import directions, factoring, lowrank
from bprong.lowrank import low_rank
from bprong.moments import input_moments
from bprong.pace import LEAST, interval
from bprong.preconditioner import Layer
from bprong.solver import LONGEST, Attempts
from bprong.units import units_of
from bprong.whitening import Damping, inverse
from helpers import assert_close, mlp, snapshot


def batch(t, features=6, rows=64, dtype=torch.float64):
    x = torch.randn(rows, features, dtype=dtype, generator=torch.Generator().manual_seed(t))
    return x, (x[:, 0] > 0).long()


def train(model, optimizer, steps, start=0, **how):
    for t in range(start, start + steps):
        x, y = batch(t, **how)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def deep(seed=0):
    torch.manual_seed(seed)
    return mlp(6, 6, 6, 6, 6, 2)


# Layers of one shape --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_layers_of_one_shape_move_as_they_would_alone(method, momentum, monkeypatch):
    together, alone = deep(), deep()
    first = method(together, lr=0.05, momentum=momentum, every=3)
    train(together, first, 10)
    assert len(first.statistics._directions._stacks) == 1, "four layers of 6 × 6"
    monkeypatch.setattr(directions, "SMALL", 0)
    monkeypatch.setattr(factoring, "SMALL", 0)
    second = method(alone, lr=0.05, momentum=momentum, every=3)
    train(alone, second, 10)
    assert not second.statistics._directions._stacks
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        assert_close(a, b, 1e-10)


def test_a_stack_of_which_one_layer_has_no_gradient_moves_the_others():
    model = deep()
    optimizer = bprong.BPRONG(model, lr=0.05, every=5)
    train(model, optimizer, 2)
    before = snapshot(model)
    x, y = batch(9)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad = None
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(before) - {"2.weight"}


@pytest.mark.parametrize("damping", [Damping(0.1), Damping(0.1, "mean")])
def test_sides_factored_together_have_the_inverses_they_have_alone(damping):
    """Each with its own damping: the mean is of one layer's side, not of all of them."""
    layers = [Layer(units_of(str(i), nn.Linear(5, 3, dtype=torch.float64))[0], "auto") for i in range(4)]
    sides = {layer: input_moments((i + 1) * batch(i, features=5)[0]) for i, layer in enumerate(layers)}
    dampings = {layer: Damping(damping.value * (i + 1), damping.relative_to) for i, layer in enumerate(layers)}
    found = factoring.together(sides, dampings)
    assert set(found) == set(layers)
    for layer, inverse_ in found.items():
        assert_close(inverse_, inverse(sides[layer].second, dampings[layer]), 1e-12)


def test_what_fails_together_is_left_to_be_factored_alone():
    layers = [Layer(units_of(str(i), nn.Linear(5, 3, dtype=torch.float64))[0], "auto") for i in range(2)]
    good, bad = input_moments(batch(0, features=5)[0]), input_moments(torch.full((4, 5), torch.nan))
    assert factoring.together(dict(zip(layers, (good, bad), strict=True)), dict.fromkeys(layers, Damping(0.1))) == {}


# The period -----------------------------------------------------------------------------------------------------------


def layer_of(inputs, outputs):
    layer = Layer(units_of("", nn.Linear(inputs, outputs))[0], "exact")
    layer.UU, layer.RR = torch.eye(inputs), torch.eye(outputs)
    return layer


def test_the_period_is_what_the_share_allows():
    """Twice the share, less than half the steps; larger batches make refreshes cheaper beside training."""
    seen = [(layer_of(300, 100), 100.0), (layer_of(100, 10), 100.0)]
    periods = [interval(seen, share) for share in (0.02, 0.05, 0.1, 0.2, 0.5)]
    assert periods == sorted(periods, reverse=True)
    assert 1.9 < periods[1] / periods[2] < 2.2
    assert interval([(layer, 5000.0) for layer, _ in seen], 0.1) < periods[2]
    assert interval(seen, 0.999) == LEAST
    assert interval(seen, 0.1, backward=False) < periods[2]


def looks(optimizer, model, steps):
    found = []
    for t in range(steps):
        found += [t] if optimizer.statistics.due else []
        train(model, optimizer, 1, start=t)
    return found


def test_by_default_looks_are_soon_at_first_and_then_a_period_apart_or_more():
    model = deep()
    optimizer = bprong.BPRONG(model, lr=0.0)
    found = looks(optimizer, model, 400)
    every = optimizer.statistics.schedule.every
    assert found[:5] == [0, every // 8, every // 4, every // 2, every]
    apart = [b - a for a, b in pairwise(found[4:])]
    assert all(gap % every == 0 for gap in apart)
    assert apart == sorted(apart), "nothing moves at lr 0, so looks become rarer"


def test_a_larger_share_is_a_shorter_period():
    model = deep()
    periods = []
    for overhead in (0.05, 0.3):
        optimizer = bprong.BPRONG(model, lr=0.0, options={"overhead": overhead})
        train(model, optimizer, 1)
        periods.append(optimizer.statistics.schedule.every)
    assert periods[0] > 3 * periods[1]
    for bad in (0, 1, -1, "much"):
        with pytest.raises(ValueError, match="overhead"):
            bprong.BPRONG(model, options={"overhead": bad})


def test_the_default_resumes_bit_for_bit():
    torch.set_num_threads(1)
    whole, half = deep(), deep()
    optimizer, first = (bprong.BPRONG(m, lr=0.05, momentum=0.9) for m in (whole, half))
    train(whole, optimizer, 150)
    train(half, first, 70)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = deep(seed=9)
    resumed.load_state_dict(saved["model"])
    second = bprong.BPRONG(resumed, lr=0.05, momentum=0.9)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, 80, start=70)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


# Low rank -------------------------------------------------------------------------------------------------------------


def test_low_rank_tried_in_vain_is_not_tried_again_soon():
    attempts, tried = Attempts(), []
    for t in range(80):
        solver = attempts.solver("auto")
        tried += [t] if solver == "auto" else []
        attempts.took(solver, torch.eye(300))
    assert tried == [0, 3, 8, 17, 34, 51, 68]
    assert max(b - a for a, b in pairwise(tried)) == LONGEST + 1
    attempts.left = 0
    attempts.took(attempts.solver("auto"), lowrank.LowRank(torch.zeros(300, 4), 1.0))
    assert attempts == Attempts(), "found once, it is tried each time again"
    assert attempts.solver("exact") == "exact"


def test_a_flat_spectrum_is_given_up_after_one_look(monkeypatch):
    looked = []
    monkeypatch.setattr(lowrank, "_leading", lambda *a, _of=lowrank._leading: looked.append(1) or _of(*a))
    assert low_rank(torch.eye(600, dtype=torch.float64), 0.1, 0.3, most=150) is None
    assert len(looked) == 1


# Gradients ------------------------------------------------------------------------------------------------------------


def test_gradients_whose_squares_overflow_are_finite_all_the_same():
    """Long gradients are looked at by their squares."""
    model = nn.Linear(200, 100)
    optimizer = bprong.BPRONG(model, lr=0.0)
    x = torch.randn(50, 200)
    (F.cross_entropy(model(x), torch.zeros(50, dtype=torch.long)) * 1e25).backward()
    assert float(model.weight.grad.double().square().sum()) > torch.finfo(torch.float32).max
    optimizer.step()
    assert optimizer.statistics.schedule.t == 1
