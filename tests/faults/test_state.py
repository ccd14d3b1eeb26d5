"""Checkpoints of another kind are refused by name; pickles hold no batches; warnings say each thing once."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import bprong
from bprong.errors import WhiteningWarning
from helpers import assert_unchanged, classification, mlp, snapshot
from training import EXACT, train

RATES = pytest.mark.parametrize("lr", [0.1, "auto"])
Rate = float | str
X, Y = classification(60, 5, 3)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "BPRONG": lambda model: bprong.BPRONG(model, "cross_entropy", lr=0.1),
    'BPRONG(lr="auto")': lambda model: bprong.BPRONG(model, "cross_entropy", lr="auto"),
    "PRONG": lambda model: bprong.PRONG(model, "cross_entropy", lr=0.1),
    'PRONG(lr="auto")': lambda model: bprong.PRONG(model, "cross_entropy", lr="auto"),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "plain SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}
OURS = [name for name in OPTIMIZERS if "PRONG" in name]


def state_of(name: str) -> dict[str, Any]:
    torch.manual_seed(2)
    model = mlp(5, 4, 3)
    optimizer = OPTIMIZERS[name](model)
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer.state_dict()


# 6. States of another kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("theirs", OPTIMIZERS)
def test_a_state_of_another_kind_is_refused_and_nothing_changes(ours: str, theirs: str) -> None:
    """Another class of optimizer, or the other kind of lr; the error names what the state is to be loaded into."""
    torch.manual_seed(1)
    model = mlp(5, 4, 3)
    optimizer = OPTIMIZERS[ours](model)
    twin = copy.deepcopy(model)
    untouched = OPTIMIZERS[ours](twin)
    state = state_of(theirs)
    if ours == theirs:
        optimizer.load_state_dict(state)
        assert optimizer.report().steps == 2
        return
    kind = ours.split("(", maxsplit=1)[0]
    expected = kind if theirs.split("(", maxsplit=1)[0] != kind else "lr|step rule"
    with pytest.raises(ValueError, match=rf"(?<!\w)({expected})"):
        optimizer.load_state_dict(state)
    train(model, optimizer, [(X, Y)] * 2)
    train(twin, untouched, [(X, Y)] * 2)
    assert_unchanged(snapshot(twin), snapshot(model))
    assert optimizer.param_groups[0]["lr"] == untouched.param_groups[0]["lr"]
    assert optimizer.report().steps == 2


@pytest.mark.parametrize("ours", OURS)
def test_the_state_names_the_class_and_the_rule_that_it_is_of(ours: str) -> None:
    """As a key, so that `torch.load(weights_only=True)` and distributed checkpoints keep it."""
    rule = "Automatic" if "auto" in ours else "FixedRate"
    expected = f"{ours.split('(', maxsplit=1)[0]} with the step rule {rule}"
    assert list(state_of(ours)["state"][0]["bprong"]["optimizer"]) == [expected]


@RATES
def test_a_state_without_our_parts_is_that_of_another_optimizer(lr: Rate) -> None:
    """Such as one from which a wrapper kept the entries that it knows."""
    optimizer = bprong.BPRONG(mlp(5, 4, 3), "cross_entropy", lr=lr)
    state = state_of("BPRONG" if lr == 0.1 else 'BPRONG(lr="auto")')
    others = {i: {k: v for k, v in own.items() if k != "bprong"} for i, own in state["state"].items()}
    with pytest.raises(ValueError, match="BPRONG"):
        optimizer.load_state_dict(state | {"state": others})


# Pickles --------------------------------------------------------------------------------------------------------------

MANY = torch.randn(5000, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(5000, dtype=torch.long)


@RATES
@pytest.mark.parametrize("moment", ["after the forward pass", "after the backward pass", "after the step"])
@pytest.mark.parametrize("what", ["model", "optimizer", "criterion", "all"])
def test_pickles_made_in_the_middle_of_a_step_hold_no_batches(lr: Rate, moment: str, what: str) -> None:
    model = mlp(5, 4, 3)
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion, lr=lr, every=1)
    things = {"model": model, "optimizer": optimizer, "criterion": criterion, "all": (model, criterion, optimizer)}
    empty = len(pickle.dumps(things[what]))
    loss = criterion(model(MANY), LABELS)
    if moment != "after the forward pass":
        loss.backward()
    if moment == "after the step":
        optimizer.step()
    # A batch has 200,000 bytes; the optimizer's state and a second copy of the weights in a race have some 30,000.
    assert len(pickle.dumps(things[what])) < empty + 40_000


@RATES
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_made_between_the_passes_and_the_step_goes_on_from_its_next_batch(
    lr: Rate, clone: Callable[[Any], Any]
) -> None:
    """It has no statistics of a batch that it has not seen, and the original is not disturbed."""
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1, options=EXACT)
    twin = copy.deepcopy(model)
    undisturbed = bprong.BPRONG(twin, "cross_entropy", lr=lr, every=1, options=EXACT)
    F.cross_entropy(model(X), Y).backward()
    other, other_optimizer = clone((model, optimizer))
    optimizer.step()
    other_optimizer.zero_grad()
    train(other, other_optimizer, [(X, Y)] * 2)
    train(model, optimizer, [(X, Y)])
    train(twin, undisturbed, [(X, Y)] * 2)
    assert_unchanged(snapshot(twin), snapshot(model))
    assert_unchanged(snapshot(twin), snapshot(other))


# Warnings -------------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer whose inputs, or whose errors, can be made so large that their squares overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        self.before = 1.0
        self.after = 1.0
        with torch.no_grad():  # whatever the factors are, the output is then zero
            self.layer.weight.zero_()
            self.layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.before) * self.after


def test_a_warning_about_a_layer_does_not_hide_a_later_one_that_says_something_else() -> None:
    """First its inputs cannot be whitened, then its errors; each is said, and each is said once."""
    model = Scaled()
    optimizer = bprong.BPRONG(model, "mse", lr=0.0, every=1, options={"average": 0.0})
    x = torch.randn(20, 2, dtype=torch.float64)

    def step(before: float, after: float) -> list[str]:
        model.before = before
        model.after = after
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(20, 2, dtype=torch.float64)).backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        return [str(w.message) for w in said if issubclass(w.category, WhiteningWarning)]

    assert step(1.0, 1.0) == []
    (first,) = step(1e200, 1.0)
    assert "layer 'layer'" in first
    assert "forward" in first
    assert step(1.0, 1.0) == []
    (second,) = step(1.0, 1e200)
    assert "layer 'layer'" in second
    assert "backward" in second
    assert step(1.0, 1.0) == []
    assert step(1e200, 1.0) == []
    assert step(1.0, 1.0) == []


CYCLES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=5),
}


@pytest.mark.parametrize("max_step", ["auto", None])
@pytest.mark.parametrize("name", CYCLES)
def test_momentum_that_a_scheduler_writes_is_used_at_a_fixed_rate(name: str, max_step: Any) -> None:
    """It is SGD's momentum there, and needs no explanation. Literal steps can then diverge, as those of SGD can."""
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, max_step=max_step)
    scheduler = CYCLES[name](optimizer)
    for _ in range(6):
        train(model, optimizer, [(X, Y)])
        scheduler.step()
    assert optimizer.state[model[0].weight]["momentum_buffer"].any()
