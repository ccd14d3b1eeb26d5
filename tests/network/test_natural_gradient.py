"""The claims of the method: white statistics, the K-FAC step, the natural gradient and its invariances."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bprong
from bprong.capture.measure import record
from bprong.capture.request import Request
from bprong.capture.weights import weight_matrix_of
from bprong.likelihood.declared import declared_loss
from helpers import assert_close, classification, layers_of, mlp

NOW = {"forward_every": 1, "backward_every": 1, "backward_offset": 0}


def moments_of(model, x, loss="cross_entropy"):
    kinds = (nn.Linear, bprong.WhitenedLinear)
    weights = {weight_matrix_of(name, m): True for name, m in model.named_modules() if isinstance(m, kinds)}
    likelihood = declared_loss(loss).likelihood
    names = {weight.name for weight in weights}
    return record(model, Request(weights, names, names, likelihood, "exact"), x)


def test_without_damping_z_and_delta_are_white():
    """E[z†] = 0, E[z†z†ᵀ] = I, E[δ†δ†ᵀ] = I: eqs. of sections 3.1 and 3.2, with a likelihood of full rank."""
    x, _ = classification(60, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bprong.Rewhitening(model, optimizer, "gaussian", fisher="exact", forward_damping=0, backward_damping=0, **NOW).step(
        x
    )
    seen = moments_of(model, x, "gaussian")
    for name, layer in (("0", model[0]), ("2", model[2])):
        z = seen[name].z
        D = seen[name].delta
        assert_close(layer.U @ (z.mean - layer.c), torch.zeros(layer.in_features), 1e-12)
        assert_close(layer.U @ z.second @ layer.U.T, torch.eye(layer.in_features), 1e-10)
        assert_close(layer.R @ D.second @ layer.R.T, torch.eye(layer.out_features), 1e-10)


def centred_kfac_step(W_grad, b_grad, Z, c, D, forward_damping, backward_damping):
    """ΔW = (D+ε₂)⁻¹ (g_W − g_b cᵀ) (Ž+ε₁)⁻¹ and Δb = (D+ε₂)⁻¹ g_b − ΔW c."""
    damped_D = D + backward_damping * torch.eye(len(D), dtype=D.dtype)
    damped_Z = Z + forward_damping * torch.eye(len(Z), dtype=Z.dtype)
    step_W = torch.linalg.solve(damped_D, W_grad - torch.outer(b_grad, c))
    step_W = torch.linalg.solve(damped_Z, step_W, left=False)
    return step_W, torch.linalg.solve(damped_D, b_grad) - step_W @ c


@pytest.mark.parametrize("solver", ["eigh", "cholesky", "symmetric"])
@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits", "mse"])
def test_one_sgd_step_is_the_centred_kfac_step(solver, loss):
    x, y = classification(40, 5, 3)
    plain = mlp(5, 4, 3)
    model = bprong.whiten_(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bprong.Rewhitening(
        model, optimizer, loss, fisher="exact", solver=solver,
        forward_damping=0.1, backward_damping=0.03, **NOW,
    ).step(x)  # fmt: skip
    for m in (model, plain):
        m.zero_grad()
        F.cross_entropy(m(x), y).backward()
    optimizer.step()
    seen = moments_of(plain, x, loss)
    for name, layer in (("0", model[0]), ("2", model[2])):
        stock = plain.get_submodule(name)
        m = seen[name]
        step_W, step_b = centred_kfac_step(
            stock.weight.grad, stock.bias.grad, m.z.second, m.z.mean, m.delta.second, 0.1, 0.03
        )
        assert_close(stock.weight - layer.weight, 0.1 * step_W, 1e-10)
        assert_close(stock.bias - layer.bias, 0.1 * step_b, 1e-10)


def test_for_one_gaussian_layer_it_is_the_exact_natural_gradient():
    """The Fisher matrix of vec(b, W) is summed over examples and inverted directly."""
    x, _ = classification(30, 4, 3)
    y = torch.randn(30, 3, dtype=torch.float64)
    plain = mlp(4, 3)
    model = bprong.whiten_(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    bprong.Rewhitening(model, optimizer, "gaussian", fisher="exact", forward_damping=0, backward_damping=0, **NOW).step(
        x
    )
    for m in (model, plain):
        ((m(x) - y) ** 2 / 2).sum(-1).mean().backward()
    optimizer.step()
    G = torch.zeros(15, 15, dtype=torch.float64)
    for row in x:
        z_bar = torch.cat([torch.ones(1, dtype=torch.float64), row])
        G += torch.kron(torch.outer(z_bar, z_bar), torch.eye(3, dtype=torch.float64)) / len(x)  # E[δδᵀ] = I
    gradient = torch.cat([plain[0].bias.grad[:, None], plain[0].weight.grad], dim=1).T.reshape(-1)
    step = torch.linalg.solve(G, gradient).view(5, 3).T
    assert_close(plain[0].bias - model[0].bias, step[:, 0], 1e-10)
    assert_close(plain[0].weight - model[0].weight, step[:, 1:], 1e-10)
    # With a step of one, a linear model with a gaussian likelihood arrives at its least-squares solution.
    design = torch.cat([torch.ones(30, 1, dtype=torch.float64), x], dim=1)
    best = torch.linalg.lstsq(design, y).solution
    assert_close(model[0].weight, best[1:].T, 1e-9)


def step_outputs(x, y, A, t, damping):
    """Outputs after one step of a one-layer classifier that is fed A x + t but starts as the same function of x."""
    torch.manual_seed(4)
    base = mlp(4, 3)
    inputs = x @ A.T + t
    model = mlp(4, 3)
    with torch.no_grad():
        model[0].weight.copy_(torch.linalg.solve(A, base[0].weight, left=False))
        model[0].bias.copy_(base[0].bias - model[0].weight @ t)
    bprong.whiten_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    bprong.Rewhitening(
        model, optimizer, "cross_entropy", fisher="exact", forward_damping=damping, backward_damping=0.03, **NOW
    ).step(inputs)
    F.cross_entropy(model(inputs), y).backward()
    optimizer.step()
    return model(inputs).detach()


@given(seed=st.integers(0, 1000))
def test_only_without_damping_is_the_step_invariant_to_affine_changes_of_the_input(seed):
    x, y = classification(30, 4, 3)
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(4, 4, dtype=torch.float64, generator=generator) + 2 * torch.eye(4)
    t = torch.randn(4, dtype=torch.float64, generator=generator)
    identity = torch.eye(4, dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    if torch.linalg.cond(A) > 1e3:
        return
    assert_close(step_outputs(x, y, A, t, 0.0), step_outputs(x, y, identity, zero, 0.0), 1e-8)
    damped = step_outputs(x, y, identity, zero, 0.5)
    assert float((step_outputs(x, y, A, t, 0.5) - damped).norm() / damped.norm()) > 1e-6


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_weight_or_bias_stays_the_same(frozen):
    """Frozen bias: nothing is centred and the bias stays the same. Frozen weight: Δb = −η (RᵀR) grad_b."""
    x, y = classification(30, 5, 3)
    plain = mlp(5, 3)
    getattr(plain[0], frozen).requires_grad_(False)
    model = mlp(5, 3)
    model.load_state_dict(plain.state_dict())
    getattr(model[0], frozen).requires_grad_(False)
    bprong.whiten_(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", fisher="exact", **NOW)
    rewhitening.step(x)
    RR = model[0].R.T @ model[0].R
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    optimizer.step()
    assert_close(getattr(model[0], frozen), getattr(plain[0], frozen), 1e-12)
    if frozen == "bias":
        assert_close(model[0].c, torch.zeros(5), 0)
        UU = torch.linalg.inv(x.T @ x / 30 + 0.1 * torch.eye(5, dtype=torch.float64))
        assert_close(plain[0].weight - model[0].weight, 0.1 * RR @ plain[0].weight.grad @ UU, 1e-9)
    else:
        assert_close(plain[0].bias - model[0].bias, 0.1 * RR @ plain[0].bias.grad, 1e-9)
    for _ in range(5):
        rewhitening.step(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_close(getattr(model[0], frozen), getattr(plain[0], frozen), 1e-11)


def test_a_layer_without_a_bias_folds_to_one_without_a_bias():
    x, y = classification(30, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rewhitening = bprong.Rewhitening(
        model, optimizer, "cross_entropy", forward_every=2, backward_every=3, backward_offset=1
    )
    for _ in range(20):
        rewhitening.step(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    plain = bprong.fold(model)
    assert set(plain.state_dict()) == {"0.weight", "2.weight"}
    assert_close(plain(x), model(x), 1e-12)
    assert all(not layer.c.any() for layer in layers_of(model))
