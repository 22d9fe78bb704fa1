"""How long ranks waited, from a trace. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from distkit.events import Op, Span
from distkit.trace.log import EventLog

#: What does not keep a rank from computing: its own marks, and sends, which go on beside it.
_BESIDE = {Op.MARK, Op.SEND}


def idle(trace: EventLog, label: str = "") -> dict[int, float]:
    """The share of the time in which each rank waits in a receive or a collective, or has ended.

    The time is from the first rank's beginning to the last one's end; for a pipeline with one
    stage a rank, and messages that take no time, the result is (p-1)/(m+p-1).

    Args:
        trace: of a run or of the simulator.
        label: of a ``dk.mark`` around what is measured, on every rank; the last such span counts.
            Without it, it is the whole trace.

    Returns:
        rank -> share from 0 to 1.

    Raises:
        ValueError: A rank has no such mark.

    Example:
        >>> from distkit_simulation import Link, Network, pipeline
        >>> trace = pipeline(4, 9, 1.0, 2.0, 0, Network(Link(0, 0)))
        >>> idle(trace)
        {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    """
    spans = [span for span in trace.spans if span.end is not None]
    windows = {rank: _window(spans, rank, label) for rank in trace.ranks}
    begin, end = min(a for a, _ in windows.values()), max(b for _, b in windows.values())
    shares = {}
    for rank, (first, last) in windows.items():
        waits = [(begin, first), (last, end)]
        waits += [_ends(s) for s in spans if s.rank == rank and s.op not in _BESIDE]
        shares[rank] = _covered(waits, begin, end) / (end - begin)
    return shares


def _ends(span: Span) -> tuple[float, float]:
    return span.start, span.start if span.end is None else span.end


def _window(spans: Iterable[Span], rank: int, label: str) -> tuple[float, float]:
    """When the rank was at it."""
    mine = [s for s in spans if s.rank == rank and label in ("", s.label)]
    if not mine:
        what = f"no finished span {label!r}: put `with dk.mark({label!r}):` around it"
        raise ValueError(f"rank {rank} has {what if label else 'recorded nothing'}")
    if label:
        return _ends(mine[-1])
    return min(s.start for s in mine), max(_ends(s)[1] for s in mine)


def _covered(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The time within ``begin`` and ``end`` that intervals cover."""
    total, reached = 0.0, begin
    for first, last in sorted(intervals):
        last = min(last, end)
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total
