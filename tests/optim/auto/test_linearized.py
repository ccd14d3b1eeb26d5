"""J d agrees with the Jacobian and dᵀFd with the Fisher matrix for common layers; the passes leave no trace."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bprong
from bprong.audit import fisher_factors, fisher_matrices
from bprong.capture.own_pass import Subset, rows_of, run_alone
from bprong.capture.tape import Arguments, Batch
from bprong.likelihood.declared import declared_loss
from bprong.likelihood.families import Likelihood
from bprong.likelihood.loss import Targets
from bprong.optim.auto.evaluation import LossModel, curvature, linearized, rerun
from helpers import SelfAttention, assert_close, assert_unchanged, classification, mlp, snapshot


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def directions_of(model, k=2):
    return [{p: torch.randn_like(p) for p in model.parameters()} for _ in range(k)]


def by_jacobian(model, x, direction, seed):
    """J d by reverse mode, one row of J at a time."""
    parameters = list(direction)
    with run_alone(model, x, seed, errors=True) as (output, _):
        rows = [torch.autograd.grad(f, parameters, retain_graph=True, allow_unused=True) for f in output.flatten()]
    moved = [
        sum((g * direction[p]).sum() for p, g in zip(parameters, row, strict=True) if g is not None) for row in rows
    ]
    return torch.stack([torch.as_tensor(m) for m in moved]).view_as(output)


class Cell(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = self.cell(x)
        return self.head(h[0] if isinstance(h, tuple) else h)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.last(checkpoint(lambda z: torch.tanh(self.first(z)), x, use_reentrant=self.use_reentrant))


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def attention(dropout):
    return SelfAttention(nn.MultiheadAttention(4, 2, dropout, batch_first=True), nn.Linear(4, 2))


def encoder(dropout):
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout, batch_first=True)
    return nn.Sequential(nn.Embedding(7, 4), layer, nn.Linear(4, 3))


def rows(*shape):
    return torch.randn(shape)


def tokens(*shape):
    return torch.randint(7, shape)


NETWORKS = {
    "mlp": lambda: (mlp(3, 5, 2), rows(6, 3)),
    "relu in place and dropout": lambda: (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(8, 2)),
        rows(6, 3),
    ),
    "conv2d, groups, batchnorm": lambda: (convnet(), rows(5, 2, 6, 6)),
    "the same in eval mode": lambda: (convnet().eval(), rows(5, 2, 6, 6)),
    "conv1d": lambda: (nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Flatten()), rows(3, 4, 5)),
    "conv3d": lambda: (nn.Sequential(nn.Conv3d(2, 2, 2, groups=2), nn.Flatten()), rows(3, 2, 3, 3, 3)),
    "transposed": lambda: (nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.Flatten()), rows(3, 2, 3, 3)),
    "attention": lambda: (attention(0.2), rows(3, 5, 4)),
    "encoder": lambda: (encoder(0.2), tokens(3, 5)),
    "encoder in eval mode": lambda: (encoder(0.2).eval(), tokens(3, 5)),
    "layernorm": lambda: (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU()), rows(5, 3)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2)), tokens(4, 3)),
    "tied": lambda: (Tied(), tokens(4, 3)),
    "lstm cell": lambda: (Cell(nn.LSTMCell(3, 4)), rows(5, 3)),
    "lstm": lambda: (Cell(nn.LSTM(3, 4, batch_first=True)), rows(5, 3, 3)),
    "gru": lambda: (Cell(nn.GRU(3, 4, batch_first=True)), rows(5, 3, 3)),
    "checkpoint": lambda: (Checkpointed(False), rows(5, 3)),
    "checkpoint, reentrant": lambda: (Checkpointed(True), rows(5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("forward_mode", [True, False])
def test_derivatives_are_those_of_the_jacobian(name, forward_mode):
    model, x = NETWORKS[name]()
    directions = directions_of(model)
    found = linearized(partial(rerun, model, x, 3), directions, forward_mode)
    assert found.refused is None
    assert_close(found.output, rerun(model, x, 3), 0 if not forward_mode else 1e-14)
    exact = 1e-11 if forward_mode else 1e-7  # ε^⅔ = 4e-11 and the size of third derivatives
    for along, direction in zip(found.along, directions, strict=True):
        assert_close(along, by_jacobian(model, x, direction, seed=3), exact)


@pytest.mark.parametrize("forward_mode", [True, False])
def test_single_precision_is_close_to_double(forward_mode):
    model = mlp(20, 30, 10)
    x = rows(50, 20)
    directions = directions_of(model)
    exact = linearized(partial(rerun, model, x, 0), directions).along
    model.float()
    directions = [dict(zip(model.parameters(), d.values(), strict=True)) for d in directions]
    found = linearized(partial(rerun, model, x.float(), 0), directions, forward_mode)
    for ours, theirs in zip(found.along, exact, strict=True):
        assert_close(ours, theirs, 1e-5 if forward_mode else 1e-3)


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class Sine(nn.Module):
    def forward(self, z):
        return NoForwardMode.apply(z)


def test_finite_differences_are_used_for_an_operator_without_forward_mode_ad():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), Sine(), nn.Linear(4, 2))
    x = rows(6, 3)
    directions = directions_of(model)
    before = snapshot(model)
    random = torch.random.get_rng_state()
    found = linearized(partial(rerun, model, x, 1), directions)
    assert "jvp" in found.refused
    for along, direction in zip(found.along, directions, strict=True):
        assert_close(along, by_jacobian(model, x, direction, seed=1), 1e-7)
    assert_unchanged(before, snapshot(model))
    assert torch.equal(random, torch.random.get_rng_state())
    again = linearized(partial(rerun, model, x, 1), directions, forward_mode=False)
    assert_close(again.along[0], found.along[0], 0)


def test_the_lengths_of_directions_do_not_matter():
    model = mlp(3, 5, 2)
    x = rows(6, 3)
    (d,) = directions_of(model, 1)
    for scale in (1e-8, 1e8, 0.0):
        (along,) = linearized(
            partial(rerun, model, x, 0), [{p: scale * v for p, v in d.items()}], forward_mode=False
        ).along
        assert_close(along, scale * linearized(partial(rerun, model, x, 0), [d]).along[0], 1e-7)


def test_a_direction_may_name_some_parameters_only():
    model = mlp(3, 5, 2)
    x = rows(6, 3)
    d = torch.randn_like(model[2].bias)
    found = linearized(partial(rerun, model, x, 0), [{model[2].bias: d}])
    assert_close(found.along[0], d.expand(6, 2), 1e-14)


def test_errors_of_the_model_itself_are_raised():
    model = mlp(3, 5, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linearized(partial(rerun, model, rows(4, 7), 0), directions_of(model))
    with pytest.raises(ValueError, match="the batch is empty"):
        linearized(partial(rerun, model, rows(0, 3), 0), directions_of(model))


@pytest.mark.parametrize("forward_mode", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_linearization_leaves_no_trace(forward_mode, training):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = rows(6, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    model(x).sum().backward()
    model.train(training)
    before = snapshot(model)
    random = torch.random.get_rng_state()
    (kept,) = optimizer._recorder.reached
    gradients = [p.grad.clone() for p in model.parameters()]
    buffers = dict(model.named_buffers())
    modes = [m.training for m in model.modules()]
    batch = x.clone()
    linearized(partial(rerun, model, x, 1), ones_of(model), forward_mode)
    assert_unchanged(before, snapshot(model))
    assert torch.equal(random, torch.random.get_rng_state())
    assert optimizer._recorder.reached == [kept]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(x, batch)
    assert all(torch.autograd.forward_ad._current_level == -1 and p.requires_grad for p in model.parameters())


def ones_of(model):
    """Directions that are not drawn, because the state of torch's generator is compared."""
    return [{p: torch.ones_like(p) for p in model.parameters()}]


