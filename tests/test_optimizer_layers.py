"""Convolutions and transformers: every line of the README's table, as test_optimizer.py has it for an MLP.

The models are layered.py's. The transformer's sequences are padded, so what counts must be found out in every one of
these conditions.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bprong
from bprong.schedule import WhiteningWarning
from helpers import assert_close, assert_unchanged, snapshot
from layered import CLASSES, build, data, loss_of, make, path, train, written_out
from test_optimizer import default_backend
from training import EXACT, assert_same_path

both = pytest.mark.parametrize("problem", ["conv", "transformer"])


# The path ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("kind", "lr_bias", "frozen"),
    [(bprong.BPRONG, 0.05, None), (bprong.BPRONG, 0.01, None), (bprong.BPRONG, 0.05, "weight"),
     (bprong.BPRONG, 0.01, "bias"), (bprong.PRONG, 0.05, None), (bprong.PRONG, 0.01, "bias")],
)  # fmt: skip
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
        train(model, build(model, kind, params=groups), data(problem, 8))
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize(
    ("problem", "given", "backend"),
    [("conv", "compiled", default_backend()), ("conv", "in place", "aot_eager"), ("conv", "inner", "aot_eager"),
     ("transformer", "compiled", "aot_eager"), ("transformer", "inner, observed", "aot_eager")],
)  # fmt: skip
def test_torch_compile(problem, given, backend):
    """Of a model compiled inside, which targets the loss leaves out is for `observe(x, y)` to say."""
    model = make(problem, blocks=1)
    model.order = (0,)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    if given == "in place":
        model.compile(backend=backend)
        ours = path(problem, model)
    else:
        compiled = torch.compile(model, backend=backend)
        at = {"call": compiled, "observe": "observed" in given}
        ours = path(problem, compiled) if given == "compiled" else path(problem, model, **at)
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
            optimizer.step()  # inside, as some do it
        assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
        found.append(optimizer.statistics.layers)
    for name, layer in found[0].items():
        assert_close(layer.UU, found[1][name].UU, 1e-6, name)
        assert_close(layer.RR, found[1][name].RR, 1e-6, name)


@both
@pytest.mark.parametrize("skipped", [4, 3], ids=["between refreshes", "as one is due"])
def test_grad_scaler_with_a_skipped_step(problem, skipped):
    """A batch whose step is skipped still belongs to those since the last step, if a refresh is due."""
    scaled, plain = make(problem), make(problem)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, other = build(scaled), build(plain)
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


# What a step is made of ----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("k", [2, 8])
def test_gradient_accumulation(problem, k):
    """Micro-batches with more padding and with less count by their targets; one may have none at all."""
    big, small = make(problem), make(problem)
    first, second = build(big), build(small)
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
        assert not torch.equal(outputs[0], outputs[3])  # the same batch under another mask
        seen.append([*outputs, torch.random.get_rng_state(), *snapshot(model).values()])
    assert all(torch.equal(ours, expected) for ours, expected in zip(*seen, strict=True))


@both
def test_parameters_that_are_not_covered(problem):
    model, shadow = make(problem), make(problem)
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


# Layers in odd situations --------------------------------------------------------------------------------------------


@both
def test_a_layer_unused_in_a_step(problem):
    model = make(problem)
    optimizer = build(model, every=2)
    train(model, optimizer, data(problem, 1))
    model.order = (0,)
    before, others = snapshot(model.blocks[1]), snapshot(model.blocks[0])
    train(model, optimizer, data(problem, 4))
    assert_unchanged(before, snapshot(model.blocks[1]))
    assert all(not torch.equal(value, others[name]) for name, value in snapshot(model.blocks[0]).items())
    model.order = (0, 1)
    train(model, optimizer, data(problem, 4))
    assert all(not torch.equal(value, before[name]) for name, value in snapshot(model.blocks[1]).items())


@both
def test_a_frozen_layer(problem):
    """It stays, and the others go where they go if it is merely not given to the optimizer."""
    frozen, whole = make(problem), make(problem)
    frozen.blocks[0].requires_grad_(False)
    before = snapshot(frozen.blocks[0])
    train(frozen, build(frozen), data(problem, 6))
    train(whole, build(whole, params=[p for n, p in whole.named_parameters() if "blocks.0" not in n]), data(problem, 6))
    assert_unchanged(before, snapshot(frozen.blocks[0]))
    assert_same_path(snapshot(frozen), snapshot(whole), 1e-12)


@both
def test_a_module_called_twice(problem):
    """Its statistics are those of two modules with the same weights together: Ž over all rows, D summed."""
    shared, apart = make(problem, blocks=1), make(problem)
    shared.order = (0, 0)
    state = shared.state_dict()
    apart.load_state_dict(state | {n.replace("blocks.0", "blocks.1"): p for n, p in state.items()})
    once, twice = build(apart), build(shared)
    for model, optimizer in ((apart, once), (shared, twice)):
        train(model, optimizer, data(problem, 1))
    names = [name for name in twice.statistics.layers if name.startswith("blocks.0")]
    assert len(names) == {"conv": 1, "transformer": 6}[problem]
    targets = sum(int((y != -100).sum()) for _, y in data(problem, 1))
    for name in names:
        merged = twice.statistics.layers[name].moments
        first, second = (once.statistics.layers[name.replace("0", str(i), 1)].moments for i in (0, 1))
        for side in ("forward", "backward"):
            m, a, b = merged[side], first[side], second[side]
            together = a.merge(b)
            assert m.weight == (together.weight if side == "forward" else targets), name
            assert_close(m.scatter, together.scatter, 1e-9, name)
            if side == "forward":
                assert_close(m.mean, together.mean, 1e-9, name)


class Read(nn.Module):
    """Weights that are used, but not by calling their layers."""

    def __init__(self, problem):
        super().__init__()
        self.problem, self.head = problem, nn.Linear(4, CLASSES)
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
    before = snapshot(model)
    named = {"conv": "'read'", "transformer": "'read.q', 'read.k', 'read.v'"}[problem]
    with pytest.raises(RuntimeError, match=f"no statistics reached {named}: not called"):
        train(model, build(model), data(problem, 1))
    assert_unchanged(before, snapshot(model))


# The loop ------------------------------------------------------------------------------------------------------------


@both
def test_a_fresh_optimizer_with_zero_gradients(problem):
    model = make(problem)
    optimizer = build(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = snapshot(model)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_unchanged(before, snapshot(model))
    assert optimizer.report().steps == 0
    train(model, optimizer, data(problem, 7))
    assert_unchanged(path(problem, make(problem)), snapshot(model))


@both
def test_zero_grad_between_forward_and_backward_and_a_positional_closure(problem):
    model = make(problem)
    optimizer = build(model)
    for x, y in data(problem, 7):

        def closure(x=x, y=y):
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
    assert_unchanged(path(problem, make(problem)), snapshot(model))


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite(problem, bad):
    """Refused as a refresh is due: nothing is changed, neither weights nor statistics, and the path goes on."""
    model = make(problem)
    optimizer = build(model)
    train(model, optimizer, data(problem, 3))
    before, state = snapshot(model), copy.deepcopy(tree_leaves(optimizer.state_dict()))
    _, (x, y) = data(problem, 2)  # not the batch that comes next
    loss_of(model(x), y).backward()
    name, parameter = next(iter(model.blocks.named_parameters()))
    parameter.grad.view(-1)[1] = bad
    with pytest.warns(WhiteningWarning, match=f"step 3 refused: the gradient of blocks.{name} is not finite; nothing"):
        optimizer.step()
    assert_unchanged(before, snapshot(model))
    for value, expected in zip(tree_leaves(optimizer.state_dict()), state, strict=True):
        assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
    train(model, optimizer, data(problem, 7)[3:])
    assert_unchanged(path(problem, make(problem)), snapshot(model))


@both
def test_averaged_model(problem):
    model = make(problem)
    optimizer = build(model)
    averaged, seen = torch.optim.swa_utils.AveragedModel(model), []
    for batch in data(problem, 7):
        train(model, optimizer, [batch])
        averaged.update_parameters(model)
        averaged.module.train()(batch[0]).sum().backward()  # the copy's hook keeps nothing
        seen.append(snapshot(model))
    for name, value in snapshot(averaged.module).items():
        assert_close(value, torch.stack([s[name] for s in seen]).mean(0), 1e-12, name)
    assert_unchanged(path(problem, make(problem)), snapshot(model))


@both
def test_clip_grad_norm(problem):
    """Half the gradient, half the step, of whatever is whitened."""
    steps = []
    for clip in (False, True):
        model = make(problem)
        optimizer, before = build(model), snapshot(model)
        ((x, y),) = data(problem, 1)
        loss_of(model(x), y).backward()
        if clip:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 2)
        optimizer.step()
        steps.append({n: p - before[n] for n, p in model.named_parameters() if p in optimizer.statistics.covered})
    for name, step in steps[0].items():
        assert_close(steps[1][name], step / 2, 1e-5, name)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.name())
        return function(*args, **kwargs or {})


@both
def test_validation_forwards_between_steps(problem):
    model = make(problem)
    optimizer = build(model)
    ((other, _),) = data(problem, 1, size=20)
    other = other * 100 if problem == "conv" else other.flip(0, 1)
    for batch in data(problem, 7):
        model.eval()(other)
        with torch.no_grad(), Operations() as operations:
            model(other)
        assert problem == "conv" or "aten::_transformer_encoder_layer_fwd" in operations.seen  # its fast path
        with torch.inference_mode():
            model(other)
        with torch.no_grad():
            model.train()(other)
        train(model, optimizer, [batch])
    assert_unchanged(path(problem, make(problem)), snapshot(model))


@both
@pytest.mark.parametrize("kind", [bprong.BPRONG, bprong.PRONG])
def test_training_in_eval_mode(problem, kind):
    """What `observe` was given is measured with no fast path of attention's in between."""
    model, plain = make(problem).eval(), make(problem)
    optimizer, other = (build(m, kind, options=EXACT | {"backward_every": 2}) for m in (model, plain))
    for x, y in data(problem, 7):
        optimizer.observe(x)
        train(model, optimizer, [(x, y)])
        other.observe(x)
        train(plain, other, [(x, y)])
    assert_same_path(snapshot(model), snapshot(plain), 1e-9)
