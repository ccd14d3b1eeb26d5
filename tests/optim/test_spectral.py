"""The spectral step against its oracle: Muon on W† of the paper's network, with Newton–Schulz in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.linalg.factors import Dense
from bprong.linalg.orthogonal import QUINTIC, STEPS, polynomial, whitened_msgn
from bprong.optim import Periods
from bprong.optim.rules import Fallback
from bprong.optim.spectral import RMS, SpectralDirections
from helpers import assert_close, assert_unchanged, classification, layers_of, mlp, quick_cases, snapshot
from training import EXACT, assert_same_path, batches, train

DAMPING = {"forward_damping": 0.1, "backward_damping": 0.03}
SCHEDULE = {"forward_every": 3, "forward_offset": 0, "backward_every": 4, "backward_offset": 0}


CONVERGENT = (15 / 8, -10 / 8, 3 / 8)  # a, b and c of the quintic that leads to msgn itself, slowly
MANY = 10  # more would enlarge what bfloat16 rounds where there is no gradient


def newton_schulz(X):
    """Newton–Schulz steps as Muon's authors write them, with our coefficients and our bound on singular values."""
    if X.shape[0] > X.shape[1]:
        return newton_schulz(X.T).T
    X = X / torch.linalg.svdvals(X).pow(8).sum().pow(1 / 8)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


