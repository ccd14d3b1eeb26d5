"""The report: its contents, its escaping, and that a real browser fetches nothing."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bprong.experiments import report
from bprong.experiments.records import label
from bprong.experiments.report import page, terminal_comparison, terminal_verdict, write_report
from bprong.experiments.verdict import Claim, verdict
from experiments.made_up_runs import NAN, run_of

LOSSES = {
    "sgd": [2.3, 2.2, 1.5],
    "bn": [2.3, 0.25, 0.15],
    "prong": [2.3, 0.16, 0.08],
    "bprong": [2.3, 0.06, 0.02],
}
HEADINGS = ["Verdict", "Figures", "Losses and times", "Seconds to reach a training loss",
            "What the paper does not state", "Configuration"]  # fmt: skip
RUN = {
    "config": {"activation": "relu", "methods": ["sgd", "bn"], "whitening": {"prong": {"forward_every": 100}}},
    "versions": {"torch": "2.13.0"},
    "threads": 2,
    "commit": None,
    "data": {"name": "MNIST", "notice": None},
}
CSP = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


class Reader(HTMLParser):
    """The tags, the attributes and the visible words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(f"{word} " for word in self.words).split())


@pytest.fixture
def no_figures(monkeypatch):
    """The figures have their own tests and take most of the time."""
    monkeypatch.setattr(report, "svg_text", lambda rows, plot: "<svg></svg>")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A full report: three seeds, a user-defined method, a diverged method, and a notice."""
    rows = [row for seed in range(3) for row in run_of(LOSSES | {"my-own": [2.3, 1.0, 0.9]}, seed)]
    rows += [row for seed in range(3) for row in run_of({"adam": [2.3, 0.2, NAN]}, seed)]
    notice = "NOT MNIST: digits. Tried:\n  https://127.0.0.1/a-rather-long-address-that-does-not-break/: no answer"
    return write_report(tmp_path_factory.mktemp("report"), rows, RUN | {"data": {"name": "digits", "notice": notice}})


def test_the_page_has_no_external_references(written):
    text = written.read_text(encoding="utf-8")
    found = Reader(text)
    assert not {"script", "link", "a", "img", "iframe", "object", "embed", "base"} & set(found.tags)
    assert not re.search(r"url\((?!#)|@import", text)
    targets = [value for name, value in found.attributes if name in ("src", "href", "xlink:href", "srcset", "action")]
    assert targets
    assert all(target.startswith("#") for target in targets)
    assert "default-src 'none'" in CSP.search(text).group()
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]


def test_tags_are_closed_in_order(written):
    """Browsers accept unclosed tags, but lay them out differently."""
    stack = []
    for end, tag in re.findall(r"<(/?)([a-z][a-z0-9]*)\b[^>]*?(?<!/)>", written.read_text(encoding="utf-8")):
        if tag in ("meta", "br"):
            continue
        assert not end or stack.pop() == tag
        stack += [] if end else [tag]
    assert stack == []


def row_of(text: str, method: str, table: int) -> list[str]:
    """The cells of a method's row in the first (losses) or second (loss levels) table."""
    body = text.split("<tbody>")[table + 1]
    row = next(row for row in body.split("<tr>") if f"</span>{method}<" in row)
    return [" ".join(re.sub("<[^>]*>", " ", cell).split()) for cell in re.findall("<td.*?</td>", row)]


@pytest.mark.usefixtures("no_figures")
def test_the_table_has_the_losses_of_the_run():
    rows = run_of({"bn": [2.3, 0.5, 0.2, 0.3]}, pace=1.5, val={"bn": [2.3, 0.6, 0.7, 0.8]})
    assert row_of(page(rows, {}), "BN", 0) == [
        "0.500", "0.200 (2)", "0.300", "0.600", "0.600 (1)", "0.800", "62.50 % (1)", "55.56 %", "1.50",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_figures")
def test_the_table_names_a_diverged_method():
    text = page(run_of({"bn": [2.3, 0.5, NAN], "sgd": [2.3, 2.0, 1.0]}), {})
    assert row_of(text, "BN", 0) == [
        "0.500", "0.500 (1)", "diverged", "0.500", "0.500 (1)", "diverged", "66.67 % (1)", "—", "1.00",
    ]  # fmt: skip
    assert "<small>diverged at epoch 2</small>" in text


@pytest.mark.usefixtures("no_figures")
def test_the_table_of_loss_levels_marks_the_shortest_time_and_levels_not_reached():
    text = page(run_of({"bn": [2.3, 0.5], "mine": [2.3, 0.9]}), {})
    assert row_of(text, "BN", 1)[:3] == ["0.546", "1.00", "—"]
    assert row_of(text, "mine", 1)[:3] == ["0.888", "—", "—"]
    assert '<td class="best">0.546</td><td class="best">1.00</td><td>—</td>' in text
    assert text.count('class="best"') == 2


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("losses", "summary", "marks"),
    [
        (LOSSES, "All 4 of the paper’s claims hold in this run.", ["holds"] * 4),
        (LOSSES | {"bprong": [2.3, 2.25, 2.25]}, "in this run: 4 not confirmed.", ["fails"] * 4),
        ({name: LOSSES[name] for name in ("bn", "bprong")}, ": 1 confirmed, 3 not measured.", ["none"] * 3 + ["holds"]),
        ({"bn": [2.3, 0.2]}, "in this run: 4 not measured.", ["none"] * 4),
    ],
    ids=["all", "none", "some", "unmeasured"],
)  # fmt: skip
def test_the_verdict_is_summarized_in_words(losses, summary, marks):
    text = page(run_of(losses), RUN)
    assert summary in text
    found = re.findall(r'class="mark (\w+)">([^<]*)<', text)
    words = {"holds": "✓ holds", "fails": "✗ does not hold", "none": "○ not measured"}
    assert found == [(mark, words[mark]) for mark in marks]
    for claim in verdict(run_of(losses)):
        assert html.escape(claim.measured) in text


