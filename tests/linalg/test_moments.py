"""Moments: exact for any split into batches and chunks, mergeable, averaged in float64, per example."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.linalg.moments import Blocks, Moments, Sums, at_least_float32, block_rows, feature_means, float64_copy
from helpers import assert_close, error_moments, input_moments, inverse

sizes = st.integers(min_value=1, max_value=12)


def rows(n, d, seed=0, offset=0.0):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + offset


@given(n=sizes, m=sizes, d=sizes, offset=st.sampled_from([0.0, 3.0, 1e6]), centre=st.booleans())
def test_merging_two_halves_equals_the_whole(n, m, d, offset, centre):
    z = rows(n + m, d, offset=offset)
    whole = input_moments(z, centre)
    merged = input_moments(z[:n], centre).merge(input_moments(z[n:], centre))
    assert merged.weight == whole.weight == n + m
    # The scatter's rounding is relative to the size of the rows about the mean (or of the rows themselves, uncentred).
    scale = float((z - z.mean(0) if centre else z).square().sum()) + float(z.abs().max()) * 1e-9
    assert float((merged.scatter - whole.scatter).norm()) <= 1e-9 * scale
    if centre:
        assert_close(merged.mean, whole.mean, 1e-14)


@given(n=sizes, d=sizes)
def test_moments_are_the_textbook_formulas(n, d):
    z = rows(n, d, offset=2.0)
    m = input_moments(z)
    assert_close(m.mean, z.mean(0), 1e-14)
    centred = z - z.mean(0)
    expected = centred.T @ centred / n if n > 1 else torch.zeros(d, d)
    assert_close(m.second, expected, 1e-12 if n > 1 else 0)
    assert_close(m.variances, m.second.diagonal(), 1e-15)
    assert_close(input_moments(z, centre=False).second, z.T @ z / n, 1e-14)
    assert input_moments(z, centre=False).mean is None


def test_leading_dimensions_average_for_z_and_sum_for_delta():
    values = rows(24, 3).view(4, 3, 2, 3)  # batch, time, heads, features
    flat = values.reshape(-1, 3)
    assert_close(input_moments(values).second, input_moments(flat).second, 1e-14)
    # four targets drawn (one per example): D sums over positions; twenty-four drawn: it is the mean over rows
    assert_close(error_moments(values, 4).second, flat.T @ flat / 4, 1e-14)
    assert_close(error_moments(values, 24).second, flat.T @ flat / 24, 1e-14)


@given(n=sizes, m=sizes, d=sizes, offset=st.sampled_from([0.0, 3.0, 1e6]), centre=st.booleans(), more=st.booleans())
def test_rows_in_chunks_are_those_of_the_whole(n, m, d, offset, centre, more):
    """Whether they are kept as rows, because they are few, or summed."""
    z = rows(n + m + 12 * more, d, offset=offset)
    sums = Sums(centre)
    for chunk in torch.split(z, [n, len(z) - n]):
        sums.add(chunk)
    found = sums.moments()
    assert found.as_rows == (len(z) < d)
    mean = z.mean(0) if centre else 0
    expected = (z - mean).T @ (z - mean)
    scale = float((z - mean).square().sum()) + float(z.abs().max()) * 1e-9
    assert float((found.scatter - expected).norm()) <= 1e-9 * scale
    assert_close(found.variances, found.second.diagonal(), 1e-9)
    assert found.weight == len(z)
    if centre:
        assert_close(found.mean, z.mean(0), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [100, 3000])
def test_a_batch_is_summed_in_float32_at_least(dtype, n):
    """Each entry is a sum over n rows: its rounding is at most about √n times that of a float32."""
    z = (rows(n, 400) + 10).to(dtype)
    sums = Sums(centre=True)
    for chunk in torch.split(z, 128):
        sums.add(chunk)
    m = sums.moments()
    assert m.scatter.dtype is m.mean.dtype is torch.float64
    expected = torch.cov(z.double().T, correction=0)
    assert float((m.second - expected).abs().max()) <= n**0.5 * torch.finfo(torch.float32).eps * float(expected.max())
    assert_close(m.mean, z.double().mean(0), 1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_that_float32_cannot_hold_are_summed_in_float64(scale):
    z = rows(20, 4).float() * scale
    assert_close(input_moments(z).second, torch.cov(z.double().T, correction=0), 1e-6)


def dominated(n, d, directions, ratio=1000.0, seed=0):
    """Differences of variance one, and some directions that vary `ratio` times as much; the first is a common level."""
    patterns = torch.cat([torch.ones(1, d), rows(directions - 1, d, seed=seed + 1)])
    return (ratio * rows(n, directions, seed=seed + 2) @ patterns + rows(n, d, seed=seed)).float()


@given(
    d=st.sampled_from([2, 10, 33, 150]), directions=st.integers(1, 3), ratio=st.sampled_from([1.0, 50.0, 1000.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]), centre=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_directions_that_vary_far_more_than_others_do_not_hide_them(d, directions, ratio, scale, centre, seed):
    """Such as a level that all inputs share: whitening enlarges what is left beside it."""
    z = scale * dominated(6 * d, d, directions, ratio, seed)
    sums = Sums(centre)
    for chunk in torch.split(z, 128):
        sums.add(chunk)
    exact = z.double() - (z.double().mean(dim=0) if centre else 0)
    damping = 0.1 * scale**2
    assert_close(inverse(sums.moments().second, damping), inverse(exact.T @ exact / len(z), damping), 0.01)


@pytest.mark.parametrize("blocks", [1, 4])
def test_ordinary_inputs_are_summed_in_float32(blocks):
    """Whatever their scales and their mean, with features that never vary, rows that are equal, and a few directions
    that vary more than others."""
    z = rows(300, 60 * blocks, offset=5.0).float() * torch.logspace(-2, 2, 60 * blocks)
    z[:, ::3] = 1.0
    z[::2] = z[0]
    z += 3 * dominated(300, 60 * blocks, 2, ratio=1.0)
    moments = input_moments(z.view(300, blocks, 60), blocks=blocks) if blocks > 1 else input_moments(z)
    assert moments.values.dtype is torch.float32


@pytest.mark.parametrize("n", [60, 600])
def test_float32_moments_of_deficient_rank_are_factored_by_cholesky(n):
    """Rank 20 in 200 dimensions, with the damping that is in use: the inverse is that of float64 sums."""
    z = rows(n, 20).float() @ rows(20, 200, seed=1).float() / 20**0.5
    second = input_moments(z).second
    exact = torch.cov(z.double().T, correction=0)
    for damping in (0.2, 0.015, 0.01, 1e-3):
        damped = second + damping * torch.eye(200, dtype=torch.float64)
        assert int(torch.linalg.cholesky_ex(damped).info) == 0
        assert_close(inverse(second, damping), inverse(exact, damping), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_second_moment_in_another_precision_is_a_copy(dtype):
    m = input_moments(rows(20, 4))
    before = m.scatter.clone()
    found = m.second_in(dtype)
    assert found.dtype is dtype
    assert_close(found, m.second, 1e-6 if dtype is torch.float32 else 1e-15)
    found.zero_()
    assert torch.equal(m.scatter, before)


@given(n=sizes, m=sizes, value=st.floats(-1e6, 1e6))
def test_the_variance_of_a_constant_feature_is_exactly_zero(n, m, value):
    halves = [torch.cat([torch.full((k, 1), value), torch.rand(k, 1)], dim=1) for k in (n, m)]
    both = input_moments(halves[0]).merge(input_moments(halves[1]))
    assert both.scatter[0].tolist() == [0.0, 0.0]


def test_a_running_average_is_the_weighted_mean_without_bias():
    batches = [rows(7, 3, seed=s, offset=s) for s in range(5)]
    keep = 0.7
    average = input_moments(batches[0])
    for z in batches[1:]:
        average = average.merge(input_moments(z), keep)
    weights = torch.tensor([keep ** (4 - s) for s in range(5)], dtype=torch.float64)
    weights /= weights.sum()
    mean = sum(w * z.mean(0) for w, z in zip(weights, batches, strict=True))
    second = sum(w * (z - mean).T @ (z - mean) / len(z) for w, z in zip(weights, batches, strict=True))
    assert_close(average.mean, mean, 1e-13)
    assert_close(average.second, second, 1e-13)


def test_an_average_in_place_is_the_average():
    for n in (2, 20):  # kept as rows, and summed
        old = input_moments(rows(30, 5, offset=1.0))
        new = input_moments(rows(n, 5, seed=1).float())
        expected = old.merge(new, 0.9)
        before = old.scatter.clone()
        assert torch.equal(old.scatter, before), "merge() leaves the old moments as they are"
        found = old.average_(new, 0.9)
        assert found.scatter.data_ptr() == old.scatter.data_ptr()
        assert torch.equal(found.scatter, expected.scatter)
        assert torch.equal(found.mean, expected.mean)


def test_errors_of_several_roots_add_under_one_weight():
    a = rows(6, 3, seed=1)
    b = rows(6, 3, seed=2)
    sums = Sums(centre=False)
    sums.add(a)
    sums.add(b)
    assert_close(sums.moments(6.0).second, (a.T @ a + b.T @ b) / 6, 1e-14)


def test_moments_that_do_not_match_are_not_merged():
    with pytest.raises(TypeError):  # one is centred
        input_moments(rows(2, 3)).merge(input_moments(rows(2, 3), centre=False))
    with pytest.raises(RuntimeError, match="should match"):
        input_moments(rows(2, 3)).merge(input_moments(rows(2, 4)))


def test_rows_that_are_not_finite_are_noticed():
    z = rows(5, 3)
    assert input_moments(z).finite
    z[2, 1] = float("inf")
    assert not input_moments(z).finite
    assert not input_moments(z, centre=False).finite


def test_moments_whose_sum_overflows_are_finite():
    """Finiteness is tested by the sum, which can overflow where no entry does."""
    huge = torch.full((2, 2), 1e308, dtype=torch.float64)
    assert not torch.isfinite(huge.sum())
    assert Moments(1.0, None, huge).finite


def test_moments_do_not_share_memory_with_the_rows():
    z = rows(5, 3)
    before = z.clone()
    uncentred = error_moments(z[:2], 2)
    m = input_moments(z)
    z.mul_(2)
    assert_close(m.mean, before.mean(0), 1e-14)
    assert_close(uncentred.second, before[:2].T @ before[:2] / 2, 1e-14)
    assert float64_copy(z).data_ptr() != z.data_ptr()


@pytest.mark.parametrize("centre", [True, False])
def test_moments_without_all_but_their_diagonal_are_averaged_alike(centre):
    """For a side that another process keeps."""
    whole = input_moments(rows(30, 5, offset=1.0), centre)
    new = input_moments(rows(20, 5, seed=1), centre)
    thin = whole.thinned().merge(new.thinned(), 0.9)
    both = whole.merge(new, 0.9)
    assert thin.values.numel() == 5
    assert_close(thin.variances.flatten(), both.variances, 1e-14)
    assert not centre or torch.equal(thin.mean.flatten(), both.mean)
    assert_close(thin.thinned().values, thin.values, 1e-15)


# Sides in blocks ------------------------------------------------------------------------------------------------------


def test_the_moments_of_blocks_are_the_diagonal_blocks_of_the_whole():
    z = rows(40, 6, offset=1.0)
    whole = input_moments(z)
    blocks = Blocks(2, 3)
    split = input_moments(block_rows(z.unsqueeze(1), blocks), blocks=blocks.lead)
    for i in range(3):
        part = slice(2 * i, 2 * i + 2)
        assert_close(split.second[i], whole.second[part, part], 1e-13)
    assert_close(feature_means(split.mean, blocks), whole.mean, 1e-14)


def test_counted_indices_are_the_moments_of_one_hot_rows():
    indices = torch.tensor([[0, 2, 2], [1, 2, 0]])
    sums = Sums(centre=False)
    sums.count(indices[:1], 4)
    sums.count(indices[1:], 4)
    found = sums.moments()
    one_hot = torch.nn.functional.one_hot(indices.flatten(), 4).double()
    assert found.weight == 6
    assert_close(found.second.flatten(), (one_hot.T @ one_hot / 6).diagonal(), 1e-15)


@pytest.mark.parametrize(
    ("stored", "computed"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_nothing_is_computed_in_less_than_float32(stored, computed):
    assert at_least_float32(getattr(torch, stored)) is getattr(torch, computed)
