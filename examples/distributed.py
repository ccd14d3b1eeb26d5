"""Digits in several processes, with checkpoints that survive the loss of a process.

On one machine:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed.py --checkpoint run.pt

On two machines, with the same command on both but for the rank; the first one's address is known to both:

    torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 examples/distributed.py
    torchrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 examples/distributed.py
"""

import argparse
import gc
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bprong

BATCH = 64  # examples of one process


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="saved every 10 steps; training continues from it")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that processes wait for each other")
    return parser.parse_args()


def save(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
    torch.save(state, checkpoint.with_suffix(".part"))
    os.replace(checkpoint.with_suffix(".part"), checkpoint)  # whole, or as it was


def main() -> None:
    options = arguments()
    # After a restart gloo sometimes fails to connect. This process then ends, and torchrun starts all of them again.
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = x.float() / 16

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    wrapped = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(wrapped, criterion)
    done = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["steps"]

    for step in range(done, options.steps):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))
        mine = order[rank * BATCH : (rank + 1) * BATCH]
        optimizer.zero_grad()
        loss = criterion(wrapped(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        if options.checkpoint is not None and rank == 0 and (step + 1) % 10 == 0:
            save(options.checkpoint, model, optimizer, step + 1)
    with torch.no_grad():
        loss = criterion(model(x), y)
    if rank == 0:
        print(f"{size} processes, {options.steps} steps: loss {float(loss):.6f}")
    dist.barrier()  # a process whose peers are gone may abort while it closes its connections
    # What still uses the process group would end its threads later, when these may be waiting for Python: a deadlock.
    del model, wrapped, criterion, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