class ReferenceMuon(torch.optim.Optimizer):
    """Muon in float64 for matrices, without decay and without rescaling; Adam's average of gradients for biases.

    The biases move by SGD on that average, so that both average alike.
    """

    def __init__(self, params, lr, momentum, bias_lr):
        super().__init__(params, {"lr": lr, "momentum": momentum, "bias_lr": bias_lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 1 - group["momentum"])
                corrected = p.grad.lerp(state["average"], group["momentum"])
                if p.ndim == 2:
                    p.sub_(newton_schulz(corrected), alpha=group["lr"])
                else:
                    p.sub_(corrected, alpha=group["bias_lr"])


class NaturalBias:
    """Instead of Adam for biases: b moves by (D+ε)⁻¹ M_b, as b† does in the reference."""

    def __init__(self, optimizer, lr):
        self.optimizer = optimizer
        self.lr = lr

    def directions(self, gradients, states, rates):
        layers = {layer.bias: layer for layer in self.optimizer._whitening.layers.values()}
        averages = {p: g.lerp(states[p]["gradient_average"], 0.9) for p, g in gradients.items()}
        return {p: layers[p].backward.factor.left(average) * -self.lr for p, average in averages.items()}


@pytest.mark.parametrize("solver", quick_cases(["eigh", "cholesky", "symmetric"], "eigh"))
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_muon_on_the_whitened_network(solver, bias):
    """Whole whitening, without rescaling: one path for all three roots, across refreshes of both sides."""
    x, y = classification(60, 5, 3)
    plain = mlp(5, 7, 4, 3, bias=bias)
    whitened = bprong.whiten_(copy.deepcopy(plain))
    muon = ReferenceMuon(whitened.parameters(), lr=0.02, momentum=0.9, bias_lr=0.03)
    carry = {"average": "gradient"}
    rewhitening = bprong.Rewhitening(
        whitened, muon, "cross_entropy", fisher="exact", solver=solver, carry=carry, **DAMPING, **SCHEDULE
    )
    options = EXACT | {"power": "whole", "solver": "exact"}
    periods = Periods(**SCHEDULE)
    optimizer = bprong.BPRONG(
        plain, "cross_entropy", lr=0.02, step="spectral", momentum=0.9, every=periods, options=options,
        **DAMPING,
    )  # fmt: skip
    optimizer._rule.direction = SpectralDirections(NaturalBias(optimizer, lr=0.03), "whole", rms=None)
    for xb, yb in batches(x, y, 20, 25):
        rewhitening.step(xb)
        train(whitened, muon, [(xb, yb)])
        train(plain, optimizer, [(xb, yb)])
    for stock, layer in zip((m for m in plain if isinstance(m, nn.Linear)), layers_of(whitened), strict=True):
        assert_close(stock.weight, layer.weight, 1e-10)
        if bias:
            assert_close(stock.bias, layer.bias, 1e-10)


def muon_step(model, optimizer, x, y, lr):
    """What one step of torch's Muon adds to the weights of a whitened network, in ordinary coordinates."""
    before = [layer.weight.detach().clone() for layer in layers_of(model)]
    train(model, optimizer, [(x, y)])
    return [layer.weight.detach() - w for layer, w in zip(layers_of(model), before, strict=True)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_step_is_that_of_torchs_muon_on_the_whitened_network(monkeypatch):
    """With as many steps of both as lead to msgn itself.

    torch's Muon computes in bfloat16, so the steps agree to some percent only. Layers without bias.
    """
    monkeypatch.setattr("bprong.linalg.orthogonal.QUINTIC", CONVERGENT)
    monkeypatch.setattr(polynomial, "__defaults__", (MANY,))
    x, y = classification(60, 12, 8, dtype=torch.float32)
    plain = mlp(12, 16, 10, 8, bias=False, dtype=torch.float32)
    whitened = bprong.whiten_(copy.deepcopy(plain))
    exactly = {"ns_coefficients": CONVERGENT, "ns_steps": MANY}
    muon = torch.optim.Muon(whitened.parameters(), lr=0.01, weight_decay=0.0, momentum=0.9, **exactly)
    rewhitening = bprong.Rewhitening(whitened, muon, "cross_entropy", fisher="exact", **DAMPING, **SCHEDULE)
    options = EXACT | {"power": "whole", "solver": "exact"}
    periods = Periods(**SCHEDULE)
    optimizer = bprong.BPRONG(
        plain, "cross_entropy", lr=0.01, step="spectral", momentum=0.9, every=periods, options=options,
        **DAMPING,
    )  # fmt: skip
    optimizer._rule.direction = SpectralDirections(Fallback(), "whole", rms=None)
    for xb, yb in batches(x, y, 20, 6):
        plain.load_state_dict(bprong.fold(copy.deepcopy(whitened)).state_dict())
        rewhitening.step(xb)
        before = snapshot(plain)
        train(plain, optimizer, [(xb, yb)])
        for step, (name, value) in zip(muon_step(whitened, muon, xb, yb, 0.01), snapshot(plain).items(), strict=True):
            rows, columns = value.shape
            scale = max(1, rows / columns) ** 0.5  # torch's Muon has longer steps for tall matrices
            assert_close(step, scale * (value - before[name]), 0.03, name)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("turn", [False, True])
def test_rewhitening_with_muon_and_adam_for_biases(turn):
    """Re-whitening by rotations alone, U → QU and R → QR with the same c, must not change Muon's path."""
    x, y = classification(60, 6, 4)
    torch.manual_seed(0)
    model = bprong.whiten_(mlp(6, 8, 4))
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(weights, lr=0.02, weight_decay=0.0, momentum=0.9)
    adam = torch.optim.Adam(biases, lr=0.0)
    every = {"forward_every": 1, "backward_every": 1, "backward_offset": 0}
    solvers = ["eigh", "cholesky"] if turn else ["eigh", "eigh"]
    rewhitenings = [
        bprong.Rewhitening(model, [muon, adam], "mse", fisher="exact", solver=solver, **every) for solver in solvers
    ]
    rewhitenings[0].step(x)
    for xb, yb in batches(x, y, 20, 2):
        for optimizer in (muon, adam):
            optimizer.zero_grad()
        F.mse_loss(model(xb), F.one_hot(yb, 4).double()).backward()
        for optimizer in (muon, adam):
            optimizer.step()
    first = layers_of(model)[0]  # its inputs do not change, so that re-whitening it is a rotation
    buffer = muon.state[first.weight_dagger]["momentum_buffer"]
    before = first.U.T @ buffer.T @ first.R
    inverse_before = first.R.T @ first.R
    rewhitenings[1].step(x)
    assert_close(first.U.T @ buffer.T @ first.R @ torch.linalg.inv(first.R.T @ first.R) @ inverse_before, before, 1e-8)


def test_muons_average_moves_with_that_of_the_bias():
    """M = M_W − M_b cᵀ in the new coordinates: R' (M_W − M_b c'ᵀ) U'ᵀ, with M_b from the other optimizer."""
    x, _ = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 3))
    layer = layers_of(model)[0]
    sgd = torch.optim.SGD([layer.weight_dagger], lr=0.1, momentum=0.9)
    adam = torch.optim.Adam([layer.bias_dagger], lr=0.1)
    M_W = torch.randn_like(layer.weight_dagger)
    M_b = torch.randn_like(layer.bias_dagger)
    sgd.state[layer.weight_dagger]["momentum_buffer"] = M_W.clone()
    adam.state[layer.bias_dagger] = {"step": torch.tensor(1.0), "exp_avg": M_b.clone(), "exp_avg_sq": M_b.square()}
    rewhitening = bprong.Rewhitening(
        model, [sgd, adam], "cross_entropy", fisher="exact", carry={"momentum_buffer": "gradient"},
        backward_offset=0,
    )  # fmt: skip
    rewhitening.step(x)
    expected = layer.R @ (M_W - torch.outer(M_b, layer.c)) @ layer.U.T  # before, U and R were the identity and c zero
    assert_close(sgd.state[layer.weight_dagger]["momentum_buffer"], expected, 1e-10)
    assert_close(adam.state[layer.bias_dagger]["exp_avg"], layer.R @ M_b, 1e-10)


