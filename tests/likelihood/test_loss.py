"""A loss is read off its gradient at the output: its scale, its targets, and how it changes with the output."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from bprong.likelihood.families import Bernoulli, Categorical, Gaussian, Likelihood
from bprong.likelihood.loss import loss_behind
from helpers import assert_close

REDUCTIONS = st.sampled_from(["mean", "sum"])
MULTIPLES = st.sampled_from([1.0, 0.37, 12.3, 2.0**16, 1e-6])
SEEDS = st.integers(0, 2**31)


def behind(likelihood, loss_of, output, **known):
    """The loss read off the gradient of loss_of; valued: its value is given too."""
    leaf = output.clone().requires_grad_()
    value = loss_of(leaf)
    (G,) = torch.autograd.grad(value, leaf)
    if known.pop("valued", False):
        known["value"] = value.detach()
    return loss_behind(likelihood, output, G, **known)


def change(found, before, after):
    """By how much the loss found changes, apart from a penalty in it: κ Σ_t w_t (−log p)."""
    counted = int((found.weights != 0).sum())
    return found.scale * counted * (found.mean(after) - found.mean(before))


def assert_is(found, loss_of, output, scale, rtol=1e-9):
    """The scale is right, and the loss found changes with the output as the user's loss does."""
    assert found.scale == pytest.approx(scale, rel=rtol)
    for size in (1e-3, 1.0):
        after = output + size * torch.randn_like(output)
        losses = float(loss_of(after)), float(loss_of(output))
        assert change(found, output, after) == pytest.approx(losses[0] - losses[1], abs=rtol * sum(losses))


def random(shape, seed, spread=2.0):
    torch.manual_seed(seed)
    return spread * torch.randn(shape, dtype=torch.float64)


def total(reduction, count):
    return 1 if reduction == "sum" else count


# Classes --------------------------------------------------------------------------------------------------------------

CLASSES = [(6, 2), (6, 5), (3, 4, 7), (1, 3)]


def rows(output, y):
    return output.flatten(end_dim=-2), y.flatten(end_dim=-2) if y.is_floating_point() else y.flatten()


@pytest.mark.parametrize("shape", CLASSES)
@given(seed=SEEDS, reduction=REDUCTIONS, multiple=MULTIPLES, ignored=st.booleans())
def test_hard_labels_and_ignored_ones(shape, seed, reduction, multiple, ignored):
    output = random(shape, seed)
    y = torch.randint(shape[-1], shape[:-1])
    if ignored and y.numel() > 1:
        y.view(-1)[::2] = -100

    def loss_of(output):
        return multiple * F.cross_entropy(*rows(output, y), reduction=reduction)

    found = behind(Categorical(), loss_of, output)
    assert_is(found, loss_of, output, multiple / total(reduction, int((y != -100).sum())))
    assert found.certain
    assert torch.equal(found.y, y)
    assert torch.equal(found.weights == 0, y.flatten() == -100)
    assert torch.equal(behind(Categorical(), loss_of, output, scale=found.scale).y, y)


@pytest.mark.parametrize("shape", [(12, 2), (6, 5), (3, 4, 7)])
@given(seed=SEEDS, reduction=REDUCTIONS, multiple=MULTIPLES, smoothing=st.floats(0.01, 0.4))
def test_smoothed_labels(shape, seed, reduction, multiple, smoothing):
    output = random(shape, seed)
    y = torch.randint(shape[-1], shape[:-1])
    y.view(-1)[0] = -100

    def loss_of(output):
        return multiple * F.cross_entropy(*rows(output, y), reduction=reduction, label_smoothing=smoothing)

    found = behind(Categorical(), loss_of, output)
    assert_is(found, loss_of, output, multiple / total(reduction, y.numel() - 1), 1e-8)
    q = (1 - smoothing) * F.one_hot(y.clamp(min=0), shape[-1]).double() + smoothing / shape[-1]
    assert_close(found.y[y >= 0], q[y >= 0], 1e-8)
    assert found.certain


