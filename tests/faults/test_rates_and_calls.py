"""Learning rates that change while momentum runs, biases that several weights share, and calls that fail in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from helpers import classification, mlp

X, Y = classification(40, 4, 3)


def trained(steps: int, model: nn.Module, optimizer: bprong.BPRONG, lower: Any = None) -> None:
    for t in range(steps):
        if lower is not None and t == steps - 1:
            lower()
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


@pytest.mark.parametrize("max_step", [None, 0.1])
def test_a_weight_whose_rate_is_zero_stays_although_its_bias_and_its_momentum_go_on(max_step: float | None) -> None:
    model = mlp(4, 5, 3)
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": biases}]
    optimizer = bprong.BPRONG(
        model, nn.CrossEntropyLoss(), lr=0.05, momentum=0.9, max_step=max_step, every=100, params=groups
    )
    trained(5, model, optimizer)
    before = [p.detach().clone() for p in weights]
    optimizer.param_groups[0]["lr"] = 0.0
    trained(3, model, optimizer)
    for p, value in zip(weights, before, strict=True):
        assert torch.equal(p, value)


class Attention(nn.Module):
    """Its three projections have weights of their own and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        keys = x[..., :3]
        return self.head(self.attention(x, keys, keys, need_weights=False)[0][:, 0])


def test_each_part_of_a_shared_bias_follows_its_own_weight() -> None:
    """The step of a bias at the rate of its weight is the same, whatever the rates of other weights are."""
    torch.manual_seed(0)
    x = torch.randn(20, 5, 4, dtype=torch.float64) + 1
    y = torch.randint(3, (20,))
    first = Attention()
    steps = []
    for others in (0.1, 0.01):
        model = copy.deepcopy(first)
        q = model.attention.q_proj_weight
        bias = model.attention.in_proj_bias
        rest = [p for p in model.parameters() if p is not q and p is not bias]
        groups = [{"params": [q, bias]}, {"params": rest, "lr": others}]
        optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.1, max_step=None, params=groups)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps.append((bias - first.attention.in_proj_bias)[:4].detach())
    torch.testing.assert_close(*steps, rtol=1e-10, atol=1e-14)


def test_numbers_of_an_earlier_version_are_left_out_of_a_state() -> None:
    model = mlp(4, 3)
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss())
    trained(2, model, optimizer)
    state = optimizer.state_dict()
    (entry,) = [own["bprong"] for own in state["state"].values() if "optimizer" in own["bprong"]]
    (numbers,) = entry["optimizer"].values()
    numbers["rule"]["promised"] = 0.5
    other = bprong.BPRONG(copy.deepcopy(model), nn.CrossEntropyLoss())
    other.load_state_dict(state)
    assert other.report().steps == 2


def test_an_interrupt_leaves_both_optimizers_of_one_model_usable() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(4, 5, 3)
            self.interrupts = False

        def forward(self, x: Tensor) -> Tensor:
            if self.interrupts:
                raise KeyboardInterrupt
            return self.inner(x)

    model = Interrupted()
    halves = [list(model.inner[0].parameters()), list(model.inner[2].parameters())]
    optimizers = [bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.1, every=1, params=half) for half in halves]
    model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model.interrupts = False
    for _ in range(3):
        model.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [optimizer.report().steps for optimizer in optimizers] == [3, 3]


def test_the_order_of_two_terms_does_not_matter() -> None:
    """One of them counts all targets, the other some of them."""
    weights = torch.zeros(32, 3, dtype=torch.float64)
    weights[:8] = 1.0
    x = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = x[:, :3]
    ends = []
    for flipped in (False, True):
        torch.manual_seed(0)
        model = mlp(4, 3)
        optimizer = bprong.BPRONG(model, nn.MSELoss())
        for _ in range(4):
            optimizer.zero_grad()
            f = model(x)
            terms = [lambda f=f: F.mse_loss(f, target)]
            terms.append(lambda f=f: (F.mse_loss(f, target, reduction="none") * weights).sum() / 24)
            sum(term() for term in (reversed(terms) if flipped else terms)).backward()
            optimizer.step()
        ends.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def test_a_call_that_fails_does_not_hide_the_loss_of_an_earlier_one() -> None:
    model = mlp(4, 5, 3)
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion)
    output = model(X)
    with pytest.raises(RuntimeError):
        model(X[:, :2])
    criterion(output, Y).backward()
    optimizer.step()
    assert optimizer.report().steps == 1


def test_a_first_call_that_fails_does_not_hide_that_the_loss_is_inside_of_the_model() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(4, 5, 3)
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.criterion(self.body(x), y)

    model = WithLoss()
    optimizer = bprong.BPRONG(model, model.criterion)
    with pytest.raises(RuntimeError):
        model(X[:, :2], Y)
    for _ in range(2):
        optimizer.zero_grad()
        model(X, Y).backward()
        optimizer.step()
    assert optimizer.report().steps == 2
