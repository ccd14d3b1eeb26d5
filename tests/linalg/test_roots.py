"""Damped inverses and their roots: U (Ž + ε) Uᵀ = I for every solver, damping and rank."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.errors import WhiteningError
from bprong.linalg.factors import Damping, inverse_by_cholesky
from bprong.linalg.roots import root_of
from helpers import EPS, assert_close, input_moments, inverse, spd

SOLVERS = ["eigh", "cholesky", "symmetric"]
solvers = st.sampled_from(SOLVERS)
relations = st.sampled_from(["one", "mean"])


def moment_of_rank(d, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(d, rank, dtype=torch.float64, generator=generator)
    return factor @ factor.T


def indefinite():
    """A moment of rank 3 that rounding made indefinite: eigenvalues of −1e-7 where they should be 0."""
    return moment_of_rank(30, 3) * 1e6 - 1e-7 * torch.eye(30, dtype=torch.float64)


def assert_whitens(root, rtol=1e-10):
    d = len(root.matrix)
    damped = root.second + torch.diag(root.damping)
    assert_close(root.matrix @ damped @ root.matrix.T, torch.eye(d), rtol, "U(Ž+ε)Uᵀ")
    assert_close(torch.linalg.inv(root.matrix.T @ root.matrix), damped, rtol, "(UᵀU)⁻¹")


def test_assert_whitens_can_fail():
    good = root_of(spd(4), 0.1)
    assert_whitens(good)
    with pytest.raises(AssertionError):
        assert_whitens(dataclasses.replace(good, matrix=good.matrix * 1.0001))


@given(d=st.integers(1, 12), rank=st.integers(0, 12), epsilon=st.sampled_from([1e-6, 0.03, 1.0, 50.0]),
       relative_to=relations, solver=solvers, seed=st.integers(0, 99))  # fmt: skip
def test_every_solver_whitens_at_every_rank(d, rank, epsilon, relative_to, solver, seed):
    rank = min(rank, d)
    second = moment_of_rank(d, rank, seed)
    root = root_of(second, Damping(epsilon, relative_to), solver)
    # Rounding relative to ‖Ž‖ is seen through U: a factor of at most ‖Ž+ε‖·‖(Ž+ε)⁻¹‖.
    condition = float(torch.linalg.cond(second + torch.diag(root.damping)))
    assert_whitens(root, rtol=100 * d * EPS * condition)
    assert root.rank == rank


@pytest.mark.parametrize("solver", SOLVERS)
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
@pytest.mark.parametrize("relative_to", ["one", "mean"])
def test_degenerate_statistics_in_float32_are_whitened(z, rank, solver, relative_to):
    root = root_of(input_moments(z).second, Damping(0.01, relative_to), solver)
    assert_whitens(root, 1e-9)
    if z.shape != (40, 200):  # there float32 products leave 39 directions that are not exactly zero
        assert root.rank == rank


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_damping_only_full_rank_is_whitened(solver):
    assert_whitens(root_of(spd(6, condition=1e4), 0.0, solver), 1e-9)
    with pytest.raises(WhiteningError, match=r"span 4 of 6 directions and the damping \(0\)"):
        root_of(moment_of_rank(6, 4), 0.0, solver)


def test_each_solver_gives_its_own_root():
    second = spd(5)
    damped = second + 0.1 * torch.eye(5, dtype=torch.float64)
    eigenvalues, P = torch.linalg.eigh(damped)
    eigh, chol, symmetric = (root_of(second, 0.1, solver).matrix for solver in SOLVERS)
    assert_close(eigh.abs(), (P.T / eigenvalues.sqrt()[:, None]).abs(), 1e-9)
    assert_close(chol, chol.tril(), 0)
    assert_close(symmetric, symmetric.T, 1e-12)
    for root in (eigh, chol, symmetric):
        assert_close(root.T @ root, torch.linalg.inv(damped), 1e-10)


def test_the_signs_of_eigenvectors_are_fixed():
    U = root_of(spd(6), 0.1).matrix
    assert (U.gather(1, U.abs().argmax(dim=1, keepdim=True)) > 0).all()


def test_the_damping_is_relative_to_what_was_asked_for():
    second = torch.diag(torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64))
    assert root_of(second, 0.3).damping.tolist() == pytest.approx([0.3] * 3)
    assert root_of(second, Damping(0.3, "mean")).damping.tolist() == pytest.approx([0.5] * 3)


@given(scale=st.floats(1e-6, 1e6))
def test_damping_relative_to_the_mean_is_invariant_to_a_common_scale(scale):
    second = spd(5, seed=3)
    damping = Damping(0.1, "mean")
    a = root_of(second, damping).matrix
    b = root_of(second * scale, damping).matrix
    assert_close(scale * b.T @ b, a.T @ a, 1e-10)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_are_refused(solver, bad):
    second = spd(4)
    second[1, 2] = bad
    with pytest.raises(WhiteningError, match="not finite"):
        root_of(second, 0.1, solver)


def test_cholesky_falls_back_to_eigh_for_an_indefinite_moment():
    second = indefinite()
    assert torch.linalg.cholesky_ex(second + 1e-8 * torch.eye(30, dtype=torch.float64)).info > 0
    root = root_of(second, 1e-5, "cholesky")
    assert torch.isfinite(root.matrix).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: root_of(spd(3), -0.1), "at least 0, not -0.1"),
        (lambda: root_of(spd(3), float("nan")), "finite"),
        (lambda: Damping(0.1, "median"), "'median'"),
        (lambda: Damping(1, "median"), "'median'"),
        (lambda: Damping(-1), "at least 0, not -1"),
        (lambda: Damping(-0.1, "mean"), "at least 0, not -0.1"),
        (lambda: Damping(float("inf")), "finite number"),
        (lambda: Damping("0.1"), "finite number of at least 0, not '0.1'"),
    ],
)
def test_errors_about_arguments_say_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_rank_does_not_depend_on_the_solver():
    second = torch.diag(torch.tensor([1e-12, 1.0, 1e12, 0.0], dtype=torch.float64))
    assert [root_of(second * 1e-8, 1.0, solver).rank for solver in SOLVERS] == [2, 2, 2]


@pytest.mark.parametrize("solver", ["eigh", "symmetric"])
def test_negative_eigenvalues_from_rounding_count_as_zero(solver):
    second = torch.diag(torch.tensor([1.0, -1e-9], dtype=torch.float64))
    U = root_of(second, 0.01, solver).matrix
    assert_close(U.T @ U, torch.diag(torch.tensor([1 / 1.01, 100.0])), 1e-6)


def test_an_asymmetric_moment_counts_as_its_symmetric_part():
    second = spd(4)
    skewed = second + 1e-3 * torch.tensor([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    for solver in SOLVERS:
        ours, expected = (root_of(m, 0.1, solver).matrix for m in (skewed, second))
        assert_close(ours.T @ ours, expected.T @ expected, 1e-10)


# The inverse without a root -------------------------------------------------------------------------------------------


@given(d=st.integers(1, 8), rank=st.integers(0, 8), relative_to=relations)
def test_the_inverse_is_that_of_any_root(d, rank, relative_to):
    second = moment_of_rank(d, min(rank, d))
    damping = Damping(0.1, relative_to)
    U = root_of(second, damping).matrix
    assert_close(inverse(second, damping), U.T @ U, 1e-9)


@given(weight=st.floats(0.1, 1e4), relative_to=relations, single=st.booleans())
def test_the_weight_divides_the_scatter(weight, relative_to, single):
    second = moment_of_rank(6, 4)
    damping = Damping(0.1, relative_to)
    dtype = torch.float32 if single else torch.float64
    ours = inverse(second * weight, damping, dtype, weight=weight)
    assert_close(ours, inverse(second, damping), 1e-3 if single else 1e-10)


def test_the_inverse_falls_back_to_eigh_and_refuses_singular_and_non_finite_moments():
    second = indefinite()
    assert_close(inverse(second, 1e-5), inverse(second + 1e-7 * torch.eye(30, dtype=torch.float64), 1e-5), 0.05)
    with pytest.raises(WhiteningError, match="span 4 of 6"):
        inverse(moment_of_rank(6, 4))
    with pytest.raises(WhiteningError, match="not finite"):
        inverse(torch.full((2, 2), float("nan")))


def test_an_error_of_lapack_becomes_a_whitening_error(monkeypatch):
    def fail(*_):
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(WhiteningError, match="the factorisation failed: no convergence"):
        root_of(spd(4), 0.1)
    with pytest.raises(WhiteningError, match="the factorisation failed: no convergence"):
        inverse(indefinite(), 1e-8)


def test_float32_is_used_only_where_it_is_accurate():
    """Well conditioned: float32 keeps three digits. Badly conditioned: it would keep none, so float64 is used."""
    eigenvalues = 10.0 * torch.arange(1, 81, dtype=torch.float64) ** -3
    Q, _ = torch.linalg.qr(torch.randn(80, 80, dtype=torch.float64))
    second = (Q * eigenvalues) @ Q.T
    for epsilon, accurate in ((0.5, True), (1e-6, False)):
        exact = inverse(second, epsilon)
        found = inverse_by_cholesky(second, Damping(epsilon).amounts(second.diagonal()), torch.float32)
        assert found.dtype is (torch.float32 if accurate else torch.float64)
        assert_close(found, exact, 1e-3)
        in_single = torch.linalg.inv(second.float() + epsilon * torch.eye(80))
        off = float((in_single.double() - exact).norm() / exact.norm())
        assert (off < 1e-3) == accurate
