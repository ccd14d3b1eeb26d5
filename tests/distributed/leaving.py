"""How a process of torch.distributed ends."""

import gc
import os
import sys

import torch.distributed as dist


def leave(children=()):
    """Ends this process with exit code 0. Call it last, when results are written: the interpreter is not finalised.

    children: ranks whose processes this one has started (`subprocess.Popen`), and which use its store: they leave first

    A worker thread of gloo frees the tensors of a collective operation after it has reported it as done, and needs the
    GIL for that. If the interpreter is being finalised by then, Python ends the thread inside of a destructor, and the
    process aborts. `destroy_process_group` joins the workers, unless something still holds the group, as FSDP2 does.

    Errors do not come here: they end a process in the normal way, with another exit code.
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # a process whose peers are gone may fail while it closes its connections
        gc.collect()  # a DistributedDataParallel in a cycle that is freed later joins the workers with the GIL held
        dist.destroy_process_group()
    for child in children:
        if child.wait() != 0:
            raise ChildProcessError(f"{child.args} ended with {child.returncode}")
    save_coverage()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def save_coverage():
    """Writes what coverage.py has measured in this process, if it runs: it would do so at the normal exit."""
    coverage = sys.modules.get("coverage")
    measurement = None if coverage is None else coverage.Coverage.current()
    if measurement is not None:
        measurement.stop()
        measurement.save()
