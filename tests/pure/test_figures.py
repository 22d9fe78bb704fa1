"""The matplotlib style of distkit."""

from __future__ import annotations

import matplotlib.pyplot as plt

from distkit.views.scene.theme import RANKS_LIGHT


def test_style_uses_the_colors_of_ranks() -> None:
    with plt.style.context("distkit.plots"):
        colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    assert colors == list(RANKS_LIGHT)
