"""The narrow waist of distkit: what happened on the ranks, as plain data.

Recorders, simulators and files *produce* events; views, diagnosis, export and
statistics *consume* them. Nothing here imports torch, so a saved trace opens anywhere.

An :class:`Event` is one transition of one operation on one rank. An operation
that was called, handed to the backend and completed leaves three events with
the same ``(rank, seq)``: *scheduled*, *started*, *completed*. A hang is then
no special case: it is a *started* without a *completed*.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

__all__ = ["Event", "Message", "Op", "Span", "State", "Summary", "Trace"]

WORLD = "world"


class _Word(str, Enum):
    """A string enum that prints as its value."""

    def __str__(self) -> str:
        return str(self.value)


class Op(_Word):
    """What was called, in the field's own words."""

    SEND = "send"
    RECV = "recv"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    GATHER = "gather"
    ALL_GATHER = "all_gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    # the parameter server: requests, each answered by one reply
    REGISTER = "register"
    INIT = "init"
    PUSH = "push"
    PULL = "pull"
    # computation marked by the user, see distkit.mark
    MARK = "mark"


P2P = frozenset({Op.SEND, Op.RECV})
REQUESTS = frozenset({Op.REGISTER, Op.INIT, Op.PUSH, Op.PULL})
COLLECTIVES = frozenset(Op) - P2P - REQUESTS - {Op.MARK}


class State(_Word):
    """Where an operation is in its life, as in PyTorch's flight recorder."""

    SCHEDULED = "scheduled"  # called by the user's line
    STARTED = "started"  # handed to the backend
    COMPLETED = "completed"  # done: a receive buffer or a reduced tensor holds its new value
    FAILED = "failed"  # ended with an error, or released by severing its connections


@dataclass(frozen=True, slots=True)
class Summary:
    """A bounded picture of a tensor's values: whole tensors never enter an event.

    ``values`` are at most 64 numbers at equal strides through the flattened
    tensor of ``size`` elements; ``norm`` (Euclidean), ``min`` and ``max`` are over
    the whole tensor, or over a strided sample of it when ``sampled``.
    """

    values: tuple[float, ...]
    norm: float
    min: float
    max: float
    size: int
    sampled: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of one operation on one rank.

    ``time`` is in seconds on a monotonic clock common to the host's processes,
    ``nbytes`` in bytes, ``peer`` a global rank (the other end of a point-to-point
    call or of a request, the root of a rooted collective), ``shape`` and ``dtype``
    those of the tensor touched. ``where`` is the user's ``file:line``; ``label`` names
    a mark or a key. ``match`` ties a request to its reply when the transport
    numbers its messages; otherwise matches are found by :attr:`Trace.matches`.

    >>> e = Event(0, 0, Op.SEND, State.STARTED, 0.5, peer=1, nbytes=8, shape=(2,))
    >>> str(e.op), e.peer
    ('send', 1)
    """

    rank: int
    seq: int
    op: Op
    state: State
    time: float
    peer: int | None = None
    group: str = WORLD
    nbytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    tag: int | None = None
    where: str = ""
    label: str = ""
    match: str | None = None
    summary: Summary | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One operation from call to completion, derived from its events.

    ``end`` is None while it has not completed: then the rank is still in it.
    ``before`` and ``after`` summarise the tensor's values at start and end.
    """

    rank: int
    seq: int
    op: Op
    state: State
    start: float
    end: float | None
    peer: int | None
    group: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    tag: int | None
    where: str
    label: str
    match: str | None
    before: Summary | None
    after: Summary | None

    @property
    def seconds(self) -> float | None:
        """Seconds from start to end, None while it has not ended."""
        return None if self.end is None else self.end - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """One point-to-point transfer: ``sent`` and ``received`` in seconds, None if never.

    ``send`` and ``recv`` are the ``(rank, seq)`` of the two operations.
    """

    src: int
    dst: int
    op: Op
    nbytes: int
    sent: float | None
    received: float | None
    tag: int | None = None
    label: str = ""
    group: str = WORLD
    send: tuple[int, int] | None = None
    recv: tuple[int, int] | None = None


