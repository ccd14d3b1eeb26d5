"""The examples of the README run, and its lists are complete."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import bprong
from page_examples import examples_of

PAGE = Path(__file__).parent.parent / "README.md"
README = PAGE.read_text(encoding="utf-8")
EXAMPLES = examples_of(PAGE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line {example.line}")
def test_example_runs(example, capsys):
    names: dict = {}
    example.run(names, lambda: capsys.readouterr().out)
    if "plain" in names:
        assert [type(m) for m in names["plain"]] == [nn.Linear, nn.ReLU, nn.Linear]
        x = names["loader"][0][0]
        torch.testing.assert_close(names["plain"](x), names["model"](x), rtol=1e-3, atol=1e-4)


def test_there_are_examples_of_every_kind():
    assert len(EXAMPLES) >= 3
    assert any(example.printed for example in EXAMPLES)
    assert any("fold(" in example.code for example in EXAMPLES)


def test_the_public_names_are_the_documented_ones():
    assert sorted(bprong.__all__) == sorted(
        [
            *("BPRONG", "PRONG", "Damping", "Likelihood", "Rewhitening", "WhitenedConv2d", "WhitenedLinear"),
            *("WhiteningError", "WhiteningWarning", "audit", "coverage", "fold", "register", "whiten_"),
        ]
    )
    assert all(hasattr(bprong, name) for name in bprong.__all__)


def test_the_map_names_every_module_and_folder():
    package = Path(bprong.__file__).parent
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    section = README[README.index("## Where things are") : README.index("## Licence")]
    listed = set(re.findall(r"^      (\S+)", section, re.MULTILINE))
    assert listed == modules | folders
