"""Infers the contributions to each rank's tensor from a trace. No side effects.

The sources are the semantics of collectives, the schedules of all-reduces if messages follow one,
and recorded values. A tensor whose size and recorded values equal those of an earlier tensor on its
rank is treated as the same piece. Any other tensor that a rank sends may contain everything that
the rank has received; these contributions are called *possible*. Any other input of a collective
counts as its rank's own contribution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from distkit.algorithms.rounds import Round, ring_rounds
from distkit.events import COLLECTIVES, P2P, Message, Op, Span, Summary
from distkit.trace.log import EventLog, grouped

Key = tuple[int, int]
Values = tuple[float, ...]
#: Contributions are traced for at most MAX_RANKS ranks, and the last MAX_TENSORS tensors of each
#: rank are remembered.
MAX_RANKS, MAX_TENSORS = 64, 16


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message of an all-reduce, with its chunks in the schedule."""

    message: Message
    chunk: int
    count: int
    reduce: bool
    values: Values


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce made of messages, with its members, chunks, and the transfers of each round."""

    members: tuple[int, ...]
    chunks: int
    rounds: list[list[Transfer]]


def find_all_reduces(trace: EventLog) -> list[AllReduce]:
    """Return the all-reduces whose messages follow a schedule.

    Messages from a reference implementation or a simulation follow its schedule. Other messages in
    a group are a ring all-reduce if every member follows the ring's schedule, each chunk has the
    same size everywhere, and no member forwards a chunk before receiving it. If values are
    recorded, each forwarded message must equal the received one during the all-gather, and at least
    one must differ from it during the reduce-scatter. A ring is inferred only for three or more
    members: with two, it looks the same as an exchange of tensors.

    >>> find_all_reduces(EventLog())
    []
    """
    groups = {"world": list(trace.ranks), **trace.info.groups}
    spans = {(s.rank, s.seq): s for s in trace.spans}
    sends = [(m, spans[m.send]) for m in trace.messages if m.op is Op.SEND and m.send and m.recv]
    result = []
    for (group, name), messages in grouped(sends, lambda send: _origin(trace, *send)).items():
        members = tuple(int(r) for r in groups.get(group, ()))
        schedule, chunks, is_known = _schedule(name, len(members))
        if is_known or len(members) > 2:
            all_reduces = _match(members, schedule, chunks, messages)
            result += all_reduces if is_known or all(map(_fits_ring, all_reduces)) else []
    return result


def _origin(trace: EventLog, message: Message, send: Span) -> tuple[str, str]:
    """Return a message's group, and the algorithm that may have sent it, or "" if there is none."""
    file = Path(send.where.rpartition(":")[0])
    name = file.stem if file.parent.name == "all_reduce" else ""
    return message.group, trace.info.name if trace.info.simulated else name


def _schedule(name: str, n: int) -> tuple[list[Round], int, bool]:
    """Return an algorithm's rounds, its number of chunks, and whether its name is known.

    An unknown name yields the rounds of a ring. The catalog imports torch; if torch is missing,
    the ring is the only known algorithm.
    """
    if name and n > 1 and find_spec("torch"):
        from distkit.algorithms import ALL_REDUCES

        if name in ALL_REDUCES:
            return list(ALL_REDUCES[name].schedule(n)), ALL_REDUCES[name].chunks(n), True
    return (
        [*ring_rounds(n, 0, reduce=True), *ring_rounds(n, 1, reduce=False)],
        n,
        name == "ring" and n > 1,
    )


def _match(
    members: tuple[int, ...], schedule: list[Round], chunks: int, sends: list[tuple[Message, Span]]
) -> list[AllReduce]:
    """Return a group's messages as all-reduces, or [] if they do not follow the schedule."""
    ordered = sorted(sends, key=lambda send: send[1].seq, reverse=True)
    unmatched = grouped(ordered, lambda send: (send[0].src, send[0].dst))
    result = []
    while any(unmatched.values()):
        rounds = [list(_pop_round(members, round_, unmatched)) for round_ in schedule]
        transfers = [t for round_ in rounds for t in round_]
        sizes = {(t.chunk, t.count): t.message.nbytes for t in transfers}
        if sum(len(round_.src) for round_ in schedule) > len(transfers) or any(
            sizes[t.chunk, t.count] != t.message.nbytes for t in transfers
        ):
            return []
        result.append(AllReduce(members, chunks, rounds))
    return result


