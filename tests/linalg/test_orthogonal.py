"""msgn in whitened coordinates against its definition, and the polynomial that approaches it."""

import math

import pytest
import torch

from bprong.linalg.factors import Dense
from bprong.linalg.low_rank import LowRank
from bprong.linalg.moments import Blocks
from bprong.linalg.orthogonal import QUINTIC, STEPS, polynomial, whitened_msgn
from helpers import assert_close

LEAST = 0.003  # the smallest singular value, relative to the bound on them, that comes to between
LOW = 0.68
HIGH = 1.21


def test_singular_values_come_close_to_one():
    values = torch.logspace(math.log10(LEAST), 0, 500, dtype=torch.float64)
    found = polynomial(torch.diag(values.square())).diagonal() * values
    assert float(found.min()) > LOW
    assert float(found.max()) < HIGH
    below = torch.tensor([1e-6, 1e-5], dtype=torch.float64)
    grown = polynomial(torch.diag(below.square())).diagonal()
    assert_close(grown, torch.full_like(grown, QUINTIC[0] ** STEPS), 1e-3)


def positive(size, *lead):
    X = torch.randn(*lead, size, 2 * size, dtype=torch.float64)
    return X @ X.mT / size


def root(A):
    values, vectors = torch.linalg.eigh(A)
    return vectors * values.sqrt() @ vectors.mT


def by_definition(M, P, Q):
    """Rᵀ p(XXᵀ) X U with X = R M Uᵀ, iterated on X itself with symmetric roots, each step as it is written."""
    R, U = root(P), root(Q)
    X = R @ M @ U
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    X = X / torch.linalg.svdvals(X).pow(8).sum(-1).pow(1 / 8)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
    return R @ (X.mT if tall else X) @ U


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (1, 3), (3, 1), (1, 1), (130, 140), (3, 4, 6), (4, 3, 1)])
def test_it_is_its_definition(shape):
    """Tall, wide, large and several matrices; single features, whose factors are multiplied by elements."""
    torch.manual_seed(0)
    *lead, rows, columns = shape
    groups = lead[0] if lead else 1
    M, P, Q = torch.randn(shape, dtype=torch.float64), positive(rows, *lead), positive(columns, *lead)
    factors = [Dense(P, Blocks(rows, groups=groups)), Dense(Q, Blocks(columns, groups=groups))]
    expected = by_definition(M, P, Q) if not lead else torch.stack(list(map(by_definition, M, P, Q)))
    assert_close(whitened_msgn(M, *factors), expected, 1e-10)


def test_every_form_of_factor_will_do():
    torch.manual_seed(0)
    M = torch.randn(4, 6, dtype=torch.float64)
    B = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64))[0] * 0.5
    eye = torch.eye(6, dtype=torch.float64)
    one = torch.eye(4, dtype=torch.float64)
    Q = positive(6)
    for factor, inverse in ((LowRank(B, 2.0), eye / 2 - B @ B.T), (None, eye), (Dense(Q, Blocks(6)), Q)):
        assert_close(whitened_msgn(M, None, factor), by_definition(M, one, inverse), 1e-10)
        assert_close(whitened_msgn(M.mT, factor, None), by_definition(M.mT, inverse, one), 1e-10)


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_it_has_the_singular_vectors_of_the_whitened_matrix(shape):
    torch.manual_seed(0)
    M = torch.randn(shape, dtype=torch.float64)
    found = whitened_msgn(M)
    left, _, right = torch.linalg.svd(M, full_matrices=False)
    inside = left.T @ found @ right.T
    assert_close(inside, torch.diag(inside.diagonal()), 1e-12)
    assert float(inside.diagonal().min()) > LOW
    assert float(inside.diagonal().max()) < HIGH
