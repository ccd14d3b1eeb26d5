"""The tables of a benchmark, in Markdown and for the terminal, and its findings in words, losses included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.records import FAILED, NOT_RUN, Row
from bprong.experiments.bench.scores import GOALS, Goal, Lead, Race, Times, Unit, lead, memory, scores, step_price

WORDS: dict[Goal, str] = {"train": "training", "val": "validation"}
FAR_BEHIND = 0.995  # a factor below this counts as a loss of ours


@dataclass(frozen=True)
class Summary:
    """What the rows say: times in both units, and the methods that were run."""

    rows: Sequence[Row]
    steps: Times
    seconds: Times

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Summary:
        return cls(rows, Times(rows, "steps"), Times(rows, "seconds"))

    @property
    def methods(self) -> list[str]:
        return self.steps.methods

    @property
    def ours(self) -> list[str]:
        return [name for name in self.methods if METHODS[name].ours]

    @property
    def others(self) -> list[str]:
        return [name for name in self.methods if not METHODS[name].ours]

    def times(self, unit: Unit) -> Times:
        return self.steps if unit == "steps" else self.seconds


# Tables ---------------------------------------------------------------------------------------------------------------


def profile_lines(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Titles and lines: the scores of performance profiles over all races and to each kind of target."""
    titles = ["method", "steps", "seconds", "steps, validation", "seconds, validation"]
    columns = []
    for goals in (GOALS, ("val",)):
        for times in (summary.steps, summary.seconds):
            columns.append(scores(times, times.races(goals), summary.methods))
    order = sorted(summary.methods, key=lambda name: -columns[0][name])
    highest = [max(column.values(), default=0.0) for column in columns]
    lines = []
    for name in order:
        cells = [(column[name], best) for column, best in zip(columns, highest, strict=True)]
        lines.append([title(name), *(_marked(f"{value:.2f}", value == best) for value, best in cells)])
    return titles, lines


def time_lines(summary: Summary, goal: Goal, unit: Unit) -> tuple[list[str], list[list[str]]]:
    """Titles and lines: for each method its median time to one target of each workload, with the range over seeds."""
    times = summary.times(unit)
    lines = []
    least = {w: min((times.typical((w, goal), m) for m in summary.methods), default=math.inf) for w in times.workloads}
    for name in summary.methods:
        cells = []
        for workload in times.workloads:
            race = (workload, goal)
            fastest = times.typical(race, name) == least[workload] and math.isfinite(least[workload])
            cells.append(_marked(_time_cell(times.of(race, name), times.typical(race, name), unit), fastest))
        lines.append([title(name), *cells])
    return ["method", *times.workloads], lines


def _time_cell(own: Sequence[float], typical: float, unit: Unit) -> str:
    if not own:
        return "–"
    finite = [each for each in own if math.isfinite(each)]
    if not math.isfinite(typical):
        return f"missed ({len(finite)} of {len(own)})" if finite else "missed"
    highest = _number(max(own), unit) if len(finite) == len(own) else "missed"
    return f"{_number(typical, unit)} ({_number(min(own), unit)}–{highest})"


def _number(value: float, unit: Unit) -> str:
    return f"{value:.0f}" if unit == "steps" or value >= 100 else f"{value:.2g}"


