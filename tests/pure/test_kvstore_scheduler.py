"""The scheduler and a server's life from run to run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.errors import KVStoreError
from distkit.kvstore.messages import (
    AddressBook,
    Answer,
    Barrier,
    Error,
    Init,
    Pull,
    Register,
    Reply,
    RollCall,
)
from distkit.kvstore.node import Node
from distkit.kvstore.scheduler import Scheduler
from distkit.kvstore.shard import Shard

W, S = 2, 2


def worker(node: int, run: int = 0, mode: str = "dist_sync", servers: int = S) -> Register:
    return Register(run, node, 0, "", W, servers, mode, 100)


def server(node: int, run: int = 0) -> Register:
    return Register(run, node, 0, f"ipc://{node}", W, S)


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
        assert (book.mode, book.bound) == ("dist_sync", 100)


def test_who_registers_again_is_told_alone() -> None:
    assert [a.node for a in complete().handle(worker(1))] == [1]


@pytest.mark.parametrize(
    ("register", "says"),
    [
        (worker(1, mode="dist_async"), 'worker 1 asks for "dist_async"'),
        (worker(1, servers=3), "expects 2 workers and 3 servers"),
    ],
)
def test_a_misfit_is_refused_and_may_come_again(register: Register, says: str) -> None:
    scheduler = Scheduler(W, S)
    for r in (worker(0), server(2), server(3)):
        scheduler.handle(r)
    (refused,) = scheduler.handle(register)
    assert isinstance(refused, Error)
    assert says in refused.text
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


def test_who_still_waits_in_an_older_run_is_told_that_it_is_over() -> None:
    scheduler = Scheduler(W, S)
    scheduler.handle(worker(0))
    (told,) = scheduler.handle(worker(1, run=1))
    assert (told.node, told.run) == (0, 0)
    assert "stale node of run 0" in told.text


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
    return AddressBook(run, 2, 1, mode, 100, {})


def init(run: int, node: int = 0) -> Init:
    return Init(run, node, 7, "w", (1,), "float32", torch.ones(1))


def test_a_server_registers_with_the_endpoint_it_listens_on() -> None:
    register = Shard(NODE).register()
    assert (register.node, register.endpoint) == (2, "ipc://f/kv2")


def test_requests_that_overtake_the_address_book_are_kept() -> None:
    shard = Shard(NODE)
    assert shard.handle(init(0)) == []
    (reply,) = shard.hear(book(0))
    assert isinstance(reply, Reply)


@pytest.mark.parametrize(("mode", "quorum"), [("dist_sync", W), ("dist_async", 1)])
def test_the_mode_is_a_quorum(mode: str, quorum: int) -> None:
    shard = Shard(NODE)
    shard.hear(book(0, mode))
    assert shard.store is not None
    assert shard.store.quorum == quorum


def test_each_run_has_a_store_of_its_own() -> None:
    shard = Shard(NODE)
    shard.hear(book(0))
    shard.handle(init(0))
    (register,) = shard.hear(RollCall(1, 2, 0))
    assert (type(register), register.run) == (Register, 1)
    shard.hear(book(1))
    old: list[Answer] = [a for a in shard.handle(Pull(0, 0, 8, "w")) if isinstance(a, Answer)]
    assert "stale node of run 0, the cluster is at run 1" in old[0].text
    (refused,) = shard.handle(Pull(1, 0, 1, "w"))
    assert "not initialised" in refused.text


def test_a_request_of_a_newer_run_begins_it() -> None:
    shard = Shard(NODE)
    shard.hear(book(0))
    (register,) = shard.handle(init(5))
    assert (type(register), register.run) == (Register, 5)
    (reply,) = shard.hear(book(5))
    assert (reply.run, reply.number) == (5, 7)


def test_a_server_that_is_refused_does_not_serve() -> None:
    with pytest.raises(KVStoreError, match="wrong number"):
        Shard(NODE).hear(Error(0, 2, 1, "wrong number of servers"))


# -- nodes ----------------------------------------------------------------------


def test_ids_count_workers_then_servers_then_the_scheduler() -> None:
    roles = [("worker", 0), ("worker", 1), ("server", 0), ("server", 1), ("scheduler", 0)]
    assert [Node(role, i, W, S, "f").id for role, i in roles] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("role", "index"), [("worker", 2), ("server", -1), ("chief", 0)])
def test_there_is_no_such_node(role: str, index: int) -> None:
    with pytest.raises(KVStoreError, match=f"there is no {role} {index}"):
        Node(role, index, W, S, "f")


def test_a_folder_too_long_for_a_socket_is_told() -> None:
    node = Node("server", 0, W, S, "/tmp/" + "x" * 100)
    with pytest.raises(KVStoreError, match="too long for a socket: 109 bytes"):
        node.endpoint(2)
