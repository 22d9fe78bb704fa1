"""The contributions in each rank's tensor, as far as a trace shows them. Pure.

Three sources are used: the semantics of collectives; runs whose messages equal the schedule of the
ring all-reduce, round by round; and values. A tensor with the values of a received one is the same
piece. Otherwise it may contain everything that its rank has received: then the content has a
*maybe*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from distkit.algorithms.rounds import ring_trip
from distkit.events import COLLECTIVES, P2P, REQUESTS, Message, Op, Span, Summary
from distkit.trace.log import EventLog, grouped

Key = tuple[int, int]
Values = tuple[float, ...]
#: Maximum number of ranks to follow, and of tensors to remember for each.
MAX_RANKS, MEMORY = 64, 16


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message of a ring, and its chunk in the schedule."""

    message: Message
    chunk: int
    reduce: bool
    values: Values


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce: its members, and the transfers of each round."""

    members: tuple[int, ...]
    rounds: list[list[Transfer]]


def find_rings(trace: EventLog) -> list[Ring]:
    """Return every ring all-reduce of a run, among the members of each group.

    The messages of a group form ring all-reduces if each member follows the schedule; if a
    chunk has the same size everywhere; if no member passes a chunk on before receiving it; and if
    in the all-gather each message has the values of the previous one, as far as values are
    recorded. Two members cannot be distinguished from ranks that exchange tensors.

    >>> find_rings(EventLog())
    []
    """
    groups = {"world": list(trace.ranks), **trace.info.groups}
    spans = {(s.rank, s.seq): s for s in trace.spans}
    found = []
    messages = [m for m in trace.messages if m.op is Op.SEND and m.send and m.recv]
    for group, some in grouped(messages, lambda m: m.group).items():
        lanes = grouped(sorted(some, key=lambda m: m.send or (0, 0)), lambda m: m.src)
        found += _rings([int(r) for r in groups.get(group, ())], lanes, spans)
    return found


def _rings(
    members: list[int], lanes: dict[int, list[Message]], spans: dict[Key, Span]
) -> list[Ring]:
    """Return the messages of a group as rings, or [] if they do not fit."""
    n, size = len(members), 2 * len(members) - 2
    lengths = {len(lane) for lane in lanes.values()}
    if n < 3 or lanes.keys() != set(members) or len(lengths) > 1 or min(lengths) % size:
        return []
    schedule = [*ring_trip(n, 0, reduce=True), *ring_trip(n, 1, reduce=False)]
    found = [Ring(tuple(members), []) for _ in range(min(lengths) // size)]
    for number, moves in enumerate(len(found) * schedule):
        row = [lanes[rank][number] for rank in members]
        if [m.dst for m in row] != [members[i] for i in moves.dst]:
            return []
        values = [_of(spans[m.send or (0, 0)].before) for m in row]
        facts = zip(row, moves.chunk.tolist(), values, strict=True)
        transfers = [Transfer(m, chunk, bool(moves.reduce), sent) for m, chunk, sent in facts]
        found[number // size].rounds.append(transfers)
    return found if all(map(_fits, found)) else []


def _fits(ring: Ring) -> bool:
    """Return True if these can be the transfers of a ring all-reduce."""
    last: dict[tuple[int, int], Transfer] = {}  # by receiver and chunk
    same: dict[bool, list[bool]] = {True: [], False: []}  # values as received; to be reduced or not
    transfers = [t for row in ring.rounds for t in row]
    for t in transfers:
        m, came = t.message, last.get((t.message.src, t.chunk))
        if m.sent is None or m.received is None or m.send is None:
            return False
        if came and came.message.recv and came.message.recv[1] > m.send[1]:
            return False  # passed on before it came
        if came and came.values and t.values:
            same[came.reduce].append(came.values == t.values)
        last[m.dst, t.chunk] = t
    sizes = {(t.chunk, t.message.nbytes) for t in transfers}
    adds = not (same[True] and all(same[True]))
    return len(sizes) == len(ring.members) and all(same[False]) and adds


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
    """A change of a rank's tensor at ``time``: to these pieces, or of piece ``at`` to pieces[0].

    It happens when the call ``by`` begins, or has ended if it is ``after`` it.
    """

    time: float
    by: Key
    after: bool
    pieces: tuple[Piece, ...]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Cargo:
    """The piece that a message carries, with its number and count if known.

    ``ring`` and ``round``: the numbers of its ring and round.
    """

    piece: Piece = Piece()
    at: int | None = None
    of: int = 1
    ring: int | None = None
    round: int = 0
    reduce: bool | None = None


@dataclass(slots=True)
class Contributions:
    """The result of :func:`follow`: changes in time order, and the cargo of each send."""

    changes: list[Change] = field(default_factory=list)
    cargo: dict[Key, Cargo] = field(default_factory=dict)
    rings: list[Ring] = field(default_factory=list)

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
    found = Contributions(rings=find_rings(trace))
    for i, ring in enumerate(found.rings):
        _apply_ring(i, ring, found)
    _Follower(trace, found).run()
    found.changes.sort(key=lambda c: c.time)
    return found


# -- the ring all-reduce -----------------------------------------------------------------


def _apply_ring(which: int, ring: Ring, found: Contributions) -> None:
    """Apply the schedule to the recorded values.

    A rank's own values are those with which it first passes a chunk on, less those that came.
    """
    n, first, came = len(ring.members), dict[Key, Values](), dict[Key, Values]()
    for t in (t for row in ring.rounds for t in row):
        first.setdefault((t.message.src, t.chunk), t.values)
        if t.reduce:
            came[t.message.dst, t.chunk] = t.values
    begin = min(t.message.sent or 0.0 for t in ring.rounds[0])
    have: dict[Key, Piece] = {}
    for t in ring.rounds[0]:
        rank = t.message.src
        for place in [(rank, chunk) for chunk in range(n)]:
            pairs = zip(first[place], came.get(place, ()), strict=False)
            values = tuple(a - b for a, b in pairs) if place in came else first[place]
            have[place] = Piece(frozenset({rank}), values=values)
        pieces = tuple(have[rank, chunk] for chunk in range(n))
        found.changes.append(Change(begin, t.message.send or (rank, 0), False, pieces))
    for number, row in enumerate(ring.rounds):
        for t in row:
            m, piece, old = t.message, have[t.message.src, t.chunk], have[t.message.dst, t.chunk]
            assert m.send is not None and m.recv is not None and m.received is not None
            found.cargo[m.send] = Cargo(piece, t.chunk, n, which, number, t.reduce)
            new = _added(old, piece, first[m.dst, t.chunk]) if t.reduce else piece
            have[m.dst, t.chunk] = new
            found.changes.append(Change(m.received, m.recv, True, (new,), t.chunk))


def _added(own: Piece, came: Piece, result: Values) -> Piece:
    """Return the sum of two pieces; if it equals the received piece, it is uncertain."""
    if result and result == came.values:
        doubt = own.sure | own.maybe | came.maybe
        return Piece(came.sure, doubt - came.sure, result)
    return Piece(own.sure | came.sure, own.maybe | came.maybe, result)


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
        """Yield all calls for messages but those of rings."""
        rings = [t.message for ring in self.found.rings for row in ring.rounds for t in row]
        done = {key for m in rings for key in (m.send, m.recv)}
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
        self.found.changes.append(Change(time, (s.rank, s.seq), after, pieces))

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
