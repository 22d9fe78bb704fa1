"""The states of ranks, for any batches of events."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Simulation
from test_diagnosis import ProgramGenerator

from distkit.diagnosis.rank_state import RankStatus, WaitForGraph
from distkit.events import Op


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 150), st.randoms())
def test_order_of_batches_does_not_matter(seed, n, cut, order):
    generator = ProgramGenerator(seed, n).write(8)
    for program in generator.programs:
        if program and order.random() < 0.5:
            del program[order.randrange(len(program))]
    generator.programs = [
        [s for s in p if s.wait is None or s.wait in p] for p in generator.programs
    ]
    sim = Simulation(generator.programs, generator.groups, random.Random(seed)).run(cut)
    rows = sim.live().by_rank
    once, in_batches = WaitForGraph(n, generator.groups), WaitForGraph(n, generator.groups)
    once.feed(sim.live())
    while any(rows.values()):
        rank = order.choice([r for r in rows if rows[r]])
        size = order.randint(1, 5)
        in_batches.feed(rows[rank][:size])
        rows[rank] = rows[rank][size:]
    assert (in_batches.rank_states, in_batches.stuck()) == (once.rank_states, once.stuck())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 150))
def test_blocked_ranks_match_the_simulation(seed, n, cut):
    generator = ProgramGenerator(seed, n).write(8)
    sim = Simulation(generator.programs, generator.groups, random.Random(seed)).run(cut)
    graph = WaitForGraph(n, generator.groups)
    graph.feed(sim.live())
    blocked = [s.rank for s in graph.rank_states if s.status is RankStatus.BLOCKED]
    assert graph.stuck() == [] and set(blocked) <= set(sim.stuck)
    in_progress = [p for p in sim.posted if p.matched and not p.done]
    if not any(p.step.op is Op.RECV and p.step.peer is None for p in in_progress):
        assert blocked == sim.stuck  # a receive from any source learns its sender when it ends
    assert all(s.waits_for and s.reason for s in graph.rank_states if s.rank in blocked)
