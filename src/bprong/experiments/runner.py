"""Train all methods, taking turns epoch by epoch, in one process or several, and save everything after every epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bprong.experiments.data import Dataset, shared
from bprong.experiments.progress import Progress
from bprong.experiments.records import RecordError, Row, read_results, remove_temporary_files, write_results
from bprong.experiments.training import (
    CHECKPOINTS,
    Config,
    Epoch,
    Outcome,
    Training,
    checkpoint,
    diverged,
    identity,
    last_epoch,
    new_trial,
    read_checkpoint,
    rows_of,
)
from bprong.experiments.workers import Here, Workers, run_jobs
from bprong.parallel.processes import Ranks

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in the same folder are not detected
    fcntl = None  # type: ignore[assignment]


class OutError(ValueError):
    """The run must not write to this output folder."""


def run(
    config: Config, data: Dataset, out: Path, progress: Progress, resume: bool = False, jobs: int = 1, threads: int = 1
) -> list[Row]:
    """Train and evaluate every method with every seed; return all rows, which are also written to out/results.csv.

    A resumed run keeps the rows of methods and seeds that it does not train itself.

    jobs:    the number of processes that train; 1: this one. The losses do not depend on it
    threads: of each of these processes, if they are others
    """
    check(config, data, Ranks().size)
    experiment = Experiment(config, data, out, progress)
    if resume:
        experiment.load()
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)  # after everything that raises for a wrong setting
    with experiment.writing():
        if jobs == 1:
            run_jobs(experiment, lambda: Here(Training(config, data, out)), 1, progress)
        else:
            with shared(data, out) as file:
                run_jobs(experiment, lambda: Workers(jobs, Training(config, file, out), threads), jobs, progress)
    return experiment.rows()


def check(config: Config, data: Dataset, processes: int) -> None:
    """Raise for settings that would otherwise fail in the middle of a run, or in another process."""
    if data.classes < 2:
        raise ValueError(f"{data.name} has only one class; at least two are required")
    if min(config.batch, len(data.x_train)) % processes:
        raise ValueError(f"--batch {config.batch} cannot be divided equally among {processes} processes")
    normalised = [name for name in ("bn", "bn-recipe") if name in config.methods]
    if normalised and min(config.batch, len(data.x_train)) < 2 * processes:
        raise ValueError(
            "batch normalisation requires at least two examples per batch; use --batch 2 or leave out "
            + " and ".join(normalised)
        )
    for method in config.methods:
        new_trial(config, data, method, seed=0)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Allow one run at a time in a folder; the operating system drops the lock when the process ends."""
    with (out / ".lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutError(f"another run is writing to {out}; choose another --out") from None
        yield


class Experiment:
    """The rows of a run, in the folder of its results, and what remains to be trained."""

    def __init__(self, config: Config, data: Dataset, out: Path, progress: Progress) -> None:
        self.config = config
        self.data = data
        self.out = out
        self.progress = progress
        pairs = [(method, seed) for seed in range(config.seeds) for method in config.methods]
        self.trials: dict[tuple[str, int], list[Row]] = {pair: [] for pair in pairs}
        self.others: list[Row] = []  # of methods and seeds that an earlier run trained, and this one does not

    def load(self) -> None:
        """Continue the run in the folder, if there is one; ResumeError if its settings differ."""
        with suppress(OSError, RecordError):  # results.csv may be missing or malformed
            rows = read_results(self.out / "results.csv")
            self.others = [row for row in rows if (row.method, row.seed) not in self.trials]
        for method, seed in self.trials:
            path = checkpoint(self.out, method, seed)
            if path.exists():
                self.trials[method, seed] = rows_of(read_checkpoint(path, identity(self.config, self.data, method)))
        if any(self.trials.values()):
            job = next(self.ready(()), None)
            where = f"seed {job.seed}, " if job is not None and job.seed else ""
            end = "all epochs are trained" if job is None else f"resuming at {where}epoch {job.epoch} of {job.epochs}"
            self.progress.message(end)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder, keep it free of half-written files, and write results.csv, even if nothing was trained."""
        if Ranks().rank > 0:
            yield
            return
        with locked(self.out):
            self._remove_temporary_files()  # of a run that was killed
            try:
                yield
            finally:
                self._remove_temporary_files()  # of workers that were interrupted
            write_results(self.out / "results.csv", self.rows())

    def _remove_temporary_files(self) -> None:
        for folder in (self.out, self.out / CHECKPOINTS):
            remove_temporary_files(folder)

    def rows(self) -> list[Row]:
        return [*self.others, *(row for rows in self.trials.values() for row in rows)]

    # Running, as `workers.run_jobs` asks for it ----------------------------------------------------------------------

    def ready(self, running: Collection[Epoch]) -> Iterator[Epoch]:
        """The next epochs: seed by seed, epoch by epoch, each epoch with another method first.

        Methods that take turns share slow phases of the machine, so that their times can be compared.
        """
        busy = [(job.method, job.seed) for job in running]
        jobs = [
            Epoch(method, seed, max(0, last_epoch(rows)) + 1, self.config.epochs)
            for (method, seed), rows in self.trials.items()
            if self._left(rows) and (method, seed) not in busy
        ]
        methods = self.config.methods
        yield from sorted(
            jobs, key=lambda job: (job.seed, job.epoch, (methods.index(job.method) - job.epoch) % len(methods))
        )

    def _left(self, rows: Sequence[Row]) -> int:
        """The number of epochs left to train a network that has these rows."""
        return 0 if diverged(rows) else max(0, self.config.epochs - max(0, last_epoch(rows)))

    def keep(self, job: Epoch, outcome: Outcome) -> None:
        self.trials[job.method, job.seed] = outcome.rows
        for line in outcome.messages:
            self.progress.message(line)
        if Ranks().rank == 0:
            write_results(self.out / "results.csv", self.rows())

    def give_up(self, job: Epoch) -> None:
        raise ChildProcessError(f"the process of {job} died twice, perhaps for lack of memory; use fewer --jobs")

    def kind(self, job: Epoch) -> str:
        return job.method

    def price(self, kind: str) -> float:
        return 1.0

    def total(self) -> int:
        return self.config.epochs * len(self.trials)

    def remaining(self) -> Counter[str]:
        count: Counter[str] = Counter()
        for (method, _), rows in self.trials.items():
            count[method] += self._left(rows)
        return count
