"""Provides notebook output other than views: matplotlib figures and a progress bar."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from distkit.views.scene import svg
from distkit.views.scene.theme import GRAY, GRAY_DARK, darkened

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


def register(shell: Any) -> None:
    """Let a shell show figures in distkit's style in the colors of its theme."""
    formatter = shell.display_formatter.formatters["text/html"]
    formatter.for_type_by_name("matplotlib.figure", "Figure", _to_html)


def _to_html(figure: Figure) -> str | None:
    """Return a transparent figure as HTML; None for a figure with a background of its own."""
    from distkit.views.widget.snapshot import as_picture

    if figure.get_facecolor()[3]:
        return None
    return as_picture(to_svg(figure, bbox_inches="tight"), _title(figure))["text/html"]


def _title(figure: Figure) -> str:
    """Return the titles of a figure's charts, or what they plot."""
    titles = (axes.get_title("left") or axes.get_ylabel() for axes in figure.axes)
    return ", ".join(filter(None, titles)) or "plot"


def to_svg(figure: Figure, **options: Any) -> str:
    """Return a figure as an SVG element with the fonts and the color scheme of its page.

    Args:
        figure: the figure.
        options: arguments of ``Figure.savefig``.
    """
    file = io.StringIO()
    fonts = [family.strip("'") for family in svg.FONT.split(", ")]
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "distkit", "font.sans-serif": fonts}
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) | {"Title": _title(figure)}
    with style(settings):
        figure.savefig(file, format="svg", metadata=metadata, **options)
    text = file.getvalue()
    return _COLOR.sub(_both, text[text.index("<svg") :])


#: A color in a style attribute.
_COLOR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")
#: The gray of the style, which is legible on light and dark pages, and the grays of the views.
_NEUTRAL = {"#737b85": (GRAY, GRAY_DARK), "#7b838d": (GRAY, GRAY_DARK)}


def _both(color: re.Match[str]) -> str:
    """Return a color's counterparts in light and dark themes."""
    light, dark = _NEUTRAL.get(color[0], (color[0], darkened(color[0])))
    return f"light-dark({light}, {dark})"


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
