"""The narrow waist of distkit: what happened on the ranks, as plain data.

Recorders, simulators and files *produce* events; views, diagnosis, export and
statistics *consume* them. Nothing here imports torch, so a saved trace opens anywhere.

An :class:`Event` is one transition of one operation on one rank. An operation
that was called, handed to the backend and completed leaves three events with
the same ``(rank, seq)``: *scheduled*, *started*, *completed*. A pause before it is then
a *scheduled* without a *started*, and a hang a *started* without a *completed*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

__all__ = ["Event", "Message", "Op", "Span", "State", "Summary"]

WORLD = "world"

#: How the dtype of a tensor that holds only some of its elements begins.
SPARSE = "sparse "


class _Word(str, Enum):
    """A string enum that prints as its value."""

    __hash__ = str.__hash__  # Enum's own is slow, and not that of an equal string

    def __str__(self) -> str:
        return str(self.value)


class Op(_Word):
    """The operation, in the field's own terms."""

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
    # a key-value store: the method and the keys are attributes
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
    """The state of an operation, as in PyTorch's flight recorder."""

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


class Attributes(dict[str, Any]):
    """Facts about an operation that most others do not have, by name. They do not change.

    The values are text, numbers, truth values, or tuples of them.

    >>> Attributes(key="w", version=3) == {"key": "w", "version": 3}
    True
    """

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items())) if self else 0

    def __reduce__(self) -> tuple[type[Attributes], tuple[dict[str, Any]]]:
        return Attributes, (dict(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("attributes of an event do not change; use dataclasses.replace(event, ...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = setdefault = clear = _refuse


NO_ATTRIBUTES = Attributes()

#: The attributes that name a line: where a page was called, and where ``wait()`` of a request.
LINES = "caller", "waits_at"

#: The attribute that names several: those that led to a wait, the innermost first.
STACK = "stack"

#: What is said of a call beside its name.
_ASIDE = frozenset(
    {*LINES, STACK, "device", "stream", "memory", "device_seconds"}
    | {"sends", "receives", "zeroes_gradient", "lost"}
)


def label_of(it: Any) -> str:
    """An operation's attributes in words, as a picture shows them. Nothing reads them back.

    >>> label_of(Event(2, 0, Op.PUSH, State.STARTED, 0.0, attributes={"key": "w"}))
    'w'
    """
    facts = it.attributes
    if not _ASIDE.isdisjoint(facts):
        facts = {name: value for name, value in facts.items() if name not in _ASIDE}
    match facts:
        case {"label": name} | {"reduction": name} | {"function": name}:
            return str(name)
        case {"key": key, "version": version}:
            late = zip(facts.get("workers", ()), facts.get("late", ()), strict=True)
            givers = ", ".join(f"{w} ({n} late)" if n else str(w) for w, n in late)
            return f"update {key_name(key)} → v{version}{' ← ' * bool(givers)}{givers}"
        case {"key": key}:
            return key_name(key) + ": refused" * ("refused" in facts)
        case {"step": step}:
            return f"step {step}/{facts['steps']}" if "steps" in facts else f"step {step}"
        case {"mode": mode}:
            return " ".join([mode, *(f"{k}={v}" for k, v in facts.items() if k != "mode")])
        case {"method": method, "keys": keys, **ranks}:
            return f"{method} {_shown((*keys, *ranks.values()))}"
        case {"watched": _}:
            told = (facts.get(name) for name in ("watched", "name", "checksum"))
            return " ".join(map(str, filter(None, told)))
        case {"keys": _} | {"members": _}:
            return " ".join(map(_shown, facts.values()))
    return " ".join(name if value is True else f"{name} {value}" for name, value in facts.items())


def _shown(value: Any) -> str:
    return ", ".join(map(key_name, value)) if isinstance(value, tuple) else str(value)


def key_name(key: object) -> str:
    """A key as a picture names it: a string of digits is no number.

    >>> key_name("w"), key_name(7), key_name("7")
    ('w', '7', "'7'")
    """
    return repr(key) if isinstance(key, str) and key.lstrip("-").isdecimal() else str(key)


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of one operation on one rank.

    ``time`` is in seconds on a monotonic clock common to the host's processes,
    ``nbytes`` in bytes, ``peer`` a global rank (the other end of a point-to-point
    call or of a request, the root of a rooted collective), ``shape`` and ``dtype``
    those of the tensor touched. ``tag`` is that of a point-to-point call, ``where`` the user's
    ``file:line``. ``match`` ties a request to its reply when the transport
    numbers its messages; otherwise matches are found by :attr:`distkit.Trace.matches`.

    ``attributes`` are the facts that only some operations have; ``label`` is made of them, for
    people to read:

    ===============================  ============================================================
    operation                        attributes
    ===============================  ============================================================
    mark                             ``label`` as given; or ``step``, ``steps`` (a loop's progress)
    mark of ``watch_gradients``      ``watched`` ("gradient", "alone", "weights" or "step"), and
                                     the parameter's ``name`` or the weights' ``checksum`` and the
                                     ``norms`` of the ``layers``, which the first such mark names
    mark of a destroyed group        ``destroyed``: its name; ``open``: calls on it not waited for
    mark of a server: an update      ``key``, the ``version`` made, the ``workers`` whose gradients
                                     it applies, and how ``late`` each of them is, in updates
    collective                       ``reduction`` (not for sum), ``gradients`` (True: sent by a
                                     backward pass), ``function`` (``broadcast_object_list`` …)
                                     ``sends``, ``receives`` (the rows of an all_to_all for and from
                                     each rank, where they are not all the same)
                                     ``zeroes_gradient`` (True: its backward loses the source's)
    new_group                        ``members`` (not for all); ``lost``: how many groups of the
                                     same line and members the program has lost and not destroyed
    touch                            ``function``: what used the buffer; ``writes``, if it wrote
    store_wait, store_set            ``method``, ``keys``, and of a barrier ``ranks``
    register                         ``mode``, and ``staleness``, ``backup``, ``on_crash`` where
                                     they are not as usual
    init, push, pull; their replies  ``key``, or ``optimizer``; while scheduled perhaps ``keys``; a
                                     push's ``clock``; a reply's ``refused`` or ``dropped``
    any, while scheduled             ``caller``: the line that called the page of ``where``, a
                                     function such as ``ring_all_reduce``; of stepped runs
    any, while blocked               ``waits_at``: the line of ``wait()``, if it is another one;
                                     ``stack``: the lines that led there, the innermost first
    any, on a GPU                    ``device`` ("cuda:0"); ``stream``, its number; ``memory``: the
                                     bytes of the rank's tensors there at that time; once completed
                                     ``device_seconds``: how long the GPU itself was at it;
                                     ``unread``, if the program might have changed its tensors
    ===============================  ============================================================

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
    attributes: Mapping[str, Any] = NO_ATTRIBUTES
    match: str | None = None
    summary: Summary | None = None

    label = property(label_of)

    def __post_init__(self) -> None:
        if type(self.attributes) is not Attributes:
            object.__setattr__(self, "attributes", Attributes(self.attributes))


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
    attributes: Mapping[str, Any]
    match: str | None
    before: Summary | None
    after: Summary | None

    label = property(label_of)

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
    attributes: Mapping[str, Any] = NO_ATTRIBUTES
    group: str = WORLD
    send: tuple[int, int] | None = None
    recv: tuple[int, int] | None = None

    label = property(label_of)
