"""BPRONG(model) on the user's own model: the conditions of the README's table of guarantees.

Uncovered parameters are in test_fallback.py, convolutions and transformers in test_layers.py.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bprong
from bprong.errors import WhiteningWarning
from bprong.optim import Periods
from bprong.whitening.layer import PATIENCE
from helpers import assert_close, assert_unchanged, classification, layers_of, mlp, quick_cases, snapshot
from training import EXACT, assert_same_path, batches, default_backend, literal, path, train


def twins(*widths, dtype=torch.float64):
    """Two models with the same parameters."""
    first = mlp(*widths, dtype=dtype)
    return first, copy.deepcopy(first)


# The path -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", quick_cases([bprong.BPRONG, bprong.PRONG], bprong.BPRONG))
def test_the_papers_network(kind, momentum):
    """200 steps in float64 with an exact Fisher matrix: the whitened network with SGD, in ordinary coordinates."""
    x, y = classification(90, 5, 3)
    lr = 0.05 * (1 - momentum)
    plain = mlp(5, 6, 4, 3)
    two_sided = kind is bprong.BPRONG
    whitened = bprong.whiten_(copy.deepcopy(plain), backward=two_sided)
    sgd = torch.optim.SGD(whitened.parameters(), lr=lr, momentum=momentum)
    schedule = {"forward_every": 7, "forward_offset": 0}
    damping = {"forward_damping": 0.1}
    if two_sided:
        schedule |= {"backward_every": 5, "backward_offset": 2}
        damping |= {"backward_damping": 0.03}
    options = {"average": 0.0} | ({"fisher": "exact"} if two_sided else {})
    rewhitening = bprong.Rewhitening(whitened, sgd, "cross_entropy", **options, **damping, **schedule)
    optimizer = kind(
        plain,
        "cross_entropy",
        lr=lr,
        momentum=momentum,
        max_step=None,
        every=Periods(**schedule),
        options=options,
        **damping,
    )
    for xb, yb in batches(x, y, 20, 200):
        rewhitening.step(xb)
        train(whitened, sgd, [(xb, yb)])
        train(plain, optimizer, [(xb, yb)])
    for layer, stock in zip(layers_of(whitened), (m for m in plain if isinstance(m, nn.Linear)), strict=True):
        assert_close(stock.weight, layer.weight, 1e-8)
        assert_close(stock.bias, layer.bias, 1e-8)


def test_in_place_relu():
    plain = mlp(5, 8, 8, 3, phi=nn.ReLU)
    inplace = copy.deepcopy(plain)
    for module in inplace:
        module.inplace = True
    assert_same_path(path(inplace), path(plain))


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_() if self.reentrant else x  # re-entrant checkpoints need an input with a gradient
        return self.inner[3:](checkpoint(self.inner[:3], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    plain = mlp(5, 8, 8, 3)
    assert_same_path(path(Checkpointed(copy.deepcopy(plain), reentrant)), path(plain))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # of torch 2.6 at itself
@pytest.mark.parametrize(
    ("given", "backend"),
    [
        pytest.param("compiled", default_backend(), marks=pytest.mark.rest),
        ("compiled", "aot_eager"),
        ("in place", "aot_eager"),
    ],
)
def test_torch_compile(given, backend):
    """The optimizer is given the compiled model, or one that was compiled in place."""
    plain = mlp(5, 8, 3)
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    if given == "in place":
        ours = path(model, prepare=lambda m: m.compile(backend=backend))
    else:
        ours = path(torch.compile(model, backend=backend))
    assert_same_path(ours, path(plain))


def test_bf16_autocast():
    """Statistics are those of the user's pass, up to its rounding; factors are in float32."""
    model = mlp(5, 16, 3, dtype=torch.float32)
    x, y = classification(60, 5, 3, dtype=torch.float32)
    found = []
    for autocast in (True, False):
        copied = copy.deepcopy(model)
        optimizer = bprong.BPRONG(copied, "cross_entropy", lr=0.1, options=EXACT)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(copied(x), y)
        loss.backward()
        optimizer.step()
        found.append(optimizer._whitening.layers["0"])
    for ours, expected in zip(found[0].sides, found[1].sides, strict=True):
        assert ours.factor.inverse.dtype is torch.float32
        assert_close(ours.factor.inverse, expected.factor.inverse, 1e-2, ours.name)


