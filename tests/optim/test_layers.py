"""Convolutions and transformers: the path and odd situations of the README's table, as test_optimizer.py for an MLP.

The models are layered.py's. The transformer's sequences are padded, so which targets count must be found in every one
of these conditions. test_layers_loop.py has the conditions of the training loop.
"""

import copy

import pytest
import torch
from torch import nn

import bprong
from helpers import assert_close, assert_unchanged, quick_cases, snapshot
from layered import CLASSES, build, data, loss_of, make, path, train, written_out
from training import EXACT, assert_same_path, default_backend

both = pytest.mark.parametrize("problem", quick_cases(["conv", "transformer"], "transformer"))


# The path -------------------------------------------------------------------------------------------------------------


GROUPS = [
    (bprong.BPRONG, 0.05, None),
    (bprong.BPRONG, 0.01, None),
    (bprong.BPRONG, 0.05, "weight"),
    (bprong.BPRONG, 0.01, "bias"),
    (bprong.PRONG, 0.05, None),
    (bprong.PRONG, 0.01, "bias"),
]


@pytest.mark.parametrize("problem", ["conv", "transformer"])
@pytest.mark.parametrize(("kind", "lr_bias", "frozen"), quick_cases(GROUPS, GROUPS[1], GROUPS[3]))
def test_the_network_written_out_and_groups_of_their_own(problem, kind, lr_bias, frozen):
    """Weights and biases in two groups with an lr of their own, some frozen: as the same groups of linear layers."""
    outputs = []
    for how in (copy.deepcopy, written_out):
        model = how(make(problem))
        for name, p in model.named_parameters():
            p.requires_grad_(not (frozen and name.startswith("blocks.0") and name.endswith(frozen)))
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights, biases = ([p for n, p in trained.items() if n.endswith("bias") is last] for last in (False, True))
        before = snapshot(model)
        groups = [{"params": weights}, {"params": biases, "lr": lr_bias}]
        options = EXACT if kind is bprong.BPRONG else {"average": 0.0}
        train(model, build(model, kind, params=groups, options=options), data(problem, 8))
        moved = {name for name, value in snapshot(model).items() if not torch.equal(before[name], value)}
        assert moved
        assert moved <= set(trained)
        outputs.append(torch.stack([model(x) for x, _ in data(problem, 3)]))
    counted = torch.stack([y for _, y in data(problem, 3)]) != -100
    assert_close(outputs[0][counted], outputs[1][counted], 1e-9)


@both
def test_in_place_relu(problem):
    inplace = {"conv": lambda: nn.ReLU(inplace=True), "transformer": torch.relu_}[problem]
    assert_same_path(path(problem, make(problem, phi=inplace)), path(problem, make(problem)), 1e-9)


@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(problem, reentrant):
    checkpointed = make(problem)
    checkpointed.reentrant = reentrant
    assert_same_path(path(problem, checkpointed), path(problem, make(problem)), 1e-9)


