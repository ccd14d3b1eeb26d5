"""What the README shows runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import bprong

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=[e.strip().splitlines()[0] for e in EXAMPLES])
def test_example_runs(example):
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    if "plain" in names:
        assert [type(m) for m in names["plain"]] == [nn.Linear, nn.ReLU, nn.Linear]
        x = names["loader"][0][0]
        torch.testing.assert_close(names["plain"](x), names["model"](x), rtol=1e-3, atol=1e-4)


def test_there_are_examples():
    assert EXAMPLES


def test_the_public_names_are_few_and_there():
    assert len(bprong.__all__) <= 10
    assert all(hasattr(bprong, name) for name in bprong.__all__)


def test_every_module_is_in_the_readmes_map():
    modules = {p.name for p in Path(bprong.__file__).parent.glob("*.py")} - {"__init__.py"}
    assert all(name in README for name in modules), modules