def test_optimizers_may_come_from_an_iterator_and_must_be_optimizers():
    """An iterator was used up by a check, and then no state was carried."""
    x, _ = classification(40, 5, 3)
    buffers = []
    for several in (list, iter):
        torch.manual_seed(0)
        model = bprong.whiten_(mlp(5, 3))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        buffer = torch.ones_like(layers_of(model)[0].weight_dagger)
        sgd.state[layers_of(model)[0].weight_dagger]["momentum_buffer"] = buffer
        bprong.Rewhitening(model, several([sgd]), "cross_entropy", fisher="exact", backward_offset=0).step(x)
        buffers.append(buffer)
    assert_close(buffers[1], buffers[0], 1e-12)
    with pytest.raises(TypeError, match="the state of str"):
        bprong.Rewhitening(model, [sgd, "adam"], "cross_entropy")


@pytest.mark.parametrize("cleared", ["weight", "bias"])
def test_a_gradient_is_not_taken_for_an_average(cleared):
    """One optimizer's gradients are set to None before a refresh and the other's are not."""
    x, _ = classification(40, 5, 3)
    layers = []
    for left in (False, True):
        model = bprong.whiten_(mlp(5, 3))
        layer = layers_of(model)[0]
        sgd = torch.optim.SGD([layer.weight_dagger], lr=0.1, momentum=0.9)
        adam = torch.optim.Adam([layer.bias_dagger], lr=0.1)
        sgd.state[layer.weight_dagger]["momentum_buffer"] = torch.ones_like(layer.weight_dagger)
        ones = torch.ones_like(layer.bias_dagger)
        adam.state[layer.bias_dagger] = {"step": torch.tensor(1.0), "exp_avg": ones, "exp_avg_sq": ones.clone()}
        if left:
            other = layer.bias_dagger if cleared == "weight" else layer.weight_dagger
            other.grad = torch.full_like(other, 7.0)
        rewhitening = bprong.Rewhitening(
            model, [sgd, adam], "cross_entropy", fisher="exact", carry={"momentum_buffer": "gradient"},
            backward_offset=0,
        )  # fmt: skip
        rewhitening.step(x)
        layers.append((sgd.state[layer.weight_dagger]["momentum_buffer"], ones))
    for without, beside in zip(*layers, strict=True):
        assert_close(beside, without, 1e-12)


def test_steps_have_the_stated_root_mean_square():
    x, y = classification(60, 6, 4)
    model = mlp(6, 9, 4)
    before = snapshot(model)
    train(model, bprong.BPRONG(model, "cross_entropy", lr=0.05, step="spectral"), [(x, y)])
    for name in ("0.weight", "2.weight"):
        step = snapshot(model)[name] - before[name]
        assert math.isclose(step.square().mean().sqrt(), RMS * 0.05, rel_tol=1e-9), name


def test_half_whitening_is_whole_whitening_by_the_roots(monkeypatch):
    """Power "half" with P, Q is "whole" with √P, √Q."""
    x, y = classification(60, 6, 4)
    half, whole = (mlp(6, 9, 4) for _ in range(2))
    whole.load_state_dict(half.state_dict())
    optimizers = [
        bprong.BPRONG(m, "cross_entropy", lr=0.05, step="spectral", options=EXACT | {"power": power}, every=100)
        for m, power in ((half, "half"), (whole, "whole"))
    ]
    seen = []

    def by_roots(matrix, *factors):
        roots = []
        for factor in factors:
            values, vectors = torch.linalg.eigh(factor.inverse)
            seen.append(factor)
            roots.append(Dense(vectors @ values.sqrt().diag() @ vectors.T, factor.blocks))
        return whitened_msgn(matrix, *roots)

    train(half, optimizers[0], batches(x, y, 20, 5))
    monkeypatch.setattr("bprong.optim.spectral.whitened_msgn", by_roots)
    train(whole, optimizers[1], batches(x, y, 20, 5))
    assert seen
    assert_same_path(snapshot(half), snapshot(whole), 1e-9)


def test_weight_decay_is_decoupled():
    x, y = classification(20, 5, 3)
    plain = mlp(5, 3)
    decayed = copy.deepcopy(plain)
    start = snapshot(plain)
    train(plain, bprong.BPRONG(plain, "cross_entropy", lr=0.1, step="spectral", options=EXACT), [(x, y)])
    optimizer = bprong.BPRONG(decayed, "cross_entropy", lr=0.1, step="spectral", weight_decay=0.3, options=EXACT)
    train(decayed, optimizer, [(x, y)])
    for name, value in snapshot(decayed).items():
        assert_close(value, snapshot(plain)[name] - 0.1 * 0.3 * start[name], 1e-12, name)


