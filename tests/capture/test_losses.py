"""Calls of torch's loss functions are seen however they are written, and only while somebody watches."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, nll_loss

import bprong
from bprong.capture.listener import watched_losses
from bprong.likelihood.declared import KINDS
from helpers import mlp

x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
y = torch.arange(12) % 3
BITS = F.one_hot(y, 3).double()
PLACES = {kind.end: torch._C._nn if hasattr(torch._C._nn, kind.end) else torch for kind in KINDS.values()}
ORIGINALS = {(place, end): getattr(place, end) for end, place in PLACES.items()}
WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def assert_originals():
    for (place, end), original in ORIGINALS.items():
        assert getattr(place, end) is original


def assert_replaced():
    for (place, end), original in ORIGINALS.items():
        assert getattr(place, end) is not original


# What is seen of a call -----------------------------------------------------------------------------------------------

CALLS = {
    "cross_entropy": (
        (cross_entropy, F.cross_entropy, nn.functional.cross_entropy, nn.CrossEntropyLoss()), y,
        {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0},
    ),
    "nll_loss": (
        (nll_loss, F.nll_loss, nn.NLLLoss()), y, {"reduction": "mean", "ignore_index": -100},
    ),
    "binary_cross_entropy_with_logits": (
        (binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()), BITS,
        {"reduction": "mean"},
    ),
    "mse_loss": ((mse_loss, F.mse_loss, nn.MSELoss()), BITS, {"reduction": "mean"}),
}  # fmt: skip


@pytest.mark.parametrize("function", CALLS)
def test_a_call_is_seen_under_any_name(function):
    losses, target, options = CALLS[function]
    for loss in (*losses, functools.partial(losses[0], reduction="mean")):
        input = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
        with watched_losses() as calls:
            value = loss(input, target)
        (call,) = calls
        assert call.function == function
        assert call.input is input
        assert torch.equal(call.target, target)
        assert {name: option for name, option in call.options.items() if option is not None} == options
        assert torch.equal(call.value, value)
        assert not call.value.requires_grad


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_options_of_a_call_are_seen(reduction):
    input = torch.randn(12, 3, dtype=torch.float64)
    with watched_losses() as calls:
        F.cross_entropy(input, y, WEIGHT, ignore_index=2, reduction=reduction, label_smoothing=0.1)
        F.binary_cross_entropy_with_logits(input, BITS, reduction=reduction, pos_weight=WEIGHT)
    classes, bits = (call.options for call in calls)
    assert classes["weight"] is WEIGHT
    assert bits["pos_weight"] is WEIGHT
    assert (classes["ignore_index"], classes["label_smoothing"]) == (2, 0.1)
    assert classes["reduction"] == bits["reduction"] == reduction


def test_the_gradient_that_arrives_at_the_value_is_the_factor():
    input = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    with watched_losses() as calls:
        value = F.cross_entropy(input, y)
    (7 * value + input.square().sum()).backward()
    (call,) = calls
    ((task, gradient),) = call.gradients.items()
    assert gradient == 7
    assert not call.count({task + 1})  # of another backward pass
    assert call.gradient == 0
    assert call.count({task})
    assert call.count({task})  # which is counted once
    assert call.gradient == 7


def test_nothing_is_seen_after_the_watch_has_ended():
    with watched_losses() as calls:
        assert_replaced()
    assert_originals()
    F.cross_entropy(x[:, :3], y)
    assert calls == []


def test_a_watch_within_another_ends_alone():
    with watched_losses() as outer:
        with watched_losses() as inner:
            F.cross_entropy(x[:, :3], y)
        F.cross_entropy(x[:, :3], y)
        assert_replaced()
    assert (len(outer), len(inner)) == (2, 1)
    assert_originals()


# An optimizer's watch -------------------------------------------------------------------------------------------------


def test_torchs_functions_are_the_originals_again_after_a_step():
    model = mlp(4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy")
    assert_originals()
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        assert_replaced()
        loss.backward()
        optimizer.step()
        assert_originals()


def test_torchs_functions_are_the_originals_again_after_an_error_in_a_step():
    model = mlp(4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy")
    F.mse_loss(model(x), BITS).backward()
    with pytest.raises(RuntimeError, match="was not called with the output of the model"):
        optimizer.step()
    del optimizer
    assert_originals()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_torchs_functions_are_the_originals_again_after_an_error_in_forward(error):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.fails = True

        def forward(self, x):
            if self.fails:
                raise error
            return self.layer(x)

    model = Fails().double()
    optimizer = bprong.BPRONG(model, "cross_entropy")
    with pytest.raises(error):
        model(x)
    if error is ValueError:  # after an interrupt, the next step ends what the call began
        assert_originals()
    model.fails = False
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert_originals()


def test_torchs_functions_are_the_originals_again_without_the_optimizer():
    model = mlp(4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy")
    output = model(x)
    assert_replaced()
    del optimizer
    assert_originals()
    cross_entropy(output, y).backward()


def test_of_two_optimizers_each_watches_until_its_own_step():
    models = [mlp(4, 3), mlp(4, 3)]
    optimizers = [bprong.BPRONG(model, "cross_entropy") for model in models]
    for model in models:
        cross_entropy(model(x), y).backward()
    optimizers[0].step()
    assert_replaced()
    optimizers[1].step()
    assert_originals()


def test_a_loss_of_an_unrelated_model_between_forward_and_step_is_not_taken():
    model = mlp(4, 3)
    other = mlp(4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy")
    output = model(x)
    cross_entropy(other(x), 2 - y).backward()
    loss = 3 * cross_entropy(output, y)
    loss.backward()
    cross_entropy(other(x), 2 - y).backward()
    (batch,) = optimizer._recorder.seen()
    (term,) = batch.targets.terms
    assert torch.equal(term.y, y)
    assert term.multiple == 3
    assert batch.targets.total == pytest.approx(loss.item())


def test_a_loss_that_no_backward_pass_reaches_is_not_taken():
    """Such as one that is only printed."""
    model = mlp(4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy")
    output = model(x)
    cross_entropy(output, 2 - y)
    cross_entropy(output.detach(), 2 - y)
    cross_entropy(output, y).backward()
    (batch,) = optimizer._recorder.seen()
    (term,) = batch.targets.terms
    assert torch.equal(term.y, y)
