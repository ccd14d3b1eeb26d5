"""Worker processes of a benchmark."""

import os
import signal
import subprocess
import sys
import time

PARENT = """
import os, sys, time
from bprong.experiments.bench.running import processes
if __name__ == "__main__":
    executor = processes(1)
    print(executor.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split(")")[-1].split()[0] != "Z"


def test_workers_end_with_a_command_that_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 30
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)
