"""The scripts in examples/ run as they are, with the real packages, and reach what they show.

They run in this process, in a folder of their own, with warnings of bprong as errors.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bprong.capture.weights import REGISTERED

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {path.stem: path for path in sorted(EXAMPLES.glob("*.py"))}
REACHED = {  # what main() returns lies between these
    "audit_fisher": (0.0, 0.9),  # distance of the Fisher matrix from the identity, as a part of that without whitening
    "autoencoder": (0.0, 0.012),  # squared error
    "continuous_whitening": (0.0, 0.9),  # largest distance from white, as a part of that under periodic refresh
    "convert_and_fold": (0.0, 1e-4),  # change of the outputs
    "convolution": (0.95, 1.0),  # accuracy
    "gpt": (1.5, 2.5),  # validation loss
    "live_view": (0.92, 1.0),  # accuracy
    "physics_informed": (0.0, 0.01),  # relative error
    "tabular": (0.9, 1.0),  # accuracy
    "with_accelerate": (0.0, 0.2),  # loss
    "with_lightning": (0.97, 1.0),  # accuracy
    "with_peft": (0.3, 0.95),  # loss, as a part of that at the start
    "with_skorch": (0.92, 1.0),  # accuracy
    "with_tensorboard": (20, 40),  # numbers that are logged
    "with_timm": (0.7, 1.0),  # accuracy
    "with_torch_geometric": (0.7, 1.0),  # accuracy
    "with_trainer": (1.5, 2.8),  # loss
}
FRAMEWORKS = [name for name in SCRIPTS if name.startswith("with_") and name != "with_tensorboard"]


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an example writes goes to a folder of the test, and what it registers is forgotten."""
    monkeypatch.chdir(tmp_path)
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "distributed"])
def test_an_example_runs_and_reaches_what_it_shows(name: str) -> None:
    least, most = REACHED[name]
    reached = runpy.run_path(str(SCRIPTS[name]))["main"]()
    assert least <= reached <= most


def test_the_distributed_example_runs_in_one_process() -> None:
    """In several ones it is run by tests/distributed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*command, str(SCRIPTS["distributed"]), "--steps", "30"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "1 processes, 30 steps: loss 0.0" in done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_how_to_run_it(name: str) -> None:
    source = SCRIPTS[name].read_text(encoding="utf-8")
    docstring = source.split('"""')[1]
    assert f"examples/{name}.py" in docstring
    assert 'if __name__ == "__main__":' in source


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_example_of_a_framework_is_short(name: str) -> None:
    assert len(SCRIPTS[name].read_text(encoding="utf-8").splitlines()) < 40


def test_there_is_an_example_of_every_framework() -> None:
    packages = {"accelerate", "lightning", "peft", "skorch", "timm", "torch_geometric", "trainer"}
    assert {name.removeprefix("with_") for name in FRAMEWORKS} == packages
