"""Whom a request to the parameter server waits for, and which key a store, by events alone. Pure.

A parameter server is judged by the events of its workers:

===========  =====================================================================
request      is answered when
===========  =====================================================================
register     every worker has registered
init         worker 0 has given the value
push         it comes
pull         it comes (``dist_async``); no worker has pushed the key more than s times
             less than the one that pulls (``staleness=s``); every worker has pushed it
             as often (``dist_sync``), or all but b in each round (``backup=b``)
barrier      every worker is there
===========  =====================================================================

A pull counts as waiting only when no answer can be under way: its worker's own pushes are
acknowledged, and those that it waits for have not even begun to push. A gradient of theirs that
is under way counts as one that has come.

Where workers come and go in the middle of a run, events of workers do not tell all that servers
take into account: then the answer is a guess, and says so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from distkit.consistency import Asynchronous, Rule, rule_of
from distkit.events import NO_ATTRIBUTES, REQUESTS, Event, Op, Span, State
from distkit.trace.calls import keys as shown


@dataclass(frozen=True, slots=True)
class Awaited:
    """The workers that a request waits for; all but ``spare`` of them are enough.

    ``count``: how often each must have asked the like. ``certain``: it is not answered before.
    """

    workers: tuple[int, ...] = ()
    count: int = 0
    spare: int = 0
    certain: bool = True


class Awaiting:
    """The requests of the workers of one run.

    Args:
        workers: how many there are.

    >>> def asked(rank, seq, op, state):
    ...     about = dict(attributes={"key": "w"}, match=f"kv:1:{rank}:{seq}")
    ...     return Event(rank, seq, op, state, 0.0, peer=2, **about)
    >>> it = Awaiting(2)
    >>> mode = {"mode": "dist_sync"}
    >>> it.feed(Event(0, 0, Op.REGISTER, State.STARTED, 0.0, peer=3, attributes=mode))
    >>> for state in (State.STARTED, State.COMPLETED):
    ...     it.feed(asked(0, 1, Op.PUSH, state))
    >>> it.whom(asked(0, 2, Op.PULL, State.BLOCKED))
    Awaited(workers=(1,), count=1, spare=0, certain=True)
    """

    def __init__(self, workers: int) -> None:
        self.workers = range(workers)
        self._terms: Mapping[str, Any] = NO_ATTRIBUTES
        self.rule: Rule = Asynchronous()  # as far as somebody has told it
        self._dead: set[int] = set()
        self._changed = False  # the store goes on without some, or with others in their places
        #: By what is asked, how often each worker has; of pushes also how many have arrived.
        self._asked: dict[object, Counter[int]] = defaultdict(Counter)
        self._arrived: dict[object, Counter[int]] = defaultdict(Counter)
        #: With backup workers: each worker's clock, and whose gradients are in each round.
        self._clocks: dict[object, Counter[int]] = defaultdict(Counter)
        self._rounds: dict[object, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))

    @property
    def rounds(self) -> bool:
        """True if every worker's gradient is needed in every round, to the end."""
        return self.rule.halts and not (self.rule.backup or self._changed)

    def feed(self, e: Event) -> None:
        """Take note of a worker's event: each worker's in their order."""
        what = _what(e)
        if e.state is State.STARTED:
            self._asked[what][e.rank] += 1
            if e.op is Op.REGISTER:
                self._register(e)
        elif e.state is State.FAILED and e.op in (Op.PUSH, Op.INIT):
            self._asked[what][e.rank] -= 1  # refused
        elif e.state is State.COMPLETED and e.op is Op.PUSH:
            self._arrived[what][e.rank] += 1
            clock = e.attributes.get("clock", 0)
            if clock > self._clocks[what][e.rank]:
                self._clocks[what][e.rank] = clock
                self._rounds[what][clock - 1].add(e.rank)

    def _register(self, e: Event) -> None:
        self._terms = e.attributes
        self.rule = rule_of(**{"mode": "", **e.attributes})
        self._changed |= self._asked[_what(e)][e.rank] > 1

    def died(self, worker: int) -> None:
        """Its process has ended: under ``dist_sync`` the others halt, if they said nothing else."""
        self._dead.add(worker)
        self._changed |= "on_crash" in self._terms or not self.rule.halts

    # -- questions --------------------------------------------------------------

    def done(self, worker: int, like: Event | Span) -> int:
        """The number of times that a worker has done what a request like this one waits for."""
        return self._asked[_awaits(like)][worker]

    def whom(self, request: Event | Span) -> Awaited:
        """Whom a request waits for that its server has not answered."""
        if "mode" not in self._terms or request.op not in (
            Op.REGISTER,
            Op.INIT,
            Op.PULL,
            Op.BARRIER,
        ):
            return Awaited()
        if request.op is Op.INIT:
            givers = [] if "optimizer" in request.attributes else [0]
            return self._fewer(request, givers, 1)
        asked = self.done(request.rank, request)
        if request.op is not Op.PULL:
            return self._fewer(request, self.workers, asked)
        if self._on_the_way(request, request.rank):
            return Awaited()  # a push of its own: until it is acknowledged, it may be refused
        if self.rule.backup and not self._changed:
            return self._in_round(request)
        return self._fewer(request, self.workers, self.rule.needs(asked))

    def _on_the_way(self, pull: Event | Span, worker: int) -> bool:
        place = _awaits(pull)
        return self._arrived[place][worker] < self._asked[place][worker]

    def _fewer(self, request: Event | Span, workers: Iterable[int], count: int) -> Awaited:
        """Those who have not asked the like as often."""
        if count <= 0:
            return Awaited()
        others = [w for w in workers if w != request.rank]
        if self._changed:
            alive = tuple(w for w in others if w not in self._dead)
            return Awaited(alive, count, certain=False)
        return Awaited(tuple(w for w in others if self.done(w, request) < count), count)

    def _in_round(self, pull: Event | Span) -> Awaited:
        """Those whose gradients are not in the present round, if the pull waits for it."""
        place, workers, rule = _awaits(pull), self.workers, self.rule
        mine, rounds = self._clocks[place][pull.rank], self._rounds[place]
        version = next(n for n in count() if not rule.complete(rounds.get(n, ()), workers))
        arrived = {*rounds.get(version, ()), *(w for w in workers if self._on_the_way(pull, w))}
        missing = rule.awaits(mine, version, arrived, workers, {})
        if not missing or rule.complete(arrived, workers):
            return Awaited()
        return Awaited(tuple(sorted(missing)), mine, rule.backup)


