"""Jobs of a command in several processes: one thread each, as many processes as there are cores to use.

No worker outlives the command: all end at once when it is interrupted, and also when it is killed.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

import torch

from bprong.experiments.progress import Estimate, Progress

Job = TypeVar("Job", bound=Hashable)
Result = TypeVar("Result")
Kept = TypeVar("Kept", contravariant=True)  # noqa: PLC0105 (a name in words)
Timed = tuple[float, Result]  # the seconds that a job took, and its result

ATTEMPTS = 2  # of a job whose process died, as another process may be to blame


def available_cores() -> int:
    """The number of cores that this process may use, where the system tells it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_up_torch(threads: int) -> None:
    """Set the number of threads and flush denormal numbers to zero; must be called before anything is computed.

    Threads inherit the setting only if they start later. Denormal numbers make the training of a nearly converged
    network three times slower.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


class Pool(Protocol[Job, Result]):
    """What runs jobs."""

    def submit(self, job: Job) -> Future[Timed[Result]]: ...

    def __enter__(self) -> Pool[Job, Result]: ...

    def __exit__(self, *error: object) -> None: ...


class Here(Generic[Job, Result]):
    """Runs each job at once, in this process."""

    def __init__(self, call: Callable[[Job], Result]) -> None:
        self._call = call

    def submit(self, job: Job) -> Future[Timed[Result]]:
        future: Future[Timed[Result]] = Future()
        future.set_result(_timed(self._call, job))
        return future

    def __enter__(self) -> Here[Job, Result]:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Workers(Generic[Job, Result]):
    """Runs jobs in new processes, which inherit nothing of this one. Each gets a copy of `call` and keeps it."""

    def __init__(self, count: int, call: Callable[[Job], Result], threads: int = 1) -> None:
        context = get_context("spawn")
        ends, self._command = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(count, context, _set_up_worker, (ends, call, threads))

    def submit(self, job: Job) -> Future[Timed[Result]]:
        with _interrupts_blocked():  # may start a process, which inherits this: Ctrl-C reaches the whole terminal
            return self._executor.submit(_run_job, job)

    def __enter__(self) -> Workers[Job, Result]:
        return self

    def __exit__(self, *error: object) -> None:
        self._command.close()  # ends the workers, whatever they are doing
        self._executor.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Deliver an interrupt only afterwards; processes that are started meanwhile never receive one."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_call: Callable[[Any], Any] | None = None  # what this process runs, if it is a worker


def _set_up_worker(ends: Connection, call: Callable[[Any], Any], threads: int) -> None:
    global _worker_call  # noqa: PLW0603 (the executor offers no other place for it)
    threading.Thread(target=_end_with_command, args=(ends,), daemon=True).start()
    set_up_torch(threads)
    gc.collect()
    gc.freeze()  # modules need not be searched for garbage between jobs
    _worker_call = call


def _end_with_command(ends: Connection) -> None:
    """End this process when the command closes its end of a pipe, or is killed, which closes it too."""
    try:
        ends.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _run_job(job: Any) -> Timed[Any]:
    assert _worker_call is not None
    return _timed(_worker_call, job)


def _timed(call: Callable[[Job], Result], job: Job) -> Timed[Result]:
    start = time.perf_counter()
    result = call(job)
    return time.perf_counter() - start, result


class Work(Protocol[Job, Kept]):
    """The jobs of a command. Jobs of one kind take about equally long; a price is a guess before one was run."""

    def ready(self, running: Collection[Job]) -> Iterator[Job]:
        """Jobs that can begin now, in their order; none of those that are running."""

    def keep(self, job: Job, result: Kept) -> None:
        """Save a result."""

    def give_up(self, job: Job) -> None:
        """The process of this job died, more than once."""

    def kind(self, job: Job) -> Hashable: ...

    def price(self, kind: Any) -> float: ...

    def total(self) -> int:
        """The number of jobs, with those that were finished earlier."""

    def remaining(self) -> Mapping[Any, int]:
        """The number of jobs of each kind that are not finished."""


def run_jobs(
    work: Work[Job, Result], start: Callable[[], Pool[Job, Result]], processes: int, progress: Progress,
    deadline: float = math.inf,
) -> bool:  # fmt: skip
    """Run all jobs, so many at a time; return whether that was done before the deadline (of `time.monotonic`)."""
    attempts: Counter[Job] = Counter()
    estimate = Estimate(processes)
    while True:
        try:
            with start() as pool:
                return _run_in(pool, work, processes, progress, deadline, attempts, estimate)
        except BrokenProcessPool:
            continue  # a process died: new ones repeat what was running


def _run_in(
    pool: Pool[Job, Result], work: Work[Job, Result], processes: int, progress: Progress, deadline: float,
    attempts: Counter[Job], estimate: Estimate,
) -> bool:  # fmt: skip
    running: dict[Future[Timed[Result]], Job] = {}
    while True:
        while len(running) < processes and time.monotonic() < deadline:
            job = next(work.ready(running.values()), None)
            if job is None:
                break
            attempts[job] += 1
            if attempts[job] > ATTEMPTS:
                work.give_up(job)
                continue
            _show(progress, work, estimate, [*running.values(), job])
            running[pool.submit(job)] = job
        if not running:
            return next(work.ready(()), None) is None
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            job = running.pop(future)
            seconds, result = future.result()
            work.keep(job, result)
            estimate.add(work.kind(job), work.price(work.kind(job)), seconds)


def _show(progress: Progress, work: Work[Job, Result], estimate: Estimate, running: Collection[Job]) -> None:
    remaining = work.remaining()
    total = work.total()
    left = estimate.left({kind: (number, work.price(kind)) for kind, number in remaining.items()})
    progress.show(total - sum(remaining.values()), total, left, "; ".join(map(str, running)))
