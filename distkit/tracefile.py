"""Saved traces: gzipped JSON lines, so that opening a file runs nothing.

The first line is a header with the format's version and the number of events, each further
line an object with a column of :class:`distkit.table.Table`: ``rank``, ``seq``, ``look`` and
``time`` have an element per event, ``looks`` what they look like, ``match`` and ``summary``
what some of them have besides. In version 1 a line was an event.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distkit.errors import TraceFileError
from distkit.events import Event, Op, State, Summary, Trace
from distkit.table import Look, Table

#: Format of saved traces. A reader refuses a larger version than its own.
FORMAT, VERSION = "distkit-trace", 2


def save(trace: Trace, path: Path) -> Path:
    """Write a trace."""
    head = {"format": FORMAT, "version": VERSION, "events": len(trace), "meta": trace.meta}
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as f:
        for line in (head, *_columns(trace.table)):
            f.write(json.dumps(line) + "\n")
    return path


def load(path: Path) -> Trace:
    """Read a saved trace.

    Raises:
        TraceFileError: not a trace, corrupt, truncated, or of a newer version.
        FileNotFoundError: there is no such file.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as f:
            head = _head(f.readline(), path)
            lines = map(json.loads, f)
            trace = (Trace(map(_event, lines), head["meta"]) if head["version"] == 1
                     else Trace.of(_table(lines), head["meta"]))  # fmt: skip
    except (EOFError, zlib.error) as e:
        raise TraceFileError(
            f"{path}: the file breaks off in the middle, or is damaged. "
            "Copy it again, or save the trace once more with trace.save(path)."
        ) from e
    except (FileNotFoundError, IsADirectoryError, PermissionError, TraceFileError):
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as e:
        raise TraceFileError(
            f"{path}: this is not a readable distkit trace ({e}). "
            "Open a file written by trace.save(path)."
        ) from e
    if len(trace) != head["events"]:
        raise TraceFileError(
            f"{path}: {len(trace)} of {head['events']} events are there. "
            "Copy the file again, or save the trace once more with trace.save(path)."
        )
    return trace


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


# -- columns ----------------------------------------------------------------------


def _columns(table: Table) -> Iterator[dict[str, Any]]:
    yield {"looks": table.looks}
    yield {"match": [*table.match.items()]}
    yield {"summary": [[i, *_plain(s)] for i, s in table.summary.items()]}
    for name in ("rank", "seq", "look", "time"):
        yield {name: getattr(table, name).tolist()}


def _table(lines: Iterable[dict[str, Any]]) -> Table:
    parts = {name: values for line in lines for name, values in line.items()}
    kinds = {"rank": "i", "seq": "i", "look": "i", "time": "f"}
    columns = [_array(parts.get(name, []), kind) for name, kind in kinds.items()]
    n = min(map(len, columns))  # if that is too few, the header tells
    rank, seq, look, time = (column[:n] for column in columns)
    looks = [_look(*values) for values in parts["looks"]]
    match = dict(parts["match"])
    summary = {i: _summary(*values) for i, *values in parts["summary"]}
    if n and not 0 <= look.min() <= look.max() < len(looks):
        raise ValueError("an event looks like nothing")
    if (np.diff(time) < 0).any() or not all(i in range(n) for i in (*match, *summary)):
        raise ValueError("its columns do not belong together")
    return Table(rank, seq, look, time, looks, match, summary)


def _array(values: list[Any], kind: str) -> Any:
    """Whole numbers ("i") or others ("f") as an array."""
    found = np.array(values or np.zeros(0, kind))
    if found.dtype.kind not in (kind, "i"):
        raise ValueError(f"numbers were expected, not {found.dtype}")
    return found.astype(np.int64 if kind == "i" else np.float64)


def _look(op: str, state: str, peer: Any, group: str, nbytes: int, shape: Any, *rest: Any) -> Look:
    return Look(Op(op), State(state), peer, group, nbytes, tuple(shape), *rest)


def _summary(
    values: list[Any], norm: Any, low: Any, high: Any, size: int, sampled: bool
) -> Summary:
    return Summary(tuple(map(float, values)), float(norm), float(low), float(high), size, sampled)


def _plain(s: Summary) -> list[Any]:
    """NaN and infinity as strings, which float() reads back: JSON has no word for them."""

    def plain(x: float) -> float | str:
        return x if math.isfinite(x) else str(x)

    return [[*map(plain, s.values)], plain(s.norm), plain(s.min), plain(s.max), s.size, s.sampled]


# -- version 1 --------------------------------------------------------------------


def _event(row: list[Any]) -> Event:
    rank, seq, op, state, time, peer, group, nbytes, shape, dtype, tag, where, label, match, s = row
    return Event(rank, seq, Op(op), State(state), time, peer, group, nbytes, tuple(shape), dtype,
                 tag, where, label, match, None if s is None else _summary(*s))  # fmt: skip
