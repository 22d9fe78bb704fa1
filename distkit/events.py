"""The narrow waist of distkit: what happened on the ranks, as plain data.

Recorders, simulators and files *produce* events; views, diagnosis, export and
statistics *consume* them. Nothing here imports torch, so a saved trace opens anywhere.

An :class:`Event` is one transition of one operation on one rank. An operation
that was called, handed to the backend and completed leaves three events with
the same ``(rank, seq)``: *scheduled*, *started*, *completed*. A pause before it is then
a *scheduled* without a *started*, and a hang a *started* without a *completed*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from distkit.diagnosis.findings import Finding
    from distkit.trace.columns import Table

__all__ = ["Event", "Message", "Op", "Span", "State", "Summary", "Trace"]

WORLD = "world"

#: How the dtype of a tensor that holds only some of its elements begins.
SPARSE = "sparse "


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
    NEW_GROUP = "new_group"  # every rank of the world calls it, members or not
    # a key-value store: ``label`` has the method and the keys
    STORE_WAIT = "store_wait"
    STORE_SET = "store_set"
    # the parameter server: requests, each answered by one reply
    REGISTER = "register"
    INIT = "init"
    PUSH = "push"
    PULL = "pull"
    # computation marked by the user, see distkit.mark
    MARK = "mark"
    # the buffer of a receive that is still open was used; ``match`` is that receive's seq
    TOUCH = "touch"


P2P = frozenset({Op.SEND, Op.RECV})
REQUESTS = frozenset({Op.REGISTER, Op.INIT, Op.PUSH, Op.PULL})
COMPUTATION = frozenset({Op.MARK, Op.TOUCH})
STORES = frozenset({Op.STORE_WAIT, Op.STORE_SET})
COLLECTIVES = frozenset(Op) - P2P - REQUESTS - COMPUTATION - STORES


class State(_Word):
    """Where an operation is in its life, as in PyTorch's flight recorder."""

    SCHEDULED = "scheduled"  # called by the user's line
    STARTED = "started"  # handed to the backend
    BLOCKED = "blocked"  # the rank's thread waits for it, noted when that takes a while
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
    a mark, a key, a reduction other than sum ("max"), or "gradients" for what a backward pass
    sends by itself. ``match`` ties a request to its reply when the transport
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
    """One operation from start to completion, derived from its events.

    ``start`` is when it went to the backend, or was called if it has not gone there yet.
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
            ``without_values`` (``{rank: operations whose values cost too much to look at}``),
            ``threads`` (``{rank: [groups whose collectives several of its threads call]}``),
            ``unseen`` (``{rank: {what: count}}``: what was not recorded, or is not judged),
            ``ends`` (``{rank: {"how", "text", "where"}}`` of the ranks that have ended: "returned",
            "raised", "died", or "released" by others' failure or an interrupt),
            ``sources`` (``{file: text}``).

    >>> t = Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> [(m.src, m.dst, m.nbytes) for m in t.messages]
    [(0, 1, 4)]
    """

    events: Sequence[Event] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    def __init__(self, events: Iterable[Event] = (), meta: dict[str, Any] | None = None) -> None:
        ordered = sorted(events, key=lambda e: (e.time, e.rank, e.seq))
        object.__setattr__(self, "events", tuple(ordered))
        object.__setattr__(self, "meta", dict(meta or {}))

    @classmethod
    def of(cls, table: Table, meta: dict[str, Any] | None = None) -> Trace:
        """A trace whose events are made when somebody looks at them.

        Args:
            table: the events in columns, in the order of time.
            meta: as above.
        """
        trace = cls((), meta)
        trace.__dict__.update(events=table, table=table)
        return trace

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
    def table(self) -> Table:
        """The events in columns: an array per fact."""
        from distkit.trace.columns import Table

        return Table.of(self.events)

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
        from distkit.trace import operations

        return operations.spans(self.events)

    @cached_property
    def matches(self) -> dict[tuple[int, int], str]:
        """``(rank, seq)`` of each operation to the id of what it belongs to.

        The two ends of a message share an id, as do the members of one
        collective. Point-to-point calls match first in, first out, per sender, receiver,
        group and tag; the n-th collective of a rank on a group belongs with the n-th of
        every other member.
        """
        from distkit.trace import operations

        return operations.matches(self.spans)

    @cached_property
    def messages(self) -> list[Message]:
        """One entry per point-to-point transfer, in the order of sending."""
        from distkit.trace import operations

        return operations.messages(self.spans, self.matches)

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per event; see :class:`Event` for the columns. Needs pandas."""
        import pandas as pd

        columns = [
            "rank",
            "seq",
            "op",
            "state",
            "time",
            "peer",
            "group",
            "nbytes",
            "shape",
            "dtype",
            "tag",
            "where",
            "label",
            "match",
        ]
        rows = [
            (
                e.rank,
                e.seq,
                str(e.op),
                str(e.state),
                e.time - self.start,
                e.peer,
                e.group,
                e.nbytes,
                e.shape,
                e.dtype,
                e.tag,
                e.where,
                e.label,
                e.match or self.matches.get((e.rank, e.seq)),
            )
            for e in self.events
        ]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.astype({"peer": "Int64", "tag": "Int64"})

    def diagnose(self) -> list[Finding]:
        """What went wrong, and what to do about it: the most important first."""
        from distkit.diagnosis.diagnose import diagnose

        return diagnose(self)

    # -- files --------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the trace as gzipped JSON lines: no pickle, so opening one runs nothing."""
        from distkit.trace import file

        return file.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a saved trace. Needs no torch.

        Raises:
            TraceFileError: not a trace, corrupt, truncated, or of a newer version.
            FileNotFoundError: there is no such file.
        """
        from distkit.trace import file

        return file.load(Path(path))

    def to_chrome(self, path: str | Path) -> Path:
        """Write Chrome trace JSON: open it in https://ui.perfetto.dev or chrome://tracing."""
        from distkit.trace.chrome import to_chrome

        return to_chrome(self, path)

    def to_html(self, path: str | Path) -> Path:
        """Write a stand-alone replay page: one file, no server, nothing loaded from elsewhere."""
        from distkit.views.widget.page import to_html

        return to_html(self, path)

    def _ipython_display_(self) -> None:
        from distkit.views import Timeline

        Timeline(self)._ipython_display_()
