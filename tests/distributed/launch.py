"""Starts real processes on this machine and runs functions in them."""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from leaving import leave

HERE = Path(__file__).parent


def run(size, *functions, timeout=300):
    """What each of some functions `module:name` returns on each rank: a list (functions) of lists (ranks)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(folder, size, functions) as processes:
            failure = wait_for(processes, timeout)
        if failure:
            raise AssertionError("\n".join([failure, *(output_of(folder, rank) for rank in range(size))]))
        results_by_rank = [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(size)]
    return [list(results) for results in zip(*results_by_rank, strict=True)]


@contextmanager
def started(folder, size, functions):
    """The processes of all ranks, which write to files in the folder. None of them outlives the block."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    processes = []
    try:
        for rank in range(size):
            command = [sys.executable, __file__, str(folder), str(rank), str(size), *functions]
            with (folder / f"{rank}.txt").open("wb") as output:  # a pipe that nobody reads would block the process
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def wait_for(processes, timeout):
    """Waits until all processes have ended with 0, or until one fails; returns what went wrong, or an empty string.

    The peers of a process that failed may wait for it for as long as their group allows.
    """
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):  # neither None, which is still running, nor 0
            return ", ".join(f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code)
        if None not in codes:
            return ""
        if time.monotonic() > deadline:
            running = [str(rank) for rank, code in enumerate(codes) if code is None]
            return f"after {timeout} s these ranks had not ended: {', '.join(running)}"
        time.sleep(0.02)


def output_of(folder, rank):
    return f"rank {rank}:\n{(folder / f'{rank}.txt').read_text(errors='replace')}"


def main(folder, rank, size, *functions):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(size))
    results = []
    for function in functions:
        module, name = function.split(":")
        results.append(getattr(importlib.import_module(module), name)(int(rank), int(size)))
    with (Path(folder) / f"{rank}.pkl").open("wb") as file:
        pickle.dump(results, file)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
