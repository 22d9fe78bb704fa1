"""matplotlib figures in a notebook that has not configured pyplot."""

from __future__ import annotations

import subprocess
import sys

import matplotlib.pyplot as plt

from distkit.views.scene.theme import RANKS_LIGHT

PROGRAM = """
from IPython.core.interactiveshell import InteractiveShell
from distkit.views.scene import figures

formatter = InteractiveShell.instance().display_formatter
formatter.active_types = formatter.format_types  # as in a notebook; a terminal has plain text
figure = figures.new(1, 1)
figure.subplots()
print(sorted(formatter.format(figure)[0]))
"""


def test_cell_shows_a_figure_as_a_picture() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout == "['image/png', 'text/plain']\n"


def test_style_has_the_colours_of_ranks() -> None:
    with plt.style.context("distkit.plots"):
        colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    assert colors == list(RANKS_LIGHT)
