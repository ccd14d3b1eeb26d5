"""Settings for tests with other people's packages: nothing is downloaded, and only their own warnings are ignored."""

import importlib
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"}
sys.path.insert(0, os.path.dirname(__file__))
sys.path.append(str(Path(__file__).parents[2] / "examples"))

# Deprecations inside the packages, and advice about the size of a machine: none of it is about bprong.
IGNORED = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::PendingDeprecationWarning",
    "ignore:.*:UserWarning:(torch_geometric|lightning|accelerate|transformers|timm)",
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*pin_memory.*:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in IGNORED:
        config.addinivalue_line("filterwarnings", line)


def import_torchvision() -> None:
    """Imports torchvision; if its compiled part does not fit this torch, its two operators are declared without it."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_torchvision()


@pytest.fixture(autouse=True)
def _fresh_frameworks():
    """Every test starts without compiled code and without the state that accelerate keeps for a whole process."""
    from accelerate.state import AcceleratorState, GradientState

    torch._dynamo.reset()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
