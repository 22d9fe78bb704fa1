"""Messages between workers, servers and the scheduler.

A node sends a :class:`Request`; one :class:`Answer` with the same ``node`` and ``number`` comes
back. Nothing here knows how messages travel (:mod:`.wire`, :mod:`.transport`) or what they do
(:mod:`.server`, :mod:`.scheduler`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct
from torch import Tensor

from distkit.kvstore.protocol.terms import Terms
from distkit.trace.calls import SILENT

#: Names a parameter array: a number or a string, as in MXNet.
Key: TypeAlias = int | str

#: The change of an optimizer that counts whenever it comes.
ALWAYS = -1

#: A worker that replaces one that ended numbers its requests from here, the next one from twice
#: this: the number of a request tells the life that sent it.
LIFE = 1 << 40


class Message(Struct, array_like=True, tag=True, forbid_unknown_fields=True, eq=False):
    """The head of every message.

    Nobody changes one that was sent; to enforce that would triple the cost of making it.

    ``node`` is the id of the node that asks, ``number`` counts its requests.
    """

    node: int
    number: int

    @property
    def match(self) -> str:
        """The identifier that a request shares with its answer, unique in a trace."""
        return f"kv:{self.node}:{self.number}"


class Request(Message):
    """Asked by ``node``."""


class Answer(Message):
    """Goes to ``node``, which asked."""


# -- to the scheduler -----------------------------------------------------------


class Register(Request):
    """Take part in the run: as which node, and where it listens.

    Workers listen nowhere; servers leave it to the workers to choose the ``terms``. ``number`` is
    :data:`LIFE` times the number of processes that were this node before. ``pid`` is its process.
    """

    endpoint: str
    terms: Terms | None = None
    pid: int = 0


class Barrier(Request):
    """Answer when every worker has asked: the run's ``nth`` barrier.

    The answer's ``version`` says how many the run has passed.
    """

    nth: int


class Note(Request):
    """Store a text under a name; without a text, return the one that is stored."""

    name: str
    text: str | None = None


class NoteStored(Answer):
    """The text that is stored under the name, "" if there is none."""

    text: str


#: How a worker departs that has done its work.
FINISHED = "finished"


class Departed(Answer):
    """``who`` has ended, and how; requests of whoever takes its place count from ``first``.

    Servers hear it of all nodes, workers of servers. Of one that has :data:`FINISHED` ``first`` is
    the last request.
    """

    who: int
    how: str
    first: int


class AddressBook(Answer):
    """All nodes have registered; ``endpoints`` by node id.

    ``barriers`` counts the barriers that the run has passed.
    """

    terms: Terms
    endpoints: dict[int, str]
    barriers: int = 0


# -- to a server ----------------------------------------------------------------


class Init(Request):
    """The first value of a key.

    The ``giver`` gives it; the others send their shape and dtype alone, and wait for it.
    ``shape`` is that of the whole array, ``value`` the server's part of it, flat.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    value: Tensor | None = None
    giver: int = 0


class Push(Request):
    """A gradient, computed from ``version`` of the value.

    With a ``threshold`` it is packed (:mod:`.compression`). ``once`` names a push of a function
    that may run again, on any worker: the function's number, how many pushes of the key it made
    before, and the number below which all functions are over.
    """

    key: Key
    shape: tuple[int, ...]
    version: int
    value: Tensor
    threshold: float = 0.0
    once: tuple[int, ...] = ()

    @property
    def author(self) -> tuple[int, int]:
        """Whose push it is, and its number there: each author's numbers rise."""
        return (-1 - self.once[0], self.once[1]) if self.once else (self.node, self.number)


class Pull(Request):
    """Asks for the value, as soon as this worker may see it."""

    key: Key


class AtBarrier(Request):
    """This worker is about to wait at a barrier: meanwhile nobody waits for its gradients."""


class SetOptimizer(Request):
    """From now on gradients update values by this rule: a name and plain values, never code.

    ``change``: 0 for the first rule; n for the n-th change, which every worker sends: one that
    comes after a later change is ignored; :data:`ALWAYS` for a change that one worker sends.
    ``keys``: those that it is for; none for all without one of their own.
    """

    name: str
    options: dict[str, Any]
    change: int = 0
    keys: tuple[Key, ...] = ()


class Assign(Request):
    """From now on this is the value of a key: the server's part of it, flat."""

    key: Key
    value: Tensor


#: What changes a server's values, or how they will change.
Change: TypeAlias = Push | AtBarrier | SetOptimizer | Assign | Departed | Init


class Copy(Request):
    """From server ``node`` to its backup: handle this message as I did."""

    message: Change


class Reply(Answer):
    """Done. ``version`` counts the updates of the key so far; a pull has its ``value``.

    ``dropped`` counts this worker's gradients of the key that came too late for their round;
    ``clock`` is its clock (:mod:`distkit.consistency`).
    """

    version: int = 0
    value: Tensor | None = None
    dropped: int = 0
    clock: int = 0


class Error(Answer):
    """Not done, and why: becomes a KVStoreError at the caller."""

    text: str


def ended(how: str) -> str:
    """That a node is gone, after its name in a sentence: it has crashed, or hung.

    >>> ended("its connection was lost")
    'has ended (its connection was lost)'
    """
    return how if SILENT in how else f"has ended ({how})"


def error(request: Message, text: object) -> Error:
    """A refusal of this request."""
    return Error(request.node, request.number, str(text))
