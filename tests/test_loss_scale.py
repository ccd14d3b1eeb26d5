"""The multiple of −log p that a loss is, where batches or bounds must decide."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.evaluation import Scale
from bprong.likelihood import Gaussian
from bprong.loss_scale import customary, line, lower_bound, of_each_target, rounded
from bprong.user_loss import Loss


@given(scale=st.floats(1e-6, 1e6), zeros=st.integers(10, 50), seed=st.integers(0, 2**31))
def test_a_bound_never_exceeds_the_scale_and_is_it_where_targets_are_hard(scale, zeros, seed):
    torch.manual_seed(seed)
    p, y = torch.rand(2, 100, dtype=torch.float64)
    for hard in (False, True):
        y[:zeros] = 0 if hard else y[:zeros]
        G = scale * (p - y)
        bound, shared = lower_bound(G, torch.where(G > 0, p, 1 - p), 1e-16)
        assert bound <= scale * (1 + 1e-12)
        assert shared or not hard
        if hard:
            assert bound == pytest.approx(scale, rel=1e-3)


def test_what_is_no_line_is_not_taken_for_one():
    p = torch.rand(50, dtype=torch.float64)
    assert line(p, 2 * (p - 0.01), 1e-16) == pytest.approx((2, 0.01))
    assert line(p, 2 * p.square(), 1e-16) is None
    assert line(p, -p, 1e-16) is None
    assert line(p, 2 * (p + 0.5), 1e-16) is None  # no probability is negative


def test_each_target_by_itself_only_where_labels_are_hard():
    p = torch.randn(20, 4, dtype=torch.float64).softmax(-1)
    y, scales = torch.eye(4, dtype=torch.float64)[torch.arange(20) % 4], torch.rand(20, dtype=torch.float64) + 0.1
    assert of_each_target(p, scales[:, None] * (p - y), torch.arange(20) % 4, 1e-16).numpy() == pytest.approx(
        scales.numpy()
    )
    assert of_each_target(p, scales[:, None] * (p - y.roll(1, 0) / 2 - y / 2), torch.arange(20) % 4, 1e-16) is None


def noted(estimates, values, sizes=None, elements=3, scale=None):
    """κ after so many batches of numbers, and what remembers it."""
    scale = Scale() if scale is None else scale
    found, nothing = None, torch.zeros(1)
    for estimate, value, n in zip(estimates, values, sizes or [50] * len(estimates), strict=True):
        loss = Loss(Gaussian(), estimate, nothing, nothing, certain=False, at_least=estimate)
        found = scale.note(loss, n, value, customary([n, n * elements]))
    return found, scale


def uniform(seed, count, low, high):
    generator = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator)).tolist()


SEEDS = st.integers(0, 2**31)


@given(kappa=st.floats(0.01, 100), sizes=st.lists(st.integers(10, 500), min_size=5, max_size=8), is_mean=st.booleans())
def test_without_a_penalty_batches_agree_on_any_multiple(kappa, sizes, is_mean):
    estimates = [kappa / n if is_mean else kappa for n in sizes]
    found, scale = noted(estimates, [1.0 + i for i in range(len(sizes))], sizes)
    assert found == pytest.approx(estimates[-1], rel=0.01)
    assert not scale.doubtful


@pytest.mark.parametrize("multiple", [7.3, 1 / 30, 2.0**16, 0.001])
def test_a_multiple_that_somebody_has_written_is_known_at_once(multiple):
    assert noted([multiple * 2 / 150], [1.0])[0] == pytest.approx(multiple * 2 / 150)


@given(seed=SEEDS, count=st.integers(1, 8), penalty=st.floats(-2, 6))
def test_a_penalty_makes_estimates_too_small_and_they_are_not_taken_for_the_scale(seed, count, penalty):
    """κ̂ = κ D / (D + C), be C a hundredth of D or a million times that; 2/elements is found again, or its half."""
    true, losses = 2 / (50 * 3), uniform(seed, count, 0.1, 3.0)
    estimates = [true * loss / (loss + 10**penalty) for loss in losses]
    found, scale = noted(estimates, [loss + 10**penalty for loss in losses])
    assert found == pytest.approx(true, rel=0.011) or found == pytest.approx(true / 2, rel=0.011)
    if max(losses) >= 4 * 10**penalty or max(estimates) < 0.3 * true:
        assert found == pytest.approx(true, rel=0.011)
    varied = max(estimates[-5:]) > 1.011 * min(estimates[-5:])
    assert scale.doubtful == (varied and scale.seen[0][2] == 0)


@given(seed=SEEDS, multiple=st.floats(1.02, 1000), later=st.integers(0, 80))
def test_a_scale_that_grows_is_followed_at_once_and_one_that_falls_when_estimates_agree(seed, multiple, later):
    """A penalty that comes later does not make it fall."""
    values, kappa = uniform(seed, 10 + later, 0.1, 3.0), 0.0123
    _, scale = noted([kappa] * len(values), values)
    assert noted([multiple * kappa], [multiple], scale=scale)[0] == multiple * kappa
    found, _ = noted([kappa * value / (value + 0.5) for value in values], [v + 0.5 for v in values], scale=scale)
    assert found == multiple * kappa
    values = uniform(seed, 5, 0.1, 3.0)
    assert noted([kappa] * 4, values[:4], scale=scale)[0] == multiple * kappa
    assert noted([kappa], values[4:], scale=scale)[0] == kappa


def test_estimates_of_a_loss_that_stands_still_confirm_nothing():
    """As while the learning rate warms up from zero."""
    found, scale = noted([0.000345] * 20, [1000.0] * 20)
    assert found == 2 / 150
    assert not scale.doubtful  # nor do they refute


def test_rounding_is_to_the_nearest_and_only_so_far():
    known = customary([50, 150])
    assert known == sorted({1 / 150, 2 / 150, 1 / 50, 2 / 50, 1, 2})
    assert rounded(1.009 / 50, known) == 1 / 50
    assert rounded(0.98 / 50, known) is None
    assert rounded(0.98 / 50, known, below=0.25) == 1 / 50
    assert rounded(1.2 / 50, known, below=0.25) is None
