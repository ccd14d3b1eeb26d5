"""Which calls of a model enter its statistics: those whose gradients are in `.grad` at the step, and no others.

Most tests compare two runs bit for bit: one with a call that must not count, and one without it. D is exact, so that
neither run draws random numbers that matter.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from helpers import assert_close, assert_unchanged, classification, mlp, quick_cases, snapshot
from training import EXACT

RATES = pytest.mark.parametrize("lr", [0.1, "auto"])
Rate = float | str
X, Y = classification(60, 5, 3)
OTHER, OTHER_Y = classification(60, 5, 3, seed=1)
OTHER *= 3  # so that statistics of these inputs are far from those of X


def made(lr: Rate, model: nn.Module | None = None, loss: Any = "cross_entropy") -> tuple[nn.Module, bprong.BPRONG]:
    torch.manual_seed(1)
    model = mlp(5, 4, 3) if model is None else model
    return model, bprong.BPRONG(model, loss, lr=lr, every=1, options=EXACT)


def equal(model: nn.Module, *widths: int) -> nn.Module:
    """A perceptron with the same parameters that no optimizer knows; draws no random numbers."""
    with torch.random.fork_rng(devices=[]):
        other = mlp(*widths)
    other.load_state_dict(model.state_dict())
    return other


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X, y: Tensor = Y) -> None:
    """A training step, without setting gradients to zero first."""
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def assert_same_run(lr: Rate, run: Callable[[nn.Module, bprong.BPRONG], None], expected: Callable[..., None]) -> None:
    """Two runs from the same start end at the same parameters, bit for bit, and have moved."""
    model, optimizer = made(lr)
    start = snapshot(model)
    run(model, optimizer)
    twin, twin_optimizer = made(lr)
    expected(twin, twin_optimizer)
    assert not torch.equal(start["0.weight"], snapshot(twin)["0.weight"])
    assert_unchanged(snapshot(twin), snapshot(model))


def drop_each(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = None


def zero_each(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad.zero_()


def zero_together(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch._foreach_zero_([p.grad for p in model.parameters()])


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p.grad = None": drop_each,
    "p.grad.zero_()": zero_each,
    "torch._foreach_zero_": zero_together,
    "zero_grad() of another optimizer": lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
}
DISCARD = pytest.mark.parametrize("way", quick_cases(WAYS, "optimizer.zero_grad()", "p.grad = None", "p.grad.zero_()"))
DISCARD_BRIEFLY = pytest.mark.parametrize("way", ["optimizer.zero_grad()", "model.zero_grad()", "p.grad.zero_()"])


# 1. Calls whose gradients were thrown away ----------------------------------------------------------------------------


@RATES
@DISCARD
def test_a_call_whose_gradients_were_thrown_away_does_not_count(lr: Rate, way: str) -> None:
    def run(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for _ in range(3):
            F.cross_entropy(model(OTHER), OTHER_Y).backward()
            WAYS[way](model, optimizer)
            turn(model, optimizer)
            WAYS[way](model, optimizer)

    def expected(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for _ in range(3):
            turn(model, optimizer)
            WAYS[way](model, optimizer)

    assert_same_run(lr, run, expected)


@RATES
@DISCARD
def test_micro_batches_after_the_gradients_were_thrown_away_count_and_those_before_do_not(lr: Rate, way: str) -> None:
    parts = [(X[i : i + 20], Y[i : i + 20]) for i in range(0, 60, 20)]

    def accumulate(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for x, y in parts:
            (F.cross_entropy(model(x), y) / len(parts)).backward()
        optimizer.step()

    def run(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for x, y in parts[:2]:
            (F.cross_entropy(model(3 * x), y) / len(parts)).backward()
        WAYS[way](model, optimizer)
        accumulate(model, optimizer)

    assert_same_run(lr, run, accumulate)


@RATES
def test_a_forward_pass_before_zero_grad_counts_if_its_backward_pass_comes_after(lr: Rate) -> None:
    """Gradients are often set to zero between the two."""

    def run(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for _ in range(3):
            loss = F.cross_entropy(model(X), Y)
            model.zero_grad()
            loss.backward()
            optimizer.step()

    def expected(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for _ in range(3):
            model.zero_grad()
            turn(model, optimizer)

    assert_same_run(lr, run, expected)


@RATES
def test_gradients_computed_by_autograd_grad_and_assigned_count(lr: Rate) -> None:
    def run(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for _ in range(3):
            parameters = list(model.parameters())
            for p, g in zip(parameters, torch.autograd.grad(F.cross_entropy(model(X), Y), parameters), strict=True):
                p.grad = g
            optimizer.step()

    def expected(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for _ in range(3):
            model.zero_grad()
            turn(model, optimizer)

    assert_same_run(lr, run, expected)


@RATES
@DISCARD_BRIEFLY
def test_the_discriminator_of_a_gan_does_not_count_the_turn_of_the_generator(lr: Rate, way: str) -> None:
    """The generator's turn sends gradients through the discriminator, which are thrown away before its own turn."""

    def run(model: nn.Module, optimizer: bprong.BPRONG, shared: bool) -> None:
        torch.manual_seed(2)
        generator = mlp(2, 4, 5)
        generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
        for _ in range(3):
            noise = torch.randn(30, 2, dtype=torch.float64)
            judge = model if shared else equal(model, 5, 4, 3)
            generator.zero_grad()
            F.cross_entropy(judge(generator(noise)), torch.ones(30, dtype=torch.long)).backward()
            generator_optimizer.step()
            if shared:
                WAYS[way](model, optimizer)
            turn(model, optimizer, torch.cat([X[:30], generator(noise).detach()]), Y)
            WAYS[way](model, optimizer)

    assert_same_run(lr, lambda *pair: run(*pair, shared=True), lambda *pair: run(*pair, shared=False))


