"""State of each rank: running, paused, blocked (and why), finished or failed. Pure.

:class:`WaitForGraph` is fed with events while they arrive and keeps just enough of them to tell
which blocked rank waits for which. What matches is as in :attr:`distkit.Trace.matches`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distkit._format import named
from distkit.events import (
    COLLECTIVES,
    COMPUTATION,
    NO_ATTRIBUTES,
    P2P,
    STORES,
    WORLD,
    Event,
    Op,
    Span,
    State,
    _StringEnum,
)
from distkit.trace.awaiting import Awaited, Awaiting, Keys, concerns
from distkit.trace.calls import Channel, at, call, channel_of, keys, never_meet, seen


class Doing(_StringEnum):
    """The activity of a rank."""

    RUNNING = "running"
    PAUSED = "paused"  # before an operation, until it is let go
    BLOCKED = "blocked"  # in an operation, until other ranks do their part
    FINISHED = "finished"
    FAILED = "failed"
    DIED = "died"  # its process has ended
    RELEASED = "released"  # let go because others failed, or it was interrupted


_ENDS = {
    "returned": Doing.FINISHED,
    "elsewhere": Doing.RUNNING,  # in no call, when the record ends
    "released": Doing.RELEASED,
    "died": Doing.DIED,
}


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank; the facts are those of the call it is paused before or blocked in.

    ``waits_for`` are the ranks that have not started their part of it, ``reason`` says why
    in words.
    """

    rank: int
    doing: Doing
    op: Op | None = None
    seq: int | None = None
    peer: int | None = None
    group: str = WORLD
    tag: int | None = None
    where: str = ""
    attributes: Mapping[str, Any] = NO_ATTRIBUTES
    nbytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    waits_for: tuple[int, ...] = ()
    reason: str = ""

    def call(self) -> str:
        """The operation as it was called, such as ``recv(src=0, tag=7)``; "" if there is none."""
        return call(self)

    def __str__(self) -> str:
        between = " before " if self.doing is Doing.PAUSED else " in "
        place = f"{between}{call(self)}{at(self.where)}" if self.op is not None else ""
        return f"rank {self.rank}: {self.doing}{place}" + (f": {self.reason}" * bool(self.reason))