def test_a_pass_that_fails_leaves_no_trace():
    class Failing(nn.Module):
        def forward(self, z):
            raise LookupError("no")

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Failing())
    before = snapshot(model)
    with pytest.raises(LookupError, match="no"):
        linearized(partial(rerun, model, rows(6, 3), 0), directions_of(model))
    assert_unchanged(before, snapshot(model))
    with torch.autograd.forward_ad.dual_level():  # the tangents were removed with their level
        assert all(torch.autograd.forward_ad.unpack_dual(p).tangent is None for p in model.parameters())


def test_directions_see_the_same_random_numbers_and_buffers():
    """The same direction twice gives the same result, whatever the first pass wrote to buffers and drew."""

    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("calls", torch.ones(()))

        def forward(self, x):
            self.calls.mul_(2)
            return F.dropout(self.layer(x) * self.calls, 0.5)

    model = Moody()
    (d,) = directions_of(model, 1)
    one, two = linearized(partial(rerun, model, rows(6, 3), 4), [d, d]).along
    assert torch.equal(one, two)
    assert (one == 0).any()


def test_autocast_does_not_matter():
    model = mlp(3, 5, 2, dtype=torch.float32)
    x = rows(6, 3).float()
    directions = directions_of(model)
    plain = linearized(partial(rerun, model, x, 0), directions)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(linearized(partial(rerun, model, x, 0), directions).along[0], plain.along[0], 0)


