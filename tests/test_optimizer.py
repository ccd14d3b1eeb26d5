"""BPRONG(model) on the user's own model: each line of the README's compatibility table has a test of its name."""

import copy
import io
import pickle
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.schedule import PATIENCE, WhiteningWarning
from helpers import assert_close, assert_unchanged, classification, layers_of, mlp, snapshot

EXACT = {"fisher": "exact", "average": 0.0}


def batches(x, y, size, steps):
    for t in range(steps):
        chosen = torch.arange(t * size, (t + 1) * size) % len(x)
        yield x[chosen], y[chosen]


def train(model, optimizer, data, call=None):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy((call or model)(x), y).backward()
        optimizer.step()
    return model


def path(model, steps=20, call=None, prepare=lambda model: None, dtype=torch.float64, **options):
    """Where a model ends up after some steps from its own start."""
    x, y = classification(60, 5, 3, dtype=dtype)
    settings = {"every": 5, "options": EXACT} | options
    prepare(model)
    optimizer = bprong.BPRONG(model, lr=0.1, **settings)
    train(model, optimizer, batches(x, y, 20, steps), call)
    return snapshot(model)


def assert_same_path(ours, expected, rtol=1e-10):
    for (name, value), other in zip(expected.items(), ours.values(), strict=True):
        assert_close(other, value, rtol, name)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("kind", [bprong.BPRONG, bprong.PRONG])
