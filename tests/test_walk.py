"""The way of a step: how many modules it visits, how many Python calls it makes, how often it waits for a device.

Every feature is paid for here: one that lengthens the way beyond these numbers must make room first. They hold for
Python 3.11, in which a comprehension is a call.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import bprong

ROOT = os.path.dirname(bprong.__file__) + os.sep
READS = ("__float__", "__bool__", "__int__", "__index__", "item", "tolist", "numpy", "cpu", "equal", "nonzero")


class Steps:
    """Training steps of a perceptron 20-50-50-5."""

    def __init__(self, **rule: object) -> None:
        self.model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 5))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = bprong.BPRONG(self.model, self.criterion, **rule)
        self.x = torch.randn(64, 20)
        self.y = torch.randint(5, (64,))

    def make(self) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(self.x), self.y).backward()
        self.optimizer.step()


def calls_of(work: Callable[[], None]) -> Counter[str]:
    """The Python calls within the package, by file."""
    calls: Counter[str] = Counter()

    def profile(frame, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[frame.f_code.co_filename.removeprefix(ROOT)] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Where the package reads a tensor back; the counters of Adam's rule are on the CPU and do not count."""
    reads: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., object]:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: object, **kwargs: object) -> object:
            code = sys._getframe(1).f_code
            place = f"{code.co_filename.removeprefix(ROOT)}:{code.co_name}"
            if code.co_filename.startswith(ROOT) and place != "optim/rules.py:directions":
                reads[place] += 1
            return method(tensor, *args, **kwargs)

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, counting(name))
        yield reads


def assert_walk(steps: Steps, monkeypatch: pytest.MonkeyPatch, modules: int, calls: int, reads: int) -> None:
    """The next two steps visit no more modules, make no more calls and read no more tensors than these."""
    visited = calls_of(steps.make)
    assert len(visited) <= modules, visited
    assert visited.total() <= calls, visited
    with counted_reads(monkeypatch) as read:
        steps.make()
    assert read.total() <= reads, read


RULES = {
    "fixed rate": {"lr": 0.01, "every": 1000},
    "fixed rate, momentum": {"lr": 0.01, "momentum": 0.9, "every": 1000},
    "literal": {"lr": 0.01, "max_step": None, "every": 1000},
    "spectral": {"lr": 0.02, "step": "spectral", "every": 1000},
}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count comprehensions in other ways")
@pytest.mark.parametrize("rule", RULES)
def test_a_plain_step(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 9 modules, 105 calls and one read."""
    steps = Steps(**RULES[rule])
    for _ in range(3):
        steps.make()
    assert_walk(steps, monkeypatch, modules=9, calls=105, reads=1)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count comprehensions in other ways")
@pytest.mark.parametrize(("step", "modules", "calls"), [("natural", 12, 235), ("spectral", 14, 270)])
def test_an_automatic_step_that_evaluates_nothing(
    step: str, modules: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 12 modules and 235 calls, of spectral steps 14 and 270, and three reads."""
    steps = Steps(every=1000, step=step)
    rule = steps.optimizer._rule.rule
    for t in range(200):
        if t > 100 and not rule.evaluates(t) and not rule.evaluates(t + 1) and not steps.optimizer._rule.pending:
            break
        steps.make()
    assert_walk(steps, monkeypatch, modules=modules, calls=calls, reads=3)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count comprehensions in other ways")
@pytest.mark.parametrize("rule", RULES)
def test_a_plain_step_with_averaged_weights(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules and 35 calls more than without, and one read: gradients are checked before weights are added."""
    steps = Steps(**RULES[rule])
    steps.optimizer.averaged()
    for _ in range(3):
        steps.make()
    assert_walk(steps, monkeypatch, modules=11, calls=135, reads=2)


def test_a_step_between_races_takes_the_way_of_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bprong.optim.auto.race.Rival.verdict", lambda rival: (0.5, 0.01))  # the leader wins
    visited = []
    for step in ("natural", "auto"):
        steps = Steps(every=1000, step=step)
        for _ in range(93):  # which is neither evaluated nor raced, and neither is the step before
            steps.make()
        visited.append(calls_of(steps.make))
    assert visited[0] == visited[1]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count comprehensions in other ways")
def test_a_step_with_an_evaluation() -> None:
    """At most 18 modules and 760 calls."""
    steps = Steps(every=1000, step="natural")
    for _ in range(3):
        steps.make()
    visited = calls_of(steps.make)
    assert len(visited) <= 18, visited
    assert visited.total() <= 760, visited


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count comprehensions in other ways")
def test_a_step_with_a_refresh() -> None:
    """At most 18 modules and 850 calls."""
    steps = Steps(lr=0.01, every=1)
    for _ in range(3):
        steps.make()
    visited = calls_of(steps.make)
    assert len(visited) <= 18, visited
    assert visited.total() <= 850, visited


def test_a_longer_walk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget in ({"modules": 1}, {"calls": 1}, {"reads": 0}):
        steps = Steps(lr=0.01, every=1000)
        with pytest.raises(AssertionError):
            assert_walk(steps, monkeypatch, **({"modules": 99, "calls": 9999, "reads": 999} | budget))


def test_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a step with a refresh there are many, so that this way of counting can fail."""
    steps = Steps(lr=0.01, every=1)
    with counted_reads(monkeypatch) as reads:
        steps.make()
    assert reads.total() > 5
