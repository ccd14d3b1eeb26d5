import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Starting processes takes longer than most of what they do, so one pair of them does all that `make test` asks for.
QUICK = (
    "cases:some_paths",
    "behaviours:resumed", "behaviours:saved_for_one_process", "behaviours:distributed_checkpoint",
    "behaviours:an_empty_batch", "behaviours:an_error_on_one_rank", "behaviours:gradients_that_differ",
    "behaviours:averaged_by_hand", "behaviours:join", "behaviours:whitened",
    "fully_sharded:some_paths", "fully_sharded:memory", "fully_sharded:averaged", "fully_sharded:refused",
)  # fmt: skip


@pytest.fixture(scope="session")
def two_ranks():
    """What these functions return on each of two ranks, by name."""
    import launch

    return dict(zip(QUICK, launch.run(2, *QUICK), strict=True))
