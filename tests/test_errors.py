"""Warnings point at the line of the user's code that caused them, however deep in the library they arise."""

import inspect
import math
import os
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.errors import LinAlgError, WhiteningError, WhiteningWarning, warn
from helpers import classification, mlp

BPRONG_FOLDER = os.path.dirname(bprong.__file__)
TORCH_FOLDER = os.path.dirname(torch.__file__)


def caller_in(file):
    """A function that calls another one, compiled as if its code were in this file."""
    names = {}
    exec(compile("def call(function):\n    return function()\n", file, "exec"), names)
    return names["call"]


def warning_of(function):
    """The file and line of the only warning of a call, and the line of this file that made the call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        function()
    (warning,) = caught
    assert warning.category is WhiteningWarning
    return (warning.filename, warning.lineno), (__file__, line)


def test_a_warning_points_at_the_caller_of_the_library():
    found, expected = warning_of(partial(warn, "here"))
    assert found == expected


def test_frames_of_bprong_and_torch_are_skipped():
    call = partial(warn, "deep inside")
    for folder in (BPRONG_FOLDER, TORCH_FOLDER, BPRONG_FOLDER):
        call = partial(caller_in(os.path.join(folder, "folder", "module.py")), call)
    found, expected = warning_of(call)
    assert found == expected


@pytest.mark.parametrize("package", [f"{TORCH_FOLDER}vision", f"{TORCH_FOLDER}_extension", f"{BPRONG_FOLDER}_trainer"])
def test_packages_with_similar_names_are_not_skipped(package):
    file = os.path.join(package, "module.py")
    found, _ = warning_of(partial(caller_in(file), partial(caller_in(f"{BPRONG_FOLDER}/a.py"), partial(warn, "there"))))
    assert found == (file, 2)


def test_only_the_innermost_line_of_the_user_counts():
    """A warning about a callback belongs to the line of the callback, not to that of the outer call."""
    inner = partial(caller_in("/home/user/callback.py"), partial(warn, "in a callback"))
    found, _ = warning_of(partial(caller_in(f"{BPRONG_FOLDER}/a.py"), inner))
    assert found == ("/home/user/callback.py", 2)


def test_a_refresh_of_the_network_that_fails_points_at_the_call_of_step():
    x, _ = classification(20, 5, 3)
    model = bprong.whiten_(mlp(5, 3))
    rewhitening = bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), "cross_entropy")
    x[0, 0] = math.nan
    found, expected = warning_of(partial(rewhitening.step, x))
    assert found == expected


class UsedTwice(nn.Module):
    """Uses its weight in a linear layer and in a product, which cannot be recorded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return self.layer(x) + x @ self.layer.weight


def plain(optimizer):
    return optimizer.step


def with_scheduler(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # replaces step by a wrapper
    return optimizer.step


def with_hooks(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer.step


def with_scaler(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))  # it refuses to step before its first use
    return partial(scaler.step, optimizer)


def with_closure(optimizer):
    return partial(optimizer.step, lambda: torch.zeros(()))


@pytest.mark.parametrize("wrapped", [plain, with_scheduler, with_hooks, with_scaler, with_closure])
@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
def test_a_warning_of_an_optimizer_points_at_the_call_of_step_through_all_wrappers(method, wrapped):
    model = UsedTwice()
    optimizer = method(model, "cross_entropy", lr=0.01, every=1)
    step = wrapped(optimizer)
    F.cross_entropy(model(torch.randn(20, 5)), torch.arange(20) % 5).backward()
    found, expected = warning_of(step)
    assert found == expected


def test_the_exceptions_can_be_caught_as_those_of_python_and_torch():
    assert issubclass(WhiteningError, RuntimeError)
    assert issubclass(WhiteningWarning, UserWarning)
    assert LinAlgError is torch.linalg.LinAlgError
