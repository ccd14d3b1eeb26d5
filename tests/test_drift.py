"""Refresh when needed: sides that move are refreshed, sides that stay where they are stop costing anything."""

import pytest
import torch
import torch.nn.functional as F

import bprong
from bprong.preconditioner import distance_from_white
from helpers import assert_close, mlp, snapshot, spd

DRIFT = {"refresh": "drift", "fisher": "exact"}


def data(t, shift=1.0):
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(200, 6, dtype=torch.float64, generator=generator) * shift
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def trained(steps, lr=0.05, shift=lambda t: 1.0, **settings):
    torch.manual_seed(0)
    model = mlp(6, 8, 3)
    optimizer = bprong.BPRONG(model, lr=lr, **({"every": 2, "options": DRIFT} | settings))
    for t in range(steps):
        x, y = data(t, shift(t))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def test_what_does_not_move_is_looked_at_less_and_less():
    """At rest, on data of one kind, looks come to be sixteen periods apart, and nothing is refreshed any more."""
    _, optimizer = trained(140, lr=0.0)
    slow = optimizer.statistics.schedule._slow
    assert set(slow.values()) == {16}
    assert all(t <= 30 for layer in optimizer.statistics.layers.values() for t in layer.refreshed_at.values())


def test_what_moves_is_refreshed():
    """Inputs twice as large from step 40 on: their side is refreshed soon after, though looks at it had become rare."""
    settings = {"options": DRIFT | {"average": 0.5}}
    _, optimizer = trained(110, lr=0.0, shift=lambda t: 1.0 if t < 40 else 2.0, **settings)
    layer = optimizer.statistics.layers["0"]
    assert layer.refreshed_at["forward"] >= 40
    x = torch.cat([data(t, 2.0)[0] for t in range(300, 310)])
    whitened = layer.UU @ (torch.cov(x.T, correction=0) + 0.2 * torch.eye(6, dtype=torch.float64))
    assert_close(whitened, torch.eye(6, dtype=torch.float64), 0.3)


def test_a_step_without_looks_measures_nothing():
    model, optimizer = trained(140, lr=0.0)
    assert optimizer.statistics.schedule.t % 32 != 0
    assert not optimizer.statistics.schedule.wanted
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    for t in range(140, 150):
        x, y = data(t)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(calls) == 10


def test_it_trains_as_well_as_by_the_clock():
    x, y = data(1000)
    losses = {}
    for refresh in ("periodic", "drift"):
        model, _ = trained(200, options=DRIFT | {"refresh": refresh})
        losses[refresh] = F.cross_entropy(model(x), y).item()
    assert losses["drift"] <= 1.1 * losses["periodic"]


def test_it_resumes_bit_for_bit():
    whole, _ = trained(60)
    half, optimizer = trained(30)
    fresh = bprong.BPRONG(half, lr=0.05, every=2, options=DRIFT)
    fresh.load_state_dict(optimizer.state_dict())
    for t in range(30, 60):
        x, y = data(t)
        fresh.zero_grad()
        F.cross_entropy(half(x), y).backward()
        fresh.step()
    expected = snapshot(whole)
    assert all(torch.equal(value, expected[name]) for name, value in snapshot(half).items())


@pytest.mark.parametrize("d", [100, 400])
def test_the_distance_of_wide_sides_is_estimated_well(d):
    second, other = spd(d, 0), spd(d, 1)
    inverse = torch.linalg.inv(other + 0.1 * torch.eye(d, dtype=torch.float64))
    exact = (
        float((torch.linalg.matrix_power(inverse @ second - torch.eye(d, dtype=torch.float64), 2)).trace() / d) ** 0.5
    )
    assert distance_from_white(inverse, second) == pytest.approx(exact, rel=1e-6 if d <= 128 else 0.1)


def test_another_pace_is_answered_by_what_is_allowed():
    with pytest.raises(ValueError, match=r"refresh must be one of \('periodic', 'drift', 'continuous'\), not 'often'"):
        bprong.BPRONG(mlp(5, 3), options={"refresh": "often"})
