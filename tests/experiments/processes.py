"""Which processes are running, on Linux. A zombie is not: it has ended, and only waits for its parent."""

import time
from pathlib import Path


def running(process=None, group=None):
    """The ids of the processes that are running and have this id or group."""
    ids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        pid = int(stat.parent.name)
        if state != "Z" and (pid == process or int(its_group) == group):
            ids.append(pid)
    return ids


def running_after_a_while(**which):
    """The same, after half a minute or as soon as there are none."""
    deadline = time.monotonic() + 30
    while (ids := running(**which)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return ids
