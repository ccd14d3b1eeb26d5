"""Likelihood families: drawn errors and roots both have the Fisher matrix as their second moment."""

import pytest
import torch
import torch.nn.functional as F

from bprong.likelihood.declared import declared_loss
from bprong.likelihood.families import Bernoulli, Categorical, Gaussian, Likelihood, nontrivial
from bprong.likelihood.loss import classes_last
from helpers import assert_close

FAMILIES = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def output_of_one(m=3):
    return torch.tensor([[0.3, -1.2, 0.8, 0.1]], dtype=torch.float64)[:, :m]


def exact_fisher(choice, output):
    """E[∇∇ᵀ] of one target, written down independently."""
    if choice == "categorical":
        p = output.softmax(-1)[0]
        return torch.diag(p) - torch.outer(p, p)
    p = output.sigmoid()[0]
    return torch.diag(p * (1 - p)) if choice == "bernoulli" else torch.eye(output.shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("choice", FAMILIES)
def test_roots_multiply_to_the_fisher_matrix(choice):
    output = output_of_one()
    total = sum(torch.outer(g[0], g[0]) for g in FAMILIES[choice]().roots(output))
    assert_close(total, exact_fisher(choice, output), 1e-14)


@pytest.mark.parametrize("choice", FAMILIES)
def test_sampled_errors_have_the_fisher_matrix_as_second_moment(choice):
    model = FAMILIES[choice]()
    n = 200_000
    output = output_of_one().expand(n, -1).clone().requires_grad_()
    y = model.sample(output)
    (g,) = torch.autograd.grad(model.total_nll(output, y), output)
    assert_close(g.T @ g / n, exact_fisher(choice, output_of_one()), 0.02)  # 1/√n ≈ 0.002 per entry
    assert_close(g.mean(0), torch.zeros(3), 0.02)


@pytest.mark.parametrize("choice", FAMILIES)
def test_nll_is_torchs_own_loss_per_target(choice):
    model = FAMILIES[choice]()
    output = torch.randn(5, 3, dtype=torch.float64)
    y = model.sample(output)
    expected = {
        "categorical": lambda: F.cross_entropy(output, y, reduction="none"),
        "bernoulli": lambda: F.binary_cross_entropy_with_logits(output, y.double(), reduction="none").sum(-1),
        "gaussian": lambda: F.mse_loss(output, y, reduction="none").sum(-1) / 2,
    }[choice]()
    assert_close(model.nll(output, y), expected, 1e-14)
    model.check_targets(output, y)


def test_sequences_have_a_target_at_every_position_and_roots_one_at_a_time():
    output = torch.randn(2, 4, 3, dtype=torch.float64)  # batch, time, classes
    model = Categorical()
    assert model.targets(output) == 8
    assert model.sample(output).shape == (2, 4)
    roots = list(model.roots(output))
    assert len(roots) == 4 * 3
    for g in roots:
        assert (g.abs().sum(-1) > 0).sum(dim=1).tolist() == [1, 1]
    p = output.softmax(-1)
    fisher = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    assert_close(sum(g[..., :, None] * g[..., None, :] for g in roots), fisher, 1e-14)


@pytest.mark.parametrize("model", [Bernoulli(), Gaussian()])
def test_one_output_per_example_may_be_flat(model):
    output = torch.randn(6, dtype=torch.float64)
    assert model.targets(output) == 6
    assert model.nll(output, model.sample(output)).shape == (6,)
    (root,) = model.roots(output)
    (column,) = (g for g in model.roots(output[:, None]))
    assert_close(root, column[:, 0], 0)


@pytest.mark.parametrize(
    ("choice", "output", "message"),
    [
        ("categorical", torch.zeros(4), "at least two classes"),
        ("categorical", torch.zeros(4, 1), "declare nn.BCEWithLogitsLoss"),
        ("categorical", torch.zeros(4, 3, dtype=torch.long), "floating-point"),
        ("categorical", torch.zeros(2, 10, 4, 4), r"\(batch, positions, classes\)"),
        ("gaussian", torch.zeros(0, 3), "non-empty"),
        ("bernoulli", torch.tensor(1.0), "one row per target"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(choice, output, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES[choice]().check(output)


@pytest.mark.parametrize(
    ("choice", "y", "message"),
    [
        ("categorical", torch.zeros(4), "must be class indices"),
        ("categorical", torch.zeros(4, 3, dtype=torch.long), "must be class indices"),
        ("bernoulli", torch.zeros(4), "shaped like the output"),
        ("gaussian", torch.zeros(3, 4), "shaped like the output"),
    ],
)
def test_targets_that_do_not_fit_are_refused(choice, y, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES[choice]().check_targets(torch.zeros(4, 3), y)


def test_a_class_that_does_not_exist_is_refused_by_torch():
    with pytest.raises(IndexError, match="Target 3 is out of bounds"):
        Categorical().total_nll(torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]))


def test_categorical_nll_takes_distributions_over_classes():
    output = torch.randn(2, 4, 3, dtype=torch.float64)
    q = torch.randn(2, 4, 3, dtype=torch.float64).softmax(-1)
    assert_close(Categorical().nll(output, q), -(q * output.log_softmax(-1)).sum(-1).flatten(), 1e-14)


# What lr="auto" asks of a family --------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", FAMILIES)
def test_nll_is_nonnegative_and_takes_float64_as_declared(choice):
    model = FAMILIES[choice]()
    assert model.nonnegative
    assert model.takes_float64
    output = torch.randn(50, 3)
    values = model.nll(output.double(), model.sample(output))
    assert values.dtype is torch.float64
    assert values.min() >= 0


def test_a_users_own_likelihood_declares_nothing():
    own = Poisson()
    output = torch.randn(4, 2)
    assert not any((own.nonnegative, own.takes_float64))
    assert own.not_ignored(torch.zeros(4, 2)) is None
    assert declared_loss(own).class_dim(output, output) is None
    assert classes_last(own, output) is output
    assert torch.equal(own.laid_out(output, output), output)


# Where classes and targets are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "loss_input", "expected"),
    [
        (torch.zeros(4, 3), None, None),
        (torch.zeros(4, 5, 3), None, None),
        (torch.zeros(4, 3, 2, 2), None, 1),
        (torch.zeros(4, 3, 5), torch.zeros(4, 3, 5), 1),
        (torch.zeros(4, 5, 3), torch.zeros(4, 5, 3).mT, None),
        (torch.zeros(4, 3, 3), torch.zeros(4, 3, 3).mT, None),
        (torch.zeros(4, 5, 3), torch.zeros(20, 3), None),
        (torch.zeros(4, 3, 5), torch.zeros(20, 3), 1),
        (torch.zeros(4, 2, 2, 3), torch.zeros(16, 3), -1),
    ],
)
def test_what_a_loss_over_classes_was_given_shows_where_they_are(output, loss_input, expected):
    assert declared_loss("categorical").class_dim(output, loss_input) == expected
    assert declared_loss("bernoulli").class_dim(output, loss_input) is None


def test_targets_are_laid_out_like_the_output_or_are_not_its_targets():
    output = torch.zeros(4, 5, 3)
    labels = torch.arange(20) % 3
    assert torch.equal(Categorical().laid_out(labels, output), labels.view(4, 5))
    assert Categorical().laid_out(torch.zeros(20, 3), output).shape == output.shape
    assert Categorical().laid_out(labels[:10], output) is None
    bits = (torch.arange(60) % 2).view(20, 3)
    assert torch.equal(Bernoulli().laid_out(bits, output), bits.view(4, 5, 3))
    assert Gaussian().laid_out(bits[:10], output) is None


def test_targets_without_a_gradient_are_not_reached():
    gradient = torch.tensor([[[0.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]])
    expected = [[False, True], [True, False]]
    assert Categorical().reached(gradient).tolist() == Gaussian().reached(gradient).tolist() == expected


def test_a_mask_is_kept_if_it_selects_some_targets_but_not_all():
    mask = torch.tensor([True, False])
    assert nontrivial(mask) is mask
    assert nontrivial(mask | True) is None
    assert nontrivial(mask & False) is None
    assert nontrivial(None) is None


# A user's own likelihood ----------------------------------------------------------------------------------------------


class Poisson(Likelihood):
    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.detach().exp())


def test_a_users_own_likelihood():
    model = Poisson()
    output = torch.zeros(50_000, 2, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(model.total_nll(output, model.sample(output)), output)
    assert_close(g.T @ g / len(g), torch.eye(2), 0.05)  # a Poisson's Fisher information by its log rate is the rate
    with pytest.raises(TypeError, match=r"Poisson defines no roots\(\)"):
        model.roots(output)
    with pytest.raises(ValueError, match="must be one for each example, not torch.float32 of shape \\(3, 2\\)"):
        model.check_targets(output, torch.zeros(3, 2))


def test_a_reduced_loss_of_a_users_own_is_refused():
    class Averaged(Poisson):
        def nll(self, output, y):
            return super().nll(output, y).mean()

    with pytest.raises(ValueError, match="leave out the sum or mean"):
        Averaged().total_nll(torch.zeros(4, 2), torch.zeros(4, 2))


@pytest.mark.parametrize("model", [Bernoulli(), Gaussian()])
def test_an_image_is_one_target(model):
    output = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    y = model.sample(output)
    flat = output.flatten(1)
    assert model.targets(output) == model.targets(flat) == 2
    assert_close(model.nll(output, y), model.nll(flat, y.flatten(1)), 1e-14)
    assert len(list(model.roots(output))) == 12
