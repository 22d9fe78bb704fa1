"""The client side of a node: its requests in flight and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Departed, Error, Key, Push, Request, Response, error
from distkit.kvstore.transport.link import Link
from distkit.kvstore.transport.recording import InFlight, Step, begin_wait
from distkit.kvstore.transport.session import backup_of

#: Maximum size of a push that stays queued [bytes]; a larger one sends all queued requests.
MAX_QUEUED = 1 << 20


class Call(NamedTuple):
    """The receiver, class and fields of a request that has no number yet."""

    receiver: int
    kind: type[Request]
    fields: tuple[Any, ...]


class Requests:
    """Numbers requests, sends them, and matches the responses.

    Args:
        link: the transport.
        node: id of this node.
        first: number of this node's first request.
        name: returns the name of a node, for error messages.
        servers: the ids of the nodes that hold the values.
        replication: number of servers that hold each value.
    """

    def __init__(
        self,
        link: Link,
        node: int,
        *,
        first: int = 0,
        name: Callable[[int], str] = "node {}".format,
        servers: Sequence[int] = (),
        replication: int = 1,
    ) -> None:
        self.node, self._link, self._name = node, link, name
        #: The ids of the nodes that hold each server's values: the server and any backup.
        self._owners = {
            n: (n, servers[backup_of(i, len(servers))])[:replication] for i, n in enumerate(servers)
        }
        #: The user's next call, if any gate (a callback before a request) is installed.
        self.step: Step | None = None
        self._departed: dict[int, str] = {}  # cause of exit, by node
        self._next = first
        self._outbox: dict[int, list[Request]] = {}  # by node
        self._in_flight: dict[int, InFlight] = {}  # by request number
        #: Errors of pushes, raised by the next call on the key.
        self._push_errors: dict[Key, str] = {}

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """Send requests to several nodes together and return their responses.

        Raises:
            KVStoreError: a request was rejected, or no server is left to answer it; the first error
                is raised.
        """
        in_flight, rec = [self._create(call) for call in calls], None
        try:
            self._send()
            self._fail_unanswerable()
            rec = begin_wait(in_flight)
            while any(f.response is None for f in in_flight):
                self._receive(wait=True)
        finally:
            if rec is not None:
                rec.end_wait()
            self._abandon(in_flight)
        responses = [f.response for f in in_flight if f.response is not None]
        for response in responses:
            if isinstance(response, Error):
                raise KVStoreError(response.text)
        return responses

    def post(self, call: Call) -> None:
        """Queue a push for the next :meth:`dispatch`.

        If a server rejects the push, :meth:`check` raises the error. A push larger than MAX_QUEUED
        sends all queued requests.
        """
        request = self._create(call).request
        if isinstance(request, Push) and request.value.nbytes > MAX_QUEUED:
            self.dispatch()

    def dispatch(self) -> None:
        """Send queued requests and handle responses that have arrived."""
        self._send()
        if self._in_flight:
            self._receive(wait=False)

    def flush(self) -> None:
        """Wait until every push is acknowledged.

        Raises:
            KVStoreError: a push was rejected.
        """
        self.wait_for_pushes()
        self.check(list(self._push_errors))

    def wait_for_pushes(self) -> None:
        """Wait until every push is acknowledged or rejected."""
        self.dispatch()
        while any(isinstance(f.request, Push) for f in self._in_flight.values()):
            self._receive(wait=True)

    def check(self, keys: Iterable[Key]) -> None:
        """Raise the error of a rejected push of these keys, unless it has already been raised.

        Raises:
            KVStoreError: a push was rejected.
        """
        for key in keys:
            if key in self._push_errors:
                raise KVStoreError(self._push_errors.pop(key))

    def close(self) -> None:
        """Close the connections."""
        self._abandon(list(self._in_flight.values()))
        self._link.close()

    # -- nodes that exit -----------------------------------------------------------

    def handle_departure(self, node: int, cause: str) -> None:
        """Handle the exit of a node; if it was a server with a backup, the backup takes over."""
        self._departed[node] = cause
        self._link.disconnect(node)
        self._deliver(node, [f.request for f in self._in_flight.values() if f.receiver == node])

    def _server_for(self, node: int) -> int | None:
        """Return the node that handles requests to a node: the node, its backup, or None."""
        return next((n for n in self._owners.get(node, (node,)) if n not in self._departed), None)

    def _deliver(self, receiver: int, requests: list[Request]) -> None:
        node = self._server_for(receiver)
        if node is not None and requests:
            self._link.send(node, requests, receiver)

    def _fail_unanswerable(self) -> None:
        """Fail requests to servers that have exited, if no backup is left."""
        for node, cause in self._departed.items():
            if self._server_for(node) is not None:
                continue
            unanswerable = [f for f in self._in_flight.values() if f.receiver == node]
            owners = " and ".join(map(self._name, self._owners[node]))
            for f in unanswerable:
                text = (
                    f"{self._name(node)} exited ({cause}) while {self._name(self.node)} waited "
                    f"for the response to its {_request_name(f.request)}. The values that only "
                    f"{owners} had are lost. To survive a crash of one server, create the store "
                    "with replication=2, and servers=2 or more."
                )
                self._complete(f, error(f.request, text))

    # -- sending and receiving ------------------------------------------------------

    def _create(self, call: Call) -> InFlight:
        number, step = self._next, self.step
        self._next, self.step = number + 1, None
        request = call.kind(self.node, number, *call.fields)
        entry = self._in_flight[number] = InFlight(request, call.receiver, step)
        self._outbox.setdefault(call.receiver, []).append(request)
        return entry

    def _send(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for receiver, requests in outbox.items():
            self._deliver(receiver, requests)

    def _receive(self, *, wait: bool) -> None:
        for message in self._link.receive(wait=wait):
            if isinstance(message, Departed):
                self.handle_departure(message.peer, message.cause)
            elif isinstance(message, Response) and message.number in self._in_flight:
                self._complete(self._in_flight[message.number], message)
        self._fail_unanswerable()

    def _complete(self, entry: InFlight, response: Response) -> None:
        del self._in_flight[response.number]
        entry.end(response)
        if isinstance(response, Error) and isinstance(entry.request, Push):
            self._push_errors.setdefault(entry.request.key, response.text)

    def _abandon(self, in_flight: Iterable[InFlight]) -> None:
        """Stop waiting for the responses to these requests; ignore them if they arrive later."""
        for entry in in_flight:
            if entry.response is None:
                del self._in_flight[entry.request.number]
                entry.end()


def _request_name(request: Request) -> str:
    name, key = type(request).__name__.lower(), getattr(request, "key", None)
    return name if key is None else f"{name} of {key!r}"
