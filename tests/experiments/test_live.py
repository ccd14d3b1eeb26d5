"""The live view of a report: its curves, its rows, and that it does not disturb training."""

from __future__ import annotations

import io
import math
import time

import pytest
import torch
from rich.console import Console
from torch import nn

import bprong
from bprong.experiments.live import BARS, CURVE, Curve, LiveReport
from helpers import assert_unchanged, classification, mlp, snapshot
from training import train

X, Y = classification(60, 5, 3)


def console(width: int = 100, height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width, height=height)


def last_view(screen: Console) -> list[str]:
    written = screen.file.getvalue()  # type: ignore[attr-defined]
    return written[written.rindex("╭") :].splitlines()


def shown(model: nn.Module, screen: Console, steps: int = 3, **numbers: float) -> list[str]:
    optimizer = bprong.BPRONG(model, "cross_entropy")
    with LiveReport(optimizer, console=screen) as live:
        for _ in range(steps):
            train(model, optimizer, [(X, Y)])
            live.update(**numbers)
    return last_view(screen)


def test_the_view_shows_every_side_the_step_rule_and_numbers_of_the_user() -> None:
    lines = shown(mlp(5, 4, 3), console(), loss=0.25)
    text = "\n".join(lines)
    assert "step 3 ·" in lines[0]
    assert "0.25" in next(line for line in lines if "loss" in line)
    assert sum("exact" in line for line in lines) == 4
    assert all(word in text for word in ("factor", "drift", "step rule", "λ", "factorisation", "your code"))


@pytest.mark.parametrize(("width", "height"), [(60, 14), (80, 24), (200, 60)])
def test_the_view_fits_the_terminal(width: int, height: int) -> None:
    """Layers that do not fit are counted; no line is longer than the terminal is wide."""
    lines = shown(mlp(5, *[4] * 15, 3), console(width, height), loss=0.25)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    rows = sum(" z " in line for line in lines)
    assert rows >= 1
    if rows < 16:
        assert any(f"and {16 - rows} more layers" in line for line in lines)


def test_training_takes_the_same_path_with_a_view() -> None:
    ends = []
    for viewed in (False, True):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        if viewed:
            shown(model, console(), steps=5)
        else:
            train(model, bprong.BPRONG(model, "cross_entropy"), [(X, Y)] * 5)
        ends.append(snapshot(model))
    assert_unchanged(*ends)


def test_the_view_is_drawn_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once at the first update, and then when the time has passed, however many updates there are."""
    optimizer = bprong.BPRONG(mlp(5, 4, 3), "cross_entropy")
    live = LiveReport(optimizer, seconds=10.0, console=console())
    drawn = []
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(live, "_draw", lambda: drawn.append(now))
    live._next = 0.0
    for step in range(100):
        now = step / 4
        live.update(loss=1.0)
    assert drawn == [0.0, 10.0, 20.0]


def test_curves_merge_their_points_and_keep_their_mean() -> None:
    curve = Curve()
    for step in range(1000):
        curve.add(1000.0 - step)
    assert CURVE / 2 <= len(str(curve)) <= CURVE
    assert str(curve)[0] == BARS[-1]
    assert str(curve)[-1] == BARS[0]
    assert curve.last == 1.0
    assert list(str(curve)) == sorted(str(curve), reverse=True)


def test_curves_of_constant_negative_and_non_finite_numbers() -> None:
    for values in ([2.0] * 5, [-1.0, 0.0, 3.0], [math.nan, math.inf], [1.0, math.nan, 2.0]):
        curve = Curve()
        for value in values:
            curve.add(value)
        assert len(str(curve)) == (len(values) if any(map(math.isfinite, values)) else 0)
