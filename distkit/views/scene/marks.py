"""A picture as timed marks: drawings with their place, from when until when, and where to.

A view computes its marks once, in Python. Two painters draw those of a moment: js/marks.js in the
browser and painter.py as SVG. Neither knows what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar, cast

from distkit.views.scene.frame import Json
from distkit.views.scene.theme import MARKS

#: A shape of a drawing: SVG tag, class of ``theme.MARKS``, lane whose colour it has (colours repeat
#: after eight), attributes, words. Places are relative to the mark's. The functions that make one
#: remember it.
Shape = tuple[str, str, int, tuple[tuple[str, str | float], ...], str]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def remembered(make: F) -> F:
    """A function that makes the same drawing only once."""
    return cast(F, lru_cache(1 << 13)(make))


@remembered
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
    """A rectangle from its left upper corner; with an opacity where it is not the class's."""
    tag, *_, place, words = _shape(
        "rect", style, lane, {"x": x, "y": y, "width": w, "height": h, "rx": r}
    )
    more = (("fill-opacity", round(opacity, 2)),) if opacity else ()
    return tag, style, lane, (*place, *more), words


@remembered
def circle(r: float, style: str, *, x: float = 0, y: float = 0, lane: int = 0) -> Shape:
    """A circle around its middle."""
    return _shape("circle", style, lane, {"cx": x, "cy": y, "r": r})


@remembered
def path(d: str, style: str, *, lane: int = 0, opacity: float = 0) -> Shape:
    """A line, or an area, in SVG's words; with an opacity where it is not the class's."""
    more = (("fill-opacity", round(opacity, 2)),) if opacity else ()
    return "path", style, lane, (("d", d), *more), ""


@remembered
def text(
    words: str,
    style: str,
    *,
    x: float = 0,
    y: float = 0,
    anchor: str = "",
    lane: int = 0,
    size: float = 0,
) -> Shape:
    """One line of text.

    ``anchor`` is "middle" or "end" where it does not begin at x, ``size`` that of its letters where
    it is not the class's.
    """
    tag, _, _, place, _ = _shape("text", style, lane, {"x": x, "y": y, "font-size": size})
    more = (("text-anchor", anchor),) if anchor else ()
    return tag, style, lane, (*place, *more), words


@remembered
def letters(words: str, style: str, places: tuple[float, ...], *, y: float = 0) -> Shape:
    """Letters of one line, the middle of each at its own x."""
    at = ("x", " ".join(f"{x:g}" for x in places)), ("y", y), ("text-anchor", "middle")
    return "text", style, 0, at, words


@remembered
def title(words: str, *, aloud: bool = False) -> Shape:
    """Words shown where the pointer rests on the drawing; ``aloud``: told to screen readers."""
    return "title", "aloud" if aloud else "", 0, (), words


@remembered
def arrow(
    a: tuple[float, float], b: tuple[float, float], style: str, head: str, *, lane: int = 0
) -> tuple[Shape, ...]:
    """A line from a to b with a head of another class."""
    (x, y), length = b, math.dist(a, b) or 1.0
    ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    tip = f"M{x:.1f} {y:.1f}L{x - 10 * ux - 4.5 * uy:.1f} {y - 10 * uy + 4.5 * ux:.1f}"
    tip += f"L{x - 10 * ux + 4.5 * uy:.1f} {y - 10 * uy - 4.5 * ux:.1f}z"
    return line(a, b, style, lane=lane), path(tip, head, lane=lane)


@remembered
def line(a: tuple[float, float], b: tuple[float, float], style: str, *, lane: int = 0) -> Shape:
    """A straight line."""
    return path(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}", style, lane=lane)


def linked(shape: Shape, keyframe: int) -> Shape:
    """The same shape; a click on it goes to a keyframe."""
    tag, style, lane, attributes, words = shape
    return tag, style, lane, (*attributes, ("data-keyframe", keyframe)), words


def _shape(tag: str, style: str, lane: int, at: dict[str, float]) -> Shape:
    return tag, style, lane, tuple((k, round(v, 1)) for k, v in at.items() if v), ""


