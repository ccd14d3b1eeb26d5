"""The report of a run: one HTML page that needs nothing beside it, and the verdict as lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from bprong.experiments.drop_in import HEADING, beside
from bprong.experiments.figures import GRID, INK, PALETTE, PLOTS, Plot, styles, svg_text
from bprong.experiments.records import Column, Point, Row, curve, label, methods, write_atomically
from bprong.experiments.verdict import RUNGS, Claim, divergence, ladder, number, shown, unstated, verdict

TITLE = "BPRONG: the paper’s experiment, rerun"
MARKS = {True: ("holds", "✓ holds"), False: ("fails", "✗ does not hold"), None: ("none", "○ not measured")}
BLANK = "—"
DARK_INK, DARK_GRID = "#e6e8ec", "#343a44"
STEPS = (
    "When each method first had the training loss at the head of the column; the median over seeds, — where it was not"
    " reached, the soonest in bold. Losses are known after whole epochs; between two of them the time is interpolated,"
    " linearly in the logarithm of the loss, so times within the first epoch are rough."
)


def write_report(folder: Path, rows: Sequence[Row], run: Mapping[str, Any]) -> Path:
    """Writes report.html into the folder; `run` is what run.json holds, and all of it may be missing."""
    path = folder / "report.html"
    write_atomically(path, page(rows, run).encode(errors="backslashreplace"))
    return path


def page(rows: Sequence[Row], run: Mapping[str, Any]) -> str:
    """The HTML of the report."""
    template = (files("bprong.experiments") / "report_template.html").read_text(encoding="utf-8")
    claims, seeds = verdict(rows), len({row.seed for row in rows})
    shades = {INK: DARK_INK, GRID: DARK_GRID, **PALETTE}
    return Template(template).substitute(
        title=TITLE,
        light=" ".join(f"--{light[1:]}: {light};" for light in shades),
        dark=" ".join(f"--{light[1:]}: {dark};" for light, dark in shades.items()),
        banner=_banner(_part(run, "data").get("notice")),
        subtitle=escape(_subtitle(rows, run)),
        summary=_summary(claims),
        claims="\n".join(map(_claim, claims)),
        beside=_beside(beside(rows)),
        reading=_reading(seeds),
        figures="\n".join(_figure(plot, svg_text(rows, plot)) for plot in PLOTS),
        medians=("Medians over seeds. " if seeds > 1 else "") + "In brackets: the epoch of the best value.",
        losses=_losses(rows),
        steps=STEPS,
        ladder=_ladder(rows),
        unstated=_words(unstated(_part(run, "config"))),
        configuration=_configuration(run),
    )


def terminal_verdict(claims: Iterable[Claim]) -> str:
    """The verdict in plain lines: the mark and the claim, and what was measured below it."""
    width = max(len(text) for _, text in MARKS.values())
    lines = []
    for claim in claims:
        lines.append(f"{MARKS[claim.holds][1]:<{width}}  {claim.text}")
        lines.append(f"{'':<{width}}  {claim.measured}")
    return "\n".join(lines)


def terminal_beside(pairs: Sequence[tuple[str, str]]) -> str:
    """What was measured of the drop-in optimizer, in plain lines below the verdict; nothing if it did not run."""
    return "".join(f"{line}\n" for line in [f"\n{HEADING}", *(f"  {a}: {b}" for a, b in pairs)]) if pairs else ""


def _part(run: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = run.get(key)
    return part if isinstance(part, Mapping) else {}


def _banner(notice: Any) -> str:
    if not notice:
        return ""
    first, _, rest = str(notice).partition("\n")
    rest = f"<span>{escape(rest)}</span>" if rest else ""
    return f'<div class="banner" role="note"><strong>{escape(first)}</strong>{rest}</div>'


def _subtitle(rows: Sequence[Row], run: Mapping[str, Any]) -> str:
    name = _part(run, "data").get("name")
    seeds, epochs = len({row.seed for row in rows}), max((row.epoch for row in rows), default=0)
    counts = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((epochs, "epoch"), (seeds, "seed"))]
    return " · ".join([*([str(name)] if name else []), ", ".join(map(label, methods(rows))), *counts])


def _summary(claims: Sequence[Claim]) -> str:
    """How many claims hold, how many do not, and how many were not measured."""
    held, failed, unknown = (sum(claim.holds is value for claim in claims) for value in (True, False, None))
    if held == len(claims):
        return f"All {held} of the paper’s claims hold in this run."
    parts = [f"{held or 'none'} hold{'s' * (held < 2)}"] if held or failed else []
    parts += [f"{failed} do{'es' * (failed == 1)} not"] if failed else []
    parts += [f"{unknown} {'was' if unknown == 1 else 'were'} not measured"] if unknown else []
    return f"Of the paper’s {len(claims)} claims, in this run, {', '.join(parts)}."


def _claim(claim: Claim) -> str:
    kind, mark = MARKS[claim.holds]
    said = f'<b>{escape(claim.text)}</b><span class="soft">{escape(claim.measured)}</span>'
    return f'<li><span class="mark {kind}">{mark}</span><div>{said}</div></li>'


def _beside(pairs: Sequence[tuple[str, str]]) -> str:
    return f'<h3>{escape(HEADING)}</h3><div class="scroll card" tabindex="0">{_words(pairs)}</div>' if pairs else ""


def _reading(seeds: int) -> str:
    band = f"Lines are medians over {seeds} seeds, bands reach from the least to the greatest. " if seeds > 1 else ""
    return band + "Losses are taken after each epoch, outside the clock. An × marks where a run diverged."


def _figure(plot: Plot, svg: str) -> str:
    return f'<figure class="card"><figcaption>{plot.title} against {plot.against}</figcaption>{svg}</figure>'


def _method_cell(rows: Sequence[Row], name: str, note: str = "") -> str:
    """The head of a method's row, with the colour that it has in the figures."""
    colour = styles(methods(rows))[name].colour
    key = f'<span class="key" style="background: var(--{colour[1:]})"></span>'
    return f'<th scope="row">{key}{escape(label(name))}{note}</th>'


