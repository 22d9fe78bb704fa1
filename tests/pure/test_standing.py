"""Where ranks are: by hand, and whether it matters in what pieces the events arrive."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Simulation
from test_diagnosis import Author

from distkit.diagnosis.rank_state import Doing, WaitForGraph
from distkit.events import Event, Op, State

UP_TO = {
    "paused": [State.SCHEDULED],
    "started": [State.SCHEDULED, State.STARTED],
    "blocked": [State.SCHEDULED, State.STARTED, State.BLOCKED],
    "done": [State.SCHEDULED, State.STARTED, State.COMPLETED],
}


def op(rank, seq, kind, until, **fields):
    fields = {"where": f"In[5]:{seq + 3}", "time": 0.0, **fields}
    return [Event(rank, seq, kind, state, **fields) for state in UP_TO[until]]


def board(n, *parts, **groups):
    made = WaitForGraph(n, groups)
    for events in parts:
        made.feed(events)
    return made


def doing(made):
    return [str(s.doing) for s in made.standings]


def test_ranks_run_until_something_else_is_known():
    made = board(2, op(0, 0, Op.SEND, "started", peer=1))
    assert doing(made) == ["running", "running"] and not made.settled
    assert str(made.standing(1)) == "rank 1: running"


def test_paused_before_an_operation():
    made = board(2, op(1, 1, Op.SEND, "paused", peer=0, tag=7, nbytes=8, shape=(2,)))
    s = made.standing(1)
    assert str(s) == "rank 1: paused before send(dst=0, tag=7) at In[5]:4"
    assert (s.op, s.seq, s.peer, s.tag, s.nbytes, s.shape) == (Op.SEND, 1, 0, 7, 8, (2,))
    made.feed(op(1, 1, Op.SEND, "started", peer=0, tag=7)[1:])
    assert str(made.standing(1)) == "rank 1: running"


def test_blocked_until_the_other_end_comes():
    made = board(2, op(1, 0, Op.RECV, "blocked", peer=0))
    s = made.standing(1)
    assert str(s) == "rank 1: blocked in recv(src=0) at In[5]:3: rank 0 has not sent"
    assert s.waits_for == (0,) and not made.settled
    made.feed(op(0, 0, Op.RECV, "paused", peer=1))
    assert made.standing(1).reason == "rank 0 is paused before recv(src=1) at In[5]:3"
    assert made.settled and made.stuck() == []
    made.feed(op(0, 0, Op.RECV, "blocked", peer=1)[1:])
    assert made.settled and made.stuck() == [0, 1]
    made.feed(op(0, 1, Op.SEND, "started", peer=1))  # from another thread
    assert made.standing(1).doing is Doing.RUNNING and not made.settled


@pytest.mark.parametrize(("how", "word"), [("returned", "finished"), ("raised", "failed")])
def test_ended(how, word):
    made = board(2, op(1, 0, Op.SEND, "blocked", peer=0))
    made.end(0, how)
    assert str(made.standing(0)) == f"rank 0: {word}"
    assert made.standing(1).reason == f"rank 0 has {word}"
    assert made.settled and made.stuck() == [1]


def test_another_takes_the_place_of_one_that_died():
    pull = dict(peer=2, attributes={"key": "w"}, match="kv:1:1:0")
    made = board(2, op(1, 0, Op.PULL, "paused", **pull))
    made.feed([Event(1, 0, Op.PULL, State.FAILED, 0.0, **pull)])
    made.replaced(1, "signal SIGKILL")
    assert str(made.standing(1)) == (
        "rank 1: running: its process died (signal SIGKILL), and a new one replaces it; "
        "last seen before pull('w') at In[5]:3"
    )
    again = dict(peer=3, attributes={"mode": "dist_async"}, match="kv:1:1:1")
    made.feed(op(1, 7, Op.REGISTER, "done", **again))
    told = "it replaces one that died (signal SIGKILL)"
    assert made.standing(1).reason == told and not made.settled
    made.feed(op(1, 8, Op.PULL, "paused", **pull))
    assert str(made.standing(1)) == f"rank 1: paused before pull('w') at In[5]:11: {told}"
    made.feed(op(1, 8, Op.PULL, "started", **pull)[1:])
    assert made.standing(1).reason == ""


def test_receive_from_anybody():
    made = board(3, op(0, 0, Op.RECV, "blocked"))
    assert str(made.standing(0)) == "rank 0: blocked in recv(src=any) at In[5]:3: nobody has sent"
    assert made.standing(0).waits_for == (1, 2)
    made.feed(op(2, 0, Op.SEND, "blocked", peer=0))
    assert doing(made) == ["running"] * 3
    made.feed([Event(0, 0, Op.RECV, State.COMPLETED, 0.0, peer=2)])
    made.feed(op(1, 0, Op.SEND, "blocked", peer=0))
    assert made.standing(1).waits_for == (0,)  # the only receive has taken the other message
    assert made.standing(2).doing is Doing.RUNNING


def test_collectives_wait_for_every_member():
    made = board(
        4,
        op(0, 0, Op.ALL_REDUCE, "blocked", attributes={"reduction": "max"}),
        op(2, 0, Op.ALL_REDUCE, "started", attributes={"reduction": "max"}),
    )
    s = made.standing(0)
    assert (s.call(), s.waits_for) == ("all_reduce(max)", (1, 3))
    assert s.reason == "ranks 1 and 3 have not called it"
    made.end(1, "returned")
    assert made.stuck() == [0]  # one of them is enough
    made = board(4, *(op(r, 0, Op.BARRIER, "blocked") for r in range(4)))
    assert doing(made) == ["running"] * 4


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 150), st.randoms())
def test_pieces_in_any_order_of_the_ranks_make_no_difference(seed, n, cut, order):
    author = Author(seed, n).write(8)
    for program in author.programs:
        if program and order.random() < 0.5:
            del program[order.randrange(len(program))]
    author.programs = [[s for s in p if s.wait is None or s.wait in p] for p in author.programs]
    sim = Simulation(author.programs, author.groups, random.Random(seed)).run(cut)
    rows = sim.live().by_rank
    once, pieces = WaitForGraph(n, author.groups), WaitForGraph(n, author.groups)
    once.feed(sim.live())
    while any(rows.values()):
        rank = order.choice([r for r in rows if rows[r]])
        size = order.randint(1, 5)
        pieces.feed(rows[rank][:size])
        rows[rank] = rows[rank][size:]
    assert pieces.standings == once.standings
    assert (pieces.settled, pieces.stuck()) == (once.settled, once.stuck())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 150))
def test_blocked_are_exactly_those_who_wait(seed, n, cut):
    author = Author(seed, n).write(8)
    sim = Simulation(author.programs, author.groups, random.Random(seed)).run(cut)
    made = WaitForGraph(n, author.groups)
    made.feed(sim.live())
    blocked = [s.rank for s in made.standings if s.doing is Doing.BLOCKED]
    assert made.stuck() == [] and set(blocked) <= set(sim.stuck)
    under_way = [p for p in sim.posted if p.met and not p.done]
    if not any(p.step.op is Op.RECV and p.step.peer is None for p in under_way):
        assert blocked == sim.stuck  # who a receive from anybody takes shows when it is over
    assert all(s.waits_for and s.reason for s in made.standings if s.rank in blocked)
