"""Batches kept for the next step: what is kept, what is read off their gradients, and copies that carry none."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.batches import Batch, Batches, OutputGradient, without_listening
from bprong.likelihood.families import Categorical
from helpers import mlp, snapshot
from layered import stepped
from training import EXACT


def test_a_target_predicted_with_certainty_is_not_taken_for_an_ignored_one():
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 0)
    model.bias.data = torch.tensor([300.0, 0.0, -300.0])
    model.weight.data[0, 0] = 1000.0
    x = torch.randn(30, 4)
    x[:, 0] = torch.linspace(-1, 1, 30)
    optimizer = stepped(model, x, torch.where(x[:, 0] > -0.3, 0, 2))
    weight = optimizer._whitening.layers[""].forward.moments.weight
    assert weight == 30


def test_several_backward_passes_through_one_output():
    model = mlp(4, 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.arange(6) % 3
    optimizer = bprong.BPRONG(model, options=EXACT)
    output = model(x)
    F.cross_entropy(output[:3], y[:3]).backward(retain_graph=True)
    F.cross_entropy(output[3:5], y[3:5]).backward()
    optimizer.step()
    assert optimizer._whitening.layers["0"].forward.moments.weight == 5


def test_classes_in_the_second_dimension_raise_an_error():
    model = nn.Conv1d(4, 5, 3, padding=1)
    optimizer = bprong.BPRONG(model)
    before = snapshot(model)
    F.cross_entropy(model(torch.randn(6, 4, 7)), torch.randint(5, (6, 7))).backward()
    with pytest.raises(ValueError, match=r"of shape \(6, 5, 7\), the loss has them in the second"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in snapshot(model).items())


# What is kept ---------------------------------------------------------------------------------------------------------


def listening(model, **options):
    return Batches(model, Categorical(), keep_gradients=False, **options)


def test_training_calls_are_kept_in_order_until_they_are_forgotten():
    model = mlp(4, 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.arange(6) % 3
    y[2] = -100
    batches = listening(model)
    F.cross_entropy(model(x), y).backward()
    model(input=x + 1)
    with torch.no_grad():
        model(x)
    with without_listening():
        model(x)
    model.eval()(x)
    (first, mask), (second, nothing) = batches.calls()
    assert first.args[0] is x
    assert mask.tolist() == (y != -100).tolist()
    assert second.kwargs["input"] is not x
    assert nothing is None
    assert len(batches.calls()) == 2  # calls are kept until they are forgotten
    batches.forget()
    assert batches.calls() == []


def test_nothing_is_kept_unless_it_is_wanted():
    model = mlp(4, 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    batches = listening(model, wanted=False)
    model(x)
    batches.observe(x)
    assert batches.to_measure(empirical=False, backward=True) == []
    batches.forget()
    batches.listener.wanted = True
    model(x)
    assert len(batches.to_measure(empirical=False, backward=True)) == 1


def test_observed_batches_are_measured_instead_of_calls():
    model = mlp(4, 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.arange(6) % 3
    batches = listening(model)
    model(x + 1)
    y[0] = -100
    batches.observe(x, y)
    (batch,) = batches.to_measure(empirical=False, backward=True)
    assert batch.x is x
    assert batch.y is y
    assert batch.counted.tolist() == [False, True, True, True, True, True]
    assert not batch.inferred


def test_targets_and_their_mask_are_read_off_the_gradient():
    model = mlp(4, 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.arange(6) % 3
    y[1] = -100
    batches = Batches(model, Categorical(), keep_gradients=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    (batch,) = batches.to_measure(empirical=True, backward=True)
    assert torch.equal(batch.y, y)
    assert not batch.inferred
    (batch,) = batches.to_measure(empirical=False, backward=True)
    assert batch.y is None
    assert batch.counted.tolist() == (y != -100).tolist()
    assert batch.inferred
    ((_, read),) = batches.calls()
    assert isinstance(read, OutputGradient)
    assert read.value == loss


def test_a_batch_is_copied_with_the_rows_of_its_targets():
    x = torch.arange(8.0).view(4, 2)
    y = torch.arange(12)  # three targets for each example
    batch = Batch({"x": x, "scale": torch.tensor(2.0), "half": x.half()}, y, y > 4).copied(2, torch.float64)
    assert batch.x["x"].tolist() == [[0, 1], [4, 5]]
    assert batch.x["scale"] == 2
    assert batch.x["half"].dtype is torch.float64
    assert batch.y.tolist() == [0, 1, 2, 6, 7, 8]
    assert batch.counted.tolist() == [False] * 3 + [True] * 3
    whole = Batch(x).copied(None, torch.float64)
    assert torch.equal(whole.x, x)
    assert whole.x.data_ptr() != x.data_ptr()


# Copies ---------------------------------------------------------------------------------------------------------------

CLONES = {"deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
@pytest.mark.parametrize("keep_gradients", [True, False])
def test_copies_carry_no_batches_and_listen_to_their_own_model(clone, keep_gradients):
    model = mlp(4, 3)
    x = torch.randn(6, 4, dtype=torch.float64)
    batches = Batches(model, Categorical(), keep_gradients)
    F.cross_entropy(model(x), torch.arange(6) % 3).backward()
    batches.calls()
    F.cross_entropy(model(x), torch.arange(6) % 3).backward()
    batches.observe(x)
    other_model, other = clone((model, batches))
    assert other.model is other_model
    assert other.observed == []
    assert other.calls() == []
    other.forget()
    F.cross_entropy(other_model(x), torch.arange(6) % 3).backward()
    assert len(other.calls()) == 1
    assert len(batches.calls()) == 2
    assert len(other_model._forward_pre_hooks) == len(other_model._forward_hooks) == 1
    assert len(other_model._forward_pre_hooks_with_kwargs) == 1


@pytest.mark.parametrize("lr", [0.1, "auto"])
def test_an_optimizer_copied_between_forward_and_step_carries_no_batch(lr):
    """A batch would be most of the pickle: 80 kB beside a model of 15 numbers."""
    model = mlp(4, 3)
    x = torch.randn(2500, 4, dtype=torch.float64)
    optimizer = bprong.BPRONG(model, lr=lr)
    before = len(pickle.dumps(optimizer))
    F.cross_entropy(model(x), torch.arange(2500) % 3).backward()
    optimizer.observe(x)
    optimizer._batches.calls()
    for p in model.parameters():
        p.grad = None
    assert len(pickle.dumps(optimizer)) < before + 1000


def test_hooks_end_with_their_owner():
    model = mlp(4, 3)
    batches = listening(model)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    del batches
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
