"""κ of a loss, where it must be inferred from bounds or from several batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.likelihood.families import Gaussian
from bprong.likelihood.loss import Loss, customary_scales, lower_bound, rounded, scale_of_each_target, slope_of_line
from bprong.likelihood.loss_scale import ScaleEstimate


@given(scale=st.floats(1e-6, 1e6), zeros=st.integers(10, 50), seed=st.integers(0, 2**31))
def test_a_lower_bound_never_exceeds_the_scale_and_equals_it_if_targets_are_hard(scale, zeros, seed):
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


def test_only_a_line_is_fitted_by_a_line():
    p = torch.rand(50, dtype=torch.float64)
    assert slope_of_line(p, 2 * (p - 0.01), 1e-16) == pytest.approx(2)
    assert slope_of_line(p, 2 * p, 1e-16) == pytest.approx(2)
    assert slope_of_line(p, 2 * p.square(), 1e-16) is None
    assert slope_of_line(p, -p, 1e-16) is None
    assert slope_of_line(p, 2 * (p + 0.5), 1e-16) is None  # q would be negative


def test_each_target_has_a_scale_only_if_labels_are_hard():
    p = torch.randn(20, 4, dtype=torch.float64).softmax(-1)
    y = torch.eye(4, dtype=torch.float64)[torch.arange(20) % 4]
    scales = torch.rand(20, dtype=torch.float64) + 0.1
    assert scale_of_each_target(p, scales[:, None] * (p - y), torch.arange(20) % 4, 1e-16).numpy() == pytest.approx(
        scales.numpy()
    )
    assert (
        scale_of_each_target(p, scales[:, None] * (p - y.roll(1, 0) / 2 - y / 2), torch.arange(20) % 4, 1e-16) is None
    )


def noted(estimates, values, sizes=None, elements=3, scale=None):
    """κ after these estimates from batches of a Gaussian, and the object that remembers it."""
    scale = ScaleEstimate() if scale is None else scale
    found = None
    nothing = torch.zeros(1)
    for estimate, value, n in zip(estimates, values, sizes or [50] * len(estimates), strict=True):
        loss = Loss(Gaussian(), estimate, nothing, nothing, certain=False, at_least=estimate)
        found = scale.note(loss, n, value, customary_scales(Gaussian(), torch.zeros(n, elements), n))
    return found, scale


def uniform(seed, count, low, high):
    generator = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator)).tolist()


SEEDS = st.integers(0, 2**31)


@given(kappa=st.floats(0.01, 100), sizes=st.lists(st.integers(10, 500), min_size=5, max_size=8), is_mean=st.booleans())
def test_without_a_penalty_batches_agree_on_any_scale(kappa, sizes, is_mean):
    estimates = [kappa / n if is_mean else kappa for n in sizes]
    found, scale = noted(estimates, [1.0 + i for i in range(len(sizes))], sizes)
    assert found == pytest.approx(estimates[-1], rel=0.01)
    assert not scale.doubtful


@pytest.mark.parametrize("multiple", [7.3, 1 / 30, 2.0**16, 0.001])
def test_a_round_multiple_is_known_from_one_batch(multiple):
    assert noted([multiple * 2 / 150], [1.0])[0] == pytest.approx(multiple * 2 / 150)


@given(seed=SEEDS, count=st.integers(1, 8), penalty=st.floats(-2, 6))
def test_estimates_that_a_penalty_makes_too_small_are_not_used_as_the_scale(seed, count, penalty):
    """κ̂ = κ D / (D + C), with C from a hundredth of D to a million times D; 2/elements is found, or half of it."""
    true = 2 / (50 * 3)
    losses = uniform(seed, count, 0.1, 3.0)
    estimates = [true * loss / (loss + 10**penalty) for loss in losses]
    found, scale = noted(estimates, [loss + 10**penalty for loss in losses])
    assert found == pytest.approx(true, rel=0.011) or found == pytest.approx(true / 2, rel=0.011)
    if max(losses) >= 4 * 10**penalty or max(estimates) < 0.3 * true:
        assert found == pytest.approx(true, rel=0.011)
    varied = max(estimates[-5:]) > 1.011 * min(estimates[-5:])
    assert scale.doubtful == (varied and scale.seen[0][2] == 0)


@given(seed=SEEDS, multiple=st.floats(1.02, 1000), later=st.integers(0, 80))
def test_a_larger_scale_is_adopted_at_once_and_a_smaller_one_when_estimates_agree(seed, multiple, later):
    """A penalty that is added later does not lower it."""
    values = uniform(seed, 10 + later, 0.1, 3.0)
    kappa = 0.0123
    _, scale = noted([kappa] * len(values), values)
    assert noted([multiple * kappa], [multiple], scale=scale)[0] == multiple * kappa
    found, _ = noted([kappa * value / (value + 0.5) for value in values], [v + 0.5 for v in values], scale=scale)
    assert found == multiple * kappa
    values = uniform(seed, 5, 0.1, 3.0)
    assert noted([kappa] * 4, values[:4], scale=scale)[0] == multiple * kappa
    assert noted([kappa], values[4:], scale=scale)[0] == kappa


def test_estimates_of_a_constant_loss_are_no_evidence():
    """Losses are constant while a learning rate warms up from zero."""
    found, scale = noted([0.000345] * 20, [1000.0] * 20)
    assert found == 2 / 150
    assert not scale.doubtful  # they are no evidence of a penalty either


def test_rounding_goes_to_the_nearest_customary_scale_within_a_limit():
    known = customary_scales(Gaussian(), torch.zeros(50, 3), 50)
    assert known == sorted({1 / 150, 2 / 150, 1 / 50, 2 / 50, 1, 2})
    assert rounded(1.009 / 50, known) == 1 / 50
    assert rounded(0.98 / 50, known) is None
    assert rounded(0.98 / 50, known, below=0.25) == 1 / 50
    assert rounded(1.2 / 50, known, below=0.25) is None
