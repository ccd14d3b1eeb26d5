"""lr="auto" against the mathematics: the step is the quadratic model's minimum, whatever the user's loss is made of."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.auto import LAMBDA, YOUNG, badly_scaled
from bprong.fisher import factors, fisher_matrices
from bprong.listening import unheard
from bprong.quadratic import minimiser
from helpers import assert_close, classification, mlp, snapshot
from training import EXACT, assert_same_path, batches

RIDGE = 1e-6  # the minimiser's own
LIKELIHOODS = ("categorical", "bernoulli", "gaussian")
LOSSES = {
    "categorical": F.cross_entropy,
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(-1).mean(),
    "gaussian": lambda f, y: ((f - y) ** 2 / 2).sum(-1).mean(),
}


def problem(likelihood, n=60, grey=False):
    """x, y and a small network; the losses of `LOSSES` are their mean −log p."""
    x, y = classification(n, 5, 3)
    if likelihood == "bernoulli":
        y = (x @ torch.randn(5, 3, dtype=x.dtype) + torch.randn(n, 3, dtype=x.dtype)).div(4).sigmoid()
        y = y if grey else y.round()
    if likelihood == "gaussian":
        y = torch.tanh(x @ torch.randn(5, 3, dtype=x.dtype)) + 0.1 * torch.randn(n, 3, dtype=x.dtype)
    torch.manual_seed(1)
    return mlp(5, 4, 3), x, y


def auto(model, likelihood="categorical", **arguments):
    options = EXACT | arguments.pop("options", {})
    return bprong.BPRONG(
        model, lr="auto", likelihood=likelihood, every=arguments.pop("every", 3), options=options, **arguments
    )


def run(model, optimizer, data, loss):
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return snapshot(model)


# The step ---------------------------------------------------------------------------------------------------------


def vector(model, of):
    """A vector over the parameters in the order of `fisher_matrices`: of each layer (b, W) by columns."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    return torch.cat([torch.cat([of(m.bias)[None], of(m.weight).T]).flatten() for m in layers])


def whitened(model, gradients, x, likelihood, lam):
    """Δ by explicit inverses of each layer's Ž + ε₁ and D + ε₂, with ε₁ε₂ = λ and ε₁ : ε₂ the means of their
    eigenvalues', and more while the observations are few."""
    parts = []
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for layer, found in zip(layers, factors(model, x, likelihood), strict=True):
        z = found.z_bar[:, 0, 1:]
        c, n = z.mean(dim=0), len(z)
        Z, D = (z - c).T @ (z - c) / n, found.D
        mean_z, mean_d = float(Z.trace()) / len(Z), float(D.trace()) / len(D)
        e_1 = math.sqrt(lam * mean_z / mean_d) + YOUNG * mean_z * len(Z) / n
        e_2 = math.sqrt(lam * mean_d / mean_z) + YOUNG * mean_d * len(D) / n
        RR, UU = (torch.linalg.inv(m + e * torch.eye(len(m), dtype=m.dtype)) for m, e in ((D, e_2), (Z, e_1)))
        g_W, g_b = gradients[layer.weight], gradients[layer.bias]
        d_W = -RR @ (g_W - torch.outer(g_b, c)) @ UU
        parts.append(torch.cat([(-RR @ g_b - d_W @ c)[None], d_W.T]).flatten())
    return torch.cat(parts)


def bound(loss):
    return max(0.05 * loss, min(0.1, 0.25 * loss))


