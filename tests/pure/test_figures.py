"""The matplotlib style of distkit."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import pytest
from matplotlib_inline.backend_inline import _fetch_figure_metadata

from distkit.views.scene.theme import PAPER_DARK, RANKS_LIGHT, channels, theme


def test_style_uses_the_colors_of_ranks() -> None:
    with plt.style.context("distkit.plots"):
        assert plt.rcParams["axes.prop_cycle"].by_key()["color"] == list(RANKS_LIGHT)


def luminance(color: str) -> float:
    """Return the relative luminance, as in WCAG for colors that are not almost black."""
    linear = (((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels(color))
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("name", "paper"), [("light", "#ffffff"), ("dark", PAPER_DARK)])
def test_colors_have_one_meaning_and_a_contrast_of_three(name: str, paper: str) -> None:
    ranks, work, warning = (theme()[name][part] for part in ("ranks", "work", "warning"))
    colors = [*ranks, *work.values(), warning]
    assert len({*colors}) == len(colors)
    steps = [  # plots have the same colors on both papers
        math.log((luminance(c) + 0.05) / (luminance(paper) + 0.05)) for c in (*colors, *RANKS_LIGHT)
    ]
    assert min(map(abs, steps)) >= math.log(3)


def test_style_leaves_the_background_to_the_page() -> None:
    with plt.style.context("distkit.plots"):
        figure, axes = plt.subplots()
        axes.plot([1, 2])
        assert _fetch_figure_metadata(figure) is None
    plt.close(figure)
