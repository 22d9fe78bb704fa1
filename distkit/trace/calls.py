"""Formats calls as text and defines when the calls of a collective match. No side effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distkit.events import (
    COLLECTIVES,
    COMPUTATION,
    P2P,
    REQUESTS,
    SPARSE,
    STORES,
    UNEVEN,
    CallRecord,
    Op,
    Span,
    State,
)

if TYPE_CHECKING:
    from distkit.trace.columns import Category


class Channel(NamedTuple):
    """A sequence of operations that match in order: a group's collectives, or a pair's messages.

    >>> str(Channel("world")), str(Channel("world", 0, 1, 7))
    ('world', 'world:0>1:7')
    """

    group: str
    src: int | None = None
    dst: int | None = None
    tag: int | None = None

    def __str__(self) -> str:
        return self.group if self.src is None else f"{self.group}:{self.src}>{self.dst}:{self.tag}"


def channel_of(rank: int, record: CallRecord | Category) -> tuple[Channel, int]:
    """Return the channel of a collective or point-to-point call, and its side of the channel.

    The n-th operation of a side matches the n-th of every other side. Each member of a group is a
    side of its collectives; messages have two sides, receiver (0) and sender (1).
    """
    if record.op in COLLECTIVES:
        return Channel(record.group), rank
    src, dst = (rank, record.peer) if record.op is Op.SEND else (record.peer, rank)
    return Channel(record.group, src, dst, record.tag), int(record.op is Op.SEND)


_HAVE_SOURCE = {Op.RECV, Op.BROADCAST, Op.SCATTER}


def call(record: CallRecord | Category) -> str:
    """Return an operation as a call in source code.

    >>> from distkit.events import Event, State
    >>> call(Event(2, 0, Op.RECV, State.STARTED, 0.0, peer=0, tag=7))
    'recv(src=0, tag=7)'
    >>> call(Event(2, 0, Op.PUSH, State.SCHEDULED, 0.0, attributes={"keys": ("w", "b")}))
    "push(['w', 'b'])"
    >>> attributes = {"method": "get", "keys": ("ready",)}
    >>> call(Event(2, 0, Op.STORE_WAIT, State.STARTED, 0.0, attributes=attributes))
    "store.get('ready')"
    """
    attributes = record.attributes
    if record.op in REQUESTS:
        return _request(record)
    if record.op in STORES:
        return f"store.{attributes.get('method', '')}({keys(attributes.get('keys', ()))})"
    name = attributes.get("function", record.op)
    args = [attributes["reduction"]] if "reduction" in attributes else []
    if "members" in attributes:
        args.append(str([*attributes["members"]]))
    if record.peer is not None and record.op in P2P | COLLECTIVES:
        args.append(f"{'src' if record.op in _HAVE_SOURCE else 'dst'}={record.peer}")
    elif record.op is Op.RECV:
        args.append("src=any")
    if record.tag and record.op in P2P:
        args.append(f"tag={record.tag}")
    return f"{name}({', '.join(args)})"


def wait_of(record: CallRecord | Category) -> str:
    """Return the ``wait()`` in which a rank is blocked, if it is on a separate line; else "".

    >>> from distkit.events import Event, State
    >>> line = {"waits_at": "In[5]:6"}
    >>> sent = Event(0, 0, Op.SEND, State.BLOCKED, 0.0, peer=1, where="In[5]:4", attributes=line)
    >>> wait_of(sent)
    'wait() for isend, line 4'
    """
    if "waits_at" not in record.attributes or "device" in record.attributes:
        return ""
    line = record.where.rpartition(":")[2]
    return f"wait() for {'i' * (record.op in P2P)}{record.op}, line {line}"


def op_name(record: CallRecord | Category) -> str:
    """Return the operation's name in source code.

    >>> from distkit.events import Event, State
    >>> attributes = {"method": "get", "keys": ("ready",)}
    >>> op_name(Event(2, 0, Op.STORE_WAIT, State.STARTED, 0.0, attributes=attributes))
    'store.get'
    """
    return call(record).partition("(")[0] if record.op in STORES else str(record.op)


def _request(record: CallRecord | Category) -> str:
    """Return a request to a parameter server as a call."""
    attributes = record.attributes
    if record.op is Op.REGISTER:
        return f"kvstore.create({attributes.get('mode', '')!r})"
    if "optimizer" in attributes:
        return f"set_optimizer({attributes['optimizer']})"
    return f"{record.op}({keys(attributes.get('keys') or (attributes.get('key', ''),))})"


def keys(names: Sequence[Any]) -> str:
    """Return the keys of a request as they appear in source code; "…" represents omitted keys.

    >>> keys(["w"]), keys((0, 1, "…", 9))
    ("'w'", '[0, 1, …, 9]')
    """
    items = [name if name == "…" else repr(name) for name in names]
    return items[0] if len(items) == 1 else f"[{', '.join(items)}]"


def at(where: str) -> str:
    """Return a line for use in a sentence: " at train.py:31", or "" if unknown."""
    return f" at {where}" if where else ""


def raised_at(text: str, where: str) -> str:
    """Return an exception and its line for use in a sentence.

    >>> raised_at("ValueError: ranks are 0 to 1.", "In[3]:1")
    'ValueError: ranks are 0 to 1 at In[3]:1'
    """
    return f"{text.removesuffix('.') if where else text}{at(where)}"


#: Position of a rank relative to its last call, by the call's last recorded state.
_STATE_WORDS = {
    State.SCHEDULED: "before",
    State.BLOCKED: "waiting in",
    State.COMPLETED: "after",
    State.FAILED: "after",
}


def last_seen(record: CallRecord) -> str:
    """Return the last known position of a rank that ended without an exception.

    >>> from distkit.events import Event
    >>> from distkit.trace.log import EventLog
    >>> trace = EventLog([Event(1, 4, Op.PUSH, State.COMPLETED, 0.0, attributes={"key": "w"})])
    >>> last_seen(trace.spans[0])
    "last seen after push('w')"
    """
    return f"last seen {_STATE_WORDS.get(record.state, 'calling')} {call(record)}{at(record.where)}"


def last_call(spans: Iterable[Span], rank: int) -> Span | None:
    """Return the latest call of a rank."""
    return max(
        (s for s in spans if s.rank == rank and s.op not in COMPUTATION),
        key=lambda s: s.seq,
        default=None,
    )


# -- matching calls -----------------------------------------------------------------


def comparable_size(record: CallRecord) -> int:
    """Return the size that must be the same on all ranks, in bytes.

    For a scatter or a sparse tensor, return the number of elements in the shape instead, because
    the number of bytes may differ between ranks.
    """
    uses_shape = record.op is Op.SCATTER or record.dtype.startswith(SPARSE)
    return math.prod(record.shape) if uses_shape else record.nbytes


def difference(one: CallRecord, other: CallRecord) -> str:
    """Return the aspect in which two ranks' calls of one collective differ, or "" if they agree.

    The result is the first of "op", "members" (of a new group), "root", "dtype", "size" and
    "reduction" that differs.

    >>> from distkit.events import Event, State
    >>> one, other = (
    ...     Event(r, 0, Op.ALL_REDUCE, State.STARTED, 0.0, nbytes=4 * n, shape=(n,), dtype="int32",
    ...           attributes=attributes)
    ...     for r, n, attributes in ((0, 1, {"reduction": "max"}), (1, 2, {}))
    ... )
    >>> difference(one, other)
    'size'
    """
    attribute, other_attribute = one.attributes.get, other.attributes.get
    if one.op is not other.op or attribute("function") != other_attribute("function"):
        return "op"
    if one.op is Op.NEW_GROUP:
        return "members" if attribute("members") != other_attribute("members") else ""
    if one.peer != other.peer:
        return "root"
    if one.dtype and other.dtype and ((one.nbytes and other.nbytes) or one.op not in UNEVEN):
        if one.dtype != other.dtype:
            return "dtype"
        if one.op not in UNEVEN and comparable_size(one) != comparable_size(other):
            return "size"
    return "reduction" if attribute("reduction") != other_attribute("reduction") else ""


def never_match(one: CallRecord, other: CallRecord) -> bool:
    """Return whether two calls cannot match.

    Calls that differ only in their reduction match, but the result is wrong.
    """
    return difference(one, other) not in ("", "reduction")
