"""When sides are measured and refreshed: at their periods, within a share of run time, or when they have drifted."""

import io
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.weights import weight_matrices_of
from bprong.linalg.factors import Dense
from bprong.linalg.moments import Moments
from bprong.optim import Periods
from bprong.whitening.layer import Layer
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import (
    LONGEST_INTERVAL,
    SHORTEST_PERIOD,
    Schedule,
    evaluation_period,
    mixed,
    period_for,
)
from helpers import assert_close, mlp, snapshot

f64 = torch.float64


def layer_of(inputs, outputs, rows=100.0, backward=True):
    """A layer that was refreshed once, with exact factors, from this many rows."""
    layer = Layer(weight_matrices_of("", nn.Linear(inputs, outputs))[0], "exact", backward=backward)
    layer.forward.moments = Moments(rows, None, torch.eye(inputs))
    for side in layer.sides:
        side.factor = Dense(torch.eye(side.blocks.size), side.blocks)
    return layer


def schedule(two_sided=True, layers=None, forward=(4, 0), backward=(6, None), refresh="periodic", **others):
    layers = Layers([layer_of(3, 2, backward=two_sided)]) if layers is None else layers
    return Schedule(layers, Periods(*forward, *backward, refresh), **({"seed": 3} | others))


def at(clock, steps, read):
    """What is read at each of the first steps."""
    found = []
    for t in range(steps):
        clock.t = t
        clock.plan()
        found.append(read(clock))
    return found


def measured(clock):
    """The sides that are measured at this step, each with the names of its layers."""
    return {side: names for side, names in clock.measured.items() if names and clock.is_due}


# Periods --------------------------------------------------------------------------------------------------------------


def test_a_side_is_due_at_its_offset_in_each_period():
    """mod(t, τ) = c, with half a period as the default offset."""
    due = at(schedule(), 10, lambda clock: clock.refreshed)
    assert [t for t, sides in enumerate(due) if "forward" in sides] == [0, 4, 8]
    assert [t for t, sides in enumerate(due) if "backward" in sides] == [3, 9]
    assert not any("backward" in sides for sides in at(schedule(two_sided=False), 10, lambda clock: clock.refreshed))


def test_the_next_step_that_measures_something_is_known_before():
    clock = schedule()
    for t, expected in ((0, 0), (1, 3), (4, 4), (5, 8), (9, 9)):
        clock.t = t
        clock.plan()
        assert clock.next == expected
        assert clock.is_due == (t == expected)
        assert clock.is_due or clock.refreshed == []


def test_the_state_restores_the_clock():
    clock = schedule()
    clock.t = 7
    other = schedule(seed=99)
    other.load_state_dict(clock.state_dict())
    assert other.t == 7
    assert other.seed == clock.seed


def test_every_step_has_a_seed_of_its_own():
    """No stream is shared between runs or steps, nor with the small seeds that users choose."""
    assert mixed(0, 0) not in (0, 1)
    assert len({mixed(seed, t) for seed in range(20) for t in range(20)}) == 400
    assert mixed(1, 0) != mixed(0, 1)
    clock = schedule()
    assert len(set(at(clock, 20, lambda clock: clock.seed))) == 20
    torch.manual_seed(5)
    assert schedule(seed=None).base_seed == 5, "torch's initial seed by default"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"forward": (0, 0)}, "forward_every must be a whole number of at least 1, not 0"),
        ({"forward": (2.5, 0)}, "forward_every must be a whole number of at least 1, not 2.5"),
        ({"backward": ("10", None)}, "backward_every must be a whole number of at least 1, not '10'"),
        ({"backward": (10, 10)}, "backward_offset must be .* less than 10, not 10"),
        ({"fisher": "true"}, "fisher must be one of .*'sampled'"),
        ({"average": 1.0}, "average must be .* less than 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
    ],
)
def test_errors_about_settings_say_what_is_allowed(given, message):
    with pytest.raises(ValueError, match=message):
        schedule(**given)


# A share of run time --------------------------------------------------------------------------------------------------


