"""The table of κ and targets: for every loss of torch, which targets it was given and what −log p is multiplied by.

    loss = r Σ_t κ_t (−log p(y_t | f_t))

A row of the table has the loss as a user computes it, and κ and y written down independently. From the calls of the
loss function and what the backward pass brings back to them, `targets_of` must find the same loss as a function of the
output: in float64, in float32 and under bf16 autocast, where the output and its gradient are bf16.
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
from torch import Tensor, nn

from bprong.capture.tape import laid_out
from bprong.likelihood.declared import declared_loss
from bprong.likelihood.loss import Targets
from helpers import assert_close, quick_cases
from training import recorder_of

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
    scalar             whether κ is one number for each target; else no Σκ is defined
    """

    function: Any
    options: dict[str, Any]
    f: Tensor
    y: Tensor
    q: Tensor
    kappa: Tensor
    loss: Callable[..., Tensor] = plain
    scalar: bool = True

    @property
    def declared(self):
        word = isinstance(self.function, str)
        return declared_loss(self.function if word else partial(self.function, **self.options))

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
        return laid_out(f, self.class_dim)

    def by_hand(self, f: Tensor) -> Tensor:
        """Σ κ (−log p)"""
        return (self.kappa * NLL[self.function](self.laid_out(f).reshape(self.q.shape), self.q)).sum()


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
    w_y = w[labels.clamp(0, C - 1)] * counted
    epsilon = options.get("label_smoothing", 0.0)
    one_hot = F.one_hot(labels.clamp(0, C - 1), C) * w_y[:, None]
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
    rows = laid_out(q, 1).reshape(-1, C) if second else q.reshape(-1, C)
    total = 1 if options.get("reduction") == "sum" else len(rows)
    weighted = rows * options.get("weight", 1.0)
    kappa = weighted.sum(dim=-1, keepdim=True) / total
    mean = weighted / weighted.sum(dim=-1, keepdim=True)
    return Row(F.cross_entropy, options, f, q, mean, kappa, loss, scalar="weight" not in options)


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
    "none, ignored, weights": replace(
        hard(ignored=True, weight=WEIGHT, reduction="sum", ignore_index=255),
        options={"weight": WEIGHT, "reduction": "none", "ignore_index": 255},
        loss=lambda function, f, y: function(f, y).sum(),
    ),
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
    return Row(function, options, f, y, q, kappa, loss, scalar=not weighted)


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


class Returns(nn.Module):
    """A model whose output is its parameter."""

    def __init__(self, f: Tensor) -> None:
        super().__init__()
        self.f = nn.Parameter(f)

    def forward(self) -> Tensor:
        return 1 * self.f


def seen(loss: Callable[[Tensor], Tensor], f: Tensor, declared: Any) -> Targets | None:
    """What the backward pass of a loss shows of its targets."""
    model = Returns(f.clone())
    batches = recorder_of(model, declared)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=f.dtype is torch.bfloat16):
        value = loss(model())
    value.backward()
    (batch,) = batches.seen()
    return batch.targets


def assert_is(found: Targets, row: Row, dtype, ratio=1.0):
    """What was found is r times the loss of the row, as a function of the output."""
    eps = ROUNDING[dtype]
    counted = row.counted if found.counted is None else found.counted.flatten()
    assert torch.equal(counted, row.counted)
    assert found.total == pytest.approx(ratio * float(row.by_hand(row.f.to(dtype).double())), rel=4 * eps)
    if len(found.terms) == 1:
        y = row.y if not row.y.is_floating_point() else row.laid_out(row.y)
        assert_close(found.y.reshape(y.shape), y, eps)
    for seed in (0, 5):  # where the gradient was, and elsewhere
        f = (row.f.to(dtype) if seed == 0 else numbers(*row.f.shape, seed=seed)).to(torch.float64, copy=True)
        f.requires_grad_()
        expected = ratio * row.by_hand(f)
        along = numbers(*row.f.shape, seed=seed + 1)
        (slope,) = torch.autograd.grad(expected, f)
        if row.scalar:
            assert found.multiple == pytest.approx(ratio * float(row.kappa.sum()) / row.kappa.shape[-1], rel=eps)
        assert found.multiple * found.mean(row.laid_out(f)) == pytest.approx(expected.item(), rel=4 * eps)
        (found_slope,) = found.slopes(row.laid_out(f), [row.laid_out(along)])
        size = float(slope.norm() * along.norm())
        assert found.multiple * found_slope == pytest.approx(float((slope * along).sum()), abs=4 * eps * size)


