"""Consistency models: rounds, waits, and deaths."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distkit.consistency import Asynchronous, Rule, Synchronous
from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    AtBarrier,
    Init,
    Pull,
    Push,
    Reply,
    Response,
    SetOptimizer,
)
from distkit.kvstore.protocol.options import StoreOptions
from distkit.kvstore.protocol.server import Entry, KVServer

N = 3


class AddingStore:
    """A server that adds pushed values, with the state of its workers."""

    def __init__(self, rule: Rule, workers: int = N, on_crash: str = "halt") -> None:
        self.server = KVServer(rule, range(workers), on_crash=on_crash, update_context=self._watch)
        self.updates: list[list[int]] = []  # the workers of each update
        self.last_request, self.pulled = 0, dict.fromkeys(range(workers), 0)
        self.request(SetOptimizer, 0, "sgd", {"learning_rate": -1.0})
        self.request(Init, 0, "w", (1,), "float32", torch.zeros(1))

    def _watch(self, entry: Entry, pushes: list[Push]):
        self.updates.append([p.node for p in pushes])
        return nullcontext()

    def request(self, kind, node, *fields) -> list[Response]:
        self.last_request += 1
        return self.track_versions(self.server.handle(kind(node, self.last_request, *fields)))

    def track_versions(self, responses: list[Response]) -> list[Response]:
        for a in responses:
            if isinstance(a, Reply) and a.value is not None:
                self.pulled[a.node] = a.version
        return responses

    def push(self, worker: int, value: float = 1.0) -> list[Response]:
        return self.request(Push, worker, "w", (1,), self.pulled[worker], torch.full((1,), value))

    def pull(self, worker: int) -> list[Response]:
        return self.request(Pull, worker, "w")

    @property
    def value(self) -> float:
        return self.server.entries["w"].value.item()


# -- bounded staleness ----------------------------------------------------------


@given(st.integers(0, 4), st.lists(st.integers(0, N - 1), max_size=60))
def test_staleness_does_not_exceed_the_bound(bound: int, order) -> None:
    """Every read contains all gradients up to the reader's clock minus the bound."""
    store, clocks, waiting = AddingStore(Asynchronous(bound)), [0] * N, {}
    for worker in order:
        if worker in waiting:
            continue
        clocks[worker] += 1
        responses = store.push(worker)
        waiting[worker] = clocks[worker]
        responses += store.pull(worker)
        for response in responses:
            if isinstance(response, Reply) and response.value is not None:
                assert min(clocks) >= waiting.pop(response.node) - bound
                assert response.value.item() == sum(clocks)
        assert all(min(clocks) < c - bound for c in waiting.values())


# -- backup workers -------------------------------------------------------------


@given(st.integers(0, 2), st.permutations([w for w in range(N) for _ in range(4)]))
def test_gradients_are_applied_once_or_counted_as_dropped(backup: int, order) -> None:
    store, value = AddingStore(Synchronous(backup)), 1.0
    for worker in order:
        if not store.server.entries["w"].waiting:
            store.pull(worker)
        store.push(worker, value)
        value *= 2
    entry = store.server.entries["w"]
    pending = sum(len(arrived) for arrived in entry.rounds.values())
    applied = sum(map(len, store.updates))
    assert applied + pending + sum(entry.dropped.values()) == len(order)
    assert bin(int(store.value)).count("1") == applied
    assert all(len(workers) == N - backup for workers in store.updates)


# -- workers that end or join -----------------------------------------------------


def kill_worker(store: AddingStore, worker: int) -> list[Response]:
    return store.track_versions(store.server.handle_departure(worker, "signal SIGKILL", 1000))


def test_halt_applies_complete_rounds() -> None:
    store = AddingStore(Synchronous())
    store.push(1)
    store.push(0)
    store.pull(0)
    assert kill_worker(store, 1) == []
    assert [(a.node, a.version) for a in store.push(2)] == [(2, 1), (0, 1)]
    with_backup = AddingStore(Synchronous(backup=1))
    with_backup.push(0)
    with_backup.pull(0)
    assert kill_worker(with_backup, 1) == []


def test_rounds_do_not_wait_for_workers_at_a_barrier() -> None:
    store = AddingStore(Synchronous(), on_crash="replace")
    store.push(0)
    store.request(AtBarrier, 0)
    store.push(1)
    assert store.pull(1) == []  # it waits for worker 2, although worker 0 is at the barrier
    assert [a.version for a in store.push(2)] == [1, 1]
    store.push(1)
    store.push(2)
    assert (store.server.entries["w"].version, store.value) == (2, 5)
    store.request(AtBarrier, 1)
    store.push(2)
    assert store.server.entries["w"].version == 3


