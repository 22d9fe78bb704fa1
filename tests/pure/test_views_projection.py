"""The projection: the picture as data, the same whether fed at once or in pieces."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import DEMOS, MS, Script, big, hang, odd_values, parameter_server, ring, sync_sgd

from distkit.events import COLLECTIVES, Event, Op, State, Trace
from distkit.views import projection
from distkit.views.lanes import Busy
from distkit.views.projection import Projection, project

FEW = settings(max_examples=50, deadline=None)
TRACES = {**DEMOS, "odd": odd_values, "big": lambda: big(400), "empty": Trace}


def keyed(picture):
    """A picture with its bars and arrows by id: their order carries no meaning."""
    return {
        **picture,
        "bars": {bar["id"]: bar for bar in picture["bars"]},
        "arrows": {arrow["id"]: arrow for arrow in picture["arrows"]},
    }


def merged(meta, pieces):
    """What a browser holds that has merged one patch after the other."""
    p = Projection(meta)
    picture = keyed(p.snapshot())
    for piece in pieces:
        patch = keyed(p.feed(piece))
        bars, arrows = picture["bars"] | patch["bars"], picture["arrows"] | patch["arrows"]
        picture = {**patch, "bars": bars, "arrows": arrows}
    assert picture == keyed(p.snapshot())
    return picture


def sent_messages(trace):
    return Counter((m.src, m.dst, str(m.op), m.nbytes, m.sent is None, m.received is None)
                   for m in trace.messages)  # fmt: skip


def drawn_messages(picture):
    return Counter((a["src"], a["dst"], a["op"], a["nbytes"], a["sent"] is None,
                    a["received"] is None) for a in picture["arrows"])  # fmt: skip


@st.composite
def runs(draw):
    """Any run of three ranks: messages, also from any source, collectives, marks, hangs."""
    events, clock = [], [0.0, 0.0, 0.0]
    choices = [Op.SEND, Op.RECV, Op.ALL_REDUCE, Op.BROADCAST, Op.MARK]
    for seq in range(draw(st.integers(0, 30))):
        rank, op = draw(st.integers(0, 2)), draw(st.sampled_from(choices))
        fields = {"nbytes": draw(st.integers(0, 9)), "group": draw(st.sampled_from("ab"))}
        peer = draw(st.integers(0, 2)) if op in (Op.SEND, Op.RECV) else None
        known = op is not Op.RECV or draw(st.booleans())  # else: from any source
        begin = clock[rank] = clock[rank] + draw(st.integers(1, 3)) * MS
        end = begin + draw(st.integers(0, 9)) * MS
        last = draw(st.sampled_from([None, State.FAILED, State.COMPLETED, State.COMPLETED]))
        first = peer if known else None
        events.append(Event(rank, seq, op, State.STARTED, begin, peer=first, **fields))
        if last is not None:
            events.append(Event(rank, seq, op, last, end, peer=peer, **fields))
    return Trace(events)


@st.composite
def pieces(draw, events):
    """Events as they may arrive: each rank's in order, ranks late, some twice."""
    lanes = defaultdict(list)
    for e in events:
        lanes[e.rank].append(e)
    arrived = []
    while any(lanes.values()):
        rank = draw(st.sampled_from(sorted(r for r in lanes if lanes[r])))
        some = draw(st.integers(1, len(lanes[rank])))
        arrived.append(lanes[rank][:some])
        lanes[rank] = lanes[rank][some - draw(st.integers(0, 1)) * (some > 1) :]
    return arrived


@FEW
@given(st.data())
def test_pieces_in_any_order_make_the_same_picture(data):
    trace = data.draw(runs())
    assert merged({}, data.draw(pieces(trace.events))) == keyed(project(trace))


@pytest.mark.parametrize("name", TRACES)
def test_event_by_event_makes_the_same_picture(name):
    trace = TRACES[name]()
    assert merged(trace.meta, [[e] for e in trace]) == keyed(project(trace))


@FEW
@given(runs())
def test_every_message_is_one_arrow_and_every_operation_one_bar(trace):
    picture = project(trace)
    assert drawn_messages(picture) == sent_messages(trace)
    assert {bar["id"] for bar in picture["bars"]} == {f"{s.rank}.{s.seq}" for s in trace.spans}


@FEW
@given(runs())
def test_members_of_a_collective_share_a_tie(trace):
    ties = {bar["id"]: bar.get("tie") for bar in project(trace)["bars"]}
    for s in trace.spans:
        expected = trace.matches[s.rank, s.seq] if s.op in COLLECTIVES else None
        assert ties[f"{s.rank}.{s.seq}"] == expected


@FEW
@given(runs())
def test_bars_of_one_row_do_not_overlap(trace):
    rows = defaultdict(list)
    for bar in project(trace)["bars"]:
        rows[bar["rank"], bar["kind"] == "mark", bar["row"]].append(bar)
    for bars in rows.values():
        bars.sort(key=lambda bar: (bar["start"], bar["end"] or 1e9))
        for one, other in pairwise(bars):
            assert one["end"] is not None and one["end"] <= other["start"] + 1e-6


@pytest.mark.parametrize("name", TRACES)
def test_arrows_agree_with_the_trace(name):
    trace = TRACES[name]()
    assert drawn_messages(project(trace)) == sent_messages(trace)


