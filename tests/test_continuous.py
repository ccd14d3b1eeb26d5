"""Continuous whitening: one step against the dense formula, where it settles, what it keeps, what it costs."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import bprong
from bprong.continuous import centred_rows, distance, factor, inverse_step, relative_step, share, whitened_rows
from bprong.coordinates import BackwardChange, ForwardChange
from bprong.moments import Moments, input_moments, wide
from bprong.relative import BackwardStep, ForwardStep
from bprong.whitening import Damping
from helpers import EPS, assert_close, assert_unchanged, classification, layers_of, mlp, snapshot, spd

EYE = torch.eye(8, dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def root(S):
    return torch.linalg.inv(torch.linalg.cholesky(S))


def added(damping, d):
    """The damping's share as the matrix it adds."""
    E = torch.zeros(d, d, dtype=torch.float64)
    E[damping.index, damping.index] = damping.sizes**2
    return E


@pytest.mark.parametrize("n", [1, 5, 30])
@pytest.mark.parametrize("mu", [1e-3, 0.3, 0.99])
def test_one_step_is_the_exact_whitener_of_the_dense_moment(n, mu):
    S, V = spd(8), randn(n, 8)
    damping = share(8, 0.2, mu, 3, S)
    new = (1 - mu) * S + mu * (V.T @ V + added(damping, 8))
    U = relative_step(root(S), V, mu, damping)
    tolerance = 1e3 * EPS * float(torch.linalg.cond(new)) / (1 - mu)
    assert_close(U @ new @ U.T, EYE, tolerance)
    UU = inverse_step(torch.linalg.inv(S), V, mu, damping)
    assert_close(UU, torch.linalg.inv(new), tolerance)
    assert torch.equal(UU, UU.T)
    T = factor(whitened_rows(root(S), V, damping), mu)
    for product in (T.solve(T.dense()), T.transposed_solve(T.dense().T), T.solve(T.times(EYE))):
        assert_close(product, EYE, tolerance)
    assert_close(T.transposed_times(EYE), T.dense().T, tolerance)


def test_the_first_order_is_the_relative_gradient_and_one_row_is_the_normalised_algorithm():
    U, z, mu = root(spd(8)), randn(1, 8), 1e-8
    white = z @ U.T
    assert_close((relative_step(U, z, mu) - U) / mu, -(white.T @ white - EYE) @ U / 2, 1e-5)
    # for one row T is Potter's form: (I − κ z†z†ᵀ)/√(1−μ), written out
    mu, size = 0.4, float(white.square().sum())
    kappa = (1 - 1 / math.sqrt(1 + mu / (1 - mu) * size)) / size
    assert_close(relative_step(U, z, mu), (EYE - kappa * white.T @ white) @ U / math.sqrt(1 - mu), 1e-12)


def test_the_mean_moves_with_the_moment_exactly():
    old, new, mu = input_moments(randn(30, 8)), input_moments(randn(12, 8, seed=1) + 3), 0.3
    V, c = centred_rows(randn(12, 8, seed=1) + 3, old.mean, mu)
    merged = Moments(1 - mu, old.mean, old.second * (1 - mu)).merge(Moments(mu, new.mean, new.second * mu))
    assert_close(c, merged.mean, 1e-12)
    assert_close((1 - mu) * old.second + mu * V.T @ V, merged.second, 1e-12)


@pytest.mark.parametrize(("mu", "off"), [(0.5, 1e-8), (0.05, 0.15)])
def test_fixed_statistics_are_whitened(mu, off):
    """To rounding where every step damps all coordinates; else up to the ripple of ε within one turn."""
    V, U, epsilon = randn(40, 8) / math.sqrt(40), 3 * EYE, 0.2
    for t in range(int(30 / mu)):
        U = relative_step(U, V, mu, share(8, epsilon, mu, t, U))
    assert float((U @ (V.T @ V + epsilon * EYE) @ U.T - EYE).norm()) < off * math.sqrt(8)


def test_undamped_it_is_equivariant():
    A = randn(8, 8, seed=5)
    U, U_A = EYE, torch.linalg.inv(A)
    for t in range(50):
        z = randn(4, 8, seed=t)
        U, U_A = relative_step(U, z, 0.1), relative_step(U_A, z @ A.T, 0.1)
        assert_close(U_A @ A, U, 1e-9)


def test_rank_deficient_input_is_bounded_by_the_damping_and_not_without_it():
    U, bare, epsilon, mu = EYE, EYE, 0.1, 0.05
    for t in range(1500):
        z = randn(4, 8, seed=t) / 2
        z[:, 3:] = 0
        U, bare = relative_step(U, z, mu, share(8, epsilon, mu, t, U)), relative_step(bare, z, mu)
    assert float(U.abs().max()) < 1.3 / math.sqrt(epsilon)
    assert float(bare.abs().max()) > 1e15


