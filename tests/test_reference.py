"""The oracle against cases worked by hand."""

import numpy as np
import pytest

from reference import BWNN, softmax, whitening_matrix


def test_whitening_matrix_of_a_2x2_moment():
    # [[5,4],[4,5]] has eigenvalue 1 for (1,−1)/√2 and 9 for (1,1)/√2
    U = whitening_matrix(np.array([[5.0, 4.0], [4.0, 5.0]]), 0.0)
    r = np.sqrt(0.5)
    np.testing.assert_allclose(np.abs(U), [[r, r], [r / 3, r / 3]], rtol=1e-14)
    assert U[0, 0] * U[0, 1] < 0 < U[1, 0] * U[1, 1]
    # with ε = 16 the eigenvalues are 17 and 25
    U = whitening_matrix(np.array([[5.0, 4.0], [4.0, 5.0]]), 16.0)
    np.testing.assert_allclose(np.abs(U[1]), [r / 5, r / 5], rtol=1e-14)


def test_moments_of_two_points():
    net = BWNN([np.eye(2)], [np.zeros(2)])
    X = np.array([[0.0, 1.0], [2.0, 5.0]])
    c, Z = net.input_moments(X, 0)
    np.testing.assert_allclose(c, [1, 3])
    np.testing.assert_allclose(Z, [[1, 2], [2, 4]])
    # softmax of (0, ln 3) is (1/4, 3/4): its Fisher matrix is 3/16 · [[1,−1],[−1,1]]
    D = net.error_moment(np.array([[0.0, np.log(3)]]), 0)
    np.testing.assert_allclose(D, 3 / 16 * np.array([[1, -1], [-1, 1]]), rtol=1e-14)


def test_forward_whitening_of_one_layer_by_hand():
    # z ∈ {0, 2}: c = 1, Ž = 1; with ε = 3: U = 1/2, so W† = 2W and b† = b + W
    net = BWNN([np.array([[3.0], [-1.0]])], [np.array([0.5, 0.25])])
    net.forward_whitening(np.array([[0.0], [2.0]]), 3.0)
    np.testing.assert_allclose(net.U[0], [[0.5]])
    np.testing.assert_allclose(net.c[0], [1])
    np.testing.assert_allclose(net.W_dagger[0], [[6], [-2]])
    np.testing.assert_allclose(net.b_dagger[0], [3.5, -0.75])


def test_back_whitening_of_one_layer_by_hand():
    # a = 0: p = (½,½), D = ¼[[1,−1],[−1,1]] with eigenvalues 0, ½; ε = ½ gives RᵀR = (D + ½I)⁻¹ = [[1.5,.5],[.5,1.5]]
    net = BWNN([np.zeros((2, 1))], [np.zeros(2)])
    net.back_whitening(np.array([[1.0]]), 0.5)
    np.testing.assert_allclose(net.R[0].T @ net.R[0], [[1.5, 0.5], [0.5, 1.5]], rtol=1e-14)


def test_one_step_of_gradient_descent_by_hand():
    # W = b = 0: δ = p − e_y = (−½, ½) for y = 0; with x = 2: ∂W = (−1, 1), ∂b = (−½, ½)
    net = BWNN([np.zeros((2, 1))], [np.zeros(2)])
    net.gradient_descent(np.array([[2.0]]), np.array([0]), eta=0.1)
    np.testing.assert_allclose(net.W(0), [[0.1], [-0.1]])
    np.testing.assert_allclose(net.b(0), [0.05, -0.05])


@pytest.mark.parametrize("phi", ["tanh", "relu"])
def test_gradients_against_finite_differences(phi):
    random = np.random.default_rng(1)
    net = BWNN([random.normal(size=(3, 2)), random.normal(size=(2, 3))], [random.normal(size=3), np.zeros(2)], phi)
    X, Y = random.normal(size=(4, 2)), np.array([0, 1, 1, 0])

    def loss():
        return -np.mean([np.log(softmax(a)[y]) for a, y in zip(net.outputs(X), Y, strict=True)])

    grad_W, grad_b = net.ordinary_gradients(X, Y)
    for i, j, k in [(0, 2, 1), (1, 0, 2)]:
        base, h = loss(), 1e-6
        net.W_dagger[i][j, k] += h
        assert (loss() - base) / h == pytest.approx(grad_W[i][j, k], abs=1e-5)
        net.W_dagger[i][j, k] -= h
        net.b_dagger[i][j] += h
        assert (loss() - base) / h == pytest.approx(grad_b[i][j], abs=1e-5)
        net.b_dagger[i][j] -= h


def test_whitening_keeps_the_function_and_whitens():
    random = np.random.default_rng(2)
    net = BWNN([random.normal(size=(3, 3)), random.normal(size=(2, 3))], [random.normal(size=3), random.normal(size=2)])
    X = random.normal(size=(20, 3))
    before = net.outputs(X)
    net.forward_whitening(X, 0.0)
    net.back_whitening(X, 0.1)
    np.testing.assert_allclose(net.outputs(X), before, rtol=1e-11)
    _, Z = net.input_moments(X, 1)
    np.testing.assert_allclose(net.U[1] @ Z @ net.U[1].T, np.eye(3), atol=1e-12)
