"""lr="auto" in use: it leaves no trace, says what it cannot do once, and takes what users do to their loops."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from automatic import DATA, auto, loss_of
from bprong.schedule import WhiteningWarning
from helpers import assert_close, assert_unchanged, mlp, snapshot
from training import EXACT, batches, train


def encoder():
    return nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), nn.Linear(6, 3))


def normed():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def test_an_evaluation_leaves_no_trace():
    """At lr 0, the same forward passes with and without steps: random numbers, buffers, gradients, modes."""
    ends = []
    for steps in (False, True):
        torch.manual_seed(4)
        model = normed().double()
        optimizer = auto(model)
        optimizer.param_groups[0]["lr"] = 0.0
        model[1].eval()
        model[1].train()
        model[3].eval()
        modes = [m.training for m in model.modules()]
        for x, y in batches(*DATA, 20, 8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            if steps:
                optimizer.step()
            assert_unchanged(gradients, {name: p.grad for name, p in model.named_parameters()})
        assert modes == [m.training for m in model.modules()]
        ends.append(snapshot(model) | {"random": torch.rand(3)} | gradients)
    assert_unchanged(*ends)


@pytest.mark.parametrize("made", [encoder, normed])
def test_attention_and_batch_norm_have_forward_mode(made):
    """Warnings are errors here; dropout besides."""
    torch.manual_seed(0)
    model = made().double()
    x, y = (torch.randn(30, 4, 6).double(), torch.randint(3, (30, 4))) if made is encoder else DATA
    optimizer = auto(model)
    for xb, yb in batches(x, y, 15, 25):
        optimizer.zero_grad()
        F.cross_entropy(model(xb).flatten(0, -2), yb.flatten()).backward()
        optimizer.step()
    assert optimizer._rule.auto.forward_mode


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class Custom(nn.Module):
    def forward(self, x):
        return Tanh.apply(x)


def test_what_has_no_forward_mode_goes_by_finite_differences_and_says_so_once():
    """They are as good as ε^⅔, about 1e-10 in float64; thirty steps amplify that."""
    model, other = mlp(5, 4, 3), mlp(5, 4, 3, phi=Custom)
    other.load_state_dict(model.state_dict())
    train(model, auto(model, options=EXACT), batches(*DATA, 20, 30))
    with pytest.warns(WhiteningWarning, match="finite differences stand in for it") as said:
        train(other, auto(other, options=EXACT), batches(*DATA, 20, 30))
    assert len(said) == 1
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-4, name)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_can_be_given_for_training_in_eval_mode(reduction):
    """observe(x, y): the path of training mode, as nothing here depends on the mode."""
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model).eval()
    train(model, auto(model, options=EXACT), batches(*DATA, 20, 30))
    optimizer = auto(other, options=EXACT)
    for x, y in batches(*DATA, 20, 30):
        optimizer.zero_grad()
        F.cross_entropy(other(x), y, reduction=reduction).backward()
        optimizer.observe(x, y)
        optimizer.step()
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-6, name)


def test_a_loss_that_is_no_log_likelihood_says_so_once_and_trains():
    """With a penalty on the output, targets and scale cannot be told from the gradient there."""

    def loss(f, y):
        return F.cross_entropy(f, y) + 0.02 * f.square().mean()

    model = mlp(5, 4, 3)
    optimizer, before = auto(model), loss_of(model)
    with pytest.warns(WhiteningWarning, match="targets cannot be told") as said:
        train(model, optimizer, batches(*DATA, 20, 40), loss=loss)
    assert len(said) == 1
    assert loss_of(model) < before / 2


def test_a_call_that_no_loss_comes_of_is_not_taken_for_the_batch():
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    train(model, auto(model, every=100, options=EXACT), [DATA])
    optimizer = auto(other, every=100, options=EXACT)
    F.cross_entropy(other(DATA[0]), DATA[1]).backward()
    bprong.audit(other, DATA[0][:7])
    optimizer.step()
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-12, name)


def test_no_batch_at_all_says_what_to_do():
    model = mlp(5, 3).eval()
    optimizer = auto(model)
    F.cross_entropy(model(DATA[0]), DATA[1]).backward()
    with pytest.raises(RuntimeError, match=r"observe\(x"):
        optimizer.step()


def test_a_closure_and_prong():
    model = mlp(5, 4, 3)
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = auto(other)
    for x, y in batches(*DATA, 20, 25):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(other(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    train(model, auto(model), batches(*DATA, 20, 25))
    assert_unchanged(snapshot(model), snapshot(other))
    before = loss_of(third)
    train(third, bprong.PRONG(third, lr="auto"), batches(*DATA, 20, 25))
    assert loss_of(third) < before / 2


def test_autocast_trains():
    model = mlp(5, 8, 3, dtype=torch.float32)
    optimizer = auto(model)
    with torch.no_grad():
        before = float(F.cross_entropy(model(DATA[0].float()), DATA[1]))
    for x, y in batches(DATA[0].float(), DATA[1], 20, 30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert float(F.cross_entropy(model(DATA[0].float()), DATA[1])) < before / 2


def test_unscaling_does_not_matter():
    """GradScaler multiplies the loss and divides the gradients, by powers of two."""
    model = mlp(5, 4, 3, dtype=torch.float32)
    other = copy.deepcopy(model)
    data = list(batches(DATA[0].float(), DATA[1], 20, 10))
    train(model, auto(model, options=EXACT), data)
    optimizer, scaler = auto(other, options=EXACT), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(other(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-2, name)


def test_a_compiled_model_takes_the_same_path():
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    train(model, auto(model), batches(*DATA, 20, 10))
    compiled = torch.compile(other, backend="eager")
    train(compiled, auto(compiled), batches(*DATA, 20, 10))
    assert_unchanged(snapshot(model), snapshot(other))


@pytest.mark.parametrize("size", [1, 2])
def test_tiny_batches_do_not_diverge(size):
    model = mlp(5, 4, 3)
    before = loss_of(model)
    train(model, auto(model), batches(*DATA, size, 120))
    assert loss_of(model) < before


def test_gradients_that_vanish():
    """Zero from the start do nothing; zero in mid-training are a step; a perfect fit stays one."""
    model = mlp(5, 4, 3)
    optimizer, before = auto(model), snapshot(model)
    (0 * model(DATA[0]).sum()).backward()
    optimizer.step()
    assert_unchanged(before, snapshot(model))
    train(model, optimizer, batches(*DATA, 20, 3))
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (0 * model(DATA[0]).sum()).backward()
        optimizer.step()
    train(model, optimizer, batches(*DATA, 20, 20))
    assert loss_of(model) < 0.5
    x, y = DATA[0], DATA[0] @ torch.randn(5, 1, dtype=torch.float64)
    exact = mlp(5, 1)
    optimizer = auto(exact, likelihood="gaussian")
    for _ in range(80):
        optimizer.zero_grad()
        F.mse_loss(exact(x), y).backward()
        optimizer.step()
    assert F.mse_loss(exact(x), y) < 1e-12 * y.square().mean()
