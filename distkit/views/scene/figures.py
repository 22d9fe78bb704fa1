"""Provides notebook output other than views: matplotlib figures and a progress bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

#: Protects matplotlib's global settings, since widgets draw in several threads.
_drawing = threading.RLock()


@contextmanager
def style(style: str | dict[str, Any] = "distkit.plots") -> Iterator[None]:
    """Use a matplotlib style in this context, or in a function with this decorator."""
    import matplotlib.style

    with _drawing, matplotlib.style.context(style):
        yield


def new(width: float, height: float, **options: Any) -> Figure:
    """Return a figure that cells display as a picture, without registering it with pyplot.

    Args:
        width: width [inches].
        height: height [inches].
        options: arguments of ``matplotlib.figure.Figure``.
    """
    from matplotlib.figure import Figure

    shell = _shell()
    if shell is not None and Figure not in shell.display_formatter.formatters["image/png"]:
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})  # as pyplot does; otherwise cells show the repr
    return Figure(figsize=(width, height), **options)


def _shell() -> Any:
    """Return the running IPython shell, if IPython is imported."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def advance(steps: Sequence[T]) -> Iterator[T]:
    """Iterate over ``steps``; in a notebook, show a progress bar.

    >>> [*advance("abc")]
    ['a', 'b', 'c']
    """
    if not hasattr(_shell(), "kernel"):
        return iter(steps)
    from IPython.display import ProgressBar

    return (step for _, step in zip(ProgressBar(len(steps)), steps, strict=True))
