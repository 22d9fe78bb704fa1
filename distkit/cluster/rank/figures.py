"""matplotlib's backend on the ranks: ``plt.show()`` sends the figure to the notebook.

As in a notebook, figures that are open when the function returns are shown, too.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from distkit.cluster.rank.rank import Rank

FigureCanvas, FigureManager = FigureCanvasAgg, FigureManagerBase


def show(*args: Any, **kwargs: Any) -> None:
    """Send the open figures to the notebook, and close them."""
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", bbox_inches="tight")
        Rank.here.show(file.getvalue())
    pyplot.close("all")
