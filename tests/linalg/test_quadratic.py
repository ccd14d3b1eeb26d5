"""The minimum of a small quadratic model within bounds, against brute force."""

import math
import operator

import pytest
import torch

from bprong.linalg import quadratic

RIDGE = 1e-6  # what `minimiser` adds, in units in which the diagonal is one


def minimiser(A, b, most):
    return torch.from_numpy(quadratic.minimiser(A.numpy(), b.numpy(), most))


def problem(k, rank, seed):
    """A and b of ½cᵀAc + bᵀc along k directions of a space of `rank` dimensions; b is in the range of A."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(rank, k, dtype=torch.float64, generator=generator)
    J = J * torch.logspace(-3, 3, k, dtype=torch.float64)[torch.randperm(k, generator=generator)]
    return J.T @ J, J.T @ torch.randn(rank, dtype=torch.float64, generator=generator)


def value(A, b, c):
    return float(c @ A @ c / 2 + b @ c)


def searched(A, b, most, sweeps=20000):
    """The minimum by coordinate descent within the bounds, which is slow but converges on a convex problem."""
    rows = A.tolist()  # numbers of Python: thousands of operations on tensors of three numbers take much longer
    slopes = b.tolist()
    c = [0.0] * len(slopes)
    for _ in range(sweeps):
        before = list(c)
        for i, row in enumerate(rows):
            if row[i] > 0:
                slope = sum(map(operator.mul, row, c)) + slopes[i]
                c[i] = min(max(c[i] - slope / row[i], 0.0), most[i])
        if c == before:
            break
    return torch.tensor(c, dtype=b.dtype)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("k", "rank"), [(1, 3), (2, 5), (3, 7), (2, 1), (3, 2), (3, 1)])
def test_no_search_finds_a_lower_value(k, rank, seed):
    """Also for singular matrices; the ridge costs at most RIDGE times ½ Σ cᵢ² Aᵢᵢ."""
    A, b = problem(k, rank, seed)
    for most in ([math.inf] * k, [math.inf] * (k - 1) + [0.95], [1e-3] * k):
        c = minimiser(A, b, most)
        other = searched(A, b, most)
        assert all(0 <= float(x) <= m * (1 + 1e-12) for x, m in zip(c, most, strict=True))
        slack = RIDGE * float((other.square() * A.diagonal()).sum()) / 2
        assert value(A, b, c) <= value(A, b, other) + slack + 1e-12 * abs(value(A, b, other))
        assert value(A, b, c) <= 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_units_of_the_directions_do_not_matter(seed):
    """A direction a thousand times as long gets a thousandth of the coefficient."""
    A, b = problem(3, 9, seed)
    s = torch.tensor([1e3, 1.0, 1e-3], dtype=torch.float64)
    most = [math.inf, 0.95, math.inf]
    c = minimiser(A, b, most)
    scaled = minimiser(A * s[:, None] * s, b * s, [m / float(x) for m, x in zip(most, s, strict=True)])
    torch.testing.assert_close(scaled * s, c, rtol=1e-9, atol=1e-15)


def test_directions_of_zero_do_no_harm():
    """The last update is zero after a step was undone."""
    A = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))
    b = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    c = minimiser(A, b, [math.inf, 0.95])
    assert c[0] == pytest.approx(0.5, rel=2 * RIDGE)
    assert torch.isfinite(c).all()
    none = minimiser(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), [math.inf, 0.95])
    assert none.tolist() == [0.0, 0.0]


def test_uphill_directions_get_no_coefficient():
    A = torch.eye(2, dtype=torch.float64)
    b = torch.tensor([1.0, -1.0], dtype=torch.float64)
    c = minimiser(A, b, [math.inf, math.inf])
    assert c[0] == 0
    assert c[1] == pytest.approx(1, rel=2 * RIDGE)


def test_parallel_directions_share_a_step_instead_of_cancelling():
    A = torch.ones(2, 2, dtype=torch.float64)
    c = minimiser(A, torch.tensor([-1.0, -1.0], dtype=torch.float64), [math.inf, math.inf])
    assert c[0] == pytest.approx(float(c[1]))
    assert float(c.sum()) == pytest.approx(1, rel=2 * RIDGE)
