"""Networks under continuous whitening: what their steps keep, when they factor exactly, how they resume."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bprong
from bprong import Damping, WhiteningWarning
from bprong.experiments.continuous import ContinuousRewhitening, centred_rows
from bprong.linalg.roots import root_of
from bprong.network.layers import WhitenedLayer
from bprong.parallel.processes import Ranks
from helpers import assert_close, assert_unchanged, classification, input_moments, layers_of, mlp, quick_cases, snapshot

NOW = {"rate": 0.05, "forward_every": 1, "backward_every": 1, "backward_offset": 0}


def whitened(*widths, kind=torch.optim.SGD, dtype=torch.float64, phi=nn.Tanh, **options):
    model = bprong.whiten_(mlp(*widths, dtype=dtype, phi=phi))
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.01, **momentum)
    return model, optimizer, ContinuousRewhitening(model, optimizer, "cross_entropy", **NOW | options)


def train(model, optimizer, rewhitening, x, y, steps):
    """Trains on the batches in turn; returns the exact factorisations (anchors) of each step."""
    anchors = []
    for t in range(steps):
        chosen = torch.arange(20 * t, 20 * t + 20) % len(x)
        anchors.append([(done.layer, done.side) for done in rewhitening.step(x[chosen])])
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return anchors


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.rest
def test_500_steps_keep_the_function(dtype, off):
    x, _ = classification(200, 12, 3, dtype=dtype)
    x[:, ::5] = 0.7
    model, _, rewhitening = whitened(12, 10, 3, dtype=dtype, phi=nn.ReLU)
    before = model(x).detach()
    starts = [layer.U.clone() for layer in layers_of(model)]
    for t in range(500):
        rewhitening.step(x[torch.arange(7 * t, 7 * t + 20) % 200])
    assert_close(model(x), before, off)
    assert_close(bprong.fold(model)(x), before, off)
    assert all(not torch.equal(layer.U, start) for layer, start in zip(layers_of(model), starts, strict=True))


def test_a_step_of_the_network_is_the_dense_formula_on_both_sides():
    x, _ = classification(40, 6, 3)
    model, _, rewhitening = whitened(6, 3, fisher="exact", rate=0.6)
    rewhitening.step(x[:20])
    U = model[0].U.clone()
    c = model[0].c.clone()
    R = model[0].R.clone()
    p = model(x[20:]).softmax(dim=-1).detach()
    assert rewhitening.step(x[20:]) == []
    mean = x[20:].mean(0)
    V, c_new = centred_rows((x[20:] - mean) / 20**0.5, mean, c, 0.6)
    S = 0.4 * torch.linalg.inv(U.T @ U) + 0.6 * (
        V.T @ V + 0.1 * torch.eye(6, dtype=torch.float64)
    )  # at this rate every step damps all coordinates
    assert_close(model[0].c, c_new, 1e-12)
    assert_close(model[0].U.T @ model[0].U, torch.linalg.inv(S), 1e-9)
    D = torch.diag(p.mean(0)) - p.T @ p / 20
    S = 0.4 * torch.linalg.inv(R.T @ R) + 0.6 * (D + 0.03 * torch.eye(3, dtype=torch.float64))
    assert_close(model[0].R.T @ model[0].R, torch.linalg.inv(S), 1e-9)


def test_the_path_under_momentum_is_that_of_exact_changes_of_coordinates(monkeypatch):
    x, y = classification(200, 6, 3)
    ours = whitened(6, 5, 3)
    exact = whitened(6, 5, 3)
    exact[0].load_state_dict(ours[0].state_dict())
    train(*ours, x, y, 60)
    multipliers = []
    rewhiten_ = WhitenedLayer.rewhiten_

    def exactly(layer, side, matrix, mean, probe, T=None):
        multipliers.append(T)
        return rewhiten_(layer, side, matrix, mean, probe)

    monkeypatch.setattr(WhitenedLayer, "rewhiten_", exactly)
    train(*exact, x, y, 60)
    assert sum(T is not None for T in multipliers) > 200
    for one, other in zip(layers_of(ours[0]), layers_of(exact[0]), strict=True):
        assert_close(one.weight, other.weight, 1e-9)
        assert_close(one.bias, other.bias, 1e-9)


class Factored(TorchDispatchMode):
    """The sizes of all square matrices that are factored, inverted or solved against."""

    def __init__(self):
        super().__init__()
        self.sizes = [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "linalg" in str(func) or "cholesky" in str(func) or "lu_" in str(func):
            matrices = (a for a in args if isinstance(a, torch.Tensor) and a.ndim > 1)
            self.sizes += [a.shape[-1] for a in matrices if a.shape[-1] == a.shape[-2]]
        return func(*args, **kwargs or {})


def test_a_step_factors_nothing_of_the_size_of_the_layer():
    x, _ = classification(12, 60, 30)
    _, _, rewhitening = whitened(60, 30, rate=0.05)
    with Factored() as anchor:
        rewhitening.step(x)
    with Factored() as step:
        assert rewhitening.step(x) == []
    assert max(anchor.sizes) == 60
    assert max(step.sizes) <= 12 + 1 + 6  # rows of the batch, one for the mean, a tenth of the coordinates


@pytest.mark.rest
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_it_factors_exactly_only_at_the_start_and_after_abrupt_changes(kind):
    x, y = classification(400, 6, 3)
    run = whitened(6, 5, 3, kind=kind)
    anchors = train(*run, x, y, 150)
    assert sorted(anchors[0]) == sorted((name, side) for name in ("0", "2") for side in ("forward", "backward"))
    assert not any(("0", "forward") in taken for taken in anchors[1:])
    assert sum(map(len, anchors[1:])) <= 4  # because the network itself changes as it learns
    changed = train(*run, 4 * x + 10, y, 10)
    assert any(("0", "forward") in taken for taken in changed[:3])
    assert all(torch.isfinite(p).all() for p in run[0].parameters())


def test_it_stays_white_on_drifting_data_where_a_single_factorisation_does_not():
    x, _ = classification(4000, 6, 3)
    drifting = x * torch.linspace(1, 3, 4000, dtype=torch.float64).unsqueeze(-1)
    model, _, rewhitening = whitened(6, 3, backward_every=100, backward_offset=50, rate=0.1)
    for batch in drifting.split(20):
        rewhitening.step(batch)
    fixed = root_of(input_moments(drifting[:20]).second, 0.1).matrix
    held = drifting[-1000:]
    assert distance(model[0].U, held - model[0].c) < 0.2 < distance(fixed, held - drifting[:20].mean(0))


def distance(U, z):
    """‖U (E[zzᵀ] + ε) Uᵀ − I‖² / d for ε = 0.1."""
    one = torch.eye(len(U), dtype=U.dtype)
    return float((U @ (z.T @ z / len(z) + 0.1 * one) @ U.T - one).square().sum()) / len(U)


@pytest.mark.parametrize("damping", [0.1, Damping(0.1, "mean")])
@pytest.mark.parametrize("kind", quick_cases([torch.optim.SGD, torch.optim.Adam], torch.optim.Adam))
def test_resuming_continues_bit_for_bit(kind, damping):
    x, y = classification(200, 5, 3)
    options = {"forward_damping": damping, "backward_damping": damping, "kind": kind}
    straight = whitened(5, 4, 3, **options)
    train(*straight, x, y, 17)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in straight], file)
    train(*straight, x, y, 20)
    file.seek(0)
    torch.manual_seed(99)
    resumed = whitened(5, 4, 3, **options)
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*resumed, x, y, 20)
    assert_unchanged(snapshot(straight[0]), snapshot(resumed[0]))


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="rate must be"):
        whitened(5, 3, rate=1.0)
    with pytest.raises(ValueError, match="averages over batches by its rate"):
        whitened(5, 3, average=0.5)
    model = bprong.whiten_(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="layer '0': its forward side is whitened as 2 × 18, and only"):
        ContinuousRewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), "cross_entropy", rate=0.05)


def test_it_is_refused_in_several_processes(monkeypatch):
    x, _ = classification(20, 5, 3)
    _, _, rewhitening = whitened(5, 3)
    monkeypatch.setattr(Ranks, "size", 2)
    with pytest.raises(ValueError, match="works in one process only"):
        rewhitening.step(x)


def test_everything_is_on_the_device_of_the_parameters():
    """With `meta` as the default device, a tensor made without naming a device would not mix with the others."""
    x, _ = classification(20, 5, 3)
    model, optimizer, _ = whitened(5, 4, 3)
    with torch.device("meta"):
        rewhitening = ContinuousRewhitening(model, optimizer, "cross_entropy", **NOW)
        anchors = [len(rewhitening.step(x)) for _ in range(3)]
        rewhitening.load_state_dict(rewhitening.state_dict())
    assert anchors == [4, 0, 0]
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


def test_convolutions_of_one_group_and_layers_with_frozen_biases_are_whitened_too():
    torch.manual_seed(0)
    model = bprong.whiten_(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rewhitening = ContinuousRewhitening(model, optimizer, "cross_entropy", **NOW)
    x = torch.randn(20, 2, 4, 4, dtype=torch.float64) + 1
    before = model(x).detach()
    for t in range(5):
        assert len(rewhitening.step(x + 0.01 * t)) == (4 if t == 0 else 0)
    assert_close(model(x), before, 1e-11)
    model[0].bias_dagger.requires_grad_(False)
    rewhitening.step(x)
    assert not model[0].c.any()
    assert_close(model(x), before, 1e-11)


def test_a_batch_that_is_not_finite_keeps_the_whitener_with_a_warning():
    x, _ = classification(40, 5, 3)
    model, _, rewhitening = whitened(5, 3)
    rewhitening.step(x)
    before = snapshot(model)
    bad = x.clone()
    bad[3, 1] = math.nan
    with pytest.warns(WhiteningWarning, match="not finite"):
        assert rewhitening.step(bad) == []
    assert_unchanged(before, snapshot(model))
    assert rewhitening.step(x) == []


def test_frozen_layers_are_left_alone_and_do_not_cause_factorisations():
    x, _ = classification(40, 5, 3)
    model, _, rewhitening = whitened(5, 4, 3)
    model[0].requires_grad_(False)
    before = snapshot(model[0])
    assert {done.layer for done in rewhitening.step(x)} == {"2"}
    with Factored() as step:
        assert rewhitening.step(x[:1]) == []
    assert max(step.sizes) <= 1 + 1 + 2  # a row of the batch, one for the mean, the damped coordinates
    assert_unchanged(before, snapshot(model[0]))


def test_the_blocked_outputs_of_a_forward_only_layer_do_not_matter():
    model = bprong.whiten_(nn.Sequential(nn.Linear(4, 6)), backward=False, max_dim=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewhitening = ContinuousRewhitening(model, optimizer, "cross_entropy", rate=0.05, forward_every=1)
    assert len(rewhitening.step(torch.randn(10, 4))) == 1
    assert rewhitening.step(torch.randn(10, 4)) == []
