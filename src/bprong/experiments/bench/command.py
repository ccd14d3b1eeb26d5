"""`bprong bench`: run a plan, or what is missing of it, and write bench.csv, figures and a page."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import bprong
from bprong.experiments.bench.figures import draw
from bprong.experiments.bench.finding import find_targets
from bprong.experiments.bench.page import terminal, write_page
from bprong.experiments.bench.plan import Job, Plan, cut, estimated_seconds, within
from bprong.experiments.bench.records import Folder, Record
from bprong.experiments.bench.running import Benchmark
from bprong.experiments.bench.summary import Summary
from bprong.experiments.bench.worker import execute
from bprong.experiments.bench.workloads import WORKLOADS
from bprong.experiments.progress import duration, progress_for_output
from bprong.experiments.records import write_atomically, write_json
from bprong.experiments.runner import OutError, locked
from bprong.experiments.workers import Pool, Workers, available_cores, run_jobs, set_up_torch

PACKAGES = ("torch", "pytorch_optimizer", "prodigyopt", "schedulefree", "singd", "asdfghjkl")
PUBLISHED = ("profiles", "validation_seconds", "validation_steps", "training_seconds")
Log = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options of the command.

    budget: seconds, or None for a complete run
    draw:   run nothing; tables and figures of what is in the folder
    publish: a folder that gets benchmark.md, bench.csv and figures/bench as well
    """

    plan: Plan
    out: Path
    budget: float | None = None
    jobs: int = available_cores()
    resume: bool = False
    draw: bool = False
    publish: Path | None = None


def bench(options: Options, start: Callable[[], Pool[Job, Record]] | None = None, log: Log = print) -> Summary:
    """Run the benchmark and write its results to the output folder. start: makes what runs the jobs."""
    folder = Folder(options.out)
    _check(options)
    if options.resume or options.draw:
        folder.load()
    plan, shortened = _shortened(options)
    log(_announcement(plan, options, shortened))
    folder.prepare()
    benchmark = Benchmark(plan, folder)
    record = describe(options, plan, shortened)
    with locked(options.out):
        if not options.draw:
            record["finished"] = _run(benchmark, options, start or partial(Workers, options.jobs, execute))
        summary = _write(benchmark, record, log)
    if options.publish is not None:
        publish(options.out, options.publish)
    return summary


def publish(out: Path, docs: Path) -> None:
    """Copy the results that documentation shows: benchmark.md, bench.csv and the figures that the former shows."""
    pictures = docs / "figures" / "bench"
    pictures.mkdir(parents=True, exist_ok=True)
    for name in ("benchmark.md", "bench.csv"):
        write_atomically(docs / name, (out / name).read_bytes())
    for name in PUBLISHED:
        write_atomically(pictures / f"{name}.png", (out / f"{name}.png").read_bytes())


def _check(options: Options) -> None:
    if options.out.exists() and not options.out.is_dir():
        raise OutError(f"{options.out} is a file; --out must be a folder")
    if (options.out / "bench.csv").exists() and not (options.resume or options.draw):
        raise OutError(
            f"{options.out} already contains a benchmark; continue it with --resume, or choose another --out"
        )


def _shortened(options: Options) -> tuple[Plan, str]:
    """The plan that fits the budget, and what it leaves out, in words."""
    if options.budget is None:
        return options.plan, ""
    plan = within(options.plan, options.budget, options.jobs)
    return plan, cut(options.plan, plan, options.jobs, options.budget)


def _announcement(plan: Plan, options: Options, shortened: str) -> str:
    time_ = duration(estimated_seconds(plan, options.jobs))
    what = f"workloads: {len(plan.workloads)}, methods: {len(plan.methods)}, trials: {plan.trials}, seeds: {plan.seeds}"
    text = f"{what}, runs: {plan.runs}, about {time_}; number of processes: {options.jobs}"
    return f"{text}\nBudget: {shortened}" if shortened else text


def _run(benchmark: Benchmark, options: Options, start: Callable[[], Pool[Job, Record]]) -> bool:
    """Run what is missing; return whether all of it was done within the budget."""
    deadline = float("inf") if options.budget is None else time.monotonic() + options.budget
    with progress_for_output() as progress:
        if finished := len(benchmark.finished()):
            progress.message(f"resuming after {finished} of {benchmark.total()} runs")
        return run_jobs(benchmark, start, options.jobs, progress, deadline)


def _write(benchmark: Benchmark, record: dict[str, Any], log: Log) -> Summary:
    rows = benchmark.rows()
    benchmark.folder.write_csv(rows)
    out = benchmark.folder.path
    summary = Summary.of(rows)
    if not record.get("finished", True):
        left = benchmark.remaining().total()
        record["cut"] = f"{record['cut']}; " if record["cut"] else ""
        record["cut"] += f"the budget ended with {left} runs left; --resume continues"
    write_json(out / "run.json", record)
    figures = draw(summary, [found for _, found in benchmark.finished()], out)
    page = write_page(out, summary, figures, record)
    log(f"\n{terminal(summary)}\n")
    if record["cut"]:
        log(f"Budget: {record['cut']}")
    log(f"Results: {out / 'bench.csv'}\nPage: {page}")
    return summary


def describe(options: Options, plan: Plan, shortened: str) -> dict[str, Any]:
    """The contents of run.json: date, machine, versions, and the numbers of trials and seeds."""
    versions = {"bprong": bprong.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": f"bprong bench --workloads {','.join(plan.workloads)}",
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {processor()}, {options.jobs} processes with one thread each",
        "versions": versions,
        "trials": plan.trials,
        "seeds": plan.seeds,
        "methods": list(plan.methods),
        "cut": shortened,
    }


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def recompute_targets(workloads: tuple[str, ...], log: Log = print) -> None:
    """Find the targets of workloads again and print them as lines for targets.py."""
    set_up_torch(threads=1)
    for name in workloads:
        log(f"{name}: {WORKLOADS[name].title}")
        found = find_targets(WORKLOADS[name], log)
        parts = ", ".join(
            f'"{split}": Target({target.train_loss:.4g}, {target.val_loss:.4g})' for split, target in found.items()
        )
        log(f'    "{name}": {{{parts}}},')
