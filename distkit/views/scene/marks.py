"""Defines pictures as timed marks.

A mark is a drawing with a position, begin and end times, and optionally a target position. A view
computes its marks once, in Python. Two renderers draw the marks that are visible at a moment:
js/marks.js in the browser, and renderer.py as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar, cast

from distkit.views.scene.frame import Json
from distkit.views.scene.theme import MARKS

#: A shape of a drawing: SVG tag, class of ``theme.MARKS``, lane, attributes, text. The lane selects
#: one of eight colors. Positions are relative to the mark. Shapes are cached.
Shape = tuple[str, str, int, tuple[tuple[str, str | float], ...], str]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def cached_drawing(make: F) -> F:
    """Cache the drawings that a function returns."""
    return cast(F, lru_cache(1 << 13)(make))


@cached_drawing
def rect(
    w: float,
    h: float,
    style: str,
    *,
    x: float = 0,
    y: float = 0,
    r: float = 0,
    lane: int = 0,
    opacity: float = 0,
) -> Shape:
    """Return a rectangle with its upper left corner at x, y; ``opacity`` overrides the style's."""
    attributes = {"x": x, "y": y, "width": w, "height": h, "rx": r, "fill-opacity": opacity}
    return _shape("rect", style, lane, attributes)


@cached_drawing
def circle(r: float, style: str, *, x: float = 0, y: float = 0, lane: int = 0) -> Shape:
    """Return a circle of radius r, centered at x, y."""
    return _shape("circle", style, lane, {"cx": x, "cy": y, "r": r})


@cached_drawing
def path(d: str, style: str, *, lane: int = 0, opacity: float = 0) -> Shape:
    """Return a line or an area from an SVG path; ``opacity`` overrides the style's."""
    return _shape("path", style, lane, {"d": d, "fill-opacity": opacity})


@cached_drawing
def text(
    content: str,
    style: str,
    *,
    x: float = 0,
    y: float = 0,
    anchor: str = "",
    lane: int = 0,
    size: float = 0,
) -> Shape:
    """Return one line of text.

    ``anchor`` is "middle", "end" or "" for the start; ``size`` overrides the style's font size.
    """
    attributes: dict[str, str | float] = {"x": x, "y": y, "font-size": size, "text-anchor": anchor}
    return _shape("text", style, lane, attributes, content)


@cached_drawing
def letters(content: str, style: str, positions: tuple[float, ...], *, y: float = 0) -> Shape:
    """Return the letters of one line, each centered at its x coordinate."""
    coordinates = " ".join(f"{x:g}" for x in positions)
    return _shape("text", style, 0, {"x": coordinates, "y": y, "text-anchor": "middle"}, content)


@cached_drawing
def title(content: str, *, aloud: bool = False) -> Shape:
    """Return the tooltip of a drawing; with ``aloud``, screen readers read it out."""
    return "title", "aloud" if aloud else "", 0, (), content


@cached_drawing
def arrow(
    a: tuple[float, float], b: tuple[float, float], style: str, head: str, *, lane: int = 0
) -> tuple[Shape, ...]:
    """Return an arrow from a to b: a shaft that ends in the head, which has the class ``head``."""
    (x, y), length = b, math.dist(a, b) or 1.0
    ux, uy = (min(10.0, length) * (b[i] - a[i]) / length for i in (0, 1))
    corners = (f"{x - ux - s * uy:.1f} {y - uy + s * ux:.1f}" for s in (0.45, -0.45))
    tip = f"M{x:.1f} {y:.1f}L{'L'.join(corners)}z"
    return line(a, (x - 0.9 * ux, y - 0.9 * uy), style, lane=lane), path(tip, head, lane=lane)


@cached_drawing
def line(a: tuple[float, float], b: tuple[float, float], style: str, *, lane: int = 0) -> Shape:
    """Return a straight line."""
    return path(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}", style, lane=lane)


def _shape(
    tag: str, style: str, lane: int, attributes: Mapping[str, str | float], content: str = ""
) -> Shape:
    """Return a shape with its attributes rounded, and without empty ones."""
    rounded = (
        (k, v if isinstance(v, str) else round(v, 2 if k == "fill-opacity" else 1))
        for k, v in attributes.items()
        if v or k == "d"
    )
    return tag, style, lane, tuple(rounded), content


