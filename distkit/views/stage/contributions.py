"""The contributions in each rank's tensor, as far as a trace shows them. Pure.

Three sources are used: the semantics of collectives; the schedules of all-reduces, for messages
that follow one; and values. A tensor with the values of a received one is the same
piece. Otherwise it may contain everything that its rank has received: then the content has a
*maybe*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from distkit.algorithms.rounds import Round, ring_trip
from distkit.events import COLLECTIVES, P2P, REQUESTS, Message, Op, Span, Summary
from distkit.trace.log import EventLog, grouped

Key = tuple[int, int]
Values = tuple[float, ...]
#: Maximum number of ranks to follow, and of tensors to remember for each.
MAX_RANKS, MEMORY = 64, 16


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message of an all-reduce, and its chunks in the schedule."""

    message: Message
    chunk: int
    count: int
    reduce: bool
    values: Values


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce made of messages: its members and chunks, and the transfers of each round."""

    members: tuple[int, ...]
    chunks: int
    rounds: list[list[Transfer]]


def find_all_reduces(trace: EventLog) -> list[AllReduce]:
    """Return every all-reduce whose messages follow a schedule, among the members of each group.

    Messages of a reference implementation, or of a simulation, follow its schedule. The others of a
    group are a ring all-reduce if each member sends what the schedule says; if a chunk has the same
    size everywhere; if no member passes a chunk on before receiving it; and if in the all-gather
    each message has the values of the previous one, as far as values are recorded. Two members
    cannot be distinguished from ranks that exchange tensors.

    >>> find_all_reduces(EventLog())
    []
    """
    groups = {"world": list(trace.ranks), **trace.info.groups}
    spans = {(s.rank, s.seq): s for s in trace.spans}
    sends = [(m, spans[m.send]) for m in trace.messages if m.op is Op.SEND and m.send and m.recv]
    found = []
    for (group, name), some in grouped(sends, lambda send: _origin(trace, *send)).items():
        members = tuple(int(r) for r in groups.get(group, ()))
        schedule, chunks = _schedule(name, len(members))
        all_reduces = _match(members, schedule, chunks, some)
        if name or (len(members) > 2 and all(map(_fits_ring, all_reduces))):
            found += all_reduces
    return found


def _origin(trace: EventLog, message: Message, send: Span) -> tuple[str, str]:
    """Return the group of a message, and the algorithm of distkit that sends it; "" for others."""
    file = Path(send.where.rpartition(":")[0])
    name = file.stem if file.parent.name == "all_reduce" else ""
    return message.group, trace.info.name if trace.info.simulated else name


def _schedule(name: str, n: int) -> tuple[list[Round], int]:
    """Return the rounds and the number of chunks of an algorithm, by default those of a ring.

    The catalogue imports torch; without torch only the ring is known.
    """
    if name and find_spec("torch"):
        from distkit.algorithms import ALL_REDUCES

        if name in ALL_REDUCES:
            return list(ALL_REDUCES[name].schedule(n)), ALL_REDUCES[name].chunks(n)
    return [*ring_trip(n, 0, reduce=True), *ring_trip(n, 1, reduce=False)], n


def _match(
    members: tuple[int, ...], schedule: list[Round], chunks: int, sends: list[tuple[Message, Span]]
) -> list[AllReduce]:
    """Return the messages of a group as all-reduces, or [] if they do not follow the schedule."""
    ordered = sorted(sends, key=lambda send: send[1].seq, reverse=True)
    waiting = grouped(ordered, lambda send: (send[0].src, send[0].dst))
    found = []
    while any(waiting.values()):
        rounds = [list(_take(members, moves, waiting)) for moves in schedule]
        transfers = [t for row in rounds for t in row]
        sizes = {(t.chunk, t.count): t.message.nbytes for t in transfers}
        if sum(len(moves.src) for moves in schedule) > len(transfers) or any(
            sizes[t.chunk, t.count] != t.message.nbytes for t in transfers
        ):
            return []
        found.append(AllReduce(members, chunks, rounds))
    return found


def _take(
    members: tuple[int, ...],
    moves: Round,
    waiting: dict[tuple[int, int], list[tuple[Message, Span]]],
) -> Iterator[Transfer]:
    """Take the messages of a round; fewer if they are missing or incomplete."""
    columns = np.broadcast_arrays(moves.src, moves.dst, moves.chunk, moves.count, moves.reduce)
    for src, dst, chunk, count, reduce in zip(*(c.tolist() for c in columns), strict=True):
        if some := waiting.get((members[src], members[dst])):
            message, send = some.pop()
            if message.received is not None:
                yield Transfer(message, chunk, count, reduce, _of(send.before))


def _fits_ring(found: AllReduce) -> bool:
    """Return whether these can be the transfers of a ring all-reduce."""
    last: dict[Key, Transfer] = {}  # by receiver and chunk
    same: dict[bool, list[bool]] = {True: [], False: []}  # values as received; to be reduced or not
    for t in (t for row in found.rounds for t in row):
        m, came = t.message, last.get((t.message.src, t.chunk))
        assert m.send is not None
        if came and came.message.recv and came.message.recv[1] > m.send[1]:
            return False  # passed on before it came
        if came and came.values and t.values:
            same[came.reduce].append(came.values == t.values)
        last[m.dst, t.chunk] = t
    adds = not (same[True] and all(same[True]))
    return all(same[False]) and adds


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a tensor, or all of it: the ranks whose contributions it holds, its values.

    ``sure`` are in it; ``maybe`` may be. If both are empty, nothing is known.
    """

    sure: frozenset[int] = frozenset()
    maybe: frozenset[int] = frozenset()
    values: Values = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the tensor of ``rank``: to these pieces, or of those from ``at`` on.

    It happens when the call ``by`` begins, or has ended if it is ``after`` it.
    """

    time: float
    rank: int
    by: Key | None
    after: bool
    pieces: tuple[Piece, ...]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Cargo:
    """The piece that a message carries: ``count`` chunks from ``at`` on, if known.

    ``all_reduce`` and ``round``: the numbers of its all-reduce and round.
    """

    piece: Piece = Piece()
    at: int | None = None
    count: int = 1
    of: int = 1
    all_reduce: int | None = None
    round: int = 0
    reduce: bool | None = None

    @property
    def chunks(self) -> str:
        """The chunks' numbers, such as "2" or "2–3"; "" if unknown."""
        last = "" if self.at is None or self.count == 1 else f"–{self.at + self.count - 1}"
        return "" if self.at is None else f"{self.at}{last}"