@given(seed=SEEDS, multiple=MULTIPLES, classes=st.integers(3, 6), reduction=REDUCTIONS)
def test_mixed_labels(seed, multiple, classes, reduction):
    """Mixup: each target is a mixture of two classes, so a third class has probability zero."""
    output = random((20, classes), seed)
    share = torch.rand(20, 1, dtype=torch.float64)
    pairs = torch.rand(20, classes).argsort(1)[:, :2]
    q = share * F.one_hot(pairs[:, 0], classes) + (1 - share) * F.one_hot(pairs[:, 1], classes)

    def loss_of(output):
        return multiple * F.cross_entropy(output, q, reduction=reduction)

    found = behind(Categorical(), loss_of, output)
    assert_is(found, loss_of, output, multiple / total(reduction, 20))
    assert_close(found.y, q, 1e-9)
    assert found.certain


@pytest.mark.parametrize("classes", [2, 4])
@given(seed=SEEDS)
def test_weighted_classes(classes, seed):
    output = random((30, classes), seed)
    weight = torch.rand(classes, dtype=torch.float64) + 0.2
    y = torch.cat([torch.randint(classes, (28,)), torch.arange(2)])
    y[3] = -100

    def loss_of(output):
        return F.cross_entropy(output, y, weight=weight)

    found = behind(Categorical(), loss_of, output)
    assert_is(found, loss_of, output, 1 / 29)
    assert torch.equal(found.y, y)
    assert float(found.weights[y.flatten() >= 0].mean()) == pytest.approx(1)


@pytest.mark.parametrize("classes", [2, 5])
@given(seed=SEEDS, reduction=REDUCTIONS)
def test_labels_that_are_all_soft_need_the_losss_value(classes, seed, reduction):
    """With a teacher's probabilities κ comes from the value; if κ is customary, a small penalty does no harm."""
    output = random((20, classes), seed)
    q = random((20, classes), seed + 1, 1.0).softmax(-1)

    def loss_of(output, penalty=0.0):
        return F.cross_entropy(output, q, reduction=reduction) + penalty

    scale = 1 / total(reduction, 20)
    assert_is(behind(Categorical(), loss_of, output, valued=True), loss_of, output, scale)
    penalised = behind(Categorical(), lambda f: loss_of(f, 0.03 * loss_of(f).detach()), output, valued=True)
    assert_is(penalised, loss_of, output, scale)
    assert not penalised.certain
    guess = behind(Categorical(), loss_of, output)
    assert guess is None or not guess.certain


def test_any_scale_of_soft_labels_is_found_from_the_value():
    output = random((20, 4), 0)
    q = random((20, 4), 1, 1.0).softmax(-1)

    def loss_of(output):
        return 0.73 * F.cross_entropy(output, q)

    found = behind(Categorical(), loss_of, output, valued=True)
    assert_is(found, loss_of, output, 0.73 / 20)
    assert_close(found.y, q, 1e-9)


def test_a_network_whose_output_is_zero():
    output = torch.zeros(8, 4, dtype=torch.float64)
    y = torch.randint(4, (8,))
    found = behind(Categorical(), lambda f: F.cross_entropy(f, y), output)
    assert found.scale == pytest.approx(1 / 8)
    assert torch.equal(found.y, y)


def test_targets_predicted_with_certainty_count_as_ignored():
    output = random((8, 4), 0)
    y = torch.arange(8) % 4
    output[:3] = 900 * F.one_hot(y[:3], 4)
    found = behind(Categorical(), lambda f: F.cross_entropy(f, y, reduction="sum"), output)
    assert found.scale == pytest.approx(1)
    assert found.y.tolist() == [-100, -100, -100, *y[3:].tolist()]


@pytest.mark.parametrize("noise", [1.0, 0.1, 1e-2, 1e-3])
@pytest.mark.parametrize("classes", [2, 10])
def test_nearly_perfect_predictions_still_determine_the_scale(noise, classes):
    """In float32, where p − q is little more than rounding."""
    y = torch.randint(classes, (250,))
    q = 0.9 * F.one_hot(y, classes) + 0.1 / classes
    output = (q.log() + noise * torch.randn(250, classes)).float()
    found = behind(Categorical(), lambda f: F.cross_entropy(f, y, label_smoothing=0.1), output)
    assert found.scale == pytest.approx(1 / 250, rel=1e-3)
    assert_close(found.y, q, 1e-5)


