"""The stage: layout, contributions, pictures."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import traces
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from traces import DEMOS, MS, Script, big, hang, names, odd_values, parameter_server, ring, summary

from distkit.algorithms import ALL_REDUCES
from distkit.algorithms.all_reduce.ring import schedule
from distkit.algorithms.rounds import count_contributions
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit.views.scene.renderer import to_svg, to_table
from distkit.views.scenes import Stage
from distkit.views.stage.contributions import find_all_reduces
from distkit.views.stage.projection import arrange
from distkit.views.stage.projection import project as stage
from distkit.views.stage.scene import draw
from distkit_simulation import Link, Network, simulate

SVG = "{http://www.w3.org/2000/svg}"


def values(rank, chunk=0):
    return [float(7 * rank + chunk), 2.0 * rank**2 + 0.5]


def send(s, src, dst, at, payload, size=8):
    """Add a message that takes a millisecond."""
    before = summary(payload) if payload is not None else None
    s.op(src, Op.SEND, at * MS, (at + 1) * MS, peer=dst, nbytes=size, before=before)
    s.op(dst, Op.RECV, at * MS, (at + 1) * MS, peer=src, nbytes=size, after=before)


def all_reduce_ring(n, adds=True, recorded=True, group="world", members=None, calls=1, **fields):
    """Return a trace of ``dk.algorithms.ring_all_reduce``, with real values."""
    s, members, at = Script(), members or list(range(n)), 0
    for _ in range(calls):
        have = [[values(r, c) for c in range(n)] for r in range(n)]
        for round_ in schedule(n):
            payloads = [have[a][c] for a, c in zip(round_.src, round_.chunk, strict=True)]
            transfers = zip(round_.src, round_.dst, round_.chunk, payloads, strict=True)
            for a, b, c, payload in transfers:
                a, b, c = int(a), int(b), int(c)
                values_summary = summary(payload) if recorded else None
                s.op(
                    members[a],
                    Op.SEND,
                    at * MS,
                    (at + 0.9) * MS,
                    peer=members[b],
                    nbytes=8 + c,
                    before=values_summary,
                    group=group,
                )
                s.op(
                    members[b],
                    Op.RECV,
                    (at + 0.1) * MS,
                    (at + 0.8) * MS,
                    peer=members[a],
                    nbytes=8 + c,
                    after=values_summary,
                    group=group,
                )
                added = [x + y for x, y in zip(have[b][c], payload, strict=True)]
                have[b][c] = added if round_.reduce and adds else payload
            at += 1
    return s.trace(**{"world_size": max(members) + 1, "groups": {group: members}, **fields})


def pieces_at(picture, time, by="time"):
    """Return the pieces of each rank's tensor at a time in seconds or, by "step", in rounds."""
    strips = {}
    timed = [(step if by == "step" else change.time, change) for step, change in picture.changes]
    for when, change in sorted(timed, key=lambda c: c[0]):
        at, rank = change.at, change.rank
        if when > time:
            break
        if at is None:
            strips[rank] = list(change.pieces)
        elif at < len(strips.get(rank, ())):
            strips[rank][at : at + len(change.pieces)] = change.pieces
    return strips


def final_pieces(trace):
    return pieces_at(stage(trace), float("inf"))


# -- layout ----------------------------------------------------------------------------


@given(st.integers(0, 40), st.booleans())
def test_every_rank_has_a_distinct_position(n, on_hosts):
    ranks = list(range(n))
    positions = arrange(ranks, {r: f"host {r // 4}" for r in ranks} if on_hosts else {})
    assert positions.keys() == set(ranks)
    assert all(-1e-6 <= v <= 1 + 1e-6 for p in positions.values() for v in p)
    assert len({*positions.values()}) == n


# -- the ring ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 4, 5, 8])
@pytest.mark.parametrize("recorded", [True, False])
def test_ring_all_reduce_is_recognized_and_fills_every_chunk(n, recorded):
    trace = all_reduce_ring(n, recorded=recorded)
    (found,) = find_all_reduces(trace)
    assert len(found.rounds) == 2 * (n - 1)
    for rank, pieces in final_pieces(trace).items():
        assert [piece.certain for piece in pieces] == [set(range(n))] * n, rank


