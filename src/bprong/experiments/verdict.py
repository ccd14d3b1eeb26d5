"""The paper's claims beside what a run measured, and the choices the paper leaves open beside what the run chose."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bprong.experiments.records import Column, Row, curve, diverged, label, methods

HERO = "bprong"
RUNGS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)  # training losses, the ladder of every run
ABOUT = 2.0  # "about the same speed" is a factor of at most two
UNKNOWN = "—"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, what was measured, and whether it holds; None if it could not be measured."""

    text: str
    measured: str
    holds: bool | None


def verdict(rows: Sequence[Row]) -> list[Claim]:
    """Section 4 of the paper, claim by claim, on medians over seeds."""
    return [
        _lower(rows, "train_loss", "BPRONG has a lower training loss than SGD, BN and PRONG at equal iterations"),
        _lower(rows, "val_loss", "BPRONG has a lower validation loss than SGD, BN and PRONG at equal iterations"),
        _sooner(rows, "prong", "BPRONG is faster than PRONG in seconds"),
        _as_fast(rows, "bn", "BPRONG is about as fast as BN in seconds (takes at most twice as long)"),
    ]


def _lower(rows: Sequence[Row], column: Column, text: str) -> Claim:
    """Is BPRONG's median below the others' after every epoch that all of them have?"""
    others = ("sgd", "bn", "prong")
    if absent := _absent(rows, (HERO, *others)):
        return Claim(text, absent, None)
    loss = {name: {p.epoch: p.median for p in curve(rows, name, column)} for name in (HERO, *others)}
    epochs = sorted(set.intersection(*(set(losses) for losses in loss.values())) - {0})
    if not epochs:
        return Claim(text, "no epoch of training that all four have finished", None)
    below = {name: [e for e in epochs if loss[HERO][e] < loss[name][e]] for name in others}
    wins = [e for e in epochs if all(e in below[name] for name in others)]
    parts = [f"lower at {len(wins)} of {_count(len(epochs), 'epoch')}"]
    if len(wins) < len(epochs):
        parts[0] += f" ({ranges(wins)})" if wins else ""
        parts.append("below " + ", ".join(f"{label(name)} at {len(below[name])}" for name in others))
    values = ", ".join(f"{label(name)} {number(loss[name][epochs[-1]])}" for name in (HERO, *others))
    parts += [f"after epoch {epochs[-1]}: {values}", *_divergences(rows, (HERO, *others))]
    return Claim(text, "; ".join(parts), len(wins) == len(epochs))


def _sooner(rows: Sequence[Row], other: str, text: str) -> Claim:
    """Is BPRONG sooner at every rung of the ladder that either reached?"""
    if absent := _absent(rows, (HERO, other)):
        return Claim(text, absent, None)
    pairs = _pairs(rows, other)
    if not pairs:
        return Claim(text, _no_rung(rows, other), None)
    wins = sum(mine < theirs for mine, theirs in pairs.values())
    measured = f"sooner at {wins} of the {_count(len(pairs), 'training loss')} that either reached"
    holds = wins == len(pairs) and not _lost(rows)
    return Claim(text, "; ".join([measured, *_details(rows, pairs, other)]), holds)


def _as_fast(rows: Sequence[Row], other: str, text: str) -> Claim:
    """Is the median ratio of the seconds at most two, over the rungs that the other reached?"""
    if absent := _absent(rows, (HERO, other)):
        return Claim(text, absent, None)
    pairs = _pairs(rows, other)
    if not pairs:
        return Claim(text, _no_rung(rows, other), None)
    # A rung that BPRONG never reached counts as infinitely late; where the other reached none, BPRONG was sooner.
    ratios = [mine / theirs for mine, theirs in pairs.values() if theirs < math.inf]
    near = median(ratios) <= ABOUT if ratios else True
    return Claim(text, "; ".join(_details(rows, pairs, other)), near and not _lost(rows))


def _absent(rows: Iterable[Row], names: Iterable[str]) -> str:
    there = set(methods(rows))
    gone = [label(name) for name in names if name not in there]
    return f"not in this run: {', '.join(gone)}" if gone else ""


def _lost(rows: Sequence[Row]) -> bool:
    """Has BPRONG diverged, for half of its seeds or more?"""
    return math.isinf(curve(rows, HERO, "train_loss")[-1].median)


def _pairs(rows: Sequence[Row], other: str) -> dict[float, tuple[float, float]]:
    """Seconds of BPRONG and of the other to each rung that either reached by training."""
    times = ladder(rows)
    pairs = {rung: (mine, theirs) for rung, mine, theirs in zip(RUNGS, times[HERO], times[other], strict=True)}
    return {rung: pair for rung, pair in pairs.items() if 0 < min(pair) < math.inf}


