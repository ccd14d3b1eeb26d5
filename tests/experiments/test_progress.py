"""The progress of a command: one line on a terminal, a few lines elsewhere, one estimate."""

import pytest
import rich.console

from bprong.experiments import progress
from bprong.experiments.progress import Estimate, Line, Lines


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets: its only entry is the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_few_and_say_what_is_running(clock, capsys):
    lines = Lines()
    for done in range(200):
        clock[0] += 0.9
        lines.show(done, 200, None if done == 0 else (200 - done) * 0.9, f"SGD, epoch {done} of 200")
    out = capsys.readouterr().out.splitlines()
    assert 20 <= len(out) <= 21
    assert out[0] == "  0%                   SGD, epoch 0 of 200"
    assert out[1] == "  5%  3 min left       SGD, epoch 10 of 200"


def test_lines_of_quick_jobs_are_a_second_apart_and_those_of_slow_jobs_a_minute(clock, capsys):
    lines = Lines()
    for done in range(100):
        clock[0] += 0.01
        lines.show(done, 100, 1.0, "quick")
    assert len(capsys.readouterr().out.splitlines()) == 1
    for done in range(10):
        clock[0] += 30
        lines.show(100 + done, 100_000, 1.0, "slow")
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_terminal_shows_one_line_that_fits(columns):
    line = Line()
    line.show(3, 40, 125.0, "BPRONG-auto epoch 7/20; BPRONG-recipe epoch 7/20")
    shown = rich.console.Console(width=columns).render_lines(line._rich.get_renderable(), pad=False)
    assert len(shown) == 1
    text = "".join(segment.text for segment in shown[0])
    assert "  8% 3 min left  BPRONG-auto epoch 7/20" in text
    assert ("BPRONG-recipe epoch 7/20" in text) == (columns >= 80)


def test_the_estimate_uses_the_time_of_each_kind_of_job():
    estimate = Estimate(processes=1)
    for seconds in (1.0, 3.0):
        estimate.add("sgd", 1.0, seconds)
    estimate.add("auto", 1.0, 20.0)
    assert estimate.left({"sgd": (5, 1.0), "auto": (2, 1.0)}) == pytest.approx(5 * 2 + 2 * 20)
    assert estimate.left({"new": (1, 1.0)}) == pytest.approx(24 / 3)
    assert estimate.left({}) == 0