def gradients_of(model, x, y, likelihood, decay=0.0):
    with unheard():
        loss = LOSSES[likelihood](model(x), y)
    penalty = sum(decay / 2 * p.square().sum() for p in model.parameters())
    return float(loss.detach()), dict(
        zip(model.parameters(), torch.autograd.grad(loss + penalty, list(model.parameters())), strict=True)
    )


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_first_two_steps_are_the_minimum_of_the_quadratic_model(likelihood, decay):
    """½dᵀ(F + λ + decay)d + gᵀd with the explicit Fisher matrix; the first along Δ alone, the second along Δ and Δ₀,
    where the slope along Δ counts s times, s from what the first promised and the second batch found. The first may
    go a quarter of the bound, the second half of it."""
    model, x, y = problem(likelihood)
    optimizer = auto(model, likelihood, every=1, weight_decay=decay)
    last, pending, lam, true, promised, expected, slope, averaged = None, None, LAMBDA, 1.0, 1.0, 0.0, 0.0, 0.0
    for first in (True, False):
        loss, gradients = gradients_of(model, x, y, likelihood, decay)
        averaged = loss if first else 0.9 * averaged + 0.1 * loss
        most = bound(averaged) / (4 if first else 2)
        g = vector(model, gradients.__getitem__)
        if not first:
            true, promised = 0.8 * true + 0.2 * (expected - float(g @ pending)), 0.8 * promised - 0.2 * slope
        F_ = fisher_matrices(factors(model, x, likelihood))["exact"]
        delta = whitened(model, gradients, x, likelihood, lam)
        d = torch.stack([delta] if last is None else [delta, last])
        slopes = d @ g
        slope, pending = float(slopes[0]), delta
        slopes[0] *= min(1.0, true / promised)
        c = minimiser(d @ F_ @ d.T + (lam + decay) * d @ d.T, slopes, [math.inf, 0.95][: len(d)])
        length = float(c @ d @ F_ @ d.T @ c) / 2
        c = c * min(1.0, math.sqrt(most / length))
        expected = float(delta @ F_ @ (c @ d) + decay * delta @ (c @ d))
        before = vector(model, lambda p: p.detach().clone())
        run(model, optimizer, [(x, y)], LOSSES[likelihood])
        moved = vector(model, lambda p: p.detach()) - before
        assert_close(moved, c @ d, 10 * RIDGE, f"step {'one' if first else 'two'}")
        last, lam = moved, optimizer.report().auto["lambda"]


# The user's loss --------------------------------------------------------------------------------------------------

MULTIPLES = {
    "sum": lambda loss: lambda f, y: loss(f, y) * len(f),
    "7.3": lambda loss: lambda f, y: loss(f, y) * 7.3,
    "mean of elements": lambda loss: lambda f, y: loss(f, y) / f.shape[-1],
}


@pytest.mark.parametrize("multiple", MULTIPLES)
@pytest.mark.parametrize("kind", [*LIKELIHOODS, "grey"])
def test_the_scale_of_the_loss_does_not_matter(kind, multiple):
    """Thirty steps, in which the last batch of an epoch is smaller; κ is known to rounding, which steps amplify."""
    likelihood = "bernoulli" if kind == "grey" else kind
    model, x, y = problem(likelihood, n=54, grey=kind == "grey")
    data = [(x[i : i + 20], y[i : i + 20]) for _ in range(10) for i in (0, 20, 40)]
    other = copy.deepcopy(model)
    expected = run(model, auto(model, likelihood), data, LOSSES[likelihood])
    scaled = MULTIPLES[multiple](LOSSES[likelihood])
    assert_same_path(run(other, auto(other, likelihood), data, scaled), expected, 1e-6)


def test_mse_loss_is_a_multiple_too():
    model, x, y = problem("gaussian")
    other = copy.deepcopy(model)
    expected = run(model, auto(model, "gaussian"), batches(x, y, 20, 30), LOSSES["gaussian"])
    assert_same_path(run(other, auto(other, "gaussian"), batches(x, y, 20, 30), F.mse_loss), expected, 1e-6)


@pytest.mark.parametrize("size", [0.01, 0.3])
def test_clipping_does_not_matter(size):
    """Neither does unscaling: gradients multiplied after the backward pass are seen to be."""
    model, x, y = problem("categorical")
    other = copy.deepcopy(model)
    expected = run(model, auto(model), batches(x, y, 20, 30), F.cross_entropy)
    optimizer = auto(other)
    for xb, yb in batches(x, y, 20, 30):
        optimizer.zero_grad()
        F.cross_entropy(other(xb), yb).backward()
        nn.utils.clip_grad_norm_(other.parameters(), size)
        optimizer.step()
    assert_same_path(snapshot(other), expected, 1e-6)


def test_gradients_accumulated_over_parts_are_those_of_the_whole():
    model, x, y = problem("categorical")
    other = copy.deepcopy(model)
    expected = run(model, auto(model), batches(x, y, 20, 30), F.cross_entropy)
    optimizer = auto(other)
    for xb, yb in batches(x, y, 20, 30):
        optimizer.zero_grad()
        for part in (slice(0, 12), slice(12, 20)):
            (F.cross_entropy(other(xb[part]), yb[part], reduction="sum") / 20).backward()
        optimizer.step()
    assert_same_path(snapshot(other), expected, 1e-6)


