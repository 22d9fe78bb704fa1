"""The asking side of a node: what is in flight, and what came of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from distkit.errors import KVStoreError
from distkit.kvstore.messages import Answer, Error, Key, Message, Push, Request
from distkit.kvstore.recording import Asking

#: So many bytes of pushes may be in flight before push waits.
WINDOW = 1 << 28


class Link(Protocol):
    """Carries requests to nodes and answers back."""

    def send(self, to: int, request: Request) -> None:
        """Hand a request to node ``to``, without waiting."""

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers that are here; at least one if ``wait``."""

    def close(self) -> None:
        """Hang up at once; what was not sent is lost."""


class Call(NamedTuple):
    """A request to be made: to which node, of which kind, with which fields after the head."""

    to: int
    kind: type[Request]
    fields: tuple[Any, ...]


@dataclass
class _InFlight:
    request: Request
    asking: Asking

    @property
    def pushed(self) -> int:
        """Bytes that push's window counts."""
        return self.request.value.nbytes if isinstance(self.request, Push) else 0


class Requests:
    """Numbers requests, sends them, and sorts the answers.

    Args:
        link: carries them.
        run: number of the run.
        node: id of the node that asks.
        local: the other end is this process: the trace shows no message.
    """

    def __init__(self, link: Link, run: int, node: int, *, local: bool = False) -> None:
        self.node, self._run, self._link, self._local = node, run, link, local
        self._numbers = itertools.count()
        self._in_flight: dict[int, _InFlight] = {}
        self._answers: dict[int, Answer] = {}
        self._refused: dict[Key, str] = {}  # pushes, told at the next call on that key
        self._pushed = 0  # bytes in flight
        self._closed = False

    def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """Send to several nodes at once, and wait for all the answers.

        Raises:
            KVStoreError: the first refusal among them.
        """
        numbers = [self._send(call) for call in calls]
        try:
            while not self._answers.keys() >= set(numbers):
                self._receive(wait=True)
        finally:
            answers = [self._answers.pop(n, None) for n in numbers]
            self._abandon(numbers)
        found = [a for a in answers if a is not None]
        for answer in found:
            if isinstance(answer, Error):
                raise KVStoreError(answer.text)
        return found

    def post(self, call: Call) -> None:
        """Send a push and go on; should it be refused, :meth:`check` tells."""
        while self._pushed > WINDOW:
            self._receive(wait=True)
        self._send(call)
        self._receive(wait=False)

    def flush(self) -> None:
        """Wait until every push is acknowledged.

        Raises:
            KVStoreError: one was refused.
        """
        while any(isinstance(f.request, Push) for f in self._in_flight.values()):
            self._receive(wait=True)
        self.check(list(self._refused))

    def check(self, keys: Iterable[Key]) -> None:
        """Tell, once, of a refused push of these keys.

        Raises:
            KVStoreError: there was one.
        """
        for key in keys:
            if key in self._refused:
                raise KVStoreError(self._refused.pop(key))

    def close(self) -> None:
        """Hang up."""
        if not self._closed:
            self._closed = True
            self._abandon(list(self._in_flight))
            self._link.close()

    # -- both ways --------------------------------------------------------------

    def _send(self, call: Call) -> int:
        if self._closed:
            raise KVStoreError(
                f"this store was of run {self._run}, which has ended. "
                "Make a new one with kvstore.create(...) inside the function that is run."
            )
        request = call.kind(self._run, self.node, next(self._numbers), *call.fields)
        flight = _InFlight(request, Asking(request, None if self._local else call.to))
        self._in_flight[request.number] = flight
        self._pushed += flight.pushed
        self._link.send(call.to, request)
        return request.number

    def _receive(self, *, wait: bool) -> None:
        for message in self._link.receive(wait=wait):
            if message.run == self._run and isinstance(message, Answer):
                flight = self._in_flight.pop(message.number, None)
                if flight is not None:
                    self._settle(flight, message)

    def _settle(self, flight: _InFlight, answer: Answer) -> None:
        self._pushed -= flight.pushed
        if isinstance(answer, Error):
            flight.asking.failed()
        else:
            flight.asking.answered(answer)
        if not isinstance(flight.request, Push):
            self._answers[answer.number] = answer
        elif isinstance(answer, Error):
            self._refused.setdefault(flight.request.key, answer.text)

    def _abandon(self, numbers: Iterable[int]) -> None:
        """Nobody waits for these any more; an answer that still comes is dropped."""
        for number in numbers:
            flight = self._in_flight.pop(number, None)
            if flight is not None:
                self._pushed -= flight.pushed
                flight.asking.failed()
