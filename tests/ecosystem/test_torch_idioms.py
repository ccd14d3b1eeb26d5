"""Idioms of torch that the packages use: functional calls, packed sequences, computed weights, shared modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import bprong
from helpers import assert_close, classification, mlp, snapshot
from tiny import optimizer_of, train
from training import assert_same_path, batches

# That most parameters of an LSTM follow the fallback rule, and that some functions have no forward-mode derivative.
uncovered = pytest.mark.filterwarnings("ignore::bprong.WhiteningWarning")
both_rates = pytest.mark.parametrize("lr", [0.05, "auto"])


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    return list(batches(*classification(60, 5, 3), 20, steps))


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


@both_rates
@pytest.mark.parametrize("strict", [False, True])
def test_functional_call_with_the_models_own_parameters(lr: Any, strict: bool) -> None:
    """`torch.func.functional_call` with the parameters themselves is a call of the model."""
    model = mlp(5, 6, 3)
    plain = copy.deepcopy(model)

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(functional_call(model, dict(model.named_parameters()), (x,), strict=strict), y)

    train(model, optimizer_of(model, lr=lr), data(6), loss_of)
    train(plain, optimizer_of(plain, lr=lr), data(6), classified)
    assert_same_path(snapshot(model), snapshot(plain), 1e-10)


class Tagger(nn.Module):
    """A classifier of every element of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(5, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.head(self.body(packed.data).tanh())


class Recurrent(nn.Module):
    """An LSTM over packed sequences, and a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(5, 6, dtype=torch.float64)
        self.lstm = nn.LSTM(6, 6, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][0])


@both_rates
def test_packed_sequences_as_input(lr: Any) -> None:
    """The rows of a packed sequence are those of its elements."""
    x, y = classification(60, 5, 3)
    sequences = x.split([9, 8, 8, 7, 7, 6, 5, 4, 3, 3])
    packed = pack_sequence(list(sequences))
    targets = pack_sequence(list(y.split([len(sequence) for sequence in sequences]))).data
    tagger = Tagger()
    plain = nn.Sequential(copy.deepcopy(tagger.body), nn.Tanh(), copy.deepcopy(tagger.head))
    train(tagger, optimizer_of(tagger, lr=lr), [(packed, targets)] * 6, classified)
    train(plain, optimizer_of(plain, lr=lr), [(packed.data, targets)] * 6, classified)
    assert_same_path(snapshot(tagger), snapshot(plain), 1e-9)


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Sequences, their lengths, and the class of each."""
    x = torch.randn(12, 6, 5, dtype=torch.float64)
    return x, torch.arange(12) % 4 + 3, torch.arange(12) % 3


def last_state(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, lengths, y = batch
    return F.cross_entropy(model(x, lengths), y)


@both_rates
@uncovered
def test_packed_sequences_inside_a_model(lr: Any) -> None:
    """A recurrent network on packed sequences learns; its linear layers are whitened and its LSTM is not."""
    model = Recurrent()
    optimizer = optimizer_of(model, lr=lr)
    losses = train(model, optimizer, [padded()] * 8, last_state)
    assert losses[-1] < 0.98 * losses[0]
    assert all(name.startswith("lstm.") for name in optimizer.report().fallback)


@uncovered
def test_padding_that_packing_removes_does_not_count() -> None:
    """Rows that packing leaves out enter no statistics: the path does not depend on what they contain."""
    x, lengths, y = padded()
    filled = torch.where((torch.arange(6) < lengths[:, None])[..., None], x, 100.0)
    ends = []
    for rows in (x, filled):
        model = Recurrent()
        train(model, optimizer_of(model), [(rows, lengths, y)] * 4, last_state)
        ends.append(snapshot(model))
    assert_same_path(ends[1], ends[0], 1e-8)


def weight_norm(layer: nn.Linear) -> nn.Module:
    return parametrizations.weight_norm(layer)


def old_weight_norm(layer: nn.Linear) -> nn.Module:
    return nn.utils.weight_norm(layer)


def spectral_norm(layer: nn.Linear) -> nn.Module:
    return parametrizations.spectral_norm(layer)


def orthogonal(layer: nn.Linear) -> nn.Module:
    return parametrizations.orthogonal(layer)


class Symmetric(nn.Module):
    """The symmetric part of a matrix."""

    def forward(self, X: Tensor) -> Tensor:
        return (X + X.mT) / 2


def symmetric(layer: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@both_rates
@pytest.mark.parametrize("computed", [weight_norm, old_weight_norm, spectral_norm, orthogonal, symmetric])
@uncovered
def test_a_weight_computed_from_parameters(computed: Callable[[nn.Linear], nn.Module], lr: Any) -> None:
    """Its parameters follow the fallback rule, which `report` says; the other layers are whitened, and it learns."""
    model = mlp(5, 6, 6, 6, 3)
    model[2] = computed(model[2])
    optimizer = optimizer_of(model, lr=lr)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, optimizer, data(1) * 8, classified)
    assert losses[-1] < 0.95 * losses[0]
    fallback = optimizer.report().fallback
    assert fallback
    assert all(name.startswith("2.") for name in fallback)
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_weight_norm_old_and_new_take_one_path() -> None:
    """Both kinds of weight norm have the same parameters g and v, which move alike."""
    ends = []
    for kind in (weight_norm, old_weight_norm):
        torch.manual_seed(1)
        model = mlp(5, 6, 6, 6, 3)
        model[2] = kind(model[2])
        train(model, optimizer_of(model), data(6), classified)
        ends.append(model(data(1)[0][0]))
    assert_close(ends[1], ends[0], 1e-9)


class Twice(nn.Module):
    """A body under two names, as in many detection and self-supervised models; it is called once."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.stages = nn.ModuleList(list(plain))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


@both_rates
def test_a_module_with_two_names(lr: Any) -> None:
    """A module that is registered twice is one module, not two that share a weight: it is whitened."""
    plain = mlp(5, 6, 3)
    twice = Twice(copy.deepcopy(plain))
    assert not bprong.coverage(twice).fallback
    optimizer = optimizer_of(twice, lr=lr)
    train(twice, optimizer, data(6), classified)
    train(plain, optimizer_of(plain, lr=lr), data(6), classified)
    assert not optimizer.report().fallback
    assert_same_path(snapshot(twice.plain), snapshot(plain), 1e-10)


def test_two_modules_that_share_a_weight_are_still_tied() -> None:
    """One parameter in two modules is tied, whatever the modules are called."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    assert bprong.coverage(model).fallback["0.weight"].startswith("tied")
