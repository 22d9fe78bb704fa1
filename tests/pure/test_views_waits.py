"""The wait-for graph as a picture."""

import xml.etree.ElementTree as ET

import traces

from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.rank_state import RankState, RankStatus
from distkit.events import Event, Op, State
from distkit.trace.log import EventLog
from distkit.views.scene.marks import arrow
from distkit.views.scene.renderer import drawing_of
from distkit.views.scene.svg import themed
from distkit.views.scene.theme import MARKS, WARNING_DARK
from distkit.views.scene.waits import wait_for_graph, waits_svg


def recv(rank):
    return Event(rank, 0, Op.RECV, State.BLOCKED, 0.0)


def states(size, waits_for):
    """Return states of ranks that are blocked by others, or finished."""
    blocked = {r: RankState(r, RankStatus.BLOCKED, recv(r), w) for r, w in waits_for.items()}
    return [blocked.get(r, RankState(r, RankStatus.FINISHED)) for r in range(size)]


def draw_graph(size, waits_for):
    """Return the text of each circle, and the number of arrows by color."""
    graph = wait_for_graph(states(size, waits_for))
    marks = [drawing_of(graph["scene"], m[0]) for m in graph["scene"]["marks"]]
    count = {name: sum(s[1] == name for d in marks for s in d) for name in ("wrong", "mean")}
    return sorted(s[4] for s in graph["scene"]["shapes"] if s[0] == "text"), count


def test_ranks_in_a_wait_cycle_are_red():
    assert [draw_graph(3, {0: (1,), 1: (0,)}), draw_graph(3, {0: (1,), 1: (0,), 2: (0,)})] == [
        (["0", "1"], {"wrong": 2, "mean": 0}),
        (["0", "1", "2"], {"wrong": 2, "mean": 1}),  # rank 2 waits for the cycle
    ]


def test_finished_ranks_are_drawn_in_reading_order():
    graph = wait_for_graph(states(3, {0: (1, 2)}))
    circles = [(y, x) for _, layer, _, _, x, y, *_ in graph["scene"]["marks"] if layer]
    assert (circles, graph["legend"].split(" · ")[-1]) == (sorted(circles), "filled: finished")


def test_shaft_has_the_color_of_its_head_and_ends_inside_it():
    shapes = [dict(s[3])["d"] for s in arrow((0, 0), (100, 0), "mean", "full")]
    assert shapes == ["M0.0 0.0L91.0 0.0", "M100.0 0.0L90.0 4.5L90.0 -4.5z"]
    assert MARKS["mean"]["stroke"] == MARKS["full"]["fill"]


def test_released_ranks_are_shown_at_their_last_call():
    events = [
        Event(r, 0, Op.RECV, state, i + r / 2, peer=1 - r)
        for i, state in enumerate((State.STARTED, State.BLOCKED, State.FAILED))
        for r in (0, 1)
    ]
    ends = {str(r): {"how": "released", "text": "", "where": ""} for r in (0, 1)}
    trace = EventLog(events, traces.info(world_size=2, ends=ends))
    assert [s.waits_for for s in Evidence(trace).graph.rank_states] == [(1,), (0,)]
    dark_colors = ET.fromstring(themed(waits_svg(Evidence(trace).graph.rank_states)))[0].text
    assert f"{{stroke:{WARNING_DARK}}}" in dark_colors
