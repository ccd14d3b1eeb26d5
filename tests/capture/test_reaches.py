"""Which backward passes are training: those that compute gradients of the parameters, for `.grad` or for the user."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bprong.capture.recorder import destination

PASSES = {
    "backward": (lambda f, x, w: f.sum().backward(), True),
    "backward to w": (lambda f, x, w: f.sum().backward(inputs=[w]), True),
    "backward to x": (lambda f, x, w: f.sum().backward(inputs=x), None),
    "grad of x": (lambda f, x, w: torch.autograd.grad(f.sum(), x, create_graph=True), None),
    "grad of both": (lambda f, x, w: torch.autograd.grad(f.sum(), [x, w]), False),
    "grad of a generator": (lambda f, x, w: torch.autograd.grad(f.sum(), (p for p in [w])), False),
}


def reached_by(backward, parameters):
    """What a hook at the output x w finds while `backward(output, x, w)` is running."""
    x = torch.randn(4, 3, requires_grad=True)
    w = nn.Parameter(torch.randn(3, 2))
    found = []
    f = x @ w
    f.register_hook(lambda g: found.append(destination(parameters(x, w))))
    backward(f, x, w)
    return found


@pytest.mark.parametrize("name", PASSES)
def test_which_parameters_a_backward_pass_reaches(name):
    backward, expected = PASSES[name]
    assert reached_by(backward, lambda x, w: [w]) == [expected]


def test_one_of_several_parameters_is_enough_and_frozen_ones_are_not():
    other = nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    backward, _ = PASSES["backward"]
    assert reached_by(backward, lambda x, w: [other, w]) == [True]
    assert reached_by(backward, lambda x, w: [other, frozen]) == [None]
    assert reached_by(backward, lambda x, w: []) == [None]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_pass_through_a_checkpoint_reaches_the_parameters_behind_it(reentrant):
    layer = nn.Linear(3, 3)
    found = []
    z = checkpoint(layer, torch.randn(4, 3, requires_grad=True), use_reentrant=reentrant)
    head = nn.Linear(3, 2)
    f = head(z)
    f.register_hook(lambda g: found.append(destination(head.parameters())))
    f.sum().backward()
    assert found == [True]
    assert layer.weight.grad is not None


def test_a_backward_pass_in_another_thread_reaches_the_parameters():
    layer = nn.Linear(3, 2)
    output = layer(torch.randn(4, 3))
    found = []
    output.register_hook(lambda g: found.append(destination(layer.parameters())))
    thread = threading.Thread(target=output.square().sum().backward)
    thread.start()
    thread.join()
    assert found == [True]
