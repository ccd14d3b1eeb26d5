"""One run in a worker process: training, peak memory, and failures as records."""

from __future__ import annotations

import ctypes
import gc
import math
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import nn

from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.plan import Job, limit
from bprong.experiments.bench.records import Record, failed, row_of, split_of
from bprong.experiments.bench.targets import TARGETS
from bprong.experiments.bench.training import Run, Start
from bprong.experiments.bench.workloads import WORKLOADS

STATUS = Path("/proc/self/status")
MEBI = 1 << 20


@cache
def warm_up() -> None:
    """Do what is slow only the first time in a process."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()


def execute(job: Job) -> Record:
    """Run a job. Any exception becomes a record that says what happened: peers may fail on some workload."""
    warm_up()
    workload = WORKLOADS[job.workload]
    method = METHODS[job.method]
    split = split_of(job)
    target = TARGETS[job.workload][split]
    workload.data(split)  # read it before the memory is measured
    before = reset_peak()
    start = Start(
        workload, method.make, job.settings, split, job.seed, target, method.normalised, limit(workload)
    )  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = Run(start).complete()
    except Exception as error:
        return failed(job, f"{type(error).__name__}: {error}")
    return Record(row_of(job, outcome, target, peak() - before), outcome.points)


def reset_peak() -> float:
    """Free what earlier runs left, forget the peak, and return the megabytes in use; NaN where Linux does not say."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return math.nan
    return _megabytes("VmRSS")


def peak() -> float:
    """The greatest memory in use since `reset_peak`, in megabytes; NaN where Linux does not say."""
    return _megabytes("VmHWM")


def _megabytes(field: str) -> float:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return math.nan
    kilobytes = next((line.split()[1] for line in lines if line.startswith(f"{field}:")), "nan")
    return float(kilobytes) * 1024 / MEBI