def _ratios(pairs: Mapping[float, tuple[float, float]]) -> list[float]:
    return [mine / theirs for mine, theirs in pairs.values() if not math.isinf(max(mine, theirs)) and theirs > 0]


def _details(rows: Sequence[Row], pairs: Mapping[float, tuple[float, float]], other: str) -> list[str]:
    parts = []
    if ratios := _ratios(pairs):
        spread = f"median of {len(ratios)} that both reached, {min(ratios):.2f} to {max(ratios):.2f}"
        note = spread if len(ratios) > 1 else "the only training loss that both reached"
        parts.append(f"{median(ratios):.2f} times {label(other)}'s seconds ({note})")
    for name, rival in ((HERO, 1), (other, 0)):
        alone = [f"{rung:g}" for rung, pair in pairs.items() if math.isinf(pair[rival])]
        parts += [f"{label(name)} alone reached {', '.join(alone)}"] if alone else []
    return parts + _divergences(rows, (HERO, other))


def _no_rung(rows: Sequence[Row], other: str) -> str:
    return "; ".join(["neither came down to the first training loss of the ladder", *_divergences(rows, (HERO, other))])


def _divergences(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    return [f"{label(name)} {text}" for name in names if (text := divergence(rows, name))]


def divergence(rows: Sequence[Row], method: str) -> str:
    """When a method diverged, in words; empty if it did not."""
    ends = diverged(rows).get(method, {})
    if not ends:
        return ""
    seeds = {row.seed for row in rows if row.method == method}
    share = f" ({len(ends)} of {len(seeds)} seeds)" if len(seeds) > 1 else ""
    epochs = sorted(set(ends.values()))
    return f"diverged at epoch{'s' * (len(epochs) > 1)} {ranges(epochs)}{share}"


def ladder(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Seconds of each method to each of `RUNGS`: the median over its seeds, infinite where a rung was not reached."""
    table = {}
    for name in methods(rows):
        own = [row for row in rows if row.method == name]
        seeds = [[row for row in own if row.seed == seed] for seed in sorted({row.seed for row in own})]
        table[name] = [median(seconds_to(rung, rows) for rows in seeds) for rung in RUNGS]
    return table


def seconds_to(rung: float, rows: Iterable[Row]) -> float:
    """When one seed first had a training loss of `rung`: linear in log-loss between epochs, infinite if it never had.

    A rung that was already passed before training takes no time.
    """
    before: Row | None = None
    for row in sorted(rows, key=lambda row: row.epoch):
        if row.train_loss <= rung:
            return row.seconds if before is None else _crossing(rung, before, row)
        before = row if math.isfinite(row.train_loss) else None
    return math.inf


def _crossing(rung: float, before: Row, after: Row) -> float:
    top, level, bottom = (math.log(max(v, sys.float_info.min)) for v in (before.train_loss, rung, after.train_loss))
    return before.seconds + (after.seconds - before.seconds) * (top - level) / (top - bottom)


def unstated(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the paper does not state, and what the run chose."""

    def choose(key: str) -> str:
        return shown(config.get(key))

    return [
        ("Activation φ", choose("activation")),
        ("Initialisation of W and b", choose("initialisation")),
        ("Scaling of the inputs", choose("input_scaling")),
        ("ε₁, damping of Ž", choose("forward_damping")),
        ("ε₂, damping of D", choose("backward_damping")),
        ("τ₁, c₁: when U and c are renewed", _period(choose("forward_every"), choose("forward_offset"))),
        ("τ₂, c₂: when R is renewed", _period(choose("backward_every"), choose("backward_offset"))),
        ("Sample for the statistics", choose("statistics")),
        ("Labels that make the errors of D", choose("fisher")),
        ("Details of Batch Normalisation", choose("batch_normalisation")),
        *([("The row beyond the paper’s", choose("drop_in"))] if config.get("drop_in") else []),
    ]


def _period(every: str, offset: str) -> str:
    return UNKNOWN if every == offset == UNKNOWN else f"every {every} updates, offset {offset}"


def shown(value: Any) -> str:
    """A value of a configuration in print."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) or UNKNOWN
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return UNKNOWN if value is None or value == "" else str(value)


def number(value: float) -> str:
    """Three digits, and a word for what is not finite.

    >>> number(0.12), number(1234.5), number(math.inf)
    ('0.120', '1234', 'diverged')
    """
    if not math.isfinite(value):
        return "diverged"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers, in short.

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


def _count(n: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{n} {noun if n == 1 else plural}"
