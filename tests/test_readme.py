"""The examples of the README run, and its lists are complete."""

import re
from pathlib import Path

import pytest

import bprong
from page_examples import examples_of

PAGE = Path(__file__).parent.parent / "README.md"
README = PAGE.read_text(encoding="utf-8")
EXAMPLES = examples_of(PAGE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line {example.line}")
def test_example_runs(example, capsys):
    names: dict = {}
    example.run(names, lambda: capsys.readouterr().out)


def test_it_is_short_and_has_an_example_with_its_output():
    assert len(README.splitlines()) <= 160
    assert any(example.printed for example in EXAMPLES)


def test_its_links_lead_to_files():
    found = re.findall(r"\]\(([^)#:]+)\)", README)
    assert found
    assert [link for link in found if not (PAGE.parent / link).exists()] == []


def test_the_public_names_are_the_documented_ones():
    assert sorted(bprong.__all__) == sorted(
        [
            *("BPRONG", "PRONG", "Damping", "Likelihood", "Rewhitening", "WhitenedConv2d", "WhitenedLinear"),
            *("WhiteningError", "WhiteningWarning", "audit", "coverage", "fold", "register", "whiten_"),
        ]
    )
    assert all(hasattr(bprong, name) for name in bprong.__all__)
