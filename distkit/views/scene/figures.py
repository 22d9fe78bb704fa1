"""What a notebook shows beside views: matplotlib's figures, and a bar while a cell waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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

    shell = _shell()
    if shell is not None and Figure not in shell.display_formatter.formatters["image/png"]:
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})  # as pyplot would: else cells show its size only
    return Figure(figsize=(width, height), layout="constrained", **options)


def _shell() -> Any:
    """The running IPython, if it was imported at all."""
    found = sys.modules.get("IPython")
    return found.get_ipython() if found is not None else None


T = TypeVar("T")


def advance(steps: Sequence[T]) -> Iterator[T]:
    """Iterate over ``steps``; in a notebook a bar shows how many of them are done.

    >>> [*advance("abc")]
    ['a', 'b', 'c']
    """
    if not hasattr(_shell(), "kernel"):
        yield from steps
        return
    from IPython.display import ProgressBar

    bar = ProgressBar(len(steps))
    bar.display()
    for done, step in enumerate(steps, 1):
        yield step
        bar.progress = done
