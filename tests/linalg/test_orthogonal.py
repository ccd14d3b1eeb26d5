"""msgn in whitened coordinates against its definition, and the polynomial that approaches it."""

import math

import pytest
import torch

from bprong.linalg.factors import Dense
from bprong.linalg.low_rank import LowRank
from bprong.linalg.moments import Blocks
from bprong.linalg.orthogonal import QUINTIC, STEPS, Metric, WhitenedMsgn, polynomial
from helpers import assert_close

LEAST = 0.003  # the smallest singular value that comes to between
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
    X = X / torch.linalg.matrix_norm(X, keepdim=True)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
    return R @ (X.mT if tall else X) @ U


def test_matrices_of_many_shapes_at_once():
    """Equal shapes, which share their products, tall, wide, large, and grouped ones, and factors of every form."""
    torch.manual_seed(0)
    shapes = [(4, 6), (6, 4), (4, 6), (5, 5), (4, 6), (6, 4), (1, 3), (3, 1), (1, 1), (130, 140), (130, 140)]
    matrices = []
    metrics = []
    expected = []
    for rows, columns in shapes:
        M, P, Q = torch.randn(rows, columns, dtype=torch.float64), positive(rows), positive(columns)
        matrices.append(M)
        metrics.append(Metric(Dense(P, Blocks(rows)), Dense(Q, Blocks(columns))))
        expected.append(by_definition(M, P, Q))
    M, P, Q = torch.randn(3, 4, 6, dtype=torch.float64), positive(4, 3), positive(6, 3)
    matrices.append(M)
    metrics.append(Metric(Dense(P, Blocks(4, groups=3)), Dense(Q, Blocks(6, groups=3))))
    expected.append(torch.stack([by_definition(*each) for each in zip(M, P, Q, strict=True)]))
    B = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64))[0] * 0.5
    M = torch.randn(4, 6, dtype=torch.float64)
    matrices += [M, M, M]
    metrics += [Metric(None, LowRank(B, 2.0)), Metric(), Metric(None, metrics[0].inputs)]
    eye = torch.eye(6, dtype=torch.float64)
    Qs = [eye / 2 - B @ B.T, eye, metrics[0].inputs.inverse]
    expected += [by_definition(M, torch.eye(4, dtype=torch.float64), Q) for Q in Qs]
    order = torch.randperm(len(matrices)).tolist()
    shuffled = [matrices[i] for i in order]
    msgn = WhitenedMsgn(shuffled, [metrics[i] for i in order])
    for i, found in zip(order, msgn(shuffled), strict=True):
        assert_close(found, expected[i], 1e-10, f"matrix {i}, {tuple(matrices[i].shape)}")


def test_nothing_is_asked_of_it():
    assert WhitenedMsgn([], [])([]) == []


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_it_has_the_singular_vectors_of_the_whitened_matrix(shape):
    torch.manual_seed(0)
    M = torch.randn(shape, dtype=torch.float64)
    (found,) = WhitenedMsgn([M], [Metric()])([M])
    left, _, right = torch.linalg.svd(M, full_matrices=False)
    inside = left.T @ found @ right.T
    assert_close(inside, torch.diag(inside.diagonal()), 1e-12)
    assert float(inside.diagonal().min()) > LOW
    assert float(inside.diagonal().max()) < HIGH
