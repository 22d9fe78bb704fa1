"""The state of each rank, such as running, paused, blocked (with the reason) or finished.

No side effects.

:class:`WaitForGraph` processes events as they arrive, and determines which ranks each blocked
rank waits for. It matches operations as :attr:`distkit.Trace.matches` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distkit._format import named
from distkit.diagnosis.rules import with_tensor
from distkit.events import (
    COLLECTIVES,
    COMPUTATION,
    P2P,
    STORES,
    WORLD,
    CallRecord,
    Event,
    Op,
    State,
    _StringEnum,
)
from distkit.trace.awaiting import Awaited, Keys, PendingRequests, is_server_request
from distkit.trace.calls import Channel, at, call, channel_of, keys, last_seen, never_match


class RankStatus(_StringEnum):
    """The status of a rank."""

    RUNNING = "running"
    PAUSED = "paused"  # before an operation, until the stepper resumes it
    BLOCKED = "blocked"  # in an operation, until other ranks join it
    FINISHED = "finished"
    FAILED = "failed"
    DIED = "died"  # its process has exited
    STOPPED = "stopped"  # because others failed, or after an interrupt


_ENDS = {
    "returned": RankStatus.FINISHED,
    "elsewhere": RankStatus.RUNNING,  # not in a call when the recording ends
    "released": RankStatus.STOPPED,
    "died": RankStatus.DIED,
}


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank.

    ``event`` is the latest event of the call before which the rank is paused, or in which it is
    blocked or has failed. ``waits_for`` contains the ranks that have not made the matching call.
    ``reason`` explains the wait.
    """

    rank: int
    status: RankStatus
    event: Event | None = None
    waits_for: tuple[int, ...] = ()
    reason: str = ""
    noun: str = "rank"

    @property
    def where(self) -> str:
        """The line of the call; "" for no call."""
        return self.event.where if self.event is not None else ""

    def call(self) -> str:
        """Return the call as text, such as ``recv(src=0, tag=7)``; "" for no call."""
        return call(self.event) if self.event is not None else ""

    def __str__(self) -> str:
        scheduled = self.event is not None and self.event.state is State.SCHEDULED
        position = f" {'before' if scheduled else 'in'} {self.call()}{at(self.where)}"
        return f"{self.noun} {self.rank}: {self.status}{position * (self.event is not None)}" + (
            f": {self.reason}" * bool(self.reason)
        )