COMPILED = [
    ("conv", "compiled", default_backend()),
    ("conv", "in place", "aot_eager"),
    ("transformer", "compiled", "aot_eager"),
    ("transformer", "inner, observed", "aot_eager"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize(("problem", "given", "backend"), COMPILED)
@pytest.mark.rest
def test_torch_compile(problem, given, backend):
    """If the model was compiled after the optimizer was built, `observe(x, y)` says which targets the loss ignores."""
    model = make(problem, blocks=1)
    model.order = (0,)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    if given == "in place":
        model.compile(backend=backend)
        ours = path(problem, model)
    else:
        compiled = torch.compile(model, backend=backend)
        how = {"call": compiled, "observe": "observed" in given}
        ours = path(problem, compiled) if given == "compiled" else path(problem, model, **how)
    assert_same_path(ours, path(problem, plain), 1e-9)


@both
def test_bf16_autocast(problem):
    found = []
    for autocast in (True, False):
        model = make(problem, torch.float32)
        optimizer = build(model)
        ((x, y),) = data(problem, 1, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
            loss_of(output, y).backward()
            optimizer.step()  # inside, as in some loops
        assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
        found.append(optimizer._whitening.layers)
    for name, layer in found[0].items():
        for ours, expected in zip(layer.sides, found[1][name].sides, strict=True):
            assert ours.factor.inverse.dtype is torch.float32
            assert_close(ours.moments.second, expected.moments.second, 5e-2, f"{name} {ours.name}")


@both
@pytest.mark.parametrize("skipped", [4, 3], ids=["between refreshes", "at a refresh"])
def test_grad_scaler_with_a_skipped_step(problem, skipped):
    """A batch whose step is skipped still belongs to those since the last step, if a refresh is due."""
    scaled = make(problem)
    plain = make(problem)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = build(scaled)
    other = build(plain)
    for t, (x, y) in enumerate(data(problem, 8)):
        optimizer.zero_grad()
        scaler.scale(loss_of(scaled(x), y)).backward()
        if t == skipped:
            next(iter(scaled.blocks.parameters())).grad.view(-1)[0] = float("inf")
            before = snapshot(scaled)
        scaler.step(optimizer)
        scaler.update()
        if t == skipped:
            assert_unchanged(before, snapshot(scaled))
            loss_of(plain(x), y).backward()
        else:
            train(plain, other, [(x, y)])
    assert scaler.get_scale() == 2.0**9
    assert optimizer.report().steps == 7
    assert_same_path(snapshot(scaled), snapshot(plain), 1e-9)


@both
@pytest.mark.parametrize("k", quick_cases([2, 8], 2))
def test_gradient_accumulation(problem, k):
    """Micro-batches with more padding and with less count by their targets; one may have none at all."""
    big = make(problem)
    small = make(problem)
    first = build(big)
    second = build(small)
    for x, y in data(problem, 7):
        if problem == "transformer":
            y[3] = -100
        train(big, first, [(x, y)])
        second.zero_grad()
        for xm, ym in zip(x.chunk(k), y.chunk(k), strict=True):
            loss_of(small(xm), ym, (y != -100).sum()).backward()
        second.step()
    assert_same_path(snapshot(small), snapshot(big), 1e-9)


@both
def test_dropout_batchnorm(problem):
    """Every mask, the random stream, BatchNorm's statistics: as in a loop without a pass of the optimizer's own."""
    seen = []
    for measured in (True, False):
        model = make(problem, dropout=0.3, **({"norm": nn.BatchNorm2d} if problem == "conv" else {}))
        optimizer = build(model, lr=0.0, every=2) if measured else torch.optim.SGD(model.parameters(), lr=0.0)
        outputs = []
        for batch in data(problem, 6):
            train(model, optimizer, [batch], lambda x, m=model, o=outputs: o.append(m(x)) or o[-1])
        assert not torch.equal(outputs[0], outputs[3]), "the same batch under another mask"
        seen.append([*outputs, torch.random.get_rng_state(), *snapshot(model).values()])
    assert all(torch.equal(ours, expected) for ours, expected in zip(*seen, strict=True))


@both
def test_parameters_that_are_not_covered(problem):
    model = make(problem)
    shadow = make(problem)
    optimizer = build(model)
    uncovered = {n: "in GroupNorm" if problem == "conv" else "in LayerNorm" for n in snapshot(model) if "norm" in n}
    uncovered |= {} if problem == "conv" else {"positions": "in Transformer"}
    adam = torch.optim.Adam([shadow.get_parameter(name) for name in uncovered], lr=0.005)
    for x, y in data(problem, 5):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        adam.step()
    for name in uncovered:
        assert_close(model.get_parameter(name), shadow.get_parameter(name), 1e-6, name)
    assert optimizer.report().fallback == uncovered


# Layers in odd situations ---------------------------------------------------------------------------------------------


@both
def test_a_layer_unused_in_a_step(problem):
    model = make(problem)
    optimizer = build(model, every=2)
    train(model, optimizer, data(problem, 1))
    model.order = (0,)
    before = snapshot(model.blocks[1])
    others = snapshot(model.blocks[0])
    train(model, optimizer, data(problem, 4))
    assert_unchanged(before, snapshot(model.blocks[1]))
    assert all(not torch.equal(value, others[name]) for name, value in snapshot(model.blocks[0]).items())
    model.order = (0, 1)
    train(model, optimizer, data(problem, 4))
    assert all(not torch.equal(value, before[name]) for name, value in snapshot(model.blocks[1]).items())


@both
def test_a_frozen_layer(problem):
    """It stays, and the path of the others is the one they have if it is merely not given to the optimizer."""
    frozen = make(problem)
    whole = make(problem)
    frozen.blocks[0].requires_grad_(False)
    before = snapshot(frozen.blocks[0])
    train(frozen, build(frozen), data(problem, 6))
    train(whole, build(whole, params=[p for n, p in whole.named_parameters() if "blocks.0" not in n]), data(problem, 6))
    assert_unchanged(before, snapshot(frozen.blocks[0]))
    assert_same_path(snapshot(frozen), snapshot(whole), 1e-12)


@both
def test_a_module_called_twice(problem):
    """Its statistics are those of two modules with the same weights together: Ž over all rows, D summed."""
    shared = make(problem, blocks=1)
    apart = make(problem)
    shared.order = (0, 0)
    state = shared.state_dict()
    apart.load_state_dict(state | {n.replace("blocks.0", "blocks.1"): p for n, p in state.items()})
    once = build(apart)
    twice = build(shared)
    for model, optimizer in ((apart, once), (shared, twice)):
        train(model, optimizer, data(problem, 1))
    layers = twice._whitening.layers
    names = [name for name in layers if name.startswith("blocks.0")]
    assert len(names) == {"conv": 1, "transformer": 6}[problem]
    targets = sum(int((y != -100).sum()) for _, y in data(problem, 1))
    for name in names:
        pair = [once._whitening.layers[name.replace("0", str(i), 1)] for i in (0, 1)]
        for side, first, second in zip(layers[name].sides, pair[0].sides, pair[1].sides, strict=True):
            together = first.moments.merge(second.moments)
            forward = side.name == "forward"
            assert side.moments.weight == (together.weight if forward else targets), name
            assert_close(side.moments.scatter, together.scatter, 1e-9, name)
            if forward:
                assert_close(side.moments.mean, together.mean, 1e-9, name)


class Read(nn.Module):
    """Weights that are used, but not by calling their layers."""

    def __init__(self, problem):
        super().__init__()
        self.problem = problem
        self.head = nn.Linear(4, CLASSES)
        self.read = nn.Conv2d(2, 4, 6) if problem == "conv" else nn.MultiheadAttention(4, 1, batch_first=True)
        self.embed = nn.Embedding(7, 4)
        self.embed.requires_grad_(problem == "transformer")

    def forward(self, x):
        if self.problem == "conv":
            return self.head(torch.einsum("nchw,ochw->no", x, self.read.weight) + self.read.bias)
        q, k, v = (self.embed(x) @ self.read.in_proj_weight.T + self.read.in_proj_bias).chunk(3, -1)
        return self.head(self.read.out_proj((q @ k.mT).softmax(-1) @ v))


@both
def test_a_layer_that_receives_no_statistics(problem):
    model = Read(problem).double()
    optimizer = build(model)
    named = {"conv": ["read"], "transformer": ["read.q", "read.k", "read.v"]}[problem]
    with pytest.warns(bprong.WhiteningWarning) as said:
        train(model, optimizer, data(problem, 1))
    assert all("follows the fallback rule" in str(one.message) for one in said)
    assert set(named) <= set(optimizer._whitening.demoted)
