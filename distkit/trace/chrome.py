"""Exports traces to Chrome's Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

Each rank is a process with threads for communication and for marked computation; operations that
overlap are on different threads. Each operation is a complete slice ("X"), or a begin event ("B")
without an end if it is unfinished. Flow arrows ("s", "t", "f") lead from each send to its receive
and through the calls of each collective.

Source: the Trace Event Format document, and Perfetto's importer (json_trace_parser_impl.cc,
flow_tracker.cc). The importer binds a flow event to the innermost slice around its time, and treats
flow events with the same id, category and name as one arrow.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from distkit.events import Message, Op, Span, State, Summary
from distkit.trace.file import finite
from distkit.trace.log import EventLog

Json = dict[str, Any]
#: An operation: rank and seq.
Key = tuple[int, int]

#: ``_THREADS``: number of thread ids per process. ``_COMMUNICATION``: the first one for
#: communication; marks use those below it.
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
    slices = _slices(trace)
    events = [*slices.values(), *_arrows(trace, slices)]
    # slices precede flow events with the same time, which bind to them
    events.sort(key=lambda e: (e["ts"], e["ph"] not in "XB", -e.get("dur", math.inf)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"name": trace.info.name, "dropped": trace.dropped},
        "traceEvents": [*_names(trace, slices.values()), *events],
    }


def _slices(trace: EventLog) -> dict[Key, Json]:
    """Return a slice for each operation, on the first free thread of its rank and kind."""
    slices: dict[Key, Json] = {}
    ends: dict[tuple[int, str], list[float]] = defaultdict(list)  # end of each thread's last slice
    for s in trace.spans:
        kind, name = "communication", str(s.op)
        if s.op is Op.MARK:
            kind, name = "computation", s.label or "computation"
        thread_ends, end = ends[s.rank, kind], math.inf if s.end is None else s.end
        n = next((i for i, last in enumerate(thread_ends) if last <= s.start), len(thread_ends))
        thread_ends[n : n + 1] = [end]
        thread = _thread(s.rank, n + _COMMUNICATION * (kind == "communication"))
        start = round((s.start - trace.start) * 1e9)
        event = {"name": name, "cat": kind, **thread, "ts": start / 1e3, "args": _args(s)}
        event["ph"] = "B"
        if s.end is not None:
            event |= {"ph": "X", "dur": (round((s.end - trace.start) * 1e9) - start) / 1e3}
        slices[s.rank, s.seq] = event
    return slices


def _thread(rank: int, thread: int = 0) -> Json:
    """Return the ids of a process and a thread, avoiding 0, which some viewers treat specially."""
    return {"pid": rank + 1, "tid": (rank + 1) * _THREADS + thread}


def _names(trace: EventLog, slices: Iterable[Json]) -> Iterator[Json]:
    """Yield metadata events that name and sort the processes and name the threads."""
    for rank in trace.ranks:
        process = {"ph": "M", **_thread(rank)}
        yield {**process, "name": "process_name", "args": {"name": trace.info.rank(rank).name}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
    for pid, tid, kind in sorted({(e["pid"], e["tid"], e["cat"]) for e in slices}):
        number = tid % _COMMUNICATION
        name = f"{kind} {number + 1}" if number else kind
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _args(span: Span) -> Json:
    args = {
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
    return {key: value for key, value in args.items() if value is not None}


def _values(s: Summary | None) -> Json | None:
    if s is None:
        return None
    return {name: finite(getattr(s, name)) for name in ("min", "max", "norm")}


# -- arrows ---------------------------------------------------------------------


def _arrows(trace: EventLog, slices: dict[Key, Json]) -> Iterator[Json]:
    """Yield the arrows from each send to its receive and through the calls of each collective.

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
    """Return a slice at the end of a receive, in which the arrow ends.

    Perfetto draws an arrow from the slice that starts first to the other one, and a receive is
    often called before its send.
    """
    length = min(recv["dur"], _ARRIVAL)
    start, dur = round(recv["ts"] + recv["dur"] - length, 3), round(0.99 * length, 3)
    return {**recv, "name": "arrived", "ts": start, "dur": dur, "args": {"from": m.src}}


def _arrow(number: int, chain: list[Json]) -> Iterator[Json]:
    """Yield the flow events of an arrow through slices."""
    flow = {"name": chain[0]["name"], "cat": "flow", "id": number}
    first, *inner, last = ({**flow, **{k: e[k] for k in ("pid", "tid", "ts")}} for e in chain)
    yield {**first, "ph": "s"}
    yield from ({**e, "ph": "t"} for e in inner)
    yield {**last, "ph": "f", "bp": "e"}
