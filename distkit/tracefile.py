"""Saved traces: gzipped JSON lines, so that opening a file runs nothing.

The first line is a header with the format's version and the number of events; each
further line is one event, a list in the order of Event's fields.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

from distkit.errors import TraceFileError
from distkit.events import Event, Op, State, Summary, Trace

#: Format of saved traces. A reader refuses a larger version than its own.
FORMAT, VERSION = "distkit-trace", 1


def save(trace: Trace, path: Path) -> Path:
    """Write a trace."""
    head = {"format": FORMAT, "version": VERSION, "events": len(trace), "meta": trace.meta}
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as f:
        f.write(json.dumps(head) + "\n")
        f.writelines(json.dumps(_encode(e)) + "\n" for e in trace.events)
    return path


def load(path: Path) -> tuple[list[Event], dict[str, Any]]:
    """Read the events and the meta of a saved trace.

    Raises:
        TraceFileError: not a trace, corrupt, truncated, or of a newer version.
        FileNotFoundError: there is no such file.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as f:
            head = _head(f.readline(), path)
            events = [_decode(json.loads(line)) for line in f]
    except (EOFError, zlib.error) as e:
        raise TraceFileError(
            f"{path}: the file breaks off in the middle, or is damaged. "
            "Copy it again, or save the trace once more with trace.save(path)."
        ) from e
    except (FileNotFoundError, IsADirectoryError, PermissionError, TraceFileError):
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise TraceFileError(
            f"{path}: this is not a readable distkit trace ({e}). "
            "Open a file written by trace.save(path)."
        ) from e
    if len(events) != head["events"]:
        raise TraceFileError(
            f"{path}: {len(events)} of {head['events']} events are there. "
            "Copy the file again, or save the trace once more with trace.save(path)."
        )
    return events, head["meta"]


def _encode(e: Event) -> list[Any]:
    s = e.summary
    values = None if s is None else [
        [_plain(v) for v in s.values], _plain(s.norm), _plain(s.min), _plain(s.max),
        s.size, s.sampled,
    ]  # fmt: skip
    return [e.rank, e.seq, str(e.op), str(e.state), e.time, e.peer, e.group, e.nbytes,
            list(e.shape), e.dtype, e.tag, e.where, e.label, e.match, values]  # fmt: skip


def _decode(row: list[Any]) -> Event:
    rank, seq, op, state, time, peer, group, nbytes, shape, dtype, tag, where, label, match, s = row
    summary = None
    if s is not None:
        values, norm, low, high, size, sampled = s
        summary = Summary(
            tuple(map(float, values)), float(norm), float(low), float(high), size, sampled
        )
    return Event(rank, seq, Op(op), State(state), time, peer, group, nbytes, tuple(shape), dtype,
                 tag, where, label, match, summary)  # fmt: skip


def _plain(x: float) -> float | str:
    """NaN and infinity as strings, which float() reads back: JSON has no word for them."""
    return x if math.isfinite(x) else str(x)


def _head(line: str, path: Path) -> dict[str, Any]:
    """Check the first line of a trace file."""
    head = json.loads(line)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("it does not begin with a trace's header")
    if head["version"] > VERSION:
        raise TraceFileError(
            f"{path}: the trace has format {head['version']}, this distkit reads up to {VERSION}. "
            "Update distkit: pip install --upgrade distkit."
        )
    return head
