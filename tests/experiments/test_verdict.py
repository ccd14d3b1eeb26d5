"""The verdict: each claim can hold, fail or be unmeasured, and the text gives the reason."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bprong.experiments.records import Row
from bprong.experiments.verdict import (
    LOSS_LEVELS,
    Claim,
    number,
    ranges,
    seconds_to,
    seconds_to_levels,
    unstated,
    verdict,
)
from experiments.made_up_runs import INF, NAN, run_of

# Numbers as the paper's experiment gives them.
LOSSES = {
    "sgd": [2.3, 2.2, 1.5, 0.9],
    "bn": [2.3, 0.25, 0.15, 0.09],
    "prong": [2.3, 0.16, 0.08, 0.04],
    "bprong": [2.3, 0.06, 0.02, 0.008],
}
PACE = {"sgd": 1.0, "bn": 2.0, "prong": 4.0, "bprong": 4.5}


def with_(**losses) -> list[Row]:
    """The run above with some losses replaced; None removes a method."""
    changed = {name: values for name, values in (LOSSES | losses).items() if values is not None}
    return run_of(changed, pace=PACE)


def holds(rows) -> list[bool | None]:
    return [claim.holds for claim in verdict(rows)]


def test_a_run_like_the_papers():
    train, validation, prong, bn = verdict(with_())
    assert holds(with_()) == [True] * 4
    assert train.measured == (
        "lower after 3 of 3 epochs; losses after epoch 3: BPRONG 0.00800, SGD 0.900, BN 0.0900, PRONG 0.0400"
    )
    assert "training loss" in train.text
    assert "validation loss" in validation.text
    assert prong.measured.startswith("faster to 7 of the 7 training losses that at least one of them reached; ")
    assert prong.measured.endswith(
        "(median over the 5 that both reached, range 0.49 to 0.82); only BPRONG reached 0.02, 0.01"
    )
    assert bn.measured.endswith("only BPRONG reached 0.05, 0.02, 0.01")


def test_a_claim_that_holds_only_at_first_fails_and_names_the_epochs():
    train = verdict(with_(bprong=[2.3, 0.06, 0.02, 0.08]))[0]
    assert train.holds is False
    assert "lower after 2 of 3 epochs (1–2); lower than SGD after 3, BN after 3, PRONG after 2;" in train.measured
    never = verdict(with_(bprong=[0.1, 3.0, 3.0, 3.0]))[0]
    assert never.measured.startswith("lower after 0 of 3 epochs; lower than SGD after 0")
    assert never.holds is False


def test_an_equal_loss_is_not_a_lower_one_and_epoch_zero_does_not_count():
    assert verdict(with_(bprong=LOSSES["prong"]))[0].holds is False
    assert verdict(with_(bprong=[9.0, 0.06, 0.02, 0.008]))[0].holds is True


def test_the_second_claim_is_about_the_validation_loss():
    rows = run_of(LOSSES, pace=PACE, val=LOSSES | {"bprong": [2.3, 0.1, 0.1, 0.1]})
    assert holds(rows)[:2] == [True, False]
    assert "lower after 1 of 3 epochs (1)" in verdict(rows)[1].measured


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("sgd", [None, None, True, True]),
        ("bn", [None, None, True, None]),
        ("prong", [None, None, None, True]),
        ("bprong", [None] * 4),
    ],
)
def test_claims_about_missing_methods_are_not_measured(gone, expected):
    claims = verdict(with_(**{gone: None}))
    assert [claim.holds for claim in claims] == expected
    assert all("not in this run" in claim.measured for claim in claims if claim.holds is None)


@pytest.mark.parametrize("rows", [[], run_of({name: [2.3] for name in LOSSES})], ids=["no rows", "untrained"])
def test_without_training_no_claim_is_measured(rows):
    assert holds(rows) == [None] * 4


def test_only_epochs_that_all_methods_have_finished_are_compared():
    rows = with_(prong=[2.3, 0.16])
    assert verdict(rows)[0].measured.startswith("lower after 1 of 1 epoch;")


def test_another_method_that_diverged_counts_as_worse_and_is_named():
    claims = verdict(with_(prong=[2.3, 0.16, NAN]))
    assert [claim.holds for claim in claims] == [True] * 4
    assert "PRONG diverged; PRONG diverged at epoch 2" in claims[0].measured
    assert claims[2].measured.endswith("PRONG diverged at epoch 2")


def test_if_bprong_diverged_no_claim_holds():
    claims = verdict(with_(bprong=[2.3, 0.0005, INF]))
    assert [claim.holds for claim in claims] == [False] * 4
    assert all("BPRONG diverged at epoch 2" in claim.measured for claim in claims)
    assert "faster to 10 of the 10" in claims[2].measured


def test_one_diverged_seed_of_three_is_named_and_the_median_decides():
    rows = [row for seed in (1, 2) for row in run_of(LOSSES, seed, PACE)]
    rows += run_of(LOSSES | {"bprong": [2.3, 0.06, NAN]}, 3, PACE)
    assert holds(rows) == [True] * 4
    assert "BPRONG diverged at epoch 2 (1 of 3 seeds)" in verdict(rows)[0].measured


def test_a_slower_bprong_is_neither_faster_than_prong_nor_about_as_fast_as_bn():
    rows = run_of(LOSSES, pace=PACE | {"bprong": 45.0})
    assert holds(rows) == [True, True, False, False]


@pytest.mark.parametrize(("pace", "expected"), [(0.1, True), (1.0, True), (1.99, True), (2.01, False)])
def test_about_as_fast_means_at_most_twice_as_long(pace, expected):
    rows = run_of({"bn": [2.3, 0.3, 0.05], "bprong": [2.3, 0.3, 0.05]}, pace={"bn": 1.0, "bprong": pace})
    claim = verdict(rows)[3]
    assert claim.holds is expected
    assert claim.measured == (
        f"{pace:.2f} times the seconds of BN (median over the 5 that both reached, range {pace:.2f} to {pace:.2f})"
    )


def test_without_a_common_loss_level_the_method_that_reached_one_is_faster():
    paces = {"bn": 1.0, "bprong": 9.0}
    assert verdict(run_of({"bn": [2.3, 2.2], "bprong": [2.3, 0.7]}, pace=paces))[3].holds is True
    assert verdict(run_of({"bn": [2.3, 0.7], "bprong": [2.3, 2.2]}, pace=paces))[3].holds is False
    neither = verdict(run_of({"bn": [2.3, 2.2], "bprong": [2.3, 2.2]}, pace=paces))[3]
    assert neither == Claim(neither.text, "neither reached any of the training losses compared (1 to 0.001)", None)


def test_a_loss_level_passed_before_training_does_not_count():
    rows = run_of({"prong": [0.6, 0.55, 0.4], "bprong": [0.6, 0.45, 0.4]})
    assert verdict(rows)[2].measured.startswith("faster to 1 of the 1 training loss that at least one of them reached")
    assert verdict(run_of({"prong": [0.6, 0.55], "bprong": [0.6, 0.52]}))[2].holds is None


def test_times_are_interpolated_linearly_in_the_logarithm_of_the_loss():
    seconds = dict(zip(LOSS_LEVELS, seconds_to_levels(run_of({"mine": [1.0, 0.01]}, pace=2.0))["mine"], strict=True))
    assert seconds[1.0] == 0.0
    assert seconds[0.1] == pytest.approx(1.0, rel=1e-12)
    assert seconds[0.01] == pytest.approx(2.0, rel=1e-12)
    assert seconds[0.005] == INF


def test_the_first_crossing_counts_and_a_loss_may_be_zero():
    rows = run_of({"mine": [1.0, 0.1, 0.9, 0.1, 0.0]})
    assert seconds_to(0.1, rows) == pytest.approx(1.0)
    assert 3 < seconds_to(0.001, rows) < 4
    assert seconds_to(0.1, run_of({"mine": [INF, 0.1]})) == 1.0


def test_a_loss_level_is_reached_when_half_of_the_seeds_have_reached_it():
    times = [seconds_to_levels(rows)["bn"][1] for rows in (two_of_three(0.4), two_of_three(0.6))]
    assert times[0] < times[1] == INF


def two_of_three(loss: float) -> list[Row]:
    return [row for seed, last in enumerate((0.4, loss, 0.9)) for row in run_of({"bn": [2.0, last]}, seed)]


losses = st.lists(st.floats(1e-4, 3), min_size=2, max_size=6)


@given(losses)
def test_lower_levels_take_longer_and_times_scale_with_the_pace(values):
    times = seconds_to_levels(run_of({"mine": values}))["mine"]
    assert times == sorted(times)
    assert seconds_to_levels(run_of({"mine": values}, pace=4.0))["mine"] == [4 * time for time in times]


@given(st.fixed_dictionaries({name: st.lists(st.floats(1e-3, 3), min_size=4, max_size=4) for name in LOSSES}))
def test_the_first_claim_against_its_definition(run):
    rivals = zip(run["sgd"], run["bn"], run["prong"], strict=True)
    wins = [mine < min(others) for mine, others in zip(run["bprong"], rivals, strict=True)][1:]
    claim = verdict(run_of(run))[0]
    assert claim.holds is all(wins)
    assert claim.measured.startswith(f"lower after {sum(wins)} of 3 epochs")


@given(st.randoms(use_true_random=False), losses)
def test_neither_other_methods_nor_the_order_of_rows_change_the_verdict(random, extra):
    rows = with_() + run_of({"bprong-auto": extra[:4], "bprong-fast": extra[:4]})
    random.shuffle(rows)
    assert verdict(rows) == verdict(with_())
    assert set(seconds_to_levels(rows)) == {*LOSSES, "bprong-auto", "bprong-fast"}


def test_the_median_over_seeds_decides_not_the_mean():
    rows = [row for seed in (1, 2) for row in run_of(LOSSES, seed, PACE)]
    rows += run_of(LOSSES | {"bprong": [2.3, 100.0, 100.0, 100.0]}, 3, PACE)
    assert holds(rows) == [True] * 4
    assert holds([replace(row, seed=0) if row.seed == 3 else row for row in rows if row.seed == 3])[0] is False


def test_unstated_choices_are_those_of_the_run_or_a_dash():
    config = {
        "activation": "relu", "forward_damping": 0.1, "backward_damping": {"bprong": 0.03}, "forward_every": 100,
        "forward_offset": 0, "backward_every": 50, "statistics": "one batch", "fisher": "", "other": 1,
    }  # fmt: skip
    chosen = dict(unstated(config))
    assert chosen["Activation φ"] == "relu"
    assert chosen["ε₁, damping of Ž"] == "0.1"
    assert chosen["ε₂, damping of D"] == "bprong: 0.03"
    assert chosen["τ₁, updates between two refreshes of U and c"] == "100"
    assert chosen["c₁, offset of these refreshes"] == "0"
    assert chosen["τ₂, updates between two refreshes of R"] == "50"
    assert chosen["c₂, offset of these refreshes"] == "—"
    assert chosen["Labels behind the errors of D"] == "—"
    assert {choice for _, choice in unstated({})} == {"—"}
    assert unstated({"drop_in": {"BPRONG-fast": "its own"}})[-1][1] == "BPRONG-fast: its own"


def test_numbers_and_ranges_as_text():
    assert [number(v) for v in (0.12, 99.96, 100.4, 1234.5, 0.0, 5e-7, NAN, -INF)] == [
        "0.120", "100", "100", "1234", "0.00", "5.00e-07", "diverged", "diverged",
    ]  # fmt: skip
    assert [ranges(n) for n in ([], [4], [1, 2, 4], [1, 3, 4, 5])] == ["", "4", "1–2, 4", "1, 3–5"]
    assert math.isinf(seconds_to(1.0, []))
