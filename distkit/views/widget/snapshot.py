"""Static pictures: in a notebook, where they stay when the kernel is gone, and as files.

A view is two outputs of its cell: a picture, which every front end can show, and the widget,
which no front end can show without its kernel. A style sheet in the first decides which of
the two is seen: the picture until the widget is drawn, and again when there is none. In one
output, JupyterLab would prefer the widget even where all it can say is "model not found", and
nbconvert would fetch a widget manager from the network.

Files are SVG, PNG or PDF; Typst turns SVG into the other two.
"""

from __future__ import annotations

import base64
import re
import threading
import zlib
from collections.abc import Callable
from functools import cache, partial
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distkit.errors import DistkitError
from distkit.views.scene import svg

#: The output with the picture, in JupyterLab, in Notebook and in pages that nbconvert makes.
_PICTURE = ".jp-OutputArea-child:has(> .jp-OutputArea-output > .distkit-still)"
#: A widget that is drawn: what JupyterLab, and the widget manager of such a page, put there.
_DRAWN = ":is(.jp-OutputArea-output > .lm-Widget > *, .widget-subarea > * > *)"
#: JupyterLab has looked for the widget and knows none: its kernel has ended.
_UNKNOWN = "+ .jp-OutputArea-child > .jp-OutputArea-output.jupyter-widgets"
_STYLE = (
    f"{_PICTURE}:has(+ .jp-OutputArea-child {_DRAWN}), "
    f"{_PICTURE} + .jp-OutputArea-child:not(:has({_DRAWN})), .distkit-ended {{ display: none; }} "
    f"{_PICTURE}:has({_UNKNOWN}) .distkit-ended {{ display: block; }}"
)
#: Below what shows something that went on; where styles are taken out (GitHub) it is true as well.
_ENDED = '<div class="distkit-ended">the kernel has ended</div>'
#: A picture is on white paper; in a dark JupyterLab its lightness is turned over.
_DARK = (
    'body[data-jp-theme-light="false"] .distkit-picture '
    "{ filter: invert(0.93) hue-rotate(180deg); }"
)
#: One that has a dark version shows that: ranks keep the colours that views give them there.
_ON_DARK = (
    ' body[data-jp-theme-light="false"] .distkit-picture.{} '
    "{{ filter: none; content: url(data:image/svg+xml;base64,{}); }}"
)


#: In place of a view that was folded: its widget is the next output.
_FOLDED = ".jp-OutputArea-child:has(.distkit-folded) + .jp-OutputArea-child { display: none; }"


