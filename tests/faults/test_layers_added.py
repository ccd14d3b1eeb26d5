"""Layers that are unfrozen or added in mid-training are whitened from the first step that trains them.

Without factors of its own a layer would follow its plain gradient until the next refresh, which may be a thousand
steps away.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from training import EXACT, literal

X, Y = classification(60, 5, 3)
Change = Callable[[nn.Sequential, bprong.BPRONG], list[str]]


def periodic(model: nn.Module, params: Any = None) -> bprong.BPRONG:
    return literal(model, "cross_entropy", lr=0.1, every=100, params=params, options=EXACT)


def drifting(model: nn.Module, params: Any = None) -> bprong.BPRONG:
    return literal(model, "cross_entropy", lr=0.1, params=params, options=EXACT)


def automatic(model: nn.Module, params: Any = None) -> bprong.BPRONG:
    return bprong.BPRONG(model, "cross_entropy", lr="auto", every=100, params=params, options=EXACT)


RULES = pytest.mark.parametrize("rule", [periodic, drifting, automatic])


def step(model: nn.Module, optimizer: bprong.BPRONG, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def start(rule: Callable[..., bprong.BPRONG], frozen: bool, given: bool) -> tuple[nn.Sequential, bprong.BPRONG]:
    """A perceptron after some steps; frozen: its first layer is not trained; given: but the optimizer has it."""
    torch.manual_seed(1)
    model = mlp(5, 6, 6, 3)
    model[0].requires_grad_(not frozen)
    optimizer = rule(model, list(model.parameters()) if given else None)
    step(model, optimizer, 13)
    return model, optimizer


# What happens in mid-training: changes the model and its optimizer, and returns the names of the layers that are new


def unfreeze(model: nn.Sequential, optimizer: bprong.BPRONG) -> list[str]:
    model[0].requires_grad_(True)
    return ["0"]


def unfreeze_and_give(model: nn.Sequential, optimizer: bprong.BPRONG) -> list[str]:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    return ["0"]


def replace_head(model: nn.Sequential, optimizer: bprong.BPRONG) -> list[str]:
    torch.manual_seed(2)
    model[4] = nn.Linear(6, 3, dtype=torch.float64)
    optimizer.add_param_group({"params": list(model[4].parameters())})
    return ["4"]


def append(model: nn.Sequential, optimizer: bprong.BPRONG) -> list[str]:
    torch.manual_seed(2)
    model.append(nn.Tanh())
    model.append(nn.Linear(3, 3, dtype=torch.float64))
    optimizer.add_param_group({"params": list(model[6].parameters())})
    return ["6"]


def insert_block(model: nn.Sequential, optimizer: bprong.BPRONG) -> list[str]:
    """Two layers at once, in a container that takes the place of an activation."""
    torch.manual_seed(2)
    model[3] = nn.Sequential(mlp(6, 4, 6), nn.Tanh())
    optimizer.add_param_group({"params": list(model[3].parameters())})
    return ["3.0.0", "3.0.2"]


def test_a_layer_that_is_unfrozen_and_not_given_is_named_once() -> None:
    torch.manual_seed(1)
    model = mlp(5, 6, 3)
    model[0].requires_grad_(False)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, every=2)
    step(model, optimizer, 3)
    model[0].requires_grad_(True)
    before = snapshot(model)
    with pytest.warns(bprong.WhiteningWarning, match=r"0\.weight, 0\.bias have gradients, but are not trained") as said:
        step(model, optimizer, 5)
    assert len(said) == 1
    assert torch.equal(snapshot(model)["0.weight"], before["0.weight"])


CHANGES: dict[str, tuple[Change, bool, bool]] = {  # the change; whether the layer is frozen, and given, at first
    "unfrozen": (unfreeze, True, True),
    "unfrozen and given": (unfreeze_and_give, True, False),
    "head replaced": (replace_head, False, False),
    "layer appended": (append, False, False),
    "block inserted": (insert_block, False, False),
}
CHANGED = pytest.mark.parametrize("change", CHANGES)


def moves(model: nn.Module, before: dict[str, Tensor], names: list[str]) -> Tensor:
    after = snapshot(model)
    parameters = [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    return torch.cat([(after[key] - before[key]).flatten() for key in parameters])


@RULES
@CHANGED
def test_its_first_step_is_that_of_an_optimizer_made_at_this_moment(
    rule: Callable[..., bprong.BPRONG], change: str
) -> None:
    """The same step at a fixed rate; under lr="auto", whose damping has moved meanwhile, nearly the same direction."""
    alter, frozen, given = CHANGES[change]
    model, optimizer = start(rule, frozen, given)
    names = alter(model, optimizer)
    other = copy.deepcopy(model)
    before = snapshot(model)
    step(model, optimizer)
    step(other, rule(other))
    ours = moves(model, before, names)
    theirs = moves(other, before, names)
    if rule is automatic:
        assert float(ours @ theirs / (ours.norm() * theirs.norm())) > 0.9
    else:
        assert_close(ours, theirs, 1e-9)


@RULES
@CHANGED
def test_its_factors_are_of_the_first_batch_that_trains_it(rule: Callable[..., bprong.BPRONG], change: str) -> None:
    alter, frozen, given = CHANGES[change]
    model, optimizer = start(rule, frozen, given)
    names = alter(model, optimizer)
    step(model, optimizer)
    for name in names:
        layer = optimizer._whitening.layers[name]
        assert [side.factor is not None for side in layer.sides] == [True, True]
        assert [side.refreshed_at for side in layer.sides] == [13, 13]
        assert layer.forward.moments.weight == layer.backward.moments.weight == len(X)
    fallback = optimizer.report().fallback
    assert not {f"{name}.weight" for name in names} & set(fallback)


@RULES
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "head replaced"])
def test_a_checkpoint_made_afterwards_continues_bit_for_bit(rule: Callable[..., bprong.BPRONG], change: str) -> None:
    """The model that loads it is built as it is now, with the same parameter groups."""
    alter, frozen, given = CHANGES[change]
    model, optimizer = start(rule, frozen, given)
    alter(model, optimizer)
    step(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    other = copy.deepcopy(model)
    pairs = dict(zip(model.parameters(), other.parameters(), strict=True))
    resumed = rule(other, [{"params": [pairs[p] for p in group["params"]]} for group in optimizer.param_groups])
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    step(model, optimizer, 3)
    step(other, resumed, 3)
    assert_unchanged(snapshot(model), snapshot(other))


@RULES
def test_layers_that_are_unfrozen_one_after_the_other_are_each_measured(rule: Callable[..., bprong.BPRONG]) -> None:
    """Gradual unfreezing, from the top to the bottom."""
    torch.manual_seed(1)
    model = mlp(5, 6, 6, 6, 3)
    for layer in model[:-1]:
        layer.requires_grad_(False)
    optimizer = rule(model, list(model.parameters()))
    step(model, optimizer, 4)
    for t, name in ((4, "4"), (8, "2"), (12, "0")):
        model[int(name)].requires_grad_(True)
        step(model, optimizer, 1)
        assert optimizer._whitening.layers[name].forward.refreshed_at == t
        assert optimizer._whitening.layers[name].backward.refreshed_at == t
        step(model, optimizer, 3)


@RULES
def test_a_layer_that_is_unfrozen_between_the_passes_and_the_step_waits_for_a_gradient(
    rule: Callable[..., bprong.BPRONG],
) -> None:
    """It has no gradient yet, so it does not move; the next step measures it."""
    model, optimizer = start(rule, frozen=True, given=True)
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    model[0].requires_grad_(True)
    before = snapshot(model)
    optimizer.step()
    assert torch.equal(before["0.weight"], model[0].weight)
    step(model, optimizer)
    assert optimizer._whitening.layers["0"].forward.refreshed_at == 14


@RULES
def test_a_layer_of_another_model_is_given_to_the_fallback_rule_and_named(rule: Callable[..., bprong.BPRONG]) -> None:
    """Parameters that are not the model's cannot be measured by its calls."""
    model, optimizer = start(rule, frozen=False, given=False)
    outside = nn.Linear(3, 3, dtype=torch.float64)
    optimizer.add_param_group({"params": list(outside.parameters())})
    before = snapshot(outside)
    for _ in range(10):  # lr="auto" chooses how far the fallback goes at every tenth step
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        outside(torch.ones(4, 3, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before["weight"], outside.weight)
    assert "a parameter outside the model" in optimizer.report().fallback