def test_damping_relative_to_variances_is_a_share_of_each():
    epsilon = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    turns = [share(4, epsilon, 0.25, t, epsilon) for t in range(2)]
    assert_close(sum(added(turn, 4) for turn in turns) / 2, torch.diag(epsilon), 1e-12)
    assert share(4, 0.0, 0.25, 0, epsilon) is None
    variance = torch.tensor([4.0, 0.0], dtype=torch.float64)
    assert Damping(1.0, "variance").unit(variance).tolist() == [4.0, 1.0]


def test_the_distance_is_unbiased_by_sampling_noise():
    """Over few rows the moment itself is far from white; the estimate over pairs is right on average."""
    S, U, epsilon = spd(8), root(spd(8, seed=1)), 0.3
    truth = float((U @ (S + epsilon * EYE) @ U.T - EYE).square().sum()) / 8
    C = torch.linalg.cholesky(S)
    found, naive = [], []
    for t in range(4000):
        z = randn(6, 8, seed=t) @ C.T @ U.T
        chosen = torch.randperm(8, generator=torch.Generator().manual_seed(t))[:3]
        damped = math.sqrt(epsilon) * U[:, chosen].T
        found.append(distance(z, damped))
        naive.append(float((z.T @ z / 6 + epsilon * U @ U.T - EYE).square().sum()) / 8)
    found, naive = torch.tensor(found), torch.tensor(naive)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - truth) < 4 * error < 0.2 * truth
    assert float(naive.mean()) - truth > 10 * error


@pytest.mark.parametrize("rule", ["velocity", "gradient", "squares"])
def test_what_an_optimizer_remembers_moves_as_by_the_exact_change(rule):
    U, c, W, b = root(spd(8)), randn(8), randn(5, 8, seed=1), randn(5, seed=2)
    V, c_new = centred_rows(randn(4, 8, seed=3), c, 0.3)
    T = factor(V @ U.T, 0.3)
    if rule == "squares":
        W, b = W**2, b**2
    step, exact = ForwardStep(T, U @ (c_new - c)), ForwardChange(U, c, T.times(U), c_new)
    for ours, theirs in zip(getattr(step, rule)(W, b), getattr(exact, rule)(W, b), strict=True):
        assert_close(ours, theirs, 1e-10)
    R = root(spd(5))
    T = factor(randn(3, 5) @ R.T, 0.3)
    for ours, theirs in zip(
        getattr(BackwardStep(T), rule)(W, b), getattr(BackwardChange(R, T.times(R)), rule)(W, b), strict=True
    ):
        assert_close(ours, theirs, 1e-10)


# The network ----------------------------------------------------------------------------------------------------------

NOW = {"refresh": "continuous", "forward_every": 1, "backward_every": 1, "backward_offset": 0}


def whitened(*widths, kind=torch.optim.SGD, dtype=torch.float64, phi=nn.Tanh, **options):
    model = bprong.whiten_(mlp(*widths, dtype=dtype, phi=phi))
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.01, **momentum)
    return model, optimizer, bprong.Rewhitening(model, optimizer, **NOW | options)


def train(model, optimizer, rewhitening, x, y, steps):
    """Batches in turn; the anchors taken at each step."""
    anchors = []
    for t in range(steps):
        chosen = torch.arange(20 * t, 20 * t + 20) % len(x)
        anchors.append([(done.layer, done.side) for done in rewhitening.step(x[chosen])])
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return anchors


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_the_function_is_kept_over_500_steps(dtype, off):
    x, _ = classification(200, 12, 3, dtype=dtype)
    x[:, ::5] = 0.7
    model, _, rewhitening = whitened(12, 10, 3, dtype=dtype, phi=nn.ReLU)
    before, starts = model(x).detach(), [layer.U.clone() for layer in layers_of(model)]
    for t in range(500):
        rewhitening.step(x[torch.arange(7 * t, 7 * t + 20) % 200])
    assert_close(model(x), before, off)
    assert_close(bprong.fold(model)(x), before, off)
    assert all(not torch.equal(layer.U, start) for layer, start in zip(layers_of(model), starts, strict=True))


def test_a_step_of_the_network_is_the_step_of_the_functions_on_both_sides():
    x, _ = classification(40, 6, 3)
    model, _, rewhitening = whitened(6, 3, fisher="exact", rate=0.6)
    rewhitening.step(x[:20])
    U, c, R = (t.clone() for t in (model[0].U, model[0].c, model[0].R))
    p = model(x[20:]).softmax(dim=-1).detach()
    assert rewhitening.step(x[20:]) == []
    V, c_new = centred_rows(x[20:], c, 0.6)
    S = 0.4 * torch.linalg.inv(U.T @ U) + 0.6 * (V.T @ V + 0.1 * EYE[:6, :6])  # rate 0.6: all coordinates each time
    assert_close(model[0].c, c_new, 1e-12)
    assert_close(model[0].U.T @ model[0].U, torch.linalg.inv(S), 1e-9)
    D = torch.diag(p.mean(0)) - p.T @ p / 20
    S = 0.4 * torch.linalg.inv(R.T @ R) + 0.6 * (D + 0.03 * EYE[:3, :3])
    assert_close(model[0].R.T @ model[0].R, torch.linalg.inv(S), 1e-9)


