"""The drop-in optimizer beside the paper's rows: losses and the time of an update, as ratios that can be checked."""

from __future__ import annotations

from dataclasses import replace

from bprong.experiments.drop_in import beside
from test_records import NAN, run_of

LOSSES = {"sgd": [2.3] * 6, "bprong": [2.3, 1.0, 0.8, 0.4, 0.3, 0.2], "bprong-fast": [2.3, 1.0, 0.8, 0.5, 0.3, 0.1]}
PACE = {"sgd": 0.6, "bprong": 2.4, "bprong-fast": 1.2}


def test_losses_after_three_epochs_and_the_last_and_the_time_of_an_update():
    assert beside(run_of(LOSSES, pace=PACE)) == [
        ("Training loss after epoch 3", "0.500, 1.25 times BPRONG’s 0.400"),
        ("Training loss after epoch 5, the last", "0.100, 0.50 times BPRONG’s 0.200"),
        ("Time of an update", "2.00 ms; 2.00 times SGD’s (median of 5 epochs, 2.00 to 2.00);"
                              " 0.50 times BPRONG’s (median of 5 epochs, 0.50 to 0.50)"),
    ]  # fmt: skip


def test_losses_are_medians_over_seeds():
    rows = [row for seed, factor in enumerate((1, 2, 9)) for row in
            run_of({n: [factor * v for v in values] for n, values in LOSSES.items()}, seed)]  # fmt: skip
    assert beside(rows)[0][1] == "1.00, 1.25 times BPRONG’s 0.800"


def test_an_epoch_is_compared_with_the_same_epoch_of_the_other():
    """A machine that becomes ten times slower half-way changes the seconds and not one ratio."""
    slow = [replace(r, seconds=r.seconds * 10 if r.epoch > 2 else r.seconds) for r in run_of(LOSSES, pace=PACE)]
    said = beside(slow)[-1][1]
    assert "2.00 times SGD’s (median of 5 epochs, 2.00 to 2.00)" in said


def test_one_slow_epoch_does_not_decide():
    rows = [replace(r, seconds=r.seconds + 50 * (r.method == "bprong-fast" and r.epoch == 5))
            for r in run_of(LOSSES, pace=PACE)]  # fmt: skip
    assert "2.00 times SGD’s (median of 5 epochs, 2.00 to 85.33)" in beside(rows)[-1][1]


def test_a_run_without_it_or_untrained_has_nothing_to_say():
    assert beside([]) == []
    assert beside(run_of({"sgd": [2.3, 1.0], "bprong": [2.3, 1.0]})) == []
    assert beside(run_of({"bprong-fast": [2.3], "bprong": [2.3]})) == []


def test_what_it_is_compared_with_may_be_missing_or_behind():
    alone = beside(run_of({"bprong-fast": [2.3, 0.5]}, pace=0.6))
    assert alone == [
        ("Training loss after epoch 1, the last", "0.500; BPRONG is not in this run"),
        ("Time of an update", "1.00 ms; no epoch of SGD to compare with; no epoch of BPRONG to compare with"),
    ]
    behind = beside(run_of(LOSSES | {"bprong": [2.3, 1.0]}))
    assert [text for text, _ in behind] == ["Training loss after epoch 1, the last", "Time of an update"]
    assert "times BPRONG’s (one epoch)" in behind[-1][1]
    assert beside(run_of({"bprong-fast": [2.3, 0.5], "sgd": [2.3, 0.5]}, pace=0.0))


def test_divergence_is_named_and_its_epoch_not_timed():
    pairs = dict(beside(run_of(LOSSES | {"bprong-fast": [2.3, 1.0, 0.8, NAN]})))
    assert pairs["Training loss after epoch 3"] == "diverged, against BPRONG’s 0.400"
    assert "median of 2 epochs" in pairs["Time of an update"]
    assert pairs["Divergence"] == "diverged at epoch 3"


def test_the_one_without_a_learning_rate_is_compared_alike_and_named():
    named = beside(run_of({"bprong-auto": LOSSES["bprong-fast"], **{n: LOSSES[n] for n in ("sgd", "bprong")}}))
    assert named[0] == ("BPRONG-auto: Training loss after epoch 3", "0.500, 1.25 times BPRONG’s 0.400")
    both = beside(run_of(LOSSES | {"bprong-auto": LOSSES["bprong-fast"]}))
    assert len(both) == 2 * len(named)