def test_the_papers_network(kind, momentum, nesterov):
    """200 steps in float64 with an exact Fisher matrix: the whitened network with SGD, in ordinary coordinates."""
    x, y = classification(90, 5, 3)
    lr = 0.05 * (1 - momentum)
    plain = mlp(5, 6, 4, 3)
    whitened = bprong.whiten_(copy.deepcopy(plain), backward=kind is bprong.BPRONG)
    sgd = torch.optim.SGD(whitened.parameters(), lr=lr, momentum=momentum, nesterov=nesterov)
    schedule = {"forward_every": 7, "forward_offset": 0, "backward_every": 5, "backward_offset": 2}
    rewhitening = bprong.Rewhitening(
        whitened, sgd, fisher="exact", forward_damping=0.1, backward_damping=0.03, **schedule
    )
    optimizer = kind(
        plain, lr=lr, momentum=momentum, nesterov=nesterov, forward_damping=0.1, backward_damping=0.03,
        options=EXACT | schedule,
    )  # fmt: skip
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
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = x.requires_grad_() if self.reentrant else x  # re-entrant checkpoints need an input with a gradient
        return self.inner[3:](checkpoint(self.inner[:3], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    plain = mlp(5, 8, 8, 3)
    assert_same_path(path(Checkpointed(copy.deepcopy(plain), reentrant)), path(plain))


def default_backend():
    """torch's own where a C++ compiler exists, which it needs on a CPU."""
    return "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize(
    ("given", "backend"),
    [("compiled", default_backend()), ("compiled", "aot_eager"), ("inner", "aot_eager"), ("in place", "aot_eager")],
)
def test_torch_compile(given, backend):
    plain = mlp(5, 8, 3)
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    if given == "in place":
        ours = path(model, prepare=lambda m: m.compile(backend=backend))
    elif given == "compiled":
        compiled = torch.compile(model, backend=backend)
        ours = path(compiled)
    else:
        compiled = torch.compile(model, backend=backend)
        ours = path(model, call=compiled)
    assert_same_path(ours, path(plain))


def test_bf16_autocast():
    """Statistics are taken in float32 by the optimizer's own pass, whatever autocast does to the user's."""
    model = mlp(5, 16, 3, dtype=torch.float32)
    x, y = classification(60, 5, 3, dtype=torch.float32)
    found = []
    for autocast in (True, False):
        copied = copy.deepcopy(model)
        optimizer = bprong.BPRONG(copied, lr=0.1, options=EXACT)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(copied(x), y)
        loss.backward()
        optimizer.step()
        found.append(optimizer.statistics.layers["0"])
    assert_close(found[0].UU, found[1].UU, 1e-6)
    assert_close(found[0].RR, found[1].RR, 1e-6)


def test_grad_scaler_with_a_skipped_step():
    x, y = classification(60, 5, 3, dtype=torch.float32)
    plain = mlp(5, 8, 3, dtype=torch.float32)
    scaled, before = copy.deepcopy(plain), None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = bprong.BPRONG(scaled, lr=0.1, every=3, options=EXACT)
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
    other = bprong.BPRONG(plain, lr=0.1, every=3, options=EXACT)
    train(plain, other, [batch for t, batch in enumerate(batches(x, y, 20, 8)) if t != 4])
    assert_same_path(snapshot(scaled), snapshot(plain), 1e-4)


@pytest.mark.parametrize("k", [2, 4])
def test_gradient_accumulation(k):
    x, y = classification(60, 5, 3)
    big, small = (mlp(5, 8, 3) for _ in range(2))
    small.load_state_dict(big.state_dict())
    first, second = (bprong.BPRONG(m, lr=0.1, momentum=0.5, every=3, options=EXACT) for m in (big, small))
    for xb, yb in batches(x, y, 20, 9):
        train(big, first, [(xb, yb)])
        second.zero_grad()
        for xm, ym in zip(xb.chunk(k), yb.chunk(k), strict=True):
            (F.cross_entropy(small(xm), ym) / k).backward()
        second.step()
    assert_same_path(snapshot(small), snapshot(big))


class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.LayerNorm(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


def test_dropout_batchnorm_layernorm():
    """The random stream and BatchNorm's statistics are those of a loop without a pass of the optimizer's own."""
    x, y = classification(60, 5, 3)
    streams = []
    for measured in (True, False):
        torch.manual_seed(1)
        model = Restless().double()
        optimizer = bprong.BPRONG(model, lr=0.0, every=2) if measured else torch.optim.SGD(model.parameters(), lr=0.0)
        train(model, optimizer, batches(x, y, 20, 6))
        streams.append((torch.random.get_rng_state(), model.body[1].running_mean, model.body[1].num_batches_tracked))
    for ours, expected in zip(*streams, strict=True):
        assert torch.equal(ours, expected)


def test_parameters_that_are_not_covered():
    """Norm scales, embeddings, bare parameters: Adam's rule at a tenth of lr, and the report says so."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.out = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, tokens):
            return self.out(self.norm(self.embed(tokens)) * self.gain)

    model, adam = Mixed(), None
    tokens, y = torch.randint(7, (20,)), torch.randint(3, (20,))
    optimizer = bprong.BPRONG(model, lr=0.05)
    uncovered = ("embed.weight", "norm.weight", "norm.bias", "gain")
    shadow = copy.deepcopy(model)
    adam = torch.optim.Adam([p for n, p in shadow.named_parameters() if n in uncovered], lr=0.005)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), y).backward()
        for (_, p), q in zip(model.named_parameters(), shadow.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        adam.step()
    for name in uncovered:
        assert_close(model.get_parameter(name), shadow.get_parameter(name), 1e-5, name)
    report = optimizer.report()
    assert report.fallback == {
        "gain": "in Mixed", "embed.weight": "in Embedding", "norm.weight": "in LayerNorm", "norm.bias": "in LayerNorm"
    }  # fmt: skip
    assert "by Adam's rule: gain (in Mixed)" in str(report)


def test_a_layer_unused_in_a_step():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes, self.use = nn.Linear(5, 3), nn.Linear(5, 3), True

        def forward(self, x):
            return self.always(x) + self.sometimes(x) if self.use else self.always(x)

    model = Sometimes().double()
    optimizer = bprong.BPRONG(model, lr=0.1, every=2)
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
            self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    model = Twice().double()
    x, y = classification(30, 4, 3)
    rows = torch.cat([x, torch.tanh(model.layer(x))]).detach()
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    train(model, optimizer, [(x, y)])
    layer = optimizer.statistics.layers["layer"]
    assert_close(layer.c, rows.mean(0), 1e-12)
    damped = torch.cov(rows.T, correction=0) + 0.2 * torch.eye(4, dtype=torch.float64)
    assert_close(layer.UU, torch.linalg.inv(damped), 1e-10)


def test_tied_weights():
    """Left to the fallback rule, and named."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mid, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens):
            return self.out(torch.tanh(self.mid(self.embed(tokens))))

    model = Tied()
    optimizer = bprong.BPRONG(model, lr=0.05)
    tokens = torch.randint(7, (20,))
    train(model, optimizer, [(tokens, tokens)] * 3)
    assert list(optimizer.statistics.layers) == ["mid"]
    assert optimizer.report().fallback == {"embed.weight": "tied: embed.weight, out.weight"}


def test_a_layer_that_receives_no_statistics():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.read = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            return F.linear(self.called(x), self.read.weight, self.read.bias)

    model = Functional()
    x, y = classification(20, 5, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="no statistics reached 'read'"):
        train(model, optimizer, [(x, y)])
    assert_unchanged(before, snapshot(model))


def test_a_fresh_optimizer_with_zero_gradients():
    """As distributed checkpointing does it; and an empty state goes round. Neither counts."""
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model)
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
    plain, lightning = (mlp(5, 8, 3) for _ in range(2))
    lightning.load_state_dict(plain.state_dict())
    first, second = (bprong.BPRONG(m, lr=0.1, every=4, options=EXACT) for m in (plain, lightning))
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
    optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.9)
    train(model, optimizer, [(x, y)] * 2)
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad[0, 0] = bad
    with pytest.warns(WhiteningWarning, match=r"step 2 refused: the gradient of 2.weight is not finite; nothing"):
        optimizer.step()
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


