"""The figures: reproducible to the byte, legible for any run, without changes to matplotlib's global state."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg

from bprong.experiments.figures import KNOWN, PALETTE, PLOTS, SIZE, draw, figure, image, styles, svg_text
from experiments.made_up_runs import INF, NAN, run_of

TRAIN, VALIDATION, TRAIN_TIME, VALIDATION_TIME = PLOTS
RUN = {"sgd": [2.3, 2.2, 1.5], "bn": [2.3, 0.25, 0.15], "prong": [2.3, 0.16, 0.08], "bprong": [2.3, 0.06, 0.02],
       "bprong-fast": [2.3, 0.055, 0.02]}  # fmt: skip


def seeds(run, n=3, **options):
    return [row for seed in range(n) for row in run_of(scaled(run, 1 + 0.1 * seed), seed, **options)]


def scaled(run, factor):
    return {name: [factor * value for value in values] for name, values in run.items()}


def axes_of(rows, plot=TRAIN):
    return figure(rows, plot).axes[0]


def legends_of(rows, plot=TRAIN):
    return [[text.get_text() for text in legend.get_texts()] for legend in figure(rows, plot).legends]


def legend_of(rows, plot=TRAIN):
    return legends_of(rows, plot)[0]


@pytest.mark.rest
def test_four_figures_are_written_as_png_and_svg(tmp_path):
    paths = draw(seeds(RUN), tmp_path)
    names = ["train_loss", "validation_loss", "train_loss_time", "validation_loss_time"]
    assert [path.name for path in paths] == [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path in paths:
        raw = path.read_bytes()
        assert raw.startswith(b"\x89PNG\r\n") if path.suffix == ".png" else ET.fromstring(raw).tag.endswith("svg")


@pytest.mark.parametrize("suffix", [pytest.param("png", marks=pytest.mark.rest), "svg"])
def test_the_same_rows_give_the_same_bytes_with_any_user_settings(suffix):
    first = image(seeds(RUN), TRAIN, suffix)
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "svg.hashsalt": "x", "font.size": 20}):
        assert image(seeds(RUN), TRAIN, suffix) == first
    assert image(seeds(scaled(RUN, 1.5)), TRAIN, suffix) != first
    assert b"dc:date" not in first


def test_matplotlib_settings_are_not_changed():
    before = dict(matplotlib.rcParams)
    image(seeds(RUN), TRAIN, "png")
    assert dict(matplotlib.rcParams) == before
    assert not Gcf.figs  # where pyplot keeps the figures it knows of


def test_recipes_are_in_the_figures_of_the_validation_loss_only():
    rows = run_of(RUN | {"bprong-recipe": [2.3, 0.1, 0.01], "bn-recipe": [2.3, 0.1, 0.01]})
    assert legend_of(rows, VALIDATION)[-2:] == ["BPRONG-recipe", "BN-recipe"]
    assert legend_of(rows, VALIDATION_TIME) == legend_of(rows, VALIDATION)
    for plot in (TRAIN, TRAIN_TIME):
        assert image(rows, plot, "svg") == image(run_of(RUN), plot, "svg")
    assert legend_of(run_of({"bn-recipe": [2.3, 0.1]}), TRAIN) == ["BN-recipe"]  # rather than an empty figure


def test_each_figure_shows_its_column_against_its_axis():
    rows = run_of({"bn": [2.0, 1.0]}, pace=7.0, val={"bn": [4.0, 3.0]})
    found = {plot.name: axes_of(rows, plot).lines[0].get_xydata().tolist() for plot in PLOTS}
    assert found == {
        "train_loss": [[0, 2.0], [600, 1.0]],
        "validation_loss": [[0, 4.0], [600, 3.0]],
        "train_loss_time": [[0, 2.0], [7, 1.0]],
        "validation_loss_time": [[0, 4.0], [7, 3.0]],
    }
    assert axes_of(rows, VALIDATION_TIME).get_xlabel() == "training time (seconds)"
    assert axes_of(rows, VALIDATION_TIME).get_ylabel() == "validation loss (cross-entropy, nats)"
    assert axes_of(rows, TRAIN).get_xlabel() == "iterations (minibatch updates)"


def test_lines_are_medians_and_bands_show_the_range():
    axes = axes_of(seeds({"bn": [2.0, 1.0]}))
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([2.2, 1.1])
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((1.0, 2.4))
    assert len(axes_of(seeds(RUN, 1)).collections) == 0


def test_losses_that_span_a_decade_are_logarithmic():
    assert axes_of(run_of({"bn": [2.0, 0.19]})).get_yscale() == "log"
    assert axes_of(run_of({"bn": [2.0, 0.21]})).get_yscale() == "linear"
    assert axes_of(run_of({"bn": [2.0, 0.0]})).get_yscale() == "linear"


def test_seconds_are_logarithmic_if_the_methods_differ_by_a_decade():
    run = {"sgd": [2.0, 1.0, 0.9], "bn": [2.0, 1.0, 0.9]}
    slow = axes_of(run_of(run, pace={"sgd": 1.0, "bn": 11.0}), TRAIN_TIME)
    assert slow.get_xscale() == "log"
    assert slow.lines[0].get_xdata().tolist() == [1.0, 2.0]  # second 0 has no place on it
    assert axes_of(run_of(run, pace={"sgd": 1.0, "bn": 9.0}), TRAIN_TIME).get_xscale() == "linear"
    assert axes_of(run_of(run, pace={"sgd": 1.0, "bn": 11.0}), TRAIN).get_xscale() == "linear"


def test_every_epoch_has_a_marker_unless_there_are_many():
    (line,) = axes_of(run_of({"bn": [2.0, 1.0]})).lines
    assert (line.get_marker(), line.get_markevery()) == ("^", 1)
    (line,) = axes_of(run_of({"bn": [2.0] * 41})).lines
    assert line.get_markevery() == 6


def crosses(axes):
    return [line.get_xydata()[0].tolist() for line in axes.lines if line.get_marker() == "x"]


def test_a_cross_marks_the_last_finite_loss_of_a_diverged_method():
    rows = run_of({"sgd": [2.0, 1.5, 1.2], "bn": [2.0, 1.0, NAN]})
    assert crosses(axes_of(rows)) == [[600, 1.0]]
    assert crosses(axes_of(run_of(RUN))) == []
    assert legend_of(rows) == ["SGD", "BN (diverged)"]
    partly = rows + run_of({"sgd": [2.0, 1.5, 1.2], "bn": [2.0, 1.0, 0.9]}, seed=1)
    assert legend_of(partly) == ["SGD", "BN (1 of 2 diverged)"]


def test_the_legend_explains_bands_and_crosses_if_there_are_any():
    assert len(legends_of(run_of(RUN))) == 1
    assert legends_of(seeds(RUN))[1] == ["median and range over 3 seeds"]
    diverging = run_of({"bn": [2.0, 1.0, NAN]})
    assert legends_of(diverging)[1] == ["last loss before divergence"]
    assert legends_of(diverging + run_of({"bn": [2.0, 1.0, 0.9]}, seed=1))[1] == [
        "median and range over 2 seeds", "last loss before divergence",
    ]  # fmt: skip


def test_a_diverging_loss_does_not_flatten_the_other_curves():
    axes = axes_of(run_of({"sgd": [2.0, 1.5, 1.2, 1.0], "bn": [2.0, 1e9, 1e18, INF]}))
    bottom, top = axes.get_ylim()
    assert bottom < 1.0
    assert top == 6.0
    assert crosses(axes) == [[1200, 6.0]]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        run_of({"bn": [2.3]}),
        run_of({"bn": [NAN]}),
        run_of({"bn": [2.3, NAN], "sgd": [2.3, INF]}),
        run_of({"bn": [2.3, NAN], "sgd": [2.3, 1.0]}, pace={"bn": 1.0, "sgd": 50.0}),
        run_of({"bn": [2.3, NAN], "sgd": [2.3, 1.0], "prong": [2.3, 1.0]}, pace={"bn": 1, "sgd": 50, "prong": 2}),
        run_of({"bn": [0.0, 0.0]}),
        run_of({"bn": [2.3, 0.1, 0.0]}),
        run_of({"bn": [1.0, 1.0]}, pace=0.0),
        run_of({f"a method with a long name, number {i}": [2.3, 1.0] for i in range(12)}),
    ],
    ids=["none", "untrained", "never", "all diverged", "log time", "first epoch", "zero", "to zero", "no time", "many"],
)
def test_any_run_can_be_drawn(rows):
    assert image(rows, TRAIN_TIME, "svg", text="none").startswith(b"<?xml")


def test_a_run_with_nothing_to_draw_says_so():
    assert "no finite loss" in axes_of([]).texts[0].get_text()
    assert not axes_of(run_of(RUN)).texts


def test_method_names_are_shown_literally():
    odd = ["_hidden", "$x$", "<b>&amp;", "100%\\n"]
    assert legend_of(run_of({name: [2.0, 1.0] for name in odd})) == odd
    svg = svg_text(run_of({name: [2.0, 1.0] for name in odd}), TRAIN)
    svg = ET.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))  # as in HTML
    assert {text.text for text in svg.iter("text")} >= set(odd)


@pytest.mark.parametrize("n", [1, 4, 9])
def test_the_legend_covers_no_curve_and_stays_inside(n):
    chart = figure(seeds({f"bprong-variant-{i}": [2.0, 1.0] for i in range(n)}), TRAIN)
    FigureCanvasAgg(chart).draw()
    legend = chart.legends[0].get_window_extent()
    plot = chart.axes[0].get_window_extent()
    assert legend.y0 >= plot.y1
    assert chart.bbox.x0 <= legend.x0 < legend.x1 <= chart.bbox.x1
    assert legend.y1 <= chart.bbox.y1
    assert chart.bbox.y0 <= chart.legends[1].get_window_extent().y0
    assert chart.legends[1].get_window_extent().y1 <= plot.y0
    assert plot.height > 0.5 * SIZE[1] * chart.dpi


@given(st.lists(st.sampled_from([*KNOWN, *"abcdefghijklmnopqrstuvw"]), unique=True))
def test_no_two_methods_look_the_same(names):
    found = styles(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert all(found[name] == KNOWN[name] for name in names if name in KNOWN)


def contrast(a: str, b: str) -> float:
    """WCAG's contrast of two colours."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_stands_out_on_a_light_and_on_a_dark_page():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#ffffff", "#f0e442") < 3  # the yellow that the palette leaves out
    for light, dark in PALETTE.items():
        assert contrast(light, "#ffffff") >= 3
        assert contrast(dark, "#1c1f25") >= 3
    assert all(style.colour in PALETTE for style in styles(list("abcdefghijklmno")).values())


def test_an_embedded_figure_has_no_external_references_and_unique_ids():
    rows = seeds(RUN, 2)
    texts = [svg_text(rows, plot) for plot in PLOTS]
    ids = [name for text in texts for name in re.findall(r'\bid="([^"]*)"', text)]
    assert ids
    assert len(set(ids)) == len(ids)
    for text in texts:
        assert set(re.findall(r'href="([^"]*)"', text)) <= {f"#{name}" for name in re.findall(r'\bid="([^"]*)"', text)}
        assert not re.search(r"https?:|<style|<metadata|<!DOCTYPE|<script", text)
        assert not re.search(r"(fill|stroke): #", text)  # every colour goes through a variable of the page
        assert text.startswith('<svg role="img" aria-label="')
