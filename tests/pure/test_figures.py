"""The matplotlib style of distkit."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib_inline.backend_inline import _fetch_figure_metadata

from distkit.views.scene.theme import RANKS_LIGHT


def test_style_uses_the_colors_of_ranks() -> None:
    with plt.style.context("distkit.plots"):
        colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    assert colors == list(RANKS_LIGHT)


def test_style_leaves_the_background_to_the_page() -> None:
    with plt.style.context("distkit.plots"):
        figure, axes = plt.subplots()
        axes.plot([1, 2])
        assert _fetch_figure_metadata(figure) is None
    plt.close(figure)