def test_averaged_model():
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, every=3)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    seen = []
    for batch in batches(x, y, 20, 6):
        train(model, optimizer, [batch])
        averaged.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    assert_close(averaged.module[0].weight, torch.stack(seen).mean(0), 1e-12)
    averaged.module.train()(x).sum().backward()  # the copy's hook keeps nothing
    hook = next(iter(averaged.module._forward_pre_hooks.values()))
    assert hook.last is None


def test_clip_grad_norm():
    """It scales the gradient before it is preconditioned, as it scales SGD's: half the gradient, half the step."""
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    steps = []
    for clip in (False, True):
        copied = copy.deepcopy(model)
        optimizer = bprong.BPRONG(copied, lr=0.1, options=EXACT)
        F.cross_entropy(copied(x), y).backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(copied.parameters(), 1e9)
            torch.nn.utils.clip_grad_norm_(copied.parameters(), float(norm) / 2)
        optimizer.step()
        steps.append(copied[0].weight - model[0].weight)
    assert_close(steps[1], steps[0] / 2, 1e-5)


def test_validation_forwards_between_steps():
    x, y = classification(60, 5, 3)
    plain, validated = (mlp(5, 8, 3) for _ in range(2))
    validated.load_state_dict(plain.state_dict())
    other = torch.randn(50, 5, dtype=torch.float64) * 100
    first, second = (bprong.BPRONG(m, lr=0.1, every=2, options=EXACT) for m in (plain, validated))
    for batch in batches(x, y, 20, 8):
        train(plain, first, [batch])
        validated.eval()(other)
        with torch.no_grad():
            validated.train()(other)
        train(validated, second, [batch])
    assert_unchanged(snapshot(plain), snapshot(validated))


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_devices(fisher, likelihood):
    """Everything is made where the parameters are: with `meta` as the default device, a tensor made without naming a
    device would not mix with theirs."""
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    x, y = classification(20, 5, 3, dtype=torch.float32)
    damping = bprong.Damping(0.1, "variance")
    with torch.device("meta"):
        optimizer = bprong.BPRONG(
            model, lr=0.1, likelihood=likelihood, momentum=0.9, every=2, max_step=1.0, forward_damping=damping,
            options={"fisher": fisher},
        )  # fmt: skip
        train(model, optimizer, [(x, y)] * 5)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, [(x, y)] * 3)
        assert "LayerNorm" in str(optimizer.report())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_devices_of_the_papers_network():
    model = mlp(5, 4, 3, dtype=torch.float32)
    x, y = classification(20, 5, 3, dtype=torch.float32)
    with torch.device("meta"):
        bprong.whiten_(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rewhitening = bprong.Rewhitening(model, optimizer, forward_every=2, backward_every=2, average=0.5)
        for factorisation in ("eigh", "cholesky", "symmetric"):
            rewhitening._factorisation = factorisation
            for _ in range(2):
                rewhitening.step(x)
                train(model, optimizer, [(x, y)])
        model.load_state_dict(bprong.fold(model).state_dict())
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize(("lr_bias", "frozen"), [(0.1, None), (0.01, None), (0.1, "weight"), (0.1, "bias")])
def test_weight_and_bias_in_groups_of_their_own(lr_bias, frozen):
    """Each with its own lr; momentum and all, it is the whitened network with the same groups."""
    x, y = classification(60, 5, 3)
    plain = mlp(5, 3)
    if frozen:
        getattr(plain[0], frozen).requires_grad_(False)
    whitened = bprong.whiten_(copy.deepcopy(plain))
    layer = whitened[0]
    groups = [{"params": [layer.weight_dagger]}, {"params": [layer.bias_dagger], "lr": lr_bias}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.8)
    schedule = {"forward_every": 3, "forward_offset": 0, "backward_every": 2, "backward_offset": 1}
    damping = {"forward_damping": 0.1, "backward_damping": 0.03}
    rewhitening = bprong.Rewhitening(whitened, sgd, fisher="exact", **damping, **schedule)
    params = [{"params": [plain[0].weight]}, {"params": [plain[0].bias], "lr": lr_bias}]
    optimizer = bprong.BPRONG(plain, lr=0.1, momentum=0.8, params=params, **damping, options=EXACT | schedule)
    for xb, yb in batches(x, y, 20, 30):
        rewhitening.step(xb)
        train(whitened, sgd, [(xb, yb)])
        train(plain, optimizer, [(xb, yb)])
    assert_close(plain[0].weight, layer.weight, 1e-9)
    assert_close(plain[0].bias, layer.bias, 1e-9)


def test_every_scheduler_writes_lr_and_is_obeyed():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.0 if t > 2 else 1.0)
    for _ in range(3):
        train(model, optimizer, [(x, y)])
        scheduler.step()
    before = snapshot(model)
    train(model, optimizer, [(x, y)])
    assert_unchanged(before, snapshot(model))
    for make in (
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ):
        optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.5)
        scheduler = make(optimizer)
        train(model, optimizer, [(x, y)])
        scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))


