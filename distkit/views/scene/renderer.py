"""Draws a moment of a scene as SVG, like js/marks.js, and a picture as an SVG document."""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import TypeVar

from distkit._format import human_seconds
from distkit.views.scene import svg
from distkit.views.scene.frame import Json, dotted, notice_lines
from distkit.views.scene.marks import Shape
from distkit.views.scene.theme import (
    GRAY,
    INK,
    MARKS,
    TRACES_LIGHT,
    VALUES_LIGHT,
    WARNING_LIGHT,
    rank_color,
)

WIDTH, LINE_HEIGHT, GAP, MAX_STILLS = 960, 20, 20, 5

T = TypeVar("T")


def to_svg(picture: Json) -> str:
    """Return the panels, the stills or the poster of a picture as an SVG document."""
    panels, stills = picture["panels"], picture["stills"]
    maximum = max(len(panels), min(MAX_STILLS, len(stills)))
    variants = [
        {**picture, "panels": thinned(panels, n), "stills": stills[:n]}
        for n in (maximum, 4, 3, 2, 1)
        if n <= maximum
    ]
    return svg.fitting(map(_document, variants))


def thinned(items: Sequence[T], max_items: int) -> list[T]:
    """Return at most ``max_items`` evenly spaced items, including the last.

    >>> thinned("abcdefg", 3), thinned("ab", 3)
    (['a', 'd', 'g'], ['a', 'b'])
    """
    if len(items) <= max_items:
        return list(items)
    step = (len(items) - 1) / max(max_items - 1, 1)
    return [items[round(len(items) - 1 - i * step)] for i in reversed(range(max_items))]


def _document(picture: Json) -> str:
    parts = [svg.heading(24, 32, picture["title"], " · ".join(picture["facts"]))]
    y = 53.0
    for content, color in [
        *((line, GRAY) for line in wrapped(picture["description"], WIDTH - 48)),
        *((line, svg.notice_color(line)) for line in notice_lines(picture)),
        (picture["empty"], GRAY),
    ]:
        if content:
            parts.append(svg.text(24, y, content, color))
            y += LINE_HEIGHT
    if picture["empty"]:
        return svg.document(WIDTH, y + 10, picture["title"], "".join(parts))
    for verdict in picture["verdicts"]:
        parts.append(_verdict(24, y, verdict))
        y += LINE_HEIGHT
    moments, bottom = _moments(picture, y)
    return svg.document(WIDTH, bottom + 14, picture["title"], "".join([*parts, moments]))


def wrapped(text: str, width: float) -> list[str]:
    """Wrap text into lines of at most about ``width`` pixels."""
    return textwrap.wrap(text, int(width / 6.5))


def _static_moments(picture: Json) -> list[tuple[int, float, str, str]]:
    """Return the keyframe, time, heading and details of each static moment: the panels and stills.

    If there are none, the only static moment is the poster.
    """
    keyframes, last, moments = picture["keyframes"], picture["end"], []
    for n, heading, when in picture["panels"]:
        end = keyframes[n]["end"] if n >= 0 else picture["start"]
        moments.append((n, last if end is None else end, heading, when))
    for n, _ in picture["stills"]:
        details = [keyframes[n].get(key) or "" for key in ("details", "where")]
        moments.append((n, keyframes[n]["end"], keyframes[n]["caption"], dotted(details)))
    if not moments:
        time = picture["opening"] if picture["poster"] is None else picture["poster"]
        n = keyframe_at(picture, time)
        keyframe = keyframes[n] if n >= 0 else {"caption": picture["before"]}
        when = "" if picture["unit"] else f"at {human_seconds(time)}"
        moments.append((n, time, keyframe["caption"], dotted([when, keyframe.get("details", "")])))
    return moments