def _losses(rows: Sequence[Row]) -> str:
    """After one epoch, at best and at the end, for each method."""
    groups = "".join(f'<th colspan="3" scope="colgroup">{kind} loss</th>' for kind in ("Training", "Validation"))
    groups += '<th colspan="2" scope="colgroup">Accuracy</th><th colspan="1" scope="colgroup">Seconds</th>'
    names = ["epoch 1", "best", "final"] * 2 + ["best", "final", "per epoch"]
    cells = "".join(f"<th{_first(i)}>{name}</th>" for i, name in enumerate(names))
    body = "".join(_loss_row(rows, name) for name in methods(rows))
    head = f"<thead><tr><th></th>{groups}</tr><tr><th>Method</th>{cells}</tr></thead>"
    return f'<table class="numbers">{head}<tbody>{body}</tbody></table>'


def _first(i: int) -> str:
    return ' class="first"' if i in (0, 3, 6, 8) else ""


def _loss_row(rows: Sequence[Row], name: str) -> str:
    cells = [*_loss_cells(rows, name, "train_loss"), *_loss_cells(rows, name, "val_loss")]
    accuracy = [point for point in curve(rows, name, "val_accuracy") if point.epoch > 0]
    cells += [_best(accuracy, max), _percent(accuracy[-1].median) if accuracy else BLANK, _pace(rows, name)]
    marked = "".join(f"<td{_first(i)}>{cell}</td>" for i, cell in enumerate(cells))
    end = divergence(rows, name)
    return f"<tr>{_method_cell(rows, name, f'<small>{end}</small>' if end else '')}{marked}</tr>"


def _loss_cells(rows: Sequence[Row], name: str, column: Column) -> list[str]:
    points = [point for point in curve(rows, name, column) if point.epoch > 0]
    if not points:
        return [BLANK] * 3
    after_one = number(points[0].median) if points[0].epoch == 1 else BLANK
    return [after_one, _best(points, min), number(points[-1].median)]


def _best(points: Sequence[Point], choose: Any) -> str:
    finite = [point for point in points if math.isfinite(point.median)]
    if not finite:
        return BLANK
    best: Point = choose(finite, key=lambda point: point.median)
    value = _percent(best.median) if choose is max else number(best.median)
    return f"{value} <small>({best.epoch})</small>"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if math.isfinite(share) else BLANK


def _pace(rows: Sequence[Row], name: str) -> str:
    """Seconds per epoch of training, over all a seed's epochs; the median over seeds."""
    paces = []
    for seed in {row.seed for row in rows}:
        own = sorted((row.epoch, row.seconds) for row in rows if (row.method, row.seed) == (name, seed))
        if len(own) > 1:
            paces.append((own[-1][1] - own[0][1]) / (own[-1][0] - own[0][0]))
    return number(median(paces)) if paces else BLANK


def _ladder(rows: Sequence[Row]) -> str:
    times = ladder(rows)
    soonest = [min(column) for column in zip(*times.values(), strict=True)]
    body = ""
    for name, seconds in times.items():
        cells = (_seconds(value, value == least) for value, least in zip(seconds, soonest, strict=True))
        body += f"<tr>{_method_cell(rows, name)}{''.join(cells)}</tr>"
    head = "".join(f'<th scope="col">{rung:g}</th>' for rung in RUNGS)
    return f'<table><thead><tr><th scope="col">Method</th>{head}</tr></thead><tbody>{body}</tbody></table>'


def _seconds(value: float, soonest: bool) -> str:
    if math.isinf(value):
        return f"<td>{BLANK}</td>"
    return f'<td class="best">{number(value)}</td>' if soonest else f"<td>{number(value)}</td>"


def _words(pairs: Iterable[tuple[str, str]]) -> str:
    """A table of words: a name and what it is."""
    body = "".join(f'<tr><th scope="row">{escape(a)}</th><td>{escape(b)}</td></tr>' for a, b in pairs)
    return f'<table class="words"><tbody>{body}</tbody></table>'


def _configuration(run: Mapping[str, Any]) -> str:
    """Everything in run.json: what stands alone, then a table for each part."""
    alone = {key: value for key, value in run.items() if not isinstance(value, Mapping)}
    parts = {**({"run": alone} if alone else {}), **{k: v for k, v in run.items() if isinstance(v, Mapping)}}
    blocks = (
        f'<details class="card"><summary>{escape(str(name).capitalize())}</summary>{_words(_flat(part))}</details>'
        for name, part in parts.items()
    )
    return "\n".join(blocks) or '<p class="soft">Not recorded.</p>'


def _flat(part: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested dicts as pairs, their keys joined by dots."""
    pairs: list[tuple[str, str]] = []
    for key, value in part.items():
        nested = isinstance(value, Mapping) and value
        pairs += _flat(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", shown(value))]
    return pairs
