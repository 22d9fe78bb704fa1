"""Export to Chrome's Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

Each rank is a process with threads for communication and for marked computation. Operations that
overlap without nesting are on several threads, because one thread cannot represent them. Each
operation is a complete slice ("X"), or a begin ("B") without end if it is unfinished. Flow arrows
("s", "t", "f") lead from each send to its receive and through the calls of each collective.

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

from distkit.events import COLLECTIVES, Message, Op, Span, State, Summary
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
    text = json.dumps(chrome(trace), allow_nan=False, default=str)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def chrome(trace: EventLog) -> Json:
    """Return the trace as the format's JSON object."""
    threads = {**_threads(trace, marks=True), **_threads(trace, marks=False)}
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


def _threads(trace: EventLog, *, marks: bool) -> dict[Key, int]:
    """Assign operations to threads, in which they nest or do not overlap."""
    threads: dict[Key, int] = {}
    busy: dict[int, list[list[float]]] = defaultdict(list)  # ends of each thread's open slices
    for s in sorted(trace.spans, key=lambda s: (s.start, -_end(s))):
        if (s.op is Op.MARK) is not marks:
            continue
        stacks = busy[s.rank]
        for stack in stacks:
            while stack and stack[-1] <= s.start:
                stack.pop()
        # only marks nest
        fitting = (not stack or (marks and _end(s) <= stack[-1]) for stack in stacks)
        n = next((i for i, fits in enumerate(fitting) if fits), len(stacks))
        if n == len(stacks):
            stacks.append([])
        stacks[n].append(_end(s))
        threads[s.rank, s.seq] = n if marks else _COMMUNICATION + n
    return threads


def _end(span: Span) -> float:
    return math.inf if span.end is None else span.end


def _names(trace: EventLog, threads: dict[Key, int]) -> Iterator[Json]:
    for rank in trace.ranks:
        yield _meta(rank, 0, "process_name", name=trace.info.rank(rank).name)
        yield _meta(rank, 0, "process_sort_index", sort_index=rank)
    for rank, thread in sorted({(rank, thread) for (rank, _), thread in threads.items()}):
        marks = thread < _COMMUNICATION
        number = thread if marks else thread - _COMMUNICATION
        name = "computation" if marks else "communication"
        yield _meta(rank, thread, "thread_name", name=f"{name} {number + 1}" if number else name)


def _meta(rank: int, thread: int, kind: str, **args: Any) -> Json:
    return {"ph": "M", "name": kind, **_ids(rank, thread), "args": args}


def _ids(rank: int, thread: int) -> Json:
    """Return ids that start at 1, since some viewers treat 0 specially; thread ids are global."""
    return {"pid": rank + 1, "tid": (rank + 1) * _THREADS + thread}


# -- slices ---------------------------------------------------------------------


def _slice(span: Span, trace: EventLog, thread: int) -> Json:
    start = _ns(span.start, trace)
    name = span.label or "computation" if span.op is Op.MARK else str(span.op)
    event = {"name": name, "cat": _category(span), **_ids(span.rank, thread), "ts": start / 1e3}
    if span.end is None:
        return {**event, "ph": "B", "args": _args(span)}
    return {**event, "ph": "X", "dur": (_ns(span.end, trace) - start) / 1e3, "args": _args(span)}


def _ns(time: float, trace: EventLog) -> int:
    return round((time - trace.start) * 1e9)


def _category(span: Span) -> str:
    if span.op is Op.MARK:
        return "computation"
    return "collective" if span.op in COLLECTIVES else "message"


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
    values = ", ".join(f"{v:.4g}" for v in s.values[:16]) + (", …" if s.size > 16 else "")
    return {"values": f"[{values}]", **{k: finite(getattr(s, k)) for k in ("min", "max", "norm")}}


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
            number = next(numbers)
            yield arrival
            yield _flow("s", number, str(m.op), send, send["ts"])
            yield _flow("f", number, str(m.op), arrival, arrival["ts"])
    for members in (calls for calls in trace.collectives if len(calls) > 1):
        chain = sorted((slices[s.rank, s.seq] for s in members), key=lambda e: e["ts"])
        number = next(numbers)
        for i, event in enumerate(chain):
            ph = "s" if i == 0 else "f" if i == len(chain) - 1 else "t"
            yield _flow(ph, number, chain[0]["name"], event, event["ts"])


def _arrival(m: Message, recv: Json) -> Json:
    """Return a slice within a receive, at its end.

    Perfetto draws an arrow from the slice that starts first to the other one, and a
    receive is often called before its send.
    """
    dur = min(recv["dur"], _ARRIVAL)
    return {
        "name": "arrived",
        "cat": "message",
        "ph": "X",
        "pid": recv["pid"],
        "tid": recv["tid"],
        "ts": round(recv["ts"] + recv["dur"] - dur, 3),
        "dur": round(0.99 * dur, 3),
        "args": {"from": m.src},
    }


def _flow(ph: str, number: int, name: str, anchor: Json, time: float) -> Json:
    event = {
        "ph": ph,
        "id": number,
        "name": name,
        "cat": "flow",
        "pid": anchor["pid"],
        "tid": anchor["tid"],
        "ts": time,
    }
    return {**event, "bp": "e"} if ph == "f" else event
