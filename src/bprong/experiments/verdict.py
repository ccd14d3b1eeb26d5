"""The paper's claims compared with the measurements of a run, and the run's choices where the paper states none."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bprong.experiments.records import Column, Row, curve, divergence_epochs, label, method_names, seed_count

BPRONG = "bprong"
LOSS_LEVELS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)  # training losses to be reached
ABOUT_AS_FAST = 2.0  # the largest ratio of times that counts as "about the same speed"
NOT_RECORDED = "—"

Times = dict[float, tuple[float, float]]  # loss level: seconds to reach it, BPRONG's and another method's


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the measurement, and whether the claim holds; None if it could not be measured."""

    text: str
    measured: str
    holds: bool | None


def verdict(rows: Sequence[Row]) -> list[Claim]:
    """Check each claim of section 4 of the paper, on medians over seeds."""
    return [
        _lower_loss(rows, "train_loss", "BPRONG has a lower training loss than SGD, BN and PRONG at equal iterations"),
        _lower_loss(rows, "val_loss", "BPRONG has a lower validation loss than SGD, BN and PRONG at equal iterations"),
        _faster(rows, "prong", "BPRONG is faster than PRONG in seconds"),
        _about_as_fast(rows, "bn", "BPRONG is about as fast as BN in seconds (takes at most twice as long)"),
    ]


def _lower_loss(rows: Sequence[Row], column: Column, text: str) -> Claim:
    """The claim holds if BPRONG's median is below the others' after every epoch that all of them have finished."""
    others = ("sgd", "bn", "prong")
    if missing := _missing(rows, (BPRONG, *others)):
        return Claim(text, missing, None)
    losses = {name: {p.epoch: p.median for p in curve(rows, name, column)} for name in (BPRONG, *others)}
    epochs = sorted(set.intersection(*(set(values) for values in losses.values())) - {0})
    if not epochs:
        return Claim(text, "no epoch of training that all four have finished", None)
    below = {name: [e for e in epochs if losses[BPRONG][e] < losses[name][e]] for name in others}
    wins = [e for e in epochs if all(e in below[name] for name in others)]
    parts = [f"lower after {len(wins)} of {len(epochs)} epoch{'s' * (len(epochs) > 1)}"]
    if len(wins) < len(epochs):
        parts[0] += f" ({ranges(wins)})" if wins else ""
        parts.append("lower than " + ", ".join(f"{label(name)} after {len(below[name])}" for name in others))
    values = ", ".join(f"{label(name)} {number(losses[name][epochs[-1]])}" for name in (BPRONG, *others))
    parts += [f"losses after epoch {epochs[-1]}: {values}", *_divergences(rows, (BPRONG, *others))]
    return Claim(text, "; ".join(parts), len(wins) == len(epochs))


def _faster(rows: Sequence[Row], other: str, text: str) -> Claim:
    """The claim holds if BPRONG is first at every loss level that either method reached."""
    times = _times(rows, other)
    if not times:
        return _not_measured(rows, other, text)
    wins = sum(mine < theirs for mine, theirs in times.values())
    levels = f"{len(times)} training loss{'es' * (len(times) > 1)}"
    measured = f"faster to {wins} of the {levels} that at least one of them reached"
    holds = wins == len(times) and not _bprong_diverged(rows)
    return Claim(text, "; ".join([measured, *_details(rows, times, other)]), holds)


def _about_as_fast(rows: Sequence[Row], other: str, text: str) -> Claim:
    """The claim holds if the median ratio of the times, over the loss levels that the other reached, is at most two."""
    times = _times(rows, other)
    if not times:
        return _not_measured(rows, other, text)
    # A level that BPRONG did not reach counts as an infinite ratio. If the other reached none, BPRONG was faster.
    ratios = [mine / theirs for mine, theirs in times.values() if theirs < math.inf]
    fast = not ratios or median(ratios) <= ABOUT_AS_FAST
    return Claim(text, "; ".join(_details(rows, times, other)), fast and not _bprong_diverged(rows))


def _missing(rows: Iterable[Row], names: Iterable[str]) -> str:
    present = method_names(rows)
    missing = [label(name) for name in names if name not in present]
    return f"not in this run: {', '.join(missing)}" if missing else ""


def _not_measured(rows: Sequence[Row], other: str, text: str) -> Claim:
    """The claim about two methods of which one is missing, or which both reached no loss level."""
    none = f"neither reached any of the training losses compared ({LOSS_LEVELS[0]:g} to {LOSS_LEVELS[-1]:g})"
    reason = _missing(rows, (BPRONG, other)) or "; ".join([none, *_divergences(rows, (BPRONG, other))])
    return Claim(text, reason, None)


def _bprong_diverged(rows: Sequence[Row]) -> bool:
    """Whether at least half of BPRONG's seeds diverged."""
    return math.isinf(curve(rows, BPRONG, "train_loss")[-1].median)


