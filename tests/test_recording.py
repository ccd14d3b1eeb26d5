"""The statistics pass: right moments, per example, and no trace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.likelihood import Categorical, Likelihood, likelihood_of
from bprong.recording import record
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot


def measure(model, x, y=None, *, likelihood="categorical", fisher="exact", errors=True, seed=0):
    kinds = (nn.Linear, bprong.WhitenedLinear)
    layers = {name: (m, m.bias is not None) for name, m in model.named_modules() if isinstance(m, kinds)}
    return record(model, layers, x, y, likelihood=likelihood_of(likelihood), fisher=fisher, errors=errors, seed=seed)


def brute_force_D(model, layer, x):
    """E[δδᵀ] one example and one class at a time, from the gradient by the layer's bias (δ summed over positions of one
    example is that gradient; with one position it is δ itself)."""
    total = torch.zeros(layer.out_features, layer.out_features, dtype=torch.float64)
    for row in x:
        output = model(row[None])
        for k, p in enumerate(output.softmax(-1)[0]):
            (g,) = torch.autograd.grad(F.cross_entropy(output, torch.tensor([k])), layer.bias, retain_graph=True)
            total += p.detach() * torch.outer(g, g) / len(x)
    return total


def test_exact_D_is_the_brute_force_one_and_Z_is_the_batchs():
    model, (x, _) = mlp(5, 4, 3), classification(12, 5, 3)
    seen = measure(model, x)
    for name in ("0", "2"):
        assert_close(seen[name].delta.second, brute_force_D(model, model.get_submodule(name), x), 1e-12)
    assert_close(seen["0"].z.second, torch.cov(x.T, correction=0), 1e-12)
    hidden = model[1](model[0](x))
    assert_close(seen["2"].z.mean, hidden.mean(0), 1e-12)
    assert_close(seen["2"].probe, hidden, 0)


def test_sampled_D_is_right_on_average_and_repeats_with_its_seed():
    model, (x, _) = mlp(5, 4, 3), classification(200, 5, 3)
    draws = [measure(model, x, fisher="sampled", seed=s)["0"].delta.second for s in range(60)]
    exact = measure(model, x)["0"].delta.second
    assert_close(sum(draws) / len(draws), exact, 0.05)
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], measure(model, x, fisher="sampled", seed=0)["0"].delta.second)


def test_empirical_D_takes_the_datas_labels():
    model, (x, y) = mlp(5, 4, 3), classification(12, 5, 3)
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
def test_exact_D_of_elementwise_likelihoods_is_the_samples_mean(choice):
    model, (x, _) = mlp(5, 4, 3), classification(50, 5, 3)
    exact = measure(model, x, likelihood=choice)["0"].delta.second
    draws = [measure(model, x, likelihood=choice, fisher="sampled", seed=s)["0"].delta.second for s in range(200)]
    assert_close(sum(draws) / len(draws), exact, 0.06)


def test_the_size_of_the_batch_does_not_scale_D():
    """The same examples twice are the same distribution: an error of n² would show as a factor 4."""
    model, (x, _) = mlp(5, 4, 3), classification(10, 5, 3)
    once, twice = measure(model, x), measure(model, torch.cat([x, x]))
    assert_close(twice["0"].delta.second, once["0"].delta.second, 1e-12)
    assert_close(twice["0"].z.second, once["0"].z.second, 1e-12)


class Mixing(nn.Module):
    """A sequence model whose positions see each other, so that one target's error reaches every position."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4, dtype=torch.float64)
        self.outer = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        return self.outer(h + h.cumsum(dim=1))


def test_sequences_average_Z_over_rows_and_sum_D_over_rows_per_target():
    model, x = Mixing(), torch.randn(3, 4, 3, dtype=torch.float64)
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
    draws = [measure(model, x, fisher="sampled", seed=s)["inner"].delta.second for s in range(3000)]
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
    model, (x, _) = mlp(5, 3, bias=False), classification(12, 5, 3)
    seen = measure(model, x)["0"]
    assert seen.z.mean is None
    assert_close(seen.z.second, x.T @ x / 12, 1e-12)


