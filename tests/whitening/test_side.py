"""One side of a layer: its running moments, its factor, and when low rank is tried for it."""

import io
import math
from itertools import pairwise

import pytest
import torch

from bprong.errors import WhiteningError
from bprong.linalg.factors import LOW_RANK_ERROR, Damping, Dense
from bprong.linalg.low_rank import LONGEST_BACKOFF, LOW_RANK_FROM, Backoff, LowRank
from bprong.linalg.moments import Blocks, Moments
from bprong.whitening import layer as layer_module
from bprong.whitening.layer import Side
from helpers import assert_close, input_moments, inverse, spd

LIKE = torch.empty(0, dtype=torch.float64)
DAMPING = Damping(0.1)


def rows(n, d, seed=0, scale=1.0):
    return scale * torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def wide_moments(d=400, power=2.0):
    """Moments of a wide side whose spectrum decays by this power."""
    Q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    eigenvalues = 10.0 * torch.arange(1, d + 1, dtype=torch.float64) ** -power
    return Moments(5.0, None, 5 * (Q * eigenvalues) @ Q.T)


def refreshed(side, moments, damping=DAMPING):
    """The side after a refresh from these moments."""
    side.factor = side.solve(side.update(moments, 0.0), damping, LIKE)
    return side


# Running moments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_an_update_adds_to_the_running_average_and_returns_it(keep):
    side = Side("forward", Blocks(4))
    first = input_moments(rows(10, 4))
    second = input_moments(rows(20, 4, seed=1))
    assert_close(side.update(first, keep).second, first.second, 0)
    found = side.update(second, keep)
    expected = first.merge(second, keep) if keep else second
    assert found is side.moments
    assert_close(found.second, expected.second, 1e-14)
    assert side.observations == expected.weight == 20 + 10 * keep
    assert side.mean_eigenvalue == pytest.approx(float(expected.variances.mean()), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_measurement_that_is_not_finite_does_not_enter_the_average(bad, keep):
    """It is returned as it is, so that its factorisation reports it; the side keeps what it knew."""
    side = refreshed(Side("forward", Blocks(4)), input_moments(rows(10, 4)))
    kept = side.moments
    factor = side.factor
    eigenvalue = side.mean_eigenvalue
    z = rows(20, 4, seed=1)
    z[3, 1] = bad
    found = side.update(input_moments(z), keep)
    assert not found.finite
    with pytest.raises(WhiteningError, match="not finite"):
        side.solve(found, DAMPING, LIKE)
    assert side.moments is kept
    assert side.factor is factor
    assert side.mean_eigenvalue == eigenvalue
    good = input_moments(rows(20, 4, seed=2))
    expected = kept.merge(good, keep) if keep else good
    assert_close(side.update(good, keep).second, expected.second, 1e-14)


def test_the_running_average_is_made_in_place_of_memory_of_its_own():
    side = Side("forward", Blocks(4))
    first = input_moments(rows(10, 4))
    before = first.scatter.clone()
    side.update(first, 0.5)
    memory = side.moments.scatter.data_ptr()
    side.update(input_moments(rows(3, 4, seed=1)), 0.5)
    assert side.moments.scatter.data_ptr() == memory
    assert torch.equal(first.scatter, before)


def test_a_side_that_is_no_longer_centred_starts_a_new_average():
    side = Side("forward", Blocks(4))
    side.update(input_moments(rows(10, 4)), 0.9)
    uncentred = input_moments(rows(10, 4, seed=1), centre=False)
    assert_close(side.update(uncentred, 0.9).second, uncentred.second, 0)
    assert side.moments.mean is None


def test_the_drift_is_the_distance_of_the_damped_moments_from_the_factor():
    side = Side("forward", Blocks(4))
    moments = input_moments(rows(200, 4))
    assert side.drift(moments, DAMPING) == math.inf, "without a factor"
    refreshed(side, moments)
    assert side.drift(moments, DAMPING) < 1e-7
    damped = 4 * moments.second + 0.1 * torch.eye(4, dtype=torch.float64)
    off = side.factor.inverse @ damped - torch.eye(4, dtype=torch.float64)
    twice = input_moments(rows(200, 4, scale=2.0))
    assert side.drift(twice, DAMPING) == pytest.approx(float((off @ off).trace() / 4) ** 0.5, rel=1e-9)


# Low rank -------------------------------------------------------------------------------------------------------------


def test_low_rank_that_failed_is_tried_less_and_less():
    backoff = Backoff()
    tried = []
    for t in range(80):
        if backoff.tries():
            tried.append(t)
            backoff.record(found=False)
    assert tried == [0, 3, 8, 17, 34, 51, 68]
    assert max(b - a for a, b in pairwise(tried)) == LONGEST_BACKOFF + 1


def test_low_rank_that_was_found_is_tried_at_every_refresh():
    backoff = Backoff()
    backoff.record(found=False)
    while not backoff.tries():
        pass
    backoff.record(found=True)
    assert backoff == Backoff()
    assert [backoff.tries() for _ in range(3)] == [True, True, True]


def test_the_first_refreshes_can_be_exact():
    backoff = Backoff(skip=2)
    assert [backoff.tries() for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("solver", "size", "form"),
    [
        ("auto", 400, LowRank),
        ("exact", 400, Dense),
        ("low-rank", 400, LowRank),
        ("auto", LOW_RANK_FROM - 1, Dense),
        ("low-rank", LOW_RANK_FROM - 1, LowRank),
    ],
)
def test_the_solver_and_the_width_decide_the_form_of_the_factor(solver, size, form):
    side = refreshed(Side("forward", Blocks(size), solver), wide_moments(size))
    assert type(side.factor) is form
    if form is LowRank:
        assert side.factor.error <= LOW_RANK_ERROR
    else:
        assert_close(side.factor.inverse, inverse(side.moments.second, DAMPING), 1e-12)


@pytest.mark.parametrize("solver", ["auto", "low-rank"])
def test_blocks_are_factored_exactly(solver):
    several = Moments(1.0, None, torch.stack([spd(300, 0), spd(300, 1)]))
    assert type(refreshed(Side("forward", Blocks(300, 2), solver), several).factor) is Dense


def test_a_flat_spectrum_is_factored_exactly_and_seldom_tried_again(monkeypatch):
    side = Side("forward", Blocks(300), "auto")
    flat = Moments(1.0, None, torch.diag(torch.arange(300, dtype=torch.float64) % 2))  # half of them one, half zero
    tried = []
    low_rank = layer_module.low_rank
    monkeypatch.setattr(layer_module, "low_rank", lambda *arguments: tried.append(1) or low_rank(*arguments))
    counts = []
    for _ in range(9):
        refreshed(side, flat, Damping(0.01))
        counts.append(len(tried))
    assert counts == [1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert_close(side.factor.inverse, inverse(flat.second, 0.01), 1e-12)


def test_low_rank_that_the_user_asked_for_is_always_tried(monkeypatch):
    side = Side("forward", Blocks(40), "low-rank", Backoff(skip=5))
    tried = []
    monkeypatch.setattr(layer_module, "low_rank", lambda *_: tried.append(1))
    for _ in range(4):
        refreshed(side, Moments(1.0, None, spd(40)))
    assert len(tried) == 4


def test_the_factor_in_force_is_where_the_next_one_starts(monkeypatch):
    side = refreshed(Side("forward", Blocks(400), "auto"), wide_moments())
    starts = []
    low_rank = layer_module.low_rank
    monkeypatch.setattr(
        layer_module, "low_rank", lambda *arguments: starts.append(arguments[-1]) or low_rank(*arguments)
    )
    before = side.factor.B
    refreshed(side, wide_moments())
    assert starts == [before]


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["exact", "low-rank"])
def test_the_state_restores_everything_that_later_refreshes_depend_on(solver):
    side = refreshed(Side("backward", Blocks(40), solver, Backoff(3, 8)), wide_moments(40))
    side.refreshed_at = 7
    side.interval = 4
    side.failures = 2
    file = io.BytesIO()
    torch.save(side.state_dict(LIKE), file)
    file.seek(0)
    restored = Side("backward", Blocks(40), solver)
    restored.load_state_dict(torch.load(file, weights_only=True), LIKE)
    for name in ("refreshed_at", "interval", "mean_eigenvalue", "observations", "backoff"):
        assert getattr(restored, name) == getattr(side, name), name
    assert restored.failures == 0
    M = torch.randn(3, 40, dtype=torch.float64)
    assert torch.equal(restored.factor.right(M), side.factor.right(M))
    new = wide_moments(40)
    assert torch.equal(restored.update(new, 0.9).scatter, side.update(new, 0.9).scatter)


def test_averages_in_place_do_not_change_a_state_that_was_saved_or_loaded():
    side = refreshed(Side("forward", Blocks(3)), input_moments(rows(5, 3)))
    state = side.state_dict(LIKE)
    before = state["scatter"].clone()
    restored = Side("forward", Blocks(3))
    restored.load_state_dict(state, LIKE)
    for each in (side, restored):
        each.update(input_moments(rows(9, 3, seed=1)), 0.9)
    assert torch.equal(state["scatter"], before)


def test_a_slice_of_a_groups_inverses_is_saved_alone():
    several = torch.stack([spd(5, i) for i in range(50)])
    file = io.BytesIO()
    torch.save(Side("forward", Blocks(5), factor=Dense(several[3], Blocks(5))).state_dict(LIKE), file)
    assert file.tell() < several.nbytes / 2


def test_the_state_of_a_side_that_was_never_measured_is_restored():
    restored = refreshed(Side("forward", Blocks(4)), input_moments(rows(10, 4)))
    restored.load_state_dict(Side("forward", Blocks(4)).state_dict(LIKE), LIKE)
    assert restored.moments is None
    assert restored.factor is None
    assert restored.refreshed_at is None
