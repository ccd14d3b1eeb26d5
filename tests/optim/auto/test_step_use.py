"""lr="auto" in use: evaluations leave no trace, each limitation is reported once, and ordinary training loops work."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from automatic import DATA, auto, loss_of
from bprong import WhiteningWarning
from helpers import assert_close, assert_unchanged, mlp, quick_cases, snapshot
from training import EXACT, batches, train


def encoder():
    return nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), nn.Linear(6, 3))


def normed():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def test_an_evaluation_leaves_no_trace():
    """At lr 0, random numbers, buffers, gradients and modes are the same with and without steps."""
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
def test_attention_batch_norm_and_dropout_use_forward_mode_ad(made):
    """Without a warning, as warnings are errors in these tests."""
    torch.manual_seed(0)
    model = made().double()
    x, y = DATA
    if made is encoder:
        x = torch.randn(30, 4, 6).double()
        y = torch.randint(3, (30, 4))
    optimizer = auto(model)
    for xb, yb in batches(x, y, 15, 25):
        optimizer.zero_grad()
        F.cross_entropy(model(xb).flatten(0, -2), yb.flatten()).backward()
        optimizer.step()
    assert optimizer._rule.loss_model.forward_mode


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


def test_without_forward_mode_ad_finite_differences_are_used_with_one_warning():
    """Their error is ε^⅔, about 1e-10 in float64, which thirty steps amplify. The warning is about the user's line."""
    model = mlp(5, 4, 3)
    other = mlp(5, 4, 3, phi=Custom)
    other.load_state_dict(model.state_dict())
    train(model, auto(model, options=EXACT), batches(*DATA, 20, 30))
    optimizer = auto(other, options=EXACT)

    def loop():
        for x, y in batches(*DATA, 20, 30):
            optimizer.zero_grad()
            F.cross_entropy(other(x), y).backward()
            optimizer.step()

    with pytest.warns(WhiteningWarning, match="using finite differences") as warned:
        loop()
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-4, name)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_can_be_given_for_training_in_eval_mode(reduction):
    """observe(x, y) gives the path of training mode, because nothing in this model depends on the mode."""
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model).eval()
    train(model, auto(model, options=EXACT), batches(*DATA, 20, 30))
    loss = nn.CrossEntropyLoss(reduction=reduction)
    optimizer = auto(other, loss, options=EXACT)
    for x, y in batches(*DATA, 20, 30):
        optimizer.zero_grad()
        loss(other(x), y).backward()
        optimizer.observe(x, y)
        optimizer.step()
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-6, name)


def test_a_loss_that_is_not_a_log_likelihood_trains():
    """With a penalty on the output, and without a warning."""

    def loss(f, y):
        return F.cross_entropy(f, y) + 0.02 * f.square().mean()

    model = mlp(5, 4, 3)
    optimizer = auto(model)
    before = loss_of(model)
    train(model, optimizer, batches(*DATA, 20, 40), loss=loss)
    assert loss_of(model) < before / 2


def test_a_call_without_a_loss_is_not_used_as_the_batch():
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    train(model, auto(model, every=100, options=EXACT), [DATA])
    optimizer = auto(other, every=100, options=EXACT)
    F.cross_entropy(other(DATA[0]), DATA[1]).backward()
    bprong.audit(other, DATA[0][:7], "cross_entropy")
    optimizer.step()
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-12, name)


def test_a_step_without_any_batch_raises_an_error_that_says_what_to_do():
    model = mlp(5, 3).eval()
    optimizer = auto(model)
    F.cross_entropy(model(DATA[0]), DATA[1]).backward()
    with pytest.raises(RuntimeError, match=r"observe\(x"):
        optimizer.step()


def test_a_closure_gives_the_same_path():
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
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


def test_prong_trains():
    model = mlp(5, 4, 3)
    before = loss_of(model)
    train(model, bprong.PRONG(model, "cross_entropy", lr="auto"), batches(*DATA, 20, 25))
    assert loss_of(model) < before / 2


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


@pytest.mark.parametrize("clip", [None, 0.1])
def test_unscaling_does_not_matter(clip):
    """GradScaler multiplies the loss by powers of two and divides the gradients by them, which then may be clipped."""
    model = mlp(5, 4, 3, dtype=torch.float32)
    other = copy.deepcopy(model)
    data = list(batches(DATA[0].float(), DATA[1], 20, 10))
    train(model, auto(model, options=EXACT), data)
    optimizer = auto(other, options=EXACT)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(other(x), y)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    for name, value in snapshot(model).items():
        assert_close(snapshot(other)[name], value, 1e-2, name)


def test_a_compiled_model_takes_the_same_path():
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    train(model, auto(model), batches(*DATA, 20, 10))
    compiled = torch.compile(other, backend="eager")
    optimizer = auto(compiled)
    train(compiled, optimizer, batches(*DATA, 20, 10))
    assert_unchanged(snapshot(model), snapshot(other))
    assert optimizer._rule.loss_model.model is other  # evaluations run the model as it was written


@pytest.mark.parametrize("size", quick_cases([1, 2], 1))
def test_tiny_batches_do_not_diverge(size):
    model = mlp(5, 4, 3)
    before = loss_of(model)
    train(model, auto(model), batches(*DATA, size, 120))
    assert loss_of(model) < before


def test_gradients_of_zero():
    """At the start they do nothing, in mid-training they are a step, and a perfect fit remains one."""
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    before = snapshot(model)
    (0 * model(DATA[0]).sum()).backward()
    optimizer.step()
    assert_unchanged(before, snapshot(model))
    train(model, optimizer, batches(*DATA, 20, 3))
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (0 * F.cross_entropy(model(DATA[0]), DATA[1])).backward()
        optimizer.step()
    train(model, optimizer, batches(*DATA, 20, 20))
    assert loss_of(model) < 0.5
    x = DATA[0]
    y = x @ torch.randn(5, 1, dtype=torch.float64)
    exact = mlp(5, 1)
    optimizer = auto(exact, "mse")
    for _ in range(80):
        optimizer.zero_grad()
        F.mse_loss(exact(x), y).backward()
        optimizer.step()
    assert F.mse_loss(exact(x), y) < 1e-12 * y.square().mean()


# Progress -------------------------------------------------------------------------------------------------------------


def noisy_run(noise, steps):
    """The rule of spectral steps in a linear regression on fresh data, and its mean error in the last steps."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Linear(20, 5, dtype=torch.float64)
    teacher = torch.randn(20, 5, dtype=torch.float64, generator=generator)
    optimizer = bprong.BPRONG(model, "mse", step="spectral")
    losses = []
    for _ in range(steps):
        x = torch.randn(30, 20, dtype=torch.float64, generator=generator)
        y = x @ teacher + noise * torch.randn(30, 5, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        losses.append(float((model.weight.detach() - teacher.T).square().mean()))
    return optimizer._rule.rule, sum(losses[-50:]) / 50


def test_spectral_steps_become_shorter_where_only_noise_is_left_and_nowhere_else(monkeypatch):
    rule, _ = noisy_run(0.0, 80)
    assert rule.gain == 1
    rule, error = noisy_run(3.0, 300)
    assert rule.gain <= 0.5
    monkeypatch.setattr("bprong.optim.auto.rule.Progress.note", lambda *arguments: None)
    rule, error_of_full_steps = noisy_run(3.0, 300)
    assert rule.gain == 1
    assert error < 0.7 * error_of_full_steps
