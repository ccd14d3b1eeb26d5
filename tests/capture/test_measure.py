"""A measurement gives the right moments, per example."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.measure import record
from bprong.capture.request import Request
from bprong.capture.weights import weight_matrix_of
from bprong.likelihood.declared import declared_loss
from bprong.likelihood.families import Categorical
from helpers import assert_close, classification, mlp


def measure(model, x, y=None, *, loss="cross_entropy", fisher="exact", errors=None, seed=0):
    kinds = (nn.Linear, bprong.WhitenedLinear)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    weights = {weight_matrix_of(name, m): m.bias is not None for name, m in layers.items()}
    likelihood = declared_loss(loss).likelihood
    names = {weight.name for weight in weights}
    request = Request(weights, names, names if errors is None else errors, likelihood, fisher, seed)
    return record(model, request, x, y)


def brute_force_D(model, layer, x):
    """E[δδᵀ] one example and one class at a time; with one position δ is the gradient by the layer's bias."""
    total = torch.zeros(layer.out_features, layer.out_features, dtype=torch.float64)
    for row in x:
        output = model(row[None])
        for k, p in enumerate(output.softmax(-1)[0]):
            (g,) = torch.autograd.grad(F.cross_entropy(output, torch.tensor([k])), layer.bias, retain_graph=True)
            total += p.detach() * torch.outer(g, g) / len(x)
    return total


def test_exact_D_equals_brute_force_and_Z_is_the_covariance_of_the_batch():
    model = mlp(5, 4, 3)
    (x, _) = classification(12, 5, 3)
    seen = measure(model, x)
    for name in ("0", "2"):
        assert_close(seen[name].delta.second, brute_force_D(model, model.get_submodule(name), x), 1e-12)
    assert_close(seen["0"].z.second, torch.cov(x.T, correction=0), 1e-12)
    hidden = model[1](model[0](x))
    assert_close(seen["2"].z.mean, hidden.mean(0), 1e-12)
    assert_close(seen["2"].probe, hidden, 0)


def test_sampled_D_is_right_on_average_and_repeats_with_its_seed():
    model = mlp(5, 4, 3)
    (x, _) = classification(200, 5, 3)
    draws = [measure(model, x, fisher="sampled", seed=s)["0"].delta.second for s in range(60)]
    exact = measure(model, x)["0"].delta.second
    assert_close(sum(draws) / len(draws), exact, 0.05)
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], measure(model, x, fisher="sampled", seed=0)["0"].delta.second)


def test_empirical_D_uses_the_labels_of_the_data():
    model = mlp(5, 4, 3)
    (x, y) = classification(12, 5, 3)
    seen = measure(model, x, y, fisher="empirical")
    per_example = []
    for row, label in zip(x, y, strict=True):
        (g,) = torch.autograd.grad(F.cross_entropy(model(row[None]), label[None]), model[0].bias)
        per_example.append(g)
    g = torch.stack(per_example)
    assert_close(seen["0"].delta.second, g.T @ g / len(x), 1e-12)
    with pytest.raises(ValueError, match="step\\(x, y\\)"):
        measure(model, x, fisher="empirical")
    with pytest.raises(ValueError, match="class indices"):
        measure(model, x, x, fisher="empirical")


@pytest.mark.parametrize("choice", ["bernoulli", "gaussian"])
def test_exact_D_of_elementwise_likelihoods_is_the_mean_over_samples(choice):
    model = mlp(5, 4, 3)
    (x, _) = classification(50, 5, 3)
    exact = measure(model, x, loss=choice)["0"].delta.second
    draws = [measure(model, x, loss=choice, fisher="sampled", seed=s)["0"].delta.second for s in range(200)]
    assert_close(sum(draws) / len(draws), exact, 0.06)


def test_the_size_of_the_batch_does_not_scale_D():
    """The same examples twice are the same distribution: an error of n² would show as a factor 4."""
    model = mlp(5, 4, 3)
    (x, _) = classification(10, 5, 3)
    once = measure(model, x)
    twice = measure(model, torch.cat([x, x]))
    assert_close(twice["0"].delta.second, once["0"].delta.second, 1e-12)
    assert_close(twice["0"].z.second, once["0"].z.second, 1e-12)