def _moments(picture: Json, y: float) -> tuple[str, float]:
    """Return the moments and the side scene as SVG, and the bottom edge."""
    scene, side, keyframes = picture["scene"], picture["side"], picture["keyframes"]
    moments, heights, n = _static_moments(picture), dict(picture["stills"]), len(picture["panels"])
    columns = 3 if n in (3, 5, 6) and scene["width"] < 640 else min(n, 2) or 1
    panel_width = scene["width"] + 6 if side else (WIDTH - 48 - (columns - 1) * GAP) / columns
    fits = min((panel_width - 20) / scene["width"], 420 / scene["height"] if n else 9, 1.2)
    scale = 1.0 if side else fits
    parts, top, bottom = list[str](), y, y - GAP
    for i, (keyframe, time, heading, details) in enumerate(moments):
        verdicts = keyframes[keyframe].get("verdicts", ()) if keyframe >= 0 else ()
        top = bottom + GAP if i % columns == 0 else top
        x, scene_top = (
            24 + i % columns * (panel_width + GAP),
            top + 34 * bool(keyframes) + LINE_HEIGHT * len(verdicts),
        )
        bottom = scene_top + scale * heights.get(keyframe, scene["height"]) + 10
        left = x + (panel_width - scale * scene["width"]) / 2
        parts += [
            svg.rect(x, top, panel_width, bottom - top, 'fill="#f5f6f8"', "", 10)
            if n or heights
            else "",
            svg.heading(x + 14, top + 22, heading, details, 12.5) if keyframes else "",
            *(_verdict(x + 14, top + 44 + LINE_HEIGHT * k, v) for k, v in enumerate(verdicts)),
            f'<g transform="translate({left:.1f} {scene_top:.1f}) scale({scale:.3f})">',
            body(scene, time, keyframe, tooltips=not (n or heights)),
            "</g>",
        ]
    if heights and len(heights) < len(keyframes):
        note = f"this picture shows {len(heights)} of {len(keyframes):,} {picture['unit']}s"
        parts.append(svg.text(24, bottom + LINE_HEIGHT, note, GRAY))
        bottom += LINE_HEIGHT
    if side:
        left, time = scene["width"] + 38, picture["opening"]
        if not heights:
            parts.append(svg.text(left, y + 22, "in the whole run", INK, 'font-weight="700"'))
            time, y = picture["end"], y + 34
        parts.append(svg.translated(left, y, body(side, time, tooltips=not heights)))
        bottom = max(bottom, y + side["height"])
    return "".join(parts), bottom + 8


def _verdict(x: float, y: float, verdict: Json) -> str:
    """Return the sign and text of a verdict."""
    same, wrong = verdict["word"] == "same", verdict.get("expected")
    color = "#0b8a66" if same else WARNING_LIGHT if wrong else GRAY
    sign = svg.text(x, y, "=" if same else "≠", color, 'font-weight="700" font-size="14"')
    return sign + svg.text(x + 15, y, verdict["text"], INK)


def body(scene: Json, time: float, keyframe: int = -1, *, tooltips: bool = True) -> str:
    """Return the marks of a scene that are visible at a time, and those held after a keyframe.

    Args:
        scene: the result of ``Scene.plain``.
        time: time since the start of the picture [s].
        keyframe: the keyframe that has just ended; -1 for none.
        tooltips: whether to include tooltips; small pictures do not need them.
    """
    layers: dict[int, list[str]] = defaultdict(list)
    for layer, n, x, y in _visible(scene, time, keyframe):
        shapes = drawing_of(scene, n)
        if not tooltips:
            shapes = [s for s in shapes if s[0] != "title" and s[1] != "hover"]
        layers[layer].append(svg.translated(x, y, "".join(map(_shape, shapes))))
    return "".join("".join(layers[layer]) for layer in sorted(layers))


def drawing_of(scene: Json, n: int) -> list[Shape]:
    """Return the shapes of a drawing."""
    return [scene["shapes"][i] for i in scene["drawings"][n]]


