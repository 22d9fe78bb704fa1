"""The server applies every accepted gradient exactly once, at the correct version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from distkit.consistency import Asynchronous, Rule, Synchronous
from distkit.kvstore.protocol.messages import (
    Error,
    Init,
    Pull,
    Push,
    Request,
    Response,
    SetOptimizer,
)
from distkit.kvstore.protocol.server import Entry, KVServer

WORKERS = 3
SYNC, ASYNC = Synchronous(), Asynchronous()


class Store:
    """A KVServer with a key "w" of two elements, and the state of its workers."""

    def __init__(self, rule: Rule, *, adding: bool = True, require_optimizer: bool = False) -> None:
        self.updates: list[list[tuple[int, int]]] = []  # worker, staleness
        self.server = KVServer(
            rule, range(WORKERS), require_optimizer=require_optimizer, update_context=self._watch
        )
        self.last_request = 0
        if adding:  # w ← w + g, so that every push remains visible
            self.request(SetOptimizer, 0, "sgd", {"learning_rate": -1.0})
        self.request(Init, 0, "w", (2,), "float32", torch.zeros(2))

    @contextmanager
    def _watch(self, entry: Entry, pushes: list[Push]) -> Iterator[None]:
        before = entry.version
        yield
        assert entry.version == before
        self.updates.append([(p.node, before - p.version) for p in pushes])

    def request(self, kind: type[Request], node: int, *fields: object) -> list[Response]:
        self.last_request += 1
        return self.server.handle(kind(node, self.last_request, *fields))

    def push(self, worker: int, value: float, version: int = 0) -> list[Response]:
        return self.request(Push, worker, "w", (2,), version, torch.full((2,), value))

    def pull(self, worker: int) -> list[Response]:
        return self.request(Pull, worker, "w")

    def value(self) -> float:
        return self.server.entries["w"].value[0].item()


def error_text(responses: list[Response]) -> str:
    (response,) = responses
    assert isinstance(response, Error)
    return response.text


def arrivals(rounds: int) -> st.SearchStrategy[list[int]]:
    """Generate an arrival order of all pushes that keeps the order of each worker."""
    return st.permutations([w for w in range(WORKERS) for _ in range(rounds)])


@given(arrivals(rounds=3))
def test_sync_replaces_the_value_with_the_sum_of_each_round(order: list[int]) -> None:
    store, pushed = Store(SYNC, adding=False), [0] * WORKERS
    for worker in order:
        pushed[worker] += 1
        store.push(worker, 100.0 ** pushed[worker] * (worker + 1))
        complete = min(pushed)
        assert store.server.entries["w"].version == complete
        assert store.value() == (100.0**complete * (1 + 2 + 3) if complete else 0)


@given(arrivals(rounds=3), st.randoms(use_true_random=False))
def test_async_staleness_counts_the_updates_since_the_pull(order: list[int], random) -> None:
    store, pulled = Store(ASYNC), [0] * WORKERS
    for n, worker in enumerate(order):
        if random.random() < 0.5:
            (reply,) = store.pull(worker)
            pulled[worker] = reply.version
        store.push(worker, 2.0**n, pulled[worker])
        assert store.updates[-1] == [(worker, n - pulled[worker])]
    assert store.value() == 2.0 ** len(order) - 1


class Machine(RuleBasedStateMachine):
    """Pushes and pulls in any order, compared with a model that keeps lists of pushes."""

    @initialize(rule=st.sampled_from([SYNC, ASYNC]))
    def start(self, rule: Rule) -> None:
        self.store, self.sync = Store(rule), rule is SYNC
        self.pushed: list[list[float]] = [[] for _ in range(WORKERS)]
        self.waits: dict[int, int] = {}  # number of the pull: the version it waits for
        self.count = 0

    def version(self) -> int:
        counts = [len(p) for p in self.pushed]
        return min(counts) if self.sync else sum(counts)

    def expected(self) -> float:
        rounds = self.version() if self.sync else None
        return sum(sum(p[:rounds]) for p in self.pushed)

    @rule(worker=st.integers(0, WORKERS - 1))
    def push(self, worker: int) -> None:
        self.count += 1
        self.pushed[worker].append(float(self.count))
        acknowledged, *others = self.store.push(worker, float(self.count))
        assert acknowledged.number == self.store.last_request
        self.check_replies(others)

    @rule(worker=st.integers(0, WORKERS - 1))
    def pull(self, worker: int) -> None:
        self.waits[self.store.last_request + 1] = len(self.pushed[worker]) if self.sync else 0
        self.check_replies(self.store.pull(worker))

    def check_replies(self, replies: list[Response]) -> None:
        due = {n for n, version in self.waits.items() if version <= self.version()}
        assert {r.number for r in replies} == due
        assert all(r.value.tolist() == [self.expected()] * 2 for r in replies)
        self.waits = {n: v for n, v in self.waits.items() if n not in due}

    @invariant()
    def value_equals_the_model(self) -> None:
        assert self.store.value() == self.expected()
        assert self.store.server.entries["w"].version == self.version()


Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
test_any_order_of_requests_matches_the_model = Machine.TestCase


def test_reply_in_flight_keeps_its_value() -> None:
    store = Store(ASYNC)
    (reply,) = store.pull(0)
    store.push(0, 5.0)
    assert reply.value.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Push, ("w", (3,), 0, torch.ones(3)), "push of 'w' got float32[3]"),
        (Push, ("w", (2, 1), 0, torch.ones(2)), "push of 'w' got float32[2, 1]"),
        (Push, ("w", (2,), 0, torch.ones(2).double()), "push of 'w' got float64[2]"),
        (Init, ("w", (2,), "float32", torch.ones(2)), "already initialized"),
        (Init, ("w", (3,), "float32", torch.ones(3)), "init of 'w' got float32[3]"),
        (SetOptimizer, ("sgd", {"learning_rate": 0.5}), "once per run"),
        (SetOptimizer, ("adamm", {}), "the optimizer 'adamm'"),
        (SetOptimizer, ("sgd", {"rate": 1.0}), "'rate'. Its options are lr, momentum"),
    ],
)
def test_invalid_requests_raise_and_the_store_continues(kind, fields, message) -> None:
    store = Store(ASYNC)
    assert message in error_text(store.request(kind, 0, *fields))
    store.push(0, 1.0)
    assert store.value() == 1.0
