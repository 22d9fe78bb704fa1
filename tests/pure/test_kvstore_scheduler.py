"""The scheduler and a server's life from run to run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.kvstore.protocol.messages import (
    LIFE,
    AddressBook,
    Copy,
    Departed,
    Error,
    Init,
    Leave,
    Note,
    NoteStored,
    Register,
    Reply,
    RollCall,
    error,
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


# -- a server through its runs --------------------------------------------------

NODE = Node("server", 0, workers=W, servers=S, folder="f")


def book(run: int, mode: str = "dist_sync") -> AddressBook:
    return AddressBook(run, 2, 1, Terms(mode, 100), {0: "", 1: ""})


def init(run: int, node: int = 0) -> Init:
    return Init(run, node, 7, "w", (1,), "float32", torch.ones(1))


def test_requests_that_overtake_the_address_book_are_kept() -> None:
    shard = ServerSession(NODE)
    assert shard.handle(init(0), 2) == []
    (reply,) = shard.hear(book(0))
    assert isinstance(reply, Reply)


def test_a_failed_backup_is_reported_to_every_worker_that_asks() -> None:
    shard = ServerSession(NODE)
    shard.hear(AddressBook(0, 2, 1, Terms("dist_sync", 100, replication=2), {0: "", 1: ""}))
    (copy,) = shard.handle(init(0), 2)
    assert isinstance(copy, Copy)
    answers = [*shard.hear(error(copy, "server 1 is out of memory")), *shard.handle(init(0, 1), 2)]
    assert [(type(a), a.node) for a in answers] == [(Error, 0), (Error, 1)]
    assert all("server 0 cannot go on: server 1 is out of memory" in a.text for a in answers)


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


def test_notes_are_kept_for_the_run() -> None:
    scheduler = complete()
    (stored,) = scheduler.handle(Note(0, 0, 1, "where", "here"))
    assert isinstance(stored, NoteStored)
    assert [a.text for a in scheduler.handle(Note(0, 1, 1, "where"))] == ["here"]
    scheduler.handle(worker(0, run=1))
    assert [a.text for a in scheduler.handle(Note(1, 1, 1, "where"))] == [""]
