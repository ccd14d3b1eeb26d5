"""The report of a run: one self-contained HTML page, and the verdict as lines of text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from bprong.experiments import drop_in, recipes
from bprong.experiments.figures import GRID, INK, PALETTE, PLOTS, styles, svg_text
from bprong.experiments.records import Column, Point, Row, curve, label, method_names, seed_count, write_atomically
from bprong.experiments.verdict import (
    LOSS_LEVELS,
    Claim,
    divergence_text,
    in_words,
    number,
    seconds_to_levels,
    unstated,
    verdict,
)

TITLE = "BPRONG: the paper’s experiment, rerun"
MARKS = {True: ("holds", "✓ holds"), False: ("fails", "✗ does not hold"), None: ("none", "○ not measured")}
BLANK = "—"
DARK_SHADES = {INK: "#e6e8ec", GRID: "#343a44", **PALETTE}
GROUP_STARTS = (0, 3, 6, 8)  # columns of the table of losses that start a group: training, validation, accuracy, time
LEVELS_NOTE = (
    "Training time until each method first reached the training loss in the column’s heading: the median over seeds, —"
    " if it was not reached, the shortest time in bold. Losses are measured once per epoch; in between, the time is"
    " interpolated linearly in the logarithm of the loss, so times within the first epoch are approximate."
)


def write_report(folder: Path, rows: Sequence[Row], run: Mapping[str, Any]) -> Path:
    """Write report.html to the folder; `run` is the contents of run.json, of which any part may be missing."""
    path = folder / "report.html"
    write_atomically(path, page(rows, run).encode(errors="backslashreplace"))
    return path


def page(rows: Sequence[Row], run: Mapping[str, Any]) -> str:
    """The report as HTML."""
    template = (files("bprong.experiments") / "report_template.html").read_text(encoding="utf-8")
    claims = verdict(rows)
    seeds = seed_count(rows)
    return Template(template).substitute(
        title=TITLE,
        light=" ".join(f"--{light[1:]}: {light};" for light in DARK_SHADES),
        dark=" ".join(f"--{light[1:]}: {dark};" for light, dark in DARK_SHADES.items()),
        banner=_banner(_section(run, "data").get("notice")) + _banner(run.get("caution")),
        subtitle=escape(_subtitle(rows, run)),
        summary=_summary(claims),
        claims="\n".join(map(_claim, claims)),
        comparison="".join(_comparison(heading, pairs) for heading, pairs in comparisons(rows).items()),
        figures_note=_figures_note(seeds, bool(recipes.in_run(rows))),
        figures="\n".join(
            f'<figure class="card"><figcaption>{plot.title} against {plot.against}</figcaption>{svg}</figure>'
            for plot, svg in ((plot, svg_text(rows, plot)) for plot in PLOTS)
        ),
        losses_note=_losses_note(seeds, bool(recipes.in_run(rows))),
        losses=_losses_table(rows),
        levels_note=LEVELS_NOTE,
        levels=_levels_table(rows),
        unstated=_text_table(unstated(_section(run, "config"))),
        configuration=_configuration(run),
    )


def terminal_verdict(claims: Iterable[Claim]) -> str:
    """The verdict as text: for each claim its mark and wording, and the measurements on the lines below."""
    width = max(len(text) for _, text in MARKS.values())
    indent = "\n" + " " * (width + 2)
    return "\n".join(
        f"{MARKS[claim.holds][1]:<{width}}  {claim.text}{indent}{claim.measured.replace('; ', indent)}"
        for claim in claims
    )


def comparisons(rows: Sequence[Row]) -> dict[str, list[tuple[str, str]]]:
    """What was measured of the methods that are not in the paper, and the results, by heading."""
    return {drop_in.HEADING: drop_in.comparison(rows), recipes.HEADING: recipes.comparison(rows)}


def terminal_comparison(heading: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A comparison as text; empty if the run does not contain its methods."""
    lines = [f"  {what}: {result}".replace("; ", "\n      ") for what, result in pairs]
    return "\n".join(["", heading, *lines, ""]) if pairs else ""


