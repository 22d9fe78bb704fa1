"""Idle time of the ranks in a run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from distkit.events import Op, Span
from distkit.trace.log import EventLog
from distkit.views.timeline.columns import length


def idle(trace: EventLog, label: str = "") -> dict[int, float]:
    """Return the fraction of time that each rank spends waiting, for example in collectives.

    The time extends from the first start to the last end on any rank. Before its own start and
    after its own end, a rank counts as waiting. Sends and marks do not count as waiting. For GPipe
    and 1F1B, if messages take no time, the result is (p-1)/(m+p-1).

    Args:
        trace: the trace of a run or of the simulator.
        label: the label of a ``dk.mark`` on every rank; the last span with this label is
            measured. "" measures the whole trace.

    Returns:
        The fraction, from 0 to 1, by rank.

    Raises:
        ValueError: a rank has no finished mark with this label, or has recorded nothing.

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
        # marks and sends do not block computation
        blocking = (s for s in spans if s.rank == rank and s.op not in (Op.MARK, Op.SEND))
        waits += [(s.start, s.end) for s in blocking if s.end is not None]
        shares[rank] = length(*np.clip(waits, begin, end).T) / (end - begin)
    return shares


def _window(spans: Iterable[Span], rank: int, label: str) -> tuple[float, float]:
    """Return the start and end of the measured interval on a rank."""
    candidates = [s for s in spans if s.rank == rank and label in ("", s.label)]
    if not candidates:
        raise ValueError(
            f"rank {rank} has no finished span {label!r}: put `with dk.mark({label!r}):` around "
            "the code"
            if label
            else f"rank {rank} has recorded nothing"
        )
    measured = candidates[-1:] if label else candidates
    return min(s.start for s in measured), max(s.end for s in measured if s.end is not None)
