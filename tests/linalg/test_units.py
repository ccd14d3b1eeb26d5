"""Units of features of the data: against one feature at a time, and at the ends of what they can be."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from bprong.capture.calls import recorded_calls
from bprong.capture.measure import record
from bprong.capture.request import Request
from bprong.capture.weights import covered_weights
from bprong.likelihood.families import Categorical
from bprong.linalg import units
from bprong.linalg.factors import LOW_RANK_ERROR, Damping
from bprong.linalg.low_rank import LowRank
from bprong.linalg.moments import Blocks, Sums
from bprong.linalg.units import examples_behind
from bprong.whitening.layer import Side
from helpers import assert_close, inverse, mlp
from reference import feature_units

f64 = torch.float64
VARIANCE = Damping(0.1, "variance")
SIDE = Side("forward", Blocks(6))


def moments_of(*chunks, centre=True):
    sums = Sums(centre, tails=True)
    for chunk in chunks:
        sums.add(chunk)
    return sums.moments()


def features(n=200, seed=0):
    """Some with an offset, one that is rarely active, one that is constant."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 6, dtype=f64, generator=generator) * torch.tensor([1e-3, 1.0, 30.0, 1.0, 1.0, 1.0], dtype=f64)
    z[:, 1] += 100
    z[:, 3] = z[:, 3].exp()
    z[:, 4] *= torch.rand(n, dtype=f64, generator=generator) < 0.02
    z[:, 5] = 0.3
    return z


@pytest.mark.parametrize("centre", [True, False])
def test_units_are_those_of_one_feature_at_a_time(centre):
    z = features()
    expected = feature_units(z.numpy(), centre, units.EXAMPLES, units.KURTOSIS)
    found = VARIANCE.units(moments_of(z[:70], z[70:90], z[90:], centre=centre))
    assert_close(found, torch.tensor(expected), 100**4 * 1e-15)  # the offset is a hundred standard deviations


def test_only_damping_relative_to_variances_and_features_of_the_data_have_units():
    z = features()
    assert Damping(0.1, "mean").units(moments_of(z)) is None
    sums = Sums(True)
    sums.add(z)
    assert VARIANCE.units(sums.moments()) is None
    assert VARIANCE.units(moments_of(torch.full((20, 3), 0.1))) is None  # nor constants


def test_the_mean_variance_is_the_same_in_units():
    """So that ε, which is relative to it, means the same."""
    moments = moments_of(features())
    scaled = moments.in_units(VARIANCE.units(moments))
    assert_close(scaled.variances.mean(), moments.variances.mean(), 1e-12)


def damped_inverse(moments):
    """(Ž + ε diag(u²))⁻¹, from the factor and the units that a side takes."""
    u = VARIANCE.units(moments)
    M = SIDE.solve(moments, VARIANCE, torch.empty(0, dtype=f64)).inverse
    return M if u is None else M / torch.outer(u, u)


@given(scales=st.lists(st.floats(1e-6, 1e6), min_size=6, max_size=6), seed=st.integers(0, 100))
def test_with_full_trust_damping_is_invariant_to_the_scale_of_each_feature(scales, seed):
    z = torch.randn(60, 6, dtype=f64, generator=torch.Generator().manual_seed(seed))
    s = torch.tensor(scales, dtype=f64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "EXAMPLES", 0.0)
        patch.setattr(units, "KURTOSIS", math.inf)
        assert_close(damped_inverse(moments_of(z * s)) * torch.outer(s, s), damped_inverse(moments_of(z)), 1e-9)
    if max(scales) > 100 * min(scales):  # with a part of it, it is not
        off = damped_inverse(moments_of(z * s)) * torch.outer(s, s) - damped_inverse(moments_of(z))
        assert float(off.norm()) > 1e-6


def test_without_trust_damping_is_relative_to_the_mean(monkeypatch):
    moments = moments_of(features())
    assert float((damped_inverse(moments) - inverse(moments.second, Damping(0.1, "mean"))).norm()) > 0.1
    monkeypatch.setattr(units, "EXAMPLES", 1e300)
    assert_close(damped_inverse(moments), inverse(moments.second, Damping(0.1, "mean")), 1e-12)


def test_more_examples_do_not_make_a_rare_feature_a_frequent_one():
    """v̂ of a feature that is active in one example of a thousand stays near v̄, and of normal ones goes towards v."""
    for n in (1000, 100_000, 10_000_000):
        rare = torch.zeros(1000, 4, dtype=f64)
        rare[:, :3] = torch.randn(1000, 3, dtype=f64, generator=torch.Generator().manual_seed(0))
        rare[0, 3] = 1.0
        sums = Sums(True, tails=True)
        sums.add(rare)
        moments = sums.moments()
        many = type(moments)(float(n), moments.mean, moments.scatter * n / 1000, tails=moments.tails * n / 1000)
        u = VARIANCE.units(many)
        assert 0.7 < float(u[3] / u[0]) < 1.1, "although its variance is a thousandth"
        trust = float((u[3] / u[0]).log() / (moments.variances[3] / moments.variances[0]).log()) * 2
        assert trust < 0.1


