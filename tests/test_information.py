"""dᵀ F d at the output is that of the Fisher matrix written down, or summed over everything that could be drawn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.information import times_drawn, times_roots
from bprong.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from helpers import assert_close

SHAPES = {Categorical: [(4, 3), (2, 5, 4)], Bernoulli: [(4,), (4, 3), (2, 5, 4), (2, 1, 3, 4)]}
SHAPES[Gaussian] = SHAPES[Bernoulli]
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


def fisher_matrices(likelihood, output):
    """E[ggᵀ] of each target over every target there is, (targets, m, m); a Gaussian's is the identity."""
    rows = output.reshape(likelihood.targets(output), -1)
    m = rows.shape[-1]
    if isinstance(likelihood, Gaussian):
        return torch.eye(m, dtype=output.dtype).expand(len(rows), m, m)
    if isinstance(likelihood, Categorical):
        p, g = rows.softmax(-1), rows.softmax(-1)[:, None] - torch.eye(m, dtype=output.dtype)
    else:
        bits = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=output.dtype)] * m).reshape(-1, m)
        p = torch.distributions.Bernoulli(logits=rows[:, None]).log_prob(bits).sum(-1).exp()
        g = rows[:, None].sigmoid() - bits
    return torch.einsum("ty,tyi,tyj->tij", p, g, g)


def expected(likelihood, output, directions, counted=None):
    V = torch.stack(directions).reshape(len(directions), likelihood.targets(output), -1)
    matrices = fisher_matrices(likelihood, output)
    if counted is not None:
        V, matrices = V[:, counted], matrices[counted]
    return torch.einsum("itm,tmn,jtn->ij", V, matrices, V)


@pytest.mark.parametrize(("kind", "shape"), CASES)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 3), scale=st.floats(0.1, 5))
def test_it_is_that_of_the_fisher_matrix(kind, shape, seed, k, scale):
    torch.manual_seed(seed)
    output = torch.randn(shape, dtype=torch.float64) * scale
    directions = [torch.randn_like(output) for _ in range(k)]
    likelihood = kind()
    found = likelihood.information(output, directions)
    assert_close(found, expected(likelihood, output, directions), 1e-11)
    assert torch.equal(found, found.T)
    counted = torch.arange(likelihood.targets(output)) % 2 == 0
    assert_close(
        likelihood.information(output, directions, counted), expected(likelihood, output, directions, counted), 1e-11
    )


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_roots_and_drawn_targets_give_the_same(kind, shape):
    """All three are exponential families in natural parameters: what is drawn makes no difference."""
    output = torch.randn(shape, dtype=torch.float64)
    V, likelihood = torch.randn(2, *shape, dtype=torch.float64), kind()
    exact = likelihood.fisher_times(output, V)
    assert_close(times_roots(likelihood.roots(output), V, likelihood.targets(output)), exact, 1e-12)
    assert_close(times_drawn(likelihood, output, V), exact, 1e-12)


def test_it_is_summed_in_float64():
    output, V = torch.randn(4000, 3), torch.randn(4000, 3)
    found = Bernoulli().information(output, [V])
    assert found.dtype is torch.float64
    assert_close(found, Bernoulli().information(output.double(), [V.double()]), 1e-12)


class Poisson(Likelihood):
    """By the log of the rate, its natural parameter: F = rate."""

    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.detach().exp())


class Rooted(Poisson):
    def sample(self, output):
        raise AssertionError("there is no need to draw")

    def roots(self, output):
        for k, e_k in enumerate(torch.eye(output.shape[-1], dtype=output.dtype)):
            yield (output[..., k : k + 1] / 2).exp() * e_k


@pytest.mark.parametrize("likelihood", [Poisson(), Rooted()])
def test_a_users_own_likelihood_is_exact_in_natural_parameters_or_by_its_roots(likelihood):
    output = torch.randn(6, 3, dtype=torch.float64)
    u, v = torch.randn(2, 6, 3, dtype=torch.float64)
    assert_close(likelihood.information(output, [u, v])[0, 1], (output.exp() * u * v).sum(), 1e-12)


class Laplace(Likelihood):
    """A kink: its second derivative is zero wherever there is one, its Fisher information one."""

    def nll(self, output, y):
        return (output - y).abs().sum(-1)

    def sample(self, output):
        return torch.distributions.Laplace(output.detach(), 1.0).sample()


class Cauchy(Laplace):
    """Curved the wrong way far out; its Fisher information is one half."""

    def nll(self, output, y):
        return torch.log1p((output - y) ** 2).sum(-1)

    def sample(self, output):
        return torch.distributions.Cauchy(output.detach(), 1.0).sample()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, y):
        ctx.save_for_backward(output, y)
        return ((output - y) ** 2).sum(-1) / 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        output, y = ctx.saved_tensors
        return g[:, None] * (output - y), None


class OnceDifferentiable(Gaussian):
    fisher_times, roots = Likelihood.fisher_times, Likelihood.roots

    def nll(self, output, y):
        return Once.apply(output, y)


@pytest.mark.parametrize(
    ("likelihood", "information"), [(Laplace(), 1.0), (Cauchy(), 0.5), (OnceDifferentiable(), 1.0)]
)
def test_elsewhere_it_is_right_on_average(likelihood, information):
    output = torch.randn(40_000, 2, dtype=torch.float64)
    u, v = torch.randn(2, 40_000, 2, dtype=torch.float64)
    found = likelihood.information(output, [u, v])
    assert_close(found, information * torch.stack([u, v]).flatten(1) @ torch.stack([u, v]).flatten(1).T, 0.05)


def test_it_is_never_negative():
    """A handful of targets drawn of a Cauchy: curved the wrong way more often than not."""
    for seed in range(50):
        torch.manual_seed(seed)
        output, v = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
        assert Cauchy().information(output, [v]) >= 0


def test_the_likelihood_it_is_checked_with_is_not_blind():
    output, v = torch.zeros(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="off by"):
        assert_close(Bernoulli().information(output, [v]), expected(Gaussian(), output, [v]), 1e-11)