def test_grad_scaler_with_a_skipped_step():
    x, y = classification(60, 5, 3, dtype=torch.float32)
    plain, scaled = twins(5, 8, 3, dtype=torch.float32)
    before = None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = bprong.BPRONG(scaled, "cross_entropy", lr=0.1, every=3, options=EXACT)
    for t, (xb, yb) in enumerate(batches(x, y, 20, 8)):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(scaled(xb), yb)).backward()
        if t == 4:  # an overflow: the scaler skips the step
            scaled[0].weight.grad[0, 0] = float("inf")
            before = snapshot(scaled)
        scaler.step(optimizer)
        scaler.update()
        if t == 4:
            assert_unchanged(before, snapshot(scaled))
    other = bprong.BPRONG(plain, "cross_entropy", lr=0.1, every=3, options=EXACT)
    train(plain, other, [batch for t, batch in enumerate(batches(x, y, 20, 8)) if t != 4])
    assert_same_path(snapshot(scaled), snapshot(plain), 1e-4)


@pytest.mark.parametrize("k", [2, 4])
def test_gradient_accumulation(k):
    x, y = classification(60, 5, 3)
    big, small = twins(5, 8, 3)
    first, second = (
        bprong.BPRONG(m, "cross_entropy", lr=0.1, momentum=0.5, every=3, options=EXACT) for m in (big, small)
    )
    for xb, yb in batches(x, y, 20, 9):
        train(big, first, [(xb, yb)])
        second.zero_grad()
        for xm, ym in zip(xb.chunk(k), yb.chunk(k), strict=True):
            (F.cross_entropy(small(xm), ym) / k).backward()
        second.step()
    assert_same_path(snapshot(small), snapshot(big))


def test_dropout_batchnorm_layernorm():
    """The random stream and BatchNorm's statistics are those of a loop without a pass of the optimizer's own."""
    x, y = classification(60, 5, 3)
    streams = []
    for measured in (True, False):
        torch.manual_seed(1)
        body = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.LayerNorm(6), nn.ReLU()]
        model = nn.Sequential(*body, nn.Linear(6, 3)).double()
        optimizer = (
            bprong.BPRONG(model, "cross_entropy", lr=0.0, every=2)
            if measured
            else torch.optim.SGD(model.parameters(), lr=0.0)
        )
        train(model, optimizer, batches(x, y, 20, 6))
        streams.append((torch.random.get_rng_state(), model[1].running_mean, model[1].num_batches_tracked))
    for ours, expected in zip(*streams, strict=True):
        assert torch.equal(ours, expected)


# Layers in odd situations ---------------------------------------------------------------------------------------------


def test_a_layer_unused_in_a_step():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Linear(5, 3)
            self.sometimes = nn.Linear(5, 3)
            self.use = True

        def forward(self, x):
            return self.always(x) + self.sometimes(x) if self.use else self.always(x)

    model = Sometimes().double()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, every=2)
    x, y = classification(20, 5, 3)
    train(model, optimizer, [(x, y)])
    model.use = False
    before = snapshot(model.sometimes)
    train(model, optimizer, [(x, y)] * 4)
    assert_unchanged(before, snapshot(model.sometimes))
    model.use = True
    train(model, optimizer, [(x, y)] * 4)
    assert not torch.equal(before["weight"], model.sometimes.weight)


def test_a_frozen_layer():
    model = mlp(5, 6, 4, 3)
    model[2].requires_grad_(False)
    before = snapshot(model[2])
    path(model)
    assert_unchanged(before, snapshot(model[2]))