def _pop_round(
    members: tuple[int, ...],
    round_: Round,
    unmatched: dict[tuple[int, int], list[tuple[Message, Span]]],
) -> Iterator[Transfer]:
    """Pop the messages of a round, and yield those that were received."""
    columns = np.broadcast_arrays(round_.src, round_.dst, round_.chunk, round_.count, round_.reduce)
    for src, dst, chunk, count, reduce in zip(*(c.tolist() for c in columns), strict=True):
        if queue := unmatched.get((members[src], members[dst])):
            message, send = queue.pop()
            if message.received is not None:
                yield Transfer(message, chunk, count, reduce, _values_of(send.before))


def _fits_ring(all_reduce: AllReduce) -> bool:
    """Return whether these transfers may belong to a ring all-reduce."""
    last: dict[Key, Transfer] = {}  # by receiver and chunk
    # whether the values of reduced (True) and other messages were forwarded unchanged
    unchanged: dict[bool, list[bool]] = {True: [], False: []}
    for t in (t for round_ in all_reduce.rounds for t in round_):
        m, received = t.message, last.get((t.message.src, t.chunk))
        assert m.send is not None
        if received and received.message.recv and received.message.recv[1] > m.send[1]:
            return False  # forwarded before it arrived
        if received and received.values and t.values:
            unchanged[received.reduce].append(received.values == t.values)
        last[m.dst, t.chunk] = t
    return all(unchanged[False]) and not (unchanged[True] and all(unchanged[True]))


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a tensor, or the whole tensor, with its contributing ranks.

    The ranks in ``certain`` have contributed; those in ``possible`` may have contributed. Both are
    empty if unknown. The recorded ``values`` identify the piece in later operations of its rank.
    """

    certain: frozenset[int] = frozenset()
    possible: frozenset[int] = frozenset()
    values: Values = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the tensor of ``rank``, which replaces all pieces, or those starting at ``at``.

    The change happens when the call ``by`` begins, or when that call ends if ``after`` is True.
    """

    time: float
    rank: int
    by: Key | None
    after: bool
    pieces: tuple[Piece, ...]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """The piece that a message carries: ``count`` of ``total`` chunks, starting at ``at`` if known.

    ``all_reduce`` and ``round`` are the indices of its all-reduce and round.
    """

    piece: Piece = Piece()
    at: int | None = None
    count: int = 1
    total: int = 1
    all_reduce: int | None = None
    round: int = 0
    reduce: bool | None = None

    @property
    def chunks(self) -> str:
        """The numbers of the chunks, such as "2" or "2–3"; "" if unknown."""
        last = "" if self.at is None or self.count == 1 else f"–{self.at + self.count - 1}"
        return "" if self.at is None else f"{self.at}{last}"


@dataclass(slots=True)
class Contributions:
    """The changes in time order, the payload of each send, and the all-reduces of a run."""

    changes: list[Change] = field(default_factory=list)
    payload: dict[Key, Payload] = field(default_factory=dict)
    all_reduces: list[AllReduce] = field(default_factory=list)


def trace_contributions(trace: EventLog) -> Contributions:
    """Trace the contributions of every rank through a run.

    >>> trace_contributions(EventLog()).changes
    []
    """
    if len(trace.ranks) > MAX_RANKS:
        return Contributions()
    result = Contributions(all_reduces=find_all_reduces(trace))
    for i, all_reduce in enumerate(result.all_reduces):
        _apply(i, all_reduce, result)
    _Tracer(trace, result).run()
    result.changes.sort(key=lambda c: c.time)
    return result


