"""Provides SVG building blocks for the static renderers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from html import escape

from distkit.views.scene.theme import DEEP, GRAY, INK, WARNING_LIGHT, channels, darkened, mixed

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
CODE = "Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"

#: Maximum size of a picture in a notebook, if possible [bytes].
MAX_BYTES = 60_000


def fitting(drawings: Iterable[str]) -> str:
    """Return the first picture of at most MAX_BYTES, or the last one if all are larger."""
    for drawn in drawings:
        if len(drawn.encode()) <= MAX_BYTES:
            break
    return drawn


def notice_color(line: str) -> str:
    """Return the color of a notice; warnings start with an exclamation mark."""
    return WARNING_LIGHT if line.startswith("! ") else GRAY


#: Approximate letter widths of Helvetica, relative to the font size.
_WIDTHS = {
    c: w
    for letters, w in (
        (" fijlt.,:;|'![]()/", 0.3),
        ('r-"*', 0.36),
        ("mMwW@%…→", 0.87),
        ("ABCDEFGHJKLNOPQRSTUVXYZ&", 0.7),
    )
    for c in letters
}


def text_width(text: str, size: float) -> float:
    """Return the approximate width of a text [px]."""
    return size * sum(_WIDTHS.get(c, 0.56) for c in text)


def document(width: float, height: float, title: str, body: str) -> str:
    """Return an SVG document with a light card, so that it is also legible on dark pages."""
    size = (
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        'style="max-width:100%;height:auto"'
    )
    card = (
        f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="12" '
        'fill="#fff" stroke="#dde3e9"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} font-family="{FONT}" '
        f'font-size="12"><title>{escape(title)}</title>{card}{body}</svg>'
    )


def rect(x: float, y: float, w: float, h: float, fill: str, stroke: str, rx: float = 3) -> str:
    """Return a rectangle with its stroke inside the box."""
    if stroke:
        x, y, w, h = x + 0.7, y + 0.7, max(w - 1.4, 0.8), h - 1.4
    radius = min(rx, w / 2, h / 2)
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:.1f}"'
    return f"<rect {shape} {fill}{' ' + stroke if stroke else ''}/>"


def text(x: float, y: float, content: str, color: str, attributes: str = "") -> str:
    """Return one line of escaped text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" {attributes}>{escape(content)}</text>'


def heading(x: float, y: float, title: str, details: str, size: float = 16) -> str:
    """Return a title followed by details in gray."""
    title_span = (
        f'<tspan fill="{INK}" font-size="{size:g}" font-weight="700">{escape(title)}</tspan>'
    )
    details_span = f'<tspan dx="14" fill="{GRAY}">{escape(details)}</tspan>' if details else ""
    return f'<text x="{x:.1f}" y="{y:.1f}">{title_span}{details_span}</text>'


def translated(x: float, y: float, drawn: str) -> str:
    """Return elements, moved right and down."""
    return f'<g transform="translate({x:.1f} {y:.1f})">{drawn}</g>' if x or y else drawn


def line(
    x1: float, y1: float, x2: float, y2: float, color: str, width: float, attributes: str = ""
) -> str:
    """Return a straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"{attributes}/>'


def arrow_head(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    """Return the head of an arrow that ends at (x2, y2)."""
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    size = min(9.0, length)
    bx, by, half = x2 - ux * size, y2 - uy * size, 0.42 * size
    points = ((x2, y2), (bx - uy * half, by + ux * half), (bx + uy * half, by - ux * half))
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{corners}" fill="{color}" stroke="#fff" stroke-width=".8"/>'


_COLOR = re.compile(r'\b((?:fill|stroke)=")(#(?:[0-9a-fA-F]{3}){1,2})(?=")')


def dark(picture: str) -> str:
    """Return the picture in the colors of the dark theme."""
    return _COLOR.sub(lambda match: match[1] + darkened(match[2]), picture)


def themed(picture: str) -> str:
    """Return the picture with a style sheet that makes it dark on dark pages."""
    colors = sorted({(match[1][:-2], match[2]) for match in _COLOR.finditer(picture)})
    rules = (f'[{kind}="{color}"]{{{kind}:{darkened(color)}}}' for kind, color in colors)
    scheme = (
        f":root{{color-scheme:light dark}}@media(prefers-color-scheme:dark){{{''.join(rules)}}}"
    )
    return picture.replace("<title>", f"<style>{scheme}</style><title>", 1)


def tint(color: str, opacity: float) -> str:
    """Blend a color with white; the result is opaque."""
    return mixed(channels(color), (255, 255, 255), opacity)


def readable(color: str) -> str:
    """Return dark ink or white, whichever is more legible on a color."""
    red, green, blue = ((c / 255) ** 2 for c in channels(color))
    return DEEP if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "#fff"
