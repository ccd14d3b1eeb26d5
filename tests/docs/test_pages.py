"""The pages of the documentation: their examples run, the tests that they name exist, their figures are described."""

import doctest
import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from page_examples import examples_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_EXAMPLES = [page for page in PAGES if examples_of(page)]
ENDING = [page for page in WITH_EXAMPLES if "os._exit" in page.read_text(encoding="utf-8")]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
SLOW = (  # starts torchrun twice, and says so in its row
    "test_torchrun.py",
    "test_a_worker_that_is_killed_is_replaced_and_the_run_ends_where_it_would_have",
)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def named(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", [page for page in WITH_EXAMPLES if page not in ENDING], ids=named)
def test_the_examples_of_a_page_run_in_their_order(page, capsys):
    names: dict = {}
    for example in examples_of(page):
        example.run(names, lambda: capsys.readouterr().out)


@pytest.mark.parametrize("page", ENDING, ids=named)
def test_examples_that_end_their_process_run_in_one_of_their_own(page, tmp_path):
    """Not in that of pytest. Nothing comes after the line that ends it, and these pages print nothing."""
    examples = examples_of(page)
    script = tmp_path / "page.py"
    script.write_text("".join(example.code for example in examples), encoding="utf-8")
    assert script.read_text(encoding="utf-8").endswith("\nos._exit(0)\n")
    assert not any(example.printed for example in examples)
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_an_example_that_prints_something_else_is_caught(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\nText.\n\n```python\nprint(x + 1)\n```\n\n```text\n3\n```\n")
    first, second = examples_of(page)
    assert (first.printed, second.printed, second.line) == ((), ("3",), 7)
    names: dict = {}
    first.run(names, lambda: capsys.readouterr().out)
    with pytest.raises(AssertionError, match=r"page\.md, line 7"):
        second.run(names, lambda: capsys.readouterr().out)


def test_pages_for_users_have_examples():
    pages = {named(page) for page in WITH_EXAMPLES}
    assert {"index.md", "start.md", "rules.md", "losses.md", "network.md", "report.md", "troubleshooting.md"} <= pages


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_is_marked_as_python_and_so_is_run(page):
    """An indented block, or one without a language, would not be executed: it may not contain Python."""
    text = re.sub(r"```\w+\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "```" not in text
    indented = re.findall(r"(?m)^    (?:import |from \w+ import|optimizer = |scheduler = |model = ).*", text)
    assert indented == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_tests_that_a_page_names_exist(page):
    for file, name in TEST.findall(page.read_text(encoding="utf-8")):
        path = ROOT / "tests" / file
        assert path.exists(), file
        assert re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("page", ["compatibility.md", "guarantees.md"])
def test_a_test_that_a_page_names_is_run_by_make_test(page, request):
    """At least one of its cases is not marked `rest`. A test in `ecosystem/` has a command of its own."""
    if request.config.option.file_or_dir or request.config.option.keyword:
        pytest.skip("only some of the tests were collected")
    collected = [item for item in request.session.items if isinstance(item, pytest.Function)]
    quick = {(item.path, item.originalname) for item in collected if item.get_closest_marker("rest") is None}
    names = TEST.findall((DOCS / page).read_text(encoding="utf-8"))
    ours = {(ROOT / "tests" / file, name) for file, name in names if not file.startswith("ecosystem/")}
    assert len(ours) > 40
    assert [f"{path}::{name}" for path, name in ours - quick if (path.name, name) != SLOW] == []


@pytest.mark.parametrize("page", ["compatibility.md", "guarantees.md"])
def test_every_line_names_a_test(page):
    rows = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    without = [row for row in rows if not TEST.search(row) and not row.rstrip().endswith("| test |")]
    assert without == []
    assert len(rows) > 40


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_figure_exists_and_is_described(page):
    for words, address in IMAGE.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / address).exists()
        assert len(words.split()) >= 8, address


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = navigation[navigation.index("\nnav:") :]
    assert {named(page) for page in PAGES} == set(re.findall(r"[\w/-]+\.md", navigation))


def test_every_public_name_is_in_the_reference():
    import bprong

    reference = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    assert [name for name in bprong.__all__ if not re.search(rf"(?m)^::: bprong\.(\w+\.)*{name}$", reference)] == []


def test_the_map_of_the_architecture_names_every_module_and_folder():
    import bprong

    package = Path(bprong.__file__).parent
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    section = text[text.index("src/bprong/\n") : text.index("benchmarks/  ")]
    assert set(re.findall(r"^  (\S+)", section, re.MULTILINE)) == modules | folders


# What comes with the site ---------------------------------------------------------------------------------------------


def test_the_font_of_formulas_is_the_one_of_the_npm_package():
    """@fontsource/stix-two-math 5.3.0, files/stix-two-math-latin-400-normal.woff2."""
    found = hashlib.sha256((DOCS / "assets" / "stix-two-math.woff2").read_bytes()).hexdigest()
    assert found == "8b2a6834cfe1f4e0f3724ffa59fe92000013fc5a4c41e6a3f438006c26c60f0d"


@pytest.fixture(scope="module")
def check_site():
    specification = importlib.util.spec_from_file_location("check_site", DOCS / "tools" / "check_site.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["check_site"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["check_site"]


def test_examples_of_the_check(check_site):
    assert doctest.testmod(check_site).failed == 0


GOOD = '<link href="a.css"><img src="a.png"><a href="https://elsewhere.org">a link is no fault</a><a href="#b">b</a>'


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<script src="https://elsewhere.org/a.js"></script>', "loads https://elsewhere.org/a.js"),
        ('<link rel="stylesheet" href="//elsewhere.org/a.css">', "loads //elsewhere.org/a.css"),
        ('<img src="http://elsewhere.org/a.png">', "loads http://elsewhere.org/a.png"),
        ('<img srcset="a.png 1x, https://elsewhere.org/b.png 2x">', "loads https://elsewhere.org/b.png"),
        ('<p style="background: url(https://elsewhere.org/a.png)">', "loads https://elsewhere.org/a.png"),
        ('<pre class="mermaid">a diagram</pre>', "loads https://elsewhere/mermaid"),
        ('<img src="none.png">', "names none.png, which does not exist"),
        ('<a href="none.html#a">none</a>', "names none.html#a, which does not exist"),
    ],
)
def test_the_check_of_the_site_finds_what_is_loaded_from_elsewhere_and_what_is_missing(
    check_site, tmp_path, html, fault
):
    (tmp_path / "a.css").write_text("p { src: url('a.png') }")
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.html").write_text(GOOD)
    assert list(check_site.faults(tmp_path)) == []
    (tmp_path / "a.html").write_text(GOOD + html)
    assert list(check_site.faults(tmp_path)) == [f"a.html {fault}"]


def test_the_check_reads_stylesheets(check_site, tmp_path):
    (tmp_path / "a.css").write_text("@import 'https://elsewhere.org/fonts.css';")
    assert list(check_site.faults(tmp_path)) == ["a.css loads https://elsewhere.org/fonts.css"]
