"""Which batches are kept until the step, the targets that belong to them, and copies of what keeps them."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.listener import own_pass
from bprong.capture.own_pass import Subset, examples, rows_of
from bprong.capture.tape import Batch
from bprong.likelihood.declared import declared_loss
from bprong.likelihood.loss import Targets
from helpers import mlp
from layered import stepped
from training import EXACT, recorder_of

x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
y = torch.arange(6) % 3
IGNORED = y.masked_fill(torch.arange(6) == 1, -100)


def listening(model, loss="cross_entropy", **options):
    return recorder_of(model, declared_loss(loss), **options)


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
    (batch,) = optimizer._recorder.seen()
    assert batch.counted.tolist() == [True] * 5 + [False]
    assert torch.equal(batch.targets.y[:5], y[:5])
    assert batch.targets.multiple == pytest.approx(1)
    assert batch.targets.mean(output) == pytest.approx(F.cross_entropy(output[:5], y[:5]).item())
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
    first, second = batches.seen()
    assert torch.equal(first.x.args[0], x)
    assert first.counted.tolist() == (IGNORED != -100).tolist()
    assert second.x.kwargs["input"] is not x
    assert second.counted is None
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


def test_a_batch_that_is_changed_in_place_is_kept_as_it_was():
    model = mlp(4, 3)
    batches = listening(model)
    changed = x.clone()
    F.cross_entropy(model(changed), y).backward()
    changed.add_(1)
    (batch,) = batches.seen()
    assert torch.equal(batch.x.args[0], x)


# Targets --------------------------------------------------------------------------------------------------------------


def test_a_call_of_the_loss_function_shows_its_targets_and_which_of_them_count():
    model = mlp(4, 3)
    batches = listening(model)
    output = model(x)
    F.cross_entropy(output, IGNORED).backward()
    (batch,) = batches.seen()
    assert torch.equal(batch.output, output)
    assert torch.equal(batch.targets.y, IGNORED)
    assert batch.targets.counted.tolist() == batch.counted.tolist() == (IGNORED >= 0).tolist()
    assert batch.counts


def test_without_a_call_of_the_loss_the_gradient_at_the_output_shows_which_targets_count():
    model = mlp(4, 3)
    batches = listening(model)
    log_p = model(x).log_softmax(-1)
    (-log_p[IGNORED >= 0, IGNORED[IGNORED >= 0]].mean()).backward()
    (batch,) = batches.seen()
    assert batch.targets is None
    assert batch.reached.tolist() == batch.counted.tolist() == (IGNORED >= 0).tolist()


@pytest.mark.parametrize("loss", ["F.cross_entropy", "by hand"])
def test_a_batch_whose_targets_are_all_ignored_does_not_count(loss):
    model = mlp(4, 3)
    batches = listening(model)
    output = model(x)
    nothing = F.cross_entropy(output, torch.full_like(y, -100), reduction="sum")
    (nothing if loss == "F.cross_entropy" else 0 * output.sum()).backward()
    (batch,) = batches.seen()
    assert not batch.counts


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
    assert len(batch.targets.terms) == (2 if name == "twice" else 1)
    assert all(torch.equal(term.y, y) for term in batch.targets.terms)
    assert batch.targets.multiple == pytest.approx(1)


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
    (term,) = batch.targets.terms
    assert torch.equal(term.y, y)


def test_targets_of_squared_errors_are_kept_without_their_graph():
    model = mlp(4, 3)
    criterion = nn.MSELoss()
    batches = listening(model, criterion)
    output = model(x)
    target = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    criterion(output, target).backward()
    (batch,) = batches.seen()
    assert not batch.targets.y.requires_grad
    assert torch.equal(batch.targets.y, target)
    assert batch.targets.terms[0].multiple == pytest.approx(
        2 / 3
    )  # of the mean −log p: half of a squared error, times three


def test_observed_batches_are_measured_instead_of_calls():
    model = mlp(4, 3)
    batches = listening(model)
    model(x + 1)
    batches.observed.append((x, IGNORED))
    (batch,) = batches.seen()
    assert batch.x is x
    assert batch.targets.y is IGNORED
    assert batch.counted.tolist() == (IGNORED >= 0).tolist()
    assert batch.targets.terms[0].multiple == 1


def test_observed_batches_have_the_outputs_and_factors_of_as_many_calls():
    model = mlp(4, 3)
    batches = listening(model)
    (3 * F.cross_entropy(model(x), y)).backward()
    batches.observed.append((x, y))
    (batch,) = batches.seen()
    assert batch.output is not None
    assert batch.targets.multiple == pytest.approx(3)
    batches.observed.append((x, y))
    assert all(batch.output is None and batch.targets.multiple == 1 for batch in batches.seen())


def test_observed_targets_of_a_loss_by_hand_are_laid_out_like_the_output():
    model = nn.Conv2d(4, 3, 1)
    batches = listening(model)
    labels = torch.arange(6 * 8).reshape(6, 2, 4) % 3
    inputs = torch.randn(6, 4, 2, 4)
    log_p = model(inputs).log_softmax(1)
    (-log_p.gather(1, labels[:, None]).mean()).backward()
    batches.observed.append((inputs, labels))
    (batch,) = batches.seen()
    assert batch.output.shape == (6, 8, 3)
    assert torch.equal(batch.targets.y, labels.flatten(1))
    assert batch.targets.mean(batch.output) == pytest.approx(-log_p.gather(1, labels[:, None]).mean().item(), rel=1e-5)


@pytest.mark.parametrize("size", [(5,), (2, 4)])
def test_classes_in_the_second_dimension_are_moved_to_the_last(size):
    model = (nn.Conv1d if len(size) == 1 else nn.Conv2d)(4, 3, 1)
    batches = listening(model)
    labels = torch.arange(6 * math.prod(size)).reshape(6, *size) % 3
    F.cross_entropy(model(torch.randn(6, 4, *size)), labels).backward()
    (batch,) = batches.seen()
    assert batch.class_dim == 1
    assert batch.output.shape == (6, math.prod(size), 3)
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
    assert batch.output.shape == (6, 5, 3)
    assert batch.targets.y.shape == ((6, 5) if loss == "cross_entropy" else (6, 5, 3))


def test_images_with_classes_in_the_last_dimension_are_rows_of_positions():
    model = nn.Linear(4, 3)
    batches = listening(model)
    labels = torch.arange(6 * 8).reshape(6, 2, 4) % 3
    F.cross_entropy(model(torch.randn(6, 2, 4, 4)).flatten(0, -2), labels.flatten()).backward()
    (batch,) = batches.seen()
    assert batch.output.shape == (6, 8, 3)
    assert torch.equal(batch.targets.y, labels.flatten(1))


# Subsets of a batch ---------------------------------------------------------------------------------------------------


def test_a_part_of_a_batch_has_the_rows_of_its_targets():
    inputs = torch.arange(8.0).view(4, 2)
    targets = torch.arange(12)  # three targets for each example
    given = {"x": inputs, "scale": torch.tensor(2.0), "half": inputs.half()}
    subset = Subset(2, examples(given))
    part = rows_of(given, subset, torch.float64)
    assert part["x"].tolist() == [[0, 1], [4, 5]]
    assert part["scale"] == 2
    assert part["half"].dtype is torch.float64
    assert subset.rows(targets).tolist() == [0, 1, 2, 6, 7, 8]
    assert torch.equal(rows_of(targets, subset, torch.float64), targets)
    assert torch.equal(rows_of(inputs, Subset(4, 4), torch.float64), inputs)


def test_a_batch_is_divided_only_if_outputs_and_targets_are():
    inputs = torch.zeros(4, 2)
    loss = declared_loss("cross_entropy")
    targets = Targets.observed(loss, torch.zeros(3, dtype=torch.long))
    assert Subset.of(Batch(inputs), 2) == Subset(2, 4)
    assert Subset.of(Batch(inputs, torch.zeros(8, 3)), 2) == Subset(2, 4)
    assert Subset.of(Batch(inputs, torch.zeros(7, 3)), 2) == Subset(4, 4)
    assert Subset.of(Batch(inputs, targets=targets), 2) == Subset(4, 4)


# Copies ---------------------------------------------------------------------------------------------------------------

CLONES = {"deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


def listeners(module):
    """The listeners that stand before the call of a module, which has no hooks."""
    assert not module._forward_pre_hooks
    assert not module._forward_hooks
    before = []
    call = module._compiled_call_impl
    while call is not None:
        before.append(call.__self__)
        call = vars(call.__self__)["_compiled_call_impl"]
    return before


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_copies_carry_no_batches_and_listen_to_their_own_model_and_loss(clone):
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion)
    for _ in range(2):
        criterion(model(x), y).backward()
    batches.observed.append((x, None))
    other_model, other_criterion, other = clone((model, criterion, batches))
    assert other.model is other_model
    assert other.loss.given is other_criterion
    assert other.observed == other.seen() == []
    other_criterion(other_model(x), y).backward()
    (batch,) = other.seen()
    assert len(batch.targets.terms) == 1
    batches.observed.clear()
    assert [len(batch.targets.terms) for batch in batches.seen()] == [1, 1]
    assert listeners(other_model) == [other.listener]


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_a_model_and_a_loss_that_were_copied_without_their_optimizer_keep_nothing(clone):
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    batches = listening(model, criterion)
    other_model, other_criterion = clone((model, criterion))
    other_criterion(other_model(x), y).backward()
    assert batches.seen() == []
    assert listeners(other_model) == []
    assert listeners(model) == [batches.listener]


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
    optimizer._recorder.seen()
    for p in model.parameters():
        p.grad = None
    assert len(pickle.dumps(optimizer)) < before + 1000


def test_listeners_end_with_their_owner():
    model = mlp(4, 3)
    batches = listening(model)
    second = listening(model)
    assert set(listeners(model)) == {batches.listener, second.listener}
    del batches
    assert listeners(model) == [second.listener]
    del second
    assert listeners(model) == []