def test_each_request_is_answered_by_an_arrow_back():
    picture = project(parameter_server(steps=1))
    ways = Counter((a["src"], a["dst"]) for a in picture["arrows"] if a["op"] == "pull")
    assert ways == {(0, 2): 1, (2, 0): 1, (0, 3): 1, (3, 0): 1,
                    (1, 2): 1, (2, 1): 1, (1, 3): 1, (3, 1): 1}  # fmt: skip


def test_unfinished_operations_are_open_and_announced():
    picture = project(hang())
    stuck = [bar for bar in picture["bars"] if bar["end"] is None]
    assert sorted((bar["rank"], bar["op"]) for bar in stuck) == [
        (0, "all_reduce"), (1, "all_reduce"), (2, "all_reduce"), (3, "recv")]  # fmt: skip
    assert "still in all_reduce: rank 0, rank 1, rank 2" in picture["notices"]
    assert "still in recv: rank 3" in picture["notices"]
    assert any(notice.startswith("1,203 events dropped") for notice in picture["notices"])


def test_while_a_run_goes_on_open_operations_are_no_news():
    p = Projection(live=True)
    patch = p.feed(hang().events)
    assert patch["live"] and patch["notices"] == []


def test_a_patch_holds_only_what_changed():
    trace = ring(4)
    p = Projection(trace.meta)
    p.feed(trace.events[:-1])
    patch = p.feed(trace.events[-1:])
    assert len(patch["bars"]) == 1 and len(patch["arrows"]) <= 1
    assert p.feed(trace.events)["bars"] == []  # all of them known


def test_lanes_are_named_after_roles():
    lanes = project(parameter_server())["lanes"]
    assert [lane["name"] for lane in lanes] == [
        "worker 0", "worker 1", "server 0", "server 1", "scheduler"]  # fmt: skip
    assert lanes[2]["detail"] == "rank 2" and lanes[2]["role"] == "server"
    assert [lane["name"] for lane in project(hang())["lanes"]][3] == "rank 3"


def test_overlapping_operations_get_rows_and_nested_marks_depth():
    assert [(lane["rows"], lane["marks"]) for lane in project(sync_sgd())["lanes"]] == [(2, 1)] * 4
    s = Script().op(0, Op.MARK, 0, 3 * MS, label="step").op(0, Op.MARK, MS, 2 * MS, label="forward")
    assert [bar["row"] for bar in project(s.trace())["bars"]] == [0, 1]


def test_time_in_communication_counts_overlap_once():
    s = Script().op(0, Op.ALL_REDUCE, 0, 2 * MS).op(0, Op.ALL_REDUCE, MS, 3 * MS)
    s.op(0, Op.MARK, 0, 4 * MS, label="all of it")
    assert project(s.trace())["lanes"][0]["busy"] == pytest.approx(0.75, abs=0.001)


def test_an_open_operation_counts_as_communication_up_to_the_end():
    s = Script().op(0, Op.RECV, MS, None, peer=1).op(1, Op.MARK, 0, 4 * MS, label="busy")
    lanes = project(s.trace())["lanes"]
    assert lanes[0]["busy"] == pytest.approx(0.75, abs=0.001) and lanes[1]["busy"] == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5))), st.integers(0, 30))
def test_busy_is_the_length_of_the_union(intervals, start):
    busy = Busy((a, a + length) for a, length in intervals)
    covered = {t for a, length in intervals for t in range(a, a + length)}
    assert busy.seconds == len(covered)
    assert busy.with_open([start], 40) == len(covered | set(range(start, 40)))


def test_what_is_not_drawn_is_counted_and_announced(monkeypatch):
    monkeypatch.setattr(projection, "MAX_BARS", 30)
    picture = project(big(160))
    assert len(picture["bars"]) == 30 and picture["operations"] == 160
    assert picture["collectives"] == 20
    assert "the first 30 of 160 operations are drawn; the sums count them all" in picture["notices"]


def test_very_many_ranks_are_cut_and_announced():
    picture = project(big(4000, n=400))
    assert len(picture["lanes"]) == 256 == len({bar["rank"] for bar in picture["bars"]})
    assert "the first 256 of 400 ranks are drawn" in picture["notices"]


@pytest.mark.parametrize("name", TRACES)
def test_pictures_are_strict_json(name):
    picture = project(TRACES[name]())
    assert json.loads(json.dumps(picture, allow_nan=False)) == picture


def test_odd_values_become_words():
    before, after = project(odd_values())["bars"][0]["values"]
    assert before["values"] == [1.0, "nan", "inf", "-inf"] and before["norm"] == "nan"
    assert after["values"] == []


def test_values_ride_along_only_with_the_first_operations(monkeypatch):
    monkeypatch.setattr(projection, "MAX_VALUES", 5)
    bars = project(ring(4))["bars"]
    assert sum("values" in bar for bar in bars) == 5


def test_folders_and_control_characters_stay_out():
    s = Script().op(0, Op.MARK, 0, MS, label="a\x00\ud800b", where="/home/me/a/train.py:7")
    (bar,) = project(s.trace(name="\x1b"))["bars"]
    assert bar["where"] == "train.py:7" and bar["label"] == "a\ufffd\ufffdb"


def test_an_empty_trace_is_an_empty_picture():
    picture = project(Trace())
    assert picture["bars"] == picture["lanes"] == [] and picture["start"] is None