def batch(t, features=6, rows=64):
    x = torch.randn(rows, features, dtype=f64, generator=torch.Generator().manual_seed(t))
    return x, (x[:, 0] > 0).long()


def train(model, optimizer, steps, start=0):
    for t in range(start, start + steps):
        x, y = batch(t)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def deep(seed=0):
    torch.manual_seed(seed)
    return mlp(6, 6, 6, 6, 6, 2)


def test_the_period_is_the_one_that_the_share_of_time_allows():
    """Twice the share, about half the period; larger batches make refreshes cheaper relative to training."""
    layers = [layer_of(300, 100), layer_of(100, 10)]
    periods = [period_for(layers, share) for share in (0.02, 0.05, 0.1, 0.2, 0.5)]
    assert periods == sorted(periods, reverse=True)
    assert 1.9 < periods[1] / periods[2] < 2.2
    assert period_for([layer_of(300, 100, 5000.0), layer_of(100, 10, 5000.0)], 0.1) < periods[2]
    assert period_for(layers, 0.999) == SHORTEST_PERIOD
    assert period_for([layer_of(300, 100, backward=False), layer_of(100, 10, backward=False)], 0.1) < periods[2]
    assert period_for([], 0.1) == SHORTEST_PERIOD


def test_evaluations_take_the_share_of_time_that_they_may():
    """Twice the share, about half the period; more directions and larger parts of a batch take longer."""
    layers = [layer_of(300, 100, 5000.0), layer_of(100, 10, 5000.0)]
    periods = [evaluation_period(layers, 3, 0.25, share) for share in (0.01, 0.02, 0.05)]
    assert 1.9 < periods[0] / periods[1] < 2.2
    assert periods == sorted(periods, reverse=True)
    assert evaluation_period(layers, 2, 0.25, 0.01) < periods[0] < evaluation_period(layers, 3, 1.0, 0.01)
    assert evaluation_period([], 3, 1.0, 0.1) == 0


def test_evaluations_of_a_whole_batch_cost_what_was_measured():
    """On a large batch, of which everything is evaluated: ten forward passes, of which a step takes three."""
    layers = [layer_of(300, 100, 1e9)]
    assert evaluation_period(layers, 3, 1.0, 0.1) == pytest.approx(9 * 10 / 3, abs=1)


def measured_at(optimizer, model, steps):
    """The steps at which something was measured."""
    found = []
    for t in range(steps):
        found += [t] if optimizer._whitening.due else []
        train(model, optimizer, 1, start=t)
    return found


def test_by_default_measurements_are_frequent_at_first_and_then_a_period_or_more_apart():
    model = deep()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.0)
    found = measured_at(optimizer, model, 400)
    every = optimizer._whitening.schedule.every
    assert found[:5] == [0, every // 8, every // 4, every // 2, every]
    gaps = [b - a for a, b in pairwise(found[4:])]
    assert all(gap % every == 0 for gap in gaps)
    assert gaps == sorted(gaps), "nothing drifts at lr 0, so measurements become rarer"


def test_the_default_resumes_bit_for_bit():
    whole = deep()
    half = deep()
    optimizer, first = (bprong.BPRONG(m, "cross_entropy", lr=0.05, momentum=0.9) for m in (whole, half))
    train(whole, optimizer, 150)
    train(half, first, 70)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = deep(seed=9)
    resumed.load_state_dict(saved["model"])
    second = bprong.BPRONG(resumed, "cross_entropy", lr=0.05, momentum=0.9)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, 80, start=70)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


# Drift ----------------------------------------------------------------------------------------------------------------

DRIFT = Periods(2, refresh="drift")
EXACT = {"fisher": "exact"}


def data(t, scale=1.0):
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(200, 6, dtype=f64, generator=generator) * scale
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def drifted(steps, lr=0.05, scale=lambda t: 1.0, **others):
    torch.manual_seed(0)
    model = mlp(6, 8, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, **({"every": DRIFT, "options": EXACT} | others))
    for t in range(steps):
        x, y = data(t, scale(t))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def sides_of(optimizer):
    return [side for layer in optimizer._whitening.layers.values() for side in layer.sides]