def concerns(e: Event | Span) -> bool:
    """True if something is of a request to servers or the scheduler of the run."""
    barrier = e.op is Op.BARRIER and e.match is not None
    return barrier or (e.op in REQUESTS and e.peer is not None)


def _what(it: Event | Span) -> object:
    """The parts of a request: one for the scheduler, one per key for servers."""
    if it.op in (Op.REGISTER, Op.BARRIER):
        return it.op
    return it.op, it.peer, it.attributes.get("key")


def _awaits(it: Event | Span) -> object:
    """The requests of others that must come before this is answered."""
    return (Op.PUSH, it.peer, it.attributes.get("key")) if it.op is Op.PULL else _what(it)


class Keys:
    """The keys of stores that are set so far, and the ranks at the barriers of stores.

    A store is shared by all who know its address; behind a prefix a key has another name. Two keys
    are taken for one when one of them ends with the other: so nobody is said to wait in vain who
    does not.
    """

    def __init__(self) -> None:
        self.set: dict[str, Event] = {}  # by whom first
        self._came: dict[object, set[int]] = defaultdict(set)  # to barriers

    def feed(self, e: Event) -> None:
        """A rank sets keys, or comes to a barrier."""
        if e.op is Op.STORE_SET:
            for key in _keys(e):
                self.set.setdefault(key, e)
        elif "ranks" in e.attributes:
            self._came[e.attributes].add(e.rank)

    def missing(self, it: Event | Span) -> list[str]:
        """The keys that a call waits for, and that no rank has set."""
        return [key for key in _keys(it) if not any(map(partial(_same, key), self.set))]

    def has(self, it: Event | Span) -> bool:
        """True if a call has what it waits for."""
        facts = it.attributes
        if "ranks" in facts:
            return len(self._came[facts]) >= int(facts["ranks"])
        return not self.missing(it)

    def came(self, it: Event | Span) -> set[int]:
        """The ranks that have come to a store's barrier."""
        return self._came[it.attributes] if "ranks" in it.attributes else set()

    def why(self, it: Event | Span) -> str:
        """The condition that a call waits for, in words."""
        if "ranks" in it.attributes:
            return f"{len(self.came(it))} have called it"
        return f"no rank has set {shown(self.missing(it))}"


def _keys(it: Event | Span) -> tuple[str, ...]:
    keys: tuple[str, ...] = it.attributes.get("keys", ())
    return keys


def _same(one: str, other: str) -> bool:
    return one == other or one.endswith(f"/{other}") or other.endswith(f"/{one}")


def similar(key: str, others: Iterable[str]) -> str:
    """The key that was perhaps meant; "" if none looks like it.

    One with the same numbers is meant rather than that of a neighbour.

    >>> similar("ready", ["redy", "done"])
    'redy'
    >>> similar("done_1", ["done_0", "doe1"])
    'doe1'
    """
    from difflib import get_close_matches

    known = [*others]
    alike = [other for other in known if re.findall(r"\d+", other) == re.findall(r"\d+", key)]
    found = get_close_matches(key, alike, 1) or get_close_matches(key, known, 1)
    return found[0] if found else ""
