"""The results of a benchmark as text for a terminal, as Markdown (docs/benchmark.md) and as a self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.plan import LIMIT, TUNING_SEED
from bprong.experiments.bench.scores import Unit
from bprong.experiments.bench.summary import (
    Summary,
    in_words,
    leads,
    losses,
    memory_lines,
    missing_lines,
    profile_lines,
    setting_lines,
    standing,
    step_lines,
    time_lines,
    title,
)
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.targets import TARGETS
from bprong.experiments.bench.workloads import WORKLOADS
from bprong.experiments.figures import GRID, INK, PALETTE
from bprong.experiments.records import write_atomically

TITLE = "BPRONG against the optimizers people use"
Lines = Sequence[Sequence[str]]
HOW = (
    "Every tuned method has the same number of quasi-random trials in a search space declared in the code, on one "
    f"split of the data with seed {TUNING_SEED}; the best trial, by its steps to both targets, is rerun on fresh seeds "
    "of another split. Automatic methods have one recipe for all workloads. With “averaged weights”, and where "
    "schedule=averaged was tuned, the rate is constant, and losses are those of an average of the weights: that of "
    "`optimizer.averaged()`, over the last 5 % of the steps so far. Targets were fixed beforehand: what the "
    "best of 36 trials of AdamW, NAdam and SGD with momentum reaches in three quarters of the step budget, the median "
    "of three seeds. Methods take turns, one process for each core, one thread each. Seconds are of training alone, "
    f"without measurements. A run ends when both targets are reached, at its step budget, or after {LIMIT:g} times the "
    "seconds of an AdamW run. A missed target counts as infinite. Cells are medians over seeds, with the range. The "
    "score of a performance profile is the mean share of targets reached within τ times the shortest time, τ from 1 to "
    "4; the highest is 1. “Faster than” is said only if an exact one-sided rank-sum test over seeds has p < 0.05."
)


def sections(summary: Summary) -> dict[str, tuple[Sequence[str], Lines]]:
    """The tables, by heading: column titles and lines."""
    found: dict[str, tuple[Sequence[str], Lines]] = {"Performance profiles": profile_lines(summary)}
    units: tuple[Unit, Unit] = ("seconds", "steps")
    for unit in units:
        found[f"{unit.capitalize()} to the validation target"] = time_lines(summary, "val", unit)
    for unit in units:
        found[f"{unit.capitalize()} to the training target"] = time_lines(summary, "train", unit)
    found["Time of a step, milliseconds"] = step_lines(summary)
    found["Peak memory, megabytes"] = memory_lines(summary)
    found["Targets"] = (["workload", "what", "batch", "step budget", "training", "validation"], target_lines(summary))
    found["Settings of the best trials"] = (["workload", "method", "settings"], setting_lines(summary))
    if missing := missing_lines(summary):
        found["Not run, or not rerun"] = (["method", "workloads", "reason"], missing)
    if notes := note_lines(summary):
        found["In favour of the peers"] = (["method", "what was done"], notes)
    return found


def target_lines(summary: Summary) -> list[list[str]]:
    lines = []
    for name in summary.steps.workloads:
        workload = WORKLOADS[name]
        target = TARGETS[name]["test"]
        losses_ = [f"{target.train_loss:.4g}", f"{target.val_loss:.4g}"]
        lines.append([name, workload.title, str(workload.batch), str(workload.steps), *losses_])
    return lines


def note_lines(summary: Summary) -> list[list[str]]:
    return [[title(name), METHODS[name].note] for name in summary.methods if METHODS[name].note]


PANELS = "one panel for each workload, with a line at the target."
FIGURES = {
    "profiles": "Performance profiles in steps and in seconds: the share of targets that each method reaches within τ "
    "times the shortest time.",
    "validation_seconds": f"Validation loss against seconds of training, {PANELS}",
    "validation_steps": f"Validation loss against steps, {PANELS}",
    "training_seconds": f"Training loss against seconds of training, {PANELS}",
}
MADE = [
    "Targets come from AdamW, NAdam and SGD with momentum, but sizes, step budgets and search spaces were chosen while "
    "trying methods on the tuning split, ours more often than the others.",
    "Regression: rows, scales and the activation were chosen while AdamW, SGD and BPRONG were tried, before its target "
    "was found.",
    "Autoencoder: the first target was that of the mean image. It was found again with Xavier's initialisation, after "
    "BPRONG had been seen to reach a much lower loss.",
    "Physics-informed: full batches were tried after BPRONG had missed the target; small batches were kept.",
    "A schedule of a quarter of the step budget was less often drawn for all methods after trials in which it hardly "
    "ever reached a target.",
    "BPRONG's spectral steps were made cheaper, and are refreshed less often at first, after an earlier run had shown "
    "where they lose; this was chosen by trials on five of the workloads, with seeds 7 to 14 of the tuning split.",
    "Fresh seeds are seeds that were not used before; the data of the test split had been used with other seeds.",
]


def findings(summary: Summary) -> dict[str, list[str]]:
    """What was found, in sentences, by heading."""
    behind = losses(summary)
    return {
        "Standing": standing(summary),
        "Our best method against the best of the others, in seconds": [
            in_words(found, "seconds") for found in leads(summary, "seconds")
        ],
        "Where BPRONG loses": behind or ["Nowhere in this run: in every race our best method has the lowest median."],
    }


# Terminal and Markdown ------------------------------------------------------------------------------------------------


def terminal(summary: Summary) -> str:
    """The profiles, the times to the validation target, and the findings, as aligned text."""
    parts = [aligned(*profile_lines(summary)), aligned(*time_lines(summary, "val", "seconds"))]
    titles = ["Performance profiles (scores, 1 is the best possible)", "Seconds to the validation target"]
    text = [f"{heading}\n{part}" for heading, part in zip(titles, parts, strict=True)]
    text += ["\n".join([heading, *(f"  {line}" for line in lines)]) for heading, lines in findings(summary).items()]
    if missing := missing_lines(summary):
        text.append("\n".join(["Not run, or not rerun", *(f"  {', '.join(line)}" for line in missing)]))
    return "\n\n".join(text)


def aligned(titles: Sequence[str], lines: Lines) -> str:
    """A table as text; the best of a column has a star in place of Markdown's asterisks."""
    plain = [[cell.replace("**", "*", 1).replace("**", "") for cell in line] for line in [titles, *lines]]
    widths = [max(len(line[i]) for line in plain) for i in range(len(titles))]
    rows = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in plain]
    return "\n".join(f"  {row}" for row in rows)