def test_late_rank_has_the_chunks_of_its_round():
    """After k rounds every rank has the schedule's chunks, even if it is late."""
    rounds, trace = list(schedule(4)), all_reduce_ring(4)
    late = [replace(e, time=e.time + (0.3 * MS if e.rank == 2 else 0)) for e in trace.events]
    picture = stage(Trace(late, trace.info))
    for k in range(1, len(rounds) + 1):
        pieces = pieces_at(picture, k, "step")
        expected = count_contributions(rounds[:k], 4) > 0
        assert [
            [[c in piece.certain for c in range(4)] for piece in pieces[r]] for r in range(4)
        ] == expected.tolist()


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_every_all_reduce_is_shown_as_its_schedule(name, n, simulated):
    algorithm = ALL_REDUCES[name]
    trace = simulate(name, n, 4 * 96, Network(Link(1e-6, 1e-9)))
    if not simulated:  # as recorded in the reference implementation
        where = f"distkit/algorithms/all_reduce/{name}.py:40"
        trace = Trace(
            [replace(e, where=where) for e in trace.events],
            structs.replace(trace.info, simulated=False),
        )
    picture, chunks = stage(trace), algorithm.chunks(n)
    rounds = list(algorithm.schedule(n))
    for k in range(1, len(rounds) + 1):
        pieces = pieces_at(picture, k, "step")
        expected = count_contributions(rounds[:k], n, chunks) > 0
        assert [
            [[c in piece.certain for c in range(n)] for piece in pieces[r]] for r in range(n)
        ] == expected.tolist()


def test_several_rings_and_subgroup_rings_are_recognized():
    assert len(find_all_reduces(all_reduce_ring(4, calls=3))) == 3
    part = all_reduce_ring(3, group="odd", members=[1, 3, 5])
    (found,) = find_all_reduces(part)
    assert found.members == (1, 3, 5)
    assert [piece.certain for piece in final_pieces(part)[3]] == [{1, 3, 5}] * 3


def test_ring_without_the_reduction_is_not_drawn_as_reducing():
    pieces = [
        piece for strip in final_pieces(all_reduce_ring(4, adds=False)).values() for piece in strip
    ]
    assert all(len(piece.certain) <= 1 for piece in pieces)


def test_ring_like_messages_are_not_a_ring():
    assert find_all_reduces(ring()) == []  # its values are arbitrary
    assert not any(  # two ranks may just exchange tensors
        find_all_reduces(all_reduce_ring(2, **fields))
        for fields in (
            {},
            {"simulated": True},
            {"groups": {"world": []}},
            {"groups": {"world": [0]}},
        )
    )
    trace = all_reduce_ring(4)
    assert find_all_reduces(Trace(trace.events[:-40], trace.info)) == []
    assert "schedule" not in draw(ring())["description"]


# -- other messages and collectives ----------------------------------------------------------


def test_unknown_contributions_are_bounded_not_guessed():
    s = Script()
    send(s, 1, 0, 0, values(1))
    send(s, 2, 0, 2, values(2))
    send(s, 0, 1, 4, [7.0, 7.5])
    picture = stage(s.trace(world_size=4))
    pieces = pieces_at(picture, float("inf"))
    assert (pieces[1][0].certain, pieces[1][0].possible) == (set(), {0, 1, 2})
    assert "at most" in picture.frame["description"]


def test_equal_zeros_are_not_the_same_piece():
    s = Script()
    send(s, 0, 1, 0, [0.0, 0.0])
    send(s, 1, 2, 2, [0.0, 0.0])
    assert final_pieces(s.trace(world_size=3))[2][0].certain == set()


def collective(op, root=None, n=3):
    s = Script()
    for r in range(n):
        s.op(r, op, r * MS, (5 + r) * MS, peer=root, nbytes=8, before=summary(values(r)))
    return [
        [sorted(piece.certain) for piece in final_pieces(s.trace(world_size=n)).get(r, [])]
        for r in range(n)
    ]