def test_weight_decay_is_decoupled_and_of_ordinary_weights():
    x, y = classification(20, 5, 3)
    plain, decayed = mlp(5, 3), mlp(5, 3)
    decayed.load_state_dict(plain.state_dict())
    start = snapshot(plain)
    train(plain, bprong.BPRONG(plain, lr=0.1, options=EXACT), [(x, y)])
    train(decayed, bprong.BPRONG(decayed, lr=0.1, weight_decay=0.3, options=EXACT), [(x, y)])
    for name, value in snapshot(decayed).items():
        assert_close(value, snapshot(plain)[name] - 0.1 * 0.3 * start[name], 1e-12)


def test_the_bound_on_a_step_is_in_the_fisher_metric():
    """With exact statistics of the batch and hardly any damping, ‖Δ‖² = Δᵀ G̃ Δ, here of one gaussian layer."""
    x, _ = classification(60, 5, 3)
    y = 10 * torch.randn(60, 3, dtype=torch.float64)
    for bound in (0.01, 1e9):
        model = mlp(5, 3)
        start = snapshot(model)
        optimizer = bprong.BPRONG(
            model,
            lr=0.5,
            likelihood="gaussian",
            forward_damping=1e-12,
            backward_damping=1e-12,
            max_step=bound,
            options=EXACT,
        )
        loss = ((model(x) - y) ** 2 / 2).sum(-1).mean()
        loss.backward()
        optimizer.step()
        moved_W, moved_b = model[0].weight - start["0.weight"], model[0].bias - start["0.bias"]
        change = x @ moved_W.T + moved_b  # of the outputs: a gaussian's Fisher metric is their mean square
        length = float(change.square().sum(-1).mean().sqrt().detach())
        assert length == pytest.approx(bound, rel=1e-6) if bound < 1 else length > 0.1