def to_table(picture: Json) -> str:
    """Return the text of a picture's panels, stills or poster, for terminals."""
    head = f"{picture['title']}: {', '.join(picture['facts'])}".rstrip(": ")
    lines = [picture["empty"], picture["description"], *_verdict_lines(picture)]
    for n, time, heading, details in [] if picture["empty"] else _static_moments(picture):
        keyframe = picture["keyframes"][n] if n >= 0 else {}
        if keyframe and picture["panels"]:  # panels have short headings
            heading, details = keyframe["caption"], dotted([details, keyframe["details"]])
        if picture["keyframes"]:
            lines.append(f"{heading}  {details}".rstrip())
        lines += [
            f"  {line}" for line in (*_verdict_lines(keyframe), *_screen_reader_text(picture, time))
        ]
    return "\n  ".join([head, *filter(None, lines), *notice_lines(picture)])


def _verdict_lines(item: Json) -> list[str]:
    """Return the verdicts of a picture or a keyframe as text."""
    return [f"{'=' if v['word'] == 'same' else '≠'} {v['text']}" for v in item.get("verdicts", ())]


def _screen_reader_text(picture: Json, time: float) -> list[str]:
    """Return the screen-reader text of a moment, line by line from the top."""
    lines = []
    for scene in filter(None, (picture["scene"], picture["side"])):
        marks = sorted(_visible(scene, time), key=lambda mark: (mark[3], mark[2]))
        shapes = (shape for _, n, *_ in marks for shape in drawing_of(scene, n))
        lines += [content for _, style, *_, content in shapes if style == "aloud"]
    return lines


def _visible(
    scene: Json, time: float, keyframe: int = -1
) -> Iterator[tuple[int, int, float, float]]:
    """Yield the layer, drawing and position of each visible mark."""
    yield from ((layer, n, x, y) for k, n, layer, x, y in scene["holds"] if k == keyframe)
    for n, layer, begin, end, x, y, *to in scene["marks"]:
        if begin <= time and (end is None or end > time):
            yield layer, n, *_interpolate(x, y, to, begin, end, time)


def _interpolate(
    x: float, y: float, to: list[float], begin: float, end: float | None, time: float
) -> tuple[float, float]:
    if not to or end is None:
        return x, y
    part = (time - begin) / (end - begin)
    part = part if to[2] else part * part * (3 - 2 * part)
    return x + part * (to[0] - x), y + part * (to[1] - y)


def _shape(shape: Shape) -> str:
    tag, style, lane, overrides, content = shape
    if tag == "title":
        return f"<title>{escape(content)}</title>"
    attributes = {k: _color(v, lane) for k, v in MARKS[style].items()} | dict(overrides)
    attrs = "".join(f' {k}="{escape(str(v))}"' for k, v in attributes.items())
    return f"<{tag}{attrs}>{escape(content)}</{tag}>" if content else f"<{tag}{attrs}/>"


_ON_WHITE = {
    "ink": INK,
    "muted": GRAY,
    "paper": "#fff",
    "warning": WARNING_LIGHT,
    "code": svg.CODE,
    **VALUES_LIGHT,
}


def _color(value: str | float, lane: int) -> str | float:
    """Return the color that a color name has on white paper, or any other value unchanged."""
    if value == "rank":
        return rank_color(lane)
    if value == "label":
        return svg.readable(rank_color(lane))
    if value == "trace":
        return TRACES_LIGHT[lane % len(TRACES_LIGHT)]
    name, _, part = str(value).partition(" ")
    if name == "ink" and part:
        return svg.tint(INK, float(part) / 100)
    return _ON_WHITE.get(str(value), value)


# -- shared helpers ---------------------------------------------------------------------


def keyframe_at(picture: Json, time: float) -> int:
    """Return the index of the last keyframe that has ended, or -1 if none has."""
    return bisect_right([k["end"] for k in picture["keyframes"] if k["end"] is not None], time) - 1


def cut(text: str, width: float, size: float) -> str:
    """Truncate text to ``width`` pixels, assuming letters of equal width."""
    fits = max(1, int(width / (0.61 * size)))
    return text if len(text) <= fits else f"{text[: fits - 1]}…"
