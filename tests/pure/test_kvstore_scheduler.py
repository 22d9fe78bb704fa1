"""The scheduler and a server's life from run to run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.consistency import Asynchronous, Rule, Synchronous
from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    AddressBook,
    Answer,
    Appointed,
    Barrier,
    Copied,
    Departed,
    Error,
    Init,
    Joined,
    Leave,
    Missed,
    Present,
    Pull,
    Register,
    Replaced,
    Reply,
    RollCall,
)
from distkit.kvstore.protocol.terms import Terms
from distkit.kvstore.transport.journal import Journal
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.scheduler import LIFE, Scheduler
from distkit.kvstore.transport.shard import ServerSession

W, S = 2, 2


def worker(node: int, run: int = 0, mode: str = "dist_sync", servers: int = S) -> Register:
    return Register(run, node, 0, "", W, servers, Terms(mode, 100))


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
        assert book.terms == Terms("dist_sync", 100)


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
    return AddressBook(run, 2, 1, Terms(mode, 100), {0: "", 1: ""})


def init(run: int, node: int = 0) -> Init:
    return Init(run, node, 7, "w", (1,), "float32", torch.ones(1))


def test_a_server_registers_with_the_endpoint_it_listens_on() -> None:
    register = ServerSession(NODE).register()
    assert (register.node, register.endpoint) == (2, "ipc://f/kv2")


def test_requests_that_overtake_the_address_book_are_kept() -> None:
    shard = ServerSession(NODE)
    assert shard.handle(init(0)) == []
    (reply,) = shard.hear(book(0))
    assert isinstance(reply, Reply)


@pytest.mark.parametrize(
    ("mode", "rule"), [("dist_sync", Synchronous()), ("dist_async_device", Asynchronous())]
)
def test_the_mode_is_a_rule(mode: str, rule: Rule) -> None:
    shard = ServerSession(NODE)
    shard.hear(book(0, mode))
    assert shard.store is not None
    assert shard.store.rule == rule
    assert shard.store.state.members == {0, 1}


def test_each_run_has_a_store_of_its_own() -> None:
    shard = ServerSession(NODE)
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
    shard = ServerSession(NODE)
    shard.hear(book(0))
    (register,) = shard.handle(init(5))
    assert (type(register), register.run) == (Register, 5)
    (reply,) = shard.hear(book(5))
    assert (reply.run, reply.number) == (5, 7)


def test_a_server_that_is_refused_does_not_serve() -> None:
    with pytest.raises(KVStoreError, match="wrong number"):
        ServerSession(NODE).hear(Error(0, 2, 1, "wrong number of servers"))


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


# -- nodes that end, and come late ------------------------------------------------


def leave(node: int, run: int = 0) -> Leave:
    return Leave(run, node, 0, "signal SIGKILL")


def terms(**options: object) -> Scheduler:
    """A complete cluster whose workers agreed on these terms."""
    given = Terms("dist_sync", 100, **options)
    scheduler = Scheduler(W, S)
    for node in (0, 1):
        scheduler.handle(Register(0, node, 0, "", W, S, given))
    for node in (2, 3):
        scheduler.handle(server(node))
    return scheduler


def test_the_servers_are_told_who_has_ended_and_the_barrier_who_is_missing() -> None:
    scheduler = terms()
    scheduler.handle(Barrier(0, 0, 1, 0))
    *told, refused = scheduler.handle(leave(1))
    assert [(type(t), t.node, t.who) for t in told] == [(Departed, 2, 1), (Departed, 3, 1)]
    assert "barrier waits for worker 1, which has ended (signal SIGKILL)." in refused.text
    (later,) = scheduler.handle(Barrier(0, 0, 2, 1))
    assert "worker 1" in later.text


def test_continue_lets_the_others_pass_the_barrier() -> None:
    scheduler = terms(on_crash="continue")
    scheduler.handle(Barrier(0, 0, 1, 0))
    passed = scheduler.handle(leave(1))[-1]
    assert isinstance(passed, Reply)


def test_who_takes_the_place_counts_from_higher_numbers() -> None:
    scheduler = terms(on_crash="replace")
    assert scheduler.handle(Barrier(0, 0, 1, 0)) == []
    assert len(scheduler.handle(leave(1))) == 2
    (book,) = scheduler.handle(worker_of(Terms("dist_sync", 100, on_crash="replace"), 1))
    assert book.first > 0
    assert len(scheduler.handle(Barrier(0, 1, book.first, 0))) == 2


def worker_of(given: Terms, node: int) -> Register:
    return Register(0, node, 0, "", W, S, given)


def test_a_repeated_barrier_is_answered_again() -> None:
    scheduler = complete()
    scheduler.handle(Barrier(0, 0, 1, 0))
    scheduler.handle(Barrier(0, 1, 1, 0))
    assert [a.node for a in scheduler.handle(Barrier(0, 1, 1, 0))] == [1]


def test_a_run_begins_with_those_who_must_be_there() -> None:
    given, scheduler = Terms("dist_async", 100, wait_for=1), Scheduler(W, S)
    for register in (server(2), server(3)):
        assert scheduler.handle(register) == []
    books = scheduler.handle(worker_of(given, 1))
    assert [b.node for b in books] == [1, 2, 3]
    assert [a.node for a in scheduler.handle(worker_of(given, 0))] == [0]


@pytest.mark.parametrize("first", ["server", "worker"])
def test_another_may_come_for_a_server_that_ends_before_the_beginning(first: str) -> None:
    scheduler = Scheduler(W, S)
    for register in (server(2), server(3), worker(1))[:: 1 if first == "server" else -1]:
        scheduler.handle(register)
    assert not scheduler.lacks_servers
    assert not any(isinstance(a, Error) for a in scheduler.handle(leave(3)))
    assert scheduler.lacks_servers
    after = Scheduler(W, S)
    after.resume(json.loads(json.dumps(scheduler.journal())))
    after.handle(server(2))
    after.handle(worker(1))
    for at_work in (scheduler, after):  # and another scheduler knows as much
        assert at_work.lacks_servers
        assert at_work.handle(server(3)) == [] and not at_work.lacks_servers
        books = at_work.handle(worker(0))
        assert [b.node for b in books] == [0, 1, 2, 3]
        assert books[3].first == LIFE  # whatever the one before has said is late


@pytest.mark.parametrize("node", [0, 3])
def test_who_ends_before_the_beginning_is_told_to_those_who_wait(node: int) -> None:
    scheduler = Scheduler(W, S)
    scheduler.handle(server(3))
    scheduler.handle(worker(1))
    told = scheduler.handle(leave(node))
    if node == 3:  # for whom nobody has come for long
        told = scheduler.give_up_servers()
        assert not scheduler.lacks_servers
    refused = told[-1]
    name = "worker 0" if node == 0 else "server 1"
    assert f"the beginning waits for {name}, which has ended (signal SIGKILL)" in refused.text
    for register in (server(3), server(2), worker(0)):
        assert scheduler.handle(register) == []
    assert len(scheduler.handle(worker(1))) == 4


def test_a_server_that_takes_over_hears_who_has_ended() -> None:
    scheduler = terms(on_crash="continue")
    scheduler.handle(leave(1))
    scheduler.handle(leave(2))
    told = scheduler.handle(Present(0, 2, LIFE + 1, "ipc://2"))
    assert [(type(t), t.node, t.who) for t in told] == [(Departed, 2, 1), (Replaced, 0, 2)]


def test_terms_that_no_cluster_of_this_size_keeps_are_refused() -> None:
    scheduler = Scheduler(W, S)
    (refused,) = scheduler.handle(worker_of(Terms("dist_sync", 100, replication=3), 0))
    assert "replication=3 in a cluster of 2 workers and 2 servers" in refused.text


# -- silence, and another scheduler -------------------------------------------------


def again(scheduler: Scheduler) -> Scheduler:
    """Another in its place, from what it has written down."""
    other = Scheduler(W, S)
    other.resume(json.loads(json.dumps(scheduler.journal())))
    return other


def test_a_barrier_that_was_passed_is_not_waited_for_again() -> None:
    scheduler = complete()
    scheduler.handle(Barrier(0, 0, 1, 0))
    assert len(scheduler.handle(Barrier(0, 1, 1, 0))) == 2
    other = again(scheduler)
    assert [type(a) for a in other.handle(Barrier(0, 1, 1, 0))] == [Reply]
    assert other.handle(Barrier(0, 1, 2, 1)) == []
    assert [a.node for a in other.handle(Barrier(0, 0, 2, 1))] == [0, 1]


def test_who_comes_later_hears_how_many_barriers_were_passed() -> None:
    scheduler = terms(on_crash="replace")
    answers = [a for n in range(W) for a in scheduler.handle(Barrier(0, n, 5, 0))]
    assert [a.version for a in answers if isinstance(a, Reply)] == [1] * W
    scheduler.handle(leave(1))
    book = again(scheduler).handle(worker_of(Terms("dist_sync", 100, on_crash="replace"), 1))[0]
    assert isinstance(book, AddressBook)
    assert book.barriers == 1


def test_another_scheduler_knows_the_run_its_terms_and_who_has_ended() -> None:
    scheduler = terms(on_crash="continue")
    scheduler.handle(leave(1))
    other = again(scheduler)
    assert [type(a) for a in other.handle(Barrier(0, 0, 1, 0))] == [Reply]
    (told,) = other.handle(Present(0, 2, 5, "ipc://2"))
    assert (type(told), told.who, told.first) == (Departed, 1, LIFE)
    assert again(other).journal() == other.journal()


def test_who_waits_for_the_beginning_says_so_again() -> None:
    scheduler = Scheduler(W, S)
    for register in (worker(0), server(2), server(3)):
        scheduler.handle(register)
    other = again(scheduler)
    for register in (worker(0), server(2), server(3)):
        assert other.handle(register) == []
    assert len(other.handle(worker(1))) == 4


def test_servers_tell_another_scheduler_whom_they_miss() -> None:
    other = again(terms())
    assert [a.who for a in other.handle(Missed(0, 2, 5, 1, 7, "broke"))] == [1, 1]
    assert other.handle(Missed(0, 3, 5, 1, 7, "broke")) == []


def test_a_server_that_serves_in_another_place_is_asked_for_by_its_own() -> None:
    """Processes of two hosts may have the same pid: 9 is server 0's, and was server 1's."""
    given, scheduler = Terms("dist_sync", 100, replication=2), Scheduler(W, S)
    for node in (0, 1):
        scheduler.handle(worker_of(given, node))
    for node in (2, 3):
        scheduler.handle(Register(0, node, 0, f"ipc://{node}", W, S, pid=9))
    assert again(scheduler).missing(lambda node, pid: (node, pid) != (3, 9)) == [3]
    scheduler.handle(leave(3))
    scheduler.handle(Present(0, 3, LIFE + 1, "ipc://3 by 2", pid=9))
    assert again(scheduler).missing(lambda node, pid: (node, pid) != (3, 9)) == []
    assert again(scheduler).missing(lambda node, pid: (node, pid) != (2, 9)) == [2, 3]


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_a_server_that_served_in_another_place_is_lost_from_its_own(order: tuple[int, int]) -> None:
    """Else the process of another host that has its pid, in the other place, would be ended."""
    scheduler, asked = terms(replication=2), list[tuple[int, int]]()
    scheduler.handle(Present(0, 2, 1, "ipc://2", pid=9))
    scheduler.handle(leave(3))
    scheduler.handle(Present(0, 3, LIFE + 1, "ipc://3 by 2", pid=9))
    after = again(scheduler)
    after.lost = lambda node, pid, how: asked.append((node, pid)) or how
    for node in order:
        after.handle(leave(node))
    assert asked == [(2, 9), (2, 9)]


def test_nobody_misses_who_hung_up_in_order_or_has_another_in_its_place() -> None:
    scheduler = terms(on_crash="replace")
    scheduler.bye(0, scheduler.run, 1)
    assert scheduler.handle(Missed(0, 2, 5, 0, 7, "broke")) == []
    scheduler.handle(leave(1))
    scheduler.handle(worker_of(Terms("dist_sync", 100, on_crash="replace"), 1))
    assert again(scheduler).handle(Missed(0, 2, 6, 1, 7, "broke")) == []


@pytest.mark.parametrize("late", [Barrier(0, 1, 5, 0), Present(0, 1, 6, ""), Barrier(0, 1, 0, 0)])
def test_who_was_given_up_is_refused(late: Barrier) -> None:
    scheduler = terms(on_crash="replace")
    scheduler.handle(leave(1))
    (refused,) = scheduler.handle(late)
    assert isinstance(refused, Error)
    assert "worker 1 was given up" in refused.text
    (book,) = scheduler.handle(worker_of(Terms("dist_sync", 100, on_crash="replace"), 1))
    assert scheduler.handle(Barrier(0, 1, book.first, 0)) == []


def test_a_worker_quicker_than_the_news_of_the_one_before() -> None:
    scheduler, given = terms(on_crash="replace"), Terms("dist_sync", 100, on_crash="replace")
    fields = "", W, S, given
    *told, book = scheduler.handle(Register(0, 1, LIFE, *fields))
    assert [(t.node, t.who) for t in told] == [(2, 1), (3, 1)]
    assert book.first == LIFE


def test_workers_hear_of_values_that_nobody_has() -> None:
    lost = [a for a in terms().handle(leave(2)) if a.node < W]
    assert [(type(a), a.node, a.who) for a in lost] == [(Departed, 0, 2), (Departed, 1, 2)]
    scheduler = terms(replication=2)
    assert [a for a in scheduler.handle(leave(2)) if a.node < W] == []
    assert {a.who for a in scheduler.handle(leave(3)) if a.node < W} == {2, 3}


def comes(scheduler: Scheduler, node: int, pid: int, endpoint: str = "ipc://new") -> list[Answer]:
    """A server's process begins in this place."""
    register = Register(0, node, 0, endpoint, W, S, pid=pid)
    register.node = scheduler.asker(register)
    return scheduler.handle(register)


