"""Run a plan in several processes, keep every finished run at once, and continue where an earlier benchmark stopped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.plan import Job, Plan
from bprong.experiments.bench.records import FAILED, Folder, Record, Row, failed, missing_rows, sorted_rows
from bprong.experiments.bench.scores import badness, reached_any
from bprong.experiments.bench.worker import execute, set_up
from bprong.experiments.bench.workloads import WORKLOADS

Report = Callable[[Job, Record, int, int], None]  # job, its record, runs done and runs known so far
ATTEMPTS = 2  # of a run whose process died, as it may have been the other process's fault
NO_TARGET = "no trial reached a target, so that it was not rerun on fresh seeds"


def processes(workers: int) -> Executor:
    """Worker processes with one thread each. They are new processes, so that nothing of this one is inherited."""
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=set_up)


class Benchmark:
    """A plan and its records in a folder."""

    def __init__(self, plan: Plan, folder: Folder) -> None:
        self.plan = plan
        self.folder = folder
        self._present = {workload: plan.present(workload) for workload in plan.workloads}
        self._trials = {workload: plan.tuning(workload) for workload in plan.workloads}
        self._started: set[str] = set()

    # What is known -------------------------------------------------------------------------------------------------

    def best(self, workload: str) -> dict[str, Job]:
        """The best trial of each method; without methods none of whose trials reached a target."""
        found: dict[str, Job] = {}
        budget = WORKLOADS[workload].steps
        for name in self._present[workload]:
            jobs = [job for job in self._trials[workload] if job.method == name]
            tried = [(job, record.row) for job in jobs if (record := self.folder.find(job)) is not None]
            if any(reached_any(row) for _, row in tried):
                chosen = min(tried, key=lambda pair: badness(pair[1], budget))[0]
                found[name] = jobs[0] if METHODS[name].automatic else chosen
        return found

    def reasons(self) -> dict[tuple[str, str], str]:
        """Why methods have no runs on fresh seeds, by workload and method."""
        found: dict[tuple[str, str], str] = {}
        for workload in self.plan.workloads:
            for name in self.plan.methods:
                if reason := METHODS[name].missing(WORKLOADS[workload]):
                    found[workload, name] = reason
            if self._tuned(workload):
                rerun = self.best(workload)
                for name in self._present[workload]:
                    if name not in rerun:
                        found[workload, name] = self._why_not(workload, name)
        return found

    def _why_not(self, workload: str, name: str) -> str:
        """The failure of a method's trials, if all of them failed, or that none reached a target."""
        jobs = [job for job in self._trials[workload] if job.method == name]
        ends = [record.row.end for job in jobs if (record := self.folder.find(job)) is not None]
        return ends[0] if all(end.startswith(FAILED) for end in ends) else NO_TARGET

    def rows(self) -> list[Row]:
        """All rows of the plan, in its order."""
        found = [record.row for _, record in self.finished()]
        return sorted_rows([*found, *missing_rows(self.plan, self.reasons())], self.plan)

    def finished(self) -> list[tuple[Job, Record]]:
        """The jobs of the plan that have been run."""
        jobs = [job for workload in self.plan.workloads for job in self._known(workload)]
        return [(job, record) for job in jobs if (record := self.folder.find(job)) is not None]

    def _known(self, workload: str) -> list[Job]:
        """The trials and, once all of them are done, the runs on fresh seeds."""
        trials = self._trials[workload]
        return [*trials, *self.plan.test(workload, self.best(workload))] if self._tuned(workload) else trials

    def _tuned(self, workload: str) -> bool:
        return all(self.folder.find(job) is not None for job in self._trials[workload])

    # Running -------------------------------------------------------------------------------------------------------

    def run(self, start: Callable[[], Executor], workers: int, report: Report, deadline: float) -> bool:
        """Run what is missing; return whether everything was done before the deadline (of `time.monotonic`)."""
        attempts: Counter[str] = Counter()
        while True:
            executor = start()
            try:
                self._started.clear()
                return self._run_in(executor, workers, report, deadline, attempts)
            except BrokenProcessPool:
                continue  # a process died: new ones repeat what it was doing
            finally:
                executor.shutdown(wait=False, cancel_futures=True)

    def _run_in(
        self, executor: Executor, workers: int, report: Report, deadline: float, attempts: Counter[str]
    ) -> bool:
        running: dict[Future[Record], Job] = {}
        while True:
            while len(running) < workers and time.monotonic() < deadline:
                job = next(self._ready(), None)
                if job is None:
                    break
                self._started.add(job.name)
                attempts[job.name] += 1
                if attempts[job.name] > ATTEMPTS:
                    self._keep(job, failed(job, "the process died"), report)
                else:
                    running[executor.submit(execute, job)] = job
            if not running:
                return next(self._ready(), None) is None
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                self._keep(job, future.result(), report)

    def _keep(self, job: Job, record: Record, report: Report) -> None:
        self.folder.add(job, record)
        self.folder.write_csv(self.rows())
        report(job, record, len(self.finished()), self.total())

    def _ready(self) -> Iterator[Job]:
        """Jobs that have neither been run nor begun, in order; fresh seeds come after all trials of a workload."""
        for workload in self.plan.workloads:
            for job in self._known(workload):
                if job.name not in self._started and self.folder.find(job) is None:
                    yield job

    def total(self) -> int:
        """The number of runs: exact for workloads whose trials are done, the greatest possible for others."""
        count = 0
        for workload in self.plan.workloads:
            if self._tuned(workload):
                count += len(self._known(workload))
            else:
                rerun = dict.fromkeys(self._present[workload])
                count += len(self._trials[workload]) + self.plan.seeds * len(rerun)
        return count
