"""The multiple of −log p that a loss is, where batches or bounds must decide."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.loss_scale import agreed, customary, line, lower_bound, of_each_target, rounded


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


@given(kappa=st.floats(0.01, 100), sizes=st.lists(st.integers(10, 500), min_size=1, max_size=8), is_mean=st.booleans())
def test_without_a_penalty_batches_agree_on_any_multiple(kappa, sizes, is_mean):
    estimates = [kappa / n if is_mean else kappa for n in sizes]
    assert agreed(estimates, sizes) == pytest.approx(estimates[-1], rel=0.01)


@given(losses=st.lists(st.floats(0.1, 10), min_size=2, max_size=8), penalty=st.floats(0.01, 0.5))
def test_a_penalty_makes_estimates_too_small_and_the_largest_is_nearest(losses, penalty):
    """κ = ‖G‖² / 2(loss + penalty): 2/elements is found again where some loss is four times the penalty."""
    true = 2 / (50 * 3)
    estimates = [true * loss / (loss + penalty) for loss in losses]
    found = agreed(estimates, [50] * len(losses), elements=3)
    assert max(estimates) * 0.99 <= found <= true * (1 + 1e-12)
    if max(losses) >= 4 * penalty and max(estimates) > 1.02 * min(estimates):  # else who could know
        assert found == pytest.approx(true, rel=0.011)


def test_rounding_is_to_the_nearest_and_only_so_far():
    known = customary([50, 150])
    assert known == sorted({1 / 150, 2 / 150, 1 / 50, 2 / 50, 1, 2})
    assert rounded(1.009 / 50, known) == 1 / 50
    assert rounded(0.98 / 50, known) is None
    assert rounded(0.98 / 50, known, below=0.25) == 1 / 50
    assert rounded(1.2 / 50, known, below=0.25) is None
