"""Holds up a worker thread of gloo while it frees a tensor, so that its race with the end of the process is decided."""

import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

SECONDS = 2.0  # if the process takes longer to end, on a busy machine, the race is that of every run


class SlowToFree(np.ndarray):
    """An array whose last owner waits without the GIL, and then needs it."""

    being_freed = threading.Event()
    thread = None

    def __del__(self):
        SlowToFree.thread = threading.get_ident()
        self.being_freed.set()
        time.sleep(SECONDS)


def hold_up_worker(group=None):
    """On rank 0 of two: returns while a worker of the group frees a tensor. Later operations of the group wait for it.

    Rank 1 does not take part in the operation before rank 0 has dropped its references, so that the worker's is the
    last one.
    """
    signal = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.from_numpy(SlowToFree(1, dtype=np.float32)), group=group, async_op=True)
        dist.send(signal, 1, group=group)
        assert SlowToFree.being_freed.wait(60)
        assert SlowToFree.thread != threading.get_ident()
    else:
        dist.recv(signal, 0, group=group)
        dist.all_reduce(torch.zeros(1), group=group)


def fully_sharded(rank, size):
    """Trains with FSDP2, whose caches keep the group of its mesh, and leaves a worker of that group held up."""
    group = dist.new_group()
    model = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    hold_up_worker(group)
    return f"rank {rank} of {size}"


def fails_on_one_rank(rank, size):
    """Rank 1 raises an error, and rank 0 does not notice."""
    if rank == 1:
        raise ArithmeticError("of this rank alone")
    time.sleep(600)


def does_not_end(rank, size):
    time.sleep(600)
