"""Finds ring all-reduces among the messages of a run: those that equal the schedule. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from distkit.algorithms import schedules
from distkit.events import Message, Span
from distkit.trace.log import EventLog

Key = tuple[int, int]
Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of a ring, and what the schedule says of it. Times in seconds."""

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
    """One ring all-reduce: ``rounds[s][i]`` is what the i-th member sends in round s."""

    members: tuple[int, ...]
    rounds: tuple[tuple[Transfer, ...], ...]

    @property
    def begin(self) -> float:
        """When the first chunk is sent [s]."""
        return min(t.sent for t in self.rounds[0])

    def own(self, i: int, chunk: int) -> Values:
        """The values that the i-th member brought along: what it sent less what it had got."""
        n = len(self.members)
        sends = (i - chunk) % n  # the round in which it passes the chunk on, reduced
        sent = self.rounds[sends][i].values
        if sends == 0:
            return sent
        got = self.rounds[sends - 1][(i - 1) % n].values
        return tuple(a - b for a, b in zip(sent, got, strict=True)) if sent and got else ()

    def passed_on(self, number: int, i: int) -> Values | None:
        """With which values the i-th transfer of a round is sent on; None: not recorded."""
        if number + 1 == len(self.rounds):
            return None
        return self.rounds[number + 1][(i + 1) % len(self.members)].values or None


def find_rings(trace: EventLog) -> list[Ring]:
    """Every ring all-reduce of a run, among the members of each group.

    The messages of a group are one or more of them when each member sends to its right
    neighbour only, 2(n-1) messages for each; when a chunk has the same size wherever
    it goes; when nobody passes a chunk on before it has come; and when in the all-gather
    each message has the values of the one before it, as far as values are recorded. Fewer
    than three members cannot be told from two ranks that merely exchange tensors.

    >>> find_rings(EventLog())
    []
    """
    groups = {"world": list(trace.ranks), **trace.meta.get("groups", {})}
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
    """All the messages of one group as rings, or none."""
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
    """These messages as one ring all-reduce, if that is what they are."""
    n, rounds = len(members), []
    for number, step in enumerate(schedules.ring(n)):
        row = [
            _transfer(lanes[i][number], int(step.chunk[i]), bool(step.reduce), spans)
            for i in range(n)
        ]
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
    """True if a chunk has one size everywhere."""
    return len({(t.chunk, t.nbytes) for row in ring.rounds for t in row}) == len(ring.members)


def _ordered(ring: Ring) -> bool:
    """True if everybody receives a chunk before sending it on."""
    n = len(ring.members)
    return all(
        row[(i - 1) % n].recv[1] < later[i].send[1]
        for row, later in zip(ring.rounds, ring.rounds[1:], strict=False)
        for i in range(n)
    )


def _gathers(ring: Ring) -> bool:
    """True if the all-gather passes on what it got, and the reduce-scatter something else."""
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
