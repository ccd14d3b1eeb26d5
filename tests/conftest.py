import pytest
import torch
from hypothesis import settings

settings.register_profile("bprong", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("bprong")


@pytest.fixture(autouse=True)
def _reproducible():
    """One thread, because two workers share two cores; one seed; and nobody leaves another default dtype behind.

    Nor other arithmetic: the experiment flushes denormals for the whole process.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() is torch.float32
