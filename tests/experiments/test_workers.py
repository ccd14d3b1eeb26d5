"""Worker processes: they end with the command, are replaced if they die, and use one thread."""

import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
import torch

from bprong.experiments.progress import Progress
from bprong.experiments.workers import Workers, available_cores, run_jobs
from experiments.processes import running_after_a_while
from helpers import quick_cases

PARENT = """
import os, sys, time
from bprong.experiments.workers import Workers

def work(job):
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    try:
        with Workers(1, work) as pool:
            pool.submit(0).result()
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("kind", quick_cases([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], signal.SIGKILL))
def test_workers_end_with_a_command_that_was_killed_or_interrupted(kind, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    worker = int(parent.stdout.readline())
    if kind == signal.SIGINT:
        os.killpg(parent.pid, kind)  # as a terminal does: Ctrl-C reaches the workers, too
    else:
        parent.send_signal(kind)
    _, errors = parent.communicate()
    assert parent.returncode == (130 if kind == signal.SIGINT else -kind)
    assert "Traceback" not in errors
    assert errors == "" or kind != signal.SIGINT  # after a kill, Python says that it removes semaphores
    assert running_after_a_while(process=worker) == []


class Numbers:
    """Jobs 0, 1, 2, … that are to be doubled."""

    def __init__(self, count):
        self.jobs = range(count)
        self.results = {}
        self.lost = []

    def ready(self, running):
        return (job for job in self.jobs if job not in running and job not in self.results and job not in self.lost)

    def keep(self, job, result):
        self.results[job] = result

    def give_up(self, job):
        self.lost.append(job)

    def kind(self, job):
        return "number"

    def price(self, kind):
        return 1.0

    def total(self):
        return len(self.jobs)

    def remaining(self):
        return Counter(number=len(self.jobs) - len(self.results) - len(self.lost))


def doubled_unless_deadly(folder, job):
    """Die at job 1 for the first time, and at job 2 always."""
    first = not (folder / "died").exists()
    if job == 2 or (job == 1 and first):
        (folder / "died").touch()
        os._exit(9)
    return 2 * job, torch.get_num_threads()


@pytest.mark.rest
def test_a_job_whose_process_dies_is_repeated_once_and_then_given_up(tmp_path):
    work = Numbers(4)
    assert run_jobs(work, lambda: Workers(1, partial(doubled_unless_deadly, tmp_path)), 1, Progress())
    assert work.results == {0: (0, 1), 1: (2, 1), 3: (6, 1)}
    assert work.lost == [2]


def failing(job):
    raise OSError(f"no space for {job}")


def test_an_error_of_a_worker_is_raised_in_the_command():
    with pytest.raises(OSError, match="no space for 0"):
        run_jobs(Numbers(2), lambda: Workers(1, failing), 1, Progress())


@pytest.mark.rest
def test_cores_are_those_that_this_process_may_use():
    code = "from bprong.experiments.workers import available_cores; print(available_cores())"
    one = f"import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); {code}"
    done = subprocess.run([sys.executable, "-c", one], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert available_cores() == len(os.sched_getaffinity(0))
