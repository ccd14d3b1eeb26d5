"""A step of continuous whitening: compared with the dense formula, what it converges to, what it costs."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bprong import Damping, WhiteningError
from bprong.experiments.continuous import DRIFT, Track, centred_rows, damping_rows, near_identity
from bprong.linalg.moments import Blocks, Moments
from bprong.network.coordinates import Change, quotient
from helpers import EPS, assert_close, input_moments, spd

EYE = torch.eye(8, dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def root(S):
    return torch.linalg.inv(torch.linalg.cholesky(S))


def added(epsilon, mu, turn):
    """The matrix that the damping of one step adds to the moment."""
    rows = damping_rows(torch.eye(len(epsilon), dtype=torch.float64), epsilon, mu, turn)
    return rows.T @ rows


def multiplier(U, V, mu, epsilon=0.0, turn=0):
    """T of the step from U by rows V and the damping of that turn."""
    damped = damping_rows(U, torch.full((len(U),), epsilon, dtype=torch.float64), mu, turn)
    return near_identity(torch.cat([V @ U.T, damped]), mu)


def relative_step(U, V, mu, epsilon=0.0, turn=0):
    return multiplier(U, V, mu, epsilon, turn).times(U)


@pytest.mark.parametrize("n", [1, 5, 30])
@pytest.mark.parametrize("mu", [1e-3, 0.3, 0.99])
def test_one_step_whitens_the_dense_moment_exactly(n, mu):
    S = spd(8)
    V = randn(n, 8)
    new = (1 - mu) * S + mu * (V.T @ V + added(0.2 * EYE.diagonal(), mu, 3))
    T = multiplier(root(S), V, mu, 0.2, turn=3)
    U = T.times(root(S))
    tolerance = 1e3 * EPS * float(torch.linalg.cond(new)) / (1 - mu)
    assert_close(U @ new @ U.T, EYE, tolerance)
    assert_close(T.transposed_solve(T.times(EYE).T), EYE, tolerance)


def test_to_first_order_a_step_is_the_relative_gradient_and_for_one_row_the_normalised_algorithm():
    U = root(spd(8))
    z = randn(1, 8)
    mu = 1e-8
    white = z @ U.T
    assert_close((relative_step(U, z, mu) - U) / mu, -(white.T @ white - EYE) @ U / 2, 1e-5)
    # For one row T is Potter's form, (I − κ z†z†ᵀ)/√(1−μ).
    mu = 0.4
    size = float(white.square().sum())
    kappa = (1 - 1 / math.sqrt(1 + mu / (1 - mu) * size)) / size
    assert_close(relative_step(U, z, mu), (EYE - kappa * white.T @ white) @ U / math.sqrt(1 - mu), 1e-12)


def test_the_mean_and_the_moment_are_those_of_the_mixture():
    z = randn(12, 8, seed=1) + 3
    old = input_moments(randn(30, 8))
    new = input_moments(z)
    mu = 0.3
    V, c = centred_rows((z - new.mean) / len(z) ** 0.5, new.mean, old.mean, mu)
    merged = Moments(1 - mu, old.mean, old.second * (1 - mu)).merge(Moments(mu, new.mean, new.second * mu))
    assert_close(c, merged.mean, 1e-12)
    assert_close((1 - mu) * old.second + mu * V.T @ V, merged.second, 1e-12)


@pytest.mark.parametrize(("mu", "off"), [(0.5, 1e-8), (0.05, 0.15)])
def test_fixed_statistics_are_whitened(mu, off):
    """Up to rounding if every step damps all coordinates; otherwise up to the variation of ε within a cycle."""
    V = randn(40, 8) / math.sqrt(40)
    U = 3 * EYE
    epsilon = 0.2
    for t in range(int(30 / mu)):
        U = relative_step(U, V, mu, epsilon, t)
    assert float((U @ (V.T @ V + epsilon * EYE) @ U.T - EYE).norm()) < off * math.sqrt(8)


def test_without_damping_it_is_equivariant():
    A = randn(8, 8, seed=5)
    U = EYE
    U_A = torch.linalg.inv(A)
    for t in range(50):
        z = randn(4, 8, seed=t)
        U = relative_step(U, z, 0.1)
        U_A = relative_step(U_A, z @ A.T, 0.1)
        assert_close(U_A @ A, U, 1e-9)


def test_on_rank_deficient_input_damping_bounds_U_which_diverges_without_it():
    U = EYE
    undamped = EYE
    epsilon = 0.1
    mu = 0.05
    for t in range(1500):
        z = randn(4, 8, seed=t) / 2
        z[:, 3:] = 0
        U = relative_step(U, z, mu, epsilon, t)
        undamped = relative_step(undamped, z, mu)
    assert float(U.abs().max()) < 1.3 / math.sqrt(epsilon)
    assert float(undamped.abs().max()) > 1e15


def test_each_coordinate_gets_its_own_damping_within_a_cycle():
    epsilon = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert_close((added(epsilon, 0.25, 0) + added(epsilon, 0.25, 1)) / 2, torch.diag(epsilon), 1e-12)
    assert not damping_rows(EYE, 0 * EYE.diagonal(), 0.25, 0).any()
    narrow = sum(added(epsilon, 0.05, turn) for turn in range(10)) / 10  # a cycle longer than the side is wide
    assert_close(narrow, torch.diag(epsilon), 1e-12)


def test_the_average_length_of_whitened_rows_is_one_for_a_white_side_and_not_biased_by_sampling_noise():
    """The moment of a few rows is far from white; its trace, which is linear in it, is right on average."""
    S = spd(8)
    U = root(S + 0.3 * EYE)
    C = torch.linalg.cholesky(S)
    found = torch.zeros(1000)
    naive = torch.zeros(1000)
    for t in range(1000):
        V = randn(6, 8, seed=t) @ C.T / math.sqrt(6)
        found[t] = (Track(turn=t).step(U, V, 0.05, Damping(0.3))[1].length - 0.95) / 0.05
        naive[t] = float((U @ (V.T @ V + 0.3 * EYE) @ U.T - EYE).norm()) / math.sqrt(8)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - 1) < 4 * error < 0.1
    assert float(naive.mean()) > 10 * error


def steps_until_drift(factor, changed_at=20, mu=0.05, fixed=False):
    """The step after a change of scale at which an exact factorisation is asked for; U follows unless it is fixed."""
    U = EYE
    track = Track()
    for t in range(100):
        V = randn(30, 8, seed=t) * (factor if t >= changed_at else 1.0) / math.sqrt(30)
        try:
            T, track = track.step(U, V, mu, Damping(0.0))
        except WhiteningError:
            return t - changed_at
        U = U if fixed else T.times(U)
    return None


def test_a_side_drifts_when_its_rows_are_too_long_or_too_short_on_average():
    """The average moves by μ at each step, from 1 to the square of the factor."""
    assert steps_until_drift(1.0, fixed=True) is None
    assert steps_until_drift(0.9 * math.sqrt(DRIFT), fixed=True) is None
    assert steps_until_drift(3.0, fixed=True) in range(3)
    assert steps_until_drift(1 / 3, fixed=True) in range(10, 20)
    assert steps_until_drift(math.nan, fixed=True) == 0


def test_small_changes_are_followed_and_large_ones_ask_for_an_exact_factorisation():
    assert steps_until_drift(2.0) is None
    assert steps_until_drift(0.5) is None
    assert steps_until_drift(10.0) == 0
    assert steps_until_drift(0.1) in range(10, 20)


def test_relative_damping_averages_to_a_multiple_of_the_mean_variance():
    """Each batch damps relative to its own mean; U whitens the average, S + ε tr(S)/d for a diagonal S."""
    scale = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    U = torch.diag(1 / scale)
    track = Track()
    for t in range(200):
        T, track = track.step(U, randn(400, 4, seed=t) * scale / 20, 0.05, Damping(0.5, "mean"))
        U = T.times(U)
    expected = scale.square() + 0.5 * scale.square().mean()
    assert_close(torch.linalg.inv(U.T @ U).diagonal() / expected, torch.ones(4, dtype=torch.float64), 0.1)


@pytest.mark.parametrize("rule", ["velocity", "gradient", "squares"])
def test_optimizer_state_is_transformed_as_by_an_exact_change(rule):
    W = randn(5, 8, seed=1)
    b = randn(5, seed=2)
    if rule == "squares":
        W = W**2
        b = b**2
    U = root(spd(8))
    c = randn(8)
    V, c_new = centred_rows(randn(4, 8, seed=3), randn(8, seed=4), c, 0.3)
    T = near_identity(V @ U.T, 0.3)
    s = U @ (c_new - c)
    R = root(spd(5))
    T_R = near_identity(randn(3, 5) @ R.T, 0.3)
    for ours, exact in (
        (Change(T, Blocks(8), s), Change(quotient(U, T.times(U)), Blocks(8), s)),
        (Change(T_R, Blocks(5)), Change(quotient(R, T_R.times(R)), Blocks(5))),
    ):
        for moved, expected in zip(getattr(ours, rule)(W, b), getattr(exact, rule)(W, b), strict=True):
            assert_close(moved, expected, 1e-10)


def test_a_step_costs_three_products_of_n_d_squared():
    d = 1000
    U = torch.eye(d, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        near_identity(randn(10, d) @ U.T, 0.25).times(U)
    assert counter.get_total_flops() / (2 * 10 * d**2) == pytest.approx(3, rel=0.05)
