"""A parameter server's run as a static picture of a telling moment, and as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.geometry import text_width
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT
from distkit.views.scene.units import count, human_bytes, human_seconds
from distkit.views.servers.scene import END, MIDDLE, Scene, cut
from distkit.views.servers.staleness import LETTERS, said
from distkit.views.servers.state import at, counts, resting, stretches

WIDTH, LEFT, MAX_BYTES = 960, 24, 60_000
#: At most so many workers' waiting is drawn, updates are listed, keys are written in the table.
MAX_LANES, MAX_UPDATES, MAX_ROWS = 8, 14, 24
PANEL = 790  # where the updates are written
TITLE, BOLD = 'font-size="11.5"', 'font-size="11" font-weight="700"'
NOTHING = "this trace has no requests to a parameter server"


def to_svg(picture: Json) -> str:
    """The moment at which the view opens, as an SVG document of at most 60 kB.

    >>> from distkit.trace.log import EventLog
    >>> from distkit.views.servers.projection import project
    >>> to_svg(project(EventLog())).startswith("<svg ")
    True
    """
    for pixel in (1.0, 2.0, 4.0, 16.0):
        drawn = _Page(picture, pixel).document()
        if len(drawn.encode()) <= MAX_BYTES:
            break
    return drawn


class _Page:
    """Paints one moment; ``pixel``: shorter stretches of waiting are joined."""

    def __init__(self, picture: Json, pixel: float) -> None:
        self.picture, self.pixel, self.time = picture, pixel, picture["opening"]
        self.scene = Scene(picture, at(picture, self.time))

    def document(self) -> str:
        p = self.picture
        title = p["title"] or "Servers"
        facts = " · ".join(p["facts"])
        parts = [svg.heading(LEFT, 32, title, facts), svg.text(LEFT, 53, p["said"], GRAY)]
        y = 74.0 if p["said"] else 54.0
        for notice in p["notices"]:
            parts.append(svg.text(LEFT, y, f"! {notice}", WARNING_LIGHT))
            y += 20
        if not p["beats"] and not p["cards"]:
            parts.append(svg.text(LEFT, y + 8, NOTHING, GRAY))
            return svg.document(WIDTH, y + 30, title, "".join(parts))
        parts.append(f'<g transform="translate(16 {y:.0f})">{self.scene.body()}</g>')
        parts += self._updates(y + 14)
        y += p["height"] + 20
        parts += [*self._fact(y), *self._waiting(y + 46)]
        y += 62 + 13 * min(len(p["workers"]), MAX_LANES)
        parts += self._sums(y + 24)
        y += 142 if any(p["staleness"]["totals"]) else 78
        return svg.document(WIDTH, y, title, "".join(parts))

    # -- beside and below ----------------------------------------------------------------

    def _fact(self, y: float) -> Iterator[str]:
        beat = resting(self.picture, self.time) or {"who": "before the first message", "more": ""}
        when = human_seconds(self.time - self.picture["start"])
        yield svg.text(324, y, beat["who"], INK, f'{MIDDLE} font-size="15" font-weight="700"')
        more = " · ".join(filter(None, [f"at {when}", beat["more"]]))
        yield svg.text(324, y + 19, more, GRAY, MIDDLE)

    def _updates(self, y: float) -> Iterator[str]:
        """The last updates until the moment."""
        rows = self.picture["rows"]
        done = [u for u in self.picture["updates"] if u[3] is not None and u[3] <= self.time]
        yield svg.text(PANEL, y, "updates until now", INK, 'font-weight="700"')
        if not done:
            yield svg.text(PANEL, y + 20, "none yet", GRAY)
        for row, version, _, _, late in done[-MAX_UPDATES:]:
            y += 21
            name = cut(rows[row]["key"], 76)
            words = f"{name} v{version}"
            yield svg.text(PANEL, y, words, INK, f'font-family="{svg.CODE}" font-size="11"')
            x = PANEL + 6.7 * len(words) + 10
            for i, (worker, n) in enumerate(late):
                told = f"{n} late" if n else ""
                wide = 12 + (text_width(told, 12) + 6 if n else 0)
                if x + wide > WIDTH - (LEFT if i + 1 == len(late) else 2 * LEFT):
                    yield svg.text(x - 4, y, f"+ {len(late) - i}", GRAY, 'font-size="11"')
                    break
                fill = self.scene.color(worker)
                yield f'<circle cx="{x:.0f}" cy="{y - 4:.0f}" r="4.2" fill="{fill}"/>'
                yield from [svg.text(x + 8, y, told, WARNING_LIGHT, BOLD)] if n else ()
                x += wide

    def _waiting(self, y: float) -> Iterator[str]:
        """Per worker the whole run: full while it waits for others, pale while it computes."""
        p = self.picture
        span = max(p["end"] - p["start"], 1e-12)
        left, right = 110.0, WIDTH - 120.0

        def x(time: float) -> float:
            part: float = (time - p["start"]) / span
            return left + min(max(part, 0.0), 1.0) * (right - left)

        for i, w in enumerate(p["workers"][:MAX_LANES]):
            top, color = y + 13 * i, self.scene.color(w["rank"])
            yield svg.text(left - 10, top + 8, w["name"], GRAY, f'{END} font-size="11"')
            paths: dict[str, str] = defaultdict(str)
            waited, reached = 0.0, 0.0
            for kind, begin, end in stretches(p, w["rank"]):
                a, b = x(begin), x(end)
                waited += (b - a) * (kind == "waits")
                if b - a >= self.pixel / 2 and b > reached:
                    a = max(a, reached)
                    paths[kind] += f"M{a:.1f} {top:.0f}h{b - a:.1f}v8h{a - b:.1f}z"
                    reached = b
            for kind, d in paths.items():
                pale = "" if kind == "waits" else ' fill-opacity=".22"'
                yield f'<path d="{d}" fill="{color}"{pale}/>'
            told = f"waits {100 * waited / (right - left):.0f} %"
            yield svg.text(right + 10, top + 8, told, GRAY, 'font-size="11"')
        bottom = y + 13 * min(len(p["workers"]), MAX_LANES)
        yield svg.line(x(self.time), y - 3, x(self.time), bottom, INK, 1.3)

    def _sums(self, y: float) -> Iterator[str]:
        sums, x = counts(self.picture), float(LEFT)
        told = [
            (sums["pushes"], "pushes", human_bytes(sums["there"])),
            (sums["pulls"], "pulls", human_bytes(sums["back"])),
            (sums["updates"], "updates", "in all"),
        ]
        for n, noun, more in told:
            yield svg.text(x, y + 16, f"{n:,}", INK, 'font-size="19" font-weight="700"')
            yield svg.text(x, y + 36, f"{noun} · {more}", GRAY)
            x += 150
        if any(sums["late"]):
            yield from self._staleness(y, sums["late"])

    def _staleness(self, y: float, counts: list[int]) -> Iterator[str]:
        """The histogram, from 10 pixels above y to 104 below."""
        drawn = self.picture["staleness"]
        pitch, most, small = drawn["pitch"], max(counts), f'font-size="{LETTERS}"'
        left, base = WIDTH - LEFT - drawn["room"], y + 22 + drawn["high"]
        yield svg.text(left, y, "gradients", GRAY, TITLE)
        yield svg.line(left, base, left + pitch * len(counts), base, GRAY, 1)
        for i, (n, label) in enumerate(zip(counts, drawn["labels"], strict=True)):
            x, middle = left + i * pitch, left + (i + 0.5) * pitch
            color = WARNING_LIGHT if i else "#8f9aa6"
            high = max(drawn["high"] * n / most, 2.0)
            if n:
                yield svg.rect(x + 1, base - high, pitch - 2, high, f'fill="{color}"', "", 1)
                yield svg.text(middle, base - high - 4, f"{n:,}", INK, f"{MIDDLE} {small}")
            yield svg.text(middle, base + 14, label, GRAY, f"{MIDDLE} {small}")
        yield svg.text(left, base + 32, drawn["axis"], GRAY, TITLE)


def to_table(picture: Json) -> str:
    """For a terminal, at the end: keys and their versions, who waits for whom, the counters."""
    p, now = picture, at(picture, picture["end"])
    names = {rank: name for rank, _, name in p["lanes"]}
    lines = [f"{p['title'] or 'Servers'}: {', '.join(p['facts'])}".rstrip(": ")]
    if not p["beats"]:
        return f"{lines[0]}\n  {NOTHING}"
    for row, state in list(zip(p["rows"], now.rows, strict=True))[:MAX_ROWS]:
        version = "no value" if state.version is None else f"v{state.version}"
        part = ", part {} of {}".format(*row["part"]) if row["part"] else ""
        here = f", {count(len(state.slots), 'gradient')} in the inbox" if state.slots else ""
        server = names.get(row["server"], f"rank {row['server']}")
        size = f"({human_bytes(row['nbytes'])}{part})"
        lines.append(f"  {server}: {row['key']} {version} {size}{here}")
    if len(p["rows"]) > MAX_ROWS:
        lines.append(f"  … and {len(p['rows']) - MAX_ROWS:,} more keys")
    lines += [
        f"  {names.get(node, node)} {text}"
        for node, (kind, text, _) in now.status.items()
        if kind == "waits"
    ]
    sums = counts(p)
    late = said(p["staleness"], sums["late"])
    pushes = "1 push" if sums["pushes"] == 1 else f"{sums['pushes']:,} pushes"
    told = [
        f"{pushes} ({human_bytes(sums['there'])})",
        f"{count(sums['pulls'], 'pull')} ({human_bytes(sums['back'])})",
        count(sums["updates"], "update"),
    ]
    lines.append("  " + ", ".join(told) + (f"; gradients of staleness {late}" if late else ""))
    return "\n".join([*lines, *(f"  ! {notice}" for notice in p["notices"])])
