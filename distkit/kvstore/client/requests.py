"""The asking side of a node: what is in flight, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Answer, Departed, Error, Key, Push, Request, ended
from distkit.kvstore.protocol.messages import error as refusal
from distkit.kvstore.transport.link import LocalLink, ZmqLink
from distkit.kvstore.transport.recording import Asking, Step, wait_begins
from distkit.kvstore.transport.session import backup_of
from distkit.trace.calls import SILENT, STOPPED

#: How many bytes of pushes may be in flight before push waits.
WINDOW = 1 << 28
#: How many bytes of pushes leave together.
LETTER = 1 << 20
#: How many keys a message names.
_NAMED = 12


class Call(NamedTuple):
    """A request to be made: to which node, of which kind, with which fields after the head."""

    to: int
    kind: type[Request]
    fields: tuple[Any, ...]


@dataclass(slots=True)
class _Flight:
    """A request on its way, until its answer is here."""

    to: int
    request: Request
    asking: Asking
    nbytes: int  # that push's window counts
    answer: Answer | None = None


class Requests:
    """Numbers requests, sends them, and sorts the answers.

    Args:
        link: carries them.
        node: id of the node that asks.
        first: number of its first request.
        local: the other end is this process: the trace shows no message.
        name: of a node, for messages.
        scheduler: the node without which nothing goes on.
        servers: the nodes that hold the values.
        replication: on how many of them each value is.
    """

    def __init__(
        self,
        link: LocalLink | ZmqLink,
        node: int,
        *,
        first: int = 0,
        local: bool = False,
        name: Callable[[int], str] = "node {}".format,
        scheduler: int | None = None,
        servers: Sequence[int] = (),
        replication: int = 1,
    ) -> None:
        self.node, self._link, self._local, self._name = node, link, local, name
        self._scheduler = scheduler
        #: The nodes that have a server's values: itself, and its backup.
        self._owners = {
            n: (n, servers[backup_of(i, len(servers))])[:replication] for i, n in enumerate(servers)
        }
        #: The keys of which a server has a part.
        self.held_by: Callable[[int], list[Key]] = lambda server: []
        #: The user's call that comes next, on a worker with gates.
        self.step: Step | None = None
        #: Whether the trace is to say a worker's clock: it does not follow from the other events.
        self.clocks = False
        self._gone: dict[int, str] = {}  # nodes that have ended, and how
        self._next = first
        self._outbox: dict[int, list[Request]] = {}  # by node
        self._flights: dict[int, _Flight] = {}  # by number
        self._refused: dict[Key, str] = {}  # pushes, raised by the next call on that key
        self._pushed = 0  # bytes in flight
        self._closed = False

    def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """Send to several nodes at once, and wait for all the answers.

        Raises:
            KVStoreError: the first refusal among them.
        """
        flights, waiting = [self._put(call) for call in calls], None
        try:
            self._send()
            self._give_up()
            waiting = None if self._local else wait_begins(f.asking for f in flights)
            while any(f.answer is None for f in flights):
                self._receive(wait=True)
        finally:
            if waiting is not None:
                waiting.wait_ends()
            self._abandon(flights)
        answers = [f.answer for f in flights if f.answer is not None]
        for answer in answers:
            if isinstance(answer, Error):
                raise KVStoreError(answer.text)
        return answers

    def post(self, call: Call) -> None:
        """Send a push with the next :meth:`dispatch`; if it is refused, :meth:`check` raises.

        When much is on its way already, it is sent at once, and waits.
        """
        self._put(call)
        if self._pushed > LETTER:
            self.dispatch()
        while self._pushed > WINDOW:
            self._receive(wait=True)

    def dispatch(self) -> None:
        """Send what is to be sent, and take the answers that are here."""
        self._send()
        if self._flights:
            self._receive(wait=False)

    def flush(self) -> None:
        """Wait until every push is acknowledged.

        Raises:
            KVStoreError: one was refused.
        """
        self.arrive()
        self.check(list(self._refused))

    def arrive(self) -> None:
        """Wait until every push is acknowledged, or refused."""
        self.dispatch()
        while any(isinstance(f.request, Push) for f in self._flights.values()):
            self._receive(wait=True)

    def check(self, keys: Iterable[Key]) -> None:
        """Raise, once, the refusal of a push of these keys.

        Raises:
            KVStoreError: there was one.
        """
        for key in keys:
            if key in self._refused:
                raise KVStoreError(self._refused.pop(key))

    def close(self) -> None:
        """Close the connections."""
        if not self._closed:
            self._closed = True
            self._abandon(list(self._flights.values()))
            self._link.close()

    # -- nodes that end -----------------------------------------------------------

    def depart(self, node: int, how: str) -> None:
        """A node has ended: a server's backup answers for it, or its values are lost."""
        self._gone[node] = how
        self._link.disconnect(node)
        self._repeat(node)

    def _serving(self, to: int) -> int | None:
        """The node that answers for another, or for itself; None if there is none any more."""
        return next((n for n in self._owners.get(to, (to,)) if n not in self._gone), None)

    def _deliver(self, to: int, requests: list[Request]) -> None:
        node = self._serving(to)
        if node is not None and requests:  # a batch without a request is a goodbye
            self._link.send(node, requests, to)

    def _repeat(self, to: int) -> None:
        """Send again what was not answered: the node is there again, or its backup serves."""
        self._deliver(to, [f.request for f in self._flights.values() if f.to == to])

    def _give_up(self) -> None:
        """Refuse what waits for nodes that are gone: without the scheduler, everything."""
        for node, how in self._gone.items():
            if self._serving(node) is not None:
                continue
            mine = [f for f in self._flights.values() if node in (f.to, self._scheduler)]
            why = self._loss(node) if mine else ""
            why += f"{STOPPED} " if SILENT in how else ""
            for f in mine:
                text = (
                    f"{self._name(node)} {ended(how)} while {self._name(self.node)} waited for the "
                    f"answer to {_called(f.request)}. {why}Run again: it is replaced."
                )
                self._settle(f, refusal(f.request, text))

    def _loss(self, node: int) -> str:
        """What is lost with a node, and what would have kept it."""
        if node == self._scheduler:
            return _WITHOUT_SCHEDULER
        keys = self.held_by(node)
        what = ", ".join(map(repr, keys[:_NAMED])) or "no key yet"
        what += f" and {len(keys) - _NAMED} more" * (len(keys) > _NAMED)
        owners, remedy = self._owners[node], ""
        who = " and ".join(map(self._name, owners))
        if len(owners) == 1:
            remedy = "To survive this, create the store with replication=2, and servers=2 or more. "
        return (
            f"Lost with it: the values of {what}, which only {who} had. "
            f"{remedy}Save what kv.pull returns, to init from it later. "
        )

    # -- both ways ----------------------------------------------------------------

    def _put(self, call: Call) -> _Flight:
        if self._closed:
            raise KVStoreError(
                "this store belongs to a run that has ended. "
                "Make a new one with kvstore.create(...) inside the function that is run."
            )
        number, step = self._next, self.step
        self._next, self.step = number + 1, None
        request = call.kind(self.node, number, *call.fields)
        asking = Asking(request, None if self._local else call.to, step)
        size = request.value.nbytes if isinstance(request, Push) else 0
        flight = self._flights[number] = _Flight(call.to, request, asking, size)
        self._pushed += size
        self._outbox.setdefault(call.to, []).append(request)
        return flight

    def _send(self) -> None:
        letters, self._outbox = self._outbox, {}
        for to, requests in letters.items():
            self._deliver(to, requests)

    def _receive(self, *, wait: bool) -> None:
        for message in self._link.receive(wait=wait):
            if isinstance(message, Departed):
                self.depart(message.who, message.how)
            elif isinstance(message, Answer) and message.number in self._flights:
                self._settle(self._flights[message.number], message)
        for node, how in self._link.changes():
            if how is None:
                for to in {node, *self._owners}:
                    if self._serving(to) == node:
                        self._repeat(to)
            elif node == self._scheduler:  # of servers the scheduler tells
                self.depart(node, how)
        self._give_up()

    def _settle(self, flight: _Flight, answer: Answer) -> None:
        self._land(flight)
        request, flight.answer = flight.request, answer
        if not isinstance(answer, Error):
            flight.asking.answered(answer, clock=self.clocks and isinstance(request, Push))
            return
        flight.asking.failed()
        if isinstance(request, Push):
            self._refused.setdefault(request.key, answer.text)

    def _abandon(self, flights: Iterable[_Flight]) -> None:
        """Nobody waits for these any more; an answer that still comes is dropped."""
        for flight in flights:
            if flight.answer is None:
                self._land(flight)
                flight.asking.failed()

    def _land(self, flight: _Flight) -> None:
        del self._flights[flight.request.number]
        self._pushed -= flight.nbytes


_WITHOUT_SCHEDULER = (
    "Without it no worker can register or meet the others at a barrier, and nobody learns who has "
    "ended, so the run ends. "
)


def _key(request: Request) -> Key | None:
    return getattr(request, "key", None)


def _called(request: Request) -> str:
    name = type(request).__name__.lower()
    return name if _key(request) is None else f"{name} of {_key(request)!r}"
