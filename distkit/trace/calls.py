"""Calls as text, and the rules for matching calls of a collective. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from distkit.events import (
    COLLECTIVES,
    COMPUTATION,
    P2P,
    REQUESTS,
    SPARSE,
    STORES,
    Event,
    Op,
    Span,
    State,
)

#: An object with the fields of a call: an event, a span, or a rank's state.
Called = Any


class Channel(NamedTuple):
    """A sequence in which operations match in order: a group's collectives, or one rank to another.

    >>> str(Channel("world")), str(Channel("world", 0, 1, 7))
    ('world', 'world:0>1:7')
    """

    group: str
    src: int | None = None
    dst: int | None = None
    tag: int | None = None

    def __str__(self) -> str:
        return self.group if self.src is None else f"{self.group}:{self.src}>{self.dst}:{self.tag}"


def channel_of(rank: int, it: Called) -> tuple[Channel, int]:
    """Return the channel of a collective or point-to-point call, and its side of the channel.

    The n-th operation of a side matches the n-th of every other side. Each member of a group is a
    side of its collectives; messages have two sides, receiver (0) and sender (1).
    """
    if it.op in COLLECTIVES:
        return Channel(it.group), rank
    src, dst = (rank, it.peer) if it.op is Op.SEND else (it.peer, rank)
    return Channel(it.group, src, dst, it.tag), int(it.op is Op.SEND)


_HAVE_SOURCE = {Op.RECV, Op.BROADCAST, Op.SCATTER}


def call(it: Called) -> str:
    """Return an operation as a call in source code.

    >>> from distkit.events import State
    >>> call(Event(2, 0, Op.RECV, State.STARTED, 0.0, peer=0, tag=7))
    'recv(src=0, tag=7)'
    >>> call(Event(2, 0, Op.PUSH, State.SCHEDULED, 0.0, attributes={"keys": ("w", "b")}))
    "push(['w', 'b'])"
    >>> got = {"method": "get", "keys": ("ready",)}
    >>> call(Event(2, 0, Op.STORE_WAIT, State.STARTED, 0.0, attributes=got))
    "store.get('ready')"
    """
    if it.op is None:
        return ""
    facts = it.attributes
    if it.op in REQUESTS:
        return _request(it)
    if it.op in STORES:
        return f"store.{facts.get('method', '')}({keys(facts.get('keys', ()))})"
    name = facts.get("function", it.op)
    given = [facts["reduction"]] if "reduction" in facts else []
    if "members" in facts:
        given.append(str([*facts["members"]]))
    if it.peer is not None and it.op in P2P | COLLECTIVES:
        given.append(f"{'src' if it.op in _HAVE_SOURCE else 'dst'}={it.peer}")
    elif it.op is Op.RECV:
        given.append("src=any")
    if it.tag and it.op in P2P:
        given.append(f"tag={it.tag}")
    return f"{name}({', '.join(given)})"


def wait_of(it: Called) -> str:
    """Return the ``wait()`` in which a rank is blocked, if on a line of its own; else "".

    >>> from distkit.events import State
    >>> facts = {"waits_at": "In[5]:6"}
    >>> sent = Event(0, 0, Op.SEND, State.BLOCKED, 0.0, peer=1, where="In[5]:4", attributes=facts)
    >>> wait_of(sent)
    'wait() of isend, line 4'
    """
    if it.op is None or "waits_at" not in it.attributes or "device" in it.attributes:
        return ""
    line = it.where.rpartition(":")[2]
    return f"wait() of {'i' * (it.op in P2P)}{it.op}, line {line}"


def op_name(it: Called) -> str:
    """Return the operation's name in source code.

    >>> from distkit.events import State
    >>> got = {"method": "get", "keys": ("ready",)}
    >>> op_name(Event(2, 0, Op.STORE_WAIT, State.STARTED, 0.0, attributes=got))
    'store.get'
    """
    return call(it).partition("(")[0] if it.op in STORES else str(it.op)


def _request(it: Called) -> str:
    """Return a request to a parameter server as a call."""
    facts = it.attributes
    if it.op is Op.REGISTER:
        return f"kvstore.create({facts.get('mode', '')!r})"
    if "optimizer" in facts:
        return f"set_optimizer({facts['optimizer']})"
    return f"{it.op}({keys(facts.get('keys') or (facts.get('key', ''),))})"


def keys(names: Sequence[Any]) -> str:
    """Return the keys of a request as in source code; "…" stands for omitted keys.

    >>> keys(["w"]), keys((0, 1, "…", 9))
    ("'w'", '[0, 1, …, 9]')
    """
    shown = [name if name == "…" else repr(name) for name in names]
    return shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"


def at(where: str) -> str:
    """Return a line as part of a sentence: " at train.py:31"; "" if unknown."""
    return f" at {where}" if where else ""


def raised_at(text: str, where: str) -> str:
    """Return an exception and its line as part of a sentence.

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


