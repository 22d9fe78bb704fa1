"""The scheduler: registration, nodes that exit, barriers and notes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkit.kvstore.protocol.messages import (
    INCARNATION_STRIDE,
    AddressBook,
    Barrier,
    Departed,
    Finished,
    Note,
    NoteStored,
    Register,
)
from distkit.kvstore.protocol.options import StoreOptions
from distkit.kvstore.transport.scheduler import Scheduler

W, S = 2, 2


def worker(node: int, incarnation: int = 0, **options: object) -> Register:
    return Register(
        node, INCARNATION_STRIDE * incarnation, "", StoreOptions("dist_sync", 100, **options)
    )


def server(node: int) -> Register:
    return Register(node, 0, f"ipc://{node}")


def complete(**options: object) -> Scheduler:
    """Return a scheduler whose nodes have registered with these options."""
    scheduler = Scheduler(W, S)
    for register in (worker(0, **options), worker(1, **options), server(2), server(3)):
        scheduler.handle(register)
    return scheduler


@given(st.permutations([worker(0), worker(1), server(2), server(3)]))
def test_address_book_is_sent_after_the_last_registration(order: list[Register]) -> None:
    scheduler = Scheduler(W, S)
    assert [scheduler.handle(r) for r in order[:-1]] == [[]] * 3
    books = scheduler.handle(order[-1])
    assert [b.node for b in books] == [0, 1, 2, 3]
    for book in books:
        assert isinstance(book, AddressBook)
        assert book.endpoints == {0: "", 1: "", 2: "ipc://2", 3: "ipc://3"}
        assert book.options == StoreOptions("dist_sync", 100)


# -- nodes that end -----------------------------------------------------------------


SIGKILL = "signal SIGKILL"


@pytest.mark.parametrize("reported", [True, False])
def test_each_node_exit_counts_once(reported: bool) -> None:
    """A replacement may register before its predecessor's exit is reported."""
    scheduler = complete(on_crash="replace")
    if reported:
        assert len(scheduler.handle_departure(1, 0, SIGKILL)) == 2
        assert scheduler.handle_departure(1, 0, SIGKILL) == []
    responses = scheduler.handle(worker(1, incarnation=1, on_crash="replace"))
    assert [type(t) for t in responses] == [Departed, Departed, AddressBook][2 * reported :]
    assert scheduler.handle_departure(1, 0, SIGKILL) == []
    assert len(scheduler.handle_departure(1, 1, SIGKILL)) == 2


def test_requests_from_an_exited_process_are_ignored() -> None:
    scheduler = complete(on_crash="replace")
    scheduler.handle_departure(1, 0, SIGKILL)
    assert scheduler.handle(Barrier(1, 5, 0)) == []
    assert scheduler.handle(Barrier(0, 5, 0)) == []  # waits for the replacement of worker 1


def test_barrier_does_not_wait_for_finished_workers() -> None:
    scheduler = complete(on_crash="replace")
    assert scheduler.handle(Barrier(0, 5, 0)) == []
    assert [(a.node, a.number) for a in scheduler.handle(Finished(1, 5))] == [(1, 5), (0, 5)]


def test_notes_are_kept_during_the_run() -> None:
    scheduler = complete()
    (stored,) = scheduler.handle(Note(0, 1, "where", "here"))
    assert isinstance(stored, NoteStored)
    assert [a.text for a in scheduler.handle(Note(1, 1, "where"))] == ["here"]
    assert [a.text for a in scheduler.handle(Note(1, 2, "elsewhere"))] == [""]