def test_packed_projections_are_three_matrices():
    """Query, key and value of one parameter each move with an RMS of their own."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    head = nn.Sequential(model, nn.Linear(8, 3).double())
    x = torch.randn(10, 4, 8, dtype=torch.float64)
    y = torch.randint(3, (10, 4))
    before = model.self_attn.in_proj_weight.detach().clone()
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(head, criterion, lr=0.1, step="spectral")
    train(head, optimizer, [(x, y)], loss=lambda a, b: criterion(a.flatten(0, 1), b.flatten()))
    for part in (model.self_attn.in_proj_weight.detach() - before).split(8):
        assert math.isclose(part.square().mean().sqrt(), RMS * 0.1, rel_tol=1e-9)


def test_prong_has_it_too():
    """Forward only: the errors' side is the identity."""
    x, y = classification(60, 6, 4)
    model = mlp(6, 9, 4)
    optimizer = bprong.PRONG(model, "cross_entropy", lr=0.05, step="spectral")
    start = F.cross_entropy(model(x), y).item()
    train(model, optimizer, batches(x, y, 20, 40))
    assert all(layer.backward.factor is None for layer in optimizer._whitening.layers.values())
    assert F.cross_entropy(model(x), y).item() < start / 2


def test_a_layer_without_gradient_stays():
    """A weight whose gradient is zero is not moved by an average of zeros."""
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, step="spectral", options=EXACT)
    train(model, optimizer, [(x, y)])
    fresh = mlp(5, 3)
    second = bprong.BPRONG(fresh, "cross_entropy", lr=0.1, step="spectral", options=EXACT)
    before = snapshot(fresh)
    F.cross_entropy(fresh(x), y).mul(0).backward()
    second.step()
    assert_unchanged(before, snapshot(fresh))


def test_resume_is_exact():
    x, y = classification(60, 6, 4)
    model = mlp(6, 9, 4)
    settings = {"lr": 0.05, "step": "spectral", "every": 4, "options": {"seed": 0}}
    optimizer = bprong.BPRONG(model, "cross_entropy", **settings)
    data = list(batches(x, y, 20, 12))
    train(model, optimizer, data[:6])
    other = copy.deepcopy(model)
    resumed = bprong.BPRONG(other, "cross_entropy", **settings)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data[6:])
    train(other, resumed, data[6:])
    assert_unchanged(snapshot(model), snapshot(other))


@pytest.mark.parametrize("lr", [0.05, "auto"])
@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_the_state_of_the_other_step_is_refused(lr, step):
    x, y = classification(20, 6, 4)
    model = mlp(6, 4)
    saved = bprong.BPRONG(model, "cross_entropy", lr, step=step)
    train(model, saved, [(x, y)])
    other = bprong.BPRONG(model, "cross_entropy", lr, step="natural" if step == "spectral" else "spectral")
    with pytest.raises(ValueError, match='the same step \\("natural" or "spectral"\\)'):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e20, 1e30])
@pytest.mark.parametrize("shape", [(5, 7), (2, 7, 5)])
def test_a_direction_does_not_depend_on_the_size_of_the_gradient(size, shape):
    """Squares of these overflow or vanish in float32."""
    M = torch.randn(shape, dtype=torch.float32)
    assert_close(whitened_msgn(M * size), whitened_msgn(M), 1e-4)
    assert not whitened_msgn(0 * M).any()


def test_large_gradients_are_survived():
    x, y = classification(20, 6, 4)
    model = mlp(6, 9, 4).float()
    before = snapshot(model)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, step="spectral")
    (1e25 * F.cross_entropy(model(x.float()), y)).backward()
    optimizer.step()
    for name in ("0.weight", "2.weight"):
        moved = snapshot(model)[name] - before[name]
        assert_close(moved.square().mean().sqrt(), torch.tensor(0.01 * RMS), 1e-3)


@pytest.mark.parametrize("lr", [0.02, "auto"])
def test_float16_trains(lr):
    """Adam's second moment of small gradients vanishes there, and biases follow Adam."""
    x, y = classification(40, 6, 3)
    model = mlp(6, 9, 3).half()
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr, step="spectral", every=3)
    train(model, optimizer, [(x.half(), y)] * 20)
    assert all(p.isfinite().all() for p in model.parameters())


def test_what_it_refuses():
    model = mlp(5, 3)
    with pytest.raises(ValueError, match="momentum must be above 0"):
        bprong.BPRONG(model, "cross_entropy", lr=0.1, step="spectral", momentum=0.0)
    with pytest.raises(ValueError, match="step must be one of"):
        bprong.BPRONG(model, "cross_entropy", lr=0.1, step="muon")
    with pytest.raises(ValueError, match="power"):
        bprong.BPRONG(model, "cross_entropy", lr=0.1, step="spectral", options={"power": "third"})
