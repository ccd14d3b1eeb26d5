"""What is done to gradients between the backward pass and the step is seen at a few parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automatic import DATA, auto, loss_of
from bprong.rescaled import WATCHED, Rescaled, watched
from bprong.schedule import WhiteningWarning
from helpers import mlp, snapshot
from training import EXACT, assert_same_path, batches, train


class Extra(nn.Module):
    """Its last layer is used now and then."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.extra = mlp(5, 4), mlp(4, 3), mlp(4, 3)
        self.used = True

    def forward(self, x):
        z = self.body(x).tanh()
        return self.head(z) + (self.extra(z) if self.used else 0)


def changed(model, optimizer, how, steps=20, every=7):
    for t, (x, y) in enumerate(batches(*DATA, 20, steps)):
        model.used = t % every == 0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        how(list(model.parameters()))
        optimizer.step()
    return snapshot(model)


def test_clipping_is_seen_though_the_last_layer_has_no_gradient():
    torch.manual_seed(1)
    model = Extra()
    other = copy.deepcopy(model)
    expected = changed(model, auto(model, options=EXACT), lambda ps: None)
    clipped = changed(other, auto(other, options=EXACT), lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3))
    assert_same_path(clipped, expected, 1e-6)


def values(parameters):
    nn.utils.clip_grad_value_(parameters, 1e-3)


def each(parameters):
    for p in parameters:
        nn.utils.clip_grad_norm_([p], 1e-3)


def head(parameters):
    parameters[-1].grad *= 0.01


@pytest.mark.parametrize("how", [values, each, head])
def test_more_than_one_factor_is_none_and_said_once(how):
    """So a head whose gradient is scaled is not taken for all: the step stays of the size it would have without."""
    model = mlp(5, 4, 3)
    optimizer, before = auto(model), loss_of(model)
    with pytest.warns(WhiteningWarning, match="more than one factor") as said:
        changed(model, optimizer, how)
    assert len(said) == 1
    assert loss_of(model) < before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_factor_is_one_in_every_precision(dtype):
    parameters = [torch.randn(n, dtype=dtype, requires_grad=True) for n in (1, 3, 50)]
    rescaled, owner = Rescaled(), nn.Identity()
    rescaled.attach(parameters, owner)
    for size in (1.0, 0.37, 1e-6, 3e4):
        sum((p * torch.randn_like(p)).sum() for p in parameters).backward()
        for p in parameters:
            p.grad *= size
        assert rescaled.factor(parameters) == pytest.approx(size, rel=0.02 if dtype is torch.bfloat16 else 1e-6)
        for p in parameters:
            p.grad = None
    assert rescaled.factor(parameters) == 1


def test_few_and_small_parameters_are_watched_and_only_trained_ones():
    model = mlp(5, 50, 50, 50, 50, 3)
    model[-1].requires_grad_(False)
    chosen = watched(model.parameters())
    assert len(chosen) == WATCHED
    assert {id(p) for p in chosen} == {id(layer.bias) for layer in model[:-1:2]}
    assert watched(model[-1].parameters()) == []


@pytest.mark.parametrize("frozen", ["2.bias", "2.weight", "0.weight"])
def test_parameters_that_are_given_may_be_frozen(frozen):
    """The path is that of the others given alone; and the state of what has none is not asked for."""
    model = mlp(5, 4, 3)
    model.get_parameter(frozen).requires_grad_(False)
    other = copy.deepcopy(model)
    optimizer = auto(model, params=model.parameters(), options=EXACT)
    train(model, optimizer, batches(*DATA, 20, 12))
    trained = [p for p in other.parameters() if p.requires_grad]
    train(other, auto(other, params=trained, options=EXACT), batches(*DATA, 20, 12))
    assert_same_path(snapshot(model), snapshot(other))


def test_a_layer_of_somebody_else_has_no_state_here():
    model = mlp(5, 4, 3)
    optimizer = auto(model, params=model[0].parameters())
    train(model, optimizer, batches(*DATA, 20, 2))
    assert {id(p) for p in optimizer.state} == {id(p) for p in model[0].parameters()}
    optimizer.state_dict()