def _times(rows: Sequence[Row], other: str) -> Times:
    """Seconds of BPRONG and of the other method to each loss level that at least one of them reached by training."""
    if _missing(rows, (BPRONG, other)):
        return {}
    seconds = seconds_to_levels(rows)
    times = zip(LOSS_LEVELS, zip(seconds[BPRONG], seconds[other], strict=True), strict=True)
    return {level: pair for level, pair in times if 0 < min(pair) < math.inf}


def _details(rows: Sequence[Row], times: Times, other: str) -> list[str]:
    """The ratio of the times, the levels that only one method reached, and the divergences, in words."""
    parts = []
    if ratios := [mine / theirs for mine, theirs in times.values() if max(mine, theirs) < math.inf and theirs > 0]:
        spread = f"median over the {len(ratios)} that both reached, range {min(ratios):.2f} to {max(ratios):.2f}"
        note = spread if len(ratios) > 1 else "at the only training loss that both reached"
        parts.append(f"{median(ratios):.2f} times the seconds of {label(other)} ({note})")
    for name, rival in ((BPRONG, 1), (other, 0)):
        alone = [f"{level:g}" for level, pair in times.items() if math.isinf(pair[rival])]
        parts += [f"only {label(name)} reached {', '.join(alone)}"] if alone else []
    return parts + _divergences(rows, (BPRONG, other))


def _divergences(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    return [f"{label(name)} {text}" for name in names if (text := divergence_text(rows, name))]


def divergence_text(rows: Sequence[Row], method: str) -> str:
    """When a method diverged, in words; empty if it did not."""
    ends = divergence_epochs(rows, method)
    if not ends:
        return ""
    seeds = seed_count(row for row in rows if row.method == method)
    share = f" ({len(ends)} of {seeds} seeds)" if seeds > 1 else ""
    epochs = sorted(set(ends.values()))
    return f"diverged at epoch{'s' * (len(epochs) > 1)} {ranges(epochs)}{share}"


def seconds_to_levels(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Seconds of each method to each of `LOSS_LEVELS`: the median over its seeds, infinite if not reached."""
    table = {}
    for name in method_names(rows):
        own = [row for row in rows if row.method == name]
        seeds = [[row for row in own if row.seed == seed] for seed in {row.seed for row in own}]
        table[name] = [median(seconds_to(level, rows) for rows in seeds) for level in LOSS_LEVELS]
    return table


def seconds_to(level: float, rows: Iterable[Row]) -> float:
    """Seconds until one seed first had a training loss of `level`; infinite if it never had.

    Between two epochs the time is interpolated linearly in the logarithm of the loss. A level that the untrained
    network has already passed takes no time.
    """
    before: Row | None = None
    for row in sorted(rows, key=lambda row: row.epoch):
        if row.train_loss <= level:
            return row.seconds if before is None else _interpolated(level, before, row)
        before = row if math.isfinite(row.train_loss) else None
    return math.inf


def _interpolated(level: float, before: Row, after: Row) -> float:
    losses = (before.train_loss, level, after.train_loss)
    top, middle, bottom = map(math.log, (max(loss, sys.float_info.min) for loss in losses))
    return before.seconds + (after.seconds - before.seconds) * (top - middle) / (top - bottom)


def unstated(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The choices that the paper does not state, each with what the run chose."""
    chosen = {key: in_words(value) for key, value in config.items()}
    choices = {
        "Activation φ": "activation",
        "Initialisation of W and b": "initialisation",
        "Scaling of the inputs": "input_scaling",
        "ε₁, damping of Ž": "forward_damping",
        "ε₂, damping of D": "backward_damping",
        "τ₁, updates between two refreshes of U and c": "forward_every",
        "c₁, offset of these refreshes": "forward_offset",
        "τ₂, updates between two refreshes of R": "backward_every",
        "c₂, offset of these refreshes": "backward_offset",
        "Examples behind the statistics": "statistics",
        "Labels behind the errors of D": "fisher",
        "Details of batch normalisation": "batch_normalisation",
    } | ({"Methods that are not in the paper": "drop_in"} if config.get("drop_in") else {})
    return [(text, chosen.get(key, NOT_RECORDED)) for text, key in choices.items()]


def in_words(value: Any) -> str:
    """A value of a configuration as text.

    >>> in_words({"relu": True, "sizes": [3, 4]}), in_words(None)
    ('relu: yes, sizes: 3, 4', '—')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {in_words(item)}" for key, item in value.items()) or NOT_RECORDED
    if isinstance(value, (list, tuple)):
        return ", ".join(map(in_words, value)) or NOT_RECORDED
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NOT_RECORDED if value is None or value == "" else str(value)


def number(value: float) -> str:
    """A loss as text, with three digits; "diverged" if it is not finite.

    >>> number(0.12), number(1234.5), number(math.inf)
    ('0.120', '1234', 'diverged')
    """
    if not math.isfinite(value):
        return "diverged"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending integers as text, consecutive ones as ranges.

    >>> ranges([1, 2, 3, 5, 8, 9])
    '1–3, 5, 8–9'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
