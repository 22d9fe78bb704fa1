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

from distkit.events import COLLECTIVES, P2P, REQUESTS, Message, Op, Span, Summary
from distkit.trace.log import EventLog

Key = tuple[int, int]
Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message of a ring, and its chunk in the schedule. Times in seconds."""

    src: int
    dst: int
    chunk: int
    reduce: bool
    send: Key
    recv: Key
    sent: float
    received: float
    values: Values
    nbytes: int


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce: ``rounds[s][i]`` is the transfer of the i-th member in round s."""

    members: tuple[int, ...]
    rounds: tuple[tuple[Transfer, ...], ...]

    @property
    def begin(self) -> float:
        """The time when the first chunk is sent [s]."""
        return min(t.sent for t in self.rounds[0])

    def own(self, i: int, chunk: int) -> Values:
        """The initial values of the i-th member: what it sent minus what it had received."""
        n = len(self.members)
        sends = (i - chunk) % n  # the round in which it passes the chunk on, reduced
        sent = self.rounds[sends][i].values
        if sends == 0:
            return sent
        got = self.rounds[sends - 1][(i - 1) % n].values
        return tuple(a - b for a, b in zip(sent, got, strict=True)) if sent and got else ()

    def passed_on(self, number: int, i: int) -> Values | None:
        """The values with which the i-th transfer of a round is passed on; None if not recorded."""
        if number + 1 == len(self.rounds):
            return None
        return self.rounds[number + 1][(i + 1) % len(self.members)].values or None


def find_rings(trace: EventLog) -> list[Ring]:
    """Every ring all-reduce of a run, among the members of each group.

    The messages of a group form ring all-reduces if each member sends only to its right neighbour,
    2(n-1) messages each; if a chunk has the same size everywhere; if no member passes a chunk on
    before receiving it; and if in the all-gather each message has the values of the previous one,
    as far as values are recorded. Two members cannot be distinguished from ranks that exchange
    tensors.

    >>> find_rings(EventLog())
    []
    """
    groups = {"world": list(trace.ranks), **trace.info.groups}
    spans = {(s.rank, s.seq): s for s in trace.spans}
    by_group: dict[str, list[Message]] = defaultdict(list)
    for m in trace.messages:
        if str(m.op) == "send":
            by_group[m.group].append(m)
    found = []
    for group, messages in by_group.items():
        found += _rings([int(r) for r in groups.get(group, ())], messages, spans)
    return found


def _rings(members: list[int], messages: list[Message], spans: dict[Key, Span]) -> list[Ring]:
    """The messages of a group as rings, or [] if they do not fit."""
    n, links = len(members), defaultdict(list)
    for m in messages:
        links[m.src, m.dst].append(m)
    right = {(rank, members[(i + 1) % n]) for i, rank in enumerate(members)}
    length = {len(found) for found in links.values()}
    if n < 3 or links.keys() != right or len(length) > 1 or length.pop() % (2 * n - 2):
        return []
    lanes = [
        sorted(links[rank, members[(i + 1) % n]], key=lambda m: (m.send or (0, 0))[1])
        for i, rank in enumerate(members)
    ]
    size = 2 * n - 2
    found = [
        _ring(members, [lane[k : k + size] for lane in lanes], spans)
        for k in range(0, len(lanes[0]), size)
    ]
    return [ring for ring in found if ring] if all(found) else []


def _ring(members: list[int], lanes: list[list[Message]], spans: dict[Key, Span]) -> Ring | None:
    """These messages as a ring all-reduce, or None if they do not fit."""
    n, rounds = len(members), []
    for number in range(2 * n - 2):  # n-1 rounds of reduce-scatter, n-1 of all-gather
        reduces = number < n - 1
        row = [_transfer(lanes[i][number], (i - number) % n, reduces, spans) for i in range(n)]
        rounds.append(tuple(t for t in row if t))
        if len(rounds[-1]) < n:
            return None
    ring = Ring(tuple(members), tuple(rounds))
    return ring if _sized(ring) and _ordered(ring) and _gathers(ring) else None


