"""The table of κ and targets: for every loss of torch, which targets it was given and what −log p is multiplied by.

    loss = r Σ_t κ_t (−log p(y_t | f_t))

A row of the table has the loss as a user computes it, and κ and y written down independently. From the gradient at the
output, with the targets given or without, `read_targets` must find the same loss as a function of the output: in
float64, in float32 and under bf16 autocast, where the output and its gradient are bf16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bprong.capture.output import laid_out
from bprong.likelihood.families import Likelihood
from bprong.likelihood.loss import declared_loss
from bprong.likelihood.targets import Targets, read_targets
from helpers import assert_close

B, C, T = 12, 5, 7  # examples, classes, positions
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# The relative error of a gradient. Under autocast a loss is computed in float32, and its gradient is rounded once.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5], dtype=torch.float64)  # numbers that bf16 has
EPSILON = 0.25  # of label smoothing

BCE = F.binary_cross_entropy_with_logits


def plain(function, f, y):
    return function(f, y)


@dataclass(frozen=True)
class Row:
    """A row of the table; its targets are (targets, m), with classes as distributions.

    function, options  as declared: a loss function of torch, or one of the paper's words
    f, y               the output, and the targets as they are given to the function
    q, kappa           the targets, and κ of each target, (targets, 1), or of each of its elements
    loss               what the user makes of the function, f and y
    measurable         whether r can be found from the gradient alone
    scalar             whether κ is one number for each target; else no Σκ is defined
    """

    function: Any
    options: dict[str, Any]
    f: Tensor
    y: Tensor
    q: Tensor
    kappa: Tensor
    loss: Callable[..., Tensor] = plain
    measurable: bool = True
    scalar: bool = True

    @property
    def declared(self):
        word = isinstance(self.function, str)
        return declared_loss(self.function if word else partial(self.function, **self.options))

    @property
    def hard(self) -> bool:
        return are_hard(self.y)

    @property
    def counted(self) -> Tensor:
        return (self.kappa != 0).any(dim=-1)

    def of(self, f: Tensor) -> Tensor:
        """The user's loss of an output."""

        def function(f, y):
            options = {name: o.to(f.dtype) if isinstance(o, Tensor) else o for name, o in self.options.items()}
            return self.function(f, y.to(f.dtype) if y.is_floating_point() else y, **options)

        return self.loss(None if isinstance(self.function, str) else function, f, self.y)

    @property
    def class_dim(self) -> int | None:
        return 1 if self.f.ndim > 2 and self.f.shape[1] == C else None

    def laid_out(self, f: Tensor) -> Tensor:
        """An output with the classes in the last dimension."""
        return laid_out([f], self.class_dim)

    def by_hand(self, f: Tensor) -> Tensor:
        """Σ κ (−log p)"""
        return (self.kappa * NLL[self.function](self.laid_out(f).reshape(self.q.shape), self.q)).sum()


def are_hard(y):
    return not y.is_floating_point() or bool(((y == 0) | (y == 1)).all())


def of_classes(f, q):
    return -(q * f.log_softmax(dim=-1)).sum(dim=-1, keepdim=True)


def of_bits(f, y):
    return -(y * F.logsigmoid(f) + (1 - y) * F.logsigmoid(-f))


def of_numbers(f, y):
    return (f - y) ** 2 / 2


NLL = {
    F.cross_entropy: of_classes,
    "categorical": of_classes,
    F.nll_loss: lambda f, q: -(q * f).sum(dim=-1, keepdim=True),
    BCE: of_bits,
    "bernoulli": of_bits,
    F.mse_loss: of_numbers,
    "gaussian": of_numbers,
}


def numbers(*shape, seed=0):
    """Numbers that all dtypes have."""
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=random)).bfloat16().double()


def confident(f, y):
    """An output that predicts every second label with p > 1 − ε."""
    rows = torch.arange(len(y)) % 2 == 0
    return torch.where(rows[:, None], 6.0 * F.one_hot(y, C), f)


# Classes --------------------------------------------------------------------------------------------------------------


