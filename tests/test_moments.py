"""Moments: exact for any batching, mergeable, float64, per example."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.moments import Moments, error_moments, input_moments, wide
from helpers import assert_close

sizes = st.integers(min_value=1, max_value=12)


def rows(n, d, seed=0, offset=0.0):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + offset


@given(n=sizes, m=sizes, d=sizes, offset=st.sampled_from([0.0, 3.0, 1e6]), centre=st.booleans())
def test_merging_two_halves_equals_the_whole(n, m, d, offset, centre):
    z = rows(n + m, d, offset=offset)
    whole, merged = input_moments(z, centre), input_moments(z[:n], centre).merge(input_moments(z[n:], centre))
    assert merged.weight == whole.weight == n + m
    # The scatter's rounding is relative to the rows' size about the mean (or to themselves, uncentred).
    scale = float((z - z.mean(0) if centre else z).square().sum()) + float(z.abs().max()) * 1e-9
    assert float((merged.scatter - whole.scatter).norm()) <= 1e-9 * scale
    if centre:
        assert_close(merged.mean, whole.mean, 1e-14)


@given(n=sizes, d=sizes)
def test_moments_are_what_numpy_says(n, d):
    z = rows(n, d, offset=2.0)
    m = input_moments(z)
    assert_close(m.mean, z.mean(0), 1e-14)
    centred = z - z.mean(0)
    assert_close(m.second, centred.T @ centred / n, 1e-12) if n > 1 else assert_close(m.second, torch.zeros(d, d), 0)
    assert_close(input_moments(z, centre=False).second, z.T @ z / n, 1e-14)
    assert input_moments(z, centre=False).mean is None


def test_leading_dimensions_average_for_z_and_sum_for_delta():
    values = rows(24, 3).view(4, 3, 2, 3)  # batch, time, heads, features
    flat = values.reshape(-1, 3)
    assert_close(input_moments(values).second, input_moments(flat).second, 1e-14)
    # four targets drawn (one per example): D sums over positions; twenty-four drawn: it is the mean over rows
    assert_close(error_moments(values, 4).second, flat.T @ flat / 4, 1e-14)
    assert_close(error_moments(values, 24).second, flat.T @ flat / 24, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulated_in_float64_whatever_the_dtype(dtype):
    z = (rows(1000, 4) + 100).to(dtype)
    m = input_moments(z)
    assert m.scatter.dtype is torch.float64
    assert_close(m.second, torch.cov(z.double().T, correction=0), 1e-12)  # the values' own moments: no further rounding


@given(n=sizes, m=sizes, value=st.floats(-1e6, 1e6))
def test_a_constant_feature_has_exactly_no_variance(n, m, value):
    halves = [torch.cat([torch.full((k, 1), value), torch.rand(k, 1)], dim=1) for k in (n, m)]
    both = input_moments(halves[0]).merge(input_moments(halves[1]))
    assert both.scatter[0].tolist() == [0.0, 0.0]


def test_a_running_average_is_the_weighted_mean_without_bias():
    batches = [rows(7, 3, seed=s, offset=s) for s in range(5)]
    keep, average = 0.7, None
    for z in batches:
        new = input_moments(z)
        average = new if average is None else average.decay(keep).merge(new)
    weights = torch.tensor([keep ** (4 - s) for s in range(5)], dtype=torch.float64)
    weights /= weights.sum()
    mean = sum(w * z.mean(0) for w, z in zip(weights, batches, strict=True))
    second = sum(w * (z - mean).T @ (z - mean) / len(z) for w, z in zip(weights, batches, strict=True))
    assert_close(average.mean, mean, 1e-13)
    assert_close(average.second, second, 1e-13)


def test_overlaid_errors_add_under_one_weight():
    a, b = rows(6, 3, seed=1), rows(6, 3, seed=2)
    both = error_moments(a, 6).overlay(error_moments(b, 6))
    assert_close(both.second, (a.T @ a + b.T @ b) / 6, 1e-14)
    with pytest.raises(ValueError, match="weight 6 and .*weight 7"):
        error_moments(a, 6).overlay(error_moments(b, 7))


def test_what_does_not_merge_is_refused():
    with pytest.raises(ValueError, match="3 centred coordinates.*3 uncentred"):
        input_moments(rows(2, 3)).merge(input_moments(rows(2, 3), centre=False))
    with pytest.raises(ValueError, match="3 centred.*4 centred"):
        input_moments(rows(2, 3)).merge(input_moments(rows(2, 4)))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), ()])
def test_an_empty_batch_is_refused(shape):
    with pytest.raises(ValueError, match="at least one row"):
        input_moments(torch.zeros(shape))


def test_non_finite_rows_are_known():
    z = rows(5, 3)
    assert input_moments(z).finite
    z[2, 1] = float("inf")
    assert not input_moments(z).finite
    assert not input_moments(z, centre=False).finite


def test_moments_do_not_share_memory_with_what_they_measured():
    z = rows(5, 3)
    before = z.clone()
    m = input_moments(z)
    z.mul_(2)
    assert_close(m.mean, before.mean(0), 1e-14)
    assert wide(z).data_ptr() != z.data_ptr()
    assert isinstance(m, Moments)
