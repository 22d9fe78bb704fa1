"""Paints a moment of any scene as SVG, as js/marks.js does, and a picture as a document."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from html import escape

from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.geometry import text_width
from distkit.views.scene.marks import Shape
from distkit.views.scene.theme import GRAY, INK, MARKS, WARNING_LIGHT, rank_color
from distkit.views.scene.units import human_seconds

WIDTH, LEFT, SIDE, LINE = 960, 16, 200, 20
SMALL = 'font-size="11"'


def to_svg(picture: Json) -> str:
    """The moment at which a picture opens, as an SVG document."""
    parts = [svg.heading(24, 32, picture["title"], " · ".join(picture["facts"]))]
    y = 53.0
    for words, color in [
        (picture["said"], GRAY),
        *((f"! {notice}", WARNING_LIGHT) for notice in picture["notices"]),
        (picture["empty"], GRAY),
    ]:
        if words:
            parts.append(svg.text(24, y, words, color))
            y += LINE
    if picture["empty"]:
        return svg.document(WIDTH, y + 10, picture["title"], "".join(parts))
    scene, side, opening = picture["scene"], picture["side"], picture["opening"]
    beat = at(picture, opening)
    parts.append(_placed(LEFT, y, body(scene, opening, beat)))
    bottom = y + scene["height"]
    left = LEFT + scene["width"] + 12
    if picture["list"]:
        parts += _list(
            picture["list"], beat, left, y + 14, bottom - y - (side["height"] + 24 if side else 0)
        )
    if side:
        top = bottom - side["height"]
        parts.append(svg.text(left, top - 10, "in the whole run", INK, 'font-weight="700"'))
        parts.append(_placed(left, top, body(side, picture["end"])))
    if picture["beats"]:
        parts += _fact(picture, beat, LEFT + scene["width"] / 2, bottom + 24)
        bottom += 48
    return svg.document(WIDTH, bottom + 14, picture["title"], "".join(parts))


def body(scene: Json, time: float, beat: int = -1) -> str:
    """The marks of a scene at a time, and those of the beat it rests on."""
    drawings = scene["drawings"]
    return "".join(
        _placed(x, y, "".join(map(_shape, drawings[n])))
        for _, n, x, y in sorted(_shown(scene, time, beat), key=lambda mark: mark[0])
    )


def to_table(picture: Json) -> str:
    """A picture's words in the moment at which it opens, line by line, for a terminal."""
    lines: dict[float, list[tuple[float, str]]] = defaultdict(list)
    scene = picture["scene"]
    for _, n, x, y in _shown(scene, picture["opening"]):
        for tag, _, _, attributes, words in scene["drawings"][n]:
            if tag == "text":
                place = dict(attributes)
                lines[y + place.get("y", 0)].append((x + place.get("x", 0), words))
    head = f"{picture['title']}: {', '.join(picture['facts'])}".rstrip(": ")
    body = ("  ".join(words for _, words in sorted(lines[y])) for y in sorted(lines))
    notices = (f"! {notice}" for notice in picture["notices"])
    return "\n  ".join([head, *filter(None, [picture["empty"]]), *body, *notices])


def _shown(scene: Json, time: float, beat: int = -1) -> Iterator[tuple[int, int, float, float]]:
    """Layer, drawing and place of each mark that is there."""
    yield from ((layer, n, x, y) for k, n, layer, x, y in scene["rests"] if k == beat)
    for n, layer, begin, end, x, y, *to in scene["marks"]:
        if begin <= time and (end is None or end > time):
            yield layer, n, *_moved(x, y, to, begin, end, time)


def _moved(
    x: float, y: float, to: list[float], begin: float, end: float | None, time: float
) -> tuple[float, float]:
    if not to or end is None:
        return x, y
    part = (time - begin) / (end - begin)
    part = part if to[2] else part * part * (3 - 2 * part)
    return x + part * (to[0] - x), y + part * (to[1] - y)


def _placed(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{drawn}</g>' if x or y else drawn


def _shape(shape: Shape) -> str:
    tag, style, lane, attributes, words = shape
    if tag == "title":
        return f"<title>{escape(words)}</title>"
    look = {k: _color(v, lane) for k, v in MARKS[style].items()}
    told = "".join(f' {k}="{escape(str(v))}"' for k, v in {**look, **dict(attributes)}.items())
    return f"<{tag}{told}>{escape(words)}</{tag}>" if words else f"<{tag}{told}/>"


def _color(value: str | float, lane: int) -> str | float:
    """A colour's name as a colour on white paper; anything else as it is."""
    own = rank_color(lane)
    known = {
        "ink": INK,
        "muted": GRAY,
        "paper": "#fff",
        "warning": WARNING_LIGHT,
        "rank": own,
        "label": svg.readable(own),
        "code": svg.CODE,
    }
    name, _, part = str(value).partition(" ")
    if name == "ink" and part:
        return svg.tint(INK, float(part) / 100)
    return known.get(str(value), value)


# -- beside the scene -------------------------------------------------------------------


def at(picture: Json, time: float) -> int:
    """The beat that has ended last; -1: none has."""
    ends = [beat["end"] for beat in picture["beats"] if beat["end"] is not None]
    return bisect_right(ends, time) - 1


def _fact(picture: Json, beat: int, x: float, y: float) -> Iterator[str]:
    found = picture["beats"][beat] if beat >= 0 else {"who": "before the first message"}
    when = f"at {human_seconds(picture['opening'])}"
    more = " · ".join(filter(None, [when, found.get("more")]))
    middle = 'text-anchor="middle"'
    yield svg.text(x, y, found["who"], INK, f'{middle} font-size="15" font-weight="700"')
    yield svg.text(x, y + 19, more, GRAY, middle)


def _list(listed: Json, beat: int, x: float, y: float, room: float) -> Iterator[str]:
    """The last rows of a list until a beat."""
    done = [row for row in listed["rows"] if row[0] <= beat]
    yield svg.text(x, y, f"{listed['name']} until now", INK, 'font-weight="700"')
    if not done:
        yield svg.text(x, y + LINE, "none yet", GRAY)
    for _, _, key, part, value, who, others in done[-max(1, int((room - 34) / LINE)) :]:
        y += LINE
        words = f"{cut(key, 76, 11)}{part} {value}"
        yield svg.text(x, y, words, INK, f'font-family="{svg.CODE}" font-size="11"')
        yield from _who(who, others, x + 6.7 * len(words) + 10, y)


def _who(who: list[tuple[int, str, str]], others: int, x: float, y: float) -> Iterator[str]:
    """A dot for each, and what is to be said of it, as far as there is room."""
    for i, (lane, _, more) in enumerate(who):
        wide = 12 + (text_width(more, 12) + 6 if more else 0)
        if x + wide > WIDTH - (LEFT if i + 1 == len(who) + others else 3 * LEFT):
            yield svg.text(x - 4, y, f"+ {len(who) + others - i}", GRAY, SMALL)
            return
        yield f'<circle cx="{x:.0f}" cy="{y - 4:.0f}" r="4.2" fill="{rank_color(lane)}"/>'
        if more:
            yield svg.text(x + 8, y, more, WARNING_LIGHT, f'{SMALL} font-weight="700"')
        x += wide
    if others:
        yield svg.text(x - 4, y, f"+ {others}", GRAY, SMALL)


def cut(words: str, room: float, size: float) -> str:
    """As much of a text as fits into ``room`` pixels, in letters of one width."""
    fits = max(1, int(room / (0.61 * size)))
    return words if len(words) <= fits else f"{words[: fits - 1]}…"
