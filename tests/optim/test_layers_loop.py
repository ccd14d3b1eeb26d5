"""Convolutions and transformers: the training loop's part of the README's table, as test_optimizer.py for an MLP."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bprong
from bprong.errors import WhiteningWarning
from bprong.optim import Periods
from helpers import assert_close, assert_unchanged, quick_cases, snapshot
from layered import build, data, loss_of, make, path, train
from training import EXACT, assert_same_path

both = pytest.mark.parametrize("problem", quick_cases(["conv", "transformer"], "transformer"))


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
    """Refused when a refresh is due: neither weights nor statistics change, and the path continues as without it."""
    model = make(problem)
    optimizer = build(model)
    train(model, optimizer, data(problem, 3))
    before = snapshot(model)
    state = copy.deepcopy(tree_leaves(optimizer.state_dict()))
    _, (x, y) = data(problem, 2)  # not the batch that comes next
    loss_of(model(x), y).backward()
    name, parameter = next(iter(model.blocks.named_parameters()))
    parameter.grad.view(-1)[1] = bad
    with pytest.warns(WhiteningWarning, match=f"step 3 refused: the gradient of blocks.{name} is not finite; nothing"):
        optimizer.step()
    assert_unchanged(before, snapshot(model))
    for value, expected in zip(tree_leaves(optimizer.state_dict()), state, strict=True):
        if isinstance(value, torch.Tensor):  # NaN stands for what is not there
            assert torch.equal(value.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        else:
            assert repr(value) == repr(expected)
    train(model, optimizer, data(problem, 7)[3:])
    assert_unchanged(path(problem, make(problem)), snapshot(model))


@both
def test_averaged_model(problem):
    model = make(problem)
    optimizer = build(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    seen = []
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
    """Half the gradient, half the step, of every parameter that is whitened."""
    steps = []
    for clip in (False, True):
        model = make(problem)
        optimizer = build(model)
        before = snapshot(model)
        ((x, y),) = data(problem, 1)
        loss_of(model(x), y).backward()
        if clip:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 2)
        optimizer.step()
        covered = optimizer._whitening.layers.parameters
        steps.append({n: p - before[n] for n, p in model.named_parameters() if p in covered})
    assert steps[0]
    for name, step in steps[0].items():
        assert_close(steps[1][name], step / 2, 1e-5, name)


class Operations(TorchDispatchMode):
    """The names of the operations that ran in this context."""

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
        assert problem == "conv" or "aten::_transformer_encoder_layer_fwd" in operations.seen, "torch's fast path"
        with torch.inference_mode():
            model(other)
        with torch.no_grad():
            model.train()(other)
        train(model, optimizer, [batch])
    assert_unchanged(path(problem, make(problem)), snapshot(model))


@both
@pytest.mark.parametrize("kind", [bprong.BPRONG, bprong.PRONG])
def test_training_in_eval_mode(problem, kind):
    """A batch given to `observe` is measured without the fast path of attention, which would hide its layers."""
    two_sided = kind is bprong.BPRONG
    options = EXACT if two_sided else {"average": 0.0}
    periods = Periods(3, backward_every=2 if two_sided else None)
    model = make(problem).eval()
    plain = make(problem)
    optimizer, other = (build(m, kind, every=periods, options=options) for m in (model, plain))
    for x, y in data(problem, 7):
        train(model, optimizer, [(x, y)], observe=True)
        train(plain, other, [(x, y)], observe=True)
    assert_same_path(snapshot(model), snapshot(plain), 1e-9)