def _section(run: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = run.get(key)
    return section if isinstance(section, Mapping) else {}


def _banner(notice: Any) -> str:
    if not notice:
        return ""
    first, _, rest = str(notice).partition("\n")
    rest = f"<span>{escape(rest)}</span>" if rest else ""
    return f'<div class="banner" role="note"><strong>{escape(first)}</strong>{rest}</div>'


def _subtitle(rows: Sequence[Row], run: Mapping[str, Any]) -> str:
    name = _section(run, "data").get("name")
    counts = {"epoch": max((row.epoch for row in rows), default=0), "seed": seed_count(rows)}
    words = [f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items()]
    return " · ".join([*([str(name)] if name else []), ", ".join(map(label, method_names(rows))), *words])


def _summary(claims: Sequence[Claim]) -> str:
    """The number of claims that hold, that do not, and that were not measured."""
    counts = {value: sum(claim.holds is value for claim in claims) for value in MARKS}
    if counts[True] == len(claims):
        return f"All {len(claims)} of the paper’s claims hold in this run."
    words = {True: "confirmed", False: "not confirmed", None: "not measured"}
    parts = [f"{counts[value]} {words[value]}" for value in MARKS if counts[value]]
    return f"Of the paper’s {len(claims)} claims, in this run: {', '.join(parts)}."


def _claim(claim: Claim) -> str:
    css, mark = MARKS[claim.holds]
    text = f'<b>{escape(claim.text)}</b><span class="soft">{escape(claim.measured)}</span>'
    return f'<li><span class="mark {css}">{mark}</span><div>{text}</div></li>'


def _comparison(heading: str, pairs: Sequence[tuple[str, str]]) -> str:
    table = f'<div class="scroll card" tabindex="0">{_text_table(pairs)}</div>'
    return f"<h3>{escape(heading)}</h3>{table}" if pairs else ""


def _figures_note(seeds: int, recipes_in_run: bool) -> str:
    bands = f"Lines are medians over {seeds} seeds; bands show the range over seeds. " if seeds > 1 else ""
    note = "Losses are measured after each epoch, with the clock stopped. A cross (×) marks a run that diverged."
    return bands + note + recipes_in_run * " Recipes are in the figures of the validation loss only."


def _losses_note(seeds: int, recipes_in_run: bool) -> str:
    note = ("Medians over seeds. " if seeds > 1 else "") + "In brackets: the epoch of the best value."
    return note + recipes_in_run * " The losses of recipes are those of their averaged weights."


def _method_cell(rows: Sequence[Row], name: str, note: str = "") -> str:
    """The first cell of a method's row, with the method's colour in the figures."""
    colour = styles(method_names(rows))[name].colour
    key = f'<span class="key" style="background: var(--{colour[1:]})"></span>'
    return f'<th scope="row">{key}{escape(label(name))}{note}</th>'


def _losses_table(rows: Sequence[Row]) -> str:
    """Losses of each method after one epoch, at best and at the end, its accuracy, and seconds per epoch."""
    groups = {"Training loss": 3, "Validation loss": 3, "Accuracy": 2, "Seconds": 1}
    top = "".join(f'<th colspan="{width}" scope="colgroup">{name}</th>' for name, width in groups.items())
    names = ["epoch 1", "best", "final"] * 2 + ["best", "final", "per epoch"]
    head = f"<thead><tr><th></th>{top}</tr><tr><th>Method</th>{_cells('th', names)}</tr></thead>"
    body = "".join(_losses_row(rows, name) for name in method_names(rows))
    return f'<table class="numbers">{head}<tbody>{body}</tbody></table>'


def _cells(tag: str, texts: Iterable[str]) -> str:
    """Table cells; the first of each group of columns gets a CSS class that draws a line."""
    starts = [' class="first"' if i in GROUP_STARTS else "" for i in range(9)]
    return "".join(f"<{tag}{start}>{text}</{tag}>" for start, text in zip(starts, texts, strict=True))


def _losses_row(rows: Sequence[Row], name: str) -> str:
    cells = [*_loss_cells(rows, name, "train_loss"), *_loss_cells(rows, name, "val_loss")]
    accuracy = [point for point in curve(rows, name, "val_accuracy") if point.epoch > 0]
    cells += [_best(accuracy, max), _percent(accuracy[-1].median) if accuracy else BLANK, _epoch_time(rows, name)]
    end = divergence_text(rows, name)
    return f"<tr>{_method_cell(rows, name, f'<small>{end}</small>' if end else '')}{_cells('td', cells)}</tr>"


def _loss_cells(rows: Sequence[Row], name: str, column: Column) -> list[str]:
    points = [point for point in curve(rows, name, column) if point.epoch > 0]
    if not points:
        return [BLANK] * 3
    after_one = number(points[0].median) if points[0].epoch == 1 else BLANK
    return [after_one, _best(points, min), number(points[-1].median)]


def _best(points: Sequence[Point], choose: Any) -> str:
    """The best median and its epoch; `choose` is min for losses and max for accuracies."""
    finite = [point for point in points if math.isfinite(point.median)]
    if not finite:
        return BLANK
    best: Point = choose(finite, key=lambda point: point.median)
    value = _percent(best.median) if choose is max else number(best.median)
    return f"{value} <small>({best.epoch})</small>"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %" if math.isfinite(fraction) else BLANK


def _epoch_time(rows: Sequence[Row], name: str) -> str:
    """Seconds of training per epoch: the mean over the epochs of a seed, then the median over seeds."""
    times = []
    for seed in {row.seed for row in rows}:
        own = sorted((row.epoch, row.seconds) for row in rows if (row.method, row.seed) == (name, seed))
        if len(own) > 1:
            times.append((own[-1][1] - own[0][1]) / (own[-1][0] - own[0][0]))
    return number(median(times)) if times else BLANK


def _levels_table(rows: Sequence[Row]) -> str:
    """Seconds of each method to each loss level, the shortest time of each column in bold."""
    times = seconds_to_levels(rows)
    shortest = [min(column) for column in zip(*times.values(), strict=True)]
    body = ""
    for name, seconds in times.items():
        cells = (_level_cell(value, value == least) for value, least in zip(seconds, shortest, strict=True))
        body += f"<tr>{_method_cell(rows, name)}{''.join(cells)}</tr>"
    head = "".join(f'<th scope="col">{level:g}</th>' for level in LOSS_LEVELS)
    return f'<table><thead><tr><th scope="col">Method</th>{head}</tr></thead><tbody>{body}</tbody></table>'


def _level_cell(seconds: float, shortest: bool) -> str:
    if math.isinf(seconds):
        return f"<td>{BLANK}</td>"
    return f'<td class="best">{number(seconds)}</td>' if shortest else f"<td>{number(seconds)}</td>"


def _text_table(pairs: Iterable[tuple[str, str]]) -> str:
    """A table with two columns of text, a name and its value."""
    body = "".join(f'<tr><th scope="row">{escape(a)}</th><td>{escape(b)}</td></tr>' for a, b in pairs)
    return f'<table class="words"><tbody>{body}</tbody></table>'


def _configuration(run: Mapping[str, Any]) -> str:
    """Everything in run.json: one table for the single values, then one for each mapping."""
    single = {key: value for key, value in run.items() if not isinstance(value, Mapping)}
    tables = ({"run": single} if single else {}) | {k: v for k, v in run.items() if isinstance(v, Mapping)}
    parts = [
        f"<summary>{escape(str(name).capitalize())}</summary>{_text_table(_flat(table))}"
        for name, table in tables.items()
    ]
    return "\n".join(f'<details class="card">{part}</details>' for part in parts) or '<p class="soft">Not recorded.</p>'


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The values of nested mappings in one list, their keys joined by dots."""
    pairs: list[tuple[str, str]] = []
    for key, value in table.items():
        nested = isinstance(value, Mapping) and value
        pairs += _flat(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", in_words(value))]
    return pairs