def test_perfect_predictions_give_no_loss_rather_than_a_wrong_one():
    y = torch.arange(20) % 4
    output = (95.0 * F.one_hot(y, 4) + 0.1 * torch.randn(20, 4)).float()
    assert behind(Categorical(), lambda f: F.cross_entropy(f, y), output) is None


# Bits -----------------------------------------------------------------------------------------------------------------

BITS = [(40,), (8, 5), (3, 4, 7), (2, 1, 5, 6)]


@pytest.mark.parametrize("shape", BITS)
@pytest.mark.parametrize("grey", [False, True])
@given(seed=SEEDS, reduction=REDUCTIONS, multiple=MULTIPLES)
def test_hard_and_soft_bits(shape, grey, seed, reduction, multiple):
    output = random(shape, seed)
    y = torch.rand(shape, dtype=torch.float64)
    y = torch.where(torch.rand(shape) < 0.5, y, y.round()) if grey else y.round()
    y.view(-1)[:4] = torch.tensor([0.0, 1.0, 0.0, 1.0])  # some hard targets

    def loss_of(output):
        return multiple * F.binary_cross_entropy_with_logits(output, y, reduction=reduction)

    found = behind(Bernoulli(), loss_of, output)
    assert_is(found, loss_of, output, multiple / total(reduction, y.numel()))
    assert_close(found.y, y, 1e-9)
    assert found.certain


@given(seed=SEEDS, reduction=REDUCTIONS)
def test_bits_that_are_all_soft_need_the_losss_value(seed, reduction):
    output = random((20, 6), seed)
    y = 0.1 + 0.8 * torch.rand(20, 6, dtype=torch.float64)

    def loss_of(output):
        return F.binary_cross_entropy_with_logits(output, y, reduction=reduction)

    found = behind(Bernoulli(), loss_of, output, valued=True)
    assert_is(found, loss_of, output, 1 / total(reduction, 120))
    assert_close(found.y, y, 1e-9)
    known = behind(Bernoulli(), loss_of, output, scale=found.scale)
    assert torch.equal(known.y, found.y)


def test_ignored_images():
    output = random((5, 1, 4, 4), 0)
    y = torch.rand(5, 1, 4, 4, dtype=torch.float64).round()

    def loss_of(output):
        return F.binary_cross_entropy_with_logits(output[1:], y[1:], reduction="sum") / 4

    found = behind(Bernoulli(), loss_of, output)
    assert_is(found, loss_of, output, 0.25)
    assert found.weights.tolist() == [0, 1, 1, 1, 1]


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", BITS)
@given(seed=SEEDS, reduction=REDUCTIONS, multiple=MULTIPLES, half=st.booleans())
def test_numbers_need_the_losss_value_or_the_targets(shape, seed, reduction, multiple, half):
    output = random(shape, seed)
    y = random(shape, seed + 1)
    multiple = multiple / 2 if half else multiple

    def loss_of(output):
        return multiple * F.mse_loss(output, y, reduction=reduction)

    scale = 2 * multiple / total(reduction, y.numel())
    by_value = behind(Gaussian(), loss_of, output, valued=True)
    assert_is(by_value, loss_of, output, scale)
    assert_close(by_value.y, y, 1e-9)
    assert not by_value.certain
    by_targets = behind(Gaussian(), loss_of, output, y=y)
    assert_is(by_targets, loss_of, output, scale)
    assert by_targets.certain
    assert behind(Gaussian(), loss_of, output) is None


def test_a_small_penalty_does_not_hide_a_customary_scale():
    output = random((8, 5), 0)
    y = random((8, 5), 1)
    found = behind(Gaussian(), lambda f: F.mse_loss(f, y) + 0.005 * F.mse_loss(output, y), output, valued=True)
    assert_is(found, lambda f: F.mse_loss(f, y), output, 2 / 40)


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()])
def test_one_number_alone(likelihood):
    output = torch.tensor([0.3], dtype=torch.float64)
    found = loss_behind(likelihood, output, torch.tensor([0.2], dtype=torch.float64), value=0.1, scale=1.0)
    assert found.weights.shape == found.y.shape == (1,)
    assert found.mean(output) > 0


