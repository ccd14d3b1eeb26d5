"""`bprong reproduce`: run section 4 of the paper, from the data to the verdict."""

from __future__ import annotations

import gc
import platform
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessExitedException, spawn

import bprong
from bprong.experiments.data import Dataset, load, read_shared, shared
from bprong.experiments.figures import draw
from bprong.experiments.methods import BACKWARD_SETTINGS, METHODS
from bprong.experiments.progress import Progress, progress_for_output
from bprong.experiments.records import Row, divergence_epochs, label, method_names, read_results, write_json
from bprong.experiments.report import comparisons, terminal_comparison, terminal_verdict, write_report
from bprong.experiments.runner import OutError, check, run
from bprong.experiments.training import Config
from bprong.experiments.verdict import verdict
from bprong.experiments.workers import set_up_torch

SETTINGS = {  # the settings of each side that the paper does not state
    "forward": ("forward_damping", "forward_every", "forward_offset", "statistics"),
    "backward": BACKWARD_SETTINGS,
}
LABELS_OF_D = {
    "sampled": "drawn from the model's own p(y|x)",
    "exact": "all classes, weighted by p(y|x)",
    "empirical": "the labels of the data",
}
DROP_IN = (
    "bprong.BPRONG(model, lr={lr}) with the defaults of the optimizer, which are listed in the section Configuration "
    "under whitening.{name}; the settings above do not apply to it"
)
LEAST_EPOCHS = 5  # fewer say little about the claims
RECIPE = (
    "{summary}: {settings}; the learning rate falls to zero along a cosine over the whole run; losses are those of an "
    "exponential average of the weights over {average:.0%} of the updates"
)


def reproduce(
    config: Config, source: str, out: Path, resume: bool, jobs: int = 1, threads: int = 1,
    directory: Path | None = None, processes: int = 1,
) -> list[Row]:  # fmt: skip
    """Run the experiment and write results.csv, run.json, the figures and report.html to `out`.

    jobs:      the number of networks that are trained at a time, each in a process of its own with so many threads
    directory: where MNIST is searched for first
    processes: train one network at a time instead; each process takes an equal part of each batch
    """
    if out.exists() and not out.is_dir():
        raise OutError(f"{out} is a file; --out must be a folder")
    if (out / "results.csv").exists() and not resume:
        raise OutError(f"{out} already contains a run; continue it with --resume, or choose another --out")
    set_up_torch(threads)
    data = load(source, directory=directory, log=print)
    if processes == 1:
        with progress_for_output() as progress:
            rows = run(config, data, out, progress, resume, jobs, threads)
    else:
        run_in_processes(processes, config, data, out, resume, threads)
        rows = read_results(out / "results.csv")
    record = describe(config, data, rows, threads) | {"jobs": jobs, "processes": processes}
    if caution := _caution(data, config.epochs):
        record["caution"] = caution
    write_json(out / "run.json", record)
    draw(rows, out)
    report = write_report(out, rows, record)
    compared = "".join(terminal_comparison(heading, pairs) for heading, pairs in comparisons(rows).items())
    caution = f"{caution}\n\n" if caution else ""
    print(f"\n{caution}{terminal_verdict(verdict(rows))}\n{compared}\nReport: {report}")
    return rows


def run_in_processes(processes: int, config: Config, data: Dataset, out: Path, resume: bool, threads: int) -> None:
    """Run the experiment in several processes of this machine; an error of a setting is raised here."""
    check(config, data, processes)
    wrong: Any = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, shared(data, Path(folder)) as file:
        arguments = (processes, folder, wrong, config, file, out, resume, threads)
        try:
            spawn(_work, arguments, nprocs=processes)  # type: ignore[no-untyped-call]
        except ProcessExitedException:
            if not wrong.empty():
                raise ValueError(wrong.get()) from None
            raise


def _work(
    rank: int, processes: int, folder: str, wrong: Any, config: Config, file: Path, out: Path, resume: bool,
    threads: int,
) -> None:  # fmt: skip
    """One process of a run; the first one shows the progress."""
    set_up_torch(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    try:
        with progress_for_output() if rank == 0 else Progress() as progress:
            run(config, read_shared(file), out, progress, resume)
    except ValueError as error:
        wrong.put(str(error))
        raise SystemExit(2) from None
    dist.barrier()  # a process whose peers are gone may abort while it closes its connections
    gc.collect()  # a network that holds the group would keep its threads, and at exit the process might abort
    dist.destroy_process_group()


def _caution(data: Dataset, epochs: int) -> str:
    """What to say before the verdict of a run that is too small for one; empty for the paper's experiment."""
    if data.name == "MNIST" and epochs >= LEAST_EPOCHS:
        return ""
    return (
        f"A quick look, which proves nothing: {data.name}, epochs: {epochs}. The paper's claims are about MNIST and "
        f"some tens of epochs."
    )


def describe(config: Config, data: Dataset, rows: list[Row], threads: int) -> dict[str, Any]:
    """The contents of run.json."""
    settings = asdict(config) | {"methods": list(config.methods), "hidden": list(config.hidden)}
    settings["whitening"] = {
        name: asdict(config.whitening_of(name, data)) for name in config.methods if METHODS[name].sides
    }
    settings["whitening"] |= {name: dict(own) for name in config.methods if (own := METHODS[name].defaults)}
    settings["recipes"] = {name: asdict(found) for name in config.methods if (found := METHODS[name].recipe)}
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
            for method in method_names(rows)
            for seed, epoch in divergence_epochs(rows, method).items()
        ],
    }


def _choices(config: Config, data: Dataset) -> dict[str, Any]:
    """The choices that the paper leaves open, in words; by method where PRONG and BPRONG differ."""
    choices: dict[str, Any] = {
        "initialisation": "torch's default: weights and biases uniform in ±1/√inputs",
        "input_scaling": data.scaling,
        "batch_normalisation": "between layer and activation; initially γ = 1, β = 0; running averages keep 0.9",
    }
    for side, keys in SETTINGS.items():
        names = [name for name in config.methods if side in METHODS[name].sides]
        for key in keys if names else ():
            settings = {label(name): asdict(config.whitening_of(name, data)) for name in names}
            values = {name: _in_words(key, own, len(data.x_train)) for name, own in settings.items()}
            choices[key] = values if len(set(values.values())) > 1 else values[label(names[0])]
    if words := {label(name): text for name in config.methods if (text := _not_in_the_paper(name, config))}:
        choices["drop_in"] = words
    return choices


def _not_in_the_paper(name: str, config: Config) -> str:
    """A method that is not in the paper in words; empty for the paper's methods."""
    method = METHODS[name]
    if method.recipe is not None:
        settings = ", ".join(f"{key}={value!r}" for key, value in method.recipe.settings.items())
        return RECIPE.format(summary=method.summary, settings=settings, average=method.recipe.average)
    if method.defaults:
        return DROP_IN.format(name=name, lr=repr(method.defaults.get("lr", config.lr)))
    return ""


def _in_words(key: str, settings: dict[str, Any], examples: int) -> Any:
    value = settings[key]
    if key == "statistics":
        sample = f"{min(value, examples)} training examples, drawn once" if value else "the current minibatch"
        return f"{sample}; running average that keeps {settings['average']:g}" if settings["average"] else sample
    return LABELS_OF_D[value] if key == "fisher" else value


def _commit() -> str | None:
    """The git commit of this source code; None if it is not in a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
