"""Backward hooks of other packages: errors that the optimizer sends back through the graph do not call them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from helpers import assert_close, classification, mlp, snapshot

X, Y = classification(60, 5, 3)
LR = [0.05, "auto"]
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using a non-full backward hook")


def per_sample_gradients(model: nn.Module) -> None:
    """Hooks as packages for per-sample gradients have them: forward stores activations, backward takes one of them."""

    def store(module: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        module.activations.append(inputs[0].detach())

    def take(module: Any, grad_input: Any, grad_output: tuple[Tensor]) -> None:
        activation = module.activations.pop()
        module.samples.append(torch.einsum("no,ni->noi", grad_output[0], activation))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.activations = []
            module.samples = []
            module.register_forward_hook(store)
            module.register_full_backward_hook(take)


def path(model: nn.Module, **settings: Any) -> dict[str, Tensor]:
    """The parameters after some steps, each of which measures."""
    torch.manual_seed(3)
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), every=1, **settings)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("lr", LR)
def test_per_sample_gradients_are_taken_once_for_each_backward_pass(lr: Any) -> None:
    model = mlp(5, 4, 3)
    plain = mlp(5, 4, 3)
    plain.load_state_dict(model.state_dict())
    per_sample_gradients(model)
    ours = path(model, lr=lr)
    for name, value in path(plain, lr=lr).items():
        assert_close(ours[name], value, 1e-9, name)
    for layer in (model[0], model[2]):
        assert not layer.activations
        assert len(layer.samples) == 4
    assert_close(model[0].samples[-1].sum(0), model[0].weight.grad, 1e-12)


class Hooked(nn.Module):
    """A network with a hook of every kind, which notes the gradient that it is called with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.first = nn.Linear(5, 4, dtype=torch.float64)
        self.last = nn.Linear(4, 3, dtype=torch.float64)
        self.calls: list[Tensor] = []
        if kind == "module":
            self.first.register_full_backward_hook(lambda module, after, before: self.note(before[0]))
        if kind == "before the module":
            self.first.register_full_backward_pre_hook(lambda module, before: self.note(before[0]))
        if kind == "old":
            self.first.register_backward_hook(lambda module, after, before: self.note(before[0]))

    def note(self, gradient: Tensor) -> None:
        self.calls.append(gradient.clone())

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "tensor" and h.requires_grad:
            h.register_hook(self.note)
        return self.last(h.tanh())


@pytest.mark.parametrize("lr", LR)
@pytest.mark.parametrize("kind", ["module", "before the module", "old", "tensor"])
def test_hooks_are_called_as_often_as_without_the_optimizer(kind: str, lr: Any) -> None:
    x = X.detach().clone().requires_grad_()  # otherwise torch does not call the hooks of the first module
    model = Hooked(kind)
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=lr, every=1)
    plain = Hooked(kind)
    for step in range(3):
        plain.load_state_dict(model.state_dict())
        for one in (model, plain):
            one.zero_grad()
            F.cross_entropy(one(x), Y).backward()
        optimizer.step()
        assert len(model.calls) == len(plain.calls) == step + 1
        assert torch.equal(model.calls[-1], plain.calls[-1])


def test_graphs_are_released_although_hooks_look_at_whether_they_are_measured() -> None:
    """A hook that held on to the recorded calls would keep their graph, and itself, alive."""
    model = Hooked("tensor")
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.05, every=1)
    x = X.detach().clone()
    F.cross_entropy(model(x), Y).backward()
    optimizer.step()
    inputs = weakref.ref(x)
    del x
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    gc.collect()
    assert inputs() is None


def test_the_audit_calls_no_hooks() -> None:
    model = mlp(5, 4, 3)
    per_sample_gradients(model)
    bprong.audit(model, X, "cross_entropy")
    assert not model[0].activations
    assert not model[0].samples


def test_rewhitening_calls_no_hooks_of_other_layers() -> None:
    model = Hooked("tensor")
    bprong.whiten_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", backward_offset=0)
    assert len(rewhitening.step(X)) == 4
    assert not model.calls


class Retaining(nn.Module):
    """Asks for the gradient of a tensor inside of it to be retained, and returns another that its user may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.hidden = self.first(x)
        self.hidden.retain_grad()
        activity = self.hidden.tanh()
        return self.last(activity), activity


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_retained_are_those_of_the_users_own_passes(passes: int) -> None:
    model = Retaining().double()
    plain = copy.deepcopy(model)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, every=1)
    gradients = []
    for one in (model, plain):
        output, activity = one(X)
        activity.retain_grad()
        loss = F.cross_entropy(output, Y)
        for _ in range(passes):
            loss.backward(retain_graph=True)
        gradients.append((one.hidden.grad, activity.grad))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)
    optimizer.step()
