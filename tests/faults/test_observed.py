"""What a step observes of a model: which calls count, and what passes of our own leave behind."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from training import EXACT, assert_same_path, batches, train

f64 = torch.float64
X, Y = classification(60, 5, 3)
MANY = classification(400, 5, 3)  # so many that an evaluation takes a part of them
EVERY = {"lr": 0.1, "every": 1, "options": EXACT}


# Passes of our own ----------------------------------------------------------------------------------------------------


class Merging(nn.Identity):
    """Would merge a low-rank update into a weight in eval mode, as some implementations of LoRA do."""

    merges = 0

    def train(self, mode: bool = True) -> Merging:
        self.merges += not mode
        return super().train(mode)


def test_modes_are_set_without_a_call_of_eval() -> None:
    model = nn.Sequential(Merging(), mlp(5, 4, 3))
    train(model, bprong.BPRONG(model, nn.CrossEntropyLoss()), batches(*MANY, 400, 3))
    assert model[0].merges == 0
    assert model[0].training


def test_embeddings_are_not_renormalised_by_passes_of_our_own() -> None:
    """Looking up a row scales it down to max_norm, in place: only the user's own passes may do that."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(7, 4, max_norm=0.5, dtype=f64)
            self.head = nn.Linear(4, 3, dtype=f64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rows(x))

    model = Words()
    words = torch.arange(40) % 7
    y = torch.arange(40) % 3
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss())
    optimizer.zero_grad()
    F.cross_entropy(model(words), y).backward()
    optimizer.step()
    longest = float(model.rows.weight.norm(dim=1).max().detach())
    assert longest > 0.5 + 1e-6, "the step made a row longer, and nothing has scaled it down since"


def test_arrays_and_tuples_of_a_model_are_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(5, 4, 3)
            self.array = np.zeros(1)
            self.pair = ([0], torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.array += 1
            self.pair[0][0] += 1
            self.pair[1].add_(1)
            return self.body(x)

    model = Counting()
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss())
    train(model, optimizer, batches(X, Y, 20, 3))
    assert (model.array[0], model.pair[0][0], float(model.pair[1])) == (3, 3, 3)


def test_what_a_model_returns_in_eval_mode_does_not_matter() -> None:
    """Logits alone in eval mode, and more in training."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(5, 4, 3)

        def forward(self, x: Tensor) -> Any:
            logits = self.body(x)
            return {"out": logits, "features": x} if self.training else logits

    model = Two()
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), options={"output": "out"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, batches(*MANY, 400, 3), loss=lambda found, y: F.cross_entropy(found["out"], y))


def test_a_model_that_writes_to_its_input_is_evaluated_on_what_it_was_given() -> None:
    class Centring(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.body = mlp(5, 4, 3)
            self.in_place = in_place

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.sub_(1.0) if self.in_place else x - 1.0)

    ends = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = Centring(in_place)
        optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss())
        train(model, optimizer, ((x.clone(), y) for x, y in batches(X, Y, 20, 6)))
        ends.append(snapshot(model))
    assert_same_path(ends[1], ends[0], 1e-10)


# Which calls count ----------------------------------------------------------------------------------------------------


def test_gradients_thrown_away_do_not_count_although_another_parameter_has_an_old_one() -> None:
    """A model of which this optimizer trains a part; nobody clears the gradients of the rest."""
    ends = []
    for discards in (False, True):
        torch.manual_seed(0)
        model = mlp(5, 4, 3)
        optimizer = bprong.BPRONG(model, "cross_entropy", params=model[0].parameters(), **EVERY)
        for x, y in batches(X, Y, 20, 4):
            if discards:
                F.cross_entropy(model(3 * x + 1), y).backward()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(snapshot(model))
    assert_unchanged(ends[0], ends[1])


@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
def test_a_call_on_a_detached_branch_does_not_count(method: Any) -> None:
    """As in SimSiam and BYOL: the same layer runs on another view, whose features are targets."""

    class Siamese(nn.Module):
        def __init__(self, branch: bool) -> None:
            super().__init__()
            self.body = mlp(5, 4, 3)
            self.branch = branch

        def forward(self, x: Tensor) -> Tensor:
            if self.branch:
                self.target = self.body(5 * x + 2).detach()
            return self.body(x)

    ends = []
    for branch in (False, True):
        torch.manual_seed(0)
        model = Siamese(branch)
        train(
            model, method(model, "cross_entropy", **(EVERY if method is bprong.BPRONG else {"every": 1})), [(X, Y)] * 3
        )
        ends.append(snapshot(model))
    assert_unchanged(ends[0], ends[1])


def test_the_declared_module_counts_and_not_a_loss_inside_of_the_model() -> None:
    """A quantiser with a loss of its own on wider features."""

    class Quantised(nn.Module):
        def __init__(self, auxiliary: bool) -> None:
            super().__init__()
            self.body = mlp(5, 8)
            self.head = mlp(8, 3)
            self.auxiliary = auxiliary

        def forward(self, x: Tensor) -> Tensor:
            z = self.body(x)
            self.commitment = F.mse_loss(z, z.detach().round()) if self.auxiliary else 0.0
            return self.head(z)

    ends = []
    for auxiliary in (False, True):
        torch.manual_seed(0)
        model = Quantised(auxiliary)
        criterion = nn.MSELoss()
        optimizer = bprong.BPRONG(model, criterion, **EVERY)
        train(model, optimizer, [(X, X[:, :3])] * 3, loss=criterion)
        ends.append(snapshot(model))
    assert_unchanged(ends[0], ends[1])


def test_an_input_changed_later_is_copied_if_hooks_keep_copies_of_saved_tensors() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 4, dtype=f64)
            self.head = nn.Linear(4, 3, dtype=f64)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            a = self.first(x)
            x.zero_()  # its memory is used for something else
            return self.head(a.tanh())

    model = Reused()
    optimizer = bprong.BPRONG(model, "cross_entropy", **EVERY)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):  # as save_on_cpu does on a GPU
        loss = F.cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()
    assert_close(optimizer._whitening.layers["first"].c, X.mean(dim=0), 1e-12)


class Labelled(Tensor):
    """A tensor with labels, whose operations need them."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is Tensor.reshape:
            result.labels = args[0].labels
        return result