def _transfer(m: Message, chunk: int, reduce: bool, spans: dict[Key, Span]) -> Transfer | None:
    if m.send is None or m.recv is None or m.sent is None or m.received is None:
        return None
    before = spans[m.send].before
    return Transfer(
        m.src,
        m.dst,
        chunk,
        reduce,
        m.send,
        m.recv,
        m.sent,
        m.received,
        before.values if before else (),
        m.nbytes,
    )


def _sized(ring: Ring) -> bool:
    """True if each chunk has one size."""
    return len({(t.chunk, t.nbytes) for row in ring.rounds for t in row}) == len(ring.members)


def _ordered(ring: Ring) -> bool:
    """True if each member receives a chunk before sending it on."""
    n = len(ring.members)
    return all(
        row[(i - 1) % n].recv[1] < later[i].send[1]
        for row, later in zip(ring.rounds, ring.rounds[1:], strict=False)
        for i in range(n)
    )


def _gathers(ring: Ring) -> bool:
    """True if the all-gather passes values on unchanged, and the reduce-scatter does not."""
    n = len(ring.members)
    same = [
        [
            row[(i - 1) % n].values == later[i].values
            for i in range(n)
            if row[(i - 1) % n].values and later[i].values
        ]
        for row, later in zip(ring.rounds, ring.rounds[1:], strict=False)
    ]
    reduced = [equal for row in same[: n - 1] for equal in row]
    return all(map(all, same[n - 1 :])) and not (reduced and all(reduced))


#: The largest number of ranks to follow, and of tensors to remember for each.
MAX_RANKS, MEMORY = 64, 16


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
    """From ``time`` on, a rank's tensor is cut into these pieces; or piece ``at`` is pieces[0]."""

    time: float
    rank: int
    pieces: tuple[Piece, ...]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Cargo:
    """The piece that a message carries, with its number and count if known.

    ``ring`` and ``round``: the numbers of its ring and round.
    """

    piece: Piece
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
    done: set[Key] = set()
    for i, ring in enumerate(found.rings):
        _apply_ring(i, ring, found)
        done |= {s.send for t in ring.rounds for s in t} | {s.recv for t in ring.rounds for s in t}
    _Follower(trace, found).run(done)
    found.changes.sort(key=lambda c: c.time)
    return found


# -- the ring all-reduce -----------------------------------------------------------------


def _apply_ring(which: int, ring: Ring, found: Contributions) -> None:
    """Apply the schedule to the recorded values."""
    n = len(ring.members)
    have = {
        rank: [Piece(frozenset({rank}), values=ring.own(i, c)) for c in range(n)]
        for i, rank in enumerate(ring.members)
    }
    for rank, pieces in have.items():
        found.changes.append(Change(ring.begin, rank, tuple(pieces)))
    for number, transfers in enumerate(ring.rounds):
        moving = [(t, have[t.src][t.chunk]) for t in transfers]
        for i, (t, piece) in enumerate(moving):
            found.cargo[t.send] = Cargo(piece, t.chunk, n, which, number, t.reduce)
            new, old = piece, have[t.dst][t.chunk]
            if t.reduce:
                new = _added(old, piece, ring.passed_on(number, i))
            have[t.dst][t.chunk] = new
            found.changes.append(Change(t.received, t.dst, (new,), t.chunk))


def _added(own: Piece, came: Piece, result: Values | None) -> Piece:
    """The sum of two pieces; if it equals the received one, the own contribution is uncertain."""
    if result is not None and result == came.values:
        doubt = own.sure | own.maybe | came.maybe
        return Piece(came.sure, doubt - came.sure, result)
    return Piece(own.sure | came.sure, own.maybe | came.maybe, result or ())


# -- everything else ------------------------------------------------------------------------