def test_few_examples_say_little():
    """Of four, the variances of normal features differ much, and their units hardly."""
    z = torch.randn(4, 50, dtype=f64, generator=torch.Generator().manual_seed(0))
    u = VARIANCE.units(moments_of(z))
    assert float(z.var(dim=0).max() / z.var(dim=0).min()) > 50
    assert float(u.max() / u.min()) < 2


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4, -1e8])
def test_rounding_of_a_constant_has_no_unit(offset):
    """In float32 its variance may be 6e-17 or so, and its kurtosis is that of any feature."""
    z = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    z[:, 2] = offset * (1 + 1e-7 * z[:, 2].sign())
    moments = moments_of(z[:250], z[250:])
    assert float(examples_behind(moments, moments.tails)[2]) == 0
    u = VARIANCE.units(moments)
    assert 0.5 < float(u[2] / u[0]) < 2


def test_tails_merge_exactly_and_decay_with_the_average():
    z = features(300)
    keep = 0.7
    first, second = moments_of(z[:200]), moments_of(z[200:])
    merged = first.merge(second, keep)
    weights = torch.cat([torch.full((200, 1), keep, dtype=f64), torch.ones(100, 1, dtype=f64)])
    expected = torch.stack([(weights * z**power).sum(0) for power in (3, 4)])
    assert_close(merged.tails, expected, 1e-12)
    assert_close(first.merge(second).tails, moments_of(z).tails, 1e-12)
    sums = Sums(True)
    sums.add(z[200:])
    assert first.merge(sums.moments()).tails is None, "some of these rows were not of the data"


def test_a_wide_side_has_low_rank_in_units():
    """As near to the exact factor in the metric of Ž + ε diag(u²) as it says."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(900, 30, dtype=f64, generator=generator) @ torch.randn(30, 400, dtype=f64, generator=generator)
    z = (z + 0.1 * torch.randn(900, 400, dtype=f64, generator=generator)) * torch.logspace(-2, 2, 400, dtype=f64)
    moments = moments_of(z)
    damping = Damping(0.01, "variance")
    factor = Side("forward", Blocks(400), "auto").solve(moments, damping, torch.empty(0, dtype=f64))
    assert isinstance(factor, LowRank)
    u = damping.units(moments)
    damped = moments.in_units(u).second + torch.diag(damping.amounts(moments.variances))
    root = torch.linalg.cholesky(damped)
    M = factor.left(torch.eye(400, dtype=f64))
    assert float(torch.linalg.matrix_norm(root.T @ M @ root - torch.eye(400, dtype=f64), 2)) <= LOW_RANK_ERROR


# Which layers read the data -------------------------------------------------------------------------------------------


def measured(model, x):
    request = Request(dict.fromkeys(covered_weights(model), True), {"0", "1", "2", "3"}, {"2"}, Categorical())
    return record(model, request, x)


def test_the_first_layer_reads_the_data_and_the_second_one_does_not():
    x = torch.randn(20, 5, dtype=f64)
    found = measured(mlp(5, 4, 3), x)
    assert_close(found["0"].z.tails, torch.stack([(x**3).sum(0), (x**4).sum(0)]), 1e-12)
    assert found["2"].z.tails is None
    assert found["2"].delta.tails is None


def test_a_convolution_reads_patches_of_images():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 3)).double()
    found = measured(model, torch.randn(6, 2, 4, 4, dtype=f64))
    assert found["0"].z.tails.shape == (2, 18)
    assert found["2"].z.tails is None


def test_behind_an_embedding_there_is_no_data():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
    found = measured(model, torch.randint(7, (20,)))
    assert found["0"].z.tails is None
    assert found["1"].z.tails is None


def test_a_layer_that_also_reads_its_own_output_does_not_read_the_data_alone():
    layer = nn.Linear(3, 3)
    with recorded_calls(covered_weights(layer)) as calls:
        layer(layer(torch.randn(4, 3)))
    assert [call.of_data for call in calls] == [True, False]


def test_without_a_graph_it_is_not_known():
    layer = nn.Linear(3, 3)
    with torch.no_grad(), recorded_calls(covered_weights(layer)) as calls:
        layer(torch.randn(4, 3))
    assert not calls[0].of_data
