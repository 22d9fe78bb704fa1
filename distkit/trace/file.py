"""Saved traces: gzipped JSON lines, so that opening a file runs nothing.

The first line is a header with the format's version, the number of events and what is known of
the run, each further line an object with a column of :class:`distkit.trace.columns.Table`:
``rank``, ``seq``, ``look`` and ``time`` have an element per event, ``looks`` what they look like,
``match`` and ``summary`` what some of them have besides. msgspec checks each field as it reads it.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypedDict, cast

import msgspec
import numpy as np
from msgspec import Meta, Struct

from distkit.errors import TraceFileError
from distkit.events import Attributes, Summary
from distkit.trace.columns import Look, Table
from distkit.trace.info import Count, Number, Rank, RunInfo, Whole
from distkit.trace.log import EventLog, Log

#: Format of saved traces. A reader refuses other versions than its own.
FORMAT, VERSION = "distkit-trace", 3

#: Unpacked, a file has no more bytes than this.
MOST_BYTES = 2**30

_GZIP = b"\x1f\x8b"


def save(trace: EventLog, path: Path) -> Path:
    """Write a trace."""
    with gzip.open(path, "wb", compresslevel=4) as f:
        for line in _encoded(trace):
            f.write(line + b"\n")
    return path


def load(path: Path, kind: type[Log]) -> Log:
    """Read a saved trace.

    Args:
        path: of the file.
        kind: what to make of its events.

    Raises:
        TraceFileError: not a trace, corrupt, truncated, or of another version.
        FileNotFoundError: there is no such file.
    """
    try:
        first, *columns = unpacked(path).splitlines() or [bytearray()]
        head = _head(first, path)
        trace = kind.of(_table(columns), head.meta)
    except (FileNotFoundError, IsADirectoryError, PermissionError, TraceFileError):
        raise
    except (OSError, ValueError, RecursionError) as e:
        raise TraceFileError(
            f"{path}: not a readable distkit trace ({e}). Open a file written by trace.save(path)."
        ) from e
    if len(trace) != head.events:
        raise TraceFileError(
            f"{path}: {len(trace)} of {head.events} events are there. "
            "Copy the file again, or save the trace once more with trace.save(path)."
        )
    return trace


def checked(trace: Log) -> Log:
    """The trace as a saved one would be loaded.

    Raises:
        ValueError: a saved trace may not hold the same.
    """
    head, *columns = _encoded(trace)
    return type(trace).of(_table(columns), msgspec.json.decode(head, type=_Head).meta)


def is_ours(path: Path) -> bool:
    """True if a file begins as :func:`save` writes it, gzipped or not."""
    return f'"{FORMAT}"'.encode() in unpacked(path, 256)


# -- bytes, gzipped or not: a small file can unpack to a huge one ------------------------------


def unpacked(path: Path, size: int | None = None) -> bytearray:
    """The bytes of a file, or the first ``size`` of them.

    Raises:
        TraceFileError: it is damaged, or has more than :data:`MOST_BYTES`.
        OSError: it cannot be read.
    """
    content, end = bytearray(), MOST_BYTES + 1 if size is None else size
    with _opened(path) as file:
        while part := file.read(min(end - len(content), 2**20)):
            content += part
    if len(content) > MOST_BYTES:
        raise TraceFileError(
            f"{path}: unpacked, it has more than {MOST_BYTES:,} bytes. Record fewer steps."
        )
    return content


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as plain:
        is_packed = plain.read(2) == _GZIP
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            yield cast("BinaryIO", file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFileError(
            f"{path}: the file is truncated or damaged. Copy it again, or write it once more."
        ) from error


# -- the header -------------------------------------------------------------------


class _Format(Struct):
    format: str = ""
    version: Annotated[int, Meta(ge=1)] = 1


class _Head(_Format, kw_only=True):
    events: Count
    meta: RunInfo


def _head(line: bytearray, path: Path) -> _Head:
    """Check the first line of a trace file."""
    first = msgspec.json.decode(line, type=_Format)
    if first.format != FORMAT:
        raise ValueError("it does not begin with a trace's header")
    if first.version != VERSION:
        remedy = (
            "Update distkit: pip install --upgrade distkit."
            if first.version > VERSION
            else "Record the run again."
        )
        raise TraceFileError(
            f"{path}: the trace has format {first.version}, this distkit reads {VERSION}. {remedy}"
        )
    return msgspec.json.decode(line, type=_Head)


# -- columns ----------------------------------------------------------------------

_Fact = None | bool | Whole | Number | str
#: NaN and infinity are strings, which float() reads back: JSON has no number for them.
_Odd = float | Literal["nan", "inf", "-inf"]
_Values = Annotated[list[_Odd], Meta(max_length=65_536)]
_Summary = tuple[Count, _Values, _Odd, _Odd, _Odd, Count, bool]


class _Columns(TypedDict, total=False):
    rank: list[Rank]
    seq: list[Whole]
    look: list[Count]
    time: list[Number]
    looks: list[Look]
    match: list[tuple[Count, str]]
    summary: list[_Summary]


_NUMBERS = "version step steps ranks clock dropped staleness backup memory wait_for"
_WORDS = (
    "checksum caller waits_at device label mode method optimizer reduction function watched name"
)
#: The attributes that are computed with, or looked up.
_Known = msgspec.defstruct(
    "_Known",
    [
        ("key", Whole | str, ""),
        ("keys", list[Whole | str], []),
        ("workers", list[Rank], []),
        ("late", list[Count], []),
        ("members", list[Rank], []),
        ("stack", list[str], []),
        ("device_seconds", Number, 0.0),
        *((name, Count, 0) for name in _NUMBERS.split()),
        *((name, str, "") for name in _WORDS.split()),
    ],
)


def _attributes(_: type, found: Any) -> Attributes:
    msgspec.convert(found, _Known)
    return Attributes(msgspec.convert(found, dict[str, _Fact | tuple[_Fact, ...]]))


_columns = msgspec.json.Decoder(_Columns, dec_hook=_attributes)


def _encoded(trace: EventLog) -> Iterator[bytes]:
    """The lines of a file."""
    table = trace.table
    yield msgspec.json.encode(
        _Head(format=FORMAT, version=VERSION, events=len(trace), meta=trace.info)
    )
    yield msgspec.json.encode({"looks": table.looks})
    yield msgspec.json.encode({"match": [*table.match.items()]})
    yield msgspec.json.encode({"summary": [[i, *_plain(s)] for i, s in table.summary.items()]})
    for name in ("rank", "seq", "look", "time"):
        yield msgspec.json.encode({name: getattr(table, name).tolist()})


def _table(lines: Iterable[bytes | bytearray]) -> Table:
    found: _Columns = {}
    for line in lines:
        found.update(_columns.decode(line))
    rank, seq, look = (
        np.array(column, np.int64)
        for column in (found.get("rank", []), found.get("seq", []), found.get("look", []))
    )
    time = np.array(found.get("time", []), np.float64)
    n = min(map(len, (rank, seq, look, time)))  # if that is too few, the header tells
    looks = found.get("looks", [])
    if n and look[:n].max() >= len(looks):
        raise ValueError("field look: an event refers to a template that is not in the file")
    if (np.diff(time) < 0).any():
        raise ValueError("field time: the events are not in order")
    match = dict(found.get("match", []))
    summary = {one[0]: _summary(one) for one in found.get("summary", [])}
    if not all(i < n for i in (*match, *summary)):
        raise ValueError("field match or summary: it refers to an event that is not in the file")
    return Table(rank[:n], seq[:n], look[:n], time[:n], looks, match, summary)


def _summary(found: _Summary) -> Summary:
    _, values, norm, low, high, size, sampled = found
    return Summary(tuple(map(float, values)), float(norm), float(low), float(high), size, sampled)


def finite(x: float) -> float | str:
    """NaN and infinity as strings, which float() reads back: JSON has no number for them."""
    return x if math.isfinite(x) else str(x)


def _plain(s: Summary) -> list[Any]:
    numbers = map(finite, (s.norm, s.min, s.max))
    return [[*map(finite, s.values)], *numbers, s.size, s.sampled]