class _Follower:
    """Processes operations in the order of time, and remembers the tensors of each rank."""

    def __init__(self, trace: EventLog, found: Contributions) -> None:
        self.trace, self.found = trace, found
        self.known: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
        self.received: dict[int, dict[int, frozenset[int]]] = defaultdict(dict)
        self.sent: dict[str, Piece] = {}

    def run(self, done: set[Key]) -> None:
        met = ((max(s.start for s in members), members) for members in self.trace.collectives)
        for time, spans in sorted([*self._messages(done), *met], key=lambda act: act[0]):
            if spans[0].op in COLLECTIVES:
                self._collective(spans)
            else:
                self._point_to_point(spans[0], time)

    def _messages(self, done: set[Key]) -> Iterator[tuple[float, list[Span]]]:
        for s in self.trace.spans:
            if s.op in P2P | REQUESTS and (s.rank, s.seq) not in done:
                time = s.start if s.op is not Op.RECV else s.end
                if time is not None:
                    yield time, [s]

    # -- messages

    def _point_to_point(self, s: Span, time: float) -> None:
        match = self.trace.matches.get((s.rank, s.seq))
        if s.op in REQUESTS or s.match is not None:
            summary = s.after if s.op is Op.PULL else s.before or s.after
            if summary:  # only values are known of a server's tensor
                self._show(s.end or time, s.rank, Piece(values=summary.values))
        elif s.op is Op.SEND:
            piece = self._payload(s)
            self.found.cargo[s.rank, s.seq] = Cargo(piece)
            if match:
                self.sent[match] = piece
            self._show(time, s.rank, piece)
        elif match in self.sent:
            piece = self.sent[match]
            received = self.received[s.rank]
            received[s.nbytes] = received.get(s.nbytes, frozenset()) | piece.sure | piece.maybe
            self._learn(s.rank, s.nbytes, piece)
            self._show(time, s.rank, piece)

    def _payload(self, s: Span) -> Piece:
        """The piece a rank sends: a known one, its own, or an uncertain one."""
        values = s.before.values if s.before else ()
        old = self._recall(s.rank, s.nbytes, values)
        received = self.received[s.rank].values()  # of any size: it may be a part of one
        if old:
            piece = Piece(old.sure, old.maybe, values)
        elif not received:
            piece = Piece(frozenset({s.rank}), values=values)
        else:
            piece = Piece(frozenset(), frozenset({s.rank}).union(*received), values)
        self._learn(s.rank, s.nbytes, piece)
        return piece

    def _recall(self, rank: int, size: int, values: Values) -> Piece | None:
        """The latest tensor of this size with these values; zeros match nothing."""
        if not any(values):
            return None
        same = (p for n, p in reversed(self.known[rank]) if n == size and p.values == values)
        return next(same, None)

    def _learn(self, rank: int, size: int, piece: Piece) -> None:
        self.known[rank] = [*self.known[rank], (size, piece)][-MEMORY:]

    def _show(self, time: float, rank: int, *pieces: Piece) -> None:
        self.found.changes.append(Change(time, rank, pieces))

    # -- collectives

    def _collective(self, members: list[Span]) -> None:
        """Apply the semantics of a collective; known values continue a known piece."""
        if members[0].op in (Op.BARRIER, Op.NEW_GROUP) or len({s.op for s in members}) > 1:
            return
        members = sorted(members, key=lambda s: s.rank)
        own: Initial = {s.rank: self._initial(s) for s in members}
        for s, (before, after) in zip(
            members, _SEMANTICS[members[0].op](members, own), strict=True
        ):
            self._show(s.start, s.rank, *before)
            if s.end is not None:
                self._show(s.end, s.rank, *after)
                if len(after) == 1:
                    self._learn(s.rank, s.nbytes, after[0])

    def _initial(self, s: Span) -> Piece:
        values = s.before.values if s.before else ()
        old = self._recall(s.rank, s.nbytes, values)
        sure, maybe = (old.sure, old.maybe) if old else (frozenset({s.rank}), frozenset())
        return Piece(sure, maybe, values)


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
