"""Other uses: logged gradients, hooks on gradients, many micro-batches, states handed on, tied and jagged tensors."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from bprong.errors import WhiteningWarning
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from paths import Rate
from training import EXACT

RATES = pytest.mark.parametrize("lr", [0.1, "auto"])
X, Y = classification(60, 5, 3)


def made(lr: Rate, model: nn.Module | None = None, **options: object) -> tuple[nn.Module, bprong.BPRONG]:
    torch.manual_seed(1)
    model = mlp(5, 4, 3) if model is None else model
    return model, bprong.BPRONG(model, "cross_entropy", lr=lr, every=1, options=EXACT | options)


def accumulated(model: nn.Module, x: Tensor = X, y: Tensor = Y, parts: int = 3, log: bool = False) -> None:
    """The gradients of a batch, accumulated over its parts; log: after a look at the gradients of each."""
    for own, own_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = F.cross_entropy(model(own), own_y) / parts
        if log:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()


# Passes that return gradients -----------------------------------------------------------------------------------------


@RATES
@pytest.mark.parametrize("fisher", ["exact", "sampled"])
def test_gradients_that_are_only_looked_at_do_not_count(lr: Rate, fisher: str) -> None:
    """Norms of gradients by `autograd.grad`, logged for each micro-batch, whose `.grad` is not zero any more."""
    runs = []
    for log in (True, False):
        model, optimizer = made(lr, fisher=fisher)
        for _ in range(3):
            optimizer.zero_grad()
            accumulated(model, log=log)
            optimizer.step()
        runs.append(snapshot(model))
    assert_unchanged(*runs)


@RATES
def test_gradients_that_are_looked_at_after_the_backward_pass_do_not_count(lr: Rate) -> None:
    runs = []
    for log in (True, False):
        model, optimizer = made(lr)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward(retain_graph=True)
            if log:
                torch.autograd.grad(loss, list(model.parameters()))
            optimizer.step()
        runs.append(snapshot(model))
    assert_unchanged(*runs)


@RATES
def test_gradients_may_be_written_by_hand(lr: Rate) -> None:
    """If no pass adds to `.grad`, those that return gradients count."""
    runs = []
    for by_hand in (True, False):
        model, optimizer = made(lr)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            if by_hand:
                for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                    p.grad = g
            else:
                loss.backward()
            optimizer.step()
        runs.append(snapshot(model))
    assert_unchanged(*runs)


# Many micro-batches ---------------------------------------------------------------------------------------------------


def kept_numbers() -> int:
    """How many numbers all tensors have."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and not t.is_nested]
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(found.values()) // 8


@pytest.mark.rest
def test_moments_do_not_add_up_in_memory_over_micro_batches() -> None:
    """Each has five second moments of 20 × 20, and outputs of 30 × 3."""
    x, y = classification(240, 20, 3)
    model, optimizer = made(0.1, mlp(20, 20, 20, 3))
    whole, whole_optimizer = made(0.1, copy.deepcopy(model))
    found = []
    for part, own in zip(x.chunk(8), y.chunk(8), strict=True):
        (F.cross_entropy(model(part), own) / 8).backward()
        found.append(kept_numbers())
    assert found[-1] - found[2] < 5 * 20 * 20, "less than one set of moments"
    optimizer.step()
    F.cross_entropy(whole(x), y).backward()
    whole_optimizer.step()
    for name, p in snapshot(whole).items():
        assert_close(snapshot(model)[name], p, 1e-9, name)


@RATES
def test_micro_batches_are_the_whole_batch(lr: Rate) -> None:
    """Also if some of them have no target that counts, or their gradients are thrown away."""
    runs = []
    for parts in (1, 6):
        model, optimizer = made(lr)
        for _ in range(3):
            optimizer.zero_grad()
            if parts > 1:
                accumulated(model, 3 * X, parts=3)
                optimizer.zero_grad()
                F.cross_entropy(model(9 * X), torch.full_like(Y, -100), reduction="sum").backward()
            accumulated(model, parts=parts)
            if parts > 1:
                F.cross_entropy(model(9 * X), torch.full_like(Y, -100), reduction="sum").backward()
            optimizer.step()
        runs.append(snapshot(model))
    for name, p in runs[0].items():
        assert_close(runs[1][name], p, 1e-6, name)


# Hooks on gradients of parameters -------------------------------------------------------------------------------------


@RATES
def test_a_hook_that_masks_the_gradient_of_a_weight(lr: Rate) -> None:
    """As pruning does. The test whether all uses of a weight are recorded must not take it for another use."""
    model, optimizer = made(lr)
    weight = model[0].weight
    mask = torch.arange(weight.numel()).view_as(weight) % 2
    calls = []
    weight.register_hook(lambda g: calls.append(len(calls)))
    weight.register_hook(lambda g: g * mask)
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        assert len(calls) == step + 1, "as often as without the optimizer"
        optimizer.step()
    assert optimizer.report().fallback == {}


# Models ---------------------------------------------------------------------------------------------------------------


class Handing(nn.Module):
    """Hands a state on from call to call. The fused cell does not show its calls, so that a pass of our own is made."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(5, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state = self.cell(x, state)
        return self.head(state[0]), state


@RATES
def test_a_state_that_is_handed_on_with_its_graph(lr: Rate) -> None:
    """Back-propagation through time over several calls: the graph behind the state is gone when a step is made."""
    model, optimizer = made(lr, Handing())
    losses = []
    for _ in range(8):
        state = None
        loss = torch.zeros(())
        for part, own in zip(X.chunk(3), Y.chunk(3), strict=True):
            output, state = model(part, state)
            loss = loss + F.cross_entropy(output, own) / 3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(side.moments is not None for layer in optimizer._whitening.layers.values() for side in layer.sides)


class Tied(nn.Module):
    """An autoencoder whose only weight is also used transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.code(x).tanh(), self.code.weight.T)


@RATES
def test_a_model_none_of_whose_layers_can_be_whitened_after_all(lr: Rate) -> None:
    model = Tied()
    optimizer = bprong.BPRONG(model, "mse", lr=lr, every=1)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), X)
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            with pytest.warns(WhiteningWarning, match="follow"):
                optimizer.step()
        else:
            optimizer.step()
    assert losses[-1] < losses[0]
    assert set(optimizer.report().fallback) == {"code.weight", "code.bias"}


class Jagged(nn.Module):
    """Sequences of several lengths, as one jagged tensor or row by row."""

    def __init__(self, jagged: bool) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.b = nn.Linear(4, 3)
        self.jagged = jagged

    def forward(self, *sequences: Tensor) -> Tensor:
        if not self.jagged:
            return self.b(self.a(torch.cat(sequences)).tanh())
        z = torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged)
        return self.b(self.a(z).tanh()).values()


def test_the_rows_of_a_jagged_tensor_are_rows() -> None:
    x = X.float()
    found = []
    for jagged in (True, False):
        torch.manual_seed(0)
        model, optimizer = made(0.1, Jagged(jagged))
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x[:10], x[10:13], x[13:]), Y).backward()
            optimizer.step()
        found.append(snapshot(model))
    for name, p in found[1].items():
        assert_close(found[0][name], p, 1e-5, name)
