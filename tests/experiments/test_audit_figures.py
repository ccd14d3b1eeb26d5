"""The figures of the audit: the whole matrices, the enlarged windows, the eigenvalues."""

from __future__ import annotations

import pytest
import torch

from bprong.experiments.audit_figures import NETWORKS, PIXELS, WINDOW, eigenvalues_figure, matrices_figure
from bprong.experiments.figures import render

SIZES = [400, 60, 50]
KINDS = ("exact", "kronecker", "block")


def identities(size, kinds=KINDS):
    return {name: {kind: torch.eye(size, dtype=torch.float64) for kind in kinds} for name in NETWORKS}


def images_of(figure):
    return [axes.images[0] for axes in figure.axes if axes.images and axes.get_label() != "<colorbar>"]


def test_one_row_of_whole_matrices_and_one_row_of_windows_for_each_kind():
    figure = matrices_figure(identities(sum(SIZES)), SIZES)
    shapes = [image.get_array().shape for image in images_of(figure)]
    assert shapes == [(PIXELS, PIXELS)] * 3 + [(WINDOW, WINDOW)] * 9
    assert len(images_of(matrices_figure(identities(sum(SIZES), ("exact", "block")), SIZES))) == 9


def test_thin_lines_of_a_large_matrix_remain_visible():
    """log10 of the diagonal is 0 at every pixel that the diagonal crosses, although pixels are larger than entries."""
    whole = images_of(matrices_figure(identities(sum(SIZES)), SIZES))[0].get_array()
    assert (whole.diagonal() == 0).all()
    assert whole[0, -1] < -3


def test_the_window_lies_at_the_boundary_of_the_last_two_layers_and_is_marked():
    figure = matrices_figure(identities(sum(SIZES)), SIZES)
    whole = figure.axes[0]
    window = figure.axes[3]
    assert window.images[0].get_extent() == [436, 484, 484, 436]
    assert [text.get_text() for text in window.get_xticklabels()] == ["2", "3"]
    assert [text.get_text() for text in whole.get_xticklabels()] == ["1", "2", "3"]
    (square,) = whole.patches
    assert (square.get_xy(), square.get_width()) == ((436, 436), WINDOW)
    assert whole.get_xlabel() == "□ enlarged below"


@pytest.mark.parametrize("sizes", [[12], [3, 4]])
def test_a_matrix_smaller_than_the_window_is_shown_whole(sizes):
    images = images_of(matrices_figure(identities(sum(sizes)), sizes))
    assert {image.get_array().shape for image in images} == {(sum(sizes), sum(sizes))}


def test_eigenvalues_are_drawn_from_the_largest_and_explained_in_the_legend():
    figure = eigenvalues_figure({name: torch.tensor([0.0, 0.5, 4.0]) for name in NETWORKS}, "title")
    axes = figure.axes[0]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([4.0, 0.5, 1e-12])
    assert axes.get_ylim() == pytest.approx((0.5 / 3, 12.0))
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["within a factor of two of one", *NETWORKS.values()]
    assert axes.get_ylabel() == "eigenvalue"


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.rest
def test_the_same_matrices_give_the_same_bytes(suffix):
    first, second = (render(lambda: matrices_figure(identities(30), [30]), suffix, {"svg.hashsalt": "a"}) for _ in "ab")
    assert first == second
