"""Convolutions and transformers: checkpoints, schedulers, copies, as test_contract.py has them for an MLP."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import assert_close, assert_unchanged, quick_cases, snapshot
from layered import build, data, make, train

both = pytest.mark.parametrize("problem", quick_cases(["conv", "transformer"], "transformer"))

RESUME = """
import sys, torch
sys.path[:0] = sys.argv[1:3]
from layered import train
from test_state import resumable
model, optimizer, rest = resumable(sys.argv[3])
saved = torch.load(sys.argv[4], weights_only=True)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
torch.set_rng_state(saved["random"])
train(model, optimizer, rest[17:])
torch.save(model.state_dict(), sys.argv[5])
"""


def resumable(problem):
    torch.set_num_threads(1)
    model = make(problem, torch.float32, dropout=0.2)
    optimizer = build(model, lr=0.005, momentum=0.9, every=7, options={"average": 0.8})
    return model, optimizer, data(problem, 42, dtype=torch.float32)


@both
@pytest.mark.rest
def test_checkpoints(problem, tmp_path):
    model, optimizer, batches = resumable(problem)
    train(model, optimizer, batches[:17])
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(saved, tmp_path / "saved.pt")
    train(model, optimizer, batches[17:])
    here = Path(__file__).parent
    files = [tmp_path / "saved.pt", tmp_path / "done.pt"]
    command = [sys.executable, "-c", RESUME, *map(str, (here, here.parent, problem, *files))]
    subprocess.run(command, check=True, timeout=120)
    assert_unchanged(torch.load(files[1], weights_only=True), model.state_dict())


@both
def test_each_step_is_as_long_as_the_scheduler_says(problem):
    """At the lr that the scheduler has left in the group, the step is that multiple of the step at lr 1."""
    model = make(problem)
    optimizer = build(model, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    for t, batch in enumerate(data(problem, 5)):
        unit, longest = copy.deepcopy((model, optimizer))
        longest.param_groups[0]["lr"] = 1.0
        before = snapshot(model)
        train(model, optimizer, [batch])
        train(unit, longest, [batch])
        for name, value in snapshot(model).items():
            assert_close(value - before[name], 0.05 * 0.5**t * (snapshot(unit)[name] - before[name]), 1e-9, name)
        scheduler.step()


@both
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle(problem, clone):
    model = make(problem)
    optimizer = build(model, every=2, options={"average": 0.5})
    train(model, optimizer, data(problem, 4))
    other, other_optimizer = clone((model, optimizer))
    at = snapshot(other)
    train(model, optimizer, data(problem, 7))
    assert_unchanged(at, snapshot(other))  # a pair of their own
    train(other, other_optimizer, data(problem, 7))
    assert_unchanged(snapshot(model), snapshot(other))


@both
def test_a_bias_whose_lr_is_zero_follows_the_centre(problem):
    """Δb = −ΔW c, with the weight's own lr: at the mean of its inputs a layer computes what it did."""
    model = make(problem)
    before = {p: p.detach().clone() for p in model.parameters()}
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    optimizer = build(model, params=[{"params": weights}, {"params": biases, "lr": 0.0}])
    train(model, optimizer, data(problem, 1))
    for layer in optimizer._whitening.layers.values():
        if layer.bias is not None:
            linear = layer.linear
            moved = linear.matrix(layer.weight - before[layer.weight])
            at_mean = (moved @ layer.forward.moments.mean.view_as(layer.c).unsqueeze(-1)).squeeze(-1)
            assert_close(linear.vector(layer.bias - before[layer.bias]), -at_mean, 1e-9, layer.name)
            assert at_mean.norm() > 1e-6