def hard(shape=(B, C), f=None, function=F.cross_entropy, ignored=False, loss=plain, **options):
    """Class indices: κ q = ((1 − ε) w_y e_y + ε w / C) / Σ w_y, or without the denominator if the loss is a sum."""
    f = numbers(*shape) if f is None else f
    f = f.log_softmax(dim=1) if function is F.nll_loss else f
    y_shape = shape[:-1] if loss is flattened else (shape[0], *shape[2:])
    y = torch.arange(math.prod(y_shape)).mul(3).reshape(y_shape) % C
    index = options.get("ignore_index", -100)
    if ignored:
        y = y.masked_fill(torch.arange(y.numel()).reshape(y.shape) % 4 == 1, index)
    labels = y.flatten()
    counted = (labels != index).double()
    w = options.get("weight", torch.ones(C, dtype=torch.float64))
    w_y = w[labels.clamp(min=0)] * counted
    epsilon = options.get("label_smoothing", 0.0)
    one_hot = F.one_hot(labels.clamp(min=0), C) * w_y[:, None]
    part = (1 - epsilon) * one_hot + epsilon / C * w * counted[:, None]
    part = part / (1 if options.get("reduction") == "sum" else w_y.sum())
    kappa = part.sum(dim=-1, keepdim=True)
    q = part / kappa.where(kappa > 0, 1)
    return Row(function, options, f, y, q, kappa, loss, scalar=not (epsilon and "weight" in options))


def soft(shape=(B, C), q=None, loss=plain, **options):
    """Distributions over the classes."""
    f = numbers(*shape)
    second = loss is not flattened and len(shape) > 2
    q = numbers(*shape, seed=1).softmax(dim=1 if second else -1) if q is None else q
    rows = laid_out([q], 1).reshape(-1, C) if second else q.reshape(-1, C)
    total = 1 if options.get("reduction") == "sum" else len(rows)
    weighted = rows * options.get("weight", 1.0)
    kappa = weighted.sum(dim=-1, keepdim=True) / total
    mean = weighted / weighted.sum(dim=-1, keepdim=True)
    return Row(F.cross_entropy, options, f, q, mean, kappa, loss, measurable=False, scalar="weight" not in options)


def flattened(function, f, y):
    """(B, T, C) as (B·T, C)"""
    return function(f.flatten(0, 1), y.flatten(0, 1))


def averaged(function, f, y):
    return function(f, y).mean()


def divided(function, f, y):
    return function(f, y).sum() / len(f)


LAMBDA = 0.75  # of mixup


def other(y):
    return (y + 1) % C


def mixed(y):
    return LAMBDA * F.one_hot(y, C).double() + (1 - LAMBDA) * F.one_hot(other(y), C).double()


def mixup(function, f, y):
    return LAMBDA * function(f, y) + (1 - LAMBDA) * function(f, other(y))


LABELS = torch.arange(B) * 3 % C
CERTAIN = torch.where(torch.arange(B)[:, None] % 4 == 0, 900.0 * F.one_hot(LABELS, C), numbers(B, C))
SMOOTH = {"f": confident(numbers(B, C), LABELS), "label_smoothing": EPSILON}

CLASSES = {
    "mean": hard(),
    "sum": hard(reduction="sum"),
    "weights": hard(weight=WEIGHT),
    "weights, sum": hard(weight=WEIGHT, reduction="sum"),
    "smoothing": hard(**SMOOTH),
    "smoothing, sum": hard(**SMOOTH, reduction="sum"),
    "smoothing and weights": hard(**SMOOTH, weight=WEIGHT),
    "smoothing and weights, sum": hard(**SMOOTH, weight=WEIGHT, reduction="sum"),
    "ignored": hard(ignored=True),
    "ignored, sum": hard(ignored=True, reduction="sum"),
    "ignore_index=3": hard(ignored=True, ignore_index=3),
    "ignored, weights": hard(ignored=True, weight=WEIGHT),
    "ignored, smoothing": hard(ignored=True, **SMOOTH),
    "(B, C, T)": hard((B, C, T)),
    "(B, C, T), sum": hard((B, C, T), reduction="sum"),
    "(B, C, T), all options": hard((B, C, T), ignored=True, weight=WEIGHT, label_smoothing=EPSILON),
    "(B, C, H, W)": hard((4, C, 3, 2)),
    "(B, C, H, W), ignored": hard((4, C, 3, 2), ignored=True),
    "(B T, C)": hard((B, T, C), loss=flattened),
    "(B T, C), ignored": hard((B, T, C), loss=flattened, ignored=True),
    "certain": hard(f=CERTAIN),
    "certain, sum": hard(f=CERTAIN, reduction="sum"),
    "certain, weights": hard(f=CERTAIN, weight=WEIGHT),
    "certain, ignored": hard(f=CERTAIN, ignored=True),
    "none, then mean": hard(loss=averaged, reduction="none"),
    "none, then sum / B": hard(loss=divided, reduction="none"),
    "nll": hard(function=F.nll_loss),
    "nll, sum": hard(function=F.nll_loss, reduction="sum"),
    "nll, weights": hard(function=F.nll_loss, weight=WEIGHT),
    "nll, ignored": hard(function=F.nll_loss, ignored=True),
    "nll, ignore_index=3": hard(function=F.nll_loss, ignored=True, ignore_index=3),
    "nll, (B, C, T)": hard((B, C, T), function=F.nll_loss),
    "nll, (B, C, H, W)": hard((4, C, 3, 2), function=F.nll_loss, weight=WEIGHT),
    "soft": soft(),
    "soft, sum": soft(reduction="sum"),
    "soft, (B, C, T)": soft((B, C, T)),
    "soft, (B, C, H, W)": soft((4, C, 3, 2)),
    "soft, (B T, C)": soft((B, T, C), loss=flattened),
    "mixup, soft": soft(q=mixed(LABELS)),
    "mixup, two losses": replace(soft(q=mixed(LABELS)), y=LABELS, loss=mixup),
    "categorical": replace(hard(), function="categorical", loss=lambda _, f, y: F.cross_entropy(f, y)),
}

