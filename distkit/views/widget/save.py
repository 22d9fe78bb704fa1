"""Static pictures as files: SVG, PNG, PDF. Typst turns SVG into the other two."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from distkit.errors import DistkitError
from distkit.views.scene import svg

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
            "Run: pip install typst. A name that ends in .svg needs nothing."
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
