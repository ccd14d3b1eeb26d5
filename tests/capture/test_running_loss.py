"""A hook finds the loss whose backward pass is running, and mistakes nothing else for it."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bprong.capture.batches import reaches, running_loss


def found_by_a_hook(backward):
    """What a hook at the output finds while `backward(output)` differentiates something."""
    found = []
    output = nn.Linear(3, 2)(torch.randn(4, 3))
    output.register_hook(lambda g: found.append(running_loss()))
    expected = backward(output)
    assert len(found) == 1
    return found[0], expected


def plain(output):
    loss = output.square().mean()
    loss.backward()
    return loss


def by_autograd(output):
    loss = output.square().sum()
    torch.autograd.backward([loss])
    return loss


def by_grad(output):
    loss = output.square().sum()
    torch.autograd.grad(loss, output)
    return loss


def scaled(output):
    loss = output.square().mean().reshape(1)
    loss.backward(torch.tensor([8.0]), retain_graph=True)
    return 8 * loss


def deep(output):
    def inner(depth):
        return plain(output) if depth == 0 else inner(depth - 1)

    return inner(20)


@pytest.mark.parametrize("backward", [plain, by_autograd, by_grad, scaled, deep])
def test_the_loss_is_found(backward):
    found, loss = found_by_a_hook(backward)
    assert found.shape == ()
    assert not found.requires_grad
    assert found == loss.detach().reshape(())


def several(output):
    torch.autograd.backward([output.square().sum(), output.sum()])


def of_many_elements(output):
    output.square().backward(torch.ones(4, 2))


@pytest.mark.parametrize("backward", [several, of_many_elements])
def test_several_losses_or_elements_give_none(backward):
    assert found_by_a_hook(backward)[0] is None


PASSES = {
    "backward": (lambda f, x, w: f.sum().backward(), True),
    "backward to w": (lambda f, x, w: f.sum().backward(inputs=[w]), True),
    "backward to x": (lambda f, x, w: f.sum().backward(inputs=x), False),
    "grad of x": (lambda f, x, w: torch.autograd.grad(f.sum(), x, create_graph=True), False),
    "grad of both": (lambda f, x, w: torch.autograd.grad(f.sum(), [x, w]), True),
    "grad of a generator": (lambda f, x, w: torch.autograd.grad(f.sum(), (p for p in [w])), True),
}


@pytest.mark.parametrize("name", PASSES)
def test_which_parameters_a_backward_pass_reaches(name):
    backward, expected = PASSES[name]
    x = torch.randn(4, 3, requires_grad=True)
    w = nn.Parameter(torch.randn(3, 2))
    found = []
    f = x @ w
    f.register_hook(lambda g: found.append(reaches([w])))
    backward(f, x, w)
    assert found == [expected]


def test_outside_of_a_backward_pass_the_loss_is_none():
    assert running_loss() is None


def test_inside_a_checkpoint_the_loss_of_the_outer_pass_is_found():
    """The hook runs in a backward pass of the checkpoint, inside that of the loss."""
    found = []
    layer = nn.Linear(3, 2)

    def inside(x):
        z = layer(x)
        if z.requires_grad:
            z.register_hook(lambda g: found.append(running_loss()))
        return z * 2

    x = torch.randn(4, 3, requires_grad=True)
    loss = checkpoint(inside, x, use_reentrant=True).square().sum()
    loss.backward()
    assert found[0] == loss.detach()


def test_a_backward_pass_in_another_thread():
    output = nn.Linear(3, 2)(torch.randn(4, 3))
    found = []
    output.register_hook(lambda g: found.append(running_loss()))
    loss = output.square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert found == [loss.detach()]
