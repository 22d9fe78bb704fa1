"""The gradients as a static picture and as a table: the curves, and one step in full."""

from __future__ import annotations

from collections.abc import Iterator

from distkit.views.scene import svg
from distkit.views.scene.frame import Json, flagged
from distkit.views.scene.theme import GRAY, INK, rank_color
from distkit.views.scene.values_svg import Curve, chart, figure, heat, verdict

WIDTH = 960
#: At most so many ranks and layers are drawn.
MAX_RANKS, MAX_LAYERS = 8, 8

HINT = "put the loop into: with dk.watch_gradients(model) as watch, and call watch.step()"


def to_svg(picture: Json) -> str:
    """A training loop as an SVG document of at most 60 kB.

    >>> from distkit.views.gradients.projection import project
    >>> from distkit.trace.log import EventLog
    >>> to_svg(project(EventLog())).startswith("<svg ")
    True
    """
    return svg.fitting(_document(picture, layers) for layers in (MAX_LAYERS, 4, 2, 1))


def _document(picture: Json, layers: int) -> str:
    title = picture["title"] or "Gradients"
    parts, y = svg.opening(title, " · ".join(picture["facts"]), flagged(picture))
    for told in picture["verdicts"]:
        parts.append(verdict(24, y, told["word"] == "same", True, told["text"]))
        y += 21
    if not picture["steps"] and not _charts(picture):
        parts.append(svg.text(24, y, f"nothing was watched: {HINT}", GRAY))
        return svg.document(WIDTH, y + 26, title, "".join(parts))
    for i, (name, lines) in enumerate(_charts(picture)):
        parts += _chart(name, lines, 24 + 308 * i, y + 14)
    y += 150 if _charts(picture) else 0
    if picture["steps"]:
        drawn, y = _table(picture, picture["steps"][0], layers, y + 10)
        parts.append(drawn)
    return svg.document(WIDTH, y + 16, title, "".join(parts))


def _charts(picture: Json) -> list[tuple[str, list[Json]]]:
    curves = picture["curves"]
    named = [
        ("loss", curves["loss"]),
        ("replica drift", curves["drift"]),
        ("samples per second", curves["rate"]),
    ]
    return [
        (name, lines)
        for name, lines in named
        if any(y is not None for line in lines for _, y in line["points"])
    ]


def _chart(name: str, lines: list[Json], left: float, top: float) -> Iterator[str]:
    last = max(n for line in lines for n, y in line["points"] if y is not None)
    curves = [
        Curve(line["points"], INK, 2.0)
        if line["rank"] is None
        else Curve(line["points"], rank_color(line["rank"]))
        for line in lines
    ]
    return chart(name, curves, left, top, 290, 88, f"step {last}")


def _table(picture: Json, step: Json, most: int, y: float) -> tuple[str, float]:
    """The layers of a step: a heat map for each rank's gradient, and for what they became."""
    ranks = picture["ranks"][:MAX_RANKS]
    alone = any(cell["alone"] for cell in step["layers"])
    room = (WIDTH - 48 - 130) / (len(ranks) + 1 + alone)
    words = [(r["name"], rank_color(r["lane"])) for r in ranks]
    averaged = any(cell["kind"] in ("sum", "mean") for cell in step["layers"])
    words += [("average" if averaged else "after", INK), *([("one process", GRAY)] * alone)]
    parts = [
        svg.line(24, y - 8, WIDTH - 24, y - 8, "#e9ecef", 1),
        svg.text(24, y + 14, f"step {step['n']}", INK, 'font-weight="700"'),
    ]
    for i, (word, color) in enumerate(words):
        x = 154 + room * i
        parts.append(f'<circle cx="{x + 4:.0f}" cy="{y + 10:.0f}" r="4" fill="{color}"/>')
        parts.append(svg.text(x + 13, y + 14, word, INK))
    y += 26
    for layer, cell in list(zip(picture["layers"], step["layers"], strict=True))[:most]:
        drawn, height = _layer(cell, len(ranks), alone, y, room)
        shape = " × ".join(map(str, layer["shape"]))
        parts += [
            svg.text(24, y + 14, layer["name"], INK, 'font-weight="700"'),
            svg.text(24, y + 30, shape, GRAY, 'font-size="10.5"'),
            drawn,
        ]
        y += max(40.0, height) + 10
    hidden = len(picture["layers"]) - most
    if hidden > 0:
        parts.append(svg.text(24, y + 12, f"and {hidden} more layers", GRAY))
        y += 20
    return "".join(parts), y


def _layer(cell: Json, ranks: int, alone: bool, y: float, room: float) -> tuple[str, float]:
    after = [cell["after"][0] if cell["same"] and cell["after"] else None]
    parts, tallest = [], 0.0
    for i, s in enumerate([*cell["before"][:ranks], *after, *([cell["alone"]] * alone)]):
        x = 154 + room * i
        if s is None:
            word = "≠ by rank" if i == ranks and cell["after"] else "–"
            parts.append(svg.text(x, y + 14, word, GRAY))
            continue
        drawn, height = heat(x, y, s, cell["most"] or 0.0, min(room - 12, 72))
        parts += [
            drawn,
            svg.text(x, y + height + 12, f"norm {figure(s['norm'])}", GRAY, 'font-size="10.5"'),
        ]
        tallest = max(tallest, height + 16)
    return "".join(parts), tallest


def to_table(picture: Json, limit: int = 16) -> str:
    """A table to read in a terminal: the sentences, and the norms of the last step."""
    if not picture["steps"] and not _charts(picture):
        return f"{picture['title'] or 'Gradients'}: nothing was watched\n  ! {HINT}"
    parts = [f"{picture['title'] or 'Gradients'}: {', '.join(picture['facts'])}"]
    parts += [f"  {'=' if v['word'] == 'same' else '≠'} {v['text']}" for v in picture["verdicts"]]
    for name, lines in _charts(picture):
        known = {n: y for line in lines for n, y in line["points"] if y is not None}
        if name == "replica drift":
            known = {
                n: max(dict(map(tuple, line["points"])).get(n) or 0.0 for line in lines)
                for n in known
            }
        parts.append(f"  {name}: {figure(known[min(known)])} → {figure(known[max(known)])}")
    for step in picture["steps"][-1:]:
        parts.append(f"  norms of the gradients of step {step['n']}")
        pairs = zip(picture["layers"], step["layers"], strict=True)
        parts += [f"    {layer['name']}: {_norms(cell)}" for layer, cell in list(pairs)[:limit]]
        if len(step["layers"]) > limit:
            parts.append(f"    … and {len(step['layers']) - limit:,} more layers")
    return "\n".join(parts + [f"  {line}" for line in flagged(picture)])


def _norms(cell: Json) -> str:
    before = ", ".join(figure(s["norm"]) if s else "–" for s in cell["before"])
    if cell["kind"] == "own" and not cell["same"]:
        return f"{before}, each its own"
    after = figure(cell["after"][0]["norm"]) if cell["same"] and cell["after"] else "–"
    word = "average" if cell["kind"] in ("sum", "mean") else "after"
    return f"{before}  →  {word} {after}"