def test_in_place_activations_do_not_disturb_what_is_measured():
    x, _ = classification(12, 5, 3)
    model = mlp(5, 4, 3, phi=nn.ReLU)
    inplace = nn.Sequential(model[0], nn.ReLU(inplace=True), model[2])
    a, b = measure(model, x), measure(inplace, x)
    for name in ("0", "2"):
        assert_close(b[name].delta.second, a[name].delta.second, 0)
        assert_close(b[name].z.second, a[name].z.second, 0)


class Restless(nn.Module):
    """Everything that a pass could leave a trace in."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_the_pass_leaves_no_trace(training, fisher):
    x, y = classification(30, 5, 3, dtype=torch.float32)
    model = Restless()
    F.cross_entropy(model(x), y).backward()
    model.train(training)
    before, random = snapshot(model), torch.random.get_rng_state()
    gradients = [p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    measure(model, x, y, fisher=fisher)
    assert_unchanged(before, snapshot(model))
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks == 0


def test_a_pass_that_fails_leaves_no_trace_either():
    class Failing(Likelihood):
        def nll(self, output, y):
            raise RuntimeError("no")

        def sample(self, output):
            return output

    model, x = Restless(), torch.randn(8, 5)
    before, random = snapshot(model), torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="no"):
        measure(model, x, likelihood=Failing(), fisher="sampled")
    assert_unchanged(before, snapshot(model))
    assert torch.equal(random, torch.random.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_forward_statistics_alone_need_no_backward_pass():
    class Stuck(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise AssertionError("a backward pass was made")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return Stuck.apply(self.layer(x))

    x = torch.randn(4, 3)
    assert measure(Model(), x, errors=False)["layer"].delta is None
    with pytest.raises(AssertionError, match="backward pass"):
        measure(Model(), x)


@pytest.mark.parametrize(
    "wrap",
    [lambda o: (o, None), lambda o: {"logits": o, "loss": None}, lambda o: type("Out", (), {"logits": o})()],
    ids=["tuple", "dict", ".logits"],
)
def test_outputs_that_carry_the_tensor(wrap):
    inner = mlp(5, 4, 3)

    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return wrap(self.inner(x))

    x, _ = classification(12, 5, 3)
    expected, seen = measure(inner, x)["0"], measure(Wrapping(), x)["inner.0"]
    assert_close(seen.delta.second, expected.delta.second, 0)


def test_an_output_without_a_tensor_is_refused():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            self.layer(x)
            return "positive"

    with pytest.raises(TypeError, match="must be, carry or begin with a tensor, not str"):
        measure(Text(), torch.zeros(1, 3))


def test_inputs_may_be_several_or_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, scale):
            return self.layer(input=x * scale)

    model, x, scale = Two(), torch.randn(6, 3), torch.tensor(2.0)
    expected = torch.cov(2 * x.double().T, correction=0)
    for batch in ((x, scale), {"x": x, "scale": scale}):
        assert_close(measure(model, batch)["layer"].z.second, expected, 1e-6)


def test_a_layer_of_the_wrong_width_is_named_and_an_empty_batch_refused():
    model = mlp(5, 4, 3)
    with pytest.raises(ValueError, match=r"layer '0' takes rows of 5 features, not shape \(2, 7\)"):
        measure(model, torch.zeros(2, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match="the batch is empty"):
        measure(model, torch.zeros(0, 5, dtype=torch.float64))


def test_an_output_that_is_not_finite_gives_errors_that_are_not():
    model, (x, _) = mlp(5, 4, 3), classification(6, 5, 3)
    x[0, 0] = float("nan")
    seen = measure(model, x, fisher="sampled")
    assert not seen["0"].z.finite
    assert not seen["0"].delta.finite
    assert isinstance(likelihood_of("categorical"), Categorical)


def test_bf16_autocast_measures_what_float32_does():
    model, (x, _) = mlp(5, 16, 3, dtype=torch.float32), classification(500, 5, 3, dtype=torch.float32)
    full = measure(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        half = measure(model, x)
    for name in ("0", "2"):
        assert half[name].delta.scatter.dtype is torch.float64
        assert_close(half[name].delta.second, full[name].delta.second, 0.03)
        assert_close(half[name].z.second, full[name].z.second, 0.03)


class Normalised(nn.Module):
    """Rows that see each other: BatchNorm in training, or a sequence flattened into rows."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64)
        self.last = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Flattened(Mixing):
    def forward(self, x):
        return super().forward(x).flatten(0, 1)


