"""Saves and loads traces as gzipped JSON lines; loading a file executes no code.

The first line is a header with the format version, the number of events and the run's metadata.
Each remaining line is an object that holds one column of :class:`distkit.trace.columns.Table`:
``rank``, ``seq``, ``category`` and ``time`` have one element per event. ``categories`` contains the
shared fields. ``match`` and ``summary`` are optional fields of an event, so each has entries only
for the events that have it.
msgspec validates each field.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from msgspec import Meta, Struct

from distkit.errors import TraceFileError
from distkit.events import Attributes, Summary
from distkit.trace.columns import Category, Table
from distkit.trace.info import Count, Integer, Number, Rank, RunInfo
from distkit.trace.log import EventLog, Log

#: Format of saved traces. A reader rejects other versions.
FORMAT, VERSION = "distkit-trace", 4

#: Maximum size of an unpacked file [bytes].
MAX_BYTES = 2**30

_GZIP = b"\x1f\x8b"


def save(trace: EventLog, path: Path) -> Path:
    """Write a trace."""
    with gzip.open(path, "wb", compresslevel=4) as f:
        for line in _encode_lines(trace):
            f.write(line + b"\n")
    return path


def load(path: Path, kind: type[Log]) -> Log:
    """Read a saved trace.

    Args:
        path: the file.
        kind: the class of the result.

    Raises:
        TraceFileError: the file is not a trace, is corrupt or truncated, or has a different
            version.
        FileNotFoundError: the file does not exist.
    """
    try:
        first, *columns = unpack(path).splitlines() or [b""]
        head = _decode_head(first, path)
        trace = kind.from_table(_decode_table(columns), head.meta)
    except (FileNotFoundError, IsADirectoryError, PermissionError, TraceFileError):
        raise
    except (OSError, ValueError, RecursionError) as e:
        raise TraceFileError(
            f"{path}: not a readable distkit trace ({e}). Open a file written by trace.save(path)."
        ) from e
    if len(trace) != head.events:
        raise TraceFileError(
            f"{path}: the header says there are {head.events} events, but the file contains "
            f"{len(trace)}. Copy the file again, or save the trace again with trace.save(path)."
        )
    return trace


def round_trip(trace: Log) -> Log:
    """Return the trace that saving and reloading this one would give.

    Raises:
        ValueError: the trace contains values that the format does not allow.
    """
    head, *columns = _encode_lines(trace)
    return type(trace).from_table(
        _decode_table(columns), msgspec.json.decode(head, type=_Head).meta
    )


def is_trace_file(path: Path) -> bool:
    """Return whether a file begins with the header that :func:`save` writes, gzipped or not."""
    return f'"{FORMAT}"'.encode() in unpack(path, 256)


# -- unpacking, with a limit, since a small file can unpack to a huge one --------------------------


def unpack(path: Path, size: int = MAX_BYTES + 1) -> bytes:
    """Return the unpacked content of a file, or its first ``size`` bytes.

    Raises:
        TraceFileError: the file is corrupt, or larger than :data:`MAX_BYTES` when unpacked.
        OSError: the file cannot be read.
    """
    with path.open("rb") as raw:
        file = gzip.open(raw) if raw.peek(2)[:2] == _GZIP else raw
        try:
            content = file.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceFileError(
                f"{path}: the file is truncated or corrupt. Copy or write it again."
            ) from error
    if len(content) > MAX_BYTES:
        raise TraceFileError(
            f"{path}: the file is larger than {MAX_BYTES:,} bytes when unpacked. Record fewer "
            "steps."
        )
    return content


# -- the header -------------------------------------------------------------------


class _Format(Struct):
    format: str = ""
    version: Annotated[int, Meta(ge=1)] = 1


class _Head(_Format, kw_only=True):
    events: Count
    meta: RunInfo


def _decode_head(line: bytes, path: Path) -> _Head:
    """Decode and check the first line of a trace file."""
    first = msgspec.json.decode(line, type=_Format)
    if first.format != FORMAT:
        raise ValueError("it does not begin with a trace header")
    if first.version != VERSION:
        remedy = (
            "Update distkit: pip install --upgrade distkit."
            if first.version > VERSION
            else "Record the run again."
        )
        raise TraceFileError(
            f"{path}: the trace is in format version {first.version}, but this version of "
            f"distkit reads version {VERSION}. {remedy}"
        )
    return msgspec.json.decode(line, type=_Head)


# -- columns ----------------------------------------------------------------------

_Value = None | bool | Integer | Number | str
#: NaN and infinity are strings that float() parses, because JSON has no such numbers.
_JsonFloat = float | Literal["nan", "inf", "-inf"]
_Values = Annotated[list[_JsonFloat], Meta(max_length=65_536)]
_Summary = tuple[Count, _Values, _JsonFloat, _JsonFloat, _JsonFloat, Count, bool]


class _Columns(TypedDict, total=False):
    rank: list[Rank]
    seq: list[Integer]
    category: list[Count]
    time: list[Number]
    categories: list[Category]
    match: list[tuple[Count, str]]
    summary: list[_Summary]


_NUMBERS = "version ranks clock dropped staleness backup memory wait_for"
_STRINGS = (
    "checksum caller waits_at device label mode method optimizer reduction function watched name"
)
#: The attributes whose types are validated, because distkit relies on their values.
_KnownAttributes = msgspec.defstruct(
    "_KnownAttributes",
    [
        ("key", Integer | str, ""),
        ("keys", list[Integer | str], []),
        ("workers", list[Rank], []),
        ("stale_by", list[Count], []),
        ("members", list[Rank], []),
        ("stack", list[str], []),
        ("device_seconds", Number, 0.0),
        *((name, Count, 0) for name in _NUMBERS.split()),
        *((name, str, "") for name in _STRINGS.split()),
    ],
)


def _attributes(_: type, attributes: Any) -> Attributes:
    msgspec.convert(attributes, _KnownAttributes)
    return Attributes(msgspec.convert(attributes, dict[str, _Value | tuple[_Value, ...]]))


_columns = msgspec.json.Decoder(_Columns, dec_hook=_attributes)


def _encode_lines(trace: EventLog) -> Iterator[bytes]:
    """Yield the lines of a file."""
    table = trace.table
    yield msgspec.json.encode(
        _Head(format=FORMAT, version=VERSION, events=len(trace), meta=trace.info)
    )
    yield msgspec.json.encode({"categories": table.categories})
    matches = [(i, m) for i, m in enumerate(table.match) if m is not None]
    summaries = [[i, *_to_plain(s)] for i, s in enumerate(table.summary) if s is not None]
    yield msgspec.json.encode({"match": matches})
    yield msgspec.json.encode({"summary": summaries})
    for name in ("rank", "seq", "category", "time"):
        yield msgspec.json.encode({name: getattr(table, name).tolist()})


def _decode_table(lines: Iterable[bytes]) -> Table:
    columns: _Columns = {}
    for line in lines:
        columns.update(_columns.decode(line))
    rank, seq, category = (
        np.array(column, np.int64)
        for column in (columns.get("rank", []), columns.get("seq", []), columns.get("category", []))
    )
    time = np.array(columns.get("time", []), np.float64)
    n = min(map(len, (rank, seq, category, time)))  # ``load`` compares it with the header
    categories = columns.get("categories", [])
    if n and category[:n].max() >= len(categories):
        raise ValueError("field category: an event refers to a missing category")
    if (np.diff(time) < 0).any():
        raise ValueError("field time: the events are not in time order")
    matches, summaries = columns.get("match", []), columns.get("summary", [])
    matched, summarized = [i for i, _ in matches], [entry[0] for entry in summaries]
    if not all(i < n for i in (*matched, *summarized)):
        raise ValueError("field match or summary: an entry refers to a missing event")
    match, summary = np.full((2, n), None)
    match[matched] = [text for _, text in matches]
    summary[summarized] = [*map(_decode_summary, summaries)]
    return Table(rank[:n], seq[:n], category[:n], time[:n], categories, match, summary)


def _decode_summary(fields: _Summary) -> Summary:
    _, values, norm, low, high, size, sampled = fields
    return Summary(tuple(map(float, values)), float(norm), float(low), float(high), size, sampled)


def finite(x: float) -> float | str:
    """Return NaN and infinity as strings that float() parses, because JSON has no such numbers."""
    return x if math.isfinite(x) else str(x)


def _to_plain(s: Summary) -> list[Any]:
    numbers = map(finite, (s.norm, s.min, s.max))
    return [[*map(finite, s.values)], *numbers, s.size, s.sampled]
