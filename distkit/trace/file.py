"""Saved traces: gzipped JSON lines, so that opening a file runs nothing.

The first line is a header with the format's version and the number of events, each further
line an object with a column of :class:`distkit.trace.columns.Table`: ``rank``, ``seq``, ``look``
and ``time`` have an element per event, ``looks`` what they look like, ``match`` and ``summary``
what some of them have besides. Before version 3 facts were words in labels, which
:func:`attributes` reads; in version 1 a line was an event.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np

from distkit.errors import TraceFileError
from distkit.events import COLLECTIVES, P2P, REQUESTS, STORES, Attributes, Event, Op, State, Summary
from distkit.trace import fields as tracefields
from distkit.trace.columns import Look, Table
from distkit.trace.log import EventLog, Log

#: Format of saved traces. A reader refuses a larger version than its own.
FORMAT, VERSION = "distkit-trace", 3

#: Unpacked, a file has no more bytes than this.
MOST_BYTES = 2**30

_GZIP = b"\x1f\x8b"


def save(trace: EventLog, path: Path) -> Path:
    """Write a trace."""
    head = {"format": FORMAT, "version": VERSION, "events": len(trace), "meta": trace.meta}
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as f:
        for line in (head, *_columns(trace.table)):
            f.write(json.dumps(line) + "\n")
    return path


def load(path: Path, kind: type[Log]) -> Log:
    """Read a saved trace.

    Args:
        path: of the file.
        kind: what to make of its events.

    Raises:
        TraceFileError: not a trace, corrupt, truncated, or of a newer version.
        FileNotFoundError: there is no such file.
    """
    try:
        parsed = map(json.loads, lines(path))
        head = _head(next(parsed, None), path)
        trace = (
            kind(map(_event, parsed), head["meta"])
            if head["version"] == 1
            else kind.of(_table(parsed, head["version"]), head["meta"])
        )
    except (FileNotFoundError, IsADirectoryError, PermissionError, TraceFileError):
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as e:
        raise TraceFileError(
            f"{path}: not a readable distkit trace ({e}). Open a file written by trace.save(path)."
        ) from e
    if len(trace) != head["events"]:
        raise TraceFileError(
            f"{path}: {len(trace)} of {head['events']} events are there. "
            "Copy the file again, or save the trace once more with trace.save(path)."
        )
    return trace


def is_ours(path: Path) -> bool:
    """True if a file begins as :func:`save` writes it, gzipped or not."""
    return f'"{FORMAT}"'.encode() in unpacked(path, 256)


def _head(head: Any, path: Path) -> dict[str, Any]:
    """Check the first line of a trace file."""
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("it does not begin with a trace's header")
    tracefields.whole(head.get("version"), "version", least=1)
    if head["version"] > VERSION:
        raise TraceFileError(
            f"{path}: the trace has format {head['version']}, this distkit reads up to {VERSION}. "
            "Update distkit: pip install --upgrade distkit."
        )
    tracefields.whole(head.get("events"), "events")
    tracefields.meta(head.get("meta"), "meta")
    return head


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
        _too_large(path)
    return content


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, as :func:`unpacked` has its bytes."""
    left = MOST_BYTES
    with _opened(path) as file:
        while line := file.readline(left + 1):
            left -= len(line)
            if left < 0:
                _too_large(path)
            yield line


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


def _too_large(path: Path) -> NoReturn:
    raise TraceFileError(
        f"{path}: unpacked, it has more than {MOST_BYTES:,} bytes. Record fewer steps."
    )


# -- columns ----------------------------------------------------------------------


def _columns(table: Table) -> Iterator[dict[str, Any]]:
    yield {"looks": table.looks}
    yield {"match": [*table.match.items()]}
    yield {"summary": [[i, *_plain(s)] for i, s in table.summary.items()]}
    for name in ("rank", "seq", "look", "time"):
        yield {name: getattr(table, name).tolist()}