# -- all-reduces with a known schedule --------------------------------------------------------


def _apply(index: int, all_reduce: AllReduce, result: Contributions) -> None:
    """Add the changes and payload of an all-reduce to the result."""
    chunks = range(all_reduce.chunks)
    held = {(rank, c): Piece(frozenset({rank})) for rank in all_reduce.members for c in chunks}
    first = min((t.message for t in all_reduce.rounds[0]), key=lambda m: m.sent or 0.0)
    for rank in all_reduce.members:
        pieces = tuple(held[rank, c] for c in chunks)
        result.changes.append(Change(first.sent or 0.0, rank, first.send, False, pieces))
    for number, round_ in enumerate(all_reduce.rounds):
        previous = dict(held)
        for t in sorted(round_, key=lambda t: t.message.received or 0.0):
            m, moved = t.message, range(t.chunk, t.chunk + t.count)
            assert m.send is not None and m.recv is not None and m.received is not None
            piece = previous[m.src, t.chunk]
            result.payload[m.send] = Payload(
                piece, t.chunk, t.count, all_reduce.chunks, index, number, t.reduce
            )
            for c in moved:
                incoming = previous[m.src, c]
                added = Piece(held[m.dst, c].certain | incoming.certain)
                held[m.dst, c] = added if t.reduce else incoming
            pieces = tuple(held[m.dst, c] for c in moved)
            result.changes.append(Change(m.received, m.dst, m.recv, True, pieces, t.chunk))


# -- everything else ------------------------------------------------------------------------


class _Tracer:
    """Processes operations in time order and remembers the tensors of each rank."""

    def __init__(self, trace: EventLog, result: Contributions) -> None:
        self.trace, self.result = trace, result
        self.known: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
        self.received: dict[int, frozenset[int]] = defaultdict(frozenset)
        self.sent: dict[str, Piece] = {}

    def run(self) -> None:
        collectives = (
            (max(s.start for s in members), members) for members in self.trace.collectives
        )
        for time, spans in sorted([*self._messages(), *collectives], key=lambda item: item[0]):
            if spans[0].op in COLLECTIVES:
                self._collective(spans)
            else:
                self._point_to_point(spans[0], time)

    def _messages(self) -> Iterator[tuple[float, list[Span]]]:
        """Yield the sends and receives outside known all-reduces, except server requests."""
        known = {
            key
            for all_reduce in self.result.all_reduces
            for round_ in all_reduce.rounds
            for t in round_
            for key in (t.message.send, t.message.recv)
        }
        for s in self.trace.spans:
            time = s.end if s.op is Op.RECV else s.start
            unknown = s.op in P2P and s.match is None and (s.rank, s.seq) not in known
            if unknown and time is not None:
                yield time, [s]

    def _point_to_point(self, s: Span, time: float) -> None:
        match = self.trace.matches.get((s.rank, s.seq))
        if s.op is Op.SEND:
            piece = self._tensor_of(s)
            self.result.payload[s.rank, s.seq] = Payload(piece)
            if match:
                self.sent[match] = piece
        elif match in self.sent:
            piece = self.sent[match]
            self.received[s.rank] |= piece.certain | piece.possible
        else:
            return
        self._remember(s, piece)
        self._add_change(time, s, piece, after=s.op is not Op.SEND)

    def _tensor_of(self, s: Span) -> Piece:
        """Return a tensor: a known piece, its rank's own, or one with possible contributions."""
        values, own = _values_of(s.before), frozenset({s.rank})
        for size, piece in reversed(self.known[s.rank]):
            # zeros could match any tensor
            if any(values) and size == s.nbytes and piece.values == values:
                return piece
        if s.op in COLLECTIVES or not self.received[s.rank]:
            return Piece(own, values=values)
        # it may be a part of what the rank has received, so its size is not compared
        return Piece(possible=own | self.received[s.rank], values=values)

    def _remember(self, s: Span, piece: Piece) -> None:
        self.known[s.rank] = [*self.known[s.rank], (s.nbytes, piece)][-MAX_TENSORS:]

    def _add_change(self, time: float, s: Span, *pieces: Piece, after: bool = False) -> None:
        self.result.changes.append(Change(time, s.rank, (s.rank, s.seq), after, pieces))

    def _collective(self, members: list[Span]) -> None:
        """Apply the semantics of a collective; a known tensor keeps its contributions."""
        if members[0].op in (Op.BARRIER, Op.NEW_GROUP) or len({s.op for s in members}) > 1:
            return
        members = sorted(members, key=lambda s: s.rank)
        own: Initial = {s.rank: self._tensor_of(s) for s in members}
        outcomes = _SEMANTICS[members[0].op](members, own)
        for s, (before, after) in zip(members, outcomes, strict=True):
            self._add_change(s.start, s, *before)
            if s.end is not None:
                self._add_change(s.end, s, *after, after=True)
                if len(after) == 1:
                    self._remember(s, after[0])