@pytest.mark.parametrize(
    ("model", "shape", "layer"), [(Normalised(), (20, 5), "first"), (Flattened(), (6, 4, 3), "inner")]
)
def test_exact_means_the_samples_mean_where_rows_are_not_independent_too(model, shape, layer):
    x = torch.randn(shape, dtype=torch.float64)
    means = {
        fisher: sum(measure(model, x, fisher=fisher, seed=s)[layer].delta.second for s in range(600)) / 600
        for fisher in ("exact", "sampled")
    }
    assert_close(means["exact"], means["sampled"], 0.12)
    assert means["exact"].trace() / means["sampled"].trace() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("choice", ["bernoulli", "gaussian"])
def test_exact_roots_of_sequences_take_one_position_at_a_time(choice):
    model, x = Mixing(), torch.randn(3, 4, 3, dtype=torch.float64)
    exact = measure(model, x, likelihood=choice)["inner"].delta.second
    draws = [measure(model, x, likelihood=choice, fisher="sampled", seed=s)["inner"].delta.second for s in range(1500)]
    assert_close(sum(draws) / len(draws), exact, 0.06)


def test_sampled_targets_are_not_the_datas():
    model, (x, y) = mlp(5, 4, 3), classification(40, 5, 3)
    drawn, given = (measure(model, x, labels, fisher="sampled") for labels in (None, y))
    assert_close(given["0"].delta.second, drawn["0"].delta.second, 0)


def test_buffers_that_a_pass_replaces_are_put_back():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return self.layer(x)

    model = Averaging()
    before = model.seen
    measure(model, torch.randn(4, 5))
    assert model.seen is before
    assert model.seen == 0


def test_an_expert_without_rows_is_left_out():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.busy, self.idle = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.busy(x) + self.idle(x[:0]).sum(0)

    seen = measure(Experts(), torch.randn(4, 5))
    assert seen["idle"].z is None
    assert seen["busy"].z is not None


def test_a_detached_output_and_inference_mode_are_named():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x).detach()

    with pytest.raises(ValueError, match="output is detached"):
        measure(Detached(), torch.randn(4, 5))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        measure(mlp(5, 3, dtype=torch.float32), torch.randn(4, 5))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_models_are_measured_as_they_are_without(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    inner = mlp(5, 4, 4, 3)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner[4](checkpoint(self.inner[:4], x, use_reentrant=use_reentrant))

    x, _ = classification(12, 5, 3)
    plain, seen = measure(inner, x), measure(Checkpointed(), x)
    for name in ("0", "2", "4"):
        assert_close(seen[f"inner.{name}"].delta.second, plain[name].delta.second, 1e-12)


def test_a_mapping_without_logits_says_what_it_has():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return {"scores": self.layer(x)}

    with pytest.raises(TypeError, match=r"without \"logits\"; it has \['scores'\]"):
        measure(Named(), torch.randn(4, 5))


def test_targets_that_are_no_tensor_are_refused():
    with pytest.raises(ValueError, match="must be a tensor, not list"):
        measure(mlp(5, 3), torch.randn(2, 5, dtype=torch.float64), [0, 1], fisher="empirical")
