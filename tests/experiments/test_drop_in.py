"""The comparison of the drop-in optimizer with the paper's network: losses and times per update as exact ratios."""

from __future__ import annotations

from dataclasses import replace

from bprong.experiments.drop_in import comparison
from experiments.made_up_runs import NAN, run_of

LOSSES = {"sgd": [2.3] * 6, "bprong": [2.3, 1.0, 0.8, 0.4, 0.3, 0.2], "bprong-fast": [2.3, 1.0, 0.8, 0.5, 0.3, 0.1]}
PACE = {"sgd": 0.6, "bprong": 2.4, "bprong-fast": 1.2}


def test_losses_after_three_epochs_and_after_the_last_and_time_per_update():
    assert comparison(run_of(LOSSES, pace=PACE)) == [
        ("BPRONG-fast, training loss after epoch 3", "0.500 (BPRONG 0.400, ratio 1.25)"),
        ("BPRONG-fast, training loss after epoch 5 (the last)", "0.100 (BPRONG 0.200, ratio 0.50)"),
        ("BPRONG-fast, time per update", "2.00 ms; 2.00 times that of SGD (median of 5 epochs, range 2.00 to 2.00);"
                                         " 0.50 times that of BPRONG (median of 5 epochs, range 0.50 to 0.50)"),
    ]  # fmt: skip


def test_losses_are_medians_over_seeds():
    rows = [row for seed, factor in enumerate((1, 2, 9)) for row in
            run_of({n: [factor * v for v in values] for n, values in LOSSES.items()}, seed)]  # fmt: skip
    assert comparison(rows)[0][1] == "1.00 (BPRONG 0.800, ratio 1.25)"


def test_an_epoch_is_compared_with_the_same_epoch_of_the_other():
    """A machine that becomes ten times slower half-way changes the times but not the ratios."""
    slow = [replace(r, seconds=r.seconds * 10 if r.epoch > 2 else r.seconds) for r in run_of(LOSSES, pace=PACE)]
    said = comparison(slow)[-1][1]
    assert "2.00 times that of SGD (median of 5 epochs, range 2.00 to 2.00)" in said


def test_one_slow_epoch_does_not_change_the_median_ratio():
    rows = [replace(r, seconds=r.seconds + 50 * (r.method == "bprong-fast" and r.epoch == 5))
            for r in run_of(LOSSES, pace=PACE)]  # fmt: skip
    assert "2.00 times that of SGD (median of 5 epochs, range 2.00 to 85.33)" in comparison(rows)[-1][1]


def test_nothing_is_compared_if_the_optimizer_is_missing_or_untrained():
    assert comparison([]) == []
    assert comparison(run_of({"sgd": [2.3, 1.0], "bprong": [2.3, 1.0]})) == []
    assert comparison(run_of({"bprong-fast": [2.3], "bprong": [2.3]})) == []


def test_the_method_compared_with_may_be_missing_or_have_fewer_epochs():
    alone = comparison(run_of({"bprong-fast": [2.3, 0.5]}, pace=0.6))
    assert alone == [
        ("BPRONG-fast, training loss after epoch 1 (the last)", "0.500 (BPRONG is not in this run)"),
        (
            "BPRONG-fast, time per update",
            "1.00 ms; no epoch of SGD to compare with; no epoch of BPRONG to compare with",
        ),
    ]
    behind = comparison(run_of(LOSSES | {"bprong": [2.3, 1.0]}))
    assert [text for text, _ in behind] == [
        "BPRONG-fast, training loss after epoch 1 (the last)", "BPRONG-fast, time per update",
    ]  # fmt: skip
    assert "times that of BPRONG (one epoch)" in behind[-1][1]
    assert comparison(run_of({"bprong-fast": [2.3, 0.5], "sgd": [2.3, 0.5]}, pace=0.0))


def test_divergence_is_reported_and_its_epoch_is_not_timed():
    pairs = dict(comparison(run_of(LOSSES | {"bprong-fast": [2.3, 1.0, 0.8, NAN]})))
    assert pairs["BPRONG-fast, training loss after epoch 3"] == "diverged (BPRONG 0.400)"
    assert "median of 2 epochs" in pairs["BPRONG-fast, time per update"]
    assert pairs["BPRONG-fast, divergence"] == "diverged at epoch 3"


def test_the_automatic_learning_rate_is_compared_in_the_same_way():
    named = comparison(run_of({"bprong-auto": LOSSES["bprong-fast"], **{n: LOSSES[n] for n in ("sgd", "bprong")}}))
    assert named[0] == ("BPRONG-auto, training loss after epoch 3", "0.500 (BPRONG 0.400, ratio 1.25)")
    both = comparison(run_of(LOSSES | {"bprong-auto": LOSSES["bprong-fast"]}))
    assert len(both) == 2 * len(named)