def test_ignored_targets_whose_number_varies_do_not_hide_the_scale():
    """κ of a mean is one by the number that counts, in every batch another."""
    model, x, y = problem("categorical")
    other = copy.deepcopy(model)
    data = [(xb, yb.clone()) for xb, yb in batches(x, y, 20, 40)]
    for t, (_, yb) in enumerate(data):
        yb[: t % 7] = -100
    expected = run(model, auto(model), data, F.cross_entropy)
    ours = run(other, auto(other), data, lambda f, y: F.cross_entropy(f, y, reduction="sum"))
    assert_same_path(ours, expected, 1e-6)


def test_padded_sequences_and_smoothed_labels_train():
    torch.manual_seed(2)
    x, y = torch.randn(24, 5, 6, dtype=torch.float64), torch.randint(3, (24, 5))
    y = (x[..., :3].argmax(-1)).masked_fill(torch.arange(5) >= torch.randint(2, 6, (24, 1)), -100)
    model = mlp(6, 8, 3)

    def loss(f, y):
        return F.cross_entropy(f.flatten(0, 1), y.flatten(), label_smoothing=0.1)

    before = float(loss(model(x), y).detach())
    optimizer = auto(model)
    run(model, optimizer, batches(x, y, 12, 60), loss)
    assert float(loss(model(x), y).detach()) < 0.7 * before
    assert optimizer.report().auto["ratio"] is not None


# Weight decay -----------------------------------------------------------------------------------------------------


def test_weight_decay_ends_where_the_penalised_loss_is_least():
    """Ridge regression: (XᵀX/n + decay) w = Xᵀy/n, the bias penalised like the rest, from full batches."""
    x, _ = classification(60, 5, 3)
    y = x @ torch.randn(5, 1, dtype=x.dtype) + torch.randn(60, 1, dtype=x.dtype)
    model = mlp(5, 1)
    run(model, auto(model, "gaussian", weight_decay=0.5), [(x, y)] * 150, LOSSES["gaussian"])
    X = torch.cat([torch.ones(60, 1, dtype=x.dtype), x], dim=1)
    w = torch.linalg.solve(X.T @ X / 60 + 0.5 * torch.eye(6, dtype=x.dtype), X.T @ y / 60)
    assert_close(torch.cat([model[0].bias, model[0].weight[0]]), w[:, 0], 1e-6)


# Features of many scales ------------------------------------------------------------------------------------------


def regression(scales):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 5, dtype=torch.float64, generator=generator)
    y = x @ torch.randn(5, 1, dtype=torch.float64, generator=generator) + 0.1
    return x * scales, y


def test_scales_of_features_do_not_matter_where_they_are_bad():
    """Functions, not weights, are compared, of a linear model that starts at zero."""
    outputs = []
    for exponents in ([-4.0, 4.0, 0.0, 2.0, -2.0], [3.0, -1.0, -4.0, 0.0, 4.0]):
        x, y = regression(10 ** torch.tensor(exponents, dtype=torch.float64))
        model = mlp(5, 1)
        for p in model.parameters():
            p.data.zero_()
        assert badly_scaled(x)
        run(model, auto(model, "gaussian"), batches(x, y, 50, 30), LOSSES["gaussian"])
        outputs.append(model(x).detach())
        assert float((model(x) - y).square().mean().detach()) < 1e-3 * float(y.square().mean())
    assert_close(outputs[0], outputs[1], 1e-5)


def test_badly_scaled_is_not_rarely_active():
    z = torch.randn(400, 3)
    assert not badly_scaled(z)
    assert badly_scaled(z * torch.tensor([1.0, 1e3, 1.0]))
    rare = z.clone()
    rare[:, 1] = 0
    rare[:3, 1] = 1e-3
    assert not badly_scaled(rare)
    assert not badly_scaled(z * torch.tensor([1.0, 0.0, 1.0]))  # constant: no scale at all
    assert not badly_scaled(z[:1])
    assert not badly_scaled(torch.ones(20, 3, dtype=torch.long))
