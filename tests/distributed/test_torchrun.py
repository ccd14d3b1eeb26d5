"""The example under torchrun: on one machine, on two, and with a process that is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"
STEPS = 60


def start(*arguments, example=()):
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, str(EXAMPLE), "--steps", str(STEPS), *example]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@contextmanager
def ended(*launches):
    """Launches that are still running at the end of the block are ended with their workers, whatever happened."""
    try:
        yield
    finally:
        for launch in launches:
            launch.terminate()  # torchrun then ends its workers
        for launch in launches:
            launch.communicate(timeout=120)


def loss_of(*launches):
    """The loss that one of the launches prints at the end."""
    with ended(*launches):
        outputs = [launch.communicate(timeout=240)[0] for launch in launches]
    assert all(launch.returncode == 0 for launch in launches), "\n".join(outputs)
    (loss,) = re.findall(rf"2 processes, {STEPS} steps: loss ([\d.]+)", "".join(outputs))
    return float(loss)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def undisturbed():
    return loss_of(start("--standalone", "--nproc-per-node", "2"))


@pytest.mark.rest
def test_two_launches_are_two_machines(undisturbed):
    address = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    assert loss_of(*(start(*address, "--node-rank", str(node)) for node in range(2))) == undisturbed


@pytest.mark.rest
def test_a_worker_that_is_killed_is_replaced_and_the_run_ends_where_it_would_have(undisturbed, tmp_path):
    checkpoint = tmp_path / "run.pt"
    restarts = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "20", "--monitor-interval", "0.1"]
    launch = start(*restarts, example=["--checkpoint", str(checkpoint), "--timeout", "10"])
    with ended(launch):
        until = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(workers_of(launch.pid)[-1], signal.SIGKILL)
        assert loss_of(launch) == undisturbed


def workers_of(launcher):
    """The processes that a launcher has started, from /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (folder / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == launcher and EXAMPLE.name in command:
            found.append(int(folder.name))
    return sorted(found)
