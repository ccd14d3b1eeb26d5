"""Lightning's and transformers' own ways to train in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import assert_close

SCRIPT = Path(__file__).parent / "two_processes.py"


def run(way: str, out: Path, processes: int) -> list[torch.Tensor]:
    """The parameters of each rank, as one vector each."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(start if way == "trainer" else []), str(SCRIPT), way, str(out), str(processes)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = [out / f"{way}-{processes}-{rank}.pt" for rank in range(processes)]
    return [torch.cat([p.flatten() for p in torch.load(file, weights_only=True)]) for file in files]


@pytest.mark.parametrize(("way", "tolerance"), [("lightning", 1e-9), ("trainer", 1e-5)])
def test_two_processes_take_the_path_of_one(way: str, tolerance: float, tmp_path: Path) -> None:
    (alone,) = run(way, tmp_path, 1)
    first, second = run(way, tmp_path, 2)
    assert torch.equal(first, second)
    if way == "lightning":  # the Trainer gives ranks other parts of a batch than one process has
        assert_close(first, alone, tolerance, way)
