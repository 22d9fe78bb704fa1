"""What workers, servers and the scheduler say to each other.

A :class:`Request` is asked by a node, and answered by one :class:`Answer` that carries the same
``run``, ``node`` and ``number``. Nothing here knows how messages travel (:mod:`.wire`,
:mod:`.transport`) or what they do (:mod:`.server`, :mod:`.scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

#: Names a parameter array: a number or a string, as in MXNet.
Key: TypeAlias = "int | str"


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """The head of every message.

    ``run`` counts the runs of the cluster, ``node`` is the id of the node that asks, ``number``
    counts what that node asked in this run.
    """

    run: int
    node: int
    number: int

    @property
    def match(self) -> str:
        """What a request and its answer have in common, unique in a trace."""
        return f"kv:{self.run}:{self.node}:{self.number}"


class Request(Message):
    """Asked by ``node``."""

    __slots__ = ()


class Answer(Message):
    """Goes to ``node``, which asked."""

    __slots__ = ()


# -- to the scheduler -----------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Register(Request):
    """I am here: who I am, where I listen, and which cluster I believe to be in.

    Workers listen nowhere; servers leave it to the workers to choose ``mode`` and ``bound``
    (the number of elements from which an array is split).
    """

    endpoint: str
    workers: int
    servers: int
    mode: str = ""
    bound: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Barrier(Request):
    """Answer when every worker has asked; this worker's ``nth`` barrier."""

    nth: int


@dataclass(frozen=True, slots=True, eq=False)
class AddressBook(Answer):
    """Everybody is there: tells all about all. ``endpoints`` by node id."""

    mode: str
    bound: int
    endpoints: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class RollCall(Answer):
    """A run has begun: the server is asked to register for it."""


# -- to a server ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Init(Request):
    """The first value of a key.

    Worker 0 gives it; the others send their shape and dtype alone, and hear when it is there.
    ``shape`` is that of the whole array, ``value`` the server's part of it, flat.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    value: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Push(Request):
    """A gradient, computed from ``version`` of the value."""

    key: Key
    shape: tuple[int, ...]
    version: int
    value: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pull(Request):
    """Asks for the value, once it holds every gradient that this worker pushed before."""

    key: Key


@dataclass(frozen=True, slots=True, eq=False)
class Describe(Request):
    """Asks for the shape and dtype of a key that another worker initialised."""

    key: Key


@dataclass(frozen=True, slots=True, eq=False)
class SetOptimizer(Request):
    """From now on gradients update the value by this rule: a name and numbers, never code."""

    name: str
    options: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Reply(Answer):
    """Done. ``version`` counts the updates of the key so far; a pull has its ``value``."""

    version: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    value: Tensor | None = field(default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Error(Answer):
    """Not done, and why: becomes a KVStoreError at the caller."""

    text: str


def stale(request: Message, run: int) -> Error:
    """The answer to a node of an earlier run."""
    return Error(
        request.run, request.node, request.number,
        f"stale node of run {request.run}, the cluster is at run {run}. "
        'Make a new store with kvstore.create(...) inside the current run.',
    )  # fmt: skip


def error(request: Request, text: object) -> Error:
    """A refusal of this request."""
    return Error(request.run, request.node, request.number, str(text))
