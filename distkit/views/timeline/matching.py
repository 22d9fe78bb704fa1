"""Which operations belong together, found while they arrive.

The rules are those of :attr:`distkit.events.Trace.matches`, kept up to date operation by
operation: point-to-point calls match first in, first out per sender, receiver, group and
tag; the n-th collective of a rank on a group belongs with the n-th of every other member.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from distkit.events import COLLECTIVES, COMPUTATION, P2P, Op, Span

#: An operation: its rank and its number there.
Key = tuple[int, int]

#: One end of a queue of matching operations: a rank, and for point-to-point the operation.
_End = tuple[str, int]


class Matching:
    """Groups operations into messages and collectives, in any order of arrival."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[_End, list[int]]] = defaultdict(dict)
        self._numbered: dict[str, dict[Key, None]] = defaultdict(dict)

    def place(self, span: Span) -> Iterator[str]:
        """Add an operation; yield the id of each match that it makes or changes."""
        if span.op in COMPUTATION:
            return
        if span.match is not None:
            self._numbered[span.match][span.rank, span.seq] = None
            yield span.match
            return
        queue = _queue(span)
        if queue is None:
            return
        seqs = self._queues[queue].setdefault(_end(span), [])
        first = bisect_left(seqs, span.seq)
        last = first + 1
        if first == len(seqs) or seqs[first] != span.seq:
            seqs.insert(first, span.seq)  # nearly always at the end
            last = len(seqs)
        for n in range(first, last):
            yield f"{queue}#{n}"

    def members(self, match: str) -> list[Key]:
        """The operations of one match."""
        if match in self._numbered:
            return list(self._numbered[match])
        queue, _, nth = match.rpartition("#")
        n = int(nth)
        ends = self._queues[queue].items()
        return [(rank, seqs[n]) for (_, rank), seqs in ends if n < len(seqs)]


def _queue(span: Span) -> str | None:
    """The queue in which an operation waits for its partners."""
    if span.op in COLLECTIVES:
        return span.group
    if span.op not in P2P or span.peer is None:
        return None
    src, dst = (span.rank, span.peer) if span.op is Op.SEND else (span.peer, span.rank)
    return f"{span.group}:{src}>{dst}:{span.tag}"


def _end(span: Span) -> _End:
    return (str(span.op) if span.op in P2P else "", span.rank)
