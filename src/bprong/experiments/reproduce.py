"""`bprong reproduce`: section 4 of the paper from data to verdict, in one call."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bprong
from bprong.experiments.data import Dataset, load
from bprong.experiments.drop_in import beside
from bprong.experiments.figures import draw
from bprong.experiments.methods import METHODS
from bprong.experiments.progress import progress_for
from bprong.experiments.records import Row, diverged, label, write_json
from bprong.experiments.report import terminal_beside, terminal_verdict, write_report
from bprong.experiments.runner import Config, OutError, run
from bprong.experiments.verdict import verdict

__all__ = ["prepare", "reproduce"]


SETTINGS = {
    "forward": ("forward_damping", "forward_every", "forward_offset", "statistics"),
    "backward": ("backward_damping", "backward_every", "backward_offset", "fisher"),
}
OWN = (
    "bprong.BPRONG(model, lr={lr:g}) with the optimizer’s own defaults (Configuration, whitening.{name}); what is said"
    " of ε, τ, sample and labels above is the paper’s networks’"
)


def reproduce(
    config: Config, source: str, out: Path, resume: bool, threads: int, directory: Path | None = None
) -> list[Row]:
    """Runs the experiment and leaves results.csv, run.json, the figures and report.html in `out`.

    MNIST is looked for in `directory` first.
    """
    if out.exists() and not out.is_dir():
        raise OutError(f"{out} is a file; --out takes a folder")
    if (out / "results.csv").exists() and not resume:
        raise OutError(f"{out} already holds a run; go on with it by --resume, or choose another --out")
    prepare(threads)
    data = load(source, directory=directory, say=print)
    with progress_for(config.methods, config.seeds, config.epochs) as progress:
        rows = run(config, data, out, progress, resume)
    record = describe(config, data, rows, threads)
    write_json(out / "run.json", record)
    draw(rows, out)
    page = write_report(out, rows, record)
    print(terminal_verdict(verdict(rows)))
    print(terminal_beside(beside(rows)), end="")
    print(f"\nReport: {page}")
    return rows


def prepare(threads: int) -> None:
    """Before anything is computed: threads take over what is set here only if they start later."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # a nearly converged network slows down three-fold on denormal numbers


def describe(config: Config, data: Dataset, rows: list[Row], threads: int) -> dict[str, Any]:
    """What run.json holds."""
    settings = asdict(config) | {"methods": list(config.methods), "hidden": list(config.hidden)}
    settings["whitening"] = {name: _whitening(config, name) for name in config.methods if METHODS[name].sides}
    settings["whitening"] |= {name: dict(own) for name in config.methods if (own := METHODS[name].defaults)}
    return {
        "config": settings | _choices(config, data),
        "versions": {
            "bprong": bprong.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "threads": threads,
        "commit": _commit(),
        "data": {"name": data.name, "notice": data.notice, "training": len(data.x_train), "test": len(data.x_test)},
        "diverged": [
            {"method": method, "seed": seed, "epoch": epoch}
            for method, seeds in diverged(rows).items()
            for seed, epoch in seeds.items()
        ],
    }


def _whitening(config: Config, name: str) -> dict[str, Any]:
    return asdict(replace(METHODS[name].whitening, **config.whitening))


def _choices(config: Config, data: Dataset) -> dict[str, Any]:
    """What the paper leaves open, in words; where PRONG and BPRONG differ, both are said."""
    choices: dict[str, Any] = {
        "initialisation": "torch's default: uniform in ±1/√inputs, weights and biases",
        "input_scaling": data.scaling,
        "batch_normalisation": "between layer and activation; γ = 1, β = 0 at the start; running averages keep 0.9",
    }
    for side, keys in SETTINGS.items():
        names = [name for name in config.methods if side in METHODS[name].sides]
        for key in keys:
            said = {name: _said(key, _whitening(config, name), len(data.x_train)) for name in names}
            same = len(set(said.values())) == 1
            choices |= (
                {key: next(iter(said.values())) if same else {label(n): v for n, v in said.items()}} if said else {}
            )
    own = [name for name in config.methods if METHODS[name].defaults]
    return choices | {"drop_in": {label(name): OWN.format(name=name, lr=config.lr) for name in own}} if own else choices


def _said(key: str, values: dict[str, Any], examples: int) -> Any:
    value = values[key]
    if key == "statistics":
        sample = f"{min(value, examples)} training examples, drawn once" if value else "the batch at hand"
        return f"{sample}; running average, keeping {values['average']:g}" if values["average"] else sample
    if key == "fisher":
        return {"sampled": "drawn from the model's own p(y|x)", "exact": "all classes, weighted by p(y|x)"}.get(
            value, "the data's"
        )
    return value


def _commit() -> str | None:
    """The commit of the checkout this code lies in, if it lies in one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
