"""The scheduler and a server's life from run to run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.consistency import Asynchronous, Rule, Synchronous
from distkit.kvstore.protocol.messages import (
    LIFE,
    AddressBook,
    Answer,
    Barrier,
    Departed,
    Error,
    Init,
    Leave,
    Note,
    NoteStored,
    Pull,
    Register,
    Reply,
    RollCall,
)
from distkit.kvstore.protocol.terms import Terms
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession

W, S = 2, 2


def worker(node: int, run: int = 0, mode: str = "dist_sync", life: int = 0) -> Register:
    return Register(run, node, LIFE * life, "", Terms(mode, 100))


def server(node: int, run: int = 0) -> Register:
    return Register(run, node, 0, f"ipc://{node}")


def complete(run: int = 0) -> Scheduler:
    scheduler = Scheduler(W, S, run)
    for r in (worker(0, run), worker(1, run), server(2, run), server(3, run)):
        scheduler.handle(r)
    return scheduler


@given(st.permutations([worker(0), worker(1), server(2), server(3)]))
def test_everybody_is_told_when_the_last_has_registered(order: list[Register]) -> None:
    scheduler = Scheduler(W, S)
    assert [scheduler.handle(r) for r in order[:-1]] == [[]] * 3
    books = scheduler.handle(order[-1])
    assert [b.node for b in books] == [0, 1, 2, 3]
    for book in books:
        assert isinstance(book, AddressBook)
        assert book.endpoints == {0: "", 1: "", 2: "ipc://2", 3: "ipc://3"}
        assert book.terms == Terms("dist_sync", 100)


def test_who_registers_again_is_told_alone() -> None:
    assert [a.node for a in complete().handle(worker(1))] == [1]


def test_a_misfit_is_refused_and_may_come_again() -> None:
    scheduler = Scheduler(W, S)
    for r in (worker(0), server(2), server(3)):
        scheduler.handle(r)
    (refused,) = scheduler.handle(worker(1, mode="dist_async"))
    assert isinstance(refused, Error)
    assert 'worker 1 asks for "dist_async"' in refused.text
    assert len(scheduler.handle(worker(1))) == 4


def test_a_newer_run_calls_the_servers_and_forgets_the_rest() -> None:
    scheduler = complete(run=3)
    calls = scheduler.handle(worker(0, run=4))
    assert [(type(c), c.run, c.node) for c in calls] == [(RollCall, 4, 2), (RollCall, 4, 3)]
    (refused,) = scheduler.handle(worker(1, run=3))
    assert "stale node of run 3, the cluster is at run 4" in refused.text
    (called,) = scheduler.handle(server(2, run=3))
    assert isinstance(called, RollCall)
    scheduler.handle(server(2, run=4))
    scheduler.handle(server(3, run=4))
    assert len(scheduler.handle(worker(1, run=4))) == 4


@given(st.lists(st.permutations([0, 1]), min_size=1, max_size=3))
def test_barrier_releases_all_when_the_last_is_there(rounds: list[list[int]]) -> None:
    scheduler = complete()
    for n, (first, last) in enumerate(rounds):
        assert scheduler.handle(Barrier(0, first, n, n)) == []
        passed = scheduler.handle(Barrier(0, last, n, n))
        assert [(type(p), p.node, p.number) for p in passed] == [(Reply, 0, n), (Reply, 1, n)]


def test_a_scheduler_has_no_values() -> None:
    (refused,) = complete().handle(Pull(0, 0, 1, "w"))
    assert "no answer to Pull" in refused.text


# -- a server through its runs --------------------------------------------------

NODE = Node("server", 0, workers=W, servers=S, folder="f")


def book(run: int, mode: str = "dist_sync") -> AddressBook:
    return AddressBook(run, 2, 1, Terms(mode, 100), {0: "", 1: ""})


def init(run: int, node: int = 0) -> Init:
    return Init(run, node, 7, "w", (1,), "float32", torch.ones(1))


def test_a_server_registers_with_the_endpoint_it_listens_on() -> None:
    register = ServerSession(NODE).register()
    assert (register.node, register.endpoint) == (2, "ipc://f/kv2")


def test_requests_that_overtake_the_address_book_are_kept() -> None:
    shard = ServerSession(NODE)
    assert shard.handle(init(0), 2) == []
    (reply,) = shard.hear(book(0))
    assert isinstance(reply, Reply)


@pytest.mark.parametrize(
    ("mode", "rule"), [("dist_sync", Synchronous()), ("dist_async_device", Asynchronous())]
)
def test_the_mode_is_a_rule(mode: str, rule: Rule) -> None:
    shard = ServerSession(NODE)
    shard.hear(book(0, mode))
    assert shard.stores[2].rule == rule
    assert shard.stores[2].members == {0, 1}


def test_each_run_has_a_store_of_its_own() -> None:
    shard = ServerSession(NODE)
    shard.hear(book(0))
    shard.handle(init(0), 2)
    (register,) = shard.hear(RollCall(1, 2, 0))
    assert (type(register), register.run) == (Register, 1)
    shard.hear(book(1))
    old: list[Answer] = [a for a in shard.handle(Pull(0, 0, 8, "w"), 2) if isinstance(a, Answer)]
    assert "stale node of run 0, the cluster is at run 1" in old[0].text
    (refused,) = shard.handle(Pull(1, 0, 1, "w"), 2)
    assert "not initialised" in refused.text


# -- nodes ----------------------------------------------------------------------


def test_ids_count_workers_then_servers_then_the_scheduler() -> None:
    roles = [("worker", 0), ("worker", 1), ("server", 0), ("server", 1), ("scheduler", 0)]
    assert [Node(role, i, W, S, "f").id for role, i in roles] == [0, 1, 2, 3, 4]


# -- nodes that end -----------------------------------------------------------------


def leave(node: int, run: int = 0, life: int = 0) -> Leave:
    return Leave(run, node, 0, "signal SIGKILL", life)


def terms(**options: object) -> Scheduler:
    """A complete cluster whose workers agreed on these terms."""
    given = Terms("dist_sync", 100, **options)
    scheduler = Scheduler(W, S)
    for node in (0, 1):
        scheduler.handle(worker_of(given, node))
    for node in (2, 3):
        scheduler.handle(server(node))
    return scheduler


def worker_of(given: Terms, node: int, life: int = 0) -> Register:
    return Register(0, node, LIFE * life, "", given)


def test_servers_hear_of_a_dead_worker_and_the_barrier_names_it() -> None:
    scheduler = terms()
    scheduler.handle(Barrier(0, 0, 1, 0))
    *told, refused = scheduler.handle(leave(1))
    assert [(type(t), t.node, t.who, t.first) for t in told] == [
        (Departed, 2, 1, LIFE),
        (Departed, 3, 1, LIFE),
    ]
    assert "barrier waits for worker 1, which has ended (signal SIGKILL)." in refused.text
    (later,) = scheduler.handle(Barrier(0, 0, 2, 1))
    assert "worker 1" in later.text


def test_everybody_hears_of_a_dead_server() -> None:
    told = terms(replication=2).handle(leave(2))
    assert [(type(t), t.node, t.who) for t in told] == [(Departed, n, 2) for n in (0, 1, 3)]


def test_continue_lets_the_others_pass_the_barrier() -> None:
    scheduler = terms(on_crash="continue")
    scheduler.handle(Barrier(0, 0, 1, 0))
    passed = scheduler.handle(leave(1))[-1]
    assert isinstance(passed, Reply)


def test_replace_lets_the_barrier_wait_for_another_but_not_for_the_finished() -> None:
    scheduler = terms(on_crash="replace")
    assert scheduler.handle(Barrier(0, 0, 1, 0)) == []
    assert len(scheduler.handle(leave(1))) == 2
    (book,) = scheduler.handle(worker_of(Terms("dist_sync", 100, on_crash="replace"), 1, life=1))
    assert isinstance(book, AddressBook)
    assert [a.node for a in scheduler.handle(Barrier(0, 1, LIFE + 1, 0))] == [0, 1]
    scheduler.bye(0, 0, 9)
    assert [a.version for a in scheduler.handle(Barrier(0, 1, LIFE + 2, 1))] == [2]


def test_a_worker_that_takes_a_place_is_told_how_many_barriers_were_passed() -> None:
    scheduler = terms(on_crash="replace")
    for node in range(W):
        scheduler.handle(Barrier(0, node, 5, 0))
    scheduler.handle(leave(1))
    (book,) = scheduler.handle(worker_of(Terms("dist_sync", 100, on_crash="replace"), 1, life=1))
    assert book.barriers == 1


@pytest.mark.parametrize("known", [True, False])
def test_each_end_of_a_node_counts_once(known: bool) -> None:
    """Its connection breaks, and whoever watches its process reports it: in any order."""
    scheduler = terms(on_crash="replace")
    if known:
        assert len(scheduler.handle(leave(1))) == 2
        assert scheduler.handle(leave(1)) == []
    told = scheduler.handle(worker_of(Terms("dist_sync", 100, on_crash="replace"), 1, life=1))
    assert [type(t) for t in told] == [Departed, Departed, AddressBook][2 * known :]
    assert scheduler.handle(leave(1)) == []
    assert len(scheduler.handle(leave(1, life=1))) == 2


def test_another_server_may_come_before_the_beginning() -> None:
    scheduler = Scheduler(W, S)
    for register in (server(2), server(3), worker(1)):
        scheduler.handle(register)
    assert scheduler.handle(leave(3)) == []
    assert scheduler.handle(worker(0)) == []
    assert [b.node for b in scheduler.handle(server(3))] == [0, 1, 2, 3]


def test_a_server_that_comes_in_the_middle_of_a_run_serves_in_the_next_one() -> None:
    scheduler = terms(replication=2)
    scheduler.handle(leave(3))
    assert scheduler.handle(server(3)) == []
    calls = scheduler.handle(worker(0, run=1))
    assert [(type(c), c.node) for c in calls] == [(RollCall, 2), (RollCall, 3)]


def test_a_worker_that_ends_before_the_beginning_is_named_to_those_who_wait() -> None:
    scheduler = Scheduler(W, S)
    scheduler.handle(worker(1))
    (refused,) = scheduler.handle(leave(0))
    assert "the beginning waits for worker 0, which has ended (signal SIGKILL)" in refused.text
    for register in (server(3), server(2), worker(0, life=1)):
        assert scheduler.handle(register) == []
    assert len(scheduler.handle(worker(1))) == 4


def test_a_goodbye_of_an_earlier_run_is_ignored() -> None:
    scheduler = terms(on_crash="replace")
    scheduler.bye(0, run=3, last=1)
    assert scheduler.finished == set()


def test_notes_are_kept_for_the_run() -> None:
    scheduler = complete()
    (stored,) = scheduler.handle(Note(0, 0, 1, "where", "here"))
    assert isinstance(stored, NoteStored)
    assert [a.text for a in scheduler.handle(Note(0, 1, 1, "where"))] == ["here"]
    scheduler.handle(worker(0, run=1))
    assert [a.text for a in scheduler.handle(Note(1, 1, 1, "where"))] == [""]
