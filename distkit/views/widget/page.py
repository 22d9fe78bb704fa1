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
from distkit.views.servers.projection import project as servers
from distkit.views.servers.scene import draw as server_scene
from distkit.views.stage.projection import project as stage
from distkit.views.stage.scene import draw as stage_scene
from distkit.views.tensors import draw as tensors
from distkit.views.timeline.bars import packed
from distkit.views.timeline.columns import Columns
from distkit.views.widget.assets import css, page_script, with_theme

#: Maximum number of operations in a page; above MAX_EVENTS events it has only the timeline.
MAX_OPERATIONS, MAX_EVENTS = 40_000, 200_000
#: Maximum numbers of the stage's calls and of tensor values in a page, per run.
MAX_CALLS, MAX_VALUES = 2_000, 16_000


@dataclass(frozen=True)
class PageView:
    """A view of a page.

    ``about`` describes the view. ``fits`` returns whether a trace has data for it, and ``draw``
    its picture.
    """

    name: str
    about: str
    fits: Callable[[EventLog], bool]
    draw: Callable[[EventLog], Json]

    @property
    def painter(self) -> str:
        """The name of the view's script in assets.py."""
        return "timeline" if self.name == "timeline" else "scene"


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
        lambda trace: packed(Columns(trace, MAX_OPERATIONS), thin=True),
    ),
    PageView(
        "stage",
        "Messages between ranks, and the contributions that each tensor contains. Space plays.",
        lambda trace: _has_communication(trace) and not _has_requests(trace),
        lambda trace: stage_scene(stage(trace, most=MAX_CALLS)),
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
) -> Path:
    """Write a page with one trace, or with a tab for each of several traces.

    The page opens from disk.

    Args:
        trace: a trace, or ``{"p2p": trace, "all_reduce": other}``.
        path: the file to write.
        title: the page's heading.

    Returns:
        The path.

    >>> import tempfile
    >>> page = to_html(EventLog(), Path(tempfile.mkdtemp()) / "run.html")
    >>> "<script" in page.read_text(encoding="utf-8")
    True
    """
    traces = {"": trace} if isinstance(trace, EventLog) else dict(trace)
    path = Path(path)
    runs = [_Run(i, name, trace) for i, (name, trace) in enumerate(traces.items())]
    path.write_text(_page(runs, title), encoding="utf-8")
    return path


def _page(runs: list[_Run], title: str) -> str:
    painters = dict.fromkeys(view.painter for run in runs for view in run.views)
    titles = [run.name or clean(run.trace.info.name) for run in runs]
    return _PAGE.substitute(
        title=escape(title or " · ".join(filter(None, titles)) or "distkit replay"),
        heading=f"<h1>{escape(title)}</h1>" if title else "",
        css=css(*painters),
        tabs=_tabs("runs", {run.id: run.tab for run in runs}),
        panels="\n".join(run.panel(len(runs) > 1) for run in runs),
        pictures=_json(
            {
                run.element_id(view): _pack(with_theme(view.draw(run.trace)))
                for run in runs
                for view in run.views
            }
        ),
        script=page_script(*painters),
    )


class _Run:
    """A trace of a page, with its views."""

    def __init__(self, number: int, name: str, trace: EventLog) -> None:
        self.number, self.name, self.trace = number, name, trace
        self.id, self.tab = f"panel{number}", name.replace("_", " ")
        self.views = fitting(trace)

    def element_id(self, view: PageView) -> str:
        """Return the element id of a view, which also names its picture."""
        return f"{view.name}{self.number}"

    def panel(self, several: bool) -> str:
        """Return the HTML of the run."""
        note = left_out(self.trace)
        parts = [
            f'<section id="{self.id}" {_panel(self.id, several)}{" hidden" * (self.number > 0)}>',
            _tabs("views", {self.element_id(view): view.name.title() for view in self.views}),
            f'<p class="note">{escape(note)}</p>' if note else "",
            *map(self._view, self.views),
            "</section>",
        ]
        return "\n".join(filter(None, parts))

    def _view(self, view: PageView) -> str:
        name, several = self.element_id(view), len(self.views) > 1
        about = f'<p class="about">{escape(view.about)}</p>' if several else ""
        return (
            f'<div id="{name}" {_panel(name, several)}{" hidden" * (view is not self.views[0])}>'
            f'{about}<div data-view="{view.painter.title()}" data-picture="{name}"></div></div>'
        )


def _panel(name: str, several: bool) -> str:
    """Return the attributes of one of several panels."""
    return f'role="tabpanel" aria-labelledby="{name}tab"' if several else ""


def _tabs(kind: str, names: Mapping[str, str]) -> str:
    """Return the tabs of several panels, by the panel's id."""
    if len(names) < 2:
        return ""
    buttons = (
        f'<button role="tab" id="{panel}tab" aria-controls="{panel}" '
        f'aria-selected="{"false" if i else "true"}" tabindex="{-1 if i else 0}">'
        f"{escape(name)}</button>"
        for i, (panel, name) in enumerate(names.items())
    )
    return f'<div class="{kind}" role="tablist" aria-label="{kind}">{"".join(buttons)}</div>'


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
