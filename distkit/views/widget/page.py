"""Writes stand-alone replay pages: a single file without a server or external resources.

Each run has its views as tabs. One script contains the modules of js/ that they need. ``VIEWS``
lists the views.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from distkit._format import count
from distkit.events import COMPUTATION, REQUESTS
from distkit.trace.log import EventLog
from distkit.views.gradients.scene import draw as gradients
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.painter import to_svg as scene_svg
from distkit.views.servers.projection import project as servers
from distkit.views.servers.scene import draw as server_scene
from distkit.views.stage.projection import project as stage
from distkit.views.stage.scene import draw as stage_scene
from distkit.views.tensors import draw as tensors
from distkit.views.timeline.bars import packed
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.static import MAX_BARS, to_svg
from distkit.views.widget.assets import css, page_script, with_theme

#: Maximum number of operations in a page; above MAX_EVENTS events it has only the timeline.
MAX_OPERATIONS, MAX_EVENTS = 40_000, 200_000
#: Maximum numbers of messages and tensor values in a page, per run.
MAX_KEYFRAMES, MAX_VALUES = 1_000, 16_000


@dataclass(frozen=True)
class PageView:
    """A view of a page.

    ``about`` describes the view. ``fits`` returns whether a trace has data for it. ``scene``
    returns its picture; it is None for the timeline, which is not a scene.
    """

    name: str
    about: str
    fits: Callable[[EventLog], bool]
    scene: Callable[[EventLog], Json] | None = None

    @property
    def painter(self) -> str:
        """The name of the view's script in assets.py."""
        return "scene" if self.scene else self.name

    def draw(self, trace: EventLog) -> tuple[Json, str]:
        """Return the picture for the browser, and the static one."""
        if self.scene is None:
            columns = Columns(trace, MAX_OPERATIONS)
            return packed(columns, thin=True), to_svg(columns.picture(3 * MAX_BARS))
        picture = self.scene(trace)
        return picture, scene_svg(picture)


def _has_communication(trace: EventLog) -> bool:
    """Return True if a trace has several ranks and calls other than computation."""
    return len(trace.ranks) > 1 and any(e.op not in COMPUTATION for e in trace.events)


def _has_values(trace: EventLog) -> bool:
    """Return True if the trace has values of messages or collectives."""
    return any(e.summary is not None and e.op not in COMPUTATION for e in trace.events)


def _has_gradients(trace: EventLog) -> bool:
    """Return True if the trace has watched gradients."""
    return any(
        e.summary is not None and e.attributes.get("watched") in ("gradient", "step")
        for e in trace.events
    )


def _has_requests(trace: EventLog) -> bool:
    """Return True if the trace has requests to a parameter server."""
    return any(e.op in REQUESTS for e in trace.events)


VIEWS = (
    PageView(
        "timeline",
        "Each rank's calls over time, and the messages between ranks.",
        lambda _: True,
    ),
    PageView(
        "stage",
        "Messages between ranks, and the contributions that each tensor contains. Space plays.",
        lambda trace: _has_communication(trace) and not _has_requests(trace),
        lambda trace: stage_scene(stage(trace, most=MAX_KEYFRAMES)),
    ),
    PageView(
        "tensors",
        "The values of each message and collective, before and after, on every rank.",
        _has_values,
        lambda trace: tensors(trace, max_values=MAX_VALUES),
    ),
    PageView(
        "gradients",
        "Gradients per layer and rank, before and after the all-reduce; drift and loss.",
        _has_gradients,
        gradients,
    ),
    PageView(
        "servers",
        "Keys on their servers, pushes and pulls in flight, and which worker waits for which.",
        _has_requests,
        lambda trace: server_scene(servers(trace)),
    ),
)


def fitting(trace: EventLog) -> list[PageView]:
    """Return the views that have data in a trace and fit into a page."""
    return [v for v in VIEWS[: 1 if len(trace) > MAX_EVENTS else None] if v.fits(trace)]


def left_out(trace: EventLog) -> str:
    """Return a notice if the page of a long run lacks views, else ""."""
    if len(trace) <= MAX_EVENTS:
        return ""
    return (
        f"With {count(len(trace), 'event')}, this page shows only the timeline. For the other "
        "views, use dk.Stage(dk.Trace.load(FILE)) in a notebook."
    )


_PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