@RATES
@DISCARD_BRIEFLY
def test_the_first_pass_of_sharpness_aware_minimisation_does_not_count(lr: Rate, way: str) -> None:
    """Its gradient, here of half of the batch, moves the weights to where the gradient of the step is computed."""

    def run(model: nn.Module, optimizer: bprong.BPRONG, shared: bool) -> None:
        for _ in range(3):
            first = model if shared else equal(model, 5, 4, 3)
            F.cross_entropy(first(X[:30]), Y[:30]).backward()
            moves = [0.05 * p.grad for p in first.parameters()]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            if shared:
                WAYS[way](model, optimizer)
            F.cross_entropy(model(X), Y).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            WAYS[way](model, optimizer)

    assert_same_run(lr, lambda *pair: run(*pair, shared=True), lambda *pair: run(*pair, shared=False))


@RATES
@DISCARD_BRIEFLY
def test_a_step_that_the_gradient_scaler_skips_does_not_count(lr: Rate, way: str) -> None:
    """GradScaler does not call `step` if a gradient overflowed; those gradients are then thrown away."""

    def run(model: nn.Module, optimizer: bprong.BPRONG, overflowing: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for _ in range(2):
            if overflowing:
                scaler.scale(F.cross_entropy(model(OTHER), OTHER_Y)).backward()
                model[0].weight.grad[0, 0] = torch.inf
                scaler.step(optimizer)
                scaler.update(4.0)
                WAYS[way](model, optimizer)
            scaler.scale(F.cross_entropy(model(X), Y)).backward()
            scaler.step(optimizer)
            scaler.update(4.0)
            WAYS[way](model, optimizer)

    assert_same_run(lr, lambda *pair: run(*pair, overflowing=True), lambda *pair: run(*pair, overflowing=False))


# 2. Calls that are never back-propagated ------------------------------------------------------------------------------


def twice(model: nn.Module, optimizer: bprong.BPRONG, between: Callable[[nn.Module], object] | None, when: str) -> None:
    """Three steps, with another use of the model before the forward pass, after it, or after the backward pass."""
    for _ in range(3):
        optimizer.zero_grad()
        if between is not None and when == "before":
            between(model)
        loss = F.cross_entropy(model(X), Y)
        if between is not None and when == "after the forward pass":
            between(model)
        loss.backward()
        if between is not None and when == "after the backward pass":
            between(model)
        optimizer.step()


USES: dict[str, Callable[[nn.Module], object]] = {
    "logged": lambda model: float(model(OTHER).argmax(-1).double().mean()),
    "detached target": lambda model: model(OTHER).max(-1).values.detach(),
    "gradient by inputs": lambda model: torch.autograd.grad(
        model(extra := OTHER.clone().requires_grad_()).square().sum(), extra
    ),
    "overwritten input": lambda model: (model(extra := OTHER.clone()), extra.zero_()),
    "empty": lambda model: model(OTHER[:0]),
    "single example": lambda model: model(OTHER[0]),
    "another shape": lambda model: model(OTHER.view(4, 15, 5)),
}


MOMENTS = ["before", "after the forward pass", "after the backward pass"]


@RATES
@pytest.mark.parametrize("when", quick_cases(MOMENTS, "after the forward pass"))
@pytest.mark.parametrize("use", USES)
def test_a_forward_pass_that_is_never_back_propagated_does_not_count(lr: Rate, use: str, when: str) -> None:
    assert_same_run(lr, lambda *pair: twice(*pair, USES[use], when), lambda *pair: twice(*pair, None, when))


class Flat(nn.Module):
    """Returns only its loss, which is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(5, 4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


@RATES
def test_a_logged_call_of_a_model_that_returns_its_loss_does_not_count(lr: Rate) -> None:
    """Nothing but the backward pass through this scalar tells which call was trained on."""

    def run(logging: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model, optimizer = made(lr, Flat())
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(X, Y)
            if logging:
                float(model(OTHER, OTHER_Y).detach())
            loss.backward()
            optimizer.step()
        return snapshot(model)

    assert_unchanged(run(False), run(True))


@RATES
def test_dropout_of_a_logged_call_does_not_count_either(lr: Rate) -> None:
    """Under forked random numbers the call changes nothing at all."""

    def run(logging: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=lr, every=1, options={"seed": 0})
        criterion = optimizer._loss.given
        for _ in range(3):
            optimizer.zero_grad()
            if logging:
                with torch.random.fork_rng(devices=[]):
                    criterion(model(OTHER), OTHER_Y)
            loss = criterion(model(X), Y)
            if logging:
                with torch.random.fork_rng(devices=[]):
                    criterion(model(OTHER), OTHER_Y)
            loss.backward()
            optimizer.step()
        return snapshot(model)

    assert_unchanged(run(False), run(True))


@RATES
@pytest.mark.parametrize("order", ["target first", "target last"])
@pytest.mark.parametrize("loss", [nn.MSELoss(), "mse"])
def test_the_detached_target_of_q_learning_does_not_count(lr: Rate, order: str, loss: Any) -> None:
    """Q(s, a) is trained towards r + γ max Q(s', a'), which the same model computes in training mode."""
    reward = torch.linspace(0, 1, 60, dtype=torch.float64)

    def run(separate: bool) -> dict[str, Tensor]:
        model, optimizer = made(lr, mlp(5, 4, 1), copy.deepcopy(loss))
        criterion = optimizer._loss.given if isinstance(loss, nn.Module) else F.mse_loss
        for _ in range(3):
            optimizer.zero_grad()
            target_model = equal(model, 5, 4, 1) if separate else model
            if order == "target first":
                target = reward[:, None] + 0.9 * target_model(OTHER).detach()
                q = model(X)
            else:
                q = model(X)
                target = reward[:, None] + 0.9 * target_model(OTHER).detach()
            criterion(q, target).backward()
            optimizer.step()
        return snapshot(model)

    torch.manual_seed(1)
    expected = run(separate=True)
    torch.manual_seed(1)
    assert_unchanged(expected, run(separate=False))


# 8. A forward pass that calls the model -------------------------------------------------------------------------------


class Recursive(nn.Module):
    """A stack that calls itself on a smaller problem, as a module (which runs its hooks) or as a function."""

    def __init__(self, as_module: bool) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)
        self.as_module = as_module

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        z = self.body(x).tanh()
        if depth == 0:
            return self.head(z)
        again = self if self.as_module else self.forward
        return again(z, depth - 1) + 0.1 * self.head(z)


@RATES
def test_a_forward_pass_that_calls_the_model_is_one_call(lr: Rate) -> None:
    def run(as_module: bool) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(1)
        model, optimizer = made(lr, Recursive(as_module).double())
        for _ in range(3):
            optimizer.zero_grad()
            turn(model, optimizer)
        return snapshot(model), optimizer._whitening.layers["head"].backward.moments.weight

    expected, targets = run(as_module=False)
    ours, ours_targets = run(as_module=True)
    assert targets == ours_targets == 60
    assert_unchanged(expected, ours)


# 25. Accumulated batches in which a layer is idle ---------------------------------------------------------------------


class Routed(nn.Module):
    """An expert for the examples whose first feature is positive; empty: it is called even if there are none."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.expert = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.empty = empty

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x).tanh()
        chosen = x[:, 0] > 0
        if self.empty or bool(chosen.any()):
            z = z.index_add(0, chosen.nonzero()[:, 0], self.expert(z[chosen]))
        return self.head(z)


