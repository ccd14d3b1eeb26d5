"""Checkpoints by torch.distributed.checkpoint, which keeps what is in the states of parameters and nothing else."""

import copy
import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import bprong
from helpers import assert_unchanged, classification, mlp, quick_cases, snapshot
from training import train

X, Y = classification(60, 5, 3)
ALONE = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}  # older torch finds out itself
FLATTENS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)  # states that hold a dict
RULES = {
    "fixed": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9, "every": 2},
    "low rank": {"lr": 0.05, "options": {"solver": "low-rank"}},
    "spectral": {"lr": 0.01, "step": "spectral"},
    "auto": {},
    "auto, spectral": {"step": "spectral"},
}


def with_norm():
    """A network in which some parameters follow the fallback rule."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 3)).double()


def started(rule, model):
    return bprong.BPRONG(model, "cross_entropy", **RULES[rule])


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize(
    "flat",
    [False, pytest.param(True, marks=pytest.mark.skipif(not FLATTENS, reason="torch < 2.10 flattens no dict"))],
    ids=["nested", "flattened"],
)
@pytest.mark.parametrize("steps", quick_cases([1, 7], 7))
@pytest.mark.parametrize("rule", quick_cases(RULES, "momentum", "spectral", "auto"))
def test_a_run_continues_bit_for_bit(rule, steps, flat, tmp_path):
    model = with_norm()
    optimizer = started(rule, model)
    train(model, optimizer, [(X, Y)] * steps)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    dcp.save(saved, checkpoint_id=tmp_path, **ALONE)
    other = with_norm()
    resumed = started(rule, other)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, resumed, options=options), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path, **ALONE)
    set_state_dict(
        other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
    )
    assert resumed.report().steps == steps
    for trained, by in ((model, optimizer), (other, resumed)):
        train(trained, by, [(X, Y)] * 12)
    assert_unchanged(snapshot(model), snapshot(other))


@pytest.mark.parametrize("rule", RULES)
def test_a_step_without_gradients_creates_all_states_and_changes_nothing(rule):
    model, twin = with_norm(), with_norm()
    optimizer, untouched = started(rule, model), started(rule, twin)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.report().steps == 0
    assert_unchanged(snapshot(twin), snapshot(model))
    created = {i: set(own) for i, own in copy.deepcopy(optimizer.state_dict())["state"].items()}
    optimizer.zero_grad()
    for trained, by in ((model, optimizer), (twin, untouched)):
        train(trained, by, [(X, Y)] * 3)
    assert {i: set(own) for i, own in untouched.state_dict()["state"].items()} == created
    assert_unchanged(snapshot(twin), snapshot(model))


@pytest.mark.parametrize("rule", ["low rank", "auto"])
def test_keys_and_shapes_depend_on_the_model_alone(rule):
    """Whatever was measured, and whichever form factors have."""
    forms = []
    for steps in (0, 1, 5):
        model = mlp(5, 4, 3)
        optimizer = started(rule, model)
        train(model, optimizer, [(X, Y)] * steps)
        state = optimizer.state_dict()["state"]
        forms.append([_form(state[i]["bprong"]) for i in range(4)])
    assert forms[0] == forms[1] == forms[2]


def _form(nested):
    """The keys, with the shapes of tensors; a number has none."""
    if isinstance(nested, dict):
        return {key: _form(value) for key, value in nested.items()}
    assert isinstance(nested, (torch.Tensor, int, float))
    return getattr(nested, "shape", None)


@pytest.mark.parametrize("rule", RULES)
def test_a_bias_that_is_trained_alone_keeps_its_layer(rule):
    """As in fine-tuning of biases: the weight is not among the parameters."""

    def frozen():
        torch.manual_seed(0)
        model = mlp(5, 20, 3)
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(False)
        return model, started(rule, model)

    (model, optimizer), (other, resumed) = frozen(), frozen()
    train(model, optimizer, [(X, Y)] * 6)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for trained, by in ((model, optimizer), (other, resumed)):
        train(trained, by, [(X, Y)] * 6)
    assert_unchanged(snapshot(model), snapshot(other))