# Bits and numbers -----------------------------------------------------------------------------------------------------

SHAPES = {"(B,)": (B,), "(B, m)": (B, C), "(B, T, m)": (B, T, 3), "(B, c, H, W)": (4, 1, 3, 2)}


def elements(function, shape=(B, C), f=None, y=None, loss=plain, **options):
    """κ is 1 for bits, 2 for squared errors, divided by the number of elements if the loss is a mean."""
    f = numbers(*shape) if f is None else f
    y = (numbers(*shape, seed=1) > 0).double() if y is None else y
    targets = len(f) if f.ndim in (1, 4) else f.shape[:-1].numel()
    q = y.reshape(targets, -1)
    kappa = torch.full_like(q, 2.0 if function is F.mse_loss else 1.0)
    kappa = kappa * (1 + (options["pos_weight"] - 1) * q if "pos_weight" in options else 1)
    kappa = kappa * (options["weight"].reshape(q.shape) if "weight" in options else 1)
    kappa = kappa / (1 if options.get("reduction") == "sum" else f.numel())
    weighted = "pos_weight" in options or "weight" in options
    measurable = function is BCE and are_hard(y)
    return Row(function, options, f, y, q, kappa, loss, measurable=measurable, scalar=not weighted)


def squares(shape=(B, C), **options):
    return elements(F.mse_loss, shape, y=numbers(*shape, seed=1), **options)


def sum_per_example(function, factor):
    return lambda _, f, y: factor * function(f, y.to(f.dtype), reduction="sum") / B


PER_EXAMPLE = torch.full((B, C), 1 / B, dtype=torch.float64)
SATURATED = torch.where(numbers(B, C, seed=3) > 0, 50 * numbers(B, C).sign(), numbers(B, C))
ELEMENTS = {
    **{f"bits, {name}": elements(BCE, shape) for name, shape in SHAPES.items()},
    **{f"bits, {name}, sum": elements(BCE, shape, reduction="sum") for name, shape in SHAPES.items()},
    "bits, pos_weight": elements(BCE, pos_weight=WEIGHT),
    "bits, pos_weight, sum": elements(BCE, pos_weight=WEIGHT, reduction="sum"),
    "bits, weight": elements(BCE, weight=2.0 ** numbers(B, C, seed=4).round()),
    "bits, none, then mean": elements(BCE, loss=averaged, reduction="none"),
    "bits, certain": elements(BCE, f=SATURATED, y=(SATURATED > 0).double()),
    "bits, soft": elements(BCE, y=numbers(B, C, seed=2).sigmoid()),
    "bernoulli": replace(elements(BCE), function="bernoulli", kappa=PER_EXAMPLE, loss=sum_per_example(BCE, 1)),
    **{f"numbers, {name}": squares(shape) for name, shape in SHAPES.items()},
    **{f"numbers, {name}, sum": squares(shape, reduction="sum") for name, shape in SHAPES.items()},
    "gaussian": replace(squares(), function="gaussian", kappa=PER_EXAMPLE, loss=sum_per_example(F.mse_loss, 0.5)),
}
ROWS = CLASSES | ELEMENTS


# What must hold -------------------------------------------------------------------------------------------------------


