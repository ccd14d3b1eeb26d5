"""Small training loops that the optimizer's tests share."""

import shutil
from functools import partial

import torch
import torch.nn.functional as F

import bprong
from bprong.capture.measure import Meter
from bprong.capture.recorder import Recorder
from bprong.capture.request import Request
from bprong.capture.tape import Head
from helpers import assert_close, classification, mlp, snapshot

literal = partial(bprong.BPRONG, max_step=None)  # the paper's literal steps
EXACT = {"fisher": "exact", "average": 0.0}


def recorder_of(model, declared, reads=True, keeps=True):
    """A recorder of a model's calls that measures nothing."""
    nothing = partial(Request, {}, set(), set(), None)
    meter = Meter(model, declared, Head(None, declared.functions), nothing, {})
    return Recorder(model, meter, reads, keeps)


def batches(x, y, size, steps):
    for t in range(steps):
        chosen = torch.arange(t * size, (t + 1) * size) % len(x)
        yield x[chosen], y[chosen]


def train(model, optimizer, data, call=None, loss=F.cross_entropy):
    for x, y in data:
        optimizer.zero_grad()
        loss((call or model)(x), y).backward()
        optimizer.step()
    return model


def path(model, steps=20, call=None, prepare=lambda model: None, dtype=torch.float64, **options):
    """The parameters of a model after some steps of BPRONG."""
    x, y = classification(60, 5, 3, dtype=dtype)
    settings = {"loss": "cross_entropy", "every": 5, "options": EXACT} | options
    prepare(model)
    optimizer = bprong.BPRONG(model, lr=0.1, **settings)
    train(model, optimizer, batches(x, y, 20, steps), call)
    return snapshot(model)


def assert_same_path(ours, expected, rtol=1e-10):
    for (name, value), other in zip(expected.items(), ours.values(), strict=True):
        assert_close(other, value, rtol, name)


def default_backend():
    """The default backend of torch.compile if there is a C++ compiler, which it needs on a CPU; else a simpler one."""
    return "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


def whitened(*widths, loss="cross_entropy", lr=0.05, momentum=0.9, dtype=torch.float64, **options):
    """A perceptron of the paper's network with SGD and its `Rewhitening`."""
    model = bprong.whiten_(mlp(*widths, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, optimizer, bprong.Rewhitening(model, optimizer, loss, **options)


def train_whitened(model, optimizer, rewhitening, x, y, steps):
    for _ in range(steps):
        rewhitening.step(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