def to_html(
    trace: EventLog | Mapping[str, EventLog],
    path: str | Path,
    *,
    title: str = "",
    about: Mapping[str, str] | None = None,
    first: Mapping[str, str] | None = None,
) -> Path:
    """Write a page with one trace, or with a tab for each of several traces.

    The page opens from disk.

    Args:
        trace: a trace, or ``{"p2p": trace, "all_reduce": other}``.
        path: the file to write.
        title: the page's heading.
        about: descriptions of runs, by name.
        first: initial views of runs, by name; by default the timeline.

    Returns:
        The path.

    >>> import tempfile
    >>> page = to_html(EventLog(), Path(tempfile.mkdtemp()) / "run.html")
    >>> "<script" in page.read_text(encoding="utf-8")
    True
    """
    traces = {"": trace} if isinstance(trace, EventLog) else dict(trace)
    path = Path(path)
    about, first = about or {}, first or {}
    runs = [
        _Run(i, name, trace, about.get(name, ""), first.get(name, ""))
        for i, (name, trace) in enumerate(traces.items())
    ]
    path.write_text(_page(runs, title), encoding="utf-8")
    return path


def _page(runs: list[_Run], title: str) -> str:
    painters = dict.fromkeys(view.painter for run in runs for view in run.views)
    titles = [run.name or clean(run.trace.info.name) for run in runs]
    return _PAGE.substitute(
        title=escape(title or " · ".join(filter(None, titles)) or "distkit replay"),
        heading=f"<h1>{escape(title)}</h1>" if title else "",
        css=css(*painters),
        tabs=_tabs([run.name for run in runs]) if len(runs) > 1 else "",
        panels="\n".join(run.panel(len(runs) > 1) for run in runs),
        pictures=_json(
            {
                run.element_id(view): _pack(with_theme(picture))
                for run in runs
                for view, (picture, _) in zip(run.views, run.drawn, strict=True)
            }
        ),
        script=page_script(*painters),
    )


class _Run:
    """A trace of a page, with its drawn views."""

    def __init__(self, number: int, name: str, trace: EventLog, about: str, first: str) -> None:
        self.number, self.name, self.trace, self.about = number, name, trace, about
        self.views = sorted(fitting(trace), key=lambda view: view.name != first)
        self.drawn = [view.draw(trace) for view in self.views]

    def element_id(self, view: PageView) -> str:
        """Return the element id of a view, which also names its picture."""
        return f"{view.name}{self.number}"

    def panel(self, several: bool) -> str:
        """Return the HTML of the run."""
        i = self.number
        role = f'role="tabpanel" aria-labelledby="tab{i}"' if several else ""
        note = left_out(self.trace)
        parts = [
            f'<p class="run">{escape(self.about)}</p>' if self.about else "",
            self._tabs() if len(self.views) > 1 else "",
            f'<p class="note">{escape(note)}</p>' if note else "",
            *map(self._view, range(len(self.views))),
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
            f'<button role="tab" id="{self.element_id(view)}tab" '
            f'aria-controls="{self.element_id(view)}"'
            f' {_selected(view is self.views[0])} title="{escape(view.about)}">'
            f"{view.name.title()}</button>"
            for view in self.views
        )
        return f'<div class="views" role="tablist" aria-label="views">{"".join(buttons)}</div>'

    def _view(self, n: int) -> str:
        view, (_, static) = self.views[n], self.drawn[n]
        name, several = self.element_id(view), len(self.views) > 1
        role = f'role="tabpanel" aria-labelledby="{name}tab"' if several else ""
        about = f'<p class="about">{escape(view.about)}</p>' if several else ""
        return (
            f'<div id="{name}" {role}{" hidden" if n else ""}>{about}'
            f'<div data-view="{view.painter.title()}" data-picture="{name}">'
            f"<noscript><h2>{view.name.title()}</h2>{static}</noscript></div></div>"
        )


def _pack(picture: Json) -> Json:
    """Return a picture as compressed base64, with its arrays as a separate field."""
    arrays = {}
    if "columns" in picture:
        arrays = {"bytes": _base64(picture["columns"]["bytes"])}
        picture = {**picture, "columns": {**picture["columns"], "bytes": ""}}
    text = json.dumps(picture, allow_nan=False, separators=(",", ":"))
    return {"json": _base64(text.encode()), **arrays}


def _base64(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _json(value: object) -> str:
    """Return JSON that is safe inside a script element."""
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


def _selected(selected: bool) -> str:
    return f'aria-selected="{str(selected).lower()}" tabindex="{-1 + selected}"'