def test_rounds_wait_for_all_workers_after_the_barrier() -> None:
    store = AddingStore(Synchronous(), on_crash="replace")
    for worker in (0, 1, 2):
        store.request(AtBarrier, worker)
    store.push(2)
    assert store.pull(2) == []
    (accepted,) = store.push(1)
    assert accepted.version == 0
    assert [a.node for a in store.push(0)] == [0, 2]
    assert store.server.entries["w"].version == 1


@pytest.mark.parametrize("bound", [None, 0])
def test_async_continues_and_replacement_starts_with_the_slowest(bound) -> None:
    store = AddingStore(Asynchronous(bound))
    for _ in range(3):
        store.push(0)
        store.push(2)
    store.pull(0)
    kill_worker(store, 1)
    assert store.pulled[0] == 6
    store.last_request = 2000
    store.push(1)
    assert store.server.entries["w"].clocks == {0: 3, 1: 4, 2: 3}
    assert len(store.pull(0)) == 1


def test_requests_from_a_dead_worker_are_dropped() -> None:
    store = AddingStore(Asynchronous())
    kill_worker(store, 1)
    assert store.push(1, 5.0) == []
    assert store.value == 0


@pytest.mark.parametrize("order", ["init first", "death first"])
@pytest.mark.parametrize("rule", [Synchronous(), Asynchronous()])
def test_init_from_a_dead_worker_raises(rule: Rule, order: str) -> None:
    store, responses = AddingStore(rule, on_crash="continue"), list[Response]()
    if order == "death first":
        kill_worker(store, 0)
    responses += store.request(Init, 1, "v", (1,), "float32")
    if order == "init first":
        responses += kill_worker(store, 0)
    (error,) = responses
    assert "init of 'v' waits for the value of worker 0, which has exited" in error.text


# -- repeated pushes ---------------------------------------------------------------


@given(st.lists(st.integers(0, 11), max_size=60))
def test_repeated_and_late_pushes_count_once(echoes: list[int]) -> None:
    store, sent = AddingStore(Asynchronous()), 0
    for echo in [*echoes, 11]:
        for number in range(sent, max(sent, echo + 1)):
            store.server.handle(push(number, 2.0**number))
        sent = max(sent, echo + 1)
        store.server.handle(push(echo, 2.0**echo))
        assert store.value == 2.0**sent - 1


def push(number: int, value: float, once: tuple[int, ...] = (), worker: int = 1) -> Push:
    return Push(worker, number, "w", (1,), 0, torch.full((1,), value), once=once)


def test_rescheduled_function_counts_once() -> None:
    store, number = AddingStore(Asynchronous()), iter(range(100))
    for worker, function, pushes in ((0, 7, 2), (1, 7, 3), (0, 8, 1), (2, 7, 3)):
        for n in range(pushes):
            store.server.handle(push(next(number), 1.0, (function, n), worker))
    assert store.value == 3 + 1
    store.server.handle(push(next(number), 1.0, (7, 3)))
    assert store.value == 5


# -- options -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "dist"}, 'unknown store "dist"'),
        ({"on_crash": "ignore"}, "Choose from: halt, continue, replace"),
        ({"staleness": 3}, 'Use "dist_async"'),
        ({"mode": "dist_async", "staleness": -1}, "expected 0 or more"),
        ({"mode": "dist_async", "staleness": 1.5}, "staleness=1.5: expected an integer"),
        (
            {"mode": "dist_async", "staleness": math.inf},
            "expected an integer, or None for no limit.",
        ),
        ({"replication": 1.5}, "replication=1.5: expected an integer."),
        ({"replication": "2"}, "replication='2': expected an integer"),
        ({"bound": -3}, "bigarray_bound=-3"),
        ({"mode": "dist_async", "backup": 1}, 'Use "dist_sync"'),
        ({"backup": -1}, "0 or more"),
        ({"replication": 0}, "use 1, or 2 for a backup"),
        ({"replication": 3}, "use 1, or 2 for a backup"),
    ],
)
def test_conflicting_options_raise(options, message: str) -> None:
    with pytest.raises(KVStoreError) as error:
        StoreOptions(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("options", [{"replication": 2}, {"backup": 1}])
def test_too_small_cluster_raises(options) -> None:
    with pytest.raises(KVStoreError, match="too large for 1 worker and 1 server"):
        StoreOptions(**options).check_cluster(1, 1)
    StoreOptions(**options).check_cluster(2, 2)