def left_by(row, dtype, factor=1.0):
    """The output and the gradient that the user's backward pass leaves there, with classes in the last dimension."""
    f = row.f.to(dtype, copy=True).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = factor * row.of(f)
    (G,) = torch.autograd.grad(loss, f)
    assert G.dtype is dtype
    assert row.declared.likelihood.class_dim(f.detach(), G) == row.class_dim
    return row.laid_out(f.detach()), row.laid_out(G)


def assert_is(found: Targets, row: Row, dtype, ratio=1.0):
    """What was found is r times the loss of the row, as a function of the output."""
    eps = ROUNDING[dtype]
    assert found.ratio == pytest.approx(ratio, rel=eps)
    assert found.residual <= 4 * eps
    counted = row.counted if found.counted is None else found.counted.flatten()
    assert torch.equal(counted, row.counted)
    assert_found_targets(found, row, eps)
    for seed in (0, 5):  # where the gradient was, and elsewhere
        f = (row.f.to(dtype) if seed == 0 else numbers(*row.f.shape, seed=seed)).to(torch.float64, copy=True)
        f.requires_grad_()
        expected = ratio * row.by_hand(f)
        along = numbers(*row.f.shape, seed=seed + 1)
        (slope,) = torch.autograd.grad(expected, f)
        multiple = found.multiple()
        if row.scalar:
            assert multiple == pytest.approx(ratio * float(row.kappa.sum()) / row.kappa.shape[-1], rel=eps)
        assert multiple * found.mean(row.laid_out(f)) == pytest.approx(expected.item(), rel=4 * eps)
        (found_slope,) = found.slopes(row.laid_out(f), [row.laid_out(along)])
        size = float(slope.norm() * along.norm())
        assert multiple * found_slope == pytest.approx(float((slope * along).sum()), abs=4 * eps * size)


def assert_found_targets(found, row, eps):
    """Hard targets exactly, soft ones to the rounding of the gradient."""
    y = found.y.reshape(-1) if not found.y.is_floating_point() else found.y.reshape(row.q.shape)
    if found.y.is_floating_point() and row.hard and not found.effective:
        assert torch.equal(y[row.counted], row.y.reshape(row.q.shape).to(y)[row.counted])
    elif found.y.is_floating_point():
        assert_close(y[row.counted], row.q[row.counted], 4 * eps)
    else:
        assert torch.equal(y[row.counted], row.y.flatten()[row.counted])


