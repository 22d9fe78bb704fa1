"""Machines that outlive the kernel: a process of its machine keeps the tunnels to them.

It is forked from the zygote, as the controller is, and is to the agents what the kernel is
otherwise: they do not notice when one kernel ends and another comes. Each kernel gets a
channel to each machine, which goes into the tunnel here.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pickle import dumps, loads
from typing import Any

from distkit.cluster.hosts.fleet import Fleet, Place, Wish
from distkit.cluster.hosts.host import HostForkServer, connect
from distkit.cluster.hosts.tunnel import Tunnel
from distkit.cluster.processes.channel import Channel, lines
from distkit.cluster.processes.forkserver import Child, ForkServer
from distkit.cluster.processes.rank_spec import surroundings
from distkit.errors import StartError
from distkit.trace.calls import named

#: Whoever keeps the tunnels has ended all agents, and what started them, within this time [s].
CLOSED = 10.0


class Passage:
    """In the keeping process: leads between a machine's tunnel and the kernel that is there.

    Args:
        folder: of the cluster, on this machine.
        tunnel: to the agent.
        facts: what the agent has said of its machine.
    """

    def __init__(self, folder: str, tunnel: Tunnel, facts: dict[str, Any]) -> None:
        self.tunnel, self.facts, self.host = tunnel, facts, facts["name"]
        self.words: Callable[[], str] = str
        self.what_is_there = ""
        self._channel: Channel | None = None
        tunnel.on_word, tunnel.on_lost = partial(self._tell, "word"), self._lost
        tunnel.on_trip = lambda *trip: self._tell("trip", trip)
        tunnel.on_line = lambda word: connect(f"{folder}/{word['to']}")
        tunnel.say({"do": "welcome"})

    def lead(self, channel: Channel) -> None:
        """Lead to this kernel from now on."""
        self._channel = channel
        if self.tunnel.why:
            self._lost(self.tunnel.why)
        threading.Thread(target=self._obey, args=(channel,), daemon=True).start()

    def _obey(self, channel: Channel) -> None:
        with suppress(EOFError, OSError):  # the kernel has ended, or the tunnel is lost
            while True:
                word, fd = channel.recv_fd()
                if fd is None:
                    self.tunnel.say(word)
                else:
                    self.tunnel.open(word, socket.socket(fileno=fd))
        channel.close()

    def _tell(self, kind: str, what: Any) -> None:
        with suppress(OSError):  # there is no kernel
            if self._channel is not None:
                self._channel.send((kind, what))

    def _lost(self, why: str) -> None:
        threading.Thread(target=lambda: self._tell("lost", (why, self.words()))).start()

    def close(self) -> None:
        """End the agent."""
        self.tunnel.close()


def serve(lifeline: Channel, folder: str) -> None:
    """Be the process that keeps the tunnels: start the agents, and lead every kernel to them."""
    told, listener = lifeline.recv_fd()
    wish, environ, cwd = loads(told)
    os.environ.clear()
    os.environ.update(environ)
    with suppress(OSError):
        os.chdir(cwd)
    if listener is not None:
        wish = replace(wish, interface=socket.socket(fileno=listener))
    try:
        say = lambda text: lifeline.send(("progress", text))  # noqa: E731
        fleet = Fleet(wish, folder, say, partial(Passage, folder))
    except StartError as error:
        lifeline.send(("failed", str(error)))
        return
    try:
        fleet.start()
        places = fleet.gather()
        while lifeline.recv() == "machines":
            for place in places:
                passage: Any = place.server
                ours, theirs = Channel.pair()
                with theirs:
                    lifeline.send(("machine", (passage.facts, [*place.ranks])), theirs.fileno())
                passage.lead(ours)
            lifeline.send(("all", None))
    except StartError as error:
        lifeline.send(("failed", str(error)))
    finally:
        fleet.close()


class Through:
    """In the kernel: a tunnel that another process keeps; used as :class:`Tunnel` is.

    Args:
        channel: to that process.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self.why = channel, ""
        self._said = ""
        self.on_word: Callable[[Any], None] = lambda word: None
        self.on_line: Callable[[Any], socket.socket] = connect  # not here
        self.on_lost: Callable[[str], None] = lambda why: None
        self.on_trip: Callable[..., None] = lambda *trip: None

    def start(self) -> None:
        """Begin to listen."""
        lines().add(self._channel, self._hear, lambda: self._lose("its tunnel's process ended", ""))

    def say(self, word: Any) -> None:
        """Send a message of plain values.

        Raises:
            OSError: the tunnel is lost.
        """
        self._send(word)

    def open(self, word: Any, sock: socket.socket) -> None:
        """Begin a line from ``sock``.

        Raises:
            OSError: the tunnel is lost.
        """
        with sock:
            self._send(word, sock.fileno())

    def _send(self, word: Any, fd: int | None = None) -> None:
        if self.why:
            raise BrokenPipeError(self.why)
        self._channel.send(word, fd)

    def close(self) -> None:
        """Let go of it."""
        self._channel.hang_up()

    def words(self) -> str:
        """What whoever started the agent has said of its end."""
        return self._said

    def _hear(self, message: tuple[str, Any]) -> None:
        kind, what = message
        if kind == "word":
            self.on_word(what)
        elif kind == "trip":
            self.on_trip(*what)
        else:
            self._lose(*what)

    def _lose(self, why: str, said: str) -> None:
        if not self.why:
            self.why, self._said = why, said
            self.on_lost(why)


class KeptFleet:
    """In the kernel: a :class:`Fleet` that another process keeps.

    Args:
        progress: called with what is waited for.
        child: the process, if an earlier kernel has started it.
    """

    def __init__(self, progress: Callable[[str], None], child: Child | None = None) -> None:
        self._progress, self.child = progress, child

    def start(self, fork: ForkServer, folder: str, wish: Wish) -> None:
        """Begin; returns at once."""
        self.child = fork.fork(f"{__name__}:serve", folder=folder, log="fleet.log")
        around, listener = surroundings(), None
        if isinstance(wish.interface, socket.socket):
            listener, wish = wish.interface.fileno(), replace(wish, interface="")
        self.child.channel.send(dumps((wish, around["environ"], around["cwd"])), listener)

    def gather(self) -> list[Place]:
        """The machines, when all are there.

        Raises:
            StartError: one cannot be had.
        """
        assert self.child is not None
        places = list[Place]()
        self.child.channel.send("machines")
        while True:
            (kind, what), fd = self.child.channel.recv_fd()
            if kind == "progress":
                self._progress(what)
            elif kind == "failed":
                raise StartError(what)
            elif fd is None:
                return places
            else:
                through = Through(Channel(socket.socket(fileno=fd)))
                server = HostForkServer(through, what[0])
                server.words, server.what_is_there = through.words, named(what[1])
                through.start()
                places.append(Place(server, what[1]))

    @property
    def pid(self) -> int:
        """The process that keeps them; 0 if it has not been started."""
        return 0 if self.child is None else self.child.pid

    def leave(self) -> None:
        """Let go of them."""
        if self.child is not None:
            self.child.let_go()

    def close(self) -> None:
        """End all agents, and what has started them."""
        if self.child is not None:
            with suppress(OSError):
                self.child.channel.send("close")
            self.child.wait(CLOSED)
            self.leave()
