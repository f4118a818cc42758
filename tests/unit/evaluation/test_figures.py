"""Tests of figures: a common color scale, intervals, and heads and layers counted from 1."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffmegatron.evaluation.figures import plot_bars, plot_curves, plot_maps
from diffmegatron.evaluation.suite import Estimate


def test_maps_share_a_labelled_scale_and_count_from_one():
    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    tables = {"a": np.array([[0.1, 0.2, 0.3]] * 2), "b": np.array([[0.0, 0.8, 0.1]] * 2)}
    grid = figure.subplots(1, 2)
    plot_maps(figure, grid, tables, xlabel="head", ylabel="layer", quantity="share")
    canvas.draw()
    images = [axes.images[0] for axes in grid]
    assert {image.get_clim() for image in images} == {(0, 0.8)}
    for axes in grid:
        labels = [each.get_text() for each in axes.get_xticklabels()]
        assert [label for label in labels if label in "123"] == ["1", "2", "3"]
        assert all(label.lstrip("\N{MINUS SIGN}").isdigit() for label in labels)
    assert figure.axes[-1].get_ylabel() == "share"


def test_bars_and_curves_have_their_intervals():
    estimates = [Estimate(0.5, 0.4, 0.7, 20), Estimate(0.25, None, None, 1)]
    bars, curves = Figure().subplots(1, 2)
    plot_bars(bars, ["one", "two", "three"], {"a": [*estimates, None], "b": [None] * 3}, "accuracy")
    plot_curves(curves, {"a": list(enumerate(estimates)), "b": []}, "shots", "accuracy")
    for axes in (bars, curves):
        ends = [segment[:, 1] for line in axes.collections for segment in line.get_segments()]
        assert [list(each) for each in ends] == [[pytest.approx(0.4), 0.7], [0.25, 0.25]]
    assert [each.get_height() for each in bars.patches] == [0.5, 0.25]
    assert curves.get_xlabel() == "shots"
