"""The asking side of a node: what is in flight, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    Answer,
    Departed,
    Error,
    Key,
    Push,
    Reply,
    Request,
    ended,
    error,
)
from distkit.kvstore.transport.link import Link
from distkit.kvstore.transport.recording import Asking, Clocks, Step, wait_begins
from distkit.kvstore.transport.sockets import REFUSED
from distkit.trace.calls import SILENT, STOPPED

#: How many bytes of pushes may be in flight before push waits.
WINDOW = 1 << 28
#: How many bytes of pushes leave together.
LETTER = 1 << 20


class Call(NamedTuple):
    """A request to be made: to which node, of which kind, with which fields after the head."""

    to: int
    kind: type[Request]
    fields: tuple[Any, ...]


@dataclass(slots=True)
class _InFlight:
    to: int
    request: Request
    asking: Asking
    pushed: int  # bytes that push's window counts
    pair: _InFlight | None = None  # of a push the pull that travels with it, and the reverse


class Requests:
    """Numbers requests, sends them, and sorts the answers.

    Args:
        link: carries them.
        run: number of the run.
        node: id of the node that asks.
        local: the other end is this process: the trace shows no message.
        name: of a node, for messages.
        scheduler: the node without which nothing goes on.
    """

    def __init__(
        self,
        link: Link,
        run: int,
        node: int,
        *,
        local: bool = False,
        name: Callable[[int], str] = "node {}".format,
        scheduler: int | None = None,
    ) -> None:
        self.node, self._run, self._link, self._local, self._name = node, run, link, local, name
        self._scheduler = scheduler
        #: Which node answers in the place of each server, and which has copies of its values.
        self._serving: dict[int, int] = {}
        self._backups: dict[int, int] = {}
        #: What is lost with a server, given the keys of requests that it has not answered.
        self.loss: Callable[[int, list[Key]], str] = lambda node, keys: ""
        #: The user's call that comes next, on a worker with gates.
        self.step: Step | None = None
        #: Of a store with backup workers.
        self.clocks: Clocks | None = None
        self._departed: dict[int, str] = {}  # servers that have ended, and how
        self._lost: dict[int, str] = {}  # those whose values nobody has
        self._next = 0
        self._outbox: dict[int, list[Request]] = {}  # by node
        self._in_flight: dict[int, _InFlight] = {}
        self._answers: dict[int, Answer] = {}
        self._refused: dict[Key, str] = {}  # pushes, raised by the next call on that key
        self._pushed = 0  # bytes in flight
        self._closed = False

    def count_from(self, first: int) -> None:
        """Number requests from here on: an earlier process in this place had lower numbers."""
        self._next = first

    def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """Send to several nodes at once, and wait for all the answers.

        Raises:
            KVStoreError: the first refusal among them.
        """
        return self._answers_to([self._put(call) for call in calls])

    def ride(self, calls: Sequence[Call]) -> list[Answer]:
        """Send pushes, each with a pull of the same key, and wait for the answers to the pulls.

        Raises:
            KVStoreError: the first refusal among them, of a push or of a pull.
        """
        return self._answers_to([self._put_pair(call) for call in calls])

    def _answers_to(self, numbers: list[int]) -> list[Answer]:
        try:
            self._send()
            self._give_up()
            self._wait_for(numbers)
        finally:
            answers = [self._answers.pop(n, None) for n in numbers]
            self._abandon(numbers)
        found = [a for a in answers if a is not None]
        for answer in found:
            if isinstance(answer, Error):
                raise KVStoreError(answer.text)
        return found

    def _wait_for(self, numbers: list[int]) -> None:
        wanted, flights = set(numbers), map(self._in_flight.get, numbers)
        watched = None if self._local else wait_begins(f.asking for f in flights if f is not None)
        try:
            while not self._answers.keys() >= wanted:
                self._receive(wait=True)
        finally:
            if watched is not None:
                watched.wait_ends()

    def post(self, call: Call) -> None:
        """Send a push with the next :meth:`dispatch`; if it is refused, :meth:`check` raises.

        When much is on its way already, it is sent at once, and waits.
        """
        self._put(call)
        if self._pushed > LETTER:
            self.dispatch()
        while self._pushed > WINDOW:
            self.dispatch()
            self._receive(wait=True)

    def dispatch(self) -> None:
        """Send what is to be sent, and take the answers that are here."""
        self._send()
        if self._in_flight:
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
        while any(isinstance(f.request, Push) for f in self._in_flight.values()):
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
            self._abandon(list(self._in_flight))
            self._link.close()

    # -- servers that end ---------------------------------------------------------

    def serve_by(self, servers: Iterable[int], backups: dict[int, int]) -> None:
        """These nodes are the servers; ``backups`` says which of them has copies of each."""
        self._serving, self._backups = {n: n for n in servers}, backups
        for node, how in list(self._departed.items()):  # news that came with the address book
            self.depart(node, how)

    def depart(self, node: int, how: str) -> None:
        """A server has ended: its backup answers for it, or its values are lost."""
        self._departed[node] = how
        for server in [n for n, by in self._serving.items() if by == node]:
            backup = self._backups.get(server, node)
            if server == node and backup not in self._departed:
                self._serving[server] = backup
                self._link.redirect(server, backup)
                self._repeat(server)
            else:
                self._lost[server] = how

    def _repeat(self, node: int) -> None:
        """Ask again what was not answered: it is there again, or its backup is in its place."""
        again = [
            f.request
            for f in self._in_flight.values()
            if f.to == node and (f.pair is None or isinstance(f.request, Push))
        ]
        if again:  # a batch without a request is a goodbye
            self._link.send(node, again)

    def _give_up(self) -> None:
        """Refuse what waits for nodes that are gone: without the scheduler, everything."""
        if not (lost := self._link.lost() | self._lost):
            return
        for node, how in lost.items():
            mine = [f for f in self._in_flight.values() if node in (f.to, self._scheduler)]
            self._refuse([f.request for f in mine], node, how)

    def _refuse(self, waiting: list[Request], node: int, how: str) -> None:
        keys = [key for r in waiting if (key := getattr(r, "key", None)) is not None]
        lost = f"cannot be reached ({how})" if how == REFUSED else ended(how)
        why = _WITHOUT_SCHEDULER if node == self._scheduler else ""
        why += f"{STOPPED} " if SILENT in how else ""
        why += self.loss(node, list(dict.fromkeys(keys)))
        for request in waiting:
            flight = self._in_flight.get(request.number)
            if flight is not None:  # else it was settled with its pair
                text = (
                    f"{self._name(node)} {lost} while {self._name(self.node)} waited for the "
                    f"answer to {_called(request)}. {why}Run again: it is replaced."
                )
                self._settle(flight, error(request, text))

    # -- both ways ----------------------------------------------------------------

    def _put(self, call: Call) -> int:
        if self._closed:
            raise KVStoreError(
                f"this store belongs to run {self._run}, which has ended. "
                "Make a new one with kvstore.create(...) inside the function that is run."
            )
        request = call.kind(self._run, self.node, self._next, *call.fields)
        self._take_off(call.to, request)
        self._outbox.setdefault(call.to, []).append(request)
        return request.number

    def _put_pair(self, call: Call) -> int:
        """A push and the pull that travels with it; the pull's number."""
        number = self._put(call)
        push = self._in_flight[number]
        assert isinstance(push.request, Push)
        push.request.pull = self._next
        push.request.receipt = int(push.asking.recorded)  # a trace shows when it was accepted
        pull = push.request.then
        assert pull is not None
        push.pair = self._take_off(call.to, pull)
        push.pair.pair = push
        return pull.number

    def _take_off(self, to: int, request: Request) -> _InFlight:
        self._next += 1
        step, self.step = self.step, None
        asking = Asking(request, None if self._local else to, step)
        size = request.value.nbytes if isinstance(request, Push) else 0
        flight = self._in_flight[request.number] = _InFlight(to, request, asking, size)
        self._pushed += size
        return flight

    def _send(self) -> None:
        letters, self._outbox = self._outbox, {}
        for node, requests in letters.items():
            self._link.send(node, requests)

    def _receive(self, *, wait: bool) -> None:
        for message in self._link.receive(wait=wait):
            if message.run == self._run and isinstance(message, Answer):
                flight = self._in_flight.get(message.number)
                if isinstance(message, Departed):
                    self.depart(message.who, message.how)
                elif flight is not None:  # else nobody waits for it
                    self._settle(flight, message)
        for node in self._link.again():
            self._repeat(node)
        self._give_up()

    def _settle(self, flight: _InFlight, answer: Answer) -> None:
        """It has its answer; that of a pull counts for the push that it travelled with."""
        request = flight.request
        del self._in_flight[request.number]
        self._pushed -= flight.pushed
        pair, flight.pair = flight.pair, None
        if pair is not None:
            pair.pair = None
            if isinstance(pair.request, Push):
                self._settle(pair, Reply(self._run, self.node, pair.request.number))
            elif isinstance(answer, Error):
                self._settle(pair, error(pair.request, answer.text))
        if isinstance(answer, Error):
            flight.asking.failed()
        elif self.clocks is not None and isinstance(request, Push):
            flight.asking.answered(answer, self.clocks.after(flight.to, request, answer))
        else:
            flight.asking.answered(answer)
        if not isinstance(request, Push):
            self._answers[answer.number] = answer
        elif isinstance(answer, Error) and pair is None:
            self._refused.setdefault(request.key, answer.text)

    def _abandon(self, numbers: Iterable[int]) -> None:
        """Nobody waits for these any more; an answer that still comes is dropped."""
        for number in numbers:
            flight = self._in_flight.get(number)
            for one in (flight, flight and flight.pair):
                if one is not None:
                    del self._in_flight[one.request.number]
                    self._pushed -= one.pushed
                    one.asking.failed()


_WITHOUT_SCHEDULER = (
    "Without it no worker can register or meet the others at a barrier, and nobody hears who has "
    "ended, so the run ends. "
)


def _called(request: Request) -> str:
    key = getattr(request, "key", None)
    return type(request).__name__.lower() + ("" if key is None else f" of {key!r}")
