"""The narrow waist of distkit: what happened on the ranks, as plain data.

Recorders, simulators and files *produce* events; views, diagnosis, export and
statistics *consume* them. Nothing here imports torch, so a saved trace opens anywhere.

An :class:`Event` is one transition of one operation on one rank. An operation
that was called, handed to the backend and completed leaves three events with
the same ``(rank, seq)``: *scheduled*, *started*, *completed*. A pause before it is then
a *scheduled* without a *started*, and a hang a *started* without a *completed*.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Event", "Message", "Op", "Span", "State", "Summary"]

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
    numbers its messages; otherwise matches are found by :attr:`distkit.Trace.matches`.

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