def test_add_param_group_hooks_and_unknown_keys():
    x, y = classification(20, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, params=[{"params": [*model[0].parameters()], "note": "first"}], lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = snapshot(model[2])
    train(model, optimizer, [(x, y)])
    assert_unchanged(before, snapshot(model[2]))
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    train(model, optimizer, [(x, y)])
    assert not torch.equal(before["weight"], model[2].weight)
    assert called == [1, 1]
    assert optimizer.state_dict()["param_groups"][0]["note"] == "first"


RESUME = """
import sys, torch, bprong
sys.path.insert(0, sys.argv[1])
from test_optimizer import resumable
model, optimizer, data = resumable()
saved = torch.load(sys.argv[2], weights_only=True)
model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
from test_optimizer import train
train(model, optimizer, data[37:87])
torch.save(model.state_dict(), sys.argv[3])
"""


def resumable():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = mlp(5, 6, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, lr=0.05, momentum=0.9, every=7, options={"record_every": 3, "average": 0.8})
    return model, optimizer, list(batches(*classification(90, 5, 3, dtype=torch.float32), 20, 87))


def test_resumed_in_a_new_process_it_goes_on_bit_for_bit(tmp_path):
    model, optimizer, data = resumable()
    train(model, optimizer, data[:37])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, data[37:])
    tests = str(__import__("pathlib").Path(__file__).parent)
    command = [sys.executable, "-c", RESUME, tests, str(tmp_path / "saved.pt"), str(tmp_path / "done.pt")]
    subprocess.run(command, check=True, timeout=120)
    assert_unchanged(torch.load(tmp_path / "done.pt", weights_only=True), model.state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle_give_an_independent_pair_on_the_same_path(clone):
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, momentum=0.9, every=3)
    train(model, optimizer, batches(x, y, 20, 4))
    other, other_optimizer = clone((model, optimizer))
    train(model, optimizer, batches(x, y, 20, 7))
    train(other, other_optimizer, batches(x, y, 20, 7))
    assert_unchanged(snapshot(model), snapshot(other))
    assert other is not model


def test_a_state_of_another_model_is_refused_and_one_without_whitening_is_said():
    optimizer = bprong.BPRONG(mlp(5, 4, 3))
    with pytest.raises(ValueError, match=r"layers \['0', '2', '4'\]; this model has \['0', '2'\]"):
        optimizer.load_state_dict(bprong.BPRONG(mlp(5, 4, 4, 3)).state_dict())
    state = optimizer.state_dict()
    state.pop("whitening")
    with pytest.warns(WhiteningWarning, match="statistics begin anew"):
        optimizer.load_state_dict(state)


def test_state_is_plain_and_float64_moments_stay_float64():
    x, y = classification(60, 5, 3, dtype=torch.float32)
    model = mlp(5, 4, 3, dtype=torch.float32)
    optimizer = bprong.BPRONG(model, lr=0.1)
    train(model, optimizer, batches(x, y, 20, 3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    moments = optimizer.state_dict()["whitening"]["schedule"]["moments"]
    assert {m["scatter"].dtype for m in moments.values()} == {torch.float64}
    assert optimizer.report().steps == 3


def test_observe_and_empirical_labels():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options={"fisher": "empirical", "average": 0.0})
    optimizer.observe(x, y)
    train(model, optimizer, [(x, y)])
    start = mlp(5, 3)
    with pytest.raises(ValueError, match="give y with the batch"):
        train(start, bprong.BPRONG(start, options={"fisher": "empirical"}), [(x, y)])


def test_training_in_eval_mode_asks_for_observe():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3).eval()
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    with pytest.raises(RuntimeError, match=r"no batch was seen.*optimizer.observe\(x\)"):
        train(model, optimizer, [(x, y)])
    optimizer.observe(x)
    train(model, optimizer, [(x, y)])
    assert optimizer.report().steps == 1


def test_recording_a_forward_pass_of_the_users_own():
    x, y = classification(20, 5, 3)
    called, pieces = (mlp(5, 4, 3) for _ in range(2))
    pieces.load_state_dict(called.state_dict())
    first, second = (bprong.BPRONG(m, lr=0.1, options=EXACT) for m in (called, pieces))
    train(called, first, [(x, y)])
    with second.recording() as record:
        output = pieces[2](torch.tanh(pieces[0](x)))
        record(output)
    F.cross_entropy(output, y).backward()
    second.step()
    assert_same_path(snapshot(pieces), snapshot(called))


