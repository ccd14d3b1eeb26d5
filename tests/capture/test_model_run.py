"""The run of the model behind a measurement: what it may be given and return, and that it leaves no trace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bprong
from bprong.capture.measure import record
from bprong.capture.request import Request
from bprong.capture.weights import weight_matrix_of
from bprong.likelihood.declared import declared_loss
from bprong.likelihood.families import Likelihood
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot


def measure(model, x, y=None, *, loss="cross_entropy", fisher="exact", errors=None, seed=0):
    kinds = (nn.Linear, bprong.WhitenedLinear)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    weights = {weight_matrix_of(name, m): m.bias is not None for name, m in layers.items()}
    likelihood = declared_loss(loss).likelihood
    names = {weight.name for weight in weights}
    request = Request(weights, names, names if errors is None else errors, likelihood, fisher, seed)
    return record(model, request, x, y)


class Restless(nn.Module):
    """Has everything in which a forward pass can leave a trace."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_a_measurement_leaves_no_trace(training, fisher):
    x, y = classification(30, 5, 3, dtype=torch.float32)
    model = Restless()
    F.cross_entropy(model(x), y).backward()
    model.train(training)
    before = snapshot(model)
    random = torch.random.get_rng_state()
    gradients = [p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    measure(model, x, y, fisher=fisher)
    assert_unchanged(before, snapshot(model))
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks == 0


def test_a_measurement_that_fails_leaves_no_trace():
    class Failing(Likelihood):
        def nll(self, output, y):
            raise RuntimeError("no")

        def sample(self, output):
            return output

    model = Restless()
    x = torch.randn(8, 5)
    before = snapshot(model)
    random = torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="no"):
        measure(model, x, loss=Failing(), fisher="sampled")
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
    assert measure(Model(), x, errors=set())["layer"].delta is None
    with pytest.raises(AssertionError, match="backward pass"):
        measure(Model(), x)


@pytest.mark.parametrize(
    "wrap",
    [lambda o: (o, None), lambda o: {"logits": o, "loss": None}, lambda o: type("Out", (), {"logits": o})()],
    ids=["tuple", "dict", ".logits"],
)
def test_outputs_that_contain_the_tensor(wrap):
    inner = mlp(5, 4, 3)

    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return wrap(self.inner(x))

    x, _ = classification(12, 5, 3)
    expected = measure(inner, x)["0"]
    seen = measure(Wrapping(), x)["inner.0"]
    assert_close(seen.delta.second, expected.delta.second, 0)


def test_an_output_without_a_tensor_is_refused():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            self.layer(x)
            return "positive"

    with pytest.raises(TypeError, match="must be computed from a tensor that the model returns, not a str"):
        measure(Text(), torch.zeros(1, 3))


def test_inputs_may_be_several_or_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, scale):
            return self.layer(input=x * scale)

    model = Two()
    x = torch.randn(6, 3)
    scale = torch.tensor(2.0)
    expected = torch.cov(2 * x.double().T, correction=0)
    for batch in ((x, scale), {"x": x, "scale": scale}):
        assert_close(measure(model, batch)["layer"].z.second, expected, 1e-6)


def test_an_input_of_the_wrong_width_raises_torchs_error_and_an_empty_batch_is_refused():
    model = mlp(5, 4, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure(model, torch.zeros(2, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match="the batch is empty"):
        measure(model, torch.zeros(0, 5, dtype=torch.float64))


def test_buffers_that_a_pass_replaces_are_restored():
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


def test_a_detached_output_and_inference_mode_raise_errors():
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
def test_checkpointed_models_give_the_same_moments_as_without_checkpoints(use_reentrant):
    inner = mlp(5, 4, 4, 3)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner[4](checkpoint(self.inner[:4], x, use_reentrant=use_reentrant))

    x, _ = classification(12, 5, 3)
    plain = measure(inner, x)
    seen = measure(Checkpointed(), x)
    for name in ("0", "2", "4"):
        assert_close(seen[f"inner.{name}"].delta.second, plain[name].delta.second, 1e-12)


def test_the_error_for_a_mapping_without_logits_lists_its_keys():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return {"scores": self.layer(x)}

    with pytest.raises(TypeError, match="The model returns scores. Name it with options={'output'"):
        measure(Named(), torch.randn(4, 5))


def test_targets_that_are_not_a_tensor_are_refused():
    with pytest.raises(ValueError, match="must be a tensor, not list"):
        measure(mlp(5, 3), torch.randn(2, 5, dtype=torch.float64), [0, 1], fisher="empirical")