@RATES
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_accumulation_is_the_big_batch_although_a_layer_is_idle_in_a_part_of_it(
    lr: Rate, empty: bool, first: bool
) -> None:
    """The expert's D is a mean over all targets of the step, also over those of a part that did not reach it."""
    x = X - X.mean(0)
    x = torch.cat([x[x[:, 0] > 0][:20], x[x[:, 0] <= 0][:20]])
    x, y = (x.flip(0), Y[:40].flip(0)) if first else (x, Y[:40])

    def run(parts: int) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(1)
        model, optimizer = made(lr, Routed(empty).double())
        for _ in range(2):
            optimizer.zero_grad()
            for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(part), target) / parts).backward()
            optimizer.step()
        return snapshot(model), optimizer._whitening.layers["expert"].backward.moments.weight

    expected, targets = run(parts=1)
    ours, ours_targets = run(parts=2)
    assert targets == ours_targets == 40
    for name, value in expected.items():
        assert_close(ours[name], value, 1e-10, name)


# 26, and batches in memory --------------------------------------------------------------------------------------------


def alive(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> int:
    """How many batches are still in memory after some steps."""
    batches = []
    for i in range(steps):
        x = X + i
        batches.append(weakref.ref(x))
        optimizer.zero_grad()
        F.cross_entropy(model(x), Y).backward()
        optimizer.step()
        del x
    gc.collect()
    return sum(batch() is not None for batch in batches)


@RATES
@pytest.mark.parametrize("replaced_by", ["BPRONG", "SGD"])
def test_an_old_optimizer_that_is_still_referenced_keeps_no_batches(lr: Rate, replaced_by: str) -> None:
    model, old = made(lr)
    turn(model, old)
    new = made(lr, model)[1] if replaced_by == "BPRONG" else torch.optim.SGD(model.parameters(), lr=0.01)
    assert alive(model, new) <= 1
    assert old.report().steps == 1


def test_at_a_fixed_rate_no_batch_is_kept_between_its_backward_pass_and_the_step() -> None:
    model, optimizer = made(0.1)
    x = X.clone()
    F.cross_entropy(model(x), Y).backward()
    batch = weakref.ref(x)
    del x
    gc.collect()
    assert batch() is None
    (tape,) = optimizer._recorder.reached
    assert tape.arguments is None
    optimizer.step()
    assert optimizer._whitening.layers["0"].forward.moments.weight == 60


def test_at_a_fixed_rate_a_batch_may_be_overwritten_before_the_step() -> None:
    """As a loop does that copies every batch into the same memory."""

    def run(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        x = torch.empty_like(X)
        for _ in range(3):
            optimizer.zero_grad()
            x.copy_(X)
            F.cross_entropy(model(x), Y).backward()
            x.zero_()
            optimizer.step()

    assert_same_run(0.1, run, lambda model, optimizer: twice(model, optimizer, None, ""))