@dataclass(slots=True)
class Contributions:
    """The result of :func:`follow`: changes in time order, and the cargo of each send."""

    changes: list[Change] = field(default_factory=list)
    cargo: dict[Key, Cargo] = field(default_factory=dict)
    all_reduces: list[AllReduce] = field(default_factory=list)

    @property
    def known(self) -> bool:
        """True if any contribution is known."""
        return any(p.sure or p.maybe for c in self.changes for p in c.pieces)

    @property
    def doubtful(self) -> bool:
        """True if some contents are uncertain."""
        return any(p.maybe for c in self.changes for p in c.pieces)


def follow(trace: EventLog) -> Contributions:
    """Follow the contributions of every rank through a run.

    >>> found = follow(EventLog())
    >>> found.changes, found.known
    ([], False)
    """
    if len(trace.ranks) > MAX_RANKS:
        return Contributions()
    found = Contributions(all_reduces=find_all_reduces(trace))
    for i, all_reduce in enumerate(found.all_reduces):
        _apply(i, all_reduce, found)
    _Follower(trace, found).run()
    found.changes.sort(key=lambda c: c.time)
    return found


# -- all-reduces with a known schedule --------------------------------------------------------


def _apply(which: int, found: AllReduce, result: Contributions) -> None:
    """Apply the schedule to the recorded values."""
    sent = _sent_values(found)
    have = {
        (rank, chunk): Piece(frozenset({rank}), values=_own(sent, found, (rank, chunk)))
        for rank in found.members
        for chunk in range(found.chunks)
    }
    first = min((t.message for t in found.rounds[0]), key=lambda m: m.sent or 0.0)
    for rank in found.members:
        pieces = tuple(have[rank, chunk] for chunk in range(found.chunks))
        result.changes.append(Change(first.sent or 0.0, rank, first.send, False, pieces))
    for number, row in enumerate(found.rounds):
        before = dict(have)
        for t in sorted(row, key=lambda t: t.message.received or 0.0):
            m, chunks = t.message, range(t.chunk, t.chunk + t.count)
            assert m.send is not None and m.recv is not None and m.received is not None
            piece = before[m.src, t.chunk]
            result.cargo[m.send] = Cargo(
                piece, t.chunk, t.count, found.chunks, which, number, t.reduce
            )
            for chunk in chunks:
                came, own = before[m.src, chunk], have[m.dst, chunk]
                values = next((v for when, v in sent[m.dst, chunk] if when > number), ())
                have[m.dst, chunk] = (
                    Piece(own.sure | came.sure, values=values) if t.reduce else came
                )
            pieces = tuple(have[m.dst, chunk] for chunk in chunks)
            result.changes.append(Change(m.received, m.dst, m.recv, True, pieces, t.chunk))


