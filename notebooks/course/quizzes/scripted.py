"""Made-up traces, a line for each operation, and what a reader sees in one."""

from __future__ import annotations

from typing import Any

from distkit.events import Op, Span
from distkit.trace.trace import Trace
from distkit_simulation.simulator import Writer

MS, MIB = 1e-3, 2**20
RANKS = tuple(f"rank {r}" for r in range(4))

#: An operation: what, on which rank, begin and end [ms], the fields of its events.
Line = tuple[Op, int, float, float, dict[str, Any]]


def script(n: int, name: str, *lines: Line) -> Trace:
    """A trace of ``n`` ranks, line by line: operation, rank, begin and end [ms], fields."""
    writer = Writer(n)
    for op, rank, begin, end, fields in lines:
        writer.operation(op, rank, begin * MS, end * MS, **fields)
    ranks = {str(r): {"name": f"rank {r}", "role": "rank"} for r in range(n)}  # on no device
    return writer.trace(name, backend="made up", simulated=False, ranks=ranks)


def told(trace: Trace, **meta: Any) -> Trace:
    """The same with other facts, for instance a name that does not tell what was simulated."""
    return Trace(trace.events, {**trace.meta, **meta})


def line(op: Op, rank: int, begin: float, end: float, **fields: Any) -> Line:
    """One operation from ``begin`` to ``end`` [ms]; infinity: it never returns."""
    return op, rank, begin, end, fields


def mark(rank: int, begin: float, end: float, label: str) -> Line:
    """A line of marked computation."""
    return line(Op.MARK, rank, begin, end, attributes={"label": label})


def send(rank: int, begin: float, end: float, peer: int, nbytes: int = 256) -> Line:
    """A line with a send."""
    return line(Op.SEND, rank, begin, end, **_message(peer, nbytes))


def recv(rank: int, begin: float, end: float, peer: int, nbytes: int = 256) -> Line:
    """A line with a receive; one without end never returns."""
    return line(Op.RECV, rank, begin, end, **_message(peer, nbytes))


def collective(
    op: Op, rank: int, begin: float, end: float, nbytes: int, dtype: str = "float32", **fields: Any
) -> Line:
    """A line with a rank's part in a collective."""
    shape = (nbytes // (8 if dtype == "float64" else 4),)
    return line(op, rank, begin, end, nbytes=nbytes, shape=shape, dtype=dtype, **fields)


def _message(peer: int, nbytes: int) -> dict[str, Any]:
    return {"peer": peer, "nbytes": nbytes, "shape": (nbytes // 4,), "dtype": "float32", "tag": 0}


def work(trace: Trace, label: str = "") -> list[Span]:
    """The marked computation, all or that of a name, in the order of its beginning."""
    marks = [s for s in trace.spans if s.op is Op.MARK and s.label.startswith(label)]
    return sorted(marks, key=lambda span: span.start)


def calls(trace: Trace, op: Op, rank: int) -> list[Span]:
    """A rank's calls of a kind, in their order."""
    return [s for s in trace.spans if s.op is op and s.rank == rank]


def updates(trace: Trace, worker: int | None = None) -> list[Span]:
    """The updates of servers, in their order; those with a worker's gradient."""
    made = [s for s in trace.spans if "version" in s.attributes]
    return [s for s in made if worker is None or worker in s.attributes["workers"]]


def slowest(trace: Trace) -> int:
    """The worker that computes longest."""
    return max(work(trace), key=lambda span: span.seconds or 0.0).rank


def waited(trace: Trace, rank: int, first: int | None = None) -> float:
    """The seconds that a rank is in calls that communicate, or in its first so many."""
    spans = [s for s in trace.spans if s.rank == rank and s.op is not Op.MARK]
    return sum(s.seconds or 0.0 for s in spans[:first])
