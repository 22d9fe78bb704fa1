"""The timeline's projection, which does not depend on the arrival order of events."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import (
    DEMOS,
    MS,
    Script,
    big,
    gpus,
    hang,
    odd_values,
    parameter_server,
    stores,
)

from distkit.events import COLLECTIVES, Event, Op, State
from distkit.trace.columns import Table
from distkit.trace.info import RankEnd, RunInfo
from distkit.trace.log import EventLog
from distkit.trace.trace import Trace
from distkit.views.timeline.columns import Columns, packed
from distkit.views.timeline.static import to_svg

FEW = settings(max_examples=50, deadline=None)
TRACES = {
    **DEMOS,
    "gpus": gpus,
    "odd": odd_values,
    "big": lambda: big(400),
    "stores": stores,
    "empty": Trace,
}


def test_unrecorded_calls_are_noted() -> None:
    unrecorded = {"0": {"calls of rpc: not recorded": 2}, "1": {"calls of rpc: not recorded": 1}}
    assert (
        "calls of rpc: not recorded (3 times)"
        in Columns(Trace([], traces.info(world_size=2, unrecorded=unrecorded))).picture()["notices"]
    )


def keyed(picture):
    """Return a picture with its bars and arrows by id, since their order is arbitrary.

    Fields that are known only after the run are omitted.
    """
    ended = ("live", "notices")
    lanes = [{**lane, "waiting": None} for lane in picture["lanes"]]
    return {
        **{key: value for key, value in picture.items() if key not in ended},
        "lanes": lanes,
        "bars": {bar["id"]: bar for bar in picture["bars"]},
        "arrows": {arrow["id"]: arrow for arrow in picture["arrows"]},
    }


def sent_messages(trace):
    return Counter(
        (m.src, m.dst, str(m.op), m.nbytes, m.sent is None, m.received is None)
        for m in trace.messages
    )


def drawn_messages(picture):
    return Counter(
        (a["src"], a["dst"], a["op"], a["nbytes"], a["sent"] is None, a["received"] is None)
        for a in picture["arrows"]
    )


#: A duration whose sums are exact in any order [s].
TICK = 2.0**-10


@st.composite
def runs(draw):
    """Generate runs of three ranks with messages, collectives, marks and hangs."""
    events, clock = [], [0.0, 0.0, 0.0]
    choices = [Op.SEND, Op.RECV, Op.ALL_REDUCE, Op.BROADCAST, Op.MARK]
    for seq in range(draw(st.integers(0, 30))):
        rank, op = draw(st.integers(0, 2)), draw(st.sampled_from(choices))
        fields = {"nbytes": draw(st.integers(0, 9)), "group": draw(st.sampled_from("ab"))}
        peer = draw(st.integers(0, 2)) if op in (Op.SEND, Op.RECV) else None
        known = op is not Op.RECV or draw(st.booleans())  # else: from any source
        begin = clock[rank] = clock[rank] + draw(st.integers(1, 3)) * TICK
        end = begin + draw(st.integers(0, 9)) * TICK
        last = draw(st.sampled_from([None, State.FAILED, State.COMPLETED, State.COMPLETED]))
        first = peer if known else None
        events.append(Event(rank, seq, op, State.STARTED, begin, peer=first, **fields))
        if last is not None:
            events.append(Event(rank, seq, op, last, end, peer=peer, **fields))
    return Trace(events)


@st.composite
def arrivals(draw, events):
    """Generate an arrival order that keeps the order of each rank."""
    lanes = defaultdict(list)
    for e in events:
        lanes[e.rank].append(e)
    arrived = []
    while any(lanes.values()):
        rank = draw(st.sampled_from(sorted(r for r in lanes if lanes[r])))
        arrived.append(lanes[rank].pop(0))
    return Table.from_events(arrived)


@FEW
@given(st.data())
def test_event_order_does_not_change_the_picture(data):
    trace = data.draw(runs())
    assert keyed(
        Columns(
            EventLog.from_table(data.draw(arrivals(trace.events)), trace.info), live=True
        ).picture()
    ) == keyed(Columns(trace).picture())


@FEW
@given(runs())
def test_every_message_is_one_arrow_and_every_operation_one_bar(trace):
    picture = Columns(trace).picture()
    assert drawn_messages(picture) == sent_messages(trace)
    assert {bar["id"] for bar in picture["bars"]} == {f"{s.rank}.{s.seq}" for s in trace.spans}


@FEW
@given(runs())
def test_bars_of_a_collective_share_its_match_id(trace):
    collective_of = {bar["id"]: bar.get("collective") for bar in Columns(trace).picture()["bars"]}
    for s in trace.spans:
        expected = trace.matches[s.rank, s.seq] if s.op in COLLECTIVES else None
        assert collective_of[f"{s.rank}.{s.seq}"] == expected


@FEW
@given(runs())
def test_bars_of_one_row_do_not_overlap(trace):
    rows = defaultdict(list)
    for bar in Columns(trace).picture()["bars"]:
        rows[bar["rank"], bar["kind"] == "mark", bar["row"]].append(bar)
    for bars in rows.values():
        bars.sort(key=lambda bar: (bar["start"], bar["end"] or 1e9))
        for one, other in pairwise(bars):
            assert one["end"] is not None and one["end"] <= other["start"] + 1e-6


@pytest.mark.parametrize("name", TRACES)
def test_arrows_agree_with_the_trace(name):
    trace = TRACES[name]()
    assert drawn_messages(Columns(trace).picture()) == sent_messages(trace)


@FEW
@given(st.integers(0, len(parameter_server())))
def test_requests_that_begin_before_the_trace_are_not_lost(begin):
    later = Trace(parameter_server()[begin:], parameter_server().info)
    assert all(arrow["received"] is not None for arrow in Columns(later).picture()["arrows"])


def test_unfinished_operations_are_open_and_in_the_notices():
    picture = Columns(hang()).picture()
    stuck = [bar for bar in picture["bars"] if bar["end"] is None]
    assert sorted((bar["rank"], bar["op"]) for bar in stuck) == [
        (0, "all_reduce"),
        (1, "all_reduce"),
        (2, "all_reduce"),
        (3, "recv"),
    ]
    assert {"still in all_reduce: rank 0, rank 1, rank 2", "still in recv: rank 3"} <= {
        *picture["notices"]
    }
    assert any(notice.startswith("1,203 events dropped") for notice in picture["notices"])


def step(rank, op, *states, seq=0, at=0.0, **fields):
    """Return the events of an operation that enters a new state every millisecond."""
    return [Event(rank, seq, op, s, at + i * MS, **fields) for i, s in enumerate(states)]


def test_paused_operation_is_not_communication():
    send = step(0, Op.SEND, State.SCHEDULED, State.STARTED, peer=1, nbytes=8)
    recv = step(1, Op.RECV, State.SCHEDULED, State.STARTED, State.BLOCKED, peer=0, nbytes=8)
    paused = [*step(0, Op.SEND, State.SCHEDULED, peer=1, nbytes=8), *recv[:1]]

    def so_far(events):
        return Columns(Trace(events, traces.info(world_size=2)), live=True).picture()

    picture = so_far(paused)
    assert [bar["state"] for bar in picture["bars"]] == ["scheduled", "scheduled"]
    assert picture["arrows"] == [] and picture["messages"] == 0
    assert [lane["busy"] for lane in picture["lanes"]] == [0, 0]
    picture = so_far([*paused, *recv])
    assert [bar["state"] for bar in picture["bars"]] == ["scheduled", "blocked"]
    assert [a["sent"] for a in picture["arrows"]] == [None] and picture["messages"] == 0
    picture = so_far([*paused, *recv, *send])
    assert [a["sent"] for a in picture["arrows"]] == [MS] and picture["messages"] == 1
    assert picture["message_bytes"] == 8
    assert Columns(Trace([*send, *recv])).picture()["notices"] == [
        "still in send: rank 0",
        "still in recv: rank 1",
    ]


def test_lanes_are_named_after_roles():
    lanes = Columns(parameter_server()).picture()["lanes"]
    assert [lane["name"] for lane in lanes] == [
        "worker 0",
        "worker 1",
        "server 0",
        "server 1",
        "scheduler",
    ]
    assert lanes[2]["detail"] == "rank 2" and lanes[2]["role"] == "server"
    assert [lane["name"] for lane in Columns(hang()).picture()["lanes"]][3] == "rank 3"


def test_time_in_communication_counts_overlap_once():
    s = Script().op(0, Op.ALL_REDUCE, 0, 2 * MS).op(0, Op.ALL_REDUCE, MS, 3 * MS)
    s.op(0, Op.MARK, 0, 4 * MS, attributes={"label": "all of it"})
    assert Columns(s.trace()).picture()["lanes"][0]["busy"] == pytest.approx(0.75, abs=0.001)


def test_computation_during_an_asynchronous_call_is_not_communication():
    s = Script().op(0, Op.SEND, 0, 10 * MS, peer=1).op(0, Op.RECV, 10 * MS, 11 * MS, peer=1)
    s.op(0, Op.MARK, MS, 9 * MS).op(0, Op.MARK, 11 * MS, 20 * MS)
    assert Columns(s.trace()).picture()["lanes"][0]["busy"] == pytest.approx(0.1, abs=0.001)
    s = Script().op(0, Op.MARK, 0, 10 * MS).op(0, Op.ALL_REDUCE, 2 * MS, 4 * MS)  # inside
    assert Columns(s.trace()).picture()["lanes"][0]["busy"] == pytest.approx(0.2, abs=0.001)


def test_omitted_operations_are_counted():
    picture = Columns(big(160), 30, live=True).picture()
    assert (len(picture["bars"]), picture["operations"], picture["collectives"]) == (30, 160, 20)
    assert "the first 30 of 160 operations are drawn; the totals include all" in picture["notices"]


@pytest.mark.parametrize("name", TRACES)
def test_pictures_are_strict_json(name):
    picture = Columns(TRACES[name]()).picture()
    assert json.loads(json.dumps(picture, allow_nan=False)) == picture


def test_folders_and_control_characters_are_removed():
    s = Script().op(
        0, Op.MARK, 0, MS, attributes={"label": "a\x00\ud800b"}, where="/home/me/a/train.py:7"
    )
    (bar,) = Columns(s.trace(name="\x1b")).picture()["bars"]
    assert bar["where"] == "train.py:7" and bar["label"] == "a\ufffd\ufffdb"


def test_operation_on_a_gpu_has_its_device_time_and_memory():
    picture = Columns(gpus()).picture()
    assert "cuda:1 · stream 7 · 250 µs on the device · 8 MiB in use" in {
        bar["gpu"] for bar in picture["bars"]
    }
    # no label repeats the name of the call
    assert {bar.get("label") for bar in picture["bars"]} == {None}


# -- columns ---------------------------------------------------------------------


def unpacked(picture):
    """Decode columns as the browser does; return the bars by id, the arrows and the arrays."""
    columns, arrays, at = picture["columns"], {}, 0
    for name, kind, length in columns["parts"]:
        size = length * int(kind[1])
        arrays[name] = np.frombuffer(columns["bytes"][at : at + size], f"<{kind}").tolist()
        at += size
    assert at == len(columns["bytes"])
    rows = [t[:3] for t in columns["tracks"] for _ in range(t[3])]
    ids = [f"{rank}.{seq}" for (rank, _, _), seq in zip(rows, arrays["seq"], strict=True)]
    bars = {
        name: (row[2], start, columns["categories"][category]["op"])
        for name, row, start, category in zip(
            ids, rows, arrays["start"], arrays["category"], strict=True
        )
    }
    arrows = Counter(
        (ids[s] if s >= 0 else None, ids[r] if r >= 0 else None)
        for s, r in zip(arrays["send"], arrays["recv"], strict=True)
    )
    return bars, arrows, arrays


@pytest.mark.parametrize("name", TRACES)
def test_columns_encode_the_same_bars_and_arrows(name):
    columns_ = Columns(TRACES[name]())
    picture, (bars, arrows, arrays) = columns_.picture(), unpacked(packed(columns_))
    assert bars.keys() == {bar["id"] for bar in picture["bars"]}
    for bar in picture["bars"]:
        row, start, op = bars[bar["id"]]
        assert (row, op) == (bar["row"], bar["op"]) and start == pytest.approx(bar["start"])
    assert arrows == Counter((a.get("send"), a.get("recv")) for a in picture["arrows"])
    assert len(arrays["valued"]) % 5 == 0
    assert len(arrays["numbers"]) == sum(3 + n for n in arrays["valued"][4::5])


def test_lane_ends_where_its_rank_died() -> None:
    events = [Event(r, 0, Op.ALL_REDUCE, State.STARTED, 0.0) for r in range(3)]
    events.append(Event(0, 0, Op.ALL_REDUCE, State.FAILED, 2.0))
    ends = {1: RankEnd("died", "signal SIGKILL", time=1.0)}
    picture = Columns(Trace(events, RunInfo(world_size=3, ends=ends))).picture()
    assert [lane.get("died") for lane in picture["lanes"]] == [None, 1.0, None]
    assert any("died in" in notice and "rank 1" in notice for notice in picture["notices"])
    assert to_svg(picture).count(">died<") == 1