def test_batches_of_several_structures_and_subsets_of_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, scale):
            return {"logits": self.layer(x * scale)}

    model = Two()
    x = rows(6, 3)
    scale = torch.tensor(2.0)
    directions = directions_of(model)
    expected = by_jacobian(model.layer, 2 * x, directions[0], 0)
    for batch in ((x, scale), {"x": x, "scale": scale}, Arguments((x,), {"scale": scale})):
        assert_close(linearized(partial(rerun, model, batch, 0), directions).along[0], expected, 1e-12)
    part = rows_of((x, scale), Subset(3, 6), torch.float64)
    assert_close(linearized(partial(rerun, model, part, 0), directions).along[0], expected[::2], 1e-12)


# dᵀ F d ---------------------------------------------------------------------------------------------------------------


def as_vector(model, direction):
    """In the order of `fisher_matrices`: layer by layer, vec of (b, W)."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    return torch.cat([torch.cat([direction[m.bias][:, None], direction[m.weight]], 1).T.flatten() for m in layers])


@pytest.mark.parametrize("choice", ["cross_entropy", "bce_with_logits", "mse"])
def test_products_are_those_of_the_exact_fisher_matrix(choice):
    model = mlp(4, 5, 3)
    x, _ = classification(12, 4, 3)
    directions = directions_of(model, 3)
    found = curvature(linearized(partial(rerun, model, x, 0), directions), declared_loss(choice).likelihood)
    D = torch.stack([as_vector(model, d) for d in directions])
    G = fisher_matrices(fisher_factors(model, x, choice))["exact"]
    assert found.dtype == np.float64
    assert_close(torch.from_numpy(found), D @ G @ D.T, 1e-12)


def test_ignored_targets_are_not_in_the_average():
    model = mlp(4, 5, 3)
    x = rows(6, 5, 4)
    counted = torch.rand(6, 5) < 0.5
    directions = directions_of(model)
    likelihood = declared_loss("cross_entropy").likelihood
    ours = curvature(linearized(partial(rerun, model, x, 0), directions), likelihood, counted)
    theirs = curvature(linearized(partial(rerun, model, x[counted], 0), directions), likelihood)
    assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), 1e-12)


def test_drawn_targets_depend_on_the_seed_alone_and_leave_no_trace():
    class Laplace(Likelihood):
        def nll(self, output, y):
            return ((output - y).abs() * (1 + output**2)).sum(-1)

        def sample(self, output):
            return output + torch.randn_like(output)

    model = mlp(4, 5, 3)
    x = rows(6, 4)
    directions = directions_of(model)
    batch = Batch(x, targets=Targets.observed(declared_loss(Laplace()), rows(6, 3)))
    random = torch.random.get_rng_state()
    one, same, other = (LossModel(model, Laplace()).evaluate(directions, [batch], seed).Q for seed in (1, 1, 2))
    assert torch.equal(random, torch.random.get_rng_state())
    assert (one == same).all()
    assert (one != other).any()


def test_an_output_that_does_not_fit_the_likelihood_is_refused():
    model = mlp(4, 1)
    found = linearized(partial(rerun, model, rows(6, 4), 0), directions_of(model))
    with pytest.raises(ValueError, match="declare nn.BCEWithLogitsLoss"):
        curvature(found, declared_loss("cross_entropy").likelihood)
