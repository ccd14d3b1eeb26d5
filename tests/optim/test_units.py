"""Features of the data in any scale: what steps in units make of them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.experiments.bench.data import badly_scaled, batches
from bprong.experiments.bench.targets import TARGETS
from bprong.experiments.bench.workloads import WORKLOADS, Measurement
from bprong.linalg import units
from helpers import assert_close, assert_same_state, classification, mlp, snapshot
from training import train

SCALES = torch.tensor([1e-3, 1.0, 10.0, 1e3], dtype=torch.float64)
VARIANCE = bprong.Damping(0.1, "variance")


@pytest.fixture
def full_trust(monkeypatch):
    monkeypatch.setattr(units, "EXAMPLES", 0.0)
    monkeypatch.setattr(units, "KURTOSIS", math.inf)


def outputs_after(x, y, scales, steps=3, **arguments):
    """Outputs of a network that is fed x · scales, but starts as the same function of x."""
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    with torch.no_grad():
        model[0].weight.div_(scales)
    optimizer = bprong.BPRONG(
        model, "cross_entropy", every=1, options={"fisher": "exact", "solver": "exact"}, **arguments
    )
    train(model, optimizer, [(x * scales, y)] * steps)
    return model(x * scales).detach()


@pytest.mark.usefixtures("full_trust")
@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_with_full_trust_steps_are_invariant_to_the_scale_of_each_feature(step):
    """Spectral steps have one length in units, and so do those of features whose mean variance is the same."""
    x, y = classification(40, 4, 3)
    scales = SCALES
    if step == "spectral":
        scales = SCALES * (x.var(dim=0).sum() / (x * SCALES).var(dim=0).sum()).sqrt()
    one = torch.ones(4, dtype=torch.float64)
    relative = {"lr": 0.05, "step": step, "forward_damping": VARIANCE, "backward_damping": 0.03}
    assert_close(outputs_after(x, y, scales, **relative), outputs_after(x, y, one, **relative), 1e-9)
    absolute = relative | {"forward_damping": 0.1}
    expected = outputs_after(x, y, one, **absolute)
    assert float((outputs_after(x, y, scales, **absolute) - expected).norm() / expected.norm()) > 1e-2


@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_badly_scaled_features_are_solved_within_500_steps(step):
    """Scales from 0.03 to 30, without any option; with one unit for all of them 2,000 steps do not suffice."""
    workload = WORKLOADS["regression"]
    data = badly_scaled("test")
    model = workload.model(0)
    criterion = nn.MSELoss()
    optimizer = bprong.BPRONG(model, criterion, step=step)
    measure = Measurement(workload, "test")
    reached = False
    for t, (x, y) in zip(range(1, 501), batches(data.x, data.y, workload.batch, 0), strict=False):
        train(model, optimizer, [(x, y)], loss=criterion)
        if t % 20 == 0 and measure(model)[0] <= TARGETS["regression"]["test"].train_loss:
            reached = True
            break
    assert reached


def test_steps_at_a_given_damping_know_no_units():
    """Neither a number nor a damping relative to the mean."""
    x, y = classification(40, 4, 3)
    for arguments in ({"lr": 0.01}, {"lr": 0.01, "step": "spectral"}, {"lr": "auto", "forward_damping": 0.1}):
        model = mlp(4, 5, 3)
        optimizer = bprong.BPRONG(model, "cross_entropy", **arguments)
        train(model, optimizer, [(x * SCALES, y)] * 2)
        assert optimizer._whitening.layers["0"].u is None
    optimizer = bprong.BPRONG(model, "cross_entropy")
    train(model, optimizer, [(x * SCALES, y)] * 2)
    assert optimizer._whitening.layers["0"].u.shape == (1, 4)
    assert optimizer._whitening.layers["2"].u is None


@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_a_run_with_units_resumes_bit_for_bit(step):
    x, y = classification(60, 4, 3)
    data = [(x[i::6] * SCALES, y[i::6]) for i in range(6)]
    model = mlp(4, 5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", step=step, every=4)
    train(model, optimizer, data)
    again = copy.deepcopy(model)
    resumed = bprong.BPRONG(again, "cross_entropy", step=step, every=4)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, of_network in ((model, optimizer), (again, resumed)):
        train(network, of_network, data)
    assert_same_state(snapshot(again), snapshot(model))


@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_grouped_and_blocked_convolutions_of_data_have_units(step):
    """Channels of scales 1 and 1000."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(400, 4, 4, 4) * torch.tensor([1.0, 1e3, 1.0, 1e3]).view(4, 1, 1)
    y = (x.mean(dim=(2, 3)) / torch.tensor([1.0, 1e3, 1.0, 1e3]))[:, :3].argmax(dim=1)
    for max_dim in (4096, 7):
        network = copy.deepcopy(model)
        optimizer = bprong.BPRONG(network, "cross_entropy", step=step, options={"max_dim": max_dim})
        before = F.cross_entropy(network(x), y).item()
        train(network, optimizer, [(x, y)] * 20)
        u = optimizer._whitening.layers["0"].u
        assert u.shape == (2, 1, 18)
        by_channel = u.view(2, 2, 9)
        assert (by_channel[:, 1] > 20 * by_channel[:, 0]).all()
        assert float((by_channel.amax(-1) / by_channel.amin(-1)).max()) < 1.5, "one unit for each channel, nearly"
        assert F.cross_entropy(network(x), y).item() < before


def test_the_network_of_the_paper_refuses_units():
    model = bprong.whiten_(mlp(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no units of features"):
        bprong.Rewhitening(model, optimizer, "cross_entropy", forward_damping=VARIANCE)