def _table(lines: Iterable[dict[str, Any]], version: int) -> Table:
    parts = {name: values for line in lines for name, values in line.items()}
    kinds = {"rank": "i", "seq": "i", "look": "i", "time": "f"}
    columns = [_array(parts.get(name, []), kind, name) for name, kind in kinds.items()]
    n = min(map(len, columns))  # if that is too few, the header tells
    rank, seq, look, time = (column[:n] for column in columns)
    tracefields.numbers(rank, "rank", 0, tracefields.MOST_RANKS - 1)
    match = dict(parts["match"])
    summary = {i: _summary(*values) for i, *values in parts["summary"]}
    if version == 2:
        valued = {*look[[i for i in summary if i < n]].tolist()}
        looks = [_old_look(i in valued, *values) for i, values in enumerate(parts["looks"])]
    else:
        looks = [_look(*values) for values in parts["looks"]]
    if n and not 0 <= look.min() <= look.max() < len(looks):
        raise ValueError("field look: an event refers to a template that is not in the file")
    if (np.diff(time) < 0).any():
        raise ValueError("field time: the events are not in order")
    of = {*match, *summary}
    if not {*map(type, of)} <= {int} or not all(0 <= i < n for i in of):
        raise ValueError("field match or summary: it refers to an event that is not in the file")
    tracefields.matches(match.values())
    return Table(rank, seq, look, time, looks, match, summary)


def _array(values: Any, kind: str, field: str) -> Any:
    """Whole numbers ("i") or others ("f") as an array."""
    try:
        found = np.array(values or np.zeros(0, kind))
    except (ValueError, OverflowError):  # some of them are lists
        raise tracefields.wrong(field, "a list of numbers", values) from None
    if found.dtype.kind not in (kind, "i") or found.ndim != 1:
        raise tracefields.wrong(field, "a list of numbers", values)
    tracefields.numbers(found, field)
    return found.astype(np.int64 if kind == "i" else np.float64)


def _look(*fields: Any) -> Look:
    if len(fields) != len(Look._fields):
        raise tracefields.wrong("looks", f"{len(Look._fields)} facts", fields)
    tracefields.look(*fields)
    op, state, peer, group, nbytes, shape, dtype, tag, where, attributes = fields
    facts = {k: tuple(v) if type(v) is list else v for k, v in attributes.items()}
    return Look(
        Op(op),
        State(state),
        peer,
        group,
        nbytes,
        tuple(shape),
        dtype,
        tag,
        where,
        Attributes(facts),
    )


def _summary(*fields: Any) -> Summary:
    if len(fields) != len(dataclasses.fields(Summary)):
        raise tracefields.wrong("summary", "values, norm, min, max, size, sampled", fields)
    values, norm, low, high, size, sampled = fields
    tracefields.summary(values, size, sampled)
    return Summary(tuple(map(float, values)), float(norm), float(low), float(high), size, sampled)


def finite(x: float) -> float | str:
    """NaN and infinity as strings, which float() reads back: JSON has no number for them."""
    return x if math.isfinite(x) else str(x)


def _plain(s: Summary) -> list[Any]:
    numbers = map(finite, (s.norm, s.min, s.max))
    return [[*map(finite, s.values)], *numbers, s.size, s.sampled]


# -- versions 1 and 2 -------------------------------------------------------------


def _old_look(valued: bool, *fields: Any) -> Look:
    """From the same facts with a label; ``valued``: whether events that look so have a summary."""
    *rest, label = fields
    tracefields.text(label, "label")
    look = _look(*rest, {})
    facts = attributes(look.op, label, look.tag, look.dtype, valued)
    tag = look.tag if is_tag(look.op, label) else None
    return look._replace(attributes=Attributes(facts), tag=tag)


def _event(row: list[Any]) -> Event:
    rank, seq, op, state, time, peer, group, nbytes, shape, dtype, tag, where, label, match, s = row
    tracefields.rank(rank, "rank")
    tracefields.whole(seq, "seq", least=-tracefields.LARGEST)
    tracefields.number(time, "time")
    look = _old_look(s is not None, op, state, peer, group, nbytes, shape, dtype, tag, where, label)
    if match is not None:
        tracefields.text(match, "match")
    values = None if s is None else _summary(*s)
    return Event(*(rank, seq, *look[:2], time, *look[2:], match, values))