#: The pieces of each member before and after a collective.
Outcome = list[tuple[tuple[Piece, ...], tuple[Piece, ...]]]
Initial = Mapping[int | None, Piece]


def _values_of(summary: Summary | None) -> Values:
    return summary.values if summary else ()


def _union(pieces: Iterable[Piece], values: Values = ()) -> Piece:
    parts = list(pieces)
    certain = frozenset().union(*(p.certain for p in parts))
    return Piece(certain, frozenset().union(*(p.possible for p in parts)) - certain, values)


def _reduce(members: list[Span], own: Initial) -> Outcome:
    reduces = [s.op is Op.ALL_REDUCE or s.rank == s.peer for s in members]
    return [
        ((own[s.rank],), (_union(own.values(), _values_of(s.after)) if sums else own[s.rank],))
        for s, sums in zip(members, reduces, strict=True)
    ]


def _broadcast(members: list[Span], own: Initial) -> Outcome:
    root = own.get(members[0].peer, Piece())
    return [
        ((own[s.rank],), (Piece(root.certain, root.possible, _values_of(s.after)),))
        for s in members
    ]


def _all_gather(members: list[Span], own: Initial) -> Outcome:
    full = tuple(own[s.rank] for s in members)
    initial = [tuple(own[t.rank] if t is s else Piece() for t in members) for s in members]
    gathers = members[0].op is Op.ALL_GATHER
    return [
        (before, full if gathers or s.rank == s.peer else before)
        for before, s in zip(initial, members, strict=True)
    ]


def _reduce_scatter(members: list[Span], own: Initial) -> Outcome:
    initial = [
        tuple(Piece(own[s.rank].certain, own[s.rank].possible) for _ in members) for s in members
    ]
    reduced = [_union(own.values(), _values_of(s.after)) for s in members]
    return [
        (before, (*before[:i], reduced[i], *before[i + 1 :])) for i, before in enumerate(initial)
    ]


def _all_to_all(members: list[Span], own: Initial) -> Outcome:
    parts = [Piece(own[s.rank].certain, own[s.rank].possible) for s in members]
    return [((parts[i],) * len(members), tuple(parts)) for i in range(len(members))]


def _scatter(members: list[Span], own: Initial) -> Outcome:
    root = own.get(members[0].peer, Piece())
    part, n = Piece(root.certain, root.possible), len(members)
    return [
        (
            (part,) * n if s.rank == s.peer else (Piece(),) * n,
            tuple(part if t is s or s.rank == s.peer else Piece() for t in members),
        )
        for s in members
    ]


_SEMANTICS = {
    Op.ALL_REDUCE: _reduce,
    Op.REDUCE: _reduce,
    Op.BROADCAST: _broadcast,
    Op.ALL_GATHER: _all_gather,
    Op.GATHER: _all_gather,
    Op.REDUCE_SCATTER: _reduce_scatter,
    Op.ALL_TO_ALL: _all_to_all,
    Op.SCATTER: _scatter,
}
