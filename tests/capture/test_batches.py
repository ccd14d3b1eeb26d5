"""Which batches are kept until the step, the targets that belong to them, and copies of what keeps them."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.batches import Batch, OutputGradient, Subset, copied, examples
from bprong.capture.listener import Listener
from bprong.capture.output import Head
from bprong.capture.own_pass import own_pass
from bprong.capture.passes import Batches
from bprong.likelihood.loss import declared_loss
from helpers import assert_close, mlp
from layered import stepped
from training import EXACT

x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
y = torch.arange(6) % 3
IGNORED = y.masked_fill(torch.arange(6) == 1, -100)


def listening(model, loss="cross_entropy", **options):
    declared = declared_loss(loss)
    return Batches(model, declared, Head(None, declared.functions), **options)


# Which targets count --------------------------------------------------------------------------------------------------


def test_a_target_predicted_with_certainty_is_not_taken_for_an_ignored_one():
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 0)
    model.bias.data = torch.tensor([300.0, 0.0, -300.0])
    model.weight.data[0, 0] = 1000.0
    inputs = torch.randn(30, 4)
    inputs[:, 0] = torch.linspace(-1, 1, 30)
    optimizer = stepped(model, inputs, torch.where(inputs[:, 0] > -0.3, 0, 2), lr=0.01)
    weight = optimizer._whitening.layers[""].forward.moments.weight
    assert weight == 30


def test_several_backward_passes_through_one_output_are_one_batch():
    model = mlp(4, 3)
    optimizer = bprong.BPRONG(model, "categorical", lr=0.01, options=EXACT)
    output = model(x)
    for rows in (slice(0, 3), slice(3, 5)):
        (F.cross_entropy(output[rows], y[rows], reduction="sum") / 5).backward(retain_graph=True)
    (batch,) = optimizer._batches.seen()
    assert_close(batch.left.gradient[:5], (output.softmax(-1) - F.one_hot(y, 3))[:5] / 5, 1e-12)
    optimizer.step()
    assert optimizer._whitening.layers["0"].forward.moments.weight == 5


# What is kept ---------------------------------------------------------------------------------------------------------


def test_training_calls_are_kept_in_order_until_they_are_forgotten():
    model = mlp(4, 3)
    batches = listening(model)
    F.cross_entropy(model(x), IGNORED).backward()
    F.cross_entropy(model(input=x + 1), y).backward()
    with torch.no_grad():
        model(x)
    with own_pass():
        model(x)
    model.eval()(x)
    first, second = (batch.read(batches.loss) for batch in batches.seen())
    assert torch.equal(first.x.args[0], x)
    assert first.counted(batches.loss.likelihood).tolist() == (IGNORED != -100).tolist()
    assert second.x.kwargs["input"] is not x
    assert second.counted(batches.loss.likelihood) is None
    assert len(batches.seen()) == 2  # calls are kept until they are forgotten
    batches.forget()
    assert batches.seen() == []


def test_calls_that_no_backward_pass_reached_do_not_count():
    model = mlp(4, 3)
    batches = listening(model)
    model(x)
    assert batches.seen() == []
    F.cross_entropy(model(x + 1), y).backward()
    model(x + 2)
    (batch,) = batches.seen()
    assert torch.equal(batch.x.args[0], x + 1)


def test_only_calls_whose_gradients_were_set_to_zero_are_forgotten():
    model = mlp(4, 3)
    batches = listening(model)
    F.cross_entropy(model(x), y).backward()
    waiting = F.cross_entropy(model(x + 1), y)
    model.zero_grad()
    waiting.backward()
    (batch,) = batches.seen()
    assert torch.equal(batch.x.args[0], x + 1)


def test_nothing_is_read_unless_it_is_wanted():
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion, reads=False)
    criterion(model(x), y).backward()
    assert batches.seen() == []
    batches.reads = True
    criterion(model(x), y).backward()
    assert len(batches.seen()) == 1


def test_arguments_are_kept_only_if_they_are_wanted():
    model = mlp(4, 3)
    batches = listening(model, keeps=False)
    F.cross_entropy(model(x), y).backward()
    (batch,) = batches.seen()
    assert batch.x is None


def test_a_batch_that_was_changed_in_place_raises_an_error():
    model = mlp(4, 3)
    batches = listening(model)
    model(x)  # the first batch is copied, until it is known that the model itself does not change it
    changed = x.clone()
    F.cross_entropy(model(changed), y).backward()
    changed.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place between.*optimizer\.observe"):
        batches.seen()


def test_gradients_that_are_not_finite_belong_to_no_batch():
    model = mlp(4, 3)
    batches = listening(model)
    (torch.inf * F.cross_entropy(model(x), y)).backward()
    (batch,) = batches.seen()
    assert batch.left is None
    assert batch.read(batches.loss).targets is None


# Targets --------------------------------------------------------------------------------------------------------------


def test_targets_and_their_mask_are_read_off_the_gradient():
    model = mlp(4, 3)
    batches = listening(model)
    F.cross_entropy(model(x), IGNORED).backward()
    (batch,) = batches.seen()
    assert batch.given == ()
    read = batch.read(batches.loss)
    assert torch.equal(read.targets.y, IGNORED)
    assert read.targets.counted.tolist() == read.counted(batches.loss.likelihood).tolist() == (IGNORED >= 0).tolist()
    assert batch.counted(batches.loss.likelihood).tolist() == (IGNORED >= 0).tolist()


CALLS = {
    "by position": lambda criterion, output: criterion(output, y),
    "by name": lambda criterion, output: criterion(output, target=y),
    "all by name": lambda criterion, output: criterion(input=output, target=y),
    "twice": lambda criterion, output: 0.5 * criterion(output, y) + 0.5 * criterion(output, y),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_loss_module_shows_its_targets(name):
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion)
    CALLS[name](criterion, model(x)).backward()
    (batch,) = batches.seen()
    assert len(batch.given) == (2 if name == "twice" else 1)
    assert all(torch.equal(given, y) for given in batch.given)
    assert torch.equal(batch.read(batches.loss).targets.y, y)


def test_targets_of_validation_are_not_kept():
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion)
    criterion(torch.zeros(6, 3), y)  # before there is any call of the model
    loss = criterion(model(x), y)
    with torch.no_grad():
        criterion(model(x), 2 - y)
    with own_pass():
        criterion(model(x), 2 - y)
    loss.backward()
    (batch,) = batches.seen()
    assert len(batch.given) == 1
    assert torch.equal(batch.given[0], y)


def test_targets_of_squared_errors_are_kept_without_their_graph():
    model = mlp(4, 3)
    criterion = nn.MSELoss()
    batches = listening(model, criterion)
    output = model(x)
    target = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    criterion(output, target).backward()
    (batch,) = batches.seen()
    assert not batch.given[0].requires_grad
    found = batch.read(batches.loss).targets
    assert torch.equal(found.y, target)
    assert found.ratio == pytest.approx(1)


def test_observed_batches_are_measured_instead_of_calls():
    model = mlp(4, 3)
    batches = listening(model)
    model(x + 1)
    batches.observe(x, IGNORED)
    (batch,) = batches.seen()
    assert batch.x is x
    read = batch.read(batches.loss)
    assert read.targets.y is IGNORED
    assert read.counted(batches.loss.likelihood).tolist() == (IGNORED >= 0).tolist()
    assert read.targets.ratio == 1


def test_observed_batches_have_the_gradients_of_as_many_calls():
    model = mlp(4, 3)
    batches = listening(model)
    (3 * F.cross_entropy(model(x), y)).backward()
    batches.observe(x, y)
    (batch,) = (batch.read(batches.loss) for batch in batches.seen())
    assert batch.targets.ratio == pytest.approx(3)
    batches.observe(x, y)
    assert all(batch.left is None for batch in batches.seen())


@pytest.mark.parametrize("size", [(5,), (2, 4)])
def test_classes_in_the_second_dimension_are_moved_to_the_last(size):
    model = (nn.Conv1d if len(size) == 1 else nn.Conv2d)(4, 3, 1)
    batches = listening(model)
    labels = torch.arange(6 * math.prod(size)).reshape(6, *size) % 3
    F.cross_entropy(model(torch.randn(6, 4, *size)), labels).backward()
    (batch,) = (batch.read(batches.loss) for batch in batches.seen())
    assert batch.class_dim == 1
    assert batch.left.output.shape == batch.left.gradient.shape == (6, math.prod(size), 3)
    assert torch.equal(batch.targets.y, labels.flatten(1))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_classes_in_the_last_dimension_are_not_moved(loss):
    model = nn.Linear(4, 3)
    batches = listening(model, loss)
    output = model(torch.randn(6, 5, 4)).flatten(0, 1)
    labels = torch.arange(30) % 3
    value = F.cross_entropy(output, labels) if loss == "cross_entropy" else F.mse_loss(output, torch.randn(30, 3))
    value.backward()
    (batch,) = batches.seen()
    assert batch.class_dim is None
    assert batch.left.output.shape == (6, 5, 3)


def test_images_with_classes_in_the_last_dimension_are_rows_of_positions():
    model = nn.Linear(4, 3)
    batches = listening(model)
    labels = torch.arange(6 * 8).reshape(6, 2, 4) % 3
    F.cross_entropy(model(torch.randn(6, 2, 4, 4)).flatten(0, -2), labels.flatten()).backward()
    (batch,) = (batch.read(batches.loss) for batch in batches.seen())
    assert batch.left.output.shape == (6, 8, 3)
    assert torch.equal(batch.targets.y, labels.flatten(1))


# Subsets of a batch ---------------------------------------------------------------------------------------------------


def test_a_batch_is_copied_with_the_rows_of_its_targets():
    inputs = torch.arange(8.0).view(4, 2)
    targets = torch.arange(12)  # three targets for each example
    given = {"x": inputs, "scale": torch.tensor(2.0), "half": inputs.half()}
    subset = Subset(2, examples(given))
    part = copied(given, subset, torch.float64)
    assert part["x"].tolist() == [[0, 1], [4, 5]]
    assert part["scale"] == 2
    assert part["half"].dtype is torch.float64
    assert subset.rows(targets).tolist() == [0, 1, 2, 6, 7, 8]
    assert torch.equal(copied(targets, subset, torch.float64), targets)
    whole = copied(inputs, Subset(4, 4), torch.float64)
    assert torch.equal(whole, inputs)
    assert whole.data_ptr() != inputs.data_ptr()


def test_a_batch_is_divided_only_if_outputs_and_targets_are():
    inputs = torch.zeros(4, 2)
    loss = declared_loss("cross_entropy")
    left = OutputGradient(torch.zeros(8, 3), torch.zeros(8, 3))
    assert Batch(inputs).subset(2) == Subset(2, 4)
    assert Batch(inputs, left).subset(2) == Subset(2, 4)
    assert Batch(inputs, OutputGradient(torch.zeros(7, 3), torch.zeros(7, 3))).subset(2) == Subset(4, 4)
    assert Batch(inputs, given=(torch.zeros(3, dtype=torch.long),)).read(loss).subset(2) == Subset(4, 4)


# Copies ---------------------------------------------------------------------------------------------------------------

CLONES = {"deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


def listeners(module):
    """The listeners whose hooks a module has."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    assert len(module._forward_pre_hooks_with_kwargs) == len(module._forward_pre_hooks)
    assert len(module._forward_hooks_with_kwargs) == len(module._forward_hooks)
    return [hook if isinstance(hook, Listener) else hook.__self__ for hook in hooks]


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_copies_carry_no_batches_and_listen_to_their_own_model_and_loss(clone):
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion)
    for _ in range(2):
        criterion(model(x), y).backward()
    batches.observe(x)
    other_model, other_criterion, other = clone((model, criterion, batches))
    assert other.model is other_model
    assert other.loss.given is other_criterion
    assert other.observed == other.seen() == []
    other_criterion(other_model(x), y).backward()
    (batch,) = other.seen()
    assert len(batch.given) == 1
    batches.observed.clear()
    assert [len(batch.given) for batch in batches.seen()] == [1, 1]
    assert listeners(other_model) == [other.listener] * 2
    assert listeners(other_criterion) == [other.listener]


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_a_model_and_a_loss_that_were_copied_without_their_optimizer_keep_nothing(clone):
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion)
    other_model, other_criterion = clone((model, criterion))
    other_criterion(other_model(x), y).backward()
    assert batches.seen() == []
    assert all(listener.owner() is None for listener in listeners(other_model) + listeners(other_criterion))
    new = listening(other_model, other_criterion)  # which removes what was copied
    assert listeners(other_model) == [new.listener] * 2
    assert listeners(other_criterion) == [new.listener]
    assert listeners(model) == [batches.listener] * 2


@pytest.mark.parametrize("lr", [0.1, "auto"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), "cross_entropy"])
def test_an_optimizer_copied_between_forward_and_step_carries_no_batch(lr, loss):
    """A batch would be most of the pickle: 80 kB beside a model of 15 numbers."""
    model = mlp(4, 3)
    inputs = torch.randn(2500, 4, dtype=torch.float64)
    optimizer = bprong.BPRONG(model, loss, lr=lr)
    before = len(pickle.dumps(optimizer))
    criterion = loss if callable(loss) else F.cross_entropy
    criterion(model(inputs), torch.arange(2500) % 3).backward()
    optimizer.observe(inputs)
    optimizer._batches.seen()
    for p in model.parameters():
        p.grad = None
    assert len(pickle.dumps(optimizer)) < before + 1000


def test_hooks_end_with_their_owner():
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion)
    second = listening(mlp(4, 3), criterion)
    assert len(listeners(model)) == len(listeners(criterion)) == 2
    del batches
    assert listeners(model) == []
    assert listeners(criterion) == [second.listener]