@pytest.mark.usefixtures("no_figures")
def test_the_banner_is_shown_only_for_substitute_data():
    assert 'class="banner"' not in page([], RUN)
    text = page([], {"data": {"notice": "NOT <MNIST>\nbecause\n  of & this"}})
    assert "<strong>NOT &lt;MNIST&gt;</strong><span>because\n  of &amp; this</span>" in text
    assert text.index('class="banner"') < text.index("<h1>")


@pytest.mark.usefixtures("no_figures")
def test_everything_in_run_json_is_shown():
    words = Reader(page(run_of(LOSSES), RUN)).text
    for shown in ("threads 2", "commit —", "torch 2.13.0", "whitening.prong.forward_every 100", "methods sgd, bn"):
        assert shown in words
    assert "MNIST · SGD, BN, PRONG, BPRONG · 2 epochs · 1 seed" in words


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("run", [{}, {"config": None, "data": "gone", "versions": []}, {"config": {"activation": {}}}])
def test_a_report_does_not_need_run_json(run):
    assert [heading for heading in HEADINGS if f"<h2>{heading}</h2>" not in page([], run)] == []


fragments = st.sampled_from(["<b>", "</td>", "<script>", "&lt;", "&#65;", '"', "'", "$title", "${x}", "<!--", "-"])
letters = st.characters(blacklist_categories=["Cs", "Cc", "Z"])
hostile = st.lists(fragments | letters, min_size=1, max_size=6).map("".join)


@given(name=hostile, key=hostile, value=hostile)
def test_all_values_are_escaped(name, key, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "svg_text", lambda rows, plot: "<svg></svg>")
        given_text = page(
            run_of({name: [2.3, 1.0]}), {"config": {key: value}, "data": {"name": value, "notice": value}}
        )
        plain_text = page(run_of({"x": [2.3, 1.0]}), {"config": {"x": "x"}, "data": {"name": "x", "notice": "x"}})
    found = Reader(given_text)
    assert found.tags == Reader(plain_text).tags
    assert {label(name), key, value} <= set(found.words)
    assert f"{value} · {label(name)} · 1 epoch · 1 seed" in found.words


def test_a_name_that_is_not_utf8_does_not_stop_the_report(tmp_path, no_figures):
    assert "\\udc80" in write_report(tmp_path, [], {"data": {"name": "a\udc80"}}).read_text(encoding="utf-8")


def test_the_verdict_for_a_terminal():
    claims = [Claim("A", "one", True), Claim("B", "two; three", False), Claim("C", "four", None)]
    assert terminal_verdict(claims).splitlines() == [
        "✓ holds          A", "                 one",
        "✗ does not hold  B", "                 two", "                 three",
        "○ not measured   C", "                 four",
    ]  # fmt: skip
    assert terminal_verdict([]) == ""


@pytest.mark.usefixtures("no_figures")
def test_the_drop_in_optimizer_is_below_the_verdict_and_not_counted_in_it():
    rows = run_of(LOSSES | {"bprong-fast": [2.3, 0.05, 0.01]})
    text = page(rows, {})
    assert "All 4 of the paper’s claims hold" in text
    assert text.index('class="claims') < text.index("<h3>The drop-in optimizer") < text.index("<h2>Figures")
    assert "0.0100 (BPRONG 0.0200, ratio 0.50)" in text
    assert "<h3>" not in page(run_of(LOSSES), {})
    assert terminal_comparison("Title", [("a", "1"), ("b", "2; 3")]).splitlines() == [
        "", "Title", "  a: 1", "  b: 2", "      3",
    ]  # fmt: skip
    assert terminal_comparison("Title", []) == ""