def test_a_server_that_comes_in_the_middle_of_a_run_gets_copies() -> None:
    scheduler = terms(replication=2)
    (_, appointed) = scheduler.handle(leave(2))
    assert (type(appointed), appointed.node, appointed.who) == (Appointed, 3, 2)
    assert appointed.endpoints == {2: "ipc://2"}
    scheduler.handle(Present(0, 2, LIFE + 1, "ipc://2"))
    book, *told = comes(scheduler, 2, pid=7)
    assert (type(book), book.node, book.endpoints[3]) == (AddressBook, 5, "ipc://3")
    assert [(type(t), t.node, t.who) for t in told] == [
        (Departed, 5, 2),
        (Joined, 2, 5),
        (Joined, 3, 5),
    ]
    assert scheduler.copies == {2: [3], 3: [3]}
    for place in (2, 3):
        scheduler.handle(Copied(0, place, LIFE + 2, 5, 0))
    assert again(scheduler).copies == {2: [3, 5], 3: [3, 5]}


def test_a_stand_in_that_ends_is_replaced_however_late_the_news() -> None:
    scheduler = terms(replication=2)
    first = comes(scheduler, 2, pid=7)  # before anybody has noticed that server 0 has ended
    assert first[0].node == 5
    assert 2 in scheduler.present
    scheduler.handle(leave(2))
    *_, joined = comes(scheduler, 2, pid=8)
    assert (type(joined), joined.node, joined.who, joined.first) == (Joined, 3, 5, LIFE)
    scheduler.handle(Copied(0, 3, 9, 5, 0))  # a copy that the one before it got
    assert scheduler.copies == {2: [3], 3: [3]}


