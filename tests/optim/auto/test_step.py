"""lr="auto" against the mathematics: each step minimises the quadratic model, whatever the scale of the loss."""

import copy
import functools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from automatic import bound
from bprong.audit import fisher_factors, fisher_matrices
from bprong.capture.listener import own_pass
from bprong.linalg import units
from bprong.linalg.quadratic import minimiser
from bprong.optim.auto.rule import SETTINGS
from helpers import assert_close, classification, mlp, quick_cases, snapshot
from reference import feature_units
from training import EXACT, assert_same_path, batches

RIDGE = 1e-6  # the minimiser's own
LOSSES = {  # each the mean −log p of a target, which is what its name declares
    "categorical": F.cross_entropy,
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(-1).mean(),
    "gaussian": lambda f, y: F.mse_loss(f, y, reduction="sum") / (2 * len(f)),
}


def problem(kind, n=60, soft=False):
    """A small network, x and y."""
    x, y = classification(n, 5, 3)
    if kind == "bernoulli":
        y = (x @ torch.randn(5, 3, dtype=x.dtype) + torch.randn(n, 3, dtype=x.dtype)).div(4).sigmoid()
        y = y if soft else y.round()
    if kind == "gaussian":
        y = torch.tanh(x @ torch.randn(5, 3, dtype=x.dtype)) + 0.1 * torch.randn(n, 3, dtype=x.dtype)
    torch.manual_seed(1)
    return mlp(5, 4, 3), x, y


def auto(model, loss="cross_entropy", **arguments):
    options = EXACT | arguments.pop("options", {})
    return bprong.BPRONG(model, loss, lr="auto", every=arguments.pop("every", 3), options=options, **arguments)


def run(model, optimizer, data, loss):
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return snapshot(model)


# The step -------------------------------------------------------------------------------------------------------------