def seen(it: Event | Span) -> str:
    """Return the last known position of a rank that ended without an exception.

    >>> from distkit.trace.log import EventLog
    >>> trace = EventLog([Event(1, 4, Op.PUSH, State.COMPLETED, 0.0, attributes={"key": "w"})])
    >>> seen(trace.spans[0])
    "last seen after push('w')"
    """
    return f"last seen {_STATE_WORDS.get(it.state, 'calling')} {call(it)}{at(it.where)}"


def last_call(spans: Iterable[Span], rank: int) -> Span | None:
    """Return the latest call of a rank."""
    calls = (s for s in spans if s.rank == rank and s.op not in COMPUTATION)
    return max(calls, key=lambda s: s.seq, default=None)


#: Marks the end of a process that hung.
SILENT = "missed heartbeats"

#: Remedy for a process that hung.
STOPPED = (
    "Look for what stopped it: SIGSTOP, a debugger, or swapping because memory is full; a process "
    "that computes sends heartbeats, however long it takes. If such a pause is expected, give "
    "dk.Cluster a longer heartbeat_timeout."
)


def silence(seconds: float) -> str:
    """Return that a process hung, as part of a sentence.

    >>> silence(30.0)
    'missed heartbeats for 30 s and was killed'
    """
    return f"{SILENT} for {seconds:g} s and was killed"


# -- matching calls -----------------------------------------------------------------

#: Operations whose sizes may differ between ranks.
UNEQUAL = {Op.ALL_TO_ALL, Op.BARRIER, Op.NEW_GROUP}


def share(it: Event | Span) -> int:
    """Return the size that must be equal on all ranks, in bytes.

    For a scatter and for sparse tensors, whose number of stored elements may differ, it is the
    number of elements of the shape.
    """
    by_shape = it.op is Op.SCATTER or it.dtype.startswith(SPARSE)
    return math.prod(it.shape) if by_shape else it.nbytes


def difference(one: Event | Span, other: Event | Span) -> str:
    """Return the aspect in which two ranks' calls of one collective differ; "" if they agree.

    It is "op", "members" (of a new group), "root", "dtype", "size" or "reduction": aspects that
    cause hangs come before those that only produce wrong values.

    >>> from distkit.events import State
    >>> one, other = (
    ...     Event(r, 0, Op.ALL_REDUCE, State.STARTED, 0.0, nbytes=4 * n, shape=(n,), dtype="int32",
    ...           attributes=facts)
    ...     for r, n, facts in ((0, 1, {"reduction": "max"}), (1, 2, {}))
    ... )
    >>> difference(one, other)
    'size'
    """
    facts, others = one.attributes.get, other.attributes.get
    if one.op is not other.op or facts("function") != others("function"):
        return "op"
    if one.op is Op.NEW_GROUP:
        return "members" if facts("members") != others("members") else ""
    if one.peer != other.peer:
        return "root"
    if one.dtype and other.dtype and ((one.nbytes and other.nbytes) or one.op not in UNEQUAL):
        if one.dtype != other.dtype:
            return "dtype"
        if one.op not in UNEQUAL and share(one) != share(other):
            return "size"
    return "reduction" if facts("reduction") != others("reduction") else ""


def never_meet(one: Event | Span, other: Event | Span) -> bool:
    """Return whether two calls never match; a different reduction only produces wrong values."""
    return difference(one, other) not in ("", "reduction")
