"""The state of a benchmark: which runs are done, which come next, and where an earlier benchmark stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from bprong.experiments.bench.methods import METHODS
from bprong.experiments.bench.plan import Job, Plan, run_seconds
from bprong.experiments.bench.records import FAILED, Folder, Record, Row, failed, missing_rows, sorted_rows
from bprong.experiments.bench.scores import badness, reached_any
from bprong.experiments.bench.workloads import WORKLOADS

Kind = tuple[str, str]  # workload and method, whose runs take about equally long
NO_TARGET = "no trial reached a target, so that it was not rerun on fresh seeds"


class Benchmark:
    """A plan and its records in a folder."""

    def __init__(self, plan: Plan, folder: Folder) -> None:
        self.plan = plan
        self.folder = folder
        self._present = {workload: plan.present(workload) for workload in plan.workloads}
        self._trials = {workload: plan.tuning(workload) for workload in plan.workloads}

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

    # Running, as `workers.run_jobs` asks for it ---------------------------------------------------------------------

    def ready(self, running: Collection[Job]) -> Iterator[Job]:
        """Jobs that have neither been run nor begun, in order; fresh seeds come after all trials of a workload."""
        for workload in self.plan.workloads:
            for job in self._known(workload):
                if job not in running and self.folder.find(job) is None:
                    yield job

    def keep(self, job: Job, record: Record) -> None:
        self.folder.add(job, record)
        self.folder.write_csv(self.rows())

    def give_up(self, job: Job) -> None:
        self.keep(job, failed(job, "the process died"))

    def kind(self, job: Job) -> Kind:
        return job.workload, job.method

    def price(self, kind: Kind) -> float:
        workload, method = kind
        return run_seconds(WORKLOADS[workload], METHODS[method])

    def remaining(self) -> Counter[Kind]:
        """The number of runs that are not done; the greatest possible for workloads whose trials are not done."""
        count: Counter[Kind] = Counter()
        for workload in self.plan.workloads:
            count.update(self.kind(job) for job in self._known(workload) if self.folder.find(job) is None)
            if not self._tuned(workload):
                count.update({(workload, name): self.plan.seeds for name in self._present[workload]})
        return count

    def total(self) -> int:
        """The number of runs, as far as it is known."""
        return len(self.finished()) + self.remaining().total()