def _sent_values(found: AllReduce) -> dict[Key, list[tuple[int, Values]]]:
    """Return round and values of each message of a single chunk, by sender and chunk."""
    sent: dict[Key, list[tuple[int, Values]]] = defaultdict(list)
    for number, row in enumerate(found.rounds):
        for t in row:
            if t.count == 1:
                sent[t.message.src, t.chunk].append((number, t.values))
    return sent


def _own(sent: Mapping[Key, list[tuple[int, Values]]], found: AllReduce, place: Key) -> Values:
    """Return a rank's own values of a chunk: those first sent, less those received before."""
    if not sent[place]:
        return ()
    first, values = sent[place][0]
    for row in found.rounds[:first]:
        for t in row:
            if (t.message.dst, t.chunk) == place:
                values = tuple(a - b for a, b in zip(values, t.values, strict=False))
    return values


# -- everything else ------------------------------------------------------------------------


class _Follower:
    """Processes operations in the order of time, and remembers the tensors of each rank."""

    def __init__(self, trace: EventLog, found: Contributions) -> None:
        self.trace, self.found = trace, found
        self.known: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
        self.received: dict[int, frozenset[int]] = defaultdict(frozenset)
        self.sent: dict[str, Piece] = {}

    def run(self) -> None:
        met = ((max(s.start for s in members), members) for members in self.trace.collectives)
        for time, spans in sorted([*self._messages(), *met], key=lambda act: act[0]):
            if spans[0].op in COLLECTIVES:
                self._collective(spans)
            else:
                self._point_to_point(spans[0], time)

    def _messages(self) -> Iterator[tuple[float, list[Span]]]:
        """Yield all calls for messages but those of known all-reduces."""
        rows = [row for found in self.found.all_reduces for row in found.rounds]
        done = {key for row in rows for t in row for key in (t.message.send, t.message.recv)}
        for s in self.trace.spans:
            time = s.end if s.op is Op.RECV else s.start
            if s.op in P2P | REQUESTS and (s.rank, s.seq) not in done and time is not None:
                yield time, [s]

    def _point_to_point(self, s: Span, time: float) -> None:
        match = self.trace.matches.get((s.rank, s.seq))
        if s.op in REQUESTS or s.match is not None:
            summary = s.after if s.op is Op.PULL else s.before or s.after
            if summary:  # only values are known of a server's tensor
                self._show(s.end or time, s, Piece(values=summary.values), after=s.end is not None)
        elif s.op is Op.SEND:
            piece = self._held(s)
            self.found.cargo[s.rank, s.seq] = Cargo(piece)
            if match:
                self.sent[match] = piece
            self._learn(s, piece)
            self._show(time, s, piece)
        elif match in self.sent:
            piece = self.sent[match]
            self.received[s.rank] |= piece.sure | piece.maybe
            self._learn(s, piece)
            self._show(time, s, piece, after=True)

    def _held(self, s: Span) -> Piece:
        """Return the tensor of a call: a known one, the rank's, or an uncertain one."""
        values, own = _of(s.before), frozenset({s.rank})
        for size, piece in reversed(self.known[s.rank]):
            if any(values) and size == s.nbytes and piece.values == values:  # zeros match nothing
                return piece
        if s.op in COLLECTIVES or not self.received[s.rank]:
            return Piece(own, values=values)
        return Piece(maybe=own | self.received[s.rank], values=values)  # a part, of any size

    def _learn(self, s: Span, piece: Piece) -> None:
        self.known[s.rank] = [*self.known[s.rank], (s.nbytes, piece)][-MEMORY:]

    def _show(self, time: float, s: Span, *pieces: Piece, after: bool = False) -> None:
        self.found.changes.append(Change(time, s.rank, (s.rank, s.seq), after, pieces))

    def _collective(self, members: list[Span]) -> None:
        """Apply the semantics of a collective; known values continue a known piece."""
        if members[0].op in (Op.BARRIER, Op.NEW_GROUP) or len({s.op for s in members}) > 1:
            return
        members = sorted(members, key=lambda s: s.rank)
        own: Initial = {s.rank: self._held(s) for s in members}
        outcomes = _SEMANTICS[members[0].op](members, own)
        for s, (before, after) in zip(members, outcomes, strict=True):
            self._show(s.start, s, *before)
            if s.end is not None:
                self._show(s.end, s, *after, after=True)
                if len(after) == 1:
                    self._learn(s, after[0])


