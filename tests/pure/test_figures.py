"""distkit's matplotlib style."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import select_figure_formats
from matplotlib_inline.backend_inline import _fetch_figure_metadata

from distkit import ipython
from distkit.views.scene.theme import PAPER_DARK, RANKS_LIGHT, channels, mixed, theme


def test_style_uses_the_colors_of_ranks() -> None:
    with plt.style.context("distkit.plots"):
        assert plt.rcParams["axes.prop_cycle"].by_key()["color"] == list(RANKS_LIGHT)


def luminance(color: str) -> float:
    """Return WCAG's relative luminance, without its special case for almost black colors."""
    weights = zip((0.2126, 0.7152, 0.0722), channels(color), strict=True)
    return sum(w * ((c / 255 + 0.055) / 1.055) ** 2.4 for w, c in weights)


def contrast(*colors: str) -> float:
    return (max(map(luminance, colors)) + 0.05) / (min(map(luminance, colors)) + 0.05)


@pytest.mark.parametrize(
    ("name", "paper", "weak"), [("light", "#ffffff", 1.65), ("dark", PAPER_DARK, 2.6)]
)
def test_colors_have_one_meaning_and_a_contrast_of_three(
    name: str, paper: str, weak: float
) -> None:
    ranks, work, warning, values = (
        theme()[name][part] for part in ("ranks", "work", "warning", "values")
    )
    colors = [*ranks, *work.values(), warning]
    assert len({*colors}) == len(colors)
    assert min(contrast(c, paper) for c in (*colors, *RANKS_LIGHT)) >= 3  # plots use the latter
    *ends, zero = values.values()  # a tenth of the largest value has an opacity above 0.49
    assert min(contrast(mixed(channels(c), channels(zero), 0.49), zero) for c in ends) >= weak


def test_figure_in_the_style_has_the_background_and_colors_of_the_page() -> None:
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    ipython.show_as_html(shell)
    select_figure_formats(shell, {"png"})  # as pyplot's backend does
    as_html = shell.display_formatter.formatters["text/html"]
    with plt.style.context("distkit.plots"):
        figure, axes = plt.subplots()
        axes.plot([1, 2])
        axes.set(title="loss")
        assert _fetch_figure_metadata(figure) is None  # the page provides the background
    html = as_html(figure)
    assert 'alt="loss"' in html
    image = base64.b64decode(html.partition("base64,")[2].partition('"')[0]).decode()
    assert "stroke: light-dark(#0072b2, #3D95E0)" in image
    figure.set_facecolor("white")  # as in a user's own style
    assert as_html(figure) is None
    plt.close(figure)
