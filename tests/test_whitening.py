"""Whiteners: U (Ž + ε) Uᵀ = I for every factorisation, damping and rank."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.moments import input_moments
from bprong.whitening import Damping, WhiteningError, inverse, whitener
from helpers import EPS, assert_close, spd

FACTORISATIONS = ["eigh", "cholesky", "symmetric"]
factorisations = st.sampled_from(FACTORISATIONS)


def moment_of_rank(d, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(d, rank, dtype=torch.float64, generator=generator)
    return factor @ factor.T


def assert_whitens(found, rtol=1e-10):
    d = len(found.matrix)
    damped = found.second + torch.diag(found.damping)
    assert_close(found.matrix @ damped @ found.matrix.T, torch.eye(d), rtol, "U(Ž+ε)Uᵀ")
    assert_close(found.matrix @ found.inverse, torch.eye(d), rtol, "U U⁻¹")
    assert_close(found.inverse @ found.inverse.T, damped, rtol, "U⁻¹ U^-T")


def test_assert_whitens_can_fail():
    good = whitener(spd(4), 0.1)
    assert_whitens(good)
    with pytest.raises(AssertionError):
        assert_whitens(dataclasses.replace(good, matrix=good.matrix * 1.0001))


@given(d=st.integers(1, 12), rank=st.integers(0, 12), epsilon=st.sampled_from([1e-6, 0.03, 1.0, 50.0]),
       relative_to=st.sampled_from(["one", "mean", "variance"]), factorisation=factorisations,
       seed=st.integers(0, 99))  # fmt: skip
def test_every_factorisation_whitens_at_every_rank(d, rank, epsilon, relative_to, factorisation, seed):
    rank = min(rank, d)
    second = moment_of_rank(d, rank, seed)
    found = whitener(second, Damping(epsilon, relative_to), factorisation)
    # rounding relative to ‖Ž‖ is seen through U: a factor ‖Ž+ε‖·‖(Ž+ε)⁻¹‖ at most
    condition = float(torch.linalg.cond(second + torch.diag(found.damping)))
    assert_whitens(found, rtol=100 * d * EPS * condition)
    assert found.rank == rank


@pytest.mark.parametrize("factorisation", FACTORISATIONS)
@pytest.mark.parametrize(
    ("z", "rank"),
    [
        (torch.full((9, 5), 3.7), 0),  # constant
        (torch.randn(1, 5), 0),  # a single example has no variance
        (torch.randn(9, 5) * torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]), 3),  # dead units
        (torch.randn(3, 200), 2),  # fewer rows than features
        (torch.randn(40, 20) @ torch.randn(20, 200), 20),
    ],
    ids=["constant", "single", "dead", "few", "rank20of200"],
)  # fmt: skip
@pytest.mark.parametrize("relative_to", ["one", "mean", "variance"])
def test_degenerate_statistics_in_float32_are_whitened(z, rank, factorisation, relative_to):
    found = whitener(input_moments(z).second, Damping(0.01, relative_to), factorisation)
    assert_whitens(found, 1e-9)
    if z.shape != (40, 200):  # there float32 products leave 39 directions that are not exactly zero
        assert found.rank == rank


@pytest.mark.parametrize("factorisation", FACTORISATIONS)
def test_without_damping_full_rank_is_whitened_and_less_is_refused(factorisation):
    assert_whitens(whitener(spd(6, condition=1e4), 0.0, factorisation), 1e-9)
    with pytest.raises(WhiteningError, match=r"span 4 of 6 directions and the damping \(0\)"):
        whitener(moment_of_rank(6, 4), 0.0, factorisation)


def test_the_roots_are_the_ones_named():
    second = spd(5)
    eigenvalues, P = torch.linalg.eigh(second + 0.1 * torch.eye(5, dtype=torch.float64))
    eigh, chol, symmetric = (whitener(second, 0.1, f).matrix for f in FACTORISATIONS)
    assert_close(eigh.abs(), (P.T / eigenvalues.sqrt()[:, None]).abs(), 1e-9)
    assert_close(chol, chol.tril(), 0)
    assert_close(symmetric, symmetric.T, 1e-12)
    inverse = torch.linalg.inv(second + 0.1 * torch.eye(5, dtype=torch.float64))
    for root in (eigh, chol, symmetric):
        assert_close(root.T @ root, inverse, 1e-10)


def test_eigenvectors_signs_are_fixed():
    U = whitener(spd(6), 0.1).matrix
    assert (U.gather(1, U.abs().argmax(dim=1, keepdim=True)) > 0).all()


def test_damping_is_what_it_says():
    second = torch.diag(torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64))
    assert whitener(second, 0.3).damping.tolist() == pytest.approx([0.3] * 3)
    assert whitener(second, Damping(0.3, "mean")).damping.tolist() == pytest.approx([0.5] * 3)
    assert whitener(second, Damping(0.3, "variance")).damping.tolist() == pytest.approx([0.3, 1.2, 0.3])


@given(scales=st.lists(st.floats(1e-6, 1e6), min_size=5, max_size=5), factorisation=factorisations)
def test_damping_relative_to_variance_is_invariant_to_the_scale_of_features(scales, factorisation):
    """S U'ᵀU' S = UᵀU when Ž' = S Ž S; the paper's ε is not invariant."""
    second, s = spd(5, seed=3), torch.tensor(scales, dtype=torch.float64)
    rescaled = second * torch.outer(s, s)
    for damping, invariant in (
        (Damping(0.1, "variance"), True),
        (Damping(0.1, "one"), max(scales) == min(scales) == 1),
    ):
        a, b = whitener(second, damping, factorisation).matrix, whitener(rescaled, damping, factorisation).matrix * s
        off = float((b.T @ b - a.T @ a).norm() / (a.T @ a).norm())
        if invariant:
            assert off < 1e-9
        elif max(scales) / min(scales) > 10 or max(scales) < 0.1 or min(scales) > 10:
            assert off > 1e-3


@given(scale=st.floats(1e-6, 1e6))
def test_damping_relative_to_the_mean_is_invariant_to_a_common_scale(scale):
    second, damping = spd(5, seed=3), Damping(0.1, "mean")
    a, b = whitener(second, damping).matrix, whitener(second * scale, damping).matrix
    assert_close(scale * b.T @ b, a.T @ a, 1e-10)


@pytest.mark.parametrize("factorisation", FACTORISATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_statistics_are_refused(factorisation, bad):
    second = spd(4)
    second[1, 2] = bad
    with pytest.raises(WhiteningError, match="not finite"):
        whitener(second, 0.1, factorisation)


def test_cholesky_gives_way_to_eigh_where_rounding_made_the_moment_indefinite():
    second = moment_of_rank(30, 3) * 1e6 - 1e-7 * torch.eye(
        30, dtype=torch.float64
    )  # an eigenvalue of −1e-7 where it should be 0
    assert torch.linalg.cholesky_ex(second + 1e-8 * torch.eye(30, dtype=torch.float64)).info > 0
    found = whitener(second, 1e-5, "cholesky")
    assert torch.isfinite(found.matrix).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: whitener(spd(3), -0.1), "at least 0, not -0.1"),
        (lambda: whitener(spd(3), float("nan")), "finite"),
        (lambda: Damping(0.1, "median"), "'median'"),
        (lambda: whitener(spd(3), 0.1, "svd"), "'svd'"),
        (lambda: whitener(torch.zeros(2, 3)), r"square matrix, not a tensor of \(2, 3\)"),
    ],
)
def test_bad_arguments_are_answered_by_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rank_does_not_depend_on_the_factorisation():
    second = torch.diag(torch.tensor([1e-12, 1.0, 1e12, 0.0], dtype=torch.float64))
    assert [whitener(second, Damping(1.0, "variance"), f).rank for f in FACTORISATIONS] == [3, 3, 3]
    assert [whitener(second * 1e-8, 1.0, f).rank for f in FACTORISATIONS] == [2, 2, 2]


@pytest.mark.parametrize("factorisation", ["eigh", "symmetric"])
def test_negative_eigenvalues_of_rounding_count_as_zero(factorisation):
    second = torch.diag(torch.tensor([1.0, -1e-9], dtype=torch.float64))
    found = whitener(second, 0.01, factorisation)
    assert_close(found.matrix.T @ found.matrix, torch.diag(torch.tensor([1 / 1.01, 100.0])), 1e-6)


def test_a_moment_that_is_not_quite_symmetric_is_taken_as_its_symmetric_part():
    second = spd(4)
    skewed = second + 1e-3 * torch.tensor([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    for factorisation in FACTORISATIONS:
        ours, expected = (whitener(m, 0.1, factorisation).matrix for m in (skewed, second))
        assert_close(ours.T @ ours, expected.T @ expected, 1e-10)


@given(d=st.integers(1, 8), rank=st.integers(0, 8), relative_to=st.sampled_from(["one", "mean", "variance"]))
def test_the_inverse_is_that_of_any_root(d, rank, relative_to):
    second, damping = moment_of_rank(d, min(rank, d)), Damping(0.1, relative_to)
    U = whitener(second, damping).matrix
    assert_close(inverse(second, damping), U.T @ U, 1e-9)


def test_the_inverse_gives_way_to_eigh_and_refuses_what_it_cannot_do():
    second = moment_of_rank(30, 3) * 1e6 - 1e-7 * torch.eye(30, dtype=torch.float64)
    assert_close(inverse(second, 1e-5), inverse(second + 1e-7 * torch.eye(30, dtype=torch.float64), 1e-5), 0.05)
    with pytest.raises(WhiteningError, match="span 4 of 6"):
        inverse(moment_of_rank(6, 4))
    with pytest.raises(WhiteningError, match="not finite"):
        inverse(torch.full((2, 2), float("nan")))
