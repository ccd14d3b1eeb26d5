"""Habits of AdamW's users cost steps without a learning rate what they cost AdamW; `benchmarks/adamw_habits.py`."""

from functools import cache
from statistics import geometric_mean

import pytest
from adamw_habits import ADAMW_TARGET, BAR, HABITS, TARGET, losses, steps_to

from helpers import quick_cases

QUICK = ("weight_decay=0.1", "lr written by hand", "cosine", "warm-up")


SEEDS = {"natural": 1, "spectral": 5}  # spectral steps vary more near the target


@cache
def steps(name, step, seeds):
    target = ADAMW_TARGET if step is None else TARGET
    return geometric_mean(steps_to(target, losses(HABITS[name], step, seed)) for seed in range(seeds))


@pytest.mark.parametrize("name", quick_cases([name for name in HABITS if name != "plain"], *QUICK))
@pytest.mark.parametrize("step", quick_cases(["natural", "spectral"], "natural"))
def test_a_habit_costs_no_more_than_it_costs_adamw(step, name):
    seeds = SEEDS[step]
    cost = steps(name, step, seeds) / steps("plain", step, seeds)
    assert cost <= BAR * steps(name, None, seeds) / steps("plain", None, seeds)


def test_a_path_that_misses_the_target_counts_twice():
    assert steps_to(0.1, [0.5, 0.2]) == 300
    assert steps_to(0.1, [0.5, 0.05, 0.01]) == 2