@pytest.mark.parametrize("name", ROWS)
def test_the_table_itself(name):
    """κ and q by hand give the loss that torch computes."""
    row = ROWS[name]
    assert_close(row.by_hand(row.f), row.of(row.f), 1e-12)


@pytest.mark.parametrize("dtype", quick_cases(DTYPES, torch.float32))
@pytest.mark.parametrize("name", ROWS)
def test_the_calls_of_a_loss_show_what_it_is_of_the_output(name, dtype):
    row = ROWS[name]
    assert_is(seen(row.of, row.f.to(dtype), row.declared), row, dtype)


@pytest.mark.parametrize("factor", [1e-6, 0.3, 2.0**16])
@pytest.mark.parametrize("name", ["mean", "weights, sum", "none, then mean", "mixup, two losses", "numbers, (B, m)"])
def test_a_factor_on_the_loss_is_the_gradient_that_comes_back_to_its_value(name, factor):
    row = ROWS[name]
    declared = row.declared
    assert_is(seen(lambda f: factor * row.of(f) + f.square().sum(), row.f, declared), row, torch.float64, factor)


@given(
    seed=st.integers(0, 100),
    options=st.fixed_dictionaries(
        {"label_smoothing": st.sampled_from([0.0, EPSILON]), "reduction": st.sampled_from(["mean", "sum"])}
    ),
    shape=st.sampled_from([(B, C), (B, C, T), (4, C, 3, 2)]),
    ignored=st.booleans(),
)
def test_any_options_together(seed, options, shape, ignored):
    row = hard(shape, f=numbers(*shape, seed=seed), ignored=ignored, **options)
    assert_is(seen(row.of, row.f, row.declared), row, torch.float64)


@pytest.mark.parametrize("shape", [(B, C), (B, 1), (C,)])
def test_weights_of_elements_are_those_of_the_examples_that_are_selected(shape):
    weight = 2.0 ** numbers(*shape, seed=4).round()
    f = numbers(B, C)
    y = (numbers(B, C, seed=1) > 0).double()
    found = seen(lambda f: BCE(f, y, weight=weight), f, declared_loss("bce_with_logits"))
    chosen = torch.arange(0, B, 3)
    part = found.select(lambda rows: rows[chosen])
    whole = weight.expand(B, C)[chosen]
    expected = BCE(f[chosen], y[chosen], weight=whole, reduction="sum") / whole.sum() * C
    assert part.mean(f[chosen]) == pytest.approx(float(expected))


# What the loss is given -----------------------------------------------------------------------------------------------

