"""Training networks with whitened convolutions: steps, momentum, refreshes."""

import copy

import pytest
import torch
import torch.nn.functional as F

import bprong
from bprong.likelihood.families import Categorical
from bprong.network.layers import WhitenedLayer
from bprong.optim import Periods
from convolutions import FORMS, batch, f64, moved, net, rows, sides
from helpers import assert_close
from training import EXACT


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_sgd_is_the_preconditioned_step(form):
    """ΔW = −η (RᵀR)(g_W − g_b cᵀ)(UᵀU), Δb = −η (RᵀR) g_b − ΔW c, for each group."""
    x, y = batch()
    plain = net()
    lr = 0.05
    model = bprong.whiten_(copy.deepcopy(plain), **FORMS[form])
    layers = [moved(m, 7 * i) for i, m in enumerate(model.modules()) if isinstance(m, WhitenedLayer)]
    before = [(layer.weight.detach(), layer.bias.detach()) for layer in layers]
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(plain(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=lr).step()
    for layer, stock, (W, b) in zip(layers, (plain[0], plain[2], plain[5]), before, strict=True):
        U, c, R = sides(layer)
        g_W = stock.weight.grad.reshape(len(U), -1, U.shape[-1])
        g_b = stock.bias.grad.reshape(len(U), -1, 1)
        step_W = -lr * R.mT @ R @ (g_W - g_b * c) @ U.mT @ U
        step_b = -lr * R.mT @ R @ g_b - step_W @ c.mT
        assert_close(layer.weight - W, step_W.reshape(W.shape), 1e-9)
        assert_close(layer.bias - b, step_b.reshape(b.shape), 1e-9)


def path(solver, form, steps=30):
    x, y = batch(60)
    model = bprong.whiten_(net(), **FORMS[form])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    rewhitening = bprong.Rewhitening(
        model, optimizer, "cross_entropy", fisher="exact", forward_every=5, backward_every=5, backward_offset=2,
        solver=solver,
    )  # fmt: skip
    for t in range(steps):
        chosen = torch.arange(t * 20, (t + 1) * 20) % 60
        rewhitening.step(x[chosen])
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in bprong.fold(model).parameters()])


@pytest.mark.parametrize("form", FORMS)
def test_momentum_follows_the_same_path_for_every_root(form):
    assert_close(path("cholesky", form), path("eigh", form), 1e-9)


def test_momentum_that_is_not_transformed_follows_another_path(monkeypatch):
    monkeypatch.setattr("bprong.network.rewhitening.carry_", lambda *_: None)
    ours = path("cholesky", "full")
    other = path("eigh", "full")
    assert float((ours - other).norm() / other.norm()) > 0.01


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_state_of_other_optimizers_is_transformed_and_the_loss_falls(kind):
    x, y = batch()
    model = bprong.whiten_(net())
    optimizer = kind(model.parameters(), lr=0.005)
    rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", forward_every=4, backward_every=4)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
        outputs = model(x).detach()
        rewhitening.step(x)
        assert_close(model(x), outputs, 1e-10)
    assert losses[-1] < 0.8 * losses[0]
    held = optimizer.state[model[0].weight_dagger]
    assert all(t.shape == (4, 1, 3, 3) and t.isfinite().all() for t in held.values() if t.ndim)


def test_after_a_refresh_inputs_and_errors_are_white():
    """U (Ž+ε) Uᵀ = I and R (D+ε) Rᵀ = I, with Ž and D from torch's own patches and gradients of the stock network."""
    x, _ = batch(64)
    plain = net()
    eps = 1e-6
    model = bprong.whiten_(copy.deepcopy(plain))
    done = bprong.Rewhitening(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "cross_entropy", fisher="exact",
        forward_damping=eps, backward_damping=eps, backward_offset=0,
    ).step(x)  # fmt: skip
    assert len(done) == 6
    assert_close(model(x), plain(x), 1e-9)
    hidden = plain[0](x)
    a = plain[2](plain[1](hidden))
    out = plain[3:](a)
    D = [torch.zeros(2, 2, 2, dtype=f64), torch.zeros(1, 4, 4, dtype=f64)]
    for root in Categorical().roots(out):
        for k, delta in enumerate(torch.autograd.grad(out, (hidden, a), root, retain_graph=True)):
            errors = delta.unflatten(1, (len(D[k]), -1)).movedim(0, 2).flatten(2)
            D[k] = D[k] + errors @ errors.mT / len(x)
    for k, (conv, layer, inputs) in enumerate([(plain[0], model[0], x), (plain[2], model[2], plain[1](hidden))]):
        U, c, R = sides(layer)
        z = rows(conv, inputs).transpose(0, 1).flatten(1, 2)
        assert_close(c, z.mean(1, keepdim=True), 1e-12)
        Z = (z - c).mT @ (z - c) / z.shape[1]
        for matrix, second in ((U, Z), (R, D[k])):
            eye = torch.eye(second.shape[-1], dtype=f64).expand_as(second)
            assert_close(matrix @ (second + eps * eye) @ matrix.mT, eye, 1e-7)


def test_without_a_trainable_bias_nothing_is_centred():
    x, _ = batch()
    model = bprong.whiten_(net(bias=False))
    before = model(x).detach()
    bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), "cross_entropy").step(x)
    assert not model[0].c.any()
    assert model[2].c.any()
    assert_close(model(x), before, 1e-10)
    with pytest.raises(ValueError, match="c must stay 0"):
        model[0].rewhiten_("forward", model[0].U, torch.ones_like(model[0].c))


def test_the_audit_covers_linear_layers_only():
    report = bprong.audit(bprong.whiten_(net()), batch()[0], "cross_entropy")
    assert set(report["layers"]) == {"5"}


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.rest), 0.8])
@pytest.mark.parametrize("form", FORMS)
def test_the_optimizer_follows_the_same_path_as_the_paper_network(form, momentum):
    """Forty steps from the same start, with refreshes of both sides: outputs agree to 1e-8."""
    x, y = batch()
    plain = net()
    model = bprong.whiten_(copy.deepcopy(plain), **FORMS[form])
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    schedule = {"forward_every": 6, "forward_offset": 0, "backward_every": 6, "backward_offset": 3}
    damping = {"forward_damping": 0.5, "backward_damping": 0.5}
    rewhitening = bprong.Rewhitening(
        model, sgd, "cross_entropy", solver="cholesky", fisher="exact", **schedule, **damping
    )
    arguments = damping | {"every": Periods(**schedule), "options": EXACT | FORMS[form]}
    optimizer = bprong.BPRONG(plain, "cross_entropy", lr=0.01, momentum=momentum, **arguments)
    with torch.no_grad():  # so that this call is not taken for a batch of training
        start = plain(x)
    for t in range(40):
        chosen = torch.roll(torch.arange(len(x)), 3 * t)[:8]
        rewhitening.step(x[chosen])
        for network, moving in ((model, sgd), (plain, optimizer)):
            moving.zero_grad()
            F.cross_entropy(network(x[chosen]), y[chosen]).backward()
            moving.step()
    assert_close(plain(x), model(x), 1e-8)
    assert (plain(x).detach() - start).norm() > 0.05 * start.norm()
