"""Events, the plain data that all parts of distkit exchange.

Recorders, simulators and files *produce* events; views, diagnosis, export and
statistics *consume* them. Nothing here imports torch, so a saved trace opens anywhere.

An :class:`Event` is one state transition of one operation on one rank. An operation that was
called, passed to the backend and completed has three events with the same ``(rank, seq)``:
*scheduled*, *started* and *completed*. While a stepper pauses an operation, it has no *started*
event; while it hangs, it has no *completed* event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

__all__ = ["Event", "Message", "Op", "Span", "State", "Summary"]

WORLD = "world"

#: Prefix of the dtype of a sparse tensor.
SPARSE = "sparse "


class _StringEnum(str, Enum):
    """A string enum that prints as its value."""

    __hash__ = str.__hash__  # Enum's hash is slower and differs from that of an equal string

    def __str__(self) -> str:
        return str(self.value)


class Op(_StringEnum):
    """The kind of an operation, named as in torch.distributed."""

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
    NEW_GROUP = "new_group"  # called by every rank in the world, members or not
    # dist.Store: the method and the keys are attributes
    STORE_WAIT = "store_wait"
    STORE_SET = "store_set"
    # parameter server: requests with one reply each
    REGISTER = "register"
    INIT = "init"
    PUSH = "push"
    PULL = "pull"
    # computation marked with distkit.mark
    MARK = "mark"
    # use of a buffer while an asynchronous operation owns it; ``match`` is that operation's seq
    TOUCH = "touch"


P2P = frozenset({Op.SEND, Op.RECV})
REQUESTS = frozenset({Op.REGISTER, Op.INIT, Op.PUSH, Op.PULL})
COMPUTATION = frozenset({Op.MARK, Op.TOUCH})
STORES = frozenset({Op.STORE_WAIT, Op.STORE_SET})
COLLECTIVES = frozenset(Op) - P2P - REQUESTS - COMPUTATION - STORES
#: Collectives whose sizes may differ between ranks, or that have no size.
UNEVEN = frozenset({Op.ALL_TO_ALL, Op.BARRIER, Op.NEW_GROUP})


class State(_StringEnum):
    """The state of an operation.

    SCHEDULED, STARTED and COMPLETED are the states of PyTorch's flight recorder.
    """

    SCHEDULED = "scheduled"  # called by the user's code
    STARTED = "started"  # passed to the backend
    BLOCKED = "blocked"  # the thread is waiting for it; recorded after 0.1 s (at once if stepped)
    COMPLETED = "completed"  # the output tensors have their new values
    FAILED = "failed"  # raised an error, or was abandoned


@dataclass(frozen=True, slots=True)
class Summary:
    """A bounded summary of a tensor's values; events never contain whole tensors.

    ``values`` are at most 64 evenly spaced elements of the flattened tensor, which has ``size``
    elements. ``norm`` is Euclidean. If ``sampled``, ``min`` and ``max`` are those of a strided
    sample, and ``norm`` is an estimate for the whole tensor.
    """

    values: tuple[float, ...]
    norm: float
    min: float
    max: float
    size: int
    sampled: bool = False


class Attributes(dict[str, Any]):
    """An immutable mapping of attributes that only some operations have.

    The values are strings, numbers, booleans, or tuples of them.

    >>> Attributes(key="w", version=3) == {"key": "w", "version": 3}
    True
    """

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items())) if self else 0

    def __reduce__(self) -> tuple[type[Attributes], tuple[dict[str, Any]]]:
        return Attributes, (dict(self),)

    def _raise_immutable(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("event attributes are immutable; use dataclasses.replace(event, ...)")

    __setitem__ = __delitem__ = __ior__ = _raise_immutable
    update = pop = popitem = setdefault = clear = _raise_immutable


NO_ATTRIBUTES = Attributes()

#: Attributes that are source lines: where a reference implementation and ``wait()`` were called.
LINES = "caller", "waits_at"

#: Attribute with the call stack of a wait as source lines, innermost first.
STACK = "stack"

#: Attributes that the label omits.
_NOT_IN_LABEL = frozenset(
    {*LINES, STACK, "device", "stream", "memory", "device_seconds"} | {"sends", "receives", "lost"}
)


def label_of(operation: Any) -> str:
    """Return an operation's attributes as display text, which is never parsed.

    >>> label_of(Event(2, 0, Op.PUSH, State.STARTED, 0.0, attributes={"key": "w"}))
    'w'
    """
    attributes = operation.attributes
    if not _NOT_IN_LABEL.isdisjoint(attributes):
        attributes = {
            name: value for name, value in attributes.items() if name not in _NOT_IN_LABEL
        }
    match attributes:
        case {"label": name} | {"reduction": name} | {"function": name}:
            return str(name)
        case {"key": key, "version": version}:
            gradients = zip(
                attributes.get("workers", ()), attributes.get("stale_by", ()), strict=True
            )
            workers = ", ".join(f"{w} (stale by {n})" if n else str(w) for w, n in gradients)
            return f"update {key_name(key)} → v{version}{' ← ' * bool(workers)}{workers}"
        case {"key": key}:
            return key_name(key) + ": refused" * ("refused" in attributes)
        case {"mode": mode}:
            return " ".join([mode, *(f"{k}={v}" for k, v in attributes.items() if k != "mode")])
        case {"method": method, "keys": keys}:
            return f"{method} {_format_value(keys)}"
        case {"watched": _}:
            values = (attributes.get(name) for name in ("watched", "name", "checksum"))
            return " ".join(map(str, filter(None, values)))
        case {"keys": _} | {"members": _}:
            return " ".join(map(_format_value, attributes.values()))
    return " ".join(
        name if value is True else f"{name} {value}" for name, value in attributes.items()
    )


def _format_value(value: Any) -> str:
    return ", ".join(map(key_name, value)) if isinstance(value, tuple) else str(value)


def key_name(key: object) -> str:
    """Return a key as display text, with quotes around a string of digits.

    >>> key_name("w"), key_name(7), key_name("7")
    ('w', '7', "'7'")
    """
    return repr(key) if isinstance(key, str) and key.lstrip("-").isdecimal() else str(key)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """The fields that an :class:`Event` and a :class:`Span` have in common.

    ``time`` is in seconds on a monotonic clock shared by the processes on a host, and
    ``nbytes`` in bytes. ``peer`` is a global rank: the other end of a point-to-point
    call or of a request, or the root of a rooted collective. ``shape`` and ``dtype``
    describe the tensor. ``tag`` is the tag of a point-to-point call, ``where`` the user's
    ``file:line``. ``match`` links a request to its reply if the transport
    numbers its messages; otherwise :attr:`distkit.Trace.matches` finds the matches.

    ``attributes`` contains values that only some operations have; ``label`` is its display text:

    ===============================  ============================================================
    operation                        attributes
    ===============================  ============================================================
    mark                             ``label``: the text passed to ``mark``
    mark of ``watch_gradients``      ``watched`` ("gradient", "reference", "weights" or "step"), and
                                     the parameter's ``name`` or the weights' ``checksum`` and the
                                     ``norms`` of the layers, whose names (``layers``) are only in
                                     the first such mark
    mark of a destroyed group        ``destroyed``: the group; ``open``: its calls not waited for
    mark of a server's update        ``key``, the new ``version``, the ``workers`` whose gradients
                                     it applies, and how ``late`` each gradient is, in updates
    collective                       ``reduction`` (unless sum), ``gradients`` (True: sent by a
                                     backward pass), ``function`` (``broadcast_object_list`` …),
                                     ``sends``, ``receives`` (rows of an all_to_all to and from
                                     each rank, if they are uneven)
    new_group                        ``members`` (unless all); ``lost``: number of groups with these
                                     members, created on this line, that are still alive, although
                                     the program keeps no reference to them
    touch                            ``function`` that used the buffer; ``writes``, if it wrote
    store_wait, store_set            ``method``, ``keys``
    register                         ``mode``, and ``staleness``, ``backup``, ``on_crash`` if they
                                     differ from the defaults
    init, push, pull; their replies  ``key``, or ``optimizer``; for a scheduled call, ``keys`` if
                                     there are several; for a reply, ``refused`` or ``dropped``
    any, while scheduled             ``caller``: the line that called the reference implementation
                                     at ``where``, such as ``ring_all_reduce``; stepped runs only
    any, while blocked               ``waits_at``: the line of ``wait()``, if it differs;
                                     ``stack``: the call stack as source lines, innermost first
    any, captured in a CUDA graph    ``captured`` (True); values are not recorded
    any, on a GPU                    ``device`` ("cuda:0"); ``stream``, its number; ``memory``: the
                                     bytes that the rank's tensors occupy there; once completed,
                                     ``device_seconds``: the operation's time on the GPU
    ===============================  ============================================================
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
    attributes: Mapping[str, Any] = NO_ATTRIBUTES
    match: str | None = None

    label = property(label_of)


