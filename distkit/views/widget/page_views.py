"""The views of a stand-alone page. A new one joins with a line in ``VIEWS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from distkit.events import COMPUTATION, REQUESTS
from distkit.trace.log import EventLog
from distkit.views.gradients import static as gradient_static
from distkit.views.gradients.projection import project as gradients
from distkit.views.scene.frame import Json
from distkit.views.scene.painter import to_svg as scene_svg
from distkit.views.scene.units import count
from distkit.views.servers.projection import project as servers
from distkit.views.servers.scene import draw as server_scene
from distkit.views.stage import static as storyboard
from distkit.views.stage.projection import project as stage
from distkit.views.tensors import static as tensor_static
from distkit.views.tensors.projection import project as tensors
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.packing import packed
from distkit.views.timeline.static import MAX_BARS, to_svg

#: Of a longer run a page has the first operations, and beyond so many events the timeline alone.
MAX_OPERATIONS, MAX_EVENTS = 40_000, 200_000
#: So many messages and values of tensors are in a page, per run.
MAX_BEATS, MAX_VALUES = 1_000, 16_000


@dataclass(frozen=True)
class PageView:
    """A view as pages know it.

    ``name`` is its name, ``about`` what it shows, ``fits`` tells whether a trace has anything for
    it, ``draw`` makes the painter's picture and the static one, ``kit`` is the painter that it
    shares with others.
    """

    name: str
    about: str
    fits: Callable[[EventLog], bool]
    draw: Callable[[EventLog], tuple[Json, str]]
    kit: str = ""

    @property
    def painter(self) -> str:
        """Its name in assets.py."""
        return self.kit or self.name


def _drawn(
    project: Callable[[EventLog], Json], static: Callable[[Json], str]
) -> Callable[[EventLog], tuple[Json, str]]:
    def draw(trace: EventLog) -> tuple[Json, str]:
        picture = project(trace)
        return picture, static(picture)

    return draw


def _timeline(trace: EventLog) -> tuple[Json, str]:
    columns = Columns(trace, MAX_OPERATIONS)
    return packed(columns, thin=True), to_svg(columns.picture(3 * MAX_BARS))


def _speaks(trace: EventLog) -> bool:
    """True if a rank said anything to another."""
    return any(e.op not in COMPUTATION for e in trace.events)


def _has_values(trace: EventLog) -> bool:
    """True if the values of a message or a collective were looked at."""
    return any(e.summary is not None and e.op not in COMPUTATION for e in trace.events)


def _is_watched(trace: EventLog) -> bool:
    """True if somebody watched gradients."""
    return any(
        e.summary is not None and e.attributes.get("watched") in ("gradient", "step")
        for e in trace.events
    )


def _asks(trace: EventLog) -> bool:
    """True if somebody asked a parameter server."""
    return any(e.op in REQUESTS for e in trace.events)


VIEWS = (
    PageView(
        "timeline",
        "Each rank's calls over time, and the messages between ranks.",
        lambda _: True,
        _timeline,
    ),
    PageView(
        "stage",
        "Messages between ranks, and the contributions that each tensor holds. Space plays.",
        _speaks,
        _drawn(partial(stage, most=MAX_BEATS), storyboard.to_svg),
    ),
    PageView(
        "tensors",
        "The values of each message and collective, before and after, on every rank.",
        _has_values,
        _drawn(partial(tensors, room=MAX_VALUES), tensor_static.to_svg),
    ),
    PageView(
        "gradients",
        "Gradients per layer and rank, before and after the all-reduce; drift, loss and speed.",
        _is_watched,
        _drawn(gradients, gradient_static.to_svg),
    ),
    PageView(
        "servers",
        "Keys on their servers, pushes and pulls in flight, and which worker waits for which.",
        _asks,
        _drawn(lambda trace: server_scene(servers(trace)), scene_svg),
        kit="scene",
    ),
)


def fitting(trace: EventLog) -> list[PageView]:
    """The views that a trace has something for, and that a page has room for."""
    return [v for v in VIEWS[: 1 if len(trace) > MAX_EVENTS else None] if v.fits(trace)]


def left_out(trace: EventLog) -> str:
    """What a page of a long run lacks, and where it is to be seen; "" if nothing."""
    if len(trace) <= MAX_EVENTS:
        return ""
    return (
        f"A run of {count(len(trace), 'event')}: this page has its timeline only. The other "
        "views show it in a notebook: dk.Stage(dk.Trace.load(FILE))."
    )
