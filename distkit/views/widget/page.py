"""A stand-alone replay page: one file, no server, nothing loaded from anywhere.

Each run has its views as tabs. The browser gets the modules of js/ as they are, in an import map.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import astuple
from html import escape
from pathlib import Path
from string import Template

from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json
from distkit.views.scene.text import COLUMNS, headline, rows
from distkit.views.timeline.columns import Columns
from distkit.views.widget.assets import FORMAT, css, dressed, modules, vendor
from distkit.views.widget.page_views import MAX_OPERATIONS, PageView, fitting, left_out

#: So many rows of a table are written out.
MAX_ROWS = 100

_PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


def to_html(trace: EventLog | Mapping[str, EventLog], path: str | Path) -> Path:
    """Write one trace, or several by name as tabs, as a page that opens from the disk.

    Args:
        trace: a trace, or ``{"p2p": trace, "all_reduce": other}``.
        path: the file to write.

    Returns:
        The path.

    >>> import tempfile
    >>> page = to_html(EventLog(), Path(tempfile.mkdtemp()) / "run.html")
    >>> "<script" in page.read_text(encoding="utf-8")
    True
    """
    traces = {"": trace} if isinstance(trace, EventLog) else dict(trace)
    path = Path(path)
    path.write_text(_page(traces), encoding="utf-8")
    return path


def _page(traces: dict[str, EventLog]) -> str:
    runs = [_Run(i, name, trace) for i, (name, trace) in enumerate(traces.items())]
    shown = dict.fromkeys(view.painter for run in runs for view in run.views)
    titles = [run.name or run.table["title"] for run in runs]
    return _PAGE.substitute(
        title=escape(" · ".join(filter(None, titles)) or "distkit replay"),
        css=css(*shown),
        vendor=vendor(),
        tabs=_tabs(list(traces)) if len(runs) > 1 else "",
        panels="\n".join(run.panel(len(runs) > 1) for run in runs),
        pictures=_json(
            {
                "known": FORMAT,
                "pictures": {
                    run.place(view): _packed(dressed(picture))
                    for run in runs
                    for view, (picture, _) in zip(run.views, run.drawn, strict=True)
                },
            }
        ),
        modules=_json({"imports": modules("page", *shown)}),
    )


class _Run:
    """One trace of a page: its views, each drawn, and its tables."""

    def __init__(self, number: int, name: str, trace: EventLog) -> None:
        self.number, self.name, self.trace = number, name, trace
        self.views = fitting(trace)
        self.drawn = [view.draw(trace) for view in self.views]
        columns = Columns(trace, MAX_OPERATIONS)
        self.table = columns.picture(MAX_ROWS * max(2, len(columns.frame["lanes"])))

    def place(self, view: PageView) -> str:
        """The id of a view's element, and its picture's name."""
        return f"{view.name}{self.number}"

    def panel(self, several: bool) -> str:
        """The run's part of the page."""
        i = self.number
        role = f'role="tabpanel" aria-labelledby="tab{i}"' if several else ""
        note = left_out(self.trace)
        parts = [
            self._tabs() if len(self.views) > 1 else "",
            f'<p class="note">{escape(note)}</p>' if note else "",
            *map(self._view, range(len(self.views))),
            _table(self.table),
            _about(self.trace, self.table),
        ]
        return "\n".join(
            [
                f'<section id="panel{i}" {role}{" hidden" if i else ""}>',
                *filter(None, parts),
                "</section>",
            ]
        )

    def _tabs(self) -> str:
        buttons = (
            f'<button role="tab" id="{self.place(view)}tab" aria-controls="{self.place(view)}"'
            f' {_selected(view is self.views[0])} title="{escape(view.about)}">'
            f"{view.name.title()}</button>"
            for view in self.views
        )
        return f'<div class="views" role="tablist" aria-label="views">{"".join(buttons)}</div>'

    def _view(self, n: int) -> str:
        view, (_, static) = self.views[n], self.drawn[n]
        place, several = self.place(view), len(self.views) > 1
        role = f'role="tabpanel" aria-labelledby="{place}tab"' if several else ""
        about = f'<p class="about">{escape(view.about)}</p>' if several else ""
        return (
            f'<div id="{place}" {role}{" hidden" if n else ""}>{about}'
            f'<div data-view="{view.painter.title()}" data-picture="{place}">'
            f"<noscript><h2>{view.name.title()}</h2>{static}</noscript></div></div>"
        )


def _packed(picture: Json) -> Json:
    """A picture as compressed letters; its arrays, if it has any, apart from the rest."""
    arrays = {}
    if "columns" in picture:
        arrays = {"bytes": _letters(picture["columns"]["bytes"])}
        picture = {**picture, "columns": {**picture["columns"], "bytes": ""}}
    text = json.dumps(picture, allow_nan=False, separators=(",", ":"))
    return {"json": _letters(text.encode()), **arrays}


def _letters(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _tabs(names: list[str]) -> str:
    buttons = (
        f'<button role="tab" id="tab{i}" aria-controls="panel{i}" {_selected(i == 0)}>'
        f"{escape(name.replace('_', ' '))}</button>"
        for i, name in enumerate(names)
    )
    return f'<div class="tabs" role="tablist" aria-label="runs">{"".join(buttons)}</div>'


def _selected(truth: bool) -> str:
    return f'aria-selected="{str(truth).lower()}" tabindex="{-1 + truth}"'


def _about(trace: EventLog, picture: Json) -> str:
    """The ranks of the run, and where they ran."""
    ranks = {int(r): about for r, about in trace.meta.get("ranks", {}).items()}
    keys = [k for k in ("role", "host", "pid", "device") if any(a.get(k) for a in ranks.values())]
    if not keys:
        return ""
    names = {lane["rank"]: lane["name"] for lane in picture["lanes"]}
    body = [
        (str(r), names.get(r, f"rank {r}"), *(str(about.get(k) or "") for k in keys))
        for r, about in sorted(ranks.items())
    ]
    return _details(f"The {len(body)} ranks", ("rank", "name", *keys), body)


def _table(picture: Json) -> str:
    found = rows(picture)
    if not found:
        return ""
    entries = picture["entries"]
    more = f" (the first {MAX_ROWS} of {entries:,} rows)" if entries > MAX_ROWS else ""
    body = [astuple(row) for row in found[:MAX_ROWS]]
    return _details(f"Messages and collectives{more}", COLUMNS, body, headline(picture))


def _details(
    summary: str, head: tuple[str, ...], body: list[tuple[str, ...]], caption: str = ""
) -> str:
    cells = "".join(f'<th scope="col">{escape(c)}</th>' for c in head)
    lines = "\n".join(
        "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in body
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<details open><summary>{escape(summary)}</summary><div class="scroll"><table>{title}'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>{lines}</tbody></table></div></details>"
    )
