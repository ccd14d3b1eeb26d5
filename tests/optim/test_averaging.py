"""Averaged weights: torch's own AveragedModel serves, under every rule, without any change to the loop."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import bprong
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from training import EXACT, batches, train

RULES = {
    "natural": {"lr": 0.05, "momentum": 0.9},
    "spectral": {"lr": 0.02, "step": "spectral"},
    "auto": {"lr": "auto"},
    "auto, spectral": {"lr": "auto", "step": "spectral"},
}


def trained(rule, averaged, model=None):
    """A network after some steps, and its average, if one is asked for."""
    torch.manual_seed(0)
    model = mlp(5, 6, 3) if model is None else model
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), **RULES[rule], options=EXACT)
    average = AveragedModel(model) if averaged else None
    path = []
    for batch in batches(*classification(60, 5, 3), 20, 12):
        train(model, optimizer, [batch])
        path.append(snapshot(model))
        if average is not None:
            average.update_parameters(model)
    return model, average, path


@pytest.mark.parametrize("rule", RULES)
def test_an_average_does_not_disturb_training(rule):
    assert_unchanged(snapshot(trained(rule, False)[0]), snapshot(trained(rule, True)[0]))


@pytest.mark.parametrize("rule", RULES)
def test_it_is_the_mean_of_ordinary_weights(rule):
    _, average, path = trained(rule, True)
    for name, value in average.module.state_dict().items():
        assert_close(value, torch.stack([weights[name] for weights in path]).mean(0), 1e-12, name)


def test_calls_of_the_average_do_not_count():
    """Neither its forward passes nor update_bn, which runs it in training mode, is taken for training."""
    x, y = classification(60, 5, 3)
    paths = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.02, step="spectral", every=2, options=EXACT)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for batch in batches(x, y, 20, 8):
            train(model, optimizer, [batch])
            average.update_parameters(model)
            if evaluated:
                update_bn([x], average)
                average.eval()(x)
        paths.append(snapshot(model))
    assert_unchanged(*paths)


@pytest.mark.parametrize("rule", RULES)
def test_a_scheduler_multiplies_the_step(rule):
    """At half the lr each parameter moves half as far: from the same state, along the same direction."""
    x, y = classification(60, 5, 3)
    torch.manual_seed(0)
    model = mlp(5, 6, 3)
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), **RULES[rule], every=100, options=EXACT)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # from now on the bound of natural steps follows lr
    train(model, optimizer, [(x, y)])
    steps = []
    for factor in (1.0, 0.5):
        own, own_optimizer = copy.deepcopy((model, optimizer))
        if rule == "natural":  # without what was there before, which has its own length
            own_optimizer.state.clear()
        for group in own_optimizer.param_groups:
            group["lr"] *= factor
        before = snapshot(own)
        train(own, own_optimizer, [(x, y)])
        steps.append({name: value - before[name] for name, value in snapshot(own).items()})
    if rule == "auto":  # which shortens Δ₀ and chooses α once more
        lengths = [sum(float(s.square().sum()) for s in step.values()) ** 0.5 for step in steps]
        assert lengths[1] < 0.75 * lengths[0]
        return
    for name, step in steps[0].items():
        assert_close(steps[1][name], step / 2, 1e-6, name)
