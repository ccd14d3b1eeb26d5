import os
import signal

# A shell that starts a command in the background tells it to ignore Ctrl-C, and so do all the processes that it starts:
# tests that interrupt one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before numpy, torch and scikit-learn are loaded, which read these once. Two workers and the processes that they start
# share two cores: threads of BLAS and OpenMP that wait for each other there take many times as long as one thread.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest
import torch
from hypothesis import settings

settings.register_profile("bprong", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("bprong")


@pytest.fixture(autouse=True)
def _reproducible():
    """Every test has one thread, the same seed and the default dtype.

    Denormals are kept, although the experiment flushes them to zero for the whole process.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() is torch.float32
