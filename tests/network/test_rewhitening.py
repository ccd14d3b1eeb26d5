"""Algorithms 1 and 2 as bprong runs them, compared step by step with the reference."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bprong
from helpers import assert_close, classification, layers_of, mlp
from reference import BWNN

STEPS = 200
SCHEDULE = {"forward_every": 7, "forward_offset": 0, "backward_every": 5, "backward_offset": 2}


def pair(phi="tanh", widths=(5, 6, 4, 3)):
    """The same network twice: bprong's and the reference's."""
    model = mlp(*widths, phi=torch.nn.Tanh if phi == "tanh" else torch.nn.ReLU)
    linears = [m for m in model if isinstance(m, torch.nn.Linear)]
    weights = [m.weight.detach().numpy() for m in linears]
    biases = [m.bias.detach().numpy() for m in linears]
    return model, BWNN(weights, biases, phi)


def batches(x, y, size):
    t = 0
    while True:
        chosen = torch.arange(t * size, (t + 1) * size) % len(x)
        yield x[chosen], y[chosen]
        t += 1


@pytest.mark.parametrize("phi", ["tanh", pytest.param("relu", marks=pytest.mark.rest)])
@pytest.mark.parametrize(
    "backward", [pytest.param(False, id="PRONG", marks=pytest.mark.rest), pytest.param(True, id="BPRONG")]
)
def test_every_step_of_200_equals_the_reference(backward, phi):
    model, net = pair(phi)
    bprong.whiten_(model, backward=backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"fisher": "exact", "forward_damping": 0.1, "backward_damping": 0.03} | SCHEDULE
    used = {name: value for name, value in options.items() if backward or name.startswith("forward")}
    rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", **used)
    x, y = classification(90, 5, 3)
    stream = batches(x, y, 20)
    for t in range(STEPS):
        xb, yb = next(stream)
        rewhitening.step(xb)
        output = model(xb)
        optimizer.zero_grad()
        F.cross_entropy(output, yb).backward()
        optimizer.step()

        X = xb.numpy()
        Y = yb.numpy()
        if t % 7 == 0:
            net.forward_whitening(X, 0.1)
        if backward and t % 5 == 2:
            net.back_whitening(X, 0.03)
        grad_W, grad_b = net.ordinary_gradients(X, Y)
        assert_close(output, net.outputs(X), 1e-9, f"outputs at step {t}")
        for i, layer in enumerate(layers_of(model)):
            # the gradient seen in whitened coordinates is R (grad_W − grad_b cᵀ) Uᵀ of the ordinary one
            centred = grad_W[i] - np.outer(grad_b[i], net.c[i])
            R = layer.R.numpy() if backward else np.eye(len(grad_b[i]))
            ours = np.linalg.solve(R, np.linalg.solve(layer.U.numpy(), layer.weight_dagger.grad.numpy().T).T)
            assert_close(ours, centred, 1e-9, f"gradient of W{i} at step {t}")
            assert_close(np.linalg.solve(R, layer.bias_dagger.grad.numpy()), grad_b[i], 1e-9, f"of b{i} at {t}")
        net.gradient_descent(X, Y, 0.05)
        for i, layer in enumerate(layers_of(model)):
            assert_close(layer.c, net.c[i], 1e-9, f"c{i} at {t}")
            assert_close(layer.U.T @ layer.U, net.U[i].T @ net.U[i], 1e-9, f"UᵀU {i} at {t}")
            if backward:
                assert_close(layer.R.T @ layer.R, net.R[i].T @ net.R[i], 1e-9, f"RᵀR {i} at {t}")
            assert_close(layer.weight, net.W(i), 1e-9, f"W{i} at {t}")
            assert_close(layer.bias, net.b(i), 1e-9, f"b{i} at {t}")


@pytest.mark.rest
def test_the_whitened_coordinates_themselves_equal_the_reference():
    """U, R, W†, b† can be compared where no eigenvalue is repeated, as both fix the signs of eigenvectors."""
    model, net = pair(widths=(5, 3, 3))  # as few units as classes: no near-degenerate eigenvalues in D
    bprong.whiten_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # The output's errors sum to zero, so D of the last layer has a null space, of one dimension and hence unique.
    rewhitening = bprong.Rewhitening(
        model, optimizer, "cross_entropy", fisher="exact", forward_damping=0.01, backward_damping=0.01, **SCHEDULE
    )
    x, y = classification(60, 5, 3)
    for t in range(STEPS):
        rewhitening.step(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        net.step(
            t, x.numpy(), y.numpy(), eta=0.05, tau1=7, c1=0, epsilon1=0.01, tau2=5, c2=2, epsilon2=0.01
        )  # fmt: skip
        for i, layer in enumerate(layers_of(model)):
            assert_close(layer.U, net.U[i], 1e-9, f"U{i} at {t}")
            assert_close(layer.R, net.R[i], 1e-9, f"R{i} at {t}")
            assert_close(layer.weight_dagger, net.W_dagger[i], 1e-9, f"W†{i} at {t}")
            assert_close(layer.bias_dagger, net.b_dagger[i], 1e-9, f"b†{i} at {t}")


@pytest.mark.rest
@pytest.mark.parametrize("solver", ["cholesky", "symmetric"])
def test_other_solvers_follow_the_reference_path(solver):
    model, net = pair()
    bprong.whiten_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rewhitening = bprong.Rewhitening(
        model, optimizer, "cross_entropy", fisher="exact", forward_damping=0.1, backward_damping=0.03,
        solver=solver, **SCHEDULE,
    )  # fmt: skip
    x, y = classification(60, 5, 3)
    for t in range(STEPS):
        rewhitening.step(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        net.step(t, x.numpy(), y.numpy(), eta=0.05, tau1=7, epsilon1=0.1, tau2=5, c2=2, epsilon2=0.03)
    for i, layer in enumerate(layers_of(model)):
        assert_close(layer.weight, net.W(i), 1e-9)
        assert_close(layer.bias, net.b(i), 1e-9)


def test_the_two_sides_are_refreshed_together_or_apart():
    x, _ = classification(30, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    together = bprong.Rewhitening(
        model, optimizer, "cross_entropy", forward_every=3, backward_every=3, backward_offset=0
    )
    sides = [[r.side for r in together.step(x)] for _ in range(4)]
    both = ["forward", "backward", "forward", "backward"]
    assert sides == [both, [], [], both]
    apart = bprong.Rewhitening(
        model, optimizer, "cross_entropy", forward_every=4, forward_offset=1, backward_every=2, backward_offset=0
    )
    assert [{r.side for r in apart.step(x)} for _ in range(5)] == [
        {"backward"}, {"forward"}, {"backward"}, set(), {"backward"}
    ]  # fmt: skip
