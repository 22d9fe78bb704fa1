"""Messages between workers, servers and the scheduler.

A node sends a :class:`Request` and receives one :class:`Response` with the same ``node`` and
``number``; only :class:`Departed` is sent without a request. :mod:`.wire` encodes messages,
:mod:`distkit.kvstore.transport` sends them, and :mod:`.server` and
:mod:`distkit.kvstore.transport.scheduler` handle them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct
from torch import Tensor

from distkit.kvstore.protocol.options import StoreOptions

#: The name of a parameter array: an integer or a string, as in MXNet.
Key: TypeAlias = int | str

#: The n-th replacement of a worker numbers its requests from n times this stride, so a request's
#: number identifies the process that sent it.
INCARNATION_STRIDE = 1 << 40


class Message(Struct, array_like=True, tag=True, forbid_unknown_fields=True, eq=False):
    """The base class of all messages.

    Do not change a message after sending it.

    ``node`` is the id of the node that sent the request, and ``number`` identifies the request
    among those of this node.
    """

    node: int
    number: int

    @property
    def match(self) -> str:
        """The identifier that a request shares with its response, unique in a trace."""
        return f"kv:{self.node}:{self.number}"


class Request(Message):
    """A message sent by ``node``."""


class Response(Message):
    """A message sent to ``node``, usually in reply to its request."""


# -- to the scheduler -----------------------------------------------------------


class Register(Request):
    """Register a node and its endpoint with the scheduler.

    A worker's ``endpoint`` is empty, and a server's ``options`` are None. ``number`` is
    :data:`INCARNATION_STRIDE` times the number of processes that this node had before this one.
    """

    endpoint: str
    options: StoreOptions | None = None


class Barrier(Request):
    """Enter the run's ``nth`` barrier.

    The response is sent once all workers that are still required have entered the barrier. Its
    ``version`` is the number of barriers that the run has passed.
    """

    nth: int


class Note(Request):
    """Store text under a name, or read the stored text if ``text`` is None."""

    name: str
    text: str | None = None


class NoteStored(Response):
    """The text stored under the name, or "" if none is stored."""

    text: str


class Departed(Response):
    """Node ``peer`` has exited; ``first`` is the first request number of its replacement.

    It is sent to servers for every node, and to workers only if the node is a server.
    """

    peer: int
    cause: str
    first: int


class AddressBook(Response):
    """The endpoints of the registered nodes by node id, sent at the start and to replacements.

    ``barriers`` counts the barriers that the run has passed.
    """

    options: StoreOptions
    endpoints: dict[int, str]
    barriers: int = 0


# -- to a server ----------------------------------------------------------------


class Init(Request):
    """Set the first value of a key.

    The ``initializer`` sends the value; the other workers send only shape and dtype and wait for
    the value. ``shape`` is the shape of the whole array, and ``value`` is the server's flat part.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    value: Tensor | None = None
    initializer: int = 0


class Push(Request):
    """Send a gradient that was computed from this ``version`` of the value.

    If ``threshold`` is not 0, the gradient is compressed (:mod:`.compression`). ``once`` identifies
    a push by a function that may run again on any worker. It contains the function's number and the
    number of times that the function has pushed the key.
    """

    key: Key
    shape: tuple[int, ...]
    version: int
    value: Tensor
    threshold: float = 0.0
    once: tuple[int, ...] = ()

    @property
    def author(self) -> tuple[int, int]:
        """The sender (a worker or a function), and the push's number, which increases over time."""
        return (-1 - self.once[0], self.once[1]) if self.once else (self.node, self.number)


class Pull(Request):
    """Get the value as soon as the consistency model allows it."""

    key: Key


class AtBarrier(Request):
    """Announce that this worker is at a barrier, so that no round waits for its gradients.

    Sent only with ``on_crash="replace"``.
    """


class Finished(Request):
    """Announce that this worker's function has ended, so that workers stop waiting for it.

    Sent only with ``on_crash="replace"``.
    """


class SetOptimizer(Request):
    """Set the optimizer, given by its name and plain-data options.

    Unless ``replace`` is set, it must equal the current optimizer, if there is one. It updates the
    ``keys`` or, if ``keys`` is empty, all keys without a separate optimizer.
    """

    name: str
    options: dict[str, Any]
    replace: bool = False
    keys: tuple[Key, ...] = ()


class Assign(Request):
    """Replace the server's part of a key's value; ``value`` is flat."""

    key: Key
    value: Tensor


#: Messages that change a server's values or how it updates them.
Change: TypeAlias = Push | AtBarrier | Finished | SetOptimizer | Assign | Departed | Init


class Copy(Request):
    """Have the backup of server ``node`` handle the same message."""

    message: Change


class Reply(Response):
    """Confirm a request.

    ``version`` is the number of updates of the key. The reply to a pull also contains the server's
    part of the key's ``value``. ``dropped`` is the number of this worker's gradients that arrived
    too late for their round, and ``clock`` is the worker's clock (:mod:`distkit.consistency`).
    """

    version: int = 0
    value: Tensor | None = None
    dropped: int = 0
    clock: int = 0


class Error(Response):
    """Reject a request; the caller raises ``text`` as a KVStoreError."""

    text: str


def error(request: Message, text: object) -> Error:
    """Return the response that rejects this request."""
    return Error(request.node, request.number, str(text))
