"""Infers the workers that a parameter-server request waits for, and a store call's missing keys.

No side effects.

The state of a parameter server is inferred from its workers' events:

===========  =====================================================================
request      is answered when
===========  =====================================================================
register     every worker has registered
init         worker 0 has sent the value
push         it arrives
pull         it arrives (``dist_async``); no worker is more than s pushes of the key
             behind the pulling worker (``staleness=s``); every worker has pushed the key
             as often as the pulling worker (``dist_sync``)
barrier      every worker has called it
===========  =====================================================================

A pull counts as waiting only if no reply can be in transit: its worker's own pushes are
acknowledged, and the workers that it waits for have not started to push. A gradient in transit
counts as arrived.

If workers are replaced or excluded during a run, or rounds may end without some of them
(``backup``), the workers' events do not determine the servers' state, and the result is marked as
uncertain.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distkit.consistency import Asynchronous, Rule, rule_of
from distkit.events import NO_ATTRIBUTES, REQUESTS, CallRecord, Event, Op, State


@dataclass(frozen=True, slots=True)
class Awaited:
    """The workers that a request waits for.

    Each of them must have made ``count`` requests of the awaited kind. ``certain`` is False if the
    server may reply earlier.
    """

    workers: tuple[int, ...] = ()
    count: int = 0
    certain: bool = True


class PendingRequests:
    """Tracks the requests of a run's workers.

    Args:
        workers: number of workers.

    >>> def request(rank, seq, op, state):
    ...     fields = dict(attributes={"key": "w"}, match=f"kv:1:{rank}:{seq}")
    ...     return Event(rank, seq, op, state, 0.0, peer=2, **fields)
    >>> pending = PendingRequests(2)
    >>> mode = {"mode": "dist_sync"}
    >>> pending.feed(Event(0, 0, Op.REGISTER, State.STARTED, 0.0, peer=3, attributes=mode))
    >>> for state in (State.STARTED, State.COMPLETED):
    ...     pending.feed(request(0, 1, Op.PUSH, state))
    >>> pending.awaited_by(request(0, 2, Op.PULL, State.BLOCKED))
    Awaited(workers=(1,), count=1, certain=True)
    """

    def __init__(self, workers: int) -> None:
        self.workers = range(workers)
        self._options: Mapping[str, Any] = NO_ATTRIBUTES
        self.rule: Rule = Asynchronous()  # until a worker registers
        self._dead: set[int] = set()
        # workers were excluded or replaced, or may be left out of a round
        self._is_uncertain = False
        #: The number of each worker's requests, and of its pushes that have arrived, by topic.
        self._request_counts: dict[object, Counter[int]] = defaultdict(Counter)
        self._arrival_counts: dict[object, Counter[int]] = defaultdict(Counter)

    def feed(self, e: Event) -> None:
        """Process a worker's event; each worker's events must arrive in order."""
        topic = _topic(e)
        if e.state is State.STARTED:
            self._request_counts[topic][e.rank] += 1
            if e.op is Op.REGISTER:
                self._register(e)
        elif e.state is State.FAILED and e.op in (Op.PUSH, Op.INIT):
            self._request_counts[topic][e.rank] -= 1  # rejected
        elif e.state is State.COMPLETED and e.op is Op.PUSH:
            self._arrival_counts[topic][e.rank] += 1

    def _register(self, e: Event) -> None:
        self._options = e.attributes
        self.rule = rule_of(**{"mode": "", **e.attributes})
        self._is_uncertain |= self._request_counts[_topic(e)][e.rank] > 1 or self.rule.backup > 0

    def worker_died(self, worker: int) -> None:
        """Record that a worker's process has exited; ``dist_sync`` then halts by default."""
        self._dead.add(worker)
        self._is_uncertain |= "on_crash" in self._options or not self.rule.has_rounds

    # -- queries ----------------------------------------------------------------

    def count(self, worker: int, request: CallRecord) -> int:
        """Return how many requests a worker has made of the type that ``request`` waits for."""
        return self._request_counts[_awaited_topic(request)][worker]

    def awaited_by(self, request: CallRecord) -> Awaited:
        """Return the workers that an unanswered request waits for."""
        if "mode" not in self._options or request.op not in (
            Op.REGISTER,
            Op.INIT,
            Op.PULL,
            Op.BARRIER,
        ):
            return Awaited()
        if request.op is Op.INIT:
            initializers = [] if "optimizer" in request.attributes else [0]
            return self._find_behind(request, initializers, 1)
        count = self.count(request.rank, request)
        if request.op is not Op.PULL:
            return self._find_behind(request, self.workers, count)
        topic = _awaited_topic(request)
        if self._arrival_counts[topic][request.rank] < self._request_counts[topic][request.rank]:
            return Awaited()  # the worker's own push is unacknowledged and may be rejected
        return self._find_behind(request, self.workers, self.rule.required_clock(count))

    def _find_behind(self, request: CallRecord, workers: Iterable[int], count: int) -> Awaited:
        """Return the workers that have, or may have, made fewer than ``count`` awaited requests."""
        if count <= 0:
            return Awaited()
        others = [w for w in workers if w != request.rank]
        if self._is_uncertain:
            return Awaited(tuple(w for w in others if w not in self._dead), count, certain=False)
        return Awaited(tuple(w for w in others if self.count(w, request) < count), count)