@pytest.mark.parametrize(
    ("op", "root", "expected"),
    [
        (Op.ALL_REDUCE, None, [[[0, 1, 2]]] * 3),
        (Op.REDUCE, 1, [[[0]], [[0, 1, 2]], [[2]]]),
        (Op.BROADCAST, 1, [[[1]]] * 3),
        (Op.ALL_GATHER, None, [[[0], [1], [2]]] * 3),
        (Op.GATHER, 0, [[[0], [1], [2]], [[], [1], []], [[], [], [2]]]),
        (Op.SCATTER, 0, [[[0], [0], [0]], [[], [0], []], [[], [], [0]]]),
        (
            Op.REDUCE_SCATTER,
            None,
            [[[0, 1, 2], [0], [0]], [[1], [0, 1, 2], [1]], [[2], [2], [0, 1, 2]]],
        ),
        (Op.ALL_TO_ALL, None, [[[0], [1], [2]]] * 3),
        (Op.BARRIER, None, [[], [], []]),
    ],
)
def test_collectives_are_drawn_by_their_semantics(op, root, expected):
    assert collective(op, root) == expected


def test_server_contributions_are_not_guessed():
    picture = stage(parameter_server())
    assert (picture.changes, picture.frame["description"]) == (
        [],
        "The trace does not record a server's computation.",
    )


# -- the picture -------------------------------------------------------------------------------


def thousand():
    s = Script()
    for r in range(1000):
        send(s, r, (r + 1) % 1000, 0, None)
    return s.trace(world_size=1000)


TRACES = {
    **DEMOS,
    "odd": odd_values,
    "hang": hang,
    "empty": Trace,
    "thousand": thousand,
    "big": lambda: big(4000),
    "one": lambda: Trace([], traces.info(world_size=1)),
    "real ring": lambda: all_reduce_ring(8),
}


@pytest.mark.parametrize("name", TRACES)
def test_every_trace_has_a_small_picture_and_table(name):
    data = draw(TRACES[name]())
    assert json.dumps(data, allow_nan=False)
    drawing = to_svg(data)
    assert ET.fromstring(drawing).tag == f"{SVG}svg" and len(drawing.encode()) <= 60_000
    assert "<script" not in drawing and " id=" not in drawing
    assert len(to_table(data).splitlines()) <= 20


def test_hang_is_in_the_notices():
    notices = " ".join(draw(hang())["notices"])
    assert "2 messages not received" in notices and "1 collective not finished" in notices
    assert "dropped" in notices
    assert draw(hang(), live=True)["notices"] == []


def test_omitted_parts_have_a_notice():
    (note,) = draw(big(8400, n=4))["notes"]
    assert note == "the first 2,000 of 2,100 messages and collectives are drawn"
    assert "at most 64 ranks" in draw(thousand())["description"]


OPS = [
    Op.SEND,
    Op.RECV,
    Op.ALL_REDUCE,
    Op.BROADCAST,
    Op.ALL_GATHER,
    Op.PUSH,
    Op.MARK,
    Op.REDUCE,
    Op.SCATTER,
    Op.REDUCE_SCATTER,
    Op.BARRIER,
]
EVENTS = st.builds(
    Event,
    st.integers(0, 4),
    st.integers(0, 6),
    st.sampled_from(OPS),
    st.sampled_from(State),
    st.floats(0, 1),
    peer=st.none() | st.integers(0, 5),
    nbytes=st.integers(0, 9),
    attributes=st.text(max_size=3).map(lambda s: {"label": s}),
    summary=st.none() | st.lists(st.floats(width=32), max_size=4).map(summary),
)


@given(st.lists(EVENTS, max_size=40), st.booleans())
def test_any_trace_can_be_drawn(events, live):
    drawing = draw(Trace(events, traces.info(ranks=names("worker", "server"))), live=live)
    assert json.dumps(drawing, allow_nan=False)
    assert ET.fromstring(to_svg(drawing)).tag == f"{SVG}svg"
    to_table(drawing)


# -- the notebook --------------------------------------------------------------------------------


def test_notebook_stores_picture_and_table():
    picture, text = Stage(all_reduce_ring(4))._draw()
    assert ET.fromstring(picture).tag == f"{SVG}svg"
    assert "4 messages  800 µs · the chunks are added" in text