@pytest.mark.parametrize("wrap", [lambda o: (o, 1), lambda o: {"logits": o}, lambda o: type("O", (), {"logits": o})()])
def test_outputs_that_carry_the_tensor(wrap):
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return wrap(self.inner(x))

    plain = mlp(5, 4, 3)
    model = Wrapped(copy.deepcopy(plain))
    x, y = classification(20, 5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    for _ in range(2):
        optimizer.zero_grad()
        model(x)
        F.cross_entropy(model.inner(x), y).backward()
        optimizer.step()
    train(plain, bprong.BPRONG(plain, lr=0.1, options=EXACT), [(x, y)] * 2)
    assert_same_path(snapshot(model), snapshot(plain))


def test_measuring_on_a_part_of_the_batch():
    x, y = classification(40, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT | {"examples": 10})
    train(model, optimizer, [(x, y)])
    assert_close(optimizer.statistics.layers["0"].c, x[:10].mean(0), 1e-12)


def test_periods_offsets_and_averages():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3)
    options = {"average": 0.5, "record_every": 2, "forward_offset": 4, "backward_every": 3, "backward_offset": 1}
    optimizer = bprong.BPRONG(model, lr=0.0, every=5, options=options)
    data = list(batches(x, y, 10, 6))
    ages = []
    for batch in data:
        train(model, optimizer, [batch])
        ages.append(tuple(optimizer.report().layers[0].get(f"{side}_age") for side in ("forward", "backward")))
    assert ages == [(None, None), (None, 1), (None, 2), (None, 3), (1, 1), (2, 2)]
    means = [data[t][0].mean(0) for t in (0, 2, 4)]
    assert_close(optimizer.statistics.layers["0"].c, (means[0] / 4 + means[1] / 2 + means[2]) / 1.75, 1e-12)


def test_bad_statistics_keep_the_preconditioner_and_warn():
    x, y = classification(20, 5, 3)
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, every=1, options=EXACT)
    train(model, optimizer, [(x, y)])
    kept = optimizer.statistics.layers["0"].UU.clone()
    bad = x.clone()
    bad[0, 0] = float("nan")
    optimizer.observe(bad)
    with pytest.warns(WhiteningWarning, match="layer '0' keeps its previous forward whitener"):
        train(model, optimizer, [(x, y)])
    assert torch.equal(optimizer.statistics.layers["0"].UU, kept)


def test_the_report_is_plain_data_and_prints_as_a_table():
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, lr=0.1, every=4)
    train(model, optimizer, batches(x, y, 20, 6))
    report = optimizer.report()
    row = report.layers[0]
    assert row["layer"] == "0"
    assert row["forward_rank"] == "5/5"
    assert row["forward_age"] == row["backward_age"] == 2
    assert row["forward_damping"] == pytest.approx(0.2)
    assert row["step_norm"] > 0
    assert row["forward_from_white"] >= 0
    assert set(report.time) == {"statistics", "factorisation", "step"}
    assert 0 < sum(report.time.values()) < 1
    assert str(report).splitlines()[1].split() == (
        [
            "layer",
            "rank",
            "z",
            "rank",
            "δ",
            "ε",
            "z",
            "ε",
            "δ",
            "age",
            "z",
            "age",
            "δ",
            "z",
            "off",
            "white",
            "δ",
            "off",
            "white",
            "step",
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1}, "lr must be a finite number of at least 0, not -1"),
        ({"momentum": 1}, "less than 1, not 1"),
        ({"nesterov": True}, "nesterov needs a momentum"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"every": 0}, "forward_every must be a whole number of at least 1"),
        ({"likelihood": "softmax"}, "likelihood must be one of"),
        ({"options": {"fischer": "exact"}}, "options has no 'fischer'; it takes fisher, forward_every"),
        ({"options": {"fisher": "true"}}, "fisher must be one of"),
    ],
)
def test_bad_arguments_are_answered_by_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        bprong.BPRONG(mlp(5, 3), **arguments)


def test_at_most_twelve_arguments():
    import inspect

    assert len(inspect.signature(bprong.BPRONG).parameters) <= 12


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="Conv2d has no nn.Linear"):
        bprong.BPRONG(nn.Conv2d(1, 1, 1))


def test_without_a_bias_nothing_is_centred():
    x, y = classification(60, 5, 3)
    model = mlp(5, 3, bias=False)
    optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT)
    train(model, optimizer, [(x, y)])
    assert optimizer.statistics.layers["0"].c is None
    damped = x.T @ x / 60 + 0.2 * torch.eye(5, dtype=torch.float64)
    assert_close(optimizer.statistics.layers["0"].UU, torch.linalg.inv(damped), 1e-10)


def test_the_hook_goes_with_the_optimizer():
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model)
    assert len(model._forward_pre_hooks) == 1
    del optimizer
    __import__("gc").collect()
    assert not model._forward_pre_hooks