@pytest.mark.usefixtures("no_figures")
def test_a_recipe_has_a_row_in_the_table_and_is_not_counted_in_the_verdict():
    text = page(run_of(LOSSES | {"bprong-recipe": [2.3, 0.05, 0.01], "bn-recipe": [2.3, 0.05, 0.02]}), {})
    assert "All 4 of the paper’s claims hold" in text
    assert text.index('class="claims') < text.index("<h3>With a learning-rate schedule") < text.index("<h2>Figures")
    assert text.count("BPRONG-recipe</th>") == 2  # losses, and seconds to reach a training loss
    assert "Recipes are in the figures of the validation loss only" in text
    assert "those of their averaged weights" in text
    assert "averaged" not in page(run_of(LOSSES), {})


@pytest.fixture(scope="module")
def browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    return found or pytest.skip(f"none of {', '.join(names)} is installed")


def output_of(command: list[str], seconds: float) -> str:
    """The output of a program; after a timeout it is killed with all its child processes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0
    return output.decode()


def test_a_program_that_hangs_is_killed_with_its_child_processes(tmp_path):
    """A child process holds a pipe open for writing. It is read to its end once nobody does so."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            output_of(["sh", "-c", f"sleep 60 > {pipe} & sleep 60"], seconds=0.3)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)  # this process has it open
        os.close(writer)
        until = time.monotonic() + 30
        while not is_at_its_end(reader) and time.monotonic() < until:
            time.sleep(0.01)
        assert is_at_its_end(reader)
    finally:
        os.close(reader)


def is_at_its_end(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def visit(browser: str, path: Path, folder: Path) -> tuple[str, list[str]]:
    """The DOM of a page in a real browser, and the addresses that the page made it ask for.

    Chromium's network log names the initiator of each request: an origin (`null` for a page from disk, whose origin is
    opaque), or "not an origin" for what the browser does of its own accord. Those of the second kind are not the
    page's; they are also kept from leaving the machine, by letting no name resolve. The page itself is read from disk
    and never becomes a network request.
    """
    log = folder / "net.json"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--no-proxy-server",
             "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'profile'}",
             f"--log-net-log={log}", "--dump-dom"]  # fmt: skip
    dom = output_of([browser, *flags, path.as_uri()], seconds=60)
    record = json.loads(log.read_text(encoding="utf-8"))
    start = record["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    starts = [event["params"] for event in record["events"] if event["type"] == start and "url" in event["params"]]
    return dom, [p["url"] for p in starts if p.get("initiator") != "not an origin"]


def test_a_browser_renders_the_page_and_fetches_nothing(browser, written, tmp_path):
    text = written.read_text(encoding="utf-8")
    # Without its policy, or a request that the policy stopped would go unseen.
    bare = tmp_path / "bare.html"
    bare.write_text(CSP.sub("", text), encoding="utf-8")
    dom, requests = visit(browser, bare, tmp_path)
    assert requests == []
    assert [heading for heading in HEADINGS if f"<h2>{heading}</h2>" not in dom] == []
    assert dom.count('<svg role="img"') == 4
    assert dom.count("my-own") >= 6  # in four figures and two tables


def framed(width: int, source: str) -> str:
    return f'<iframe style="width: {width}px; height: 800px" srcdoc="{html.escape(source)}"></iframe>'


def test_a_page_that_fetches_is_caught_and_the_policy_stops_it(browser, tmp_path):
    policy = CSP.search(page([], {})).group()
    image = '<!doctype html>{}<img src="http://127.0.0.1:9/{}.png">'
    path = tmp_path / "page.html"
    frames = framed(390, image.format("", "open")) + framed(390, image.format(policy, "closed"))
    path.write_text(f"<!doctype html>{frames}", encoding="utf-8")
    assert visit(browser, path, tmp_path)[1] == ["http://127.0.0.1:9/open.png"]


def test_no_page_is_wider_than_its_window(browser, written, tmp_path):
    """Checked in frames of phone and desktop width; a page that is too wide shows that the check works."""
    text = written.read_text(encoding="utf-8")
    wide = '<!doctype html><div style="width: 900px">wide</div>'
    text = text.replace("<details ", "<details open ")
    frames = "".join(framed(*frame) for frame in ((320, text), (390, text), (1280, text), (390, wide)))
    measure = """<script>onload = () => document.body.dataset.over = [...document.querySelectorAll("iframe")].map(
        f => { const e = f.contentDocument.documentElement; return e.scrollWidth > e.clientWidth })</script>"""
    harness = tmp_path / "frames.html"
    harness.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{measure}", encoding="utf-8")
    dom, _ = visit(browser, harness, tmp_path)
    assert 'data-over="false,false,false,true"' in dom
