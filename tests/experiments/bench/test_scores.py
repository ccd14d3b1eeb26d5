"""Scores on exact cases: profiles, the rank-sum test, the best trial and the budget."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from bprong.experiments.bench import plan as planning
from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.plan import Plan, cut, estimated_seconds, names_in, parse_duration, within
from bprong.experiments.bench.records import Row
from bprong.experiments.bench.scores import (
    Times,
    badness,
    chance_of,
    lead,
    profile,
    profile_score,
    ratios,
    scores,
    step_price,
)
from bprong.experiments.bench.summary import Summary, automatic_winners, best_place, in_words, losses, step_lines
from bprong.experiments.bench.targets import TARGETS
from bprong.experiments.bench.workloads import WORKLOADS

PLAN = Plan(tuple(WORKLOADS), tuple(METHODS))


def fresh(method, seconds, workload="paper", goal="val"):
    """Rows of a method, one seed for each of the given times, which are steps as well."""
    times = [{f"{goal}_seconds": s, f"{goal}_steps": s} for s in seconds]
    return [Row(workload, method, "test", 0, i, "", **own) for i, own in enumerate(times, 1)]


@pytest.mark.parametrize(
    ("own", "score"), [([1.0], 1.0), ([4.0], 0.0), ([math.inf], 0.0), ([2.5], 0.5), ([1.0, 1.0, math.inf, 2.5], 0.625)]
)
def test_the_score_of_a_profile_is_its_exact_integral(own, score):
    assert profile_score(own) == pytest.approx(score)
    grid = [1 + 3 * (i + 0.5) / 3000 for i in range(3000)]
    assert sum(profile(own, ratio) for ratio in grid) / len(grid) == pytest.approx(score, abs=1e-3)


def test_ratios_are_to_the_fastest_of_each_race_and_a_race_that_nobody_finishes_helps_nobody():
    rows = [*fresh("adamw", [2, 4, 6]), *fresh("sgd", [2, 2, 2]), *fresh("soap", [1, math.inf, math.inf])]
    times = Times([*rows, Row("gpt", "adamw", "none", -1, -1, "")], "seconds")
    assert ratios(times, [("paper", "val")], times.methods) == {"adamw": [2.0], "sgd": [1.0], "soap": [math.inf]}
    assert scores(times, [("paper", "val"), ("gpt", "val")], times.methods)["sgd"] == pytest.approx(0.5)


def test_the_rank_sum_test_on_exact_cases():
    assert chance_of([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(1 / math.comb(10, 5))
    assert chance_of([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == 1.0
    assert chance_of([1, 1], [1, 1]) == 1.0
    assert chance_of([math.inf] * 3, [math.inf] * 3) == 1.0
    assert chance_of([1, 2, 3], [math.inf] * 3) == pytest.approx(1 / 20)
    assert chance_of([], [1.0]) == 1.0


def test_p_values_are_valid_without_a_difference():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = [chance_of(first, [v for v in values if v not in first]) for first in combinations(values, 3)]
    for level in (0.05, 0.1, 0.5):
        assert sum(p <= level for p in found) / len(found) <= level


def test_faster_is_said_only_if_the_test_allows_it():
    rows = [*fresh("bprong", [1, 2, 3, 4, 5]), *fresh("adamw", [6, 7, 8, 9, 10])]
    found = lead(Times(rows, "seconds"), ("paper", "val"), ["bprong"], ["adamw"])
    assert found.factor == pytest.approx(8 / 3)
    assert "BPRONG, fixed rate is faster than AdamW" in in_words(found, "seconds")
    rows = [*fresh("bprong", [1, 7, 8]), *fresh("adamw", [2, 9, 3])]
    found = lead(Times(rows, "seconds"), ("paper", "val"), ["bprong"], ["adamw"])
    assert found.factor < 1
    assert "faster" not in in_words(found, "seconds")


def test_the_summary_says_where_we_lose():
    rows = [*fresh("bprong", [6, 7, 8, 9, 10]), *fresh("adamw", [1, 2, 3, 4, 5]), *fresh("prodigy", [11] * 5)]
    summary = Summary.of(rows)
    assert any("AdamW is faster than BPRONG, fixed rate" in line for line in losses(summary))
    assert best_place(summary.seconds, ("paper", "val"), summary) == 2
    assert automatic_winners(summary, "seconds")["paper", "val"] == "prodigy"


def test_the_best_trial_has_the_fewest_steps_to_both_targets_and_misses_are_worse():
    both = Row("paper", "sgd", "tuning", 0, 0, "", train_steps=50, val_steps=80, train_loss=1.0, val_loss=1.0)
    slower = replace(both, train_steps=60)
    missed = replace(both, val_steps=math.inf)
    lower = replace(missed, train_steps=math.inf, train_loss=0.5)
    higher = replace(lower, train_loss=0.9)
    found = [badness(row, 100) for row in (both, slower, missed, lower, higher)]
    assert found == sorted(found)
    assert len(set(found)) == 5


def test_a_budget_takes_the_largest_plan_that_fits():
    full = estimated_seconds(PLAN, 2)
    assert within(PLAN, full, 2) == PLAN
    assert cut(PLAN, PLAN, 2, full) == ""
    smaller = within(PLAN, full / 2, 2)
    assert estimated_seconds(smaller, 2) <= full / 2
    larger = planning.STEPS_DOWN[planning.STEPS_DOWN.index((smaller.trials, smaller.seeds)) - 1]
    assert estimated_seconds(replace(PLAN, trials=larger[0], seeds=larger[1]), 2) > full / 2
    assert f"{smaller.seeds} of 5 fresh seeds" in cut(PLAN, smaller, 2, full / 2)
    least = within(PLAN, 1.0, 2)
    assert (least.trials, least.seeds) == (1, 1)
    assert "even this takes about" in cut(PLAN, least, 2, 1.0)
    assert estimated_seconds(PLAN, 4) == pytest.approx(full / 2)


@pytest.mark.parametrize("text", ["10", "m", "10x", "5m3", ""])
def test_a_duration_without_a_unit_is_refused(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_names_are_checked_and_ordered():
    assert names_in("gpt, paper", list(WORKLOADS), "workload") == ("paper", "gpt")
    with pytest.raises(ValueError, match="unknown workload gtp"):
        names_in("gtp", list(WORKLOADS), "workload")


def test_the_time_of_a_step_is_the_median_over_fresh_seeds():
    rows = [
        Row("paper", "adamw", "test", 0, seed, "", steps=10, seconds=seconds) for seed, seconds in enumerate([1, 2, 9])
    ]
    rows += [Row("paper", "adamw", "tuning", 0, 0, "", steps=10, seconds=50.0), Row("paper", "sgd", "test", 0, 0, "")]
    assert step_price(rows) == {("paper", "adamw"): 200.0}
    assert step_lines(Summary.of(rows))[1] == [["AdamW", "200"], ["SGD, momentum", "–"]]


def test_losses_are_measured_from_the_first_step_on():
    steps = list(WORKLOADS["paper"].measured_steps())
    assert steps[:3] == [1, 2, 3]
    assert steps[-1] == WORKLOADS["paper"].steps
    assert all(after == before + 1 or after / before < 1.1 for before, after in pairwise(steps))


def test_every_workload_has_targets_for_both_splits():
    assert list(TARGETS) == list(WORKLOADS)
    for own in TARGETS.values():
        assert set(own) == {"tuning", "test"}
        assert all(0 < loss < 1e4 for target in own.values() for loss in (target.train_loss, target.val_loss))


def test_tuned_methods_have_as_many_trials_and_a_rate_and_a_schedule():
    for method in METHODS.values():
        if not method.automatic:
            assert {"lr", "relative_lr"} & set(method.space)
            assert {"schedule", "own_warmup"} & set(method.space)