class WaitForGraph:
    """The states of all ranks of a run, updated event by event.

    Args:
        world_size: number of ranks; those with higher numbers are servers and their scheduler.
        groups: the global ranks of each group, as far as they are known.

    >>> board = WaitForGraph(2)
    >>> start = dict(rank=1, seq=0, op=Op.RECV, peer=0, where="In[5]:4")
    >>> board.feed(Event(**start, state=s, time=0.0) for s in (State.STARTED, State.BLOCKED))
    >>> print(board.standing(1))
    rank 1: blocked in recv(src=0) at In[5]:4: rank 0 has not sent
    """

    def __init__(self, world_size: int, groups: Mapping[str, Sequence[int]] | None = None) -> None:
        #: The ranks, without the nodes of a parameter server.
        self.ranks = range(world_size)
        self._groups: dict[str, Sequence[int]] = {WORLD: self.ranks, **(groups or {})}
        self._ends: dict[int, tuple[Doing, str]] = {}
        self._last: dict[int, Event] = {}  # what a rank was in when that failed
        self._heard: dict[int, Event] = {}  # the latest of each rank
        self._vacant = set[int]()  # nobody has been heard of in their places yet
        self._again: dict[int, str] = {}  # who has not moved in a dead one's place; how that ended
        self._open: set[tuple[int, int]] = set()
        self._at: dict[int, Event] = {}  # what a rank is paused before or blocked in
        #: The calls that each side of a channel has started, by number.
        self._calls: dict[Channel, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        self._sent = Counter[Channel]()  # sends that are complete
        #: The open receives from any source, by receiver and tag.
        self._anyone: dict[Channel, list[Event]] = defaultdict(list)
        #: What the ranks have set in stores.
        self.keys = Keys()
        #: What the ranks have asked of a parameter server.
        self.awaiting = Awaiting(world_size)

    def group(self, name: str, members: Sequence[int]) -> None:
        """Make known who belongs to a group."""
        self._groups[name] = members

    def end(self, rank: int, how: str, why: str = "") -> None:
        """A rank has ended: it "returned", was "released", "died" or failed; and why."""
        doing = _ENDS.get(how, Doing.FAILED)
        self._ends[rank] = doing, why
        if how == "died":
            self.awaiting.died(rank)

    def replaced(self, rank: int, how: str) -> None:
        """A rank's process has ended so, and another is to begin anew in its place."""
        self._again[rank] = how
        self._vacant.add(rank)

    def feed(self, events: Iterable[Event]) -> None:
        """Take note of events: each rank's in their order, the ranks in any order."""
        for e in events:
            if e.op in COMPUTATION or e.rank not in self.ranks:
                continue
            self._move(e)
            if e.state in (State.SCHEDULED, State.BLOCKED):
                continue
            if concerns(e):
                self.awaiting.feed(e)
            elif e.match is None:
                self._start(e)

    def _move(self, e: Event) -> None:
        """Note where the rank stands."""
        key = e.rank, e.seq
        if e.state is State.SCHEDULED:
            self._at[e.rank] = e
        elif e.state is State.BLOCKED:
            at = self._at.get(e.rank)
            paused = at is not None and at.state is State.SCHEDULED  # in a call within this one
            if key in self._open and not paused and (e.match is None or concerns(e)):
                self._at[e.rank] = e
        elif (found := self._at.get(e.rank)) is not None and found.seq == e.seq:
            del self._at[e.rank]
            if e.state is State.FAILED:
                self._last[e.rank] = e
        if e.state is not State.FAILED:  # which says nothing of where it is
            self._heard[e.rank] = e
            self._vacant.discard(e.rank)
        if e.state is State.STARTED:
            self._open.add(key)
            if e.op is not Op.REGISTER:
                self._again.pop(e.rank, None)
        elif e.state in (State.COMPLETED, State.FAILED):
            self._open.discard(key)  # a late note that it blocks means nothing any more

    def _start(self, e: Event) -> None:
        """Note that a rank does its part of an operation."""
        if e.op in STORES:
            self.keys.feed(e)
        elif e.op is Op.RECV and e.peer is None:
            _add(self._anyone[_inbox(e)], e)
        elif e.op in COLLECTIVES or (e.op in P2P and e.peer is not None):
            if e.op is Op.RECV and self._anyone:
                _remove(self._anyone[_inbox(e)], e)  # now it is known who sent
            channel, side = channel_of(e.rank, e)
            _add(self._calls[channel][side], e)
            self._sent[channel] += e.op is Op.SEND and e.state is State.COMPLETED

    # -- questions --------------------------------------------------------------

    @property
    def standings(self) -> list[RankState]:
        """The state of every rank."""
        return [self.standing(rank) for rank in self.ranks]

    @property
    def settled(self) -> bool:
        """True if nothing will move by itself: no rank runs, and the blocked wait for others."""
        return all(self.standing(rank).doing is not Doing.RUNNING for rank in self.ranks)

    def standing(self, rank: int) -> RankState:
        """The state of a rank."""
        e = self._at.get(rank)
        if rank in self._ends:
            doing, why = self._ends[rank]
            if doing is Doing.DIED:
                return self._gone(rank, doing, why)
            last = e or self._last.get(rank)
            if last is None or doing is Doing.FINISHED:
                return RankState(rank, doing, reason=why)
            return _standing(last, doing, reason=why)
        if rank in self._vacant:
            why = f"its process died ({self._again[rank]}), and a new one replaces it"
            return self._gone(rank, Doing.RUNNING, why)
        how = self._again.get(rank)
        again = f"it replaces one that died ({how})" if how is not None else ""
        if e is None:
            return RankState(rank, Doing.RUNNING, reason=again)
        if e.state is State.SCHEDULED:
            return _standing(e, Doing.PAUSED, reason=again)
        waits_for = self._missing(e)
        if not waits_for:
            return RankState(rank, Doing.RUNNING)  # its partners have come: it is on its way
        return _standing(e, Doing.BLOCKED, waits_for, self._reason(e, waits_for))

    def _gone(self, rank: int, doing: Doing, why: str) -> RankState:
        """The last known line of a rank whose process has ended."""
        e = self._heard.get(rank)
        told = "; ".join(filter(None, [why, seen(e) if e else ""]))
        return RankState(rank, doing, where=e.where if e else "", reason=told)

    def stuck(self) -> list[int]:
        """The blocked ranks that can never go on: all that they wait for is stuck or has ended."""
        waits = {
            r: self._missing(e)
            for r, e in self._at.items()
            if e.state is State.BLOCKED and r not in self._ends
        }
        held = {rank for rank, missing in waits.items() if missing}
        while moving := {rank for rank in held if self._may_go_on(rank, waits[rank], held)}:
            held -= moving
        return sorted(held)

    def _may_go_on(self, rank: int, missing: tuple[int, ...], held: set[int]) -> bool:
        e, spare = self._at[rank], 0
        if concerns(e):
            awaited = self.awaiting.whom(e)
            spare = awaited.spare if awaited.certain else len(missing)
        lost = [
            other in held or other in self._ends or self._in_vain(e, other) for other in missing
        ]
        anyone = e.op is Op.STORE_WAIT or (e.op is Op.RECV and e.peer is None)
        return not (all(lost) if anyone else sum(lost) > spare)

    def _missing(self, e: Event | Span) -> tuple[int, ...]:
        """The ranks that have not started their part of an operation."""
        if concerns(e):
            return self.awaiting.whom(e).workers
        if e.op is Op.STORE_WAIT:
            return self._who_may_set(e)
        if e.op in COLLECTIVES:
            return tuple(self._absent(e))
        if e.op is Op.RECV and e.peer is None:
            come = self._unasked(e) > _nth(self._anyone[_inbox(e)], e.seq)
            return () if come else tuple(r for r in self._members(e.group) if r != e.rank)
        if e.peer is None:  # it sends to a rank that there is not
            return ()
        return () if self._has_met(e) else (e.peer,)

    def _who_may_set(self, e: Event | Span) -> tuple[int, ...]:
        """The ranks that could end a wait on a store, also those that do not wait for it."""
        if self.keys.has(e):
            return ()
        others = [r for r in self.ranks if r != e.rank]
        alike = {
            r for r, its in self._at.items() if (its.op, its.attributes) == (e.op, e.attributes)
        }
        return tuple(r for r in others if r not in alike) or tuple(others)

    def has_come(self, it: Event | Span) -> bool:
        """True if all that an operation waits for is there."""
        return not self._missing(it)

    def _has_met(self, e: Event | Span) -> bool:
        """True if the other end of a point-to-point call has been started."""
        channel, side = channel_of(e.rank, e)
        calls = self._calls[channel]
        met = len(calls[1 - side]) > _nth(calls[side], e.seq)
        return met or (e.op is Op.SEND and bool(self._anyone) and self._is_open(_inbox(e)))

    def _unasked(self, e: Event | Span) -> int:
        """Messages that receives before this one from any source have not asked for by name."""
        ways = (calls for way, calls in self._calls.items() if way._replace(src=None) == _inbox(e))
        return sum(max(0, len(calls[1]) - _nth(calls[0], e.seq)) for calls in ways)

    def _is_open(self, inbox: Channel) -> bool:
        """True if a receive from any source may still take a message: no completed send did."""
        left = len(self._anyone[inbox])
        if left:
            ways = [way for way in self._calls if way._replace(src=None) == inbox]
            left -= sum(max(0, self._sent[way] - len(self._calls[way][0])) for way in ways)
        return left > 0

    def _absent(self, e: Event | Span) -> Iterator[int]:
        """The members of a group that do not take part in a collective."""
        calls = self._turn(e)
        for other in self._members(e.group):
            if other != e.rank and (other not in calls or never_meet(e, calls[other])):
                yield other

    def _in_vain(self, e: Event | Span, other: int) -> bool:
        """True if another rank called something else where this collective was its turn."""
        return e.op in COLLECTIVES and e.match is None and other in self._turn(e)

    def _turn(self, e: Event | Span) -> dict[int, Event]:
        """The calls of the ranks that have come to their turn of a collective."""
        calls = self._calls[Channel(e.group)]
        nth = _nth(calls[e.rank], e.seq)
        return {rank: mine[nth] for rank, mine in calls.items() if nth < len(mine)}

    def _members(self, group: str) -> Sequence[int]:
        """The members of a group; until they are known, the ranks seen in it."""
        return self._groups.get(group) or sorted(self._calls[Channel(group)])

    # -- reasons ----------------------------------------------------------------

    def _reason(self, e: Event, waits_for: tuple[int, ...]) -> str:
        if concerns(e):
            return self._reason_of_server(e, waits_for)
        if e.op is Op.RECV and e.peer is None:
            return "nobody has sent"
        if e.op is Op.STORE_WAIT:
            return self.keys.why(e)
        if len(waits_for) == 1:
            return f"rank {waits_for[0]} {self._what_keeps(e, waits_for[0])}"
        missing = "have not received" if e.op is Op.SEND else "have not called it"
        return f"{named(waits_for)} {missing}"

    def _what_keeps(self, e: Event, other: int) -> str:
        """The reason why the only missing rank is missing."""
        if (instead := self._turn(e).get(other) if e.op in COLLECTIVES else None) is not None:
            size = f" of {instead.dtype}{list(instead.shape)}" if instead.dtype else ""
            return f"called {call(instead)}{size}{at(instead.where)} instead"
        return self._what_it_does(other) or {
            Op.RECV: "has not sent",
            Op.SEND: "has not received",
        }.get(e.op, "has not called it")

    def _what_it_does(self, rank: int) -> str:
        """That a rank has ended, or is paused; "" for neither."""
        if rank in self._ends:
            return f"has {self._ends[rank][0]}"
        its = self._at.get(rank)
        paused = its is not None and its.state is State.SCHEDULED
        return f"is paused before {call(its)}{at(its.where)}" if its is not None and paused else ""

    def _reason_of_server(self, e: Event, waits_for: tuple[int, ...]) -> str:
        """Whom the server waits for that does not answer, and what keeps them."""
        who = "the scheduler" if e.peer is None else f"server {e.peer - len(self.ranks)}"
        if e.op is Op.REGISTER:
            who = "the scheduler"
        awaited = self.awaiting.whom(e)
        if not awaited.certain:
            return f"{who} has not answered"
        if len(waits_for) > 1:
            some = f"{len(waits_for) - awaited.spare} of " * bool(awaited.spare)
            return f"{who} waits for {some}{named(waits_for).replace('rank', 'worker')}"
        (rank,) = waits_for
        does = self._what_it_does(rank) or self._short_of(e, rank, awaited)
        return f"{who} waits for worker {rank}, which {does}"

    def _short_of(self, e: Event, rank: int, awaited: Awaited) -> str:
        done = self.awaiting.done(rank, e)
        if e.op is not Op.PULL:
            return "has not called it"
        if not done:
            return f"has not pushed {keys([e.attributes.get('key')])}"
        return f"has pushed {keys([e.attributes.get('key')])} {done} of {awaited.count} times"


def _standing(
    e: Event, doing: Doing, waits_for: tuple[int, ...] = (), reason: str = ""
) -> RankState:
    return RankState(
        e.rank,
        doing,
        e.op,
        e.seq,
        e.peer,
        e.group,
        e.tag,
        e.where,
        e.attributes,
        e.nbytes,
        e.shape,
        e.dtype,
        waits_for,
        reason,
    )


def _inbox(e: Event | Span) -> Channel:
    """The messages with one tag to one rank, from any source."""
    return Channel(e.group, None, e.peer if e.op is Op.SEND else e.rank, e.tag)


def _nth(calls: list[Event], seq: int) -> int:
    """The index of an operation among those of its side."""
    if calls and calls[-1].seq < seq:
        return len(calls)  # nearly always
    return bisect_left(calls, seq, key=lambda e: e.seq)


def _add(calls: list[Event], e: Event) -> None:
    """Insert a call in the order of numbers, unless it is there."""
    nth = _nth(calls, e.seq)
    if nth == len(calls) or calls[nth].seq != e.seq:
        calls.insert(nth, e)


def _remove(calls: list[Event], e: Event) -> None:
    nth = _nth(calls, e.seq)
    if nth < len(calls) and calls[nth].seq == e.seq:
        del calls[nth]