@dataclass(frozen=True)
class Trace(Sequence[Event]):
    """What the ranks of one run said to each other: an immutable sequence of events.

    Args:
        events: in any order; they are kept sorted by time.
        meta: about the run: ``name``, ``world_size``, ``backend``, ``ranks``
            (``{rank: {"name", "role", "host", "pid", "device"}}``), ``groups``
            (``{group: [ranks]}``), ``dropped`` (``{rank: events lost to the bound}``),
            ``sources`` (``{file: text}``).

    >>> t = Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> [(m.src, m.dst, m.nbytes) for m in t.messages]
    [(0, 1, 4)]
    """

    events: tuple[Event, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    def __init__(self, events: Iterable[Event] = (), meta: dict[str, Any] | None = None) -> None:
        ordered = sorted(events, key=lambda e: (e.time, e.rank, e.seq))
        object.__setattr__(self, "events", tuple(ordered))
        object.__setattr__(self, "meta", dict(meta or {}))

    def __len__(self) -> int:
        return len(self.events)

    def __getitem__(self, index: Any) -> Any:
        return self.events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        lost = f", {self.dropped} dropped" if self.dropped else ""
        return (
            f"<Trace: {len(self)} events on {len(self.ranks)} ranks, "
            f"{len(self.messages)} messages, {self.seconds:.3g} s{lost}>"
        )

    def __hash__(self) -> int:
        return id(self)

    # -- queries ------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many events the bounded buffers had to drop."""
        return int(sum(self.meta.get("dropped", {}).values()))

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks of the run, sorted: those announced, and those seen in events."""
        known = range(int(self.meta.get("world_size", 0)))
        named = (int(r) for r in self.meta.get("ranks", {}))
        return sorted({*known, *named, *(e.rank for e in self.events)})

    @property
    def start(self) -> float:
        """Time of the first event [s]."""
        return self.events[0].time if self.events else 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the last."""
        return self.events[-1].time - self.start if self.events else 0.0

    @cached_property
    def by_rank(self) -> dict[int, list[Event]]:
        """The events of each rank, in time order."""
        lanes: dict[int, list[Event]] = {r: [] for r in self.ranks}
        for e in self.events:
            lanes[e.rank].append(e)
        return lanes

    @cached_property
    def spans(self) -> list[Span]:
        """One entry per operation, in the order of their starts."""
        parts: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for e in self.events:
            parts[e.rank, e.seq].append(e)
        return sorted(map(_span, parts.values()), key=lambda s: (s.start, s.rank, s.seq))

    @cached_property
    def matches(self) -> dict[tuple[int, int], str]:
        """``(rank, seq)`` of each operation to the id of what it belongs to.

        The two ends of a message share an id, as do the members of one
        collective. Point-to-point calls match first in, first out, per sender, receiver,
        group and tag; the n-th collective of a rank on a group belongs with the n-th of
        every other member.
        """
        return _match(sorted(self.spans, key=lambda s: (s.rank, s.seq)))

    @cached_property
    def messages(self) -> list[Message]:
        """One entry per point-to-point transfer, in the order of sending."""
        found = [*_p2p_messages(self.spans, self.matches), *_request_messages(self.spans)]
        return sorted(found, key=lambda m: (m.sent if m.sent is not None else math.inf))

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per event; see :class:`Event` for the columns. Needs pandas."""
        import pandas as pd

        columns = ["rank", "seq", "op", "state", "time", "peer", "group", "nbytes", "shape",
                   "dtype", "tag", "where", "label", "match"]  # fmt: skip
        rows = [
            (e.rank, e.seq, str(e.op), str(e.state), e.time - self.start, e.peer, e.group,
             e.nbytes, e.shape, e.dtype, e.tag, e.where, e.label,
             e.match or self.matches.get((e.rank, e.seq)))
            for e in self.events
        ]  # fmt: skip
        frame = pd.DataFrame(rows, columns=columns)
        return frame.astype({"peer": "Int64", "tag": "Int64"})

    # -- files --------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the trace as gzipped JSON lines: no pickle, so opening one runs nothing."""
        from distkit import tracefile

        return tracefile.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a saved trace. Needs no torch.

        Raises:
            TraceFileError: not a trace, corrupt, truncated, or of a newer version.
            FileNotFoundError: there is no such file.
        """
        from distkit import tracefile

        return cls(*tracefile.load(Path(path)))

    def to_chrome(self, path: str | Path) -> Path:
        """Write Chrome trace JSON: open it in https://ui.perfetto.dev or chrome://tracing."""
        from distkit.trace.export import to_chrome

        return to_chrome(self, path)

    def to_html(self, path: str | Path) -> Path:
        """Write a stand-alone replay page: one file, no server, nothing loaded from elsewhere."""
        from distkit.views.page import to_html

        return to_html(self, path)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        from distkit.views import Timeline

        return Timeline(self)._repr_mimebundle_(**kwargs)

    def relabel(self, where: Callable[[str], str]) -> Trace:
        """The same trace with every event's ``where`` passed through a function."""
        names = {e.where: where(e.where) for e in self.events}
        return Trace([replace(e, where=names[e.where]) for e in self.events], self.meta)


# -- deriving spans, matches and messages -------------------------------------


def _span(events: list[Event]) -> Span:
    """Fold the transitions of one operation into a span."""
    first, last = events[0], events[-1]
    started = next((e for e in events if e.state is State.STARTED), first)
    ended = last.state in (State.COMPLETED, State.FAILED)
    return Span(
        rank=first.rank, seq=first.seq, op=first.op, state=last.state, start=first.time,
        end=last.time if ended else None,
        peer=last.peer if last.peer is not None else first.peer,
        group=first.group, nbytes=max(e.nbytes for e in events), shape=first.shape,
        dtype=first.dtype, tag=last.tag if last.tag is not None else first.tag,
        where=first.where, label=first.label, match=first.match or last.match,
        before=started.summary or first.summary, after=last.summary if ended else None,
    )  # fmt: skip


def _match(spans: list[Span]) -> dict[tuple[int, int], str]:
    """Match the operations of a run; ``spans`` in each rank's program order."""
    count: dict[tuple[object, ...], int] = defaultdict(int)
    found = {}
    for s in spans:
        if s.match is not None:
            found[s.rank, s.seq] = s.match
        elif s.op in COLLECTIVES:
            nth = count[s.rank, s.group]
            count[s.rank, s.group] += 1
            found[s.rank, s.seq] = f"{s.group}#{nth}"
        elif s.op in P2P and s.peer is not None:
            src, dst = (s.rank, s.peer) if s.op is Op.SEND else (s.peer, s.rank)
            nth = count[s.op, s.group, src, dst, s.tag]
            count[s.op, s.group, src, dst, s.tag] += 1
            found[s.rank, s.seq] = f"{s.group}:{src}>{dst}:{s.tag}#{nth}"
    return found


def _p2p_messages(
    spans: list[Span], matches: dict[tuple[int, int], str]
) -> Iterator[Message]:
    """Join each send with its receive; an end without a partner stays a half message."""
    ends: dict[str, dict[Op, Span]] = defaultdict(dict)
    for s in spans:
        if s.op in P2P and s.match is None and (s.rank, s.seq) in matches:
            ends[matches[s.rank, s.seq]][s.op] = s
    for pair in ends.values():
        send, recv = pair.get(Op.SEND), pair.get(Op.RECV)
        some = send or recv
        assert some is not None and some.peer is not None
        yield Message(
            src=send.rank if send else some.peer,
            dst=recv.rank if recv else some.peer,
            op=Op.SEND, nbytes=some.nbytes, tag=some.tag, group=some.group, label=some.label,
            sent=send.start if send else None,
            received=recv.end if recv and recv.state is not State.FAILED else None,
            send=(send.rank, send.seq) if send else None,
            recv=(recv.rank, recv.seq) if recv else None,
        )  # fmt: skip


def _request_messages(spans: list[Span]) -> Iterator[Message]:
    """A request with a match id is two messages: there, and the reply back."""
    asked = {s.match: s for s in spans if s.op in REQUESTS and s.match is not None}
    got = {s.match: s for s in spans if s.op is Op.RECV and s.match is not None}
    back = {s.match: s for s in spans if s.op is Op.SEND and s.match is not None}
    for match, s in asked.items():
        if s.peer is None:
            continue
        server, reply = got.get(match), back.get(match)
        me = (s.rank, s.seq)
        yield Message(
            s.rank, s.peer, s.op, server.nbytes if server else s.nbytes, s.start,
            server.end if server else None, s.tag, s.label, s.group,
            me, (server.rank, server.seq) if server else None,
        )  # fmt: skip
        if reply:
            yield Message(
                s.peer, s.rank, s.op, reply.nbytes, reply.start, s.end, s.tag, s.label, s.group,
                (reply.rank, reply.seq), me,
            )  # fmt: skip