def test_the_journal_is_whole_and_has_one_owner(tmp_path: Path) -> None:
    journal, scheduler = Journal(tmp_path / "j"), Scheduler(W, S)
    scheduler.handle(server(2, run=3))
    journal.write(scheduler.journal())
    with pytest.raises(BlockingIOError):
        Journal(tmp_path / "j")
    told = json.loads((tmp_path / "j").read_text())
    assert (told["run"], told["callable"]) == (3, [2])
    journal.close()
    assert list(tmp_path.iterdir()) == []
    journal = Journal(tmp_path / "j")
    journal.write({"long": "x" * 100})
    journal.write({"a": 1})
    assert journal.read() == {"a": 1}
    journal.close()


def test_a_goodbye_belongs_to_one_life_of_a_node() -> None:
    """That of an earlier run's standby comes when the next run has begun."""
    scheduler, given = terms(replication=2), Terms("dist_sync", 100, replication=2)
    scheduler.handle(Leave(1, 3, 0, "of another run"))
    for register in (server(2, run=1), server(3, run=1)):
        scheduler.handle(register)
    scheduler.bye(3, 0, 5)
    for node in (0, 1):
        fields = "", W, S, given
        scheduler.handle(Register(1, node, 0, *fields))
    scheduler.bye(3, 0, 5)
    other = again(scheduler)
    told = other.handle(Missed(1, 2, 5, 3, 7, "broke"))
    assert [(type(t), t.node, t.who) for t in told] == [(Departed, 2, 3), (Appointed, 2, 3)]
    other.bye(3, 1, 8)
    assert other.parted == set()  # it is not there any more