class NotebookSnapshot:
    """The static picture beside a widget.

    Args:
        draw: makes the picture as it is now, SVG, and a text for terminals.
        goes_on: whether what it shows has not ended.
    """

    def __init__(
        self, draw: Callable[[], tuple[str, str]], goes_on: Callable[[], bool] = lambda: False
    ) -> None:
        self._draw, self._goes_on, self._handle = draw, goes_on, None
        self._sending = threading.Lock()

    def show(self, widget: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Display the picture and the widget in the cell that runs.

        Args:
            widget: what the widget's ``_repr_mimebundle_`` returned.
            metadata: of that.
        """
        from IPython.display import display

        view = {kind: value for kind, value in widget.items() if kind.endswith("+json")}
        _unheard()
        with self._sending:  # what is renewed meanwhile is sent after it
            self._handle = display(self.bundle(), raw=True, display_id=True)
        if view:  # the empty HTML is for those that show no widgets
            display({**view, "text/html": ""}, raw=True, metadata=metadata or {})

    def renew(self) -> None:
        """Put the picture as it is now into the notebook, if it was displayed there.

        From any thread: of several at once, the last to look at what is drawn is the last to send.
        """
        with self._sending:
            if self._handle is not None:
                self._handle.update(self.bundle(), raw=True)
                _unheard().snapshots.add(self)

    def fold(self, line: str) -> None:
        """Put one line in the place of the picture and the widget, which opens to the picture."""
        drawn, _ = self._draw()
        bundle = as_picture(drawn, line, around=partial(_folded, line))
        with self._sending:
            if self._handle is not None:
                self._handle.update(bundle, raw=True)

    def remove(self) -> None:
        """Take the picture and the widget out of the notebook again."""
        with self._sending:
            if self._handle is not None:
                self._handle.update(_GONE, raw=True)

    def bundle(self) -> dict[str, str]:
        """The picture for every kind of front end."""
        return as_picture(*self._draw(), around=self._beside)

    def _beside(self, html: str) -> str:
        """HTML that is seen where the widget is not."""
        ended = _ENDED * self._goes_on()
        return f'<div class="distkit-still"><style>{_STYLE}</style>{html}{ended}</div>'


def _folded(line: str, html: str) -> str:
    """HTML of a line that opens to what is in this HTML."""
    return (
        f'<style>{_FOLDED}</style><details class="distkit-folded"><summary>{escape(line)}'
        f"</summary>{html}</details>"
    )


_GONE = {
    "text/html": f'<style>{_FOLDED}</style><span class="distkit-folded"></span>',
    "text/plain": "",
}


class _Unheard:
    """Snapshots that were renewed while no cell ran, to be renewed in the next one.

    A program that runs a notebook (nbclient) hears only what belongs to the cell that runs.
    """

    def __init__(self) -> None:
        from IPython import get_ipython

        self.snapshots = set[NotebookSnapshot]()
        if (shell := get_ipython()) is not None:
            shell.events.register("pre_run_cell", self._renew)
            shell.events.register("post_run_cell", self._forget)

    def _renew(self, *_: object) -> None:
        for snapshot in list(self.snapshots):
            snapshot.renew()

    def _forget(self, *_: object) -> None:
        self.snapshots.clear()


_unheard = cache(_Unheard)


class HtmlSnapshot(NotebookSnapshot):
    """The same of what is drawn as HTML, which ``draw`` makes in place of SVG.

    ``alone``: there is no widget beside it.
    """

    alone = False

    def bundle(self) -> dict[str, str]:
        """What stays, for every kind of front end."""
        html, text = self._draw()
        return {"text/html": html if self.alone else self._beside(html), "text/plain": text}


def as_picture(
    drawn: str, text: str, around: Callable[[str], str] = str, dark: str = ""
) -> dict[str, str]:
    """A picture for every kind of front end.

    As an image in HTML it follows JupyterLab's theme, and is shown in notebooks that are not
    trusted, too.

    Args:
        drawn: the picture, SVG.
        text: the same for terminals; its first line describes the image.
        around: puts the image into what surrounds it.
        dark: a small picture on dark paper; else the lightness of ``drawn`` is turned over.
    """
    letters, style = _letters(drawn), _DARK
    name = f"distkit-{zlib.crc32(drawn.encode()):x}"
    if dark:
        style += _ON_DARK.format(name, _letters(dark))
    image = (
        f'<img class="distkit-picture {name}" alt="{escape(text.partition(chr(10))[0])}" '
        f'style="max-width:100%" src="data:image/svg+xml;base64,{letters}">'
    )
    return {
        "text/html": around(f"<style>{style}</style>{image}"),
        "image/svg+xml": drawn,
        "text/plain": text,
    }


def _letters(drawn: str) -> str:
    return base64.b64encode(drawn.encode()).decode("ascii")


#: Pixels of a PNG to a pixel of the picture.
SHARP = 2

_SIZE = re.compile(r'\bwidth="(\d+)" height="(\d+)"')
_PAGE = """#set page(width: auto, height: auto, margin: 0pt, fill: none)
#image(bytes(sys.inputs.picture), format: "svg", width: {width}pt)
"""


def save(picture: str, path: Path, *, dark: bool = False, width: int | None = None) -> Path:
    """Write a static picture.

    Args:
        picture: an SVG document from a static painter.
        path: ends in ``.svg``, ``.png`` or ``.pdf``.
        dark: on dark paper.
        width: in pixels, in a PDF in points; None: the picture's own, in a PNG twice that.

    Raises:
        ValueError: the path ends in anything else, or the width is not positive.
        DistkitError: typst, which makes PNG and PDF, is not installed.

    >>> import tempfile
    >>> square = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'
    >>> save(square, Path(tempfile.mkdtemp(), "square.svg"), width=16).read_text()
    '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16"/>'
    """
    kind = path.suffix.lower()
    if kind not in (".svg", ".png", ".pdf"):
        raise ValueError(
            f"{path}: a picture is saved as SVG, PNG or PDF. Use a name that ends in .svg, .png "
            "or .pdf, or trace.to_html(path) for a page to replay."
        )
    if width is not None and width <= 0:
        raise ValueError(f"width={width} is not possible. Leave width out for its own.")
    drawn = svg.dark(picture) if dark else picture
    if kind == ".svg":
        path.write_text(drawn if width is None else _scaled(drawn, width), encoding="utf-8")
    else:
        path.write_bytes(_compiled(drawn, kind[1:], width))
    return path


def _size(picture: str) -> tuple[int, int]:
    found = _SIZE.search(picture)
    assert found is not None, "every painter tells the size of its picture"
    return int(found[1]), int(found[2])


def _scaled(picture: str, width: int) -> str:
    across, down = _size(picture)
    return _SIZE.sub(f'width="{width}" height="{round(width * down / across)}"', picture, count=1)


def _compiled(picture: str, kind: str, width: int | None) -> bytes:
    """The picture on a page of its size; at 72 pixels per inch a point is a pixel."""
    try:
        import typst
    except ImportError as error:
        raise DistkitError(
            f"{kind.upper()} files are made by typst, which is not installed here. "
            "Run: pip install typst. A name that ends in .svg does not need it."
        ) from error
    across = width or _size(picture)[0] * (SHARP if kind == "png" else 1)
    return typst.compile(
        _PAGE.format(width=across).encode(),
        format="png" if kind == "png" else "pdf",
        ppi=72,
        sys_inputs={"picture": picture},
        font_paths=typst.Fonts(font_paths=_fonts()),
    )


def _fonts() -> list[str]:
    """matplotlib's fonts, for machines that have none of their own."""
    package = find_spec("matplotlib")
    if package is None or package.origin is None:
        return []
    return [str(Path(package.origin).parent / "mpl-data/fonts/ttf")]
