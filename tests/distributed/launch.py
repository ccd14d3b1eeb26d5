"""Starts real processes on this machine and runs functions in them."""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def run(size, *functions, timeout=300):
    """What each of some functions `module:name` returns on each rank: a list (functions) of lists (ranks)."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, folder, str(rank), str(size), *functions],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        for rank, process in enumerate(processes):
            assert process.returncode == 0, f"rank {rank}:\n{outputs[rank]}"
        found = [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(size)]
    return [list(by_rank) for by_rank in zip(*found, strict=True)]


def main(folder, rank, size, *functions):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(size))
    results = []
    for function in functions:
        module, name = function.split(":")
        results.append(getattr(importlib.import_module(module), name)(int(rank), int(size)))
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