def test_the_path_under_momentum_is_that_of_exact_changes_of_coordinates(monkeypatch):
    x, y = classification(200, 6, 3)
    ours, exact = whitened(6, 5, 3), whitened(6, 5, 3)
    exact[0].load_state_dict(ours[0].state_dict())
    train(*ours, x, y, 60)
    cls = bprong.WhitenedLinear
    monkeypatch.setattr(cls, "step_forward_", lambda layer, T, c: layer.rewhiten_forward_(T.times(layer.U), c))
    monkeypatch.setattr(cls, "step_backward_", lambda layer, T: layer.rewhiten_backward_(T.times(layer.R)))
    train(*exact, x, y, 60)
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


def test_a_step_costs_three_products_of_n_d_squared_and_factors_nothing_of_size_d():
    def flops(d, move):
        with FlopCounterMode(display=False) as counter:
            move(torch.eye(d, dtype=torch.float64), randn(10, d), 0.25)
        return counter.get_total_flops() / (2 * 10 * d**2)

    assert flops(1000, relative_step) == pytest.approx(3, rel=0.05)
    assert flops(1000, inverse_step) == pytest.approx(2, rel=0.05)
    x, _ = classification(12, 60, 30)
    _, _, rewhitening = whitened(60, 30, rate=0.05)
    with Factored() as anchor:
        rewhitening.step(x)
    with Factored() as step:
        assert rewhitening.step(x) == []
    assert max(anchor.sizes) == 60
    assert max(step.sizes) <= 12 + 1 + 6  # the batch's rows, one between the means, a tenth of the coordinates


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_it_anchors_at_the_start_and_when_the_data_change_abruptly_only(kind):
    x, y = classification(400, 6, 3)
    run = whitened(6, 5, 3, kind=kind)
    anchors = train(*run, x, y, 150)
    assert sorted(anchors[0]) == sorted((name, side) for name in ("0", "2") for side in ("forward", "backward"))
    assert not any(("0", "forward") in taken for taken in anchors[1:])
    assert sum(map(len, anchors[1:])) <= 4  # the network itself changes as it learns
    changed = train(*run, 4 * x + 10, y, 10)
    assert any(("0", "forward") in taken for taken in changed[:3])
    assert all(torch.isfinite(p).all() for p in run[0].parameters())


def test_it_stays_white_where_a_single_anchor_does_not():
    generator = torch.Generator().manual_seed(0)
    x, _ = classification(4000, 6, 3)
    drifting = x * torch.linspace(1, 3, 4000, dtype=torch.float64).unsqueeze(-1)
    model, _, rewhitening = whitened(6, 3, backward_every=100, backward_offset=50, rate=0.1)
    for batch in drifting.split(20):
        rewhitening.step(batch)
    held = (drifting[-1000:] - model[0].c)[torch.randperm(1000, generator=generator)]
    white = distance(held @ model[0].U.T, math.sqrt(0.1) * model[0].U.T)
    fixed = bprong.whitening.whitener(input_moments(drifting[:20]).second, 0.1).matrix
    assert white < 0.2 < distance((held - drifting[:20].mean(0)) @ fixed.T, math.sqrt(0.1) * fixed.T)


@pytest.mark.parametrize("damping", [0.1, Damping(0.1, "variance")])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
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


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="refresh must be one of"):
        whitened(5, 3, refresh="always")
    with pytest.raises(ValueError, match="rate must be"):
        whitened(5, 3, rate=1.0)
    with pytest.raises(ValueError, match="averages by its rate"):
        whitened(5, 3, average=0.5)
    model = bprong.whiten_(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="layer '0': its forward side is whitened as 2 × 18, and only"):
        bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), refresh="continuous")


def test_convolutions_of_one_group_and_frozen_biases_are_moved_too():
    torch.manual_seed(0)
    model = bprong.whiten_(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rewhitening = bprong.Rewhitening(model, optimizer, **NOW)
    x = randn(20, 2, 4, 4) + 1
    before = model(x).detach()
    for t in range(5):
        assert len(rewhitening.step(x + 0.01 * t)) == (4 if t == 0 else 0)
    assert_close(model(x), before, 1e-11)
    model[0].bias_dagger.requires_grad_(False)
    assert [done.layer for done in rewhitening.step(x)] == ["0"]  # c goes back to 0, which takes an anchor
    assert not wide(model[0].c).any()
    assert_close(model(x), before, 1e-11)


def test_an_unfit_batch_keeps_the_whitener_and_is_warned_of():
    x, _ = classification(40, 5, 3)
    model, _, rewhitening = whitened(5, 3)
    rewhitening.step(x)
    before, bad = snapshot(model), x.clone()
    bad[3, 1] = math.nan
    with pytest.warns(bprong.schedule.WhiteningWarning, match="not finite"):
        assert rewhitening.step(bad) == []
    assert_unchanged(before, snapshot(model))
    assert rewhitening.step(x) == []
