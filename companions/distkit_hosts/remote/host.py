"""The kernel's end of a tunnel: the fork server of a connected machine."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.forkserver import ForkServer
from distkit.errors import StartError
from distkit_hosts.clocks import Offset, PeerClock
from distkit_hosts.remote.launching import quoted
from distkit_hosts.remote.tunnel import Tunnel

_REMEDY = "Check the network and the machine: distkit doctor --hosts {}"

#: Time to wait for the reason of a machine's loss [s].
LOSS_DETAILS_WITHIN = 1.0

#: Time for the last messages of a process, which its exit status may overtake [s].
LAST_MESSAGES_WITHIN = 1.0


class Wire(Channel):
    """A tunnel as the channel to a fork server; file descriptors are sent as streams."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, message: Any) -> None:
        """Queue a received message."""
        self._messages.put(message)

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send a message, optionally with a socket, which becomes the local end of a stream."""
        if fd is None:
            self._tunnel.send(message)
        else:
            self._tunnel.open(message, socket.socket(fileno=os.dup(fd)))

    def recv(self) -> Any:
        """Wait for a message; raise EOFError when the tunnel is lost."""
        message = self._messages.get()
        if message is None:
            raise EOFError(self._tunnel.why)
        return message

    def lost(self, why: str) -> None:
        """Wake :meth:`recv` after the tunnel is lost."""
        self._messages.put(None)

    def close(self) -> None:
        """Close the tunnel."""
        self._tunnel.close()


class HostForkServer(ForkServer):
    """Forks on another machine, through its agent.

    Args:
        tunnel: the tunnel to the agent.
        facts: the agent's description of its machine.
    """

    def __init__(self, tunnel: Tunnel, facts: dict[str, Any]) -> None:
        self.facts, self.mirror = facts, ""
        self.processes_there = "all processes there"  # for messages
        self._ended: dict[str, str] = {}  # reason and last output
        #: Returns the launcher's current description of the agent.
        self.launcher_details: Callable[[], str] = str
        self._tunnel, self._wire, self._clock = tunnel, Wire(tunnel), PeerClock()
        tunnel.on_message, tunnel.on_stream = self._on_message, self._on_stream
        tunnel.on_lost, tunnel.on_trip = self._wire.lost, self._clock.add
        super().__init__(self._wire, facts["name"])
        self.command("welcome")

    def command(self, what: str) -> None:
        """Send a command to the agent."""
        with suppress(OSError):
            self._tunnel.send({"do": what})

    def make_folder(
        self,
        processes: int,
        *,
        like: str = "",
        sockets: dict[str, str] | None = None,
    ) -> str:
        """Create a folder on that machine.

        Args:
            processes: number of processes there.
            like: this machine's folder, which receives the files of processes that end there.
            sockets: names of sockets there -> names of sockets in ``like``.
        """
        self.mirror = like
        answer = self._ask({"do": "folder", "processes": processes, "sockets": sockets or {}})
        if "refused" in answer:
            raise StartError(f"on {self.host}: {answer['refused']}")
        return str(answer["folder"])

    def loss_reason(self) -> str:
        """Return the reason why nothing can be forked there."""
        if self.closed:
            return "the cluster was stopped."
        self.lost.wait(LOSS_DETAILS_WITHIN)
        lost = self._ended.get("ended") or self._tunnel.why or "it does not answer"
        output = quoted(self._ended.get("output", ""), self.facts["executable"])
        remedy = (output or " " + _REMEDY.format(self.host)) + self.launcher_details()
        return f"{self.host} is lost, with {self.processes_there}: {lost}.{remedy}"

    def hang_up(self, channel: Channel) -> None:
        """Close the channel of a process that has ended, if its own end has not closed it."""
        timer = threading.Timer(LAST_MESSAGES_WITHIN, channel.hang_up)
        timer.daemon = True
        timer.start()

    def devices(self) -> dict[str, Any]:
        """Return the GPUs found by the agent."""
        return dict(self.facts["gpus"])

    @property
    def clock(self) -> Offset | None:
        """That machine's clock, compared with this one's; None before the first round trip."""
        return self._clock.offset

    # -- from the multiplexer's thread --------------------------------------------------------

    def _on_message(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._ended = message
            return
        for name, data in message.pop("files", {}).items():  # files of an ended process
            with suppress(OSError):
                Path(self.mirror, Path(name).name).write_bytes(data)
        self._wire.put(message)

    def _on_stream(self, message: dict[str, Any]) -> socket.socket:
        """Connect a stream to a socket of this machine."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"{self.mirror}/{message['to']}")
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """End the agent and all processes there."""
        self.closed = True
        self.command("leave")
        self._tunnel.close()