def test_ignored_rows_do_not_count():
    output = random((8, 5), 0)
    y = random((8, 5), 1)

    def loss_of(output):
        return F.mse_loss(output[2:], y[2:])

    for known in ({"y": y}, {"valued": True}):
        found = behind(Gaussian(), loss_of, output, **known)
        assert_is(found, loss_of, output, 2 / 30)
        assert found.weights.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


# Known targets, a user's own likelihood, and gradients that do not determine a loss -----------------------------------


class Poisson(Likelihood):
    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.exp())


def test_the_loss_of_a_users_own_likelihood_needs_its_targets():
    output = random((8, 3), 0, 0.5)
    y = torch.poisson(output.exp())

    def loss_of(output):
        return 3 * F.poisson_nll_loss(output, y)

    found = behind(Poisson(), loss_of, output, y=y)
    assert_is(found, loss_of, output, 3 / 24)
    assert behind(Poisson(), loss_of, output) is None
    assert behind(Poisson(), lambda f: f.sin().sum(), output, y=y) is None  # not a loss of this likelihood
    assert behind(Poisson(), lambda f: -loss_of(f), output, y=y) is None


class SinglePrecision(Poisson):
    """Its nll accepts float32 only, as one with float32 parameters does."""

    def nll(self, output, y):
        return super().nll(output @ torch.eye(3), y)


def test_a_users_own_likelihood_is_evaluated_in_the_dtype_of_the_output():
    output = random((8, 3), 0, 0.5).float()
    y = torch.poisson(output.exp())
    single = behind(SinglePrecision(), lambda f: F.poisson_nll_loss(f, y), output, y=y)
    double = behind(Poisson(), lambda f: F.poisson_nll_loss(f, y.double()), output.double(), y=y.double())
    along = torch.randn(8, 3)
    assert_close(single.mean(output), double.mean(output.double()), 1e-5)
    assert_close(single.slopes(output, [along]), double.slopes(output.double(), [along.double()]), 1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_labels_are_found_although_classes_are_given(smoothing):
    output = random((20, 4), 0)
    y = torch.randint(4, (20,))

    def loss_of(output):
        return F.cross_entropy(output, y, label_smoothing=smoothing)

    assert_is(behind(Categorical(), loss_of, output, y=y), loss_of, output, 1 / 20, 1e-8)
    with pytest.raises(ValueError, match="class indices of shape"):
        behind(Categorical(), loss_of, output, y=y[:, None])


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()])
@pytest.mark.parametrize("gradient", [0.0, float("nan"), float("inf")])
def test_a_gradient_that_is_zero_or_not_finite_gives_no_loss(likelihood, gradient):
    assert loss_behind(likelihood, torch.zeros(4, 3), torch.full((4, 3), gradient), value=1.0) is None


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_low_precision_and_saturated_outputs(dtype, rtol):
    """Losses are computed in float32 from an output that autocast may have rounded; their gradients are rounded too."""
    for spread in (0.5, 3.0, 20.0):
        output = random((250, 10), 0, spread).to(dtype)
        y = torch.randint(10, (250,))
        bits = torch.rand(250, 10).round()
        classes = behind(Categorical(), lambda f, y=y: F.cross_entropy(f.float(), y), output)
        assert classes.scale == pytest.approx(1 / 250, rel=rtol)
        assert ((classes.y == y) | (classes.y == -100)).all()
        found = behind(Bernoulli(), lambda f, y=bits: F.binary_cross_entropy_with_logits(f.float(), y), output)
        assert found.scale == pytest.approx(1 / 2500, rel=rtol)
        smoothed = behind(Categorical(), lambda f, y=y: F.cross_entropy(f.float(), y, label_smoothing=0.1), output)
        assert smoothed.scale == pytest.approx(1 / 250, rel=rtol)