def test_inputs_of_a_subclass_of_tensor_are_measured_as_tensors() -> None:
    ends = []
    for kind in (Tensor, Labelled):
        torch.manual_seed(0)
        model = mlp(5, 4, 3)
        optimizer = bprong.BPRONG(model, "cross_entropy", **EVERY)
        train(
            model,
            optimizer,
            [(X.as_subclass(kind), Y)] * 2,
            loss=lambda f, y: F.cross_entropy(f.as_subclass(Tensor), y),
        )
        ends.append(snapshot(model))
    assert_unchanged(ends[0], ends[1])


# Smaller --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [-1, 255])
def test_the_empirical_fisher_matrix_with_targets_that_are_ignored(ignored: int) -> None:
    y = Y.clone()
    y[::3] = ignored
    ends = []
    for index, targets in ((-100, torch.where(y == ignored, -100, y)), (ignored, y)):
        torch.manual_seed(0)
        model = mlp(5, 4, 3)
        criterion = nn.CrossEntropyLoss(ignore_index=index)
        options = {"fisher": "empirical", "average": 0.0}
        optimizer = bprong.BPRONG(model, criterion, lr=0.1, every=1, options=options)
        train(model, optimizer, [(X, targets)] * 3, loss=criterion)
        ends.append(snapshot(model))
    assert_unchanged(ends[0], ends[1])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("lr", [0.1, "auto"])
def test_a_layer_without_inputs_is_left_to_its_bias(lr: Any) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Linear(0, 3, dtype=f64)
            self.body = mlp(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + self.nothing(x[:, :0])

    model = Empty()
    train(model, bprong.BPRONG(model, "cross_entropy", lr=lr), [(X, Y)] * 2)
    assert model.nothing.bias.grad is not None


def test_a_given_period_holds_after_loading_a_state_with_an_automatic_one() -> None:
    model = mlp(5, 4, 3)
    first = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    train(model, first, [(X, Y)] * 3)
    second = bprong.BPRONG(model, "cross_entropy", lr=0.1, every=3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    refreshed = []
    for _ in range(7):
        train(model, second, [(X, Y)])
        refreshed.append(second._whitening.layers["0"].forward.refreshed_at)
    assert refreshed == [3, 3, 3, 6, 6, 6, 9]


def test_no_hooks_gather_on_a_parameter_that_the_model_returns() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(5, 3)
            self.scale = nn.Parameter(torch.ones(1, 1, dtype=f64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.scale, self.body(x) * self.scale[0, 0]

    model = Returning()
    optimizer = bprong.PRONG(model)  # without a loss it takes the first tensor
    with pytest.raises(RuntimeError, match="there is no batch to measure"):
        train(model, optimizer, [(X, Y)], loss=lambda found, y: F.cross_entropy(found[1], y))
    assert not model.scale._backward_hooks
