"""Writes stand-alone replay pages: single files that need no server or external resources.

Each run has a tab per view. A single script contains the modules of js/ that the views need.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from distkit._format import count
from distkit.events import REQUESTS
from distkit.trace.log import EventLog
from distkit.views.gradients import draw as gradients
from distkit.views.scene.frame import Json, dotted
from distkit.views.servers.scene import draw as servers
from distkit.views.stage.scene import draw as stage
from distkit.views.tensors import draw as tensors
from distkit.views.timeline.columns import Columns, packed
from distkit.views.widget.assets import css, page_script, with_theme

#: A timeline has at most MAX_OPERATIONS operations. A run with more than MAX_EVENTS events has only
#: a timeline.
MAX_OPERATIONS, MAX_EVENTS = 40_000, 200_000
#: A stage has at most MAX_CALLS calls, and a Tensors view has at most MAX_VALUES values.
MAX_CALLS, MAX_VALUES = 4_000, 16_000


#: The descriptions of the views; a view without data in a run has no tab.
VIEWS = {
    "timeline": "Each rank's calls over time, and the messages between ranks.",
    "stage": "Messages between ranks, and the contributions that each tensor contains. "
    "Press the space bar to play.",
    "tensors": "The values of each message and collective, before and after, on every rank.",
    "gradients": "Gradients per layer and rank, before and after the all-reduce; drift and loss.",
    "servers": "Keys on their servers, pushes and pulls in flight, and which worker waits for "
    "which.",
}


def pictures(trace: EventLog) -> dict[str, Json]:
    """Return the picture of each view that has data in a trace and fits into a page."""
    drawn = {"timeline": packed(Columns(trace, MAX_OPERATIONS))}
    if len(trace) <= MAX_EVENTS:
        if any(e.op in REQUESTS for e in trace.events):
            drawn["servers"] = servers(trace)
        elif len(trace.ranks) > 1:
            drawn["stage"] = stage(trace, max_calls=MAX_CALLS)
        drawn["tensors"] = tensors(trace, max_values=MAX_VALUES)
        drawn["gradients"] = gradients(trace)
    return {view: drawn[view] for view in VIEWS if view in drawn and not drawn[view].get("empty")}


def renderer(view: str) -> str:
    """Return the name of the script that draws a view; see assets.py."""
    return "timeline" if view == "timeline" else "scene"


def long_run_notice(trace: EventLog) -> str:
    """Return a notice if a run is so long that the page shows only its timeline; otherwise ""."""
    if len(trace) <= MAX_EVENTS:
        return ""
    return (
        f"This run has {count(len(trace), 'event')}, so this page shows only its timeline. For the "
        "other views, use dk.Stage(dk.Trace.load(FILE)) in a notebook."
    )


_PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


def to_html(
    trace: EventLog | Mapping[str, EventLog],
    path: str | Path,
    *,
    title: str = "",
    about: Mapping[str, str] | None = None,
    first: Sequence[str] = (),
) -> Path:
    """Write a page with one trace, or with a tab for each of several traces.

    The page can be opened from disk, without a server.

    Args:
        trace: a trace, or ``{"p2p": trace, "all_reduce": other}``.
        path: the file to write.
        title: the page's heading.
        about: a sentence about each of several traces, by name.
        first: views in order of preference. Each trace opens with the first of these that it has,
            or with the timeline if it has none of them.

    Returns:
        The path.

    >>> import tempfile
    >>> page = to_html(EventLog(), Path(tempfile.mkdtemp()) / "run.html")
    >>> "<script" in page.read_text(encoding="utf-8")
    True
    """
    traces = {"": trace} if isinstance(trace, EventLog) else dict(trace)
    path, about = Path(path), about or {}
    runs = [
        _Run(i, name, trace, about.get(name, ""), first)
        for i, (name, trace) in enumerate(traces.items())
    ]
    path.write_text(_page(runs, title), encoding="utf-8")
    return path


def _page(runs: list[_Run], title: str) -> str:
    renderers = dict.fromkeys(renderer(view) for run in runs for view in run.pictures)
    names = dotted(run.name or run.trace.info.name for run in runs)
    return _PAGE.substitute(
        title=escape(title or names or "distkit replay"),
        heading=f"<h1>{escape(title)}</h1>" if title else "",
        css=css(*renderers),
        tabs=_tabs("runs", {run.id: run.name.replace("_", " ") for run in runs}),
        panels="\n".join(run.panel(len(runs) > 1) for run in runs),
        pictures=_json(
            {
                run.element_id(view): _pack(with_theme(picture))
                for run in runs
                for view, picture in run.pictures.items()
            }
        ),
        script=page_script(*renderers),
    )


class _Run:
    """A trace of a page, with its pictures in the order of their tabs."""

    def __init__(
        self, number: int, name: str, trace: EventLog, about: str, first: Sequence[str]
    ) -> None:
        self.number, self.name, self.trace, self.about = number, name, trace, about
        self.id, drawn = f"panel{number}", pictures(trace)
        self.first = next((view for view in first if view in drawn), "timeline")
        self.pictures = {self.first: drawn[self.first], **drawn}

    def element_id(self, view: str) -> str:
        """Return the element id of a view, which also names its picture."""
        return f"{view}{self.number}"

    def panel(self, several: bool) -> str:
        """Return the HTML of the run."""
        parts = [
            f'<section id="{self.id}" {_panel(self.id, several)}{" hidden" * (self.number > 0)}>',
            *(
                f'<p class="note">{escape(s)}</p>'
                for s in (self.about, long_run_notice(self.trace))
                if s
            ),
            _tabs("views", {self.element_id(view): view.title() for view in self.pictures}),
            *map(self._view, self.pictures),
            "</section>",
        ]
        return "\n".join(filter(None, parts))

    def _view(self, view: str) -> str:
        name, several = self.element_id(view), len(self.pictures) > 1
        about = f'<p class="about">{escape(VIEWS[view])}</p>' if several else ""
        return (
            f'<div id="{name}" {_panel(name, several)}{" hidden" * (view != self.first)}>'
            f'{about}<div data-view="{renderer(view).title()}" data-picture="{name}"></div></div>'
        )


def _panel(name: str, several: bool) -> str:
    """Return the HTML attributes of a panel, if there are several."""
    return f'role="tabpanel" aria-labelledby="{name}tab"' if several else ""


def _tabs(kind: str, names: Mapping[str, str]) -> str:
    """Return the HTML of tabs with these names, by panel id; "" if there is only one."""
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
    return re.sub("[<>&]", lambda character: f"\\u{ord(character[0]):04x}", text)
