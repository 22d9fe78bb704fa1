"""The kernel's end: a fork server on each machine that has connected, and where its ranks go."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.process_host import Offset
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.forkserver import ForkServer
from distkit.errors import StartError
from distkit_hosts.clocks import PeerClock
from distkit_hosts.remote.launching import quoted
from distkit_hosts.remote.tunnel import Tunnel

_LOOK = "Look at the network and at the machine: distkit doctor --hosts {}"

#: The loss of a machine, and what it said before, is known within this time [s].
TOLD = 1.0


class Wire(Channel):
    """A tunnel as the line to a zygote: a file descriptor that goes with a message is a line."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._words: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def hear(self, word: Any) -> None:
        """A word has come."""
        self._words.put(word)

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send one message, and perhaps a socket with it, which becomes a line's end here."""
        if fd is None:
            self._tunnel.say(message)
        else:
            self._tunnel.open(message, socket.socket(fileno=os.dup(fd)))

    def recv(self) -> Any:
        """Wait for one message; EOFError when the tunnel is lost."""
        word = self._words.get()
        if word is None:
            raise EOFError(self._tunnel.why)
        return word

    def broken(self) -> bool:
        """True if the tunnel is lost."""
        return bool(self._tunnel.why)

    def lost(self, why: str) -> None:
        """Nothing more will come."""
        self._words.put(None)

    def close(self) -> None:
        """Break the tunnel."""
        self._tunnel.close()

    def close_here(self) -> None:
        """In a fork of this process: ZeroMQ's sockets are not the fork's."""


class HostForkServer(ForkServer):
    """Forks on another machine, through its agent.

    Args:
        tunnel: to the agent.
        facts: what the agent has said of its machine.
    """

    def __init__(self, tunnel: Tunnel, facts: dict[str, Any]) -> None:
        self.facts, self.mirror = facts, ""
        self.what_is_there = "all processes there"  # for messages
        self._ended: dict[str, str] = {}  # why, and what was said there before
        #: What whoever started the agent says of it now.
        self.words: Callable[[], str] = str
        self._tunnel, self._wire, self._clock = tunnel, Wire(tunnel), PeerClock()
        tunnel.on_word, tunnel.on_line = self._on_word, self._on_line
        tunnel.on_lost, tunnel.on_trip = self._wire.lost, self._clock.add
        super().__init__(self._wire, facts["name"])
        self.say("welcome")

    def say(self, what: str) -> None:
        """Send the agent a bare word."""
        with suppress(OSError):
            self._tunnel.say({"do": what})

    def make_folder(
        self,
        processes: int,
        controller: bool = False,
        *,
        like: str = "",
        sockets: dict[str, str] | None = None,
    ) -> str:
        """A folder on that machine.

        Args:
            processes: that are to work there.
            controller: not used: the controller is the kernel's neighbour.
            like: this machine's folder: gets the last words of processes that end there.
            sockets: names of sockets there, and of those in ``like`` to which they lead.
        """
        self.mirror = like
        answer = self._ask({"do": "folder", "processes": processes, "sockets": sockets or {}})
        if "refused" in answer:
            raise StartError(f"on {self.host}: {answer['refused']}")
        return str(answer["folder"])

    def loss_reason(self) -> str:
        """The reason why nothing can be forked there."""
        if self.closed:
            return "the cluster was stopped."
        self._lost.wait(TOLD)
        lost = self._ended.get("ended") or self._tunnel.why or "it does not answer"
        said = quoted(self._ended.get("said", ""), self.facts["executable"])
        remedy = said or " " + _LOOK.format(self.host)
        return f"{self.host} is lost, with {self.what_is_there}: {lost}.{remedy}{self.words()}"

    def devices(self) -> dict[str, Any]:
        """What its agent has found."""
        return dict(self.facts["gpus"])

    @property
    def clock(self) -> Offset | None:
        """That machine's clock, compared with this one's; None before the first round trip."""
        return self._clock.offset

    # -- from the relay's thread --------------------------------------------------------------

    def _on_word(self, word: dict[str, Any]) -> None:
        if "ended" in word:
            self._ended = word
            return
        for name, data in word.pop("files", {}).items():  # the last words of a process that ended
            with suppress(OSError):
                Path(self.mirror, Path(name).name).write_bytes(data)
        self._wire.hear(word)

    def _on_line(self, word: dict[str, Any]) -> socket.socket:
        """A connection that leads to a socket of this machine."""
        near = socket.socket(socket.AF_UNIX)
        try:
            near.connect(f"{self.mirror}/{word['to']}")
        except OSError:
            near.close()
            raise
        return near

    def close(self) -> None:
        """End the agent, and with it everything there."""
        self.closed = True
        self.say("leave")
        self._tunnel.close()
