"""Export to Chrome's Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

Each rank is a process with threads for communication and for marked computation; operations that
overlap are on several threads. Each operation is a complete slice ("X"), or a begin ("B") without
end if it is unfinished. Flow arrows ("s", "t", "f") lead from each send to its receive and through
the calls of each collective.

Source: the Trace Event Format document, and perfetto's importer (json_trace_parser_impl.cc,
flow_tracker.cc), which binds a flow event to the innermost slice around its time, and treats flow
events of the same id, category and name as one arrow.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from distkit.events import Message, Op, Span, State, Summary
from distkit.trace.file import finite
from distkit.trace.log import EventLog

Json = dict[str, Any]
#: An operation: rank and seq.
Key = tuple[int, int]

#: Thread ids per process; marks start at 0, communication at _COMMUNICATION.
_THREADS, _COMMUNICATION = 1000, 500
#: Duration of the slice at the end of a receive in which the arrow ends [µs].
_ARRIVAL = 1.0


def to_chrome(trace: EventLog, path: str | Path) -> Path:
    """Write a trace as Chrome trace JSON, gzipped if the name ends in ``.gz``.

    Args:
        trace: the trace; its first event has time 0.
        path: the file to write.

    Returns:
        The path.

    >>> import tempfile
    >>> path = to_chrome(EventLog(), Path(tempfile.mkdtemp()) / "run.json")
    >>> json.loads(path.read_text())["traceEvents"]
    []
    """
    path = Path(path)
    text = json.dumps(chrome(trace), allow_nan=False, default=str).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def chrome(trace: EventLog) -> Json:
    """Return the trace as the format's JSON object."""
    threads = _threads(trace)
    slices = {(s.rank, s.seq): _slice(s, trace, threads[s.rank, s.seq]) for s in trace.spans}
    events = [*slices.values(), *_arrows(trace, slices)]
    # slices precede flow events of the same time, which bind to them
    events.sort(key=lambda e: (e["ts"], e["ph"] not in "XB", -e.get("dur", math.inf)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"name": trace.info.name, "dropped": trace.dropped},
        "traceEvents": [*_names(trace, threads), *events],
    }


# -- processes and threads ------------------------------------------------------


def _threads(trace: EventLog) -> dict[Key, int]:
    """Assign each operation to the first thread of its rank and kind that is free."""
    threads: dict[Key, int] = {}
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)  # of each thread's last slice
    for s in trace.spans:
        first = 0 if s.op is Op.MARK else _COMMUNICATION
        busy = ends[s.rank, first]
        n = next((i for i, end in enumerate(busy) if end <= s.start), len(busy))
        busy[n : n + 1] = [math.inf if s.end is None else s.end]
        threads[s.rank, s.seq] = first + n
    return threads


def _names(trace: EventLog, threads: dict[Key, int]) -> Iterator[Json]:
    for rank in trace.ranks:
        yield _meta(rank, 0, "process_name", name=trace.info.rank(rank).name)
        yield _meta(rank, 0, "process_sort_index", sort_index=rank)
    for rank, thread in sorted({(rank, thread) for (rank, _), thread in threads.items()}):
        number = thread % _COMMUNICATION
        name = f"{_kind(thread)} {number + 1}" if number else _kind(thread)
        yield _meta(rank, thread, "thread_name", name=name)


def _meta(rank: int, thread: int, kind: str, **args: Any) -> Json:
    return {"ph": "M", "name": kind, **_ids(rank, thread), "args": args}


def _ids(rank: int, thread: int) -> Json:
    """Return ids that start at 1, since some viewers treat 0 specially; thread ids are global."""
    return {"pid": rank + 1, "tid": (rank + 1) * _THREADS + thread}


def _kind(thread: int) -> str:
    return "computation" if thread < _COMMUNICATION else "communication"


# -- slices ---------------------------------------------------------------------


def _slice(span: Span, trace: EventLog, thread: int) -> Json:
    start = _ns(span.start, trace)
    name = span.label or "computation" if span.op is Op.MARK else str(span.op)
    event = {"name": name, "cat": _kind(thread), **_ids(span.rank, thread), "ts": start / 1e3}
    if span.end is None:
        return {**event, "ph": "B", "args": _args(span)}
    return {**event, "ph": "X", "dur": (_ns(span.end, trace) - start) / 1e3, "args": _args(span)}


def _ns(time: float, trace: EventLog) -> int:
    return round((time - trace.start) * 1e9)


def _args(span: Span) -> Json:
    known = {
        **span.attributes,
        "peer": span.peer,
        "group": span.group,
        "bytes": span.nbytes or None,
        "shape": str(list(span.shape)) if span.dtype else None,
        "dtype": span.dtype or None,
        "tag": span.tag,
        "where": span.where or None,
        "seq": span.seq,
        "before": _values(span.before),
        "after": _values(span.after),
        "state": None if span.state is State.COMPLETED else str(span.state),
    }
    return {key: value for key, value in known.items() if value is not None}


def _values(s: Summary | None) -> Json | None:
    if s is None:
        return None
    return {name: finite(getattr(s, name)) for name in ("min", "max", "norm")}


# -- arrows ---------------------------------------------------------------------


def _arrows(trace: EventLog, slices: dict[Key, Json]) -> Iterator[Json]:
    """Yield the arrows from each send to its receive, and through the calls of each collective.

    Messages that seem to arrive before they were sent, because clocks differ, have no arrow: the
    format does not allow an arrow that ends before it starts.
    """
    numbers = count(1)
    for m in trace.messages:
        if m.sent is None or m.received is None or not (m.send and m.recv):
            continue
        send, arrival = slices[m.send], _arrival(m, slices[m.recv])
        if send["ts"] <= arrival["ts"]:
            yield arrival
            yield from _arrow(next(numbers), [send, arrival])
    for calls in trace.collectives:
        if len(calls) > 1:
            chain = sorted((slices[s.rank, s.seq] for s in calls), key=lambda e: e["ts"])
            yield from _arrow(next(numbers), chain)


def _arrival(m: Message, recv: Json) -> Json:
    """Return a slice within a receive, at its end.

    Perfetto draws an arrow from the slice that starts first to the other one, and a
    receive is often called before its send.
    """
    dur = min(recv["dur"], _ARRIVAL)
    start, shown = round(recv["ts"] + recv["dur"] - dur, 3), round(0.99 * dur, 3)
    return {**recv, "name": "arrived", "ts": start, "dur": shown, "args": {"from": m.src}}


def _arrow(number: int, chain: list[Json]) -> Iterator[Json]:
    """Yield the flow events of an arrow through slices."""
    for step in chain:
        ph = "s" if step is chain[0] else "f" if step is chain[-1] else "t"
        flow = {"name": chain[0]["name"], "cat": "flow", "ph": ph, "id": number}
        place = {name: step[name] for name in ("pid", "tid", "ts")}
        yield {**flow, **place, "bp": "e"} if ph == "f" else {**flow, **place}
