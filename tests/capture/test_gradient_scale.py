"""The factor on gradients between the backward pass and the step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automatic import DATA, auto, loss_of
from bprong import WhiteningWarning
from bprong.capture.recorder import GradientScale
from bprong.parallel.processes import ALONE
from helpers import mlp, snapshot
from training import EXACT, assert_same_path, batches, train


class Extra(nn.Module):
    """Its last layer is used in some steps only."""

    def __init__(self):
        super().__init__()
        self.body = mlp(5, 4)
        self.head = mlp(4, 3)
        self.extra = mlp(4, 3)
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


def test_clipping_is_noticed_although_the_last_layer_has_no_gradient():
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
def test_several_factors_are_not_corrected_and_there_is_one_warning(how):
    """The factor on a head alone is not used for all parameters, so training still works."""
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    before = loss_of(model)
    with pytest.warns(WhiteningWarning, match="more than one factor") as warned:
        changed(model, optimizer, how)
    assert len(warned) == 1
    assert loss_of(model) < before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_single_factor_is_found_in_every_precision(dtype):
    parameters = [torch.randn(n, dtype=dtype, requires_grad=True) for n in (1, 3, 50)]
    scale = GradientScale()
    for size in (1.0, 0.37, 1e-6, 3e4):
        sum((p * torch.randn_like(p)).sum() for p in parameters).backward()
        scale.note(parameters)
        for p in parameters:
            p.grad *= size
        _, factor = scale.compare({p: p.grad for p in parameters}, ALONE)
        assert factor == pytest.approx(size, rel=0.02 if dtype is torch.bfloat16 else 1e-6)
        for p in parameters:
            p.grad = None
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert scale.compare({p: p.grad for p in parameters}, ALONE)[1] == 1  # nothing was noted


def test_a_backbone_frozen_after_construction_does_not_hide_the_scale_of_mixed_precision():
    """GradScaler multiplies the loss by 2¹⁶ and divides gradients by it before the step."""
    model = mlp(5, 4, 4, 4, 4, 3)
    other = copy.deepcopy(model)
    ends = []
    for own, scale in ((model, 1.0), (other, 2.0**16)):
        optimizer = auto(own, options=EXACT)
        own[:-1].requires_grad_(False)
        for x, y in batches(*DATA, 20, 12):
            optimizer.zero_grad()
            (scale * F.cross_entropy(own(x), y)).backward()
            for p in own[-1].parameters():
                p.grad /= scale
            optimizer.step()
        ends.append(snapshot(own))
    assert_same_path(ends[1], ends[0], 1e-9)


@pytest.mark.parametrize("frozen", ["2.bias", "2.weight", "0.weight"])
def test_parameters_that_are_given_may_be_frozen(frozen):
    """The path is the same as if only the others were given."""
    model = mlp(5, 4, 3)
    model.get_parameter(frozen).requires_grad_(False)
    other = copy.deepcopy(model)
    optimizer = auto(model, params=model.parameters(), options=EXACT)
    train(model, optimizer, batches(*DATA, 20, 12))
    trained = [p for p in other.parameters() if p.requires_grad]
    train(other, auto(other, params=trained, options=EXACT), batches(*DATA, 20, 12))
    assert_same_path(snapshot(model), snapshot(other))


def test_a_layer_of_another_optimizer_has_no_state_in_this_one():
    model = mlp(5, 4, 3)
    optimizer = auto(model, params=model[0].parameters())
    train(model, optimizer, batches(*DATA, 20, 2))
    assert {id(p) for p in optimizer.state} == {id(p) for p in model[0].parameters()}
    optimizer.state_dict()