class Scene:
    """Marks on a canvas of ``width`` by ``height`` pixels.

    Args:
        width: width of the canvas.
        height: height of the canvas.
        start: start time of the scene [s]; marks that have ended by then are omitted.
        zero: time 0 of the scene's clock [s]; by default the start.

    >>> scene = Scene(100, 20)
    >>> scene.add(5, 10, circle(4, "own", lane=1), begin=0.0, end=2.0, to=(95, 10))
    >>> scene.plain()["marks"]
    [[0, 0, 0.0, 2.0, 5, 10, 95, 10, 0]]
    """

    def __init__(
        self, width: float, height: float, start: float = 0.0, zero: float | None = None
    ) -> None:
        self.width, self.height, self.start = width, height, start
        self.zero = start if zero is None else zero
        self._marks: list[tuple[float, float, int, tuple[Shape, ...], list[float]]] = []
        self._holds: list[tuple[int, int, tuple[Shape, ...], list[float]]] = []

    def add(
        self,
        x: float,
        y: float,
        *drawing: Shape,
        begin: float = -math.inf,
        end: float | None = None,
        to: Sequence[float] | None = None,
        steady: bool = False,
        layer: int = 0,
    ) -> None:
        """Add a drawing to the scene.

        Args:
            x: horizontal position.
            y: vertical position.
            drawing: the shapes; empty strings are omitted.
            begin: when it appears [s]; by default from the start.
            end: when it disappears [s]; by default never.
            to: its position at ``end``; if there is no end, the drawing is shown halfway.
            steady: whether it moves at constant speed; otherwise it eases in and out.
            layer: number of its layer; higher layers cover lower ones.
        """
        if to and end is None:
            x, y = (x + to[0]) / 2, (y + to[1]) / 2
            to = None
        if end is None or end > max(begin, self.start):
            position = [x, y, *(to or ()), *([int(steady)] if to else ())]
            drawing = tuple(shape for shape in drawing if shape[0] != "text" or shape[4])
            mark = (
                max(self.relative_time(begin), 0.0),
                math.inf if end is None else self.relative_time(end),
            )
            self._marks.append((*mark, layer, drawing, [round(v, 1) for v in position]))

    def relative_time(self, time: float) -> float:
        """Return a time on the scene's clock [s]."""
        return round(time - self.zero, 9)

    def hold_frame(
        self, keyframe: int, x: float, y: float, *drawing: Shape, layer: int = 0
    ) -> None:
        """Add a drawing that is visible while the picture is held at the end of a keyframe."""
        self._holds.append((keyframe, layer, drawing, [round(x, 1), round(y, 1)]))

    def plain(self) -> Json:
        """Return the scene as plain data, with equal drawings and shapes stored once.

        Each of ``drawings`` is a list of indices into ``shapes``. Each of ``marks`` is a list:
        drawing, layer, begin, end (None: never), x, y, and for moving marks the target position
        and ``steady``. Marks are sorted by begin time, so a live run mostly appends marks. Each
        of ``holds`` is a list: keyframe, drawing, layer, x, y.
        """
        drawings: dict[tuple[Shape, ...], int] = {}
        shapes: dict[Shape, int] = {}

        def number(drawing: tuple[Shape, ...]) -> int:
            return drawings.setdefault(drawing, len(drawings))

        marks = [
            [number(drawing), layer, begin, end if math.isfinite(end) else None, *position]
            for begin, end, layer, drawing, position in sorted(self._marks, key=lambda m: m[0])
        ]
        holds = [
            [keyframe, number(d), layer, *position] for keyframe, layer, d, position in self._holds
        ]
        return {
            "width": self.width,
            "height": self.height,
            "drawings": [
                [shapes.setdefault(shape, len(shapes)) for shape in drawing] for drawing in drawings
            ],
            "shapes": list(shapes),
            "marks": marks,
            "holds": holds,
        }


def intervals(
    spans: Iterable[tuple[float, float | None, T]],
) -> Iterator[tuple[float, float | None, list[T]]]:
    """Yield each interval in which the same items are present, and these items, oldest first.

    An item whose end is None or infinity never disappears.

    >>> [(a, b, list(items)) for a, b, items in intervals([(0, 2, "x"), (1, None, "y")])]
    [(0, 1, ['x']), (1, 2, ['x', 'y']), (2, None, ['y'])]
    """
    changes: list[tuple[float, int, int, T]] = []
    for i, (begin, end, item) in enumerate(spans):
        if end is None or end > begin:
            changes.append((begin, 1, i, item))
            changes += [(end, 0, i, item)] if end not in (None, math.inf) else []
    changes.sort(key=lambda c: c[:3])
    present: dict[int, T] = {}
    for n, (time, starts, i, item) in enumerate(changes):
        if starts:
            present[i] = item
        else:
            del present[i]
        next_time = changes[n + 1][0] if n + 1 < len(changes) else None
        if present and next_time != time:
            yield time, next_time, list(present.values())


def steps(times: Iterable[float]) -> Iterator[tuple[float, float | None, int]]:
    """Yield the begin and end of each interval between times, and the number of earlier times.

    >>> list(steps([1.0]))
    [(-inf, 1.0, 0), (1.0, None, 1)]
    """
    for n, (begin, end) in enumerate(pairwise([-math.inf, *times, math.inf])):
        yield begin, end if math.isfinite(end) else None, n


def picture(scene: Scene, *, title: str, end: float | None = None, **more: Any) -> Json:
    """Return a picture of a scene, the input of both renderers.

    Args:
        scene: the marks.
        title: title of the picture.
        end: when the picture ends [s]; by default at its start, for a still picture.
        more: values that replace the defaults.
    """
    last = 0.0 if end is None else scene.relative_time(end)
    return {
        "view": "scene",  # CSS class on the page
        "title": title,
        "facts": [],  # next to the title
        "notices": [],  # warnings
        "notes": [],  # other remarks, such as omissions
        "description": "",  # a sentence that explains the picture
        "live": False,  # whether the run is still in progress
        "empty": "",  # why there is nothing to draw, else ""
        "legend": [],  # in the browser: (shapes, width [px], text)
        "start": 0.0,
        "end": last,
        "opening": last,  # the first moment shown
        "poster": None,  # the moment of the static picture; None means the opening
        "max_height": 440,  # maximum height in the browser [px]
        "keyframes": [],  # begin, end, caption, details, where; sorted by end
        "verdicts": [],  # word, text, expected; also in keyframes; drawn above the scene
        "stills": [],  # moments of the static picture: keyframe, height
        "list": None,  # name, all, rows [keyframe, groups, key, part, value, ranks, others]
        "scale": [0.0, 1.0],  # edges of the time axis, as fractions of the width
        "unit": "",  # unit of time, such as "round"; "" means seconds
        "before": "before the first operation",  # text before the end of the first keyframe
        "panels": [],  # key moments: keyframe (-1: the start), title, when
        "scene": scene.plain(),
        "side": None,  # another scene, next to this scene
        "styles": MARKS,
    } | more