_MARK, _REDUCING = {Op.MARK}, COLLECTIVES - {Op.NEW_GROUP}
# -- labels and tags of versions 1 and 2 -----------------------------------------------------
#
# There the facts of an operation were words: ``update w → v3 ← 0, 1 (2 late)``, ``get ready``. A
# tag was also a push's clock, or how many gradients an answer said were dropped.

#: How labels of some operations read, the special ones first; a group's name is that of the fact.
#: A name in capitals holds for a mark with values, or a request without a tensor.
_FORMS: list[tuple[str, frozenset[Op] | set[Op], str]] = [
    ("", _MARK, r"update (?P<key>.*) → v(?P<version>\d+)(?: ← (?P<late>\d+.*))?"),
    ("", _MARK, r"step (?P<step>\d+)(?:/(?P<steps>\d+))?"),
    ("VALUES", _MARK, r"(?P<watched>gradient|alone) (?P<name>.*)"),
    ("VALUES", _MARK, r"(?P<watched>weights) (?P<checksum>.*)"),
    ("VALUES", _MARK, r"(?P<watched>step)"),
    ("", _MARK, r"(?P<label>.+)"),
    ("", STORES, r"(?P<method>barrier) (?P<keys>.*), (?P<ranks>\d+)"),
    ("", STORES, r"(?P<method>\S*) ?(?P<keys>.*)"),
    ("", {Op.NEW_GROUP}, r"(?P<members>\d+(,\d+)*)"),
    ("", {Op.REGISTER}, r"(?P<mode>\S+)(?P<terms>.*)|"),
    ("EMPTY", {Op.INIT}, r"optimizer (?P<optimizer>.*)"),
    ("", REQUESTS, r"(?P<keys>.*, .*)|(?P<key>.*)"),
    ("", P2P | _REDUCING, r"(?P<function>.*_object.*)|(?P<gradients>gradients)|not a member"),
    ("", P2P, r"(?P<key>.+?)(?P<refused>: refused)?"),
    ("", _REDUCING, r"(?P<reduction>.+)"),
    ("", {Op.TOUCH}, r"(?P<function>.+)"),
]
_GRADIENT = re.compile(r"(\d+)(?: \((\d+) late\))?")
_TERM = re.compile(r"(\w+)=(?:(\d+)|(\w+))")


def attributes(op: Op, label: str, tag: int | None, dtype: str, valued: bool) -> dict[str, Any]:
    """The facts in a label; ``valued``: whether events that look so have a summary.

    >>> attributes(Op.MARK, "update w → v3 ← 0, 1 (2 late)", 2, "", True)
    {'key': 'w', 'version': 3, 'late': (0, 2), 'workers': (0, 1)}
    """
    holds = {"": True, "VALUES": valued or bool(dtype), "EMPTY": not dtype}
    forms = (form for when, ops, form in _FORMS if op in ops and holds[when])
    found = next((f for form in forms if (f := re.fullmatch(form, label, re.DOTALL))), None)
    told = {k: v for k, v in found.groupdict().items() if v is not None} if found else {}
    facts = {name: _VALUES.get(name, str)(text) for name, text in told.items()}
    if "version" in facts:
        late = _GRADIENT.findall(told.get("late", ""))
        facts |= {
            "workers": (*(int(w) for w, _ in late),),
            "late": (*(int(n or 0) for _, n in late),),
        }
    facts |= {k: int(n) if n else word for k, n, word in facts.pop("terms", ())}
    if tag and "key" in facts and op is not Op.MARK:
        facts["dropped" if op in P2P else "clock"] = tag
    return facts


def is_tag(op: Op, label: str) -> bool:
    """True if a tag is that of a point-to-point call."""
    return op in P2P and (not label or "_object" in label)


def _key(name: str) -> int | str:
    """A key from its name: digits were a number, unless they were quoted."""
    if re.fullmatch(r"-?\d{1,15}", name):
        return int(name)
    return name[1:-1] if re.fullmatch(r"'-*\d+'", name) else name


_VALUES: dict[str, Callable[[str], Any]] = {
    "key": _key,
    "keys": lambda text: (*map(_key, text.split(", ")),),
    "members": lambda text: (*map(int, text.split(",")),),
    "terms": _TERM.findall,
    "refused": bool,
    "gradients": bool,
    **dict.fromkeys(("version", "step", "steps", "ranks"), int),
}
