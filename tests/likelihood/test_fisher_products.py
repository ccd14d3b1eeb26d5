"""dᵢᵀ F dⱼ at the output agrees with Fisher matrices that are written down or summed over all possible targets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bprong.likelihood.families import Bernoulli, Categorical, Gaussian, Likelihood
from helpers import assert_close

SHAPES = {Categorical: [(4, 3), (2, 5, 4)], Bernoulli: [(4,), (4, 3), (2, 5, 4), (2, 1, 3, 4)]}
SHAPES[Gaussian] = SHAPES[Bernoulli]
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


def fisher_matrices(likelihood, output):
    """E[ggᵀ] of each target, by summation over all possible y, (targets, m, m); the identity for a Gaussian."""
    rows = output.reshape(likelihood.targets(output), -1)
    m = rows.shape[-1]
    if isinstance(likelihood, Gaussian):
        return torch.eye(m, dtype=output.dtype).expand(len(rows), m, m)
    if isinstance(likelihood, Categorical):
        p = rows.softmax(-1)
        g = rows.softmax(-1)[:, None] - torch.eye(m, dtype=output.dtype)
    else:
        bits = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=output.dtype)] * m).reshape(-1, m)
        p = torch.distributions.Bernoulli(logits=rows[:, None]).log_prob(bits).sum(-1).exp()
        g = rows[:, None].sigmoid() - bits
    return torch.einsum("ty,tyi,tyj->tij", p, g, g)


def expected(likelihood, output, directions, counted=None):
    V = torch.stack(directions).reshape(len(directions), likelihood.targets(output), -1)
    matrices = fisher_matrices(likelihood, output)
    if counted is not None:
        V = V[:, counted]
        matrices = matrices[counted]
    return torch.einsum("itm,tmn,jtn->ij", V, matrices, V)


@pytest.mark.parametrize(("kind", "shape"), CASES)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 3), scale=st.floats(0.1, 5))
def test_products_are_those_of_the_fisher_matrix(kind, shape, seed, k, scale):
    torch.manual_seed(seed)
    output = torch.randn(shape, dtype=torch.float64) * scale
    directions = [torch.randn_like(output) for _ in range(k)]
    likelihood = kind()
    found = likelihood.fisher_products(output, directions)
    assert_close(found, expected(likelihood, output, directions), 1e-11)
    assert torch.equal(found, found.T)
    counted = torch.arange(likelihood.targets(output)) % 2 == 0
    assert_close(
        likelihood.fisher_products(output, directions, counted),
        expected(likelihood, output, directions, counted),
        1e-11,
    )


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_roots_give_what_the_families_compute(kind, shape):
    output = torch.randn(shape, dtype=torch.float64)
    V = torch.randn(2, *shape, dtype=torch.float64)
    likelihood = kind()
    exact = likelihood.fisher_times(output, V)
    assert_close(Likelihood.fisher_times(likelihood, output, V), exact, 1e-12)


def test_products_are_summed_in_float64():
    output = torch.randn(4000, 3)
    V = torch.randn(4000, 3)
    found = Bernoulli().fisher_products(output, [V])
    assert found.dtype is torch.float64
    assert_close(found, Bernoulli().fisher_products(output.double(), [V.double()]), 1e-12)


class Poisson(Likelihood):
    """The output is the log of the rate, the natural parameter: F = rate."""

    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.detach().exp())


class Rooted(Poisson):
    def sample(self, output):
        raise AssertionError("no target needs to be drawn")

    def roots(self, output):
        for k, e_k in enumerate(torch.eye(output.shape[-1], dtype=output.dtype)):
            yield (output[..., k : k + 1] / 2).exp() * e_k


def test_a_users_own_likelihood_is_exact_by_its_roots():
    output = torch.randn(6, 3, dtype=torch.float64)
    u, v = torch.randn(2, 6, 3, dtype=torch.float64)
    assert_close(Rooted().fisher_products(output, [u, v])[0, 1], (output.exp() * u * v).sum(), 1e-12)


class Laplace(Likelihood):
    """Its Fisher information is one."""

    def nll(self, output, y):
        return (output - y).abs().sum(-1)

    def sample(self, output):
        return torch.distributions.Laplace(output.detach(), 1.0).sample()


class Cauchy(Laplace):
    """Its Fisher information is one half."""

    def nll(self, output, y):
        return torch.log1p((output - y) ** 2).sum(-1)

    def sample(self, output):
        return torch.distributions.Cauchy(output.detach(), 1.0).sample()


@pytest.mark.parametrize(("likelihood", "information"), [(Laplace(), 1.0), (Cauchy(), 0.5)])
def test_other_likelihoods_are_right_on_average(likelihood, information):
    output = torch.randn(40_000, 2, dtype=torch.float64)
    u, v = torch.randn(2, 40_000, 2, dtype=torch.float64)
    found = likelihood.fisher_products(output, [u, v])
    assert_close(found, information * torch.stack([u, v]).flatten(1) @ torch.stack([u, v]).flatten(1).T, 0.05)


class Linear(Likelihood):
    """−log p is linear in the output (y = ±1)."""

    def nll(self, output, y):
        return (output * y).sum(-1)

    def sample(self, output):
        return 2 * torch.bernoulli(torch.full_like(output, 0.5)) - 1


def test_a_linear_nll_has_the_products_of_its_gradients():
    output = torch.randn(6, 1, dtype=torch.float64)
    u, v = torch.randn(2, 6, 1, dtype=torch.float64)
    assert_close(Linear().fisher_products(output, [u, v])[0, 1], (u * v).sum(), 1e-12)


def test_products_are_never_negative():
    """Although the Hessian at a few targets drawn from a Cauchy is more often negative than not."""
    for seed in range(50):
        torch.manual_seed(seed)
        output = torch.zeros(2, 1, dtype=torch.float64)
        v = torch.ones(2, 1, dtype=torch.float64)
        assert Cauchy().fisher_products(output, [v]) >= 0


def test_the_comparison_fails_for_another_likelihood():
    output = torch.zeros(3, 4, dtype=torch.float64)
    v = torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="off by"):
        assert_close(Bernoulli().fisher_products(output, [v]), expected(Gaussian(), output, [v]), 1e-11)
