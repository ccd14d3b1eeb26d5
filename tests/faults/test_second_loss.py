"""Losses with a part that the declared loss does not describe, under lr="auto": a second head and penalties.

The Fisher matrix F is that of the declared loss alone. What it does not see must not stop training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from bprong.errors import WhiteningWarning
from helpers import classification, mlp

X, Y = classification(60, 5, 3)


class TwoHeads(nn.Module):
    """A classifier `a`, and a second head `b` with one number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 8)
        self.a = nn.Linear(8, 3)
        self.b = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.trunk(x).tanh()
        return self.a(z), self.b(z)


def train(
    model: nn.Module, loss: Callable[[Tensor], Tensor], steps: int, batch: int = 60, declared: str = "cross_entropy"
) -> list[float]:
    """The whole loss on all examples, before the first step and after each; loss: of some examples, by their index."""
    optimizer = bprong.BPRONG(model, declared, lr="auto")
    everything = torch.arange(60)
    losses = [float(loss(everything).detach())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhiteningWarning)
        for t in range(steps):
            optimizer.zero_grad()
            loss((everything[:batch] + t * batch) % 60).backward()
            optimizer.step()
            losses.append(float(loss(everything).detach()))
    return losses


@pytest.mark.parametrize("weight", [1.0, 10.0, 100.0])
def test_a_second_head_that_is_far_from_its_targets_is_trained_as_well(weight: float) -> None:
    """What F does not see is not frozen: a tenth of it is gone after forty steps, at the least."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    target = (X @ torch.randn(5, 1, dtype=torch.float64)).sin()

    def loss(chosen: Tensor) -> Tensor:
        a, b = model(X[chosen])
        return F.cross_entropy(a, Y[chosen]) + weight * F.mse_loss(b, target[chosen])

    losses = train(model, loss, steps=40)
    assert losses[-1] < 0.9 * losses[0]


def test_the_parameters_that_reach_the_loss_by_another_way_are_named() -> None:
    """The head of the second loss, and not that of the declared one."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr="auto")
    a, b = model(X)
    (F.cross_entropy(a, Y) + 100 * F.mse_loss(b, b.detach() - 1)).backward()
    with pytest.warns(WhiteningWarning, match="another way") as said:
        optimizer.step()
    (message,) = [str(w.message) for w in said if "another way" in str(w.message)]
    assert "b.weight" in message
    assert "a.weight" not in message


def test_a_loss_that_is_the_declared_one_names_no_parameters() -> None:
    """Warnings are errors here."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    optimizer = bprong.BPRONG(nn.Sequential(model.trunk, nn.Tanh(), model.a), "cross_entropy", lr="auto")
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(optimizer._model(X), Y).backward()
        optimizer.step()


# Losses that must still train -----------------------------------------------------------------------------------------


def test_a_gradient_penalty_trains() -> None:
    torch.manual_seed(0)
    model = mlp(5, 8, 3)

    def loss(chosen: Tensor) -> Tensor:
        x = X[chosen].clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.cross_entropy(output, Y[chosen]) + 0.1 * slope.square().sum(-1).mean()

    losses = train(model, loss, steps=30)
    assert losses[-1] < 0.7 * losses[0]


def test_a_penalty_on_all_parameters_trains() -> None:
    torch.manual_seed(0)
    model = mlp(5, 8, 3)

    def loss(chosen: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(X[chosen]), Y[chosen]) + 0.01 * penalty

    losses = train(model, loss, steps=30)
    assert losses[-1] < 0.7 * losses[0]


class Variational(nn.Module):
    """Returns a reconstruction, and the mean and log variance of its code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 4)
        self.decoder = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


@pytest.mark.parametrize("weight", [0.1, 10.0])
def test_a_variational_autoencoder_trains(weight: float) -> None:
    """Squared errors and the divergence of its code from a standard normal."""
    torch.manual_seed(0)
    model = Variational().double()
    x = (X - X.mean(0)) / X.std(0)

    def loss(chosen: Tensor) -> Tensor:
        output, mean, log_variance = model(x[chosen])
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
        return F.mse_loss(output, x[chosen]) + weight * divergence

    losses = train(model, loss, steps=40, declared="mse")
    assert sum(losses[-5:]) / 5 < 0.95 * sum(losses[:5]) / 5
