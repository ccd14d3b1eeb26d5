"""`bprong reproduce`: run section 4 of the paper, from the data to the verdict."""

from __future__ import annotations

import gc
import platform
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessExitedException, spawn

import bprong
from bprong.experiments.data import Dataset, load
from bprong.experiments.figures import draw
from bprong.experiments.methods import BACKWARD_SETTINGS, METHODS
from bprong.experiments.progress import Progress, progress_for
from bprong.experiments.records import Row, divergence_epochs, label, method_names, read_results, write_json
from bprong.experiments.report import comparisons, terminal_comparison, terminal_verdict, write_report
from bprong.experiments.runner import Config, OutError, run
from bprong.experiments.verdict import verdict

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
    config: Config, source: str, out: Path, resume: bool, threads: int, directory: Path | None = None,
    processes: int = 1,
) -> list[Row]:  # fmt: skip
    """Run the experiment and write results.csv, run.json, the figures and report.html to `out`.

    If `directory` is given, MNIST is searched for there first. Several processes take equal parts of each batch.
    """
    if out.exists() and not out.is_dir():
        raise OutError(f"{out} is a file; --out must be a folder")
    if (out / "results.csv").exists() and not resume:
        raise OutError(f"{out} already contains a run; continue it with --resume, or choose another --out")
    set_up_torch(threads)
    data = load(source, directory=directory, log=print)
    if processes == 1:
        with progress_for(config.methods, config.seeds, config.epochs) as progress:
            rows = run(config, data, out, progress, resume)
    else:
        run_in_processes(processes, config, source, out, resume, threads, directory)
        rows = read_results(out / "results.csv")
    record = describe(config, data, rows, threads) | {"processes": processes}
    write_json(out / "run.json", record)
    draw(rows, out)
    report = write_report(out, rows, record)
    compared = "".join(terminal_comparison(heading, pairs) for heading, pairs in comparisons(rows).items())
    print(f"\n{_caution(data, config.epochs)}{terminal_verdict(verdict(rows))}\n{compared}\nReport: {report}")
    return rows


def run_in_processes(
    processes: int, config: Config, source: str, out: Path, resume: bool, threads: int, directory: Path | None
) -> None:
    """Run the experiment in several processes of this machine; an error of a setting is raised here."""
    wrong: Any = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, folder, wrong, config, source, out, resume, max(1, threads // processes), directory)
        try:
            spawn(_work, arguments, nprocs=processes)  # type: ignore[no-untyped-call]
        except ProcessExitedException:
            if not wrong.empty():
                raise ValueError(wrong.get()) from None
            raise


def _work(
    rank: int, processes: int, folder: str, wrong: Any, config: Config, source: str, out: Path, resume: bool,
    threads: int, directory: Path | None,
) -> None:  # fmt: skip
    """One process of a run; the first one shows the progress."""
    set_up_torch(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    data = load(source, directory=directory, log=lambda line: None)
    shown = progress_for(config.methods, config.seeds, config.epochs) if rank == 0 else Progress()
    try:
        with shown as progress:
            run(config, data, out, progress, resume)
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
        f"The paper's claims are about MNIST and some tens of epochs. This run has {data.name} and epochs: {epochs}. "
        f"The lines below show that the command works, and say little about the claims.\n\n"
    )


def set_up_torch(threads: int) -> None:
    """Set the number of threads and flush denormal numbers to zero; must be called before anything is computed.

    Threads inherit the setting only if they start later. Denormal numbers make the training of a nearly converged
    network three times slower.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def describe(config: Config, data: Dataset, rows: list[Row], threads: int) -> dict[str, Any]:
    """The contents of run.json."""
    settings = asdict(config) | {"methods": list(config.methods), "hidden": list(config.hidden)}
    settings["whitening"] = {name: _whitening(config, name) for name in config.methods if METHODS[name].sides}
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


def _whitening(config: Config, name: str) -> dict[str, Any]:
    return asdict(replace(METHODS[name].whitening, **config.whitening))


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
            values = {label(name): _in_words(key, _whitening(config, name), len(data.x_train)) for name in names}
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