class Scene:
    """Marks on a field of ``width`` by ``height`` pixels.

    Args:
        width: of the field.
        height: of the field.
        start: when the picture begins [s]; what ended before is left out.
        like: another scene, which has the drawings of this one too.

    >>> scene = Scene(100, 20)
    >>> scene.add(5, 10, circle(4, "own", lane=1), begin=0.0, end=2.0, to=(95, 10))
    >>> scene.plain()["marks"]
    [[0, 0, 0.0, 2.0, 5, 10, 95, 10, 0]]
    """

    def __init__(
        self, width: float, height: float, start: float = 0.0, *, like: Scene | None = None
    ) -> None:
        self.width, self.height, self.start = width, height, start
        self._numbers: dict[tuple[Shape, ...], int] = {} if like is None else like._numbers
        self._shapes: dict[Shape, int] = {} if like is None else like._shapes
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
        """Put a drawing on the field.

        Args:
            x: where it is.
            y: where it is.
            drawing: its shapes.
            begin: when it appears [s]; from the beginning unless given.
            end: when it is gone [s]; it stays unless given.
            to: where it is at ``end``.
            steady: it moves at one speed; else it starts and arrives softly.
            layer: drawn above all of lower layers.
        """
        if end is None or end > max(begin, self.start):
            place = [x, y, *(to or ()), *([int(steady)] if to else ())]
            mark = max(self.when(begin), 0.0), math.inf if end is None else self.when(end)
            self._marks.append((*mark, layer, drawing, [round(v, 1) for v in place]))

    def when(self, time: float) -> float:
        """A time since the picture's beginning [s], in which all of its times are."""
        return round(time - self.start, 9)

    def hold_frame(
        self, keyframe: int, x: float, y: float, *drawing: Shape, layer: int = 0
    ) -> None:
        """Put a drawing on the field while the picture holds a keyframe that has just ended."""
        self._holds.append((keyframe, layer, drawing, [round(x, 1), round(y, 1)]))

    def plain(self) -> Json:
        """The scene as plain data; a drawing or a shape that is there many times is in it once.

        ``drawings`` have the numbers of their ``shapes``; ``marks``: drawing, layer, begin, end
        (None: never), x, y, and for those that move also where to and whether steadily. They are
        in the order of their begins, so that the marks of a run that goes on grow at their end.
        ``holds``: keyframe, drawing, layer, x, y.
        """
        numbers = self._numbers
        known: dict[tuple[int, ...], int] = {}  # most shapes are the same objects: no look inside

        def number(drawing: tuple[Shape, ...]) -> int:
            if (ids := tuple(map(id, drawing))) not in known:
                known[ids] = numbers.setdefault(drawing, len(numbers))
            return known[ids]

        marks = [
            [number(drawing), layer, begin, end if math.isfinite(end) else None, *place]
            for begin, end, layer, drawing, place in sorted(self._marks, key=lambda m: m[0])
        ]
        holds = [[keyframe, number(d), layer, *place] for keyframe, layer, d, place in self._holds]
        return {
            "width": self.width,
            "height": self.height,
            "drawings": [
                [self._shapes.setdefault(shape, len(self._shapes)) for shape in drawing]
                for drawing in numbers
            ],
            "shapes": list(self._shapes),
            "marks": marks,
            "holds": holds,
        }


def pieces(
    spans: Iterable[tuple[float, float | None, T]],
) -> Iterator[tuple[float, float | None, list[T]]]:
    """The items present between one change and the next: begin, end, and they, the oldest first.

    What has no end, or an infinite one, stays.

    >>> [(a, b, list(items)) for a, b, items in pieces([(0, 2, "x"), (1, None, "y")])]
    [(0, 1, ['x']), (1, 2, ['x', 'y']), (2, None, ['y'])]
    """
    changes: list[tuple[float, int, int, T]] = []
    for i, (begin, end, item) in enumerate(spans):
        if end is None or end > begin:
            changes.append((begin, 1, i, item))
            changes += [(end, 0, i, item)] if end not in (None, math.inf) else []
    changes.sort(key=lambda c: c[:3])
    here: dict[int, T] = {}
    for n, (time, comes, i, item) in enumerate(changes):
        if comes:
            here[i] = item
        else:
            del here[i]
        after = changes[n + 1][0] if n + 1 < len(changes) else None
        if here and after != time:
            yield time, after, list(here.values())


def steps(times: Iterable[float]) -> Iterator[tuple[float, float | None, int]]:
    """Between one time and the next: begin, end, and how many have been.

    >>> list(steps([1.0]))
    [(-inf, 1.0, 0), (1.0, None, 1)]
    """
    for n, (begin, end) in enumerate(pairwise([-math.inf, *times, math.inf])):
        yield begin, end if math.isfinite(end) else None, n


def picture(scene: Scene, *, title: str, end: float | None = None, **more: Any) -> Json:
    """A picture of a scene: what both painters get.

    Args:
        scene: the marks.
        title: of the picture.
        end: when it ends [s]; the beginning unless given, for a picture that does not move.
        more: what else there is, as in the keys below.
    """
    last = 0.0 if end is None else scene.when(end)
    found: Json = {
        "view": "scene",  # a word for the page's style sheet
        "title": title,
        "facts": [],  # beside the title
        "notices": [],  # what the reader must know
        "notes": [],  # those of them that tell of nothing wrong
        "said": "",  # how to read it, in a sentence
        "live": False,  # whether the run goes on
        "empty": "",  # if there is nothing to draw: the reason
        "legend": [],  # in the browser, what drawings mean: (shapes, width [px], words)
        "start": 0.0,
        "end": last,
        "opening": last,  # the moment that is shown first
        "high": 440,  # the largest height in the browser [px]
        "keyframes": [],  # what happens: begin, end, who, more, where; in the order of their ends
        "verdicts": [],  # of the picture or a keyframe: word, text, expected; drawn above the scene
        "stills": [],  # moments that the static picture shows: keyframe, height
        "list": None,  # name, all, rows [keyframe, groups, key, part, value, who, others]
        "scale": [0.0, 1.0],  # from where to where on the scene's width time goes
        "unit": "",  # of time, such as "round"; seconds unless given
        "before": "before the first message",  # in words, before the first keyframe's end
        "home": 0.0,  # the moment before the first keyframe's end
        "layers": [],  # what the reader chooses among: name, layers that are shown then only
        "panels": [],  # moments that tell the story: keyframe (-1: home), title, when
        "clock": "",  # the one of ``clocks`` that is shown first
        "clocks": {},  # by name: what differs; ``also`` is a keyframe on the other clock
        "scene": scene.plain(),
        "side": None,  # another scene, beside
        "styles": MARKS,
    }
    return found | more