def is_server_request(e: CallRecord) -> bool:
    """Return whether an event belongs to a request to the parameter server or scheduler."""
    is_barrier = e.op is Op.BARRIER and e.match is not None
    return is_barrier or (e.op in REQUESTS and e.peer is not None)


def _topic(request: CallRecord) -> object:
    """Return a request's topic: its kind and, if it goes to a server, the server and the key."""
    if request.op in (Op.REGISTER, Op.BARRIER):
        return request.op
    return request.op, request.peer, request.attributes.get("key")


def _awaited_topic(request: CallRecord) -> object:
    """Return the topic of the other workers' requests that must precede the reply."""
    return (
        (Op.PUSH, request.peer, request.attributes.get("key"))
        if request.op is Op.PULL
        else _topic(request)
    )


class Keys:
    """Tracks the keys that ranks have set in stores.

    A store is shared by all processes that know its address, and a prefix store renames keys. Two
    keys are treated as the same if one ends with the other, to avoid false reports.
    """

    def __init__(self) -> None:
        self.set_events: dict[str, Event] = {}  # the first event that set each key

    def feed(self, e: Event) -> None:
        """Record the keys that a call sets."""
        if e.op is Op.STORE_SET:
            for key in _keys(e):
                self.set_events.setdefault(key, e)

    def missing(self, call: CallRecord) -> list[str]:
        """Return the keys that a call waits for and that no rank has set."""
        return [
            key
            for key in _keys(call)
            if not any(_same_key(key, set_key) for set_key in self.set_events)
        ]


def _keys(request: CallRecord) -> tuple[str, ...]:
    return tuple(request.attributes.get("keys", ()))


def _same_key(one: str, other: str) -> bool:
    return one == other or one.endswith(f"/{other}") or other.endswith(f"/{one}")


def similar(key: str, others: Iterable[str]) -> str:
    """Return the most similar key, or "" if none is similar.

    Keys with the same numbers are preferred, since numbers in keys usually identify ranks.

    >>> similar("ready", ["redy", "done"])
    'redy'
    >>> similar("done_1", ["done_0", "doe1"])
    'doe1'
    """
    from difflib import get_close_matches

    keys = [*others]
    same_digits = [other for other in keys if re.findall(r"\d+", other) == re.findall(r"\d+", key)]
    matches = get_close_matches(key, same_digits, 1) or get_close_matches(key, keys, 1)
    return matches[0] if matches else ""
