"""Folding of events into operations and their matching, compared with a simple reference."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.events import COLLECTIVES, P2P, REQUESTS, Event, Op, State
from distkit.trace.columns import Table
from distkit.trace.trace import Trace

RANKS = 3
OPS = [*sorted(P2P), *sorted(REQUESTS), Op.ALL_REDUCE, Op.BARRIER, Op.MARK, Op.STORE_SET]
HISTORIES = [
    [State.SCHEDULED],
    [State.SCHEDULED, State.STARTED],
    [State.SCHEDULED, State.STARTED, State.COMPLETED],
    [State.STARTED, State.BLOCKED, State.FAILED],
    [State.COMPLETED],
]


@st.composite
def lanes(draw, rank):
    """Generate a rank's events in time order, with overlapping operations."""
    histories = draw(st.lists(st.sampled_from(HISTORIES), max_size=8))
    operations = [draw(st.tuples(st.sampled_from(OPS), *FIELDS)) for _ in histories]
    turns = [seq for seq, states in enumerate(histories) for _ in states]
    events, done = [], Counter()
    for time, seq in enumerate(draw(st.permutations(turns))):
        op, peer, group, tag, number, late = operations[seq]
        peer, match = (peer, number) if op in P2P | REQUESTS else (None, None)
        if late and done[seq] < len(histories[seq]) - 1:
            peer = match = None  # a receive from any source learns its sender when it ends
        state = histories[seq][done[seq]]
        done[seq] += 1
        nbytes = draw(st.integers(0, 9))
        events.append(
            Event(rank, seq, op, state, float(time), peer, group, nbytes, tag=tag, match=match)
        )
    return events


FIELDS = (
    st.integers(0, RANKS - 1),
    st.sampled_from("ab"),
    st.sampled_from([None, 7]),
    st.sampled_from([None, None, "kv:1:0:1", "kv:1:0:2"]),
    st.booleans(),
)
streams = st.tuples(*map(lanes, range(RANKS)))


def fold(events):
    """Fold events into (op, state, start, end, peer, group, nbytes, tag, match) by key."""
    parts, found = defaultdict(list), {}
    for e in events:
        parts[e.rank, e.seq].append(e)
    for key, states in parts.items():
        first, last = states[0], states[-1]
        start = next((e for e in states if e.state is State.STARTED), first).time
        end = last.time if last.state in (State.COMPLETED, State.FAILED) else None
        peer = first.peer if last.peer is None else last.peer
        nbytes = max(e.nbytes for e in states)
        found[key] = (
            *(first.op, last.state, start, end),
            *(peer, first.group, nbytes, first.tag, first.match or last.match),
        )
    return found


def match(operations):
    """Return the match of each operation: its id, or its position among equal calls on its rank."""
    count, found = Counter(), {}
    for key, (op, _, _, _, peer, group, _, tag, match) in sorted(operations.items()):
        channel = None
        if op in COLLECTIVES:
            channel = group
        elif op in P2P and peer is not None:
            src, dst = (key[0], peer) if op is Op.SEND else (peer, key[0])
            channel = f"{group}:{src}>{dst}:{tag}"
        if match is not None:
            found[key] = match
        elif channel is not None:
            found[key] = f"{channel}#{count[channel, key[0], op is Op.SEND]}"
            count[channel, key[0], op is Op.SEND] += 1
    return found


def split(data, lanes):
    """Split events into batches of any size that keep the order of each rank."""
    rest, batches = [list(lane) for lane in lanes if lane], []
    while rest:
        lane = data.draw(st.sampled_from(rest))
        size = data.draw(st.integers(1, len(lane)))
        batches.append(lane[:size])
        del lane[:size]
        rest = [lane for lane in rest if lane]
    return batches


@settings(max_examples=60, deadline=None)
@given(streams)
def test_matcher_agrees_with_the_reference_implementation(lanes):
    events = [e for lane in lanes for e in lane]
    trace, operations = Trace(events), fold(events)
    fields = "op", "state", "start", "end", "peer", "group", "nbytes", "tag", "match"
    found = {(s.rank, s.seq): tuple(getattr(s, name) for name in fields) for s in trace.spans}
    assert found == operations
    assert trace.matches == match(operations)


@settings(max_examples=60, deadline=None)
@given(streams)
def test_message_joins_matching_send_and_receive(lanes):
    trace = Trace([e for lane in lanes for e in lane])
    unnamed = {(s.rank, s.seq): s for s in trace.spans if s.op in P2P and s.match is None}
    ends = defaultdict(dict)
    for key, s in unnamed.items():
        if s.peer is not None:
            ends[trace.matches[key]][s.op] = key
    expected = {(pair.get(Op.SEND), pair.get(Op.RECV)) for pair in ends.values()}
    found = [m for m in trace.messages if m.op is Op.SEND]
    assert {(m.send, m.recv) for m in found} == expected and len(found) == len(expected)
    for m in found:
        send, recv = unnamed.get(m.send), unnamed.get(m.recv)
        assert m.sent == (send.start if send and send.state is not State.SCHEDULED else None)
        assert m.received == (recv.end if recv and recv.state is not State.FAILED else None)
        assert (m.src, m.dst) == ((send.rank, send.peer) if send else (recv.peer, recv.rank))


@settings(max_examples=60, deadline=None)
@given(streams, st.data())
def test_batches_do_not_change_the_result(lanes, data):
    complete, table = Trace([e for lane in lanes for e in lane]), Table.from_events([])
    for batch in split(data, lanes):
        table = Table.concatenate([table, Table.from_events(batch)])
    grown = Trace.from_table(table, complete.info)
    assert grown.spans == complete.spans
    assert grown.matches == complete.matches
    assert grown.messages == complete.messages
    assert grown.collectives == complete.collectives


def test_duplicated_request_is_one_message() -> None:
    fields = dict(peer=0, match="kv:1:0:0")
    trace = Trace(
        [
            Event(0, 0, Op.PUSH, State.STARTED, 0.0, peer=2, match="kv:1:0:0"),
            Event(2, 0, Op.RECV, State.COMPLETED, 1.0, **fields),
            Event(3, 0, Op.RECV, State.COMPLETED, 2.0, **fields),
        ]
    )
    (message,) = trace.messages
    assert (message.recv, message.received) == ((2, 0), 1.0)