#: The pieces of each member before and after.
Outcome = list[tuple[tuple[Piece, ...], tuple[Piece, ...]]]
Initial = Mapping[int | None, Piece]


def _of(summary: Summary | None) -> Values:
    return summary.values if summary else ()


def _union(pieces: Iterable[Piece], values: Values = ()) -> Piece:
    parts = list(pieces)
    sure = frozenset().union(*(p.sure for p in parts))
    return Piece(sure, frozenset().union(*(p.maybe for p in parts)) - sure, values)


def _all_reduce(members: list[Span], own: Initial) -> Outcome:
    return [((own[s.rank],), (_union(own.values(), _of(s.after)),)) for s in members]


def _reduce(members: list[Span], own: Initial) -> Outcome:
    return [
        ((own[s.rank],), (_union(own.values(), _of(s.after)) if s.rank == s.peer else own[s.rank],))
        for s in members
    ]


def _broadcast(members: list[Span], own: Initial) -> Outcome:
    root = own.get(members[0].peer, Piece())
    return [((own[s.rank],), (Piece(root.sure, root.maybe, _of(s.after)),)) for s in members]


def _all_gather(members: list[Span], own: Initial) -> Outcome:
    full = tuple(own[s.rank] for s in members)
    alone = [tuple(own[t.rank] if t is s else Piece() for t in members) for s in members]
    gathers = members[0].op is Op.ALL_GATHER
    return [
        (before, full if gathers or s.rank == s.peer else before)
        for before, s in zip(alone, members, strict=True)
    ]


def _reduce_scatter(members: list[Span], own: Initial) -> Outcome:
    mine = [tuple(Piece(own[s.rank].sure, own[s.rank].maybe) for _ in members) for s in members]
    whole = [_union(own.values(), _of(s.after)) for s in members]
    return [(before, (*before[:i], whole[i], *before[i + 1 :])) for i, before in enumerate(mine)]


def _all_to_all(members: list[Span], own: Initial) -> Outcome:
    every = [Piece(own[s.rank].sure, own[s.rank].maybe) for s in members]
    return [((every[i],) * len(members), tuple(every)) for i in range(len(members))]


def _scatter(members: list[Span], own: Initial) -> Outcome:
    root = own.get(members[0].peer, Piece())
    part, n = Piece(root.sure, root.maybe), len(members)
    return [
        (
            (part,) * n if s.rank == s.peer else (Piece(),) * n,
            tuple(part if t is s or s.rank == s.peer else Piece() for t in members),
        )
        for s in members
    ]


_SEMANTICS = {
    Op.ALL_REDUCE: _all_reduce,
    Op.REDUCE: _reduce,
    Op.BROADCAST: _broadcast,
    Op.ALL_GATHER: _all_gather,
    Op.GATHER: _all_gather,
    Op.REDUCE_SCATTER: _reduce_scatter,
    Op.ALL_TO_ALL: _all_to_all,
    Op.SCATTER: _scatter,
}