def vector(model, of):
    """A vector over the parameters in the order of `fisher_matrices`: of each layer (b, W) by columns."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    return torch.cat([torch.cat([of(m.bias)[None], of(m.weight).T]).flatten() for m in layers])


def whitened(model, gradients, x, kind, lam):
    """Δ by explicit inverses of each layer's Ž + ε₁ and D + ε₂.

    ε₁ε₂ = λ, ε₁ and ε₂ are in the proportion of the mean eigenvalues of Ž and D, and few observations add to both. ε₁
    of the first layer is in units of its features.
    """
    parts = []
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for layer, found in zip(layers, fisher_factors(model, x, kind), strict=True):
        z = found.z_bar[:, 0, 1:]
        c = z.mean(dim=0)
        n = len(z)
        u = torch.ones(z.shape[1], dtype=z.dtype)
        if layer is layers[0]:  # it reads the data
            u = torch.tensor(feature_units(z.numpy(), examples=units.EXAMPLES, kurtosis=units.KURTOSIS))
        Z = (z - c).T @ (z - c) / n
        D = torch.einsum("knro,knrp->op", found.delta, found.delta) / found.errors.weight
        mean_z = float(Z.trace()) / len(Z)
        mean_d = float(D.trace()) / len(D)
        e_1 = math.sqrt(lam * mean_z / mean_d) + SETTINGS.sampling * mean_z * len(Z) / n
        e_2 = math.sqrt(lam * mean_d / mean_z) + SETTINGS.sampling * mean_d * len(D) / n
        RR = torch.linalg.inv(D + e_2 * torch.eye(len(D), dtype=D.dtype))
        UU = torch.linalg.inv(Z + e_1 * torch.diag(u.square()))
        g_b = gradients[layer.bias]
        d_W = -RR @ (gradients[layer.weight] - torch.outer(g_b, c)) @ UU
        parts.append(torch.cat([(-RR @ g_b - d_W @ c)[None], d_W.T]).flatten())
    return torch.cat(parts)


def gradients_of(model, x, y, kind):
    with own_pass():
        loss = LOSSES[kind](model(x), y)
    return float(loss.detach()), dict(
        zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )


@pytest.mark.parametrize("kind", LOSSES)
def test_the_first_two_steps_minimise_the_quadratic_model(kind):
    """½dᵀ(F + λU²)d + gᵀd with the explicit Fisher matrix; the first along Δ alone, the second along Δ and Δ₀.

    The slope along Δ counts s times, s from what the first step promised and the second batch confirmed. The first step
    may go a part of the bound, the second twice that.
    """
    model, x, y = problem(kind)
    u = torch.tensor(feature_units(x.numpy(), examples=units.EXAMPLES, kurtosis=units.KURTOSIS))
    lengths = vector(model, lambda p: u.expand_as(p) if p.shape == (4, 5) else torch.ones_like(p))
    optimizer = auto(model, kind, every=1)
    keep = SETTINGS.keep
    last = None
    lam = SETTINGS.initial_lambda
    trust = 1.0
    slope = 0.0
    slope_change = 0.0
    delta = None
    averaged = None
    for step in range(2):
        loss, gradients = gradients_of(model, x, y, kind)
        averaged = loss if averaged is None else keep * averaged + (1 - keep) * loss
        g = vector(model, gradients.__getitem__)
        if step == 1:
            confirmed = keep + (1 - keep) * (slope_change - float(g @ delta))
            trust = min(1.0, confirmed / (keep - (1 - keep) * slope))
        F_ = fisher_matrices(fisher_factors(model, x, kind))["exact"]
        delta = whitened(model, gradients, x, kind, lam)
        d = torch.stack([delta] if last is None else [delta, last])
        slopes = d @ g
        slope = float(slopes[0])
        slopes[0] *= trust
        most = [math.inf, SETTINGS.most_momentum][: len(d)]
        A = d @ F_ @ d.T + lam * (d * lengths) @ (d * lengths).T
        c = torch.from_numpy(minimiser(A.numpy(), slopes.numpy(), most))
        length = float(c @ d @ F_ @ d.T @ c) / 2
        c = c * min(1.0, math.sqrt(bound(averaged) * SETTINGS.first_part * 2**step / length))
        slope_change = float(delta @ F_ @ (c @ d))
        before = vector(model, lambda p: p.detach().clone())
        run(model, optimizer, [(x, y)], LOSSES[kind])
        last = vector(model, lambda p: p.detach()) - before
        assert_close(last, c @ d, 10 * RIDGE, f"step {step}")
        lam = optimizer.report().rule["lambda"]


# The user's loss ------------------------------------------------------------------------------------------------------

MULTIPLES = {
    "sum": lambda loss: lambda f, y: loss(f, y) * len(f),
    "7.3": lambda loss: lambda f, y: loss(f, y) * 7.3,
    "mean of elements": lambda loss: lambda f, y: loss(f, y) / f.shape[-1],
}


def with_a_smaller_last_batch(kind):
    """A network and thirty batches of its problem."""
    model, x, y = problem("bernoulli" if kind == "soft bits" else kind, n=54, soft=kind == "soft bits")
    return model, [(x[i : i + 20], y[i : i + 20]) for _ in range(10) for i in (0, 20, 40)]


@pytest.mark.parametrize("multiple", quick_cases(MULTIPLES, "7.3"))
@pytest.mark.parametrize("kind", [*LOSSES, "soft bits"])
def test_a_factor_on_the_loss_does_not_matter(kind, multiple):
    """Factors are known to rounding, which steps amplify."""
    declared = "bernoulli" if kind == "soft bits" else kind
    model, data = with_a_smaller_last_batch(kind)
    other = copy.deepcopy(model)
    expected = run(model, auto(model, declared), data, LOSSES[declared])
    scaled = MULTIPLES[multiple](LOSSES[declared])
    assert_same_path(run(other, auto(other, declared), data, scaled), expected, 1e-6)


DECLARED = {
    "categorical": (nn.CrossEntropyLoss, F.cross_entropy, "cross_entropy"),
    "bernoulli": (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, "bce_with_logits"),
    "gaussian": (nn.MSELoss, F.mse_loss, "mse"),
    "soft bits": (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, "bce_with_logits"),
}


@pytest.mark.parametrize("reduction", quick_cases(["mean", "sum"], "sum"))
@pytest.mark.parametrize("form", ["module", "function", "name"])
@pytest.mark.parametrize("kind", quick_cases(DECLARED, "categorical", "gaussian"))
def test_the_reduction_does_not_matter(kind, form, reduction):
    """Whether it is declared or not: a name stands for a mean."""
    declared = "bernoulli" if kind == "soft bits" else kind
    model, data = with_a_smaller_last_batch(kind)
    other = copy.deepcopy(model)
    expected = run(model, auto(model, declared), data, LOSSES[declared])
    module, function, name = DECLARED[kind]
    loss = module(reduction=reduction) if form == "module" else functools.partial(function, reduction=reduction)
    assert_same_path(run(other, auto(other, name if form == "name" else loss), data, loss), expected, 1e-6)


def test_mse_loss_is_a_multiple_of_the_negative_log_likelihood():
    model, x, y = problem("gaussian")
    other = copy.deepcopy(model)
    expected = run(model, auto(model, "gaussian"), batches(x, y, 20, 30), LOSSES["gaussian"])
    assert_same_path(run(other, auto(other, "mse"), batches(x, y, 20, 30), F.mse_loss), expected, 1e-6)


@pytest.mark.parametrize("size", [0.01, 0.3])
def test_clipping_does_not_matter(size):
    """The factor on gradients is measured between the backward pass and the step."""
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


def test_gradients_accumulated_over_parts_of_a_batch_give_the_step_of_the_whole():
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


def test_sums_are_divided_by_the_number_of_targets_that_count_which_varies():
    model, x, y = problem("categorical")
    other = copy.deepcopy(model)
    data = [(xb, yb.clone()) for xb, yb in batches(x, y, 20, 40)]
    for t, (_, yb) in enumerate(data):
        yb[: t % 7] = -100
    expected = run(model, auto(model), data, F.cross_entropy)
    summed = partial(F.cross_entropy, reduction="sum")
    assert_same_path(run(other, auto(other, summed), data, summed), expected, 1e-6)


@pytest.mark.parametrize(
    "declared", ["cross_entropy", pytest.param(partial(F.cross_entropy, label_smoothing=0.1), marks=pytest.mark.rest)]
)
def test_padded_sequences_and_smoothed_labels_train(declared):
    """The call shows that labels are smoothed, whether that is declared or not."""
    torch.manual_seed(2)
    x = torch.randn(24, 5, 6, dtype=torch.float64)
    y = (x[..., :3].argmax(-1)).masked_fill(torch.arange(5) >= torch.randint(2, 6, (24, 1)), -100)
    model = mlp(6, 8, 3)

    def loss(f, y):
        return F.cross_entropy(f.flatten(0, 1), y.flatten(), label_smoothing=0.1)

    before = float(loss(model(x), y).detach())
    optimizer = auto(model, declared)
    run(model, optimizer, batches(x, y, 12, 60), loss)
    assert float(loss(model(x), y).detach()) < 0.7 * before
    assert optimizer.report().rule["ratio"] is not None


# Features of many scales ----------------------------------------------------------------------------------------------


def regression(scales):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 5, dtype=torch.float64, generator=generator)
    y = x @ torch.randn(5, 1, dtype=torch.float64, generator=generator) + 0.1
    return x * scales, y