def test_a_side_that_does_not_drift_is_measured_less_and_less():
    """At lr 0, on data of one distribution, measurements come to be sixteen periods apart, without any refresh."""
    _, optimizer = drifted(140, lr=0.0)
    assert {side.interval for side in sides_of(optimizer)} == {LONGEST_INTERVAL}
    assert all(side.refreshed_at <= 30 for side in sides_of(optimizer))


def test_a_side_that_drifts_is_refreshed():
    """Inputs are twice as large from step 40 on: their side is refreshed soon, though measurements had become rare."""
    options = {"options": EXACT | {"average": 0.5}}
    _, optimizer = drifted(110, lr=0.0, scale=lambda t: 1.0 if t < 40 else 2.0, **options)
    side = optimizer._whitening.layers["0"].forward
    assert side.refreshed_at >= 40
    x = torch.cat([data(t, 2.0)[0] for t in range(300, 310)])
    whitened = side.factor.left(torch.cov(x.T, correction=0) + 0.2 * torch.eye(6, dtype=f64))
    assert_close(whitened, torch.eye(6, dtype=f64), 0.3)


def test_sides_with_offsets_of_their_own_are_all_refreshed():
    """The errors' side is first due after drift has given the inputs' side its interval."""
    _, optimizer = drifted(20, every=Periods(2, backward_offset=1, refresh="drift"))
    assert all(side.interval is not None for side in sides_of(optimizer))
    assert all(side.refreshed_at % 2 == (0 if side.of_inputs else 1) for side in sides_of(optimizer))


def test_a_side_that_was_never_measured_follows_the_others():
    """An idle layer must not make measurements due that no other layer needs."""
    layers = Layers([layer_of(3, 2), Layer(weight_matrices_of("idle", nn.Linear(3, 2))[0])])
    clock = schedule(layers=layers, refresh="drift", backward=(4, 0))
    for side in layers[""].sides:
        side.interval = 4
    assert [t for t, sides in enumerate(at(clock, 40, lambda clock: clock.refreshed)) if sides] == [0, 16, 32]
    assert at(clock, 5, measured)[4] == {}
    assert at(clock, 17, measured)[16] == {"forward": {"", "idle"}, "backward": {"", "idle"}}


def test_a_step_without_a_measurement_calls_the_model_once():
    model, optimizer = drifted(140, lr=0.0)
    assert optimizer._whitening.schedule.t % 32 != 0
    assert not optimizer._whitening.due
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    for t in range(140, 150):
        x, y = data(t)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(calls) == 10


@pytest.mark.rest
def test_refreshing_by_drift_trains_as_well_as_at_every_period():
    x, y = data(1000)
    losses = {}
    for refresh in ("periodic", "drift"):
        model, _ = drifted(200, every=Periods(2, refresh=refresh))
        losses[refresh] = F.cross_entropy(model(x), y).item()
    assert losses["drift"] <= 1.1 * losses["periodic"]


def test_refreshing_by_drift_resumes_bit_for_bit():
    whole, _ = drifted(60)
    half, optimizer = drifted(30)
    fresh = bprong.BPRONG(half, "cross_entropy", lr=0.05, every=DRIFT, options=EXACT)
    fresh.load_state_dict(optimizer.state_dict())
    for t in range(30, 60):
        x, y = data(t)
        fresh.zero_grad()
        F.cross_entropy(half(x), y).backward()
        fresh.step()
    expected = snapshot(whole)
    assert all(torch.equal(value, expected[name]) for name, value in snapshot(half).items())


def test_intervals_of_a_run_by_drift_are_void_where_a_period_is_given():
    model, optimizer = drifted(140, lr=0.0)
    assert all(side.interval > 1 for side in sides_of(optimizer))
    periodic = bprong.BPRONG(model, "cross_entropy", lr=0.05, every=3, options=EXACT)
    periodic.load_state_dict(optimizer.state_dict())
    assert periodic._whitening.schedule.next == 141
    assert all(side.interval is None for side in sides_of(periodic))