@dataclass(frozen=True, slots=True)
class Event(CallRecord):
    """One state transition of one operation on one rank.

    ``summary`` describes the values of the operation's tensor. For the other fields, see
    :class:`CallRecord`.

    >>> e = Event(0, 0, Op.SEND, State.STARTED, 0.5, peer=1, nbytes=8, shape=(2,))
    >>> str(e.op), e.peer
    ('send', 1)
    """

    summary: Summary | None = None

    def __post_init__(self) -> None:
        if type(self.attributes) is not Attributes:
            object.__setattr__(self, "attributes", Attributes(self.attributes))


@dataclass(frozen=True, slots=True)
class Span(CallRecord):
    """One operation from start to completion, derived from its events.

    ``start`` is the time when the operation was passed to the backend; until then, the time of the
    call. ``end`` is None until it completes or fails. ``before`` and ``after`` summarize the
    tensor's values at start and end. For the other fields, see :class:`CallRecord`.
    """

    end: float | None = None
    before: Summary | None = None
    after: Summary | None = None

    @property
    def start(self) -> float:
        """Time of the start [s]."""
        return self.time

    @property
    def seconds(self) -> float | None:
        """Seconds from start to end, or None until it ends."""
        return None if self.end is None else self.end - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """One point-to-point transfer.

    ``sent`` and ``received`` are times [s], or None if it was not sent or not received.
    ``send`` and ``recv`` are the ``(rank, seq)`` of the two operations.
    """

    src: int
    dst: int
    op: Op
    nbytes: int
    sent: float | None
    received: float | None
    tag: int | None = None
    attributes: Mapping[str, Any] = NO_ATTRIBUTES
    group: str = WORLD
    send: tuple[int, int] | None = None
    recv: tuple[int, int] | None = None

    label = property(label_of)