@pytest.mark.parametrize("name", ROWS)
def test_the_table_itself(name):
    """What torch computes is Σ κ (−log p), at any output."""
    row = ROWS[name]
    for f in (row.f, numbers(*row.f.shape, seed=9)):
        assert_close(row.of(f), row.by_hand(f), 1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_targets_that_are_given(name, dtype):
    row = ROWS[name]
    found = read_targets(row.declared, *left_by(row, dtype), given=[row.y])
    assert_is(found, row, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_targets_read_off_the_gradient(name, dtype):
    """Soft targets and numbers are those that explain the gradient if r is the one assumed, 1."""
    row = ROWS[name]
    found = read_targets(row.declared, *left_by(row, dtype))
    assert_is(found, row, dtype)
    assert found.effective == (not row.measurable)


@given(
    seed=st.integers(1, 2**31),
    options=st.fixed_dictionaries(
        {},
        optional={
            "weight": st.just(WEIGHT),
            "reduction": st.just("sum"),
            "label_smoothing": st.floats(0.01, 0.4),
            "ignore_index": st.integers(0, C - 1),
            "ignored": st.just(True),
        },
    ),
    shape=st.sampled_from([(B, C), (4, C, 3), (2, C, 2, 3)]),
    spread=st.floats(0.1, 1.5),  # a target predicted with certainty cannot be told from an ignored one
    factor=st.floats(0.01, 100),
)
def test_any_options_together(seed, options, shape, spread, factor):
    row = hard(shape, f=spread * numbers(*shape, seed=seed), **options)
    assert_is(read_targets(row.declared, *left_by(row, torch.float64, factor)), row, torch.float64, factor)


# A factor on the loss -------------------------------------------------------------------------------------------------

FACTORS = [0.1, 100.0]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_is_found_if_targets_are_given(factor, dtype):
    for row in ROWS.values():
        if row.loss is not mixup:
            found = read_targets(row.declared, *left_by(row, dtype, factor), given=[row.y])
            assert_is(found, row, dtype, factor)
            assert not found.effective


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_is_found_from_the_gradient_alone_if_targets_are_hard(factor, dtype):
    for row in ROWS.values():
        if row.measurable:
            assert_is(read_targets(row.declared, *left_by(row, dtype, factor)), row, dtype, factor)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_on_soft_targets_and_numbers_must_be_among_those_assumed(factor, dtype):
    """The first of them at which targets are distributions is taken; anything can be the target of squared errors."""
    for row in ROWS.values():
        if not row.measurable:
            found = read_targets(row.declared, *left_by(row, dtype, factor), assumed=(factor, 1.0))
            assert_is(found, row, dtype, factor)


def test_the_factor_on_squared_errors_cannot_be_read_off_their_gradient():
    """2 (f − y) and 2 r (f − y') are equal if f − y' = (f − y) / r: r is the one assumed, and y' follows."""
    row = ROWS["numbers, (B, m)"]
    for assumed in (1.0, 0.5):
        found = read_targets(row.declared, *left_by(row, torch.float64, factor=3.0), assumed=(assumed,))
        assert found.ratio == assumed
        assert_close(row.f - found.y, (row.f - row.y) * 3 / assumed, 1e-12)


def test_distributions_exclude_an_assumed_factor_that_is_too_small():
    row = ROWS["mixup, soft"]
    left = left_by(row, torch.float64, factor=10.0)
    assert_is(read_targets(row.declared, *left, assumed=(1.0, 10.0)), row, torch.float64, 10.0)
    nothing = read_targets(row.declared, *left)
    assert nothing.residual > 0.1


def test_two_losses_of_mixup_with_a_factor_have_the_assumed_one():
    """Neither of the two given targets explains the gradient alone."""
    row = ROWS["mixup, two losses"]
    left = left_by(row, torch.float64, factor=0.5)
    found = read_targets(row.declared, *left, given=[row.y, other(row.y)], assumed=(0.5, 1.0))
    assert_is(found, row, torch.float64, 0.5)


# Special cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("noise", [3.0, 0.3, 0.03])
def test_smoothed_labels_are_found_at_every_stage_of_training(noise, weight, dtype):
    """Near the minimum, half of the rows have p > 1 − ε + ε / C at the label, so that G is not negative there."""
    q = (1 - EPSILON) * F.one_hot(LABELS, C) + EPSILON / C
    options = {"label_smoothing": EPSILON} | ({} if weight is None else {"weight": weight})
    f = (q.log() + noise * torch.randn(B, C)).bfloat16().double()
    row = hard(f=f, **options)
    for factor in (1.0, 10.0):
        found = read_targets(row.declared, *left_by(row, dtype, factor))
        assert torch.equal(found.y, LABELS)
        # p − q is a difference of rounded numbers; what is left of it is relative to |p − q|, about the noise / C.
        assert found.ratio == pytest.approx(factor, rel=ROUNDING[dtype] * max(1, 0.1 / noise))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_labels_are_right_although_the_loss_divides_the_output_by_a_temperature(temperature):
    """But the gradient is not a multiple of the declared one, unless the output is nearly zero."""
    row = hard(loss=lambda function, f, y: function(f / temperature, y))
    for given_too in ([], [row.y]):
        found = read_targets(row.declared, *left_by(row, torch.float64), given=given_too)
        assert torch.equal(found.y, LABELS)
        assert found.ratio == pytest.approx(1 / temperature, rel=0.2)
        assert found.residual > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("margin", [5.0, 20.0, 40.0, 60.0])
def test_the_factor_is_found_although_predictions_are_nearly_perfect(margin, dtype):
    """All gradients are then far smaller than κ, and their squares may underflow."""
    row = hard(f=margin * F.one_hot(LABELS, C) + numbers(B, C) / 4)
    for given_too in ([], [row.y]):
        found = read_targets(row.declared, *left_by(row, dtype, 3.0), given=given_too)
        assert torch.equal(found.y, LABELS)
        assert found.ratio == pytest.approx(3, rel=0.02)


def test_weights_of_classes_and_soft_targets():
    """Which weights a distribution contains cannot be read off the gradient, so these targets must be given."""
    for reduction in ("mean", "sum"):
        row = soft(weight=WEIGHT, reduction=reduction)
        left = left_by(row, torch.float64)
        found = read_targets(row.declared, *left, given=[row.y])
        assert found.ratio == pytest.approx(1)
        assert_close(found.y, row.y, 0)
        f = numbers(B, C, seed=7)
        assert found.multiple() * found.mean(f) == pytest.approx(float(row.of(f)))


def test_weights_of_classes_without_reduction_are_not_divided_out():
    """The mean of reduction="none" divides by the number of targets, not by Σ w_y: that is r."""
    row = hard(weight=WEIGHT, reduction="none", loss=averaged)
    found = read_targets(row.declared, *left_by(row, torch.float64))
    assert found.ratio == pytest.approx(float(WEIGHT[LABELS].mean()))
    assert torch.equal(found.y, LABELS)


def test_given_targets_that_are_not_those_of_the_loss_are_not_believed():
    row = ROWS["mean"]
    for wrong in (other(row.y), row.y[:-1], row.y.double(), torch.zeros(B, C), torch.tensor(0)):
        found = read_targets(row.declared, *left_by(row, torch.float32), given=[wrong])
        assert_is(found, row, torch.float32)
    found = read_targets(row.declared, *left_by(row, torch.float32), given=[other(row.y), row.y])
    assert_is(found, row, torch.float32)


def test_several_targets_ignored_together_with_their_examples():
    row = ROWS["(B T, C), ignored"]
    found = read_targets(row.declared, *left_by(row, torch.float64))
    part = found.select(lambda tensor: tensor[::2])
    f = row.f[::2]
    y = row.y[::2]
    assert part.mean(f) == pytest.approx(float(F.cross_entropy(f.flatten(0, 1), y.flatten())))
    assert part.multiple() == pytest.approx(1)


class Poisson(Likelihood):
    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.exp())


def test_the_loss_of_a_users_own_likelihood_needs_its_targets():
    f = numbers(B, 3) / 4
    y = torch.poisson(f.exp())
    loss = declared_loss(Poisson())
    G = 3 * torch.autograd.functional.jacobian(lambda f: Poisson().nll(f, y).mean(), f)
    found = read_targets(loss, f, G, given=[y])
    assert found.ratio == pytest.approx(3)
    assert found.mean(f) == pytest.approx(float(Poisson().nll(f, y).mean()))
    assert found.multiple() == pytest.approx(3)
    assert read_targets(loss, f, G) is None
    wrong = read_targets(loss, f, f.cos(), given=[y])
    assert wrong.residual > 0.1


class SinglePrecision(Poisson):
    """Its nll accepts float32 only, as one with float32 parameters does."""

    def nll(self, output, y):
        return super().nll(output @ torch.eye(3), y)


def test_a_users_own_likelihood_is_evaluated_in_the_dtype_of_the_output():
    f = (numbers(B, 3) / 4).float()
    y = torch.poisson(f.exp())
    single = Targets(declared_loss(SinglePrecision()), y)
    double = Targets(declared_loss(Poisson()), y.double())
    along = torch.randn(B, 3)
    assert single.mean(f) == pytest.approx(double.mean(f.double()), rel=1e-5)
    assert_close(single.slopes(f, [along]), double.slopes(f.double(), [along.double()]), 1e-5)


@pytest.mark.parametrize("name", ["mean", "nll", "bits, (B, m)", "numbers, (B, m)"])
def test_a_gradient_of_zero_is_explained_by_no_wrong_targets(name):
    row = ROWS[name]
    found = read_targets(row.declared, row.f, torch.zeros_like(row.f))
    assert found is None or found.ratio == 1 or found.residual > 0.1  # it says nothing about r


# The assertion itself -------------------------------------------------------------------------------------------------

WRONG = {
    "another reduction": lambda found: replace(found, ratio=found.ratio * B),
    "another label": lambda found: replace(found, y=found.y.roll(1)),
    "one ignored": lambda found: replace(found, counted=torch.arange(B) > 0),
    "unexplained": lambda found: replace(found, residual=0.5),
    "another loss": lambda found: replace(found, loss=declared_loss(partial(F.cross_entropy, label_smoothing=0.1))),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_assertion_fails_for_another_loss(name):
    row = ROWS["mean"]
    found = read_targets(row.declared, *left_by(row, torch.float64))
    with pytest.raises(AssertionError):
        assert_is(WRONG[name](found), row, torch.float64)


def test_the_assertion_fails_for_other_soft_targets():
    row = ROWS["soft"]
    found = read_targets(row.declared, *left_by(row, torch.float64))
    with pytest.raises(AssertionError, match="off by"):
        assert_is(replace(found, y=0.99 * found.y + 0.01 / C), row, torch.float64)
