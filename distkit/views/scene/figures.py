"""Figures of matplotlib, which a notebook shows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new(width: float, height: float, **options: Any) -> Figure:
    """A figure that pyplot does not know, and that a cell shows as a picture all the same.

    Args:
        width: [inches].
        height: [inches].
        options: of ``matplotlib.figure.Figure``.
    """
    from matplotlib.figure import Figure

    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    if shell is not None and Figure not in shell.display_formatter.formatters["image/png"]:
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})  # as pyplot would: else cells show its size only
    return Figure(figsize=(width, height), layout="constrained", **options)
