"""The example under torchrun: on one machine, on two, and with a process that is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
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


def loss_of(*processes):
    """The loss that one of the launches prints at the end."""
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    (found,) = re.findall(rf"2 processes, {STEPS} steps: loss ([\d.]+)", "".join(outputs))
    return float(found)


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
    process = start(*restarts, example=["--checkpoint", str(checkpoint), "--timeout", "10"])
    until = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
    assert loss_of(process) == undisturbed


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