LM = hard((B, T, C), loss=flattened)
GIVEN = {
    "a slice": lambda f, y: F.cross_entropy(f[:, -1], y[:, -1]),
    "shifted": lambda f, y: F.cross_entropy(f[:, :-1].reshape(-1, C), y[:, 1:].flatten()),
    "shifted, with padding": lambda f, y: F.cross_entropy(
        f[:, :-1].reshape(-1, C), y[:, 1:].masked_fill(y[:, 1:] == 2, -100).flatten()
    ),
    "a further term of the same function": lambda f, y: F.cross_entropy(f.mT, y) + 0 * F.cross_entropy(2 * f.mT, y),
    "a mask": lambda f, y: F.cross_entropy(f[y > 1], y[y > 1]),
    "two slices": lambda f, y: F.cross_entropy(f[:5].mT, y[:5]) + F.cross_entropy(f[5:].mT, y[5:]),
    "transposed": lambda f, y: F.cross_entropy(f.transpose(1, 2), y),
    "copied": lambda f, y: F.cross_entropy(f.clone().flatten(0, 1), y.flatten()),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_loss_of_a_part_of_the_output_counts_these_rows(name):
    """Σ over its rows, in the right places: the gradient at the output is that of the targets found."""
    f = LM.f.clone().requires_grad_()
    loss = partial(GIVEN[name], y=LM.y)
    (G,) = torch.autograd.grad(loss(f), f)
    found = seen(loss, LM.f, LM.declared)
    along = numbers(*f.shape, seed=3)
    (slope,) = found.slopes(LM.f, [along])
    if name == "two slices":  # one mean over all rows, which have two weights in the user's loss
        assert found.multiple == pytest.approx(2.0)
    else:
        assert found.multiple * slope == pytest.approx(float((G * along).sum()))
        assert found.total == pytest.approx(found.multiple * found.mean(LM.f))
    counted = torch.ones(B, T, dtype=torch.bool) if found.counted is None else found.counted
    assert torch.equal(counted, (G != 0).any(dim=-1))


def test_as_many_positions_as_classes_leave_no_doubt_where_the_classes_are():
    f = numbers(B, C, C)
    y = torch.arange(B * C).reshape(B, C) % C
    for loss in (lambda f: F.cross_entropy(f, y), lambda f: F.cross_entropy(f.transpose(1, 2), y)):
        leaf = f.clone().requires_grad_()
        (G,) = torch.autograd.grad(loss(leaf), leaf)
        found = seen(loss, f, declared_loss("cross_entropy"))
        along = numbers(*f.shape, seed=3)
        outputs = [f, along] if loss(f.transpose(1, 2)) == F.cross_entropy(f, y) else [f.mT, along.mT]
        (slope,) = found.slopes(outputs[0], [outputs[1]])
        assert slope == pytest.approx(float((G * along).sum()))


@pytest.mark.parametrize("change", [lambda f: f / 2, lambda f: f.flip(0), lambda f: f.softmax(-1), lambda f: f[:3] * 2])
def test_a_loss_of_something_other_than_the_output_shows_no_targets(change):
    f = numbers(B, C)
    loss = lambda f: F.cross_entropy(change(f), LABELS[: len(change(f))])  # noqa: E731
    assert seen(loss, f, declared_loss("cross_entropy")) is None


def test_a_loss_of_a_single_number_shows_no_targets():
    f = numbers(B, C)
    assert seen(lambda f: F.mse_loss(f.mean(), torch.zeros(())), f, declared_loss("mse")) is None


def test_two_calls_with_complementary_masks_count_the_union_of_their_targets():
    f = numbers(B, C)
    first, second = (LABELS.masked_fill(torch.arange(B) % 3 == rest, -100) for rest in (0, 1))
    found = seen(lambda f: F.cross_entropy(f, first) + F.cross_entropy(f, second), f, declared_loss("cross_entropy"))
    assert found.counted is None
    assert found.multiple * found.mean(f) == pytest.approx(
        float(F.cross_entropy(f, first) + F.cross_entropy(f, second))
    )


def test_targets_that_the_user_gives_no_weight_are_not_counted():
    f = numbers(4, 2, 3)
    weights = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    y = torch.tensor([[0, 1], [2, 0], [1, 1], [-100, 2]])
    losses = {
        "cross_entropy": lambda f: (weights * F.cross_entropy(f.mT, y, reduction="none")).sum(),
        "mse": lambda f: (weights[..., None] * F.mse_loss(f, torch.zeros_like(f), reduction="none")).sum(),
    }
    for name, loss in losses.items():
        found = seen(loss, f, declared_loss(name))
        assert torch.equal(found.counted, (weights != 0) & (y >= 0) if name == "cross_entropy" else weights != 0)


def test_an_ascent_is_no_loss():
    loss = lambda f: -0.1 * F.cross_entropy(f, LABELS)  # noqa: E731
    assert seen(loss, numbers(B, C), declared_loss("cross_entropy")) is None


def test_memory_that_is_used_again_is_not_taken_for_the_output():
    """Nothing keeps the output itself, so that its memory may be that of the second operation's result."""
    declared = declared_loss("cross_entropy")
    for size in (64, 4096):
        f = numbers(size, C)
        y = torch.arange(size) % C
        assert seen(lambda f, y=y: F.cross_entropy((f - 0.5) * 0.1, y), f, declared) is None


def test_squared_errors_may_be_given_in_either_order():
    f, y = numbers(B, C), numbers(B, C, seed=1)
    found = seen(lambda f: F.mse_loss(y, f), f, declared_loss("mse"))
    assert_close(found.y, y, 1e-12)


@pytest.mark.parametrize("name", ["smoothing", "ignored", "weights, sum", "bits, (B, m)", "numbers, (B, T, m)"])
def test_the_assertion_fails_for_another_loss(name):
    row = ROWS[name]
    found = seen(row.of, row.f, row.declared)
    for wrong in (replace(row, kappa=2 * row.kappa), replace(row, q=row.q.roll(1, 0), y=row.y.roll(1, 0))):
        with pytest.raises(AssertionError):
            assert_is(found, wrong, torch.float64)
