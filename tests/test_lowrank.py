"""The low-rank inverse: its stated error holds, in the metric that matters, and it is what a step then uses."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import bprong
from bprong.lowrank import LowRank, low_rank
from bprong.solver import TOLERANCE, solve
from bprong.whitening import Damping, inverse
from helpers import assert_close, mlp


def decaying(d, power, seed=0, scale=10.0):
    """A second moment whose k-th eigenvalue is scale · k^−power."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator))
    return (Q * (scale * torch.arange(1, d + 1, dtype=torch.float64) ** -power)) @ Q.T


def true_error(found, second, epsilon):
    """‖(Ž+ε)^½ M (Ž+ε)^½ − I‖."""
    identity = torch.eye(len(second), dtype=torch.float64)
    values, P = torch.linalg.eigh(second + epsilon * identity)
    root = (P * values.sqrt()) @ P.T
    M = (identity.to(found.dtype) @ found).double()
    return float(torch.linalg.matrix_norm(root @ M @ root - identity, 2))


@given(
    power=st.floats(1.0, 3.0), epsilon=st.floats(0.01, 1.0), tolerance=st.sampled_from([0.05, 0.1, 0.3]),
    seed=st.integers(0, 5), single=st.booleans(),
)  # fmt: skip
def test_the_stated_error_holds(power, epsilon, tolerance, seed, single):
    second = decaying(120, power, seed)
    found = low_rank(second.float() if single else second, epsilon, tolerance, most=110)
    if found is not None:
        assert found.error <= tolerance
        assert true_error(found, second, epsilon) <= found.error + 1e-4
        assert found.rank <= 110


@pytest.mark.parametrize("tolerance", [0.1, 0.3])
def test_a_direction_is_within_the_error_of_the_exact_one(tolerance):
    second, epsilon = decaying(200, 1.5), 0.1
    found = low_rank(second, epsilon, tolerance, most=150)
    damped = second + epsilon * torch.eye(200, dtype=torch.float64)
    worst = 0.0
    for seed in range(20):
        g = torch.randn(3, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        exact = g @ inverse(second, epsilon)
        off = g @ found - exact
        worst = max(worst, float(((off @ damped) * off).sum() / ((exact @ damped) * exact).sum()) ** 0.5)
    assert 0 < worst <= found.error


def test_the_rank_falls_as_the_tolerance_or_the_damping_rises():
    second = decaying(200, 2.0)
    ranks = [low_rank(second, 0.1, tolerance, most=190).rank for tolerance in (0.03, 0.1, 0.3)]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > ranks[-1]
    assert low_rank(second, 1.0, 0.1, most=190).rank < ranks[1]


def test_it_begins_where_the_last_one_was():
    """From the previous directions two products reach what takes four, and a wider start, from nowhere."""
    before, after = decaying(200, 1.5), decaying(200, 1.5) + 0.02 * decaying(200, 1.5, seed=1)
    start = low_rank(before, 0.1, 0.2, most=150)
    warm = low_rank(after, 0.1, 0.2, most=150, start=start.B)
    assert true_error(warm, after, 0.1) <= warm.error <= 0.2


def test_a_flat_spectrum_is_left_to_the_exact_solver():
    second = torch.eye(300, dtype=torch.float64) + decaying(300, 0.1)
    assert low_rank(second, 0.01, 0.1, most=100) is None
    found = solve(second, Damping(0.01), second.new_empty(0), "auto", None)
    assert_close(found, inverse(second, 0.01), 1e-12)


def test_products_from_both_sides():
    found = LowRank(torch.randn(60, 7, dtype=torch.float64), 0.3)
    identity = torch.eye(60, dtype=torch.float64)
    M, v = torch.randn(4, 60, dtype=torch.float64), torch.randn(60, dtype=torch.float64)
    dense = identity / found.s - found.B @ found.B.T
    assert_close(M @ found, M @ dense, 1e-12)
    assert_close(found @ M.T, dense @ M.T, 1e-12)
    assert_close(found @ v, dense @ v, 1e-12)


def test_nothing_is_drawn_from_the_users_stream():
    before = torch.random.get_rng_state()
    first, second = (low_rank(decaying(100, 1.5), 0.1, 0.2, most=90) for _ in range(2))
    assert torch.equal(first.B, second.B)
    assert torch.equal(before, torch.random.get_rng_state())


def wide_model():
    torch.manual_seed(0)
    model = mlp(400, 12, 3, dtype=torch.float32)
    spread = torch.linspace(1, 12, 400).pow(-2) * 5
    x = torch.randn(60, 400) * spread
    return model, x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize("solver", ["auto", "exact", "low-rank"])
def test_the_optimizer_uses_it_where_it_is_asked_to(solver):
    model, x, y = wide_model()
    optimizer = bprong.BPRONG(model, lr=0.05, momentum=0.5, every=2, options={"solver": solver})
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    layer = optimizer.statistics.layers["0"]
    assert isinstance(layer.UU, LowRank) == (solver != "exact")
    assert losses[-1] < 0.5 * losses[0]
    if isinstance(layer.UU, LowRank):
        assert layer.UU.error <= TOLERANCE


def test_it_resumes_bit_for_bit():
    paths = []
    for resumed in (False, True):
        model, x, y = wide_model()
        optimizer = bprong.BPRONG(model, lr=0.05, every=3, options={"solver": "low-rank"})
        for t in range(10):
            if resumed and t == 5:
                state = optimizer.state_dict()
                optimizer = bprong.BPRONG(model, lr=0.05, every=3, options={"solver": "low-rank"})
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        paths.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*paths, strict=True))


# The precision that is safe -------------------------------------------------------------------------------------------


def test_float32_is_used_where_it_is_safe_and_only_there():
    """Well conditioned: float32 keeps three digits. Badly: it would lose them all, and float64 is taken instead."""
    for epsilon, safe in ((0.5, True), (1e-6, False)):
        second = decaying(80, 3.0)
        exact = inverse(second, epsilon)
        assert_close(inverse(second, epsilon, torch.float32), exact, 1e-3)
        in_single = torch.linalg.inv(second.float() + epsilon * torch.eye(80))
        off = float((in_single.double() - exact).norm() / exact.norm())
        assert (off < 1e-3) == safe