def test_a_module_called_twice():
    """Its statistics are those of both calls: Ž over all rows, D summed over them."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    model = Twice().double()
    x, y = classification(30, 4, 3)
    rows = torch.cat([x, torch.tanh(model.layer(x))]).detach()
    optimizer = literal(model, "cross_entropy", lr=0.1, options=EXACT)
    train(model, optimizer, [(x, y)])
    layer = optimizer._whitening.layers["layer"]
    assert_close(layer.c, rows.mean(0), 1e-12)
    assert layer.backward.moments.weight == 30, "targets, not rows"
    damped = torch.cov(rows.T, correction=0) + 0.2 * torch.eye(4, dtype=torch.float64)
    assert_close(layer.forward.factor.inverse, torch.linalg.inv(damped), 1e-10)


def test_a_layer_that_receives_no_statistics():
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.called = nn.Linear(5, 4)
            self.read = nn.Linear(4, 3)

        def forward(self, x):
            return self.called(x) @ self.read.weight.T + self.read.bias

    model = ByHand()
    x, y = classification(20, 5, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    with pytest.warns(bprong.WhiteningWarning, match="layer 'read' follows the fallback rule"):
        train(model, optimizer, [(x, y)])
    assert list(optimizer._whitening.layers) == ["called"]


# The loop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [None, Periods(6, 3, 6, 2)], ids=["due at 0", "due later"])
def test_a_fresh_optimizer_with_zero_gradients(every):
    """As in distributed checkpointing; and an empty state is saved and loaded. Neither counts as a step."""
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, every=every)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = snapshot(model)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_unchanged(before, snapshot(model))
    assert optimizer.report().steps == 0
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.report().steps == 0


def test_zero_grad_between_forward_and_backward_and_a_positional_closure():
    x, y = classification(60, 5, 3)
    plain, lightning = twins(5, 8, 3)
    first, second = (bprong.BPRONG(m, "cross_entropy", lr=0.1, every=4, options=EXACT) for m in (plain, lightning))
    train(plain, first, batches(x, y, 20, 10))
    for xb, yb in batches(x, y, 20, 10):

        def closure(xb=xb, yb=yb):
            loss = F.cross_entropy(lightning(xb), yb)
            second.zero_grad()
            loss.backward()
            return loss

        assert second.step(closure).requires_grad
    assert_same_path(snapshot(lightning), snapshot(plain))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite(bad):
    x, y = classification(20, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, momentum=0.9)
    train(model, optimizer, [(x, y)] * 2)
    before = snapshot(model)
    state = copy.deepcopy(optimizer.state_dict())
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad[0, 0] = bad
    message = r"step 2 refused: the gradient of 2.weight is not finite; nothing"
    with pytest.warns(WhiteningWarning, match=message) as said:
        optimizer.step()
    assert said[0].filename == __file__, "the warning names the user's line"
    assert_unchanged(before, snapshot(model))
    assert str(optimizer.state_dict()) == str(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(PATIENCE - 2):
            optimizer.step()
        with pytest.raises(FloatingPointError, match=f"{PATIENCE} times in a row"):
            optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, [(x, y)])


def test_gradients_whose_squares_overflow_are_finite():
    """Long gradients are tested by their squares."""
    model = nn.Linear(200, 100)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.0)
    x = torch.randn(50, 200)
    (F.cross_entropy(model(x), torch.zeros(50, dtype=torch.long)) * 1e25).backward()
    assert float(model.weight.grad.double().square().sum()) > torch.finfo(torch.float32).max
    optimizer.step()
    assert optimizer.report().steps == 1


def test_averaged_model():
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, every=3)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    seen = []
    for batch in batches(x, y, 20, 6):
        train(model, optimizer, [batch])
        averaged.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    assert_close(averaged.module[0].weight, torch.stack(seen).mean(0), 1e-12)
    assert averaged.module._compiled_call_impl is None  # nobody listens to the copy


def test_clip_grad_norm():
    """It scales the gradient before it is preconditioned, as it scales SGD's: half the gradient, half the step."""
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    steps = []
    for clip in (False, True):
        copied = copy.deepcopy(model)
        optimizer = bprong.BPRONG(copied, "cross_entropy", lr=0.1, options=EXACT)
        F.cross_entropy(copied(x), y).backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(copied.parameters(), 1e9)
            torch.nn.utils.clip_grad_norm_(copied.parameters(), float(norm) / 2)
        optimizer.step()
        steps.append(copied[0].weight - model[0].weight)
    assert_close(steps[1], steps[0] / 2, 1e-5)


def test_validation_forwards_between_steps():
    x, y = classification(60, 5, 3)
    plain, validated = twins(5, 8, 3)
    other = torch.randn(50, 5, dtype=torch.float64) * 100
    first, second = (bprong.BPRONG(m, "cross_entropy", lr=0.1, every=2, options=EXACT) for m in (plain, validated))
    for batch in batches(x, y, 20, 8):
        train(plain, first, [batch])
        validated.eval()(other)
        with torch.no_grad():
            validated.train()(other)
        train(validated, second, [batch])
    assert_unchanged(snapshot(plain), snapshot(validated))