class Mixing(nn.Module):
    """A sequence model whose positions are mixed, so that the error of one target reaches every position."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4, dtype=torch.float64)
        self.outer = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        return self.outer(h + h.cumsum(dim=1))


def test_sequences_average_Z_over_rows_and_sum_D_over_rows_per_target():
    model = Mixing()
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    seen = measure(model, x)["inner"]
    assert_close(seen.z.second, torch.cov(x.reshape(-1, 3).T, correction=0), 1e-12)
    # brute force: each target (b, t) and class k by itself, all positions' δ
    expected = torch.zeros(4, 4, dtype=torch.float64)
    a = model.inner(x)
    h = torch.tanh(a)
    output = model.outer(h + h.cumsum(dim=1))
    p = output.softmax(-1)
    for b in range(3):
        for t in range(4):
            for k in range(2):
                nll = F.cross_entropy(output[b, t][None], torch.tensor([k]))
                (g,) = torch.autograd.grad(nll, a, retain_graph=True)
                rows = g.reshape(-1, 4)
                expected += p[b, t, k].detach() * rows.T @ rows / 12
    assert_close(seen.delta.second, expected, 1e-12)
    many = x.repeat(50, 1, 1)  # fifty independent samples of targets in one pass
    draws = [measure(model, many, fisher="sampled", seed=s)["inner"].delta.second for s in range(60)]
    assert_close(sum(draws) / len(draws), expected, 0.06)


def test_a_layer_called_twice_is_measured_over_both_calls():
    layer = nn.Linear(3, 3, dtype=torch.float64)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    x = torch.randn(6, 3, dtype=torch.float64)
    seen = measure(Twice(), x)["layer"]
    rows = torch.cat([x, torch.tanh(layer(x))])
    assert_close(seen.z.second, torch.cov(rows.T, correction=0), 1e-12)
    assert seen.delta.weight == 6  # six targets, though twelve rows


def test_without_a_bias_nothing_is_centred():
    model = mlp(5, 3, bias=False)
    (x, _) = classification(12, 5, 3)
    seen = measure(model, x)["0"]
    assert seen.z.mean is None
    assert_close(seen.z.second, x.T @ x / 12, 1e-12)


def test_in_place_activations_do_not_disturb_what_is_measured():
    x, _ = classification(12, 5, 3)
    model = mlp(5, 4, 3, phi=nn.ReLU)
    inplace = nn.Sequential(model[0], nn.ReLU(inplace=True), model[2])
    a = measure(model, x)
    b = measure(inplace, x)
    for name in ("0", "2"):
        assert_close(b[name].delta.second, a[name].delta.second, 0)
        assert_close(b[name].z.second, a[name].z.second, 0)


def test_an_output_that_is_not_finite_gives_errors_that_are_not_finite():
    model = mlp(5, 4, 3)
    (x, _) = classification(6, 5, 3)
    x[0, 0] = float("nan")
    seen = measure(model, x, fisher="sampled")
    assert not seen["0"].z.finite
    assert not seen["0"].delta.finite
    assert isinstance(declared_loss("cross_entropy").likelihood, Categorical)


def test_bf16_autocast_measures_what_float32_does():
    model = mlp(5, 16, 3, dtype=torch.float32)
    (x, _) = classification(500, 5, 3, dtype=torch.float32)
    full = measure(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        half = measure(model, x)
    for name in ("0", "2"):
        assert half[name].delta.scatter.dtype is torch.float64
        assert_close(half[name].delta.second, full[name].delta.second, 0.03)
        assert_close(half[name].z.second, full[name].z.second, 0.03)


class Normalised(nn.Module):
    """BatchNorm in training, so that rows depend on each other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.last = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Flattened(Mixing):
    """A sequence flattened into rows, which depend on each other."""

    def forward(self, x):
        return super().forward(x).flatten(0, 1)


@pytest.mark.parametrize(
    ("model", "shape", "layer"),
    [(Normalised(), (20, 5), "first"), (Flattened(), (6, 4, 3), "inner")],
)
@pytest.mark.rest
def test_exact_D_is_the_mean_over_samples_also_if_rows_are_not_independent(model, shape, layer):
    x = torch.randn(shape, dtype=torch.float64)
    means = {
        fisher: sum(measure(model, x, fisher=fisher, seed=s)[layer].delta.second for s in range(600)) / 600
        for fisher in ("exact", "sampled")
    }
    assert_close(means["exact"], means["sampled"], 0.12)
    assert means["exact"].trace() / means["sampled"].trace() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("choice", ["bernoulli", "gaussian"])
def test_exact_roots_of_sequences_take_one_position_at_a_time(choice):
    model = Mixing()
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    exact = measure(model, x, loss=choice)["inner"].delta.second
    many = x.repeat(50, 1, 1)  # fifty independent samples of targets in one pass
    draws = [measure(model, many, loss=choice, fisher="sampled", seed=s)["inner"].delta.second for s in range(30)]
    assert_close(sum(draws) / len(draws), exact, 0.06)


def test_sampled_targets_do_not_depend_on_the_data():
    model = mlp(5, 4, 3)
    (x, y) = classification(40, 5, 3)
    drawn, given = (measure(model, x, labels, fisher="sampled") for labels in (None, y))
    assert_close(given["0"].delta.second, drawn["0"].delta.second, 0)


def test_an_expert_without_rows_is_left_out():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.busy = nn.Linear(5, 3)
            self.idle = nn.Linear(5, 3)

        def forward(self, x):
            return self.busy(x) + self.idle(x[:0]).sum(0)

    seen = measure(Experts(), torch.randn(4, 5))
    assert seen["idle"].z is None
    assert seen["busy"].z is not None
