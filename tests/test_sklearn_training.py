"""Training of the scikit-learn estimators: written-out derivatives against autograd, and steps against `BPRONG`."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import nn

import bprong
from bprong.sklearn.network import ACTIVATIONS, Bernoulli, Direction, Gaussian, Network, Softmax
from bprong.sklearn.scaling import Scaling
from bprong.sklearn.training import Batch, Settings, Side, Trainer

MODULES = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
LOSSES = {
    "softmax": lambda f, y: F.cross_entropy(f, y, reduction="none"),
    "logistic": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(dim=1),
    "identity": lambda f, y: (f - y).square().sum(dim=1) / 2,
}
LIKELIHOODS = [Softmax(), Bernoulli(), Gaussian()]
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def problem(likelihood, rows=20, activation="tanh", seed=0):
    """A small network and a batch for it, in float64."""
    random = np.random.RandomState(seed)
    network = Network.drawn([4, 6, 5, 3], activation, random, np.float64)
    X = random.randn(rows, 4) + 0.5
    Y = likelihood.sample(likelihood.mean(random.randn(rows, 3)), random)
    share = random.rand(rows)
    return network, Batch(X, Y, share / share.sum(), 0.1, whole=True)


def torch_model(network):
    """The same network in torch."""
    layers = []
    for W, b in zip(network.W, network.b, strict=True):
        linear = nn.Linear(*W.shape, dtype=torch.float64)
        linear.weight.data = torch.from_numpy(W.T.copy())
        linear.bias.data = torch.from_numpy(b.copy())
        layers += [linear, MODULES[network.activation]()]
    return nn.Sequential(*layers[:-1])


def as_direction(model, values):
    """One value for each parameter of a torch model, as a direction."""
    values = [value.detach().numpy() for value in values]
    return Direction.of([W.T for W in values[::2]], values[1::2])


# Derivatives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_values_and_gradients_are_those_of_autograd(likelihood, activation):
    network, batch = problem(likelihood, activation=activation)
    model = torch_model(network)
    f = model(torch.from_numpy(batch.X))
    nll = LOSSES[likelihood.name](f, torch.from_numpy(batch.Y))
    (torch.from_numpy(batch.share) @ nll).backward()
    z = network.forward(batch.X)
    np.testing.assert_allclose(z[-1], f.detach(), **TOLERANCE)
    np.testing.assert_allclose(likelihood.nll(z[-1], batch.Y), nll.detach(), **TOLERANCE)
    gradient = network.gradient(z, (likelihood.mean(z[-1]) - batch.Y) * batch.share[:, None])
    expected = as_direction(model, [p.grad for p in model.parameters()])
    np.testing.assert_allclose(gradient.flat, expected.flat, **TOLERANCE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_changes_are_the_jacobian_times_the_direction(activation):
    """J v by two backward passes: Jᵀu is linear in u, and its product with v has the gradient J v."""
    network, batch = problem(Gaussian(), activation=activation)
    model = torch_model(network)
    parameters = list(model.parameters())
    v = [torch.randn_like(p) for p in parameters]
    f = model(torch.from_numpy(batch.X))
    u = torch.zeros_like(f, requires_grad=True)
    transposed = torch.autograd.grad(f, parameters, u, create_graph=True)
    (change,) = torch.autograd.grad(sum((g * d).sum() for g, d in zip(transposed, v, strict=True)), u)
    found = network.change(network.forward(batch.X), as_direction(model, v))
    np.testing.assert_allclose(found, change, **TOLERANCE)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_the_fisher_matrix_in_three_ways(likelihood):
    """F is the mean of errors of drawn targets, the sum of the roots, and what `fisher_times` multiplies by."""
    random = np.random.RandomState(0)
    mean = likelihood.mean(random.randn(1, 3))
    fisher = np.concatenate([likelihood.fisher_times(mean, row[None]) for row in np.eye(3)])
    roots = likelihood.roots(mean)[:, 0]
    np.testing.assert_allclose(roots.T @ roots, fisher, atol=1e-14)
    rows = np.repeat(mean, 100_000, axis=0)
    errors = rows - likelihood.sample(rows, random)
    np.testing.assert_allclose(errors.mean(axis=0), 0, atol=0.02)
    np.testing.assert_allclose(errors.T @ errors / len(rows), fisher, atol=0.03)


def test_probabilities_of_extreme_outputs():
    f = np.array([[1e4, -1e4, 0.0]])
    y = np.array([[0.0, 1.0, 0.0]])
    for likelihood in (Softmax(), Bernoulli()):
        assert np.isfinite(likelihood.mean(f)).all()
        assert likelihood.nll(f, y)[0] == pytest.approx(2e4, rel=1e-4)


# Steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "logistic", "identity"])
def test_the_direction_is_that_of_the_optimizer(kind):
    """The paper's literal step with given ε₁ and ε₂ and an exact D."""
    likelihood = next(known for known in LIKELIHOODS if known.name == kind)
    network, batch = problem(likelihood)
    batch.share[:] = 1 / len(batch.X)
    model = torch_model(network)
    criterion = {"softmax": "categorical", "logistic": "bernoulli", "identity": "gaussian"}[kind]
    optimizer = bprong.BPRONG(
        model, criterion, lr=1.0, forward_damping=0.2, backward_damping=0.015, max_step=None,
        options={"fisher": "exact", "average": 0.0, "solver": "exact"},
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    LOSSES[kind](model(torch.from_numpy(batch.X)), torch.from_numpy(batch.Y)).mean().backward()
    optimizer.step()
    moved = as_direction(model, [p - q for p, q in zip(model.parameters(), before, strict=True)])

    trainer = Trainer(network, likelihood)
    known = trainer._passed(batch)
    trainer._refresh(known, batch, np.random.RandomState(0))
    for layer in trainer.layers:
        layer.inputs.factor(0.2, np.dtype(float))
        layer.errors.factor(0.015, np.dtype(float))
    gradient = network.gradient(known.z, (known.mean - batch.Y) * batch.share[:, None])
    np.testing.assert_allclose(trainer._whitened(gradient).flat, moved.flat, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_steps_on_the_whole_training_set_go_down_to_the_minimum(likelihood):
    """From where they end, L-BFGS finds hardly anything lower."""
    network, batch = problem(likelihood)
    batch.penalty = 0.01
    trainer = Trainer(network, likelihood)
    random = np.random.RandomState(0)
    losses = [trainer.step(batch, random) for _ in range(100)]
    assert all(after <= before + 1e-3 for before, after in itertools.pairwise(losses))

    def loss(flat):
        there = Network(Direction(flat, network.parameters.shapes), network.activation)
        z = there.forward(batch.X)
        gradient = there.gradient(z, (likelihood.mean(z[-1]) - batch.Y) * batch.share[:, None])
        weights = sum(W.size for W in there.W)
        gradient.flat[:weights] += batch.penalty * flat[:weights]
        nll = batch.share @ likelihood.nll(z[-1], batch.Y)
        return nll + batch.penalty / 2 * np.square(flat[:weights]).sum(), gradient.flat

    lowest = minimize(loss, network.parameters.flat, jac=True, options={"maxiter": 500}).fun
    assert loss(network.parameters.flat)[0] - lowest < 0.03 * (losses[0] - lowest)


def test_a_step_that_raises_the_loss_is_undone():
    network, batch = problem(Softmax())
    trainer = Trainer(network, Softmax())
    before = network.copy()
    trainer.rule.update_damping = lambda *_: False
    trainer.step(batch, np.random.RandomState(0))
    np.testing.assert_allclose(network.parameters.flat, before.parameters.flat, rtol=1e-12)
    assert trainer.last is None


def test_wide_sides_are_whitened_by_their_variances():
    network, batch = problem(Gaussian())
    trainer = Trainer(network, Gaussian(), Settings(max_dim=4))
    losses = [trainer.step(batch, np.random.RandomState(0)) for _ in range(30)]
    assert [layer.inputs.second.ndim for layer in trainer.layers] == [2, 1, 1]
    assert [layer.errors.second.ndim for layer in trainer.layers] == [1, 1, 2]
    assert losses[-1] < losses[0] / 1.5


def test_moments_average_over_batches_and_singular_ones_are_factored():
    side = Side()
    share = np.full(2, 0.5)
    side.record(np.array([[1.0, 0.0], [1.0, 0.0]]), share, 0.9, wide=False)
    side.record(np.array([[0.0, 2.0], [0.0, 2.0]]), share, 0.9, wide=False)
    np.testing.assert_allclose(side.second, np.diag([0.9, 4.0]) / 1.9)
    side.factor(0.1, np.dtype(float))
    np.testing.assert_allclose(side.inverse, np.diag(1 / (np.diag(side.second) + 0.1)))
    side.second = np.ones((2, 2))
    side.factor(0.0, np.dtype(float))
    assert np.isfinite(side.inverse).all()


def test_scaling_is_exact_for_large_means():
    """Also where a mean is so large that float32 would leave no digits."""
    X = 1e7 + np.arange(8.0)[:, None]
    scaling = Scaling.of(X, np.full(8, 1 / 8))
    scaled = scaling.apply(X, np.float32)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled.mean(), 0, atol=1e-6)
    np.testing.assert_allclose(scaled.std(), 1, rtol=1e-6)
    np.testing.assert_allclose(scaling.undo(scaled.astype(np.float64)), X, rtol=1e-13)