def memory_lines(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Titles and lines: the median peak memory of a run, in megabytes."""
    return _by_workload(summary, {key: f"{value:.0f}" for key, value in memory(summary.rows).items()})


def step_lines(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Titles and lines: the median time of a step, in milliseconds."""
    return _by_workload(summary, {key: f"{value:.3g}" for key, value in step_price(summary.rows).items()})


def _by_workload(summary: Summary, cells: Mapping[tuple[str, str], str]) -> tuple[list[str], list[list[str]]]:
    workloads = summary.steps.workloads
    lines = [[title(name), *(cells.get((w, name), "–") for w in workloads)] for name in summary.methods]
    return ["method", *workloads], lines


def missing_lines(summary: Summary) -> list[list[str]]:
    """Workload, method and reason, for methods without runs on fresh seeds; one line for each reason and method."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in summary.rows:
        if row.end.startswith(NOT_RUN):
            found.setdefault((row.method, row.end.removeprefix(NOT_RUN)), []).append(row.workload)
        elif row.end.startswith(FAILED) and row.stage == "test":
            found.setdefault((row.method, f"seed {row.seed} {row.end}"), []).append(row.workload)
    return [[title(method), ", ".join(workloads), reason] for (method, reason), workloads in found.items()]


def setting_lines(summary: Summary) -> list[list[str]]:
    """Workload, method and the settings of the best trial."""
    chosen = {(row.workload, row.method): row.settings for row in summary.rows if row.stage == "test"}
    return [[workload, title(method), settings] for (workload, method), settings in chosen.items()]


def title(method: str) -> str:
    return METHODS[method].title if method in METHODS else method


def _marked(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


# Findings -------------------------------------------------------------------------------------------------------------


def leads(summary: Summary, unit: Unit) -> list[Lead]:
    """In each race, the best of our methods against the best of the others."""
    times = summary.times(unit)
    return [lead(times, race, summary.ours, summary.others) for race in times.races()]


def in_words(found: Lead, unit: Unit) -> str:
    """A lead as a sentence. "Faster than" is said only if the test over seeds allows it."""
    where = race_name(found.race)
    if not found.first and not found.second:
        return f"{where}: nobody reaches the target"
    if not found.first:
        return f"{where}: no method of ours reaches the target; {title(found.second)} does"
    if not found.second:
        return f"{where}: only {title(found.first)} reaches the target"
    ahead, behind = (found.first, found.second) if found.factor >= 1 else (found.second, found.first)
    factor = max(found.factor, 1 / found.factor)
    if found.significant:
        faster = f"{title(ahead)} is faster than {title(behind)}, {factor:.2f} times in {unit}"
        return f"{where}: {faster} (p = {found.chance:.3f})"
    return (
        f"{where}: {title(found.first)} and {title(found.second)} cannot be told apart "
        f"(medians differ by a factor of {factor:.2f} in {unit}, p = {found.chance:.2f})"
    )


def race_name(race: Race) -> str:
    workload, goal = race
    return f"{workload}, {WORDS[goal]}"


def losses(summary: Summary) -> list[str]:
    """Where our best method is behind the best of the others, in words, in seconds and in steps."""
    lines = []
    units: tuple[Unit, Unit] = ("seconds", "steps")
    for unit in units:
        behind = [found for found in leads(summary, unit) if found.second and found.factor < FAR_BEHIND]
        lines += [f"in {unit}: {in_words(found, unit)}" for found in behind]
    return lines


def automatic_winners(summary: Summary, unit: Unit) -> dict[Race, str]:
    """In each race, the fastest of the methods that have nothing to tune; empty if none of them arrives."""
    automatic = [name for name in summary.methods if METHODS[name].automatic]
    times = summary.times(unit)
    return {race: next(iter(times.ranking(race, automatic)), "") for race in times.races()}


def standing(summary: Summary) -> list[str]:
    """The marks that the project set itself, and what was measured."""
    return [*_profiles(summary), *_first_by(summary), *_first_or_second(summary), *_automatic(summary)]


def _profiles(summary: Summary) -> list[str]:
    lines = []
    units: tuple[Unit, Unit] = ("steps", "seconds")
    for unit in units:
        times = summary.times(unit)
        found = scores(times, times.races(), summary.methods)
        order = sorted(found, key=lambda name: -found[name])
        place = next((i for i, name in enumerate(order, 1) if name in summary.ours), 0)
        if place:
            name = order[place - 1]
            lines.append(f"Performance profile in {unit}: {title(name)} is number {place} with {found[name]:.2f}")
            if place > 1:
                lines[-1] += f"; {title(order[0])} is first with {found[order[0]]:.2f}"
    return lines


def _first_by(summary: Summary) -> list[str]:
    lines = []
    for workload in ("autoencoder", "deep", "pinn"):
        if workload in summary.seconds.workloads:
            for goal in GOALS:
                found = lead(summary.seconds, (workload, goal), summary.ours, summary.others)
                lines.append(f"{race_name(found.race)}, in seconds: {_ahead(found)}")
    return lines


def _ahead(found: Lead) -> str:
    if not found.first:
        return "no method of ours reaches the target"
    if not found.second:
        return "only ours reaches the target"
    if found.factor >= 1:
        return f"our best is ahead of {title(found.second)} by a factor of {found.factor:.2f}"
    return f"our best is behind {title(found.second)} by a factor of {1 / found.factor:.2f}"


def _first_or_second(summary: Summary) -> list[str]:
    lines = []
    units: tuple[Unit, Unit] = ("steps", "seconds")
    for unit in units:
        times = summary.times(unit)
        places = [best_place(times, (workload, "val"), summary) for workload in times.workloads]
        count = sum(place in (1, 2) for place in places)
        lines.append(f"First or second to the validation target in {unit} on {count} of {len(places)} workloads")
    return lines


def best_place(times: Times, race: Race, summary: Summary) -> int:
    """The place of our best method in a race in which only that one of ours takes part; 0 if none of ours arrives."""
    own = next(iter(times.ranking(race, summary.ours)), None)
    if own is None:
        return 0
    return 1 + sum(times.typical(race, name) < times.typical(race, own) for name in summary.others)


def _automatic(summary: Summary) -> list[str]:
    lines = []
    units: tuple[Unit, Unit] = ("steps", "seconds")
    for unit in units:
        winners = automatic_winners(summary, unit)
        first = [workload for workload in summary.steps.workloads if winners[workload, "val"] in summary.ours]
        count = f"{len(first)} of {len(summary.steps.workloads)}"
        lines.append(f"Of the automatic methods, ours is first to the validation target in {unit} on {count} workloads")
    return lines
