"""A store in this process: the same server, reached without a socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from distkit.consistency import Synchronous
from distkit.kvstore.protocol.messages import Message, Reply, Request
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.transport.recording import updating


class LocalLink:
    """A server of one worker, at the other end of a function call."""

    def __init__(self) -> None:
        self._server = KVServer(Synchronous(), workers=[0], watch=updating)
        self._answers = deque[Message]()

    def send(self, to: int, requests: Sequence[Request]) -> None:
        """Have them answered at once."""
        for request in requests:
            self._answers += map(_copy, self._server.handle(request))

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers to what was sent since."""
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def renew(self, node: int) -> None:
        """Nobody takes its place."""

    def lost(self) -> dict[int, str]:
        """Nobody: it is here."""
        return {}

    def again(self) -> set[int]:
        """Nobody was away."""
        return set()

    def close(self) -> None:
        """Forget everything."""
        self._answers.clear()


def _copy(answer: Message) -> Message:
    """A pulled value belongs to the worker: the server keeps its own."""
    if isinstance(answer, Reply) and answer.value is not None:
        return replace(answer, value=answer.value.clone())
    return answer
