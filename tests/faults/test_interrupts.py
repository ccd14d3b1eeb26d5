"""Ctrl-C at any moment: nothing of torch stays replaced, no step is half made, and training goes on."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from bprong.capture.listener import uninterrupted
from helpers import assert_unchanged, classification, mlp, quick_cases, snapshot
from training import whitened

X, Y = classification(400, 5, 3)
RULES: dict[str, dict[str, Any]] = {
    "fixed rate": {"lr": 0.1, "momentum": 0.9, "every": 2},
    "spectral": {"lr": 0.02, "step": "spectral", "every": 2},
    "auto": {"lr": "auto"},
    "auto, spectral": {"lr": "auto", "step": "spectral"},
}
FUNCTIONS = F.linear, F.conv2d, F.cross_entropy, torch.matmul, Tensor.__matmul__, torch.Tensor.retain_grad


class Run:
    """A training loop whose iterations can be interrupted at the k-th Python call that they make."""

    def __init__(self, **rule: Any) -> None:
        torch.manual_seed(1)
        self.model = mlp(5, 4, 4, 3)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = bprong.BPRONG(self.model, self.criterion, **rule)

    def iterate(self, i: int) -> None:
        rows = torch.arange(20 * i, 20 * (i + 1)) % len(X)
        self.optimizer.zero_grad()
        self.criterion(self.model(X[rows]), Y[rows]).backward()
        self.optimizer.step()

    def interrupted(self, i: int, k: int) -> bool:
        """Interrupts iteration i at its k-th call; whether its step was made nevertheless."""
        before = snapshot(self.model)
        with pytest.raises(KeyboardInterrupt):
            at_call(k, lambda: self.iterate(i))
        return any(not torch.equal(value, before[name]) for name, value in snapshot(self.model).items())


def at_call(k: int | None, work: Callable[[], object]) -> int:
    """Raises SIGINT at the k-th Python call that some work makes, None: never; returns the number of its calls."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if count == k:
                signal.raise_signal(signal.SIGINT)

    gc.collect()
    gc.disable()  # what it calls at a moment of its own would count too, so that runs of the same work would differ
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.fixture(autouse=True)
def _nothing_stays_replaced():
    """SIGINT raises KeyboardInterrupt, although a shell may have told a process in the background to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    handler = signal.signal(signal.SIGINT, before)
    assert (F.linear, F.conv2d, F.cross_entropy, torch.matmul, Tensor.__matmul__, Tensor.retain_grad) == FUNCTIONS
    assert handler is signal.default_int_handler


def assert_goes_on(rule: dict[str, Any], interrupts: int, warm_up: int, steps: int) -> None:
    """Interrupts as many runs at random moments, and compares each with one that was not."""
    for seed in range(interrupts):
        generator = random.Random(seed)
        ours, reference = Run(**rule), Run(**rule)
        at = generator.randrange(warm_up)
        for i in range(at):
            ours.iterate(i)
            reference.iterate(i)
        scout = Run(**rule)
        for i in range(at):
            scout.iterate(i)
        calls = at_call(None, lambda scout=scout, at=at: scout.iterate(at))
        if ours.interrupted(at, generator.randrange(1, calls + 1)):
            reference.iterate(at)
        assert (F.linear, torch.matmul) == (FUNCTIONS[0], FUNCTIONS[3])
        for i in range(at + 1, at + 1 + steps):
            ours.iterate(i)
            reference.iterate(i)
        assert_unchanged(snapshot(reference.model), snapshot(ours.model))


@pytest.mark.parametrize("rule", quick_cases(list(RULES), "auto"))
def test_training_goes_on_after_an_interrupt_at_a_random_moment(rule: str) -> None:
    """The path is that without the interrupted iteration, or that with its step, bit for bit."""
    assert_goes_on(RULES[rule], interrupts=4, warm_up=4, steps=4)


@pytest.mark.rest
@pytest.mark.parametrize("rule", RULES)
def test_training_goes_on_for_fifty_steps_after_each_of_twenty_interrupts(rule: str) -> None:
    assert_goes_on(RULES[rule], interrupts=20, warm_up=12, steps=50)


@pytest.mark.parametrize("rule", RULES)
def test_an_interrupt_within_the_model_ends_its_recording(rule: str) -> None:
    """The first forward pass is recorded by all rules."""

    class Interrupted(nn.Linear):
        armed = True

        def forward(self, z: Tensor) -> Tensor:
            if self.armed:
                raise KeyboardInterrupt
            return super().forward(z)

    run = Run(**RULES[rule])
    reference = Run(**RULES[rule])
    hidden = run.model[2]
    hidden.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        run.iterate(0)
    assert F.linear is FUNCTIONS[0]
    hidden.__class__ = nn.Linear
    for i in range(5):
        run.iterate(i)
        reference.iterate(i)
    assert_unchanged(snapshot(reference.model), snapshot(run.model))


def test_an_interrupt_of_the_papers_network_comes_between_two_refreshes() -> None:
    model, _, rewhitening = whitened(5, 4, 3, forward_every=1, backward_every=1)
    rewhitening.step(X[:50])
    before = model(X)
    calls = at_call(None, lambda: rewhitening.step(X[50:100]))
    for k in range(1, calls, calls // 8):
        with pytest.raises(KeyboardInterrupt):
            at_call(k, lambda: rewhitening.step(X[50:100]))
        assert torch.allclose(model(X), before, rtol=1e-10, atol=1e-10)


def test_an_interrupt_is_delayed_and_a_second_one_is_not() -> None:
    reached = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("after the first")
            signal.raise_signal(signal.SIGINT)
            reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after the first"]


def test_inner_contexts_leave_the_delay_to_the_outer_one() -> None:
    reached = []

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            reached.append("after the inner context")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after the inner context"]


def test_nothing_is_delayed_in_another_thread_or_where_interrupts_are_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    handlers = []

    def enter() -> None:
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter()
    signal.signal(signal.SIGINT, before)
    assert handlers == [before, signal.SIG_IGN]


def test_a_pickled_model_has_no_guard() -> None:
    run = Run(**RULES["fixed rate"])
    assert run.model._compiled_call_impl is not None
    assert "_compiled_call_impl" not in run.model.__getstate__()
    del run.optimizer
    assert run.model._compiled_call_impl is None