class WaitForGraph:
    """The wait-for graph of a run's ranks, updated event by event.

    Args:
        world_size: number of ranks; higher numbers are servers and their scheduler.
        groups: the global ranks of each known group.
        noun: the noun for a rank in messages.

    >>> graph = WaitForGraph(2)
    >>> start = dict(rank=1, seq=0, op=Op.RECV, peer=0, where="In[5]:4")
    >>> graph.feed(Event(**start, state=s, time=0.0) for s in (State.STARTED, State.BLOCKED))
    >>> print(graph.rank_state(1))
    rank 1: blocked in recv(src=0) at In[5]:4: rank 0 has not sent
    """

    def __init__(
        self,
        world_size: int,
        groups: Mapping[str, Sequence[int]] | None = None,
        noun: str = "rank",
    ) -> None:
        self.noun = noun
        #: The ranks, without the nodes of a parameter server.
        self.ranks = range(world_size)
        #: The members of each known group.
        self.groups: dict[str, Sequence[int]] = {WORLD: self.ranks, **(groups or {})}
        self._ends: dict[int, tuple[RankStatus, str]] = {}
        self._failures: dict[int, Event] = {}  # the failed operation of each rank
        self._latest: dict[int, Event] = {}  # the latest event of each rank
        self._open: set[tuple[int, int]] = set()
        self._positions: dict[int, Event] = {}  # each rank's call, if it is paused or blocked
        #: The calls that each side of a channel has started, in order.
        self._calls: dict[Channel, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        #: The open receives from any source, by receiver and tag.
        self._any_source: dict[Channel, list[Event]] = defaultdict(list)
        #: The keys that the ranks have set in stores.
        self.keys = Keys()
        #: The ranks' pending requests to a parameter server.
        self.pending = PendingRequests(world_size)

    def end(self, rank: int, how: str, reason: str = "") -> None:
        """Record how a rank ended; ``how`` is as in :class:`distkit.trace.info.RankEnd`."""
        status = _ENDS.get(how, RankStatus.FAILED)
        self._ends[rank] = status, reason
        if how == "died":
            self.pending.worker_died(rank)

    def feed(self, events: Iterable[Event]) -> None:
        """Process events, which must be in order for each rank."""
        for e in events:
            if e.op in COMPUTATION or e.rank not in self.ranks:
                continue
            self._update_position(e)
            if e.state in (State.SCHEDULED, State.BLOCKED):
                continue
            if is_server_request(e):
                self.pending.feed(e)
            elif e.match is None:
                self._record_call(e)

    def _update_position(self, e: Event) -> None:
        """Update the position of the event's rank."""
        key = e.rank, e.seq
        if e.state is State.SCHEDULED:
            self._positions[e.rank] = e
        elif e.state is State.BLOCKED:
            position = self._positions.get(e.rank)
            paused = position is not None and position.state is State.SCHEDULED  # in a nested call
            if key in self._open and not paused and (e.match is None or is_server_request(e)):
                self._positions[e.rank] = e
        elif (current := self._positions.get(e.rank)) is not None and current.seq == e.seq:
            del self._positions[e.rank]
            if e.state is State.FAILED:
                self._failures[e.rank] = e
        if e.state is not State.FAILED:  # a failure does not show the rank's position
            self._latest[e.rank] = e
        if e.state is State.STARTED:
            self._open.add(key)
        elif e.state in (State.COMPLETED, State.FAILED):
            self._open.discard(key)  # a late BLOCKED event is then ignored

    def _record_call(self, e: Event) -> None:
        """Record a call that can match the calls of other ranks."""
        if e.op in STORES:
            self.keys.feed(e)
        elif e.op is Op.RECV and e.peer is None:
            _add(self._any_source[_any_source_channel(e)], e)
        elif e.op in COLLECTIVES or (e.op in P2P and e.peer is not None):
            if e.op is Op.RECV and self._any_source:  # its sender is now known
                receives = self._any_source[_any_source_channel(e)]
                receives[:] = [receive for receive in receives if receive.seq != e.seq]
            channel, side = channel_of(e.rank, e)
            _add(self._calls[channel][side], e)

    # -- queries ----------------------------------------------------------------

    @property
    def rank_states(self) -> list[RankState]:
        """The state of every rank."""
        return [self.rank_state(rank) for rank in self.ranks]

    def rank_state(self, rank: int) -> RankState:
        """Return the state of a rank."""
        return replace(self._state(rank), noun=self.noun)

    def _state(self, rank: int) -> RankState:
        e = self._positions.get(rank)
        if rank in self._ends:
            return self._ended_state(rank, *self._ends[rank])
        if e is None:
            return RankState(rank, RankStatus.RUNNING)
        if e.state is State.SCHEDULED:
            return RankState(rank, RankStatus.PAUSED, e)
        waits_for = self.missing(e)
        if not waits_for:
            return RankState(rank, RankStatus.RUNNING)  # all partners have arrived
        return RankState(rank, RankStatus.BLOCKED, e, waits_for, self._reason(e, waits_for))

    def _ended_state(self, rank: int, status: RankStatus, reason: str) -> RankState:
        """Return the state of a rank that has ended, with the call in which it failed, if any."""
        if status is RankStatus.DIED:
            position = last_seen(self._latest[rank]) if rank in self._latest else ""
            return RankState(rank, status, reason="; ".join(filter(None, [reason, position])))
        event = self._positions.get(rank) or self._failures.get(rank)
        return RankState(rank, status, None if status is RankStatus.FINISHED else event, (), reason)

    def wait(self, rank: int) -> Event | None:
        """Return the event of a rank's current wait, even if no other rank is missing."""
        e = self._positions.get(rank)
        return e if e is not None and e.state is State.BLOCKED and rank not in self._ends else None

    def stuck(self) -> list[int]:
        """Return the blocked ranks that cannot continue without a stuck or ended rank."""
        waits = {r: self.missing(e) for r in self._positions if (e := self.wait(r)) is not None}
        stuck = {rank for rank, missing in waits.items() if missing}
        while unblocked := {rank for rank in stuck if self._may_continue(rank, waits[rank], stuck)}:
            stuck -= unblocked
        return sorted(stuck)

    def _may_continue(self, rank: int, missing: tuple[int, ...], stuck: set[int]) -> bool:
        e, spare = self._positions[rank], 0
        if is_server_request(e):
            awaited = self.pending.awaited_by(e)
            spare = 0 if awaited.certain else len(missing)
        unavailable = [
            other in stuck or other in self._ends or self._called_other(e, other)
            for other in missing
        ]
        any_source = e.op is Op.STORE_WAIT or (e.op is Op.RECV and e.peer is None)
        return not (all(unavailable) if any_source else sum(unavailable) > spare)

    def missing(self, e: CallRecord) -> tuple[int, ...]:
        """Return the ranks that an operation waits for."""
        if is_server_request(e):
            return self.pending.awaited_by(e).workers
        if e.op is Op.STORE_WAIT:
            return self._possible_setters(e)
        if e.op in COLLECTIVES:
            return tuple(self._not_participating(e))
        if e.op is Op.RECV and e.peer is None:
            has_arrived = self._surplus_messages(e) > _nth(
                self._any_source[_any_source_channel(e)], e.seq
            )
            return () if has_arrived else tuple(r for r in self._members(e.group) if r != e.rank)
        if e.peer is None:  # the destination does not exist
            return ()
        return () if self._has_partner(e) else (e.peer,)

    def _possible_setters(self, e: CallRecord) -> tuple[int, ...]:
        """Return the ranks that could set a key.

        These are the ranks that are not in the same wait, or all other ranks if all are in it.
        """
        if not self.keys.missing(e):
            return ()
        others = [r for r in self.ranks if r != e.rank]
        same_wait = {
            r
            for r, position in self._positions.items()
            if (position.op, position.attributes) == (e.op, e.attributes)
        }
        return tuple(r for r in others if r not in same_wait) or tuple(others)

    def _has_partner(self, e: CallRecord) -> bool:
        """Return whether the other end of a point-to-point call has started."""
        channel, side = channel_of(e.rank, e)
        calls = self._calls[channel]
        has_call = len(calls[1 - side]) > _nth(calls[side], e.seq)
        return has_call or (e.op is Op.SEND and bool(self._any_source.get(_any_source_channel(e))))

    def _surplus_messages(self, e: CallRecord) -> int:
        """Return the number of messages that no earlier receive with a source has matched."""
        channels = (
            calls
            for channel, calls in self._calls.items()
            if channel._replace(src=None) == _any_source_channel(e)
        )
        return sum(max(0, len(calls[1]) - _nth(calls[0], e.seq)) for calls in channels)

    def _not_participating(self, e: CallRecord) -> Iterator[int]:
        """Yield the members of a group that do not participate in a collective."""
        calls = self._column(e)
        for other in self._members(e.group):
            if other != e.rank and (other not in calls or never_match(e, calls[other])):
                yield other

    def _called_other(self, e: CallRecord, other: int) -> bool:
        """Return whether another rank has already made its call at this position in the group."""
        return e.op in COLLECTIVES and e.match is None and other in self._column(e)

    def _column(self, e: CallRecord) -> dict[int, Event]:
        """Return the calls of all ranks at the position of a collective in its group."""
        calls = self._calls[Channel(e.group)]
        nth = _nth(calls[e.rank], e.seq)
        return {rank: row[nth] for rank, row in calls.items() if nth < len(row)}

    def _members(self, group: str) -> Sequence[int]:
        """Return the members of a group or, if they are unknown, the ranks that have used it."""
        return self.groups.get(group) or sorted(self._calls[Channel(group)])

    # -- reasons ----------------------------------------------------------------

    def _reason(self, e: Event, waits_for: tuple[int, ...]) -> str:
        if is_server_request(e):
            return self._server_reason(e, waits_for)
        if e.op is Op.RECV and e.peer is None:
            return "no rank has sent"
        if e.op is Op.STORE_WAIT:
            return f"no rank has set {keys(self.keys.missing(e))}"
        if len(waits_for) == 1:
            return f"{self.noun} {waits_for[0]} {self._why_missing(e, waits_for[0])}"
        return f"{named(waits_for, self.noun)} have not called it"

    def _why_missing(self, e: Event, other: int) -> str:
        """Describe the state of the only missing rank."""
        if (other_call := self._column(e).get(other) if e.op in COLLECTIVES else None) is not None:
            return f"called {with_tensor(other_call)}{at(other_call.where)} instead"
        return self._activity(other) or {
            Op.RECV: "has not sent",
            Op.SEND: "has not received",
        }.get(e.op, "has not called it")

    def _activity(self, rank: int) -> str:
        """Return a phrase if a rank has ended or is paused; "" otherwise."""
        if rank in self._ends:
            return f"has {self._ends[rank][0]}"
        e = self._positions.get(rank)
        return (
            f"is paused before {call(e)}{at(e.where)}"
            if e is not None and e.state is State.SCHEDULED
            else ""
        )

    def _server_reason(self, e: Event, waits_for: tuple[int, ...]) -> str:
        """Return a clause about the workers that a server waits for, and why they are missing."""
        server = "the scheduler"
        if e.peer is not None and e.op is not Op.REGISTER:
            server = f"server {e.peer - len(self.ranks)}"
        awaited = self.pending.awaited_by(e)
        if not awaited.certain:
            return f"{server} has not answered"
        if len(waits_for) > 1:
            return f"{server} waits for {named(waits_for, 'worker')}"
        (rank,) = waits_for
        activity = self._activity(rank) or self._missing_requests(e, rank, awaited)
        return f"{server} waits for worker {rank}, which {activity}"

    def _missing_requests(self, e: Event, rank: int, awaited: Awaited) -> str:
        count = self.pending.count(rank, e)
        if e.op is not Op.PULL:
            return "has not called it"
        if not count:
            return f"has not pushed {keys([e.attributes.get('key')])}"
        return f"has pushed {keys([e.attributes.get('key')])} {count} of {awaited.count} times"


def _any_source_channel(e: CallRecord) -> Channel:
    """Return the channel of messages from any source to one rank with one tag."""
    return Channel(e.group, None, e.peer if e.op is Op.SEND else e.rank, e.tag)


def _nth(calls: list[Event], seq: int) -> int:
    """Return the index of an operation among the calls on its side."""
    return bisect_left(calls, seq, key=lambda e: e.seq)


def _add(calls: list[Event], e: Event) -> None:
    """Insert a call in order of seq unless it is already present."""
    nth = _nth(calls, e.seq)
    if nth == len(calls) or calls[nth].seq != e.seq:
        calls.insert(nth, e)