def markdown_page(summary: Summary, run: Mapping[str, Any]) -> str:
    """docs/benchmark.md."""
    parts = [f"# {TITLE}", f"`{run.get('command', 'bprong bench')}`, {machine(run)}.", HOW]
    parts += [f"*{run['cut']}*"] if run.get("cut") else []
    first, *others = [f"![{words}](figures/bench/{name}.png)" for name, words in FIGURES.items()]
    parts.append(first)
    for heading, lines in findings(summary).items():
        parts += [f"## {heading}", "\n".join(f"- {line}" for line in lines)]
    parts += others
    parts += [f"## {heading}\n\n{markdown(titles, rows)}" for heading, (titles, rows) in sections(summary).items()]
    parts += ["## How the workloads were made", "\n".join(f"- {line}" for line in MADE)]
    return "\n\n".join(parts) + "\n"


def machine(run: Mapping[str, Any]) -> str:
    versions = run.get("versions", {})
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return ", ".join(str(part) for part in (run.get("date"), run.get("machine"), software) if part)


# HTML -----------------------------------------------------------------------------------------------------------------


def write_page(folder: Path, summary: Summary, figures: Mapping[str, str], run: Mapping[str, Any]) -> Path:
    """Write report.html, one self-contained page, and benchmark.md to a folder."""
    path = folder / "report.html"
    write_atomically(path, html_page(summary, figures, run).encode(errors="backslashreplace"))
    write_atomically(folder / "benchmark.md", markdown_page(summary, run).encode())
    return path


def html_page(summary: Summary, figures: Mapping[str, str], run: Mapping[str, Any]) -> str:
    shades = {INK: "#e6e8ec", GRID: "#343a44", **PALETTE}
    style = (files("bprong.experiments") / "report_template.html").read_text(encoding="utf-8").partition("</style>")[0]
    head = Template(style).substitute(
        title=TITLE,
        light=" ".join(f"--{light[1:]}: {light};" for light in shades),
        dark=" ".join(f"--{light[1:]}: {dark};" for light, dark in shades.items()),
    )
    body = [f"<h1>{TITLE}</h1>", f'<p class="soft">{escape(machine(run))}</p>']
    body += (
        [f'<div class="banner" role="note"><strong>{escape(str(run["cut"]))}</strong></div>'] if run.get("cut") else []
    )
    body += [f"<p>{escape(HOW)}</p>"]
    body += [_list(heading, lines) for heading, lines in findings(summary).items()]
    body.append("<h2>Figures</h2>" + "".join(f'<figure class="card">{svg}</figure><p></p>' for svg in figures.values()))
    body += [_table(heading, titles, lines) for heading, (titles, lines) in sections(summary).items()]
    body.append(_list("How the workloads were made", MADE))
    return f"{head}</style>\n</head>\n<body>\n<main>\n{chr(10).join(body)}\n</main>\n</body>\n</html>\n"


def _list(heading: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>{escape(heading)}</h2><ul class="card">{items}</ul>'


def _table(heading: str, titles: Sequence[str], lines: Lines) -> str:
    top = "".join(f'<th scope="col">{escape(each)}</th>' for each in titles)
    body = "".join(f'<tr><th scope="row">{escape(line[0])}</th>{"".join(map(_cell, line[1:]))}</tr>' for line in lines)
    content = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{escape(heading)}</h2><div class="scroll card" tabindex="0">{content}</div>'


def _cell(text: str) -> str:
    if text.startswith("**"):
        return f'<td class="best">{escape(text.strip("*"))}</td>'
    return f"<td>{escape(text)}</td>"
