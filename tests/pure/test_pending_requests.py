"""Unanswered requests: their state on a real server, and their diagnosis."""

from __future__ import annotations

from dataclasses import replace

import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from test_views_servers import RecordedServer, record_server

from distkit.consistency import Asynchronous, Synchronous
from distkit.diagnosis.diagnose import diagnose
from distkit.diagnosis.rank_state import RankStatus, WaitForGraph
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace

RULES = st.one_of(
    st.builds(Synchronous),
    st.builds(Asynchronous, staleness=st.none() | st.integers(0, 2)),
)
STEPS = st.lists(st.tuples(st.sampled_from(["push", "pull"]), st.integers(0, 3)), max_size=30)


def waiting(run: RecordedServer) -> dict[int, int]:
    """Return the clock of each worker with a pending pull."""
    return {node: clock for (node, _), (_, clock) in run.server.entries["w"].waiting.items()}


def play(workers, rule, steps) -> RecordedServer:
    """Run a real server with workers that wait for the reply to each pull."""
    run = record_server(workers, rule)
    for method, worker in steps:
        if worker % workers not in waiting(run):
            getattr(run, method)(worker % workers)
    return run


def events_with_waits(run: RecordedServer) -> list[Event]:
    """Return the workers' events, with a wait for each unanswered request."""
    events = [e for e in run.trace() if e.rank < run.workers]
    last = {(e.rank, e.seq): e for e in events}
    pending = [e for e in last.values() if e.op is Op.PULL and e.state is State.STARTED]
    assert {e.rank for e in pending} == waiting(run).keys()
    return [*events, *(replace(e, state=State.BLOCKED) for e in pending)]


@settings(max_examples=40)
@given(st.integers(1, 4), RULES, STEPS)
def test_blocked_ranks_are_those_with_a_pending_pull(workers, rule, steps) -> None:
    run = play(workers, rule, steps)
    graph, entry = WaitForGraph(workers), run.server.entries["w"]
    graph.feed(events_with_waits(run))
    for node, clock in waiting(run).items():
        s = graph.rank_state(node)
        awaited = rule.awaits(clock, entry.version, entry.arrived, range(workers), entry.clocks)
        assert s.status is RankStatus.BLOCKED and set(s.waits_for) >= awaited - {node}
        assert s.reason.startswith("server 0 waits for ")
    blocked = {s.rank for s in graph.rank_states if s.status is RankStatus.BLOCKED}
    assert blocked == waiting(run).keys()


@settings(max_examples=40)
@given(st.integers(2, 4), RULES, STEPS, st.sets(st.integers(0, 3)))
def test_pushes_from_other_ranks_do_not_answer_stuck_ranks(workers, rule, steps, ended) -> None:
    run = play(workers, rule, steps)
    ended = ended & set(range(workers)) - waiting(run).keys()
    graph = WaitForGraph(workers)
    graph.feed(events_with_waits(run))
    for rank in ended:
        graph.end(rank, "returned")
    entry = run.server.entries["w"]
    for _ in range(40):  # answered workers also push
        for worker in set(range(workers)) - ended - waiting(run).keys():
            if isinstance(rule, Synchronous) and entry.clocks.get(worker, 0) <= entry.version:
                run.pull(worker)  # its gradient must not be late
            run.push(worker)
    assert set(graph.stuck()) == waiting(run).keys()


W = {"key": "w"}


def options(mode):
    """Parse the options of a registration, such as "dist_sync backup=1"."""
    mode, *others = mode.split()
    options = dict(option.split("=") for option in others)
    return {"mode": mode, **{n: int(v) if v.isdecimal() else v for n, v in options.items()}}


def request_events(rank, seq, op, *states, attributes=W, peer=3):
    """Return the events of a request to a server."""
    line = {Op.PUSH: 7, Op.PULL: 8}.get(op, 5)
    fields = {"peer": peer, "attributes": attributes, "match": f"kv:1:{rank}:{seq}"}
    return [
        Event(rank, seq, op, State(s), seq + i / 10, where=f"In[3]:{line}", **fields)
        for i, s in enumerate(states)
    ]


ANSWERED = "scheduled", "started", "completed"
PENDING = "scheduled", "started", "blocked"


def worker(rank, gradients, *, waits=False, mode="dist_sync"):
    """Return the events of a worker that pushes and pulls, optionally with a pending last pull."""
    events = request_events(rank, 0, Op.REGISTER, *ANSWERED, attributes=options(mode), peer=4)
    for n in range(gradients):
        events += request_events(rank, 2 * n + 1, Op.PUSH, *ANSWERED)
        events += request_events(rank, 2 * n + 2, Op.PULL, *ANSWERED)
    if waits:
        events += [
            *request_events(rank, 100, Op.PUSH, *ANSWERED),
            *request_events(rank, 101, Op.PULL, *PENDING),
        ]
    return events


def trace(*workers):
    """Return the trace of these workers; those without a pending request have returned."""
    blocked = [any(e.state is State.BLOCKED for e in events) for events in workers]
    ends = {
        str(r): {"how": "returned", "text": ""} for r, pending in enumerate(blocked) if not pending
    }
    events = [e for events in workers for e in events]
    return Trace(events, traces.info(world_size=len(workers), ends=ends))


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async staleness=0"])
def test_workers_with_different_keys_are_diagnosed(mode) -> None:
    def pushes(rank, key):
        return [
            *request_events(rank, 0, Op.REGISTER, *ANSWERED, attributes=options(mode), peer=4),
            *request_events(rank, 1, Op.PUSH, *ANSWERED, attributes={"key": key}),
            *request_events(rank, 2, Op.PULL, *PENDING, attributes={"key": key}),
        ]

    (f,) = diagnose(trace(pushes(0, "a"), pushes(1, "b")))
    assert f.hang and f.kind == "cycle" and "in the same order on every rank" in f.remedy


@pytest.mark.parametrize("mode", ["dist_async", "dist_async staleness=9"])
def test_worker_whose_pull_can_still_be_answered_is_not_reported(mode) -> None:
    assert diagnose(trace(worker(0, 3, waits=True, mode=mode), worker(1, 1, mode=mode))) == []


def test_error_about_a_dead_worker_is_not_a_second_cause() -> None:
    events = [e for e in worker(0, 2, waits=True) if e.state is not State.BLOCKED]
    events.append(replace(events[-1], state=State.FAILED, time=300.0))
    text = (
        "KVStoreError: pull of 'w' waits for a gradient of worker 1, which has exited "
        "(signal SIGKILL): dist_sync needs every worker in every round."
    )
    ends = {"0": {"how": "raised", "text": text}, "1": {"how": "died", "text": "SIGKILL"}}
    (found,) = diagnose(Trace([*events, *worker(1, 2)], traces.info(world_size=2, ends=ends)))
    assert (found.kind, found.culprits, found.waiting) == ("died", (1,), (0,))


# -- text ---------------------------------------------------------------------------------


def test_reason_names_the_request_and_the_awaited_worker() -> None:
    graph = WaitForGraph(2)
    graph.feed([*worker(0, 2, waits=True), *worker(1, 2)])
    prefix = "rank 0: blocked in pull('w') at In[3]:8: server 1 waits for worker 1, which "
    assert str(graph.rank_state(0)) == f"{prefix}has pushed 'w' 2 of 3 times"
    graph.feed(request_events(1, 50, Op.PUSH, "scheduled"))
    assert str(graph.rank_state(0)) == f"{prefix}is paused before push('w') at In[3]:7"
    graph.feed(request_events(1, 50, Op.PUSH, "scheduled", "started"))
    assert graph.rank_state(0).status is RankStatus.RUNNING
