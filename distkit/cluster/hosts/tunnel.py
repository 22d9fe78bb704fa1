"""Many lines over one connection between two machines: what socket pairs are on one.

A process has one :class:`Relay`, a thread that owns a ZeroMQ socket with CurveZMQ: the kernel's
listens, an agent's connects to it. To each machine at the other end there is a :class:`Tunnel`.
Through it go words (picklable messages, in order) and lines (byte streams: a socket here and one
there, which the relays feed from each other). A line's reader that is slow stops its writer:
no more than :data:`WINDOW` bytes of a line are under way. A connection over which nothing came
for :data:`SILENCE` is broken, and with it its tunnel and all its lines. ZeroMQ's own threads ask
and answer, so that a kernel that computes is not taken for dead.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum, auto
from typing import Any

import zmq

from distkit.kvstore.transport.sockets import (
    BROKEN,
    CLOSE_LINGER_MS,
    Ends,
    connection,
    context,
    open_socket,
    receive,
)

#: A connection that was silent for so long [s] is broken: the other machine, or the way to it.
SILENCE = 2.0

#: Bytes of a line that may be under way; read from its socket at once.
WINDOW, PIECE = 1 << 22, 1 << 16

#: How often the clocks of the machines are compared [s]; so many times at once at the beginning.
PERIOD, FIRST = 0.5, 8


class Kind(IntEnum):
    """Kinds of frames. OPEN begins a line, WORD is a message; both carry one."""

    WORD = auto()
    OPEN = auto()
    DATA = auto()
    TAKEN = auto()
    END = auto()
    CLOCK = auto()


_HEAD, _TIMES = struct.Struct("!BQ"), struct.Struct("!ddd")


class Line:
    """A line's end in this process: a socket, what is to be written to it, and how much may come.

    Args:
        sock: is fed with what comes from the other machine; what it gives goes there.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.credit = WINDOW  # bytes that we may send
        self._unwritten: deque[memoryview] = deque()
        self._ended = False  # nothing more will come

    def put(self, data: memoryview) -> None:
        """Note what has come; :meth:`write` passes it on."""
        self._unwritten.append(data)

    def end(self) -> None:
        """The other machine's end is closed."""
        self._ended = True

    @property
    def wants(self) -> int:
        """The events of its socket to wait for."""
        return (zmq.POLLIN if self.credit else 0) | (zmq.POLLOUT if self._unwritten else 0)

    @property
    def over(self) -> bool:
        """True if all has been passed on, and nothing more will come."""
        return self._ended and not self._unwritten

    def read(self) -> bytes | None:
        """What the socket gives now: b"" at its end, None when there is nothing."""
        try:
            data = self.sock.recv(min(self.credit, PIECE))
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self.credit -= len(data)
        return data

    def write(self) -> int | None:
        """Pass on what the socket takes now: how many bytes, None when nobody reads it."""
        done = 0
        while self._unwritten:
            try:
                sent = self.sock.send(self._unwritten[0])
            except BlockingIOError:
                break
            except OSError:
                return None
            done += sent
            self._unwritten[0] = self._unwritten[0][sent:]
            if not self._unwritten[0]:
                self._unwritten.popleft()
        return done


class Tunnel:
    """The words and lines between this process and one on another machine.

    Args:
        relay: of this process.
        peer: the other process's name there.
        first: the number of the first line that this side begins; the other side's differ.
    """

    def __init__(self, relay: Relay, peer: bytes, first: int) -> None:
        self._relay, self.peer, self._next = relay, peer, first
        self.lines: dict[int, Line] = {}
        self._numbering = threading.Lock()
        self.why = ""  # it is lost, once that is told
        #: Called from the relay's thread: with each word, …
        self.on_word: Callable[[Any], None] = lambda word: None
        #: … with that of each line that the other side begins, for the socket that is its end, …
        self.on_line: Callable[[Any], socket.socket] = _refuse
        #: … when it is lost, and with each comparison of the clocks.
        self.on_lost: Callable[[str], None] = lambda why: None
        self.on_trip: Callable[[float, float, float, float], None] = lambda *trip: None

    def say(self, word: Any) -> None:
        """Send a picklable message.

        Raises:
            OSError: the tunnel is lost.
        """
        self._check()
        body = pickle.dumps(word, protocol=5)
        self._relay.do(lambda: self._post(Kind.WORD, 0, body))

    def open(self, word: Any, sock: socket.socket) -> None:
        """Begin a line from ``sock``, which belongs to the relay from now on.

        Raises:
            OSError: the tunnel is lost.
        """
        self._check()
        body = pickle.dumps(word, protocol=5)
        with self._numbering:
            number, self._next = self._next, self._next + 2

        def begin() -> None:
            if self.why:
                sock.close()
                return
            self.lines[number] = Line(sock)
            self._post(Kind.OPEN, number, body)

        self._relay.do(begin)

    def close(self) -> None:
        """Break it from this side."""
        self._relay.do(lambda: self.lose("it was closed"))

    def _check(self) -> None:
        if self.why:
            raise BrokenPipeError(self.why)

    # -- in the relay's thread --------------------------------------------------------------

    def _post(self, kind: int, number: int, body: Any = b"") -> None:
        if not self.why:
            self._relay.post(self, [_HEAD.pack(kind, number), body])

    def ask_time(self) -> None:
        """Compare the clocks."""
        self._post(Kind.CLOCK, 0, _TIMES.pack(time.monotonic(), 0, 0))

    def take(self, frames: list[Any]) -> None:
        """One message of the other side has come."""
        now = time.monotonic()
        kind, number = _HEAD.unpack(frames[0].bytes)
        line = self.lines.get(number)
        match kind:
            case Kind.WORD:
                self.on_word(pickle.loads(frames[1].buffer))
            case Kind.OPEN:
                self._begin(number, pickle.loads(frames[1].buffer))
            case Kind.DATA if line is not None:
                line.put(memoryview(frames[1].bytes))
                self._write(number, line)
            case Kind.TAKEN if line is not None:
                line.credit += int.from_bytes(frames[1].bytes, "big")
            case Kind.END if line is not None:
                line.end()
                self._write(number, line)
            case Kind.CLOCK:
                self._compare(now, *_TIMES.unpack(frames[1].bytes))

    def _begin(self, number: int, word: Any) -> None:
        """The other side begins a line."""
        try:
            self.lines[number] = Line(self.on_line(word))
        except OSError:
            self._post(Kind.END, number)

    def _compare(self, now: float, asked: float, received: float, sent: float) -> None:
        if received:
            self.on_trip(asked, received, sent, now)
        else:
            self._post(Kind.CLOCK, 0, _TIMES.pack(asked, now, time.monotonic()))

    def feed(self, number: int, line: Line, events: int) -> None:
        """A line's socket is ready."""
        if events & (zmq.POLLOUT | zmq.POLLERR):
            self._write(number, line)
        if events & (zmq.POLLIN | zmq.POLLERR) and number in self.lines and line.credit:
            data = line.read()
            if data:
                self._post(Kind.DATA, number, data)
            elif data is not None:
                self._end(number, line)

    def _write(self, number: int, line: Line) -> None:
        done = line.write()
        if done is None or line.over:
            self._end(number, line)
        elif done:
            self._post(Kind.TAKEN, number, done.to_bytes(8, "big"))

    def _end(self, number: int, line: Line) -> None:
        if self.lines.pop(number, None) is not None:
            line.sock.close()
            self._post(Kind.END, number)

    def lose(self, why: str) -> None:
        """It is broken: end all its lines, and tell."""
        if self.why:
            return
        self.why = why
        for line in self.lines.values():
            line.sock.close()
        self.lines.clear()
        self._relay.tunnels.pop(self.peer, None)
        self.on_lost(why)


def _refuse(word: Any) -> socket.socket:
    raise ConnectionRefusedError(f"nobody takes {word}")


class Relay:
    """The thread between the sockets of this process and the machines at the other ends.

    Args:
        endpoint: ``tcp://ADDRESS:*`` to listen there, ``tcp://ADDRESS:PORT`` to connect.
        keys: public and secret key, of both sides.
        listen: which of the two.
        accept: called, in the relay's thread, with each tunnel that begins; before its first word.
        listener: a socket that listens at the endpoint already, perhaps in another network
            namespace. It stays the caller's.
    """

    def __init__(
        self,
        endpoint: str,
        keys: tuple[str, str],
        *,
        listen: bool,
        accept: Callable[[Tunnel], None] = lambda tunnel: None,
        listener: socket.socket | None = None,
    ) -> None:
        self._listens, self._accept = listen, accept
        kind = zmq.ROUTER if listen else zmq.DEALER
        self._socket = open_socket(context(), kind, keys, heartbeat_timeout=SILENCE)
        self.tunnels: dict[bytes, Tunnel] = {}
        self._by: dict[int, bytes] = {}  # connection -> whose
        self._todo: deque[Callable[[], None]] = deque()
        self._woken, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._closed = False
        self._ends = Ends(self._socket)
        if listen:
            self._listen(endpoint, listener)
        else:
            self._socket.connect(endpoint)
        self.endpoint = self._socket.last_endpoint.decode()
        self._thread = threading.Thread(target=self._work, name="distkit-relay", daemon=True)

    def _listen(self, endpoint: str, listener: socket.socket | None) -> None:
        self._socket.router_mandatory = True
        if listener is not None:
            self._socket.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._close()
            raise

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def connect(self) -> Tunnel:
        """The one tunnel of a relay that connects; before :meth:`start`."""
        tunnel = self.tunnels[b""] = Tunnel(self, b"", first=2)
        return tunnel

    def do(self, what: Callable[[], None]) -> None:
        """Have the relay's thread do something, after what it was told before."""
        self._todo.append(what)
        with suppress(OSError):  # it has been woken often enough, or is closed
            os.write(self._bell, b"!")

    def post(self, tunnel: Tunnel, frames: list[Any]) -> None:
        """Send a message to the other end of a tunnel. In the relay's thread."""
        try:
            self._socket.send_multipart([tunnel.peer, *frames] if self._listens else frames)
        except zmq.ZMQError as error:
            tunnel.lose(f"{BROKEN} ({error})")

    def close(self) -> None:
        """Break all tunnels, and end the thread."""

        def leave() -> None:
            self._closed = True

        self.do(leave)
        if self._thread.ident is None:  # not started
            self._close()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._ends.socket.close()
            self._socket.close(linger=CLOSE_LINGER_MS)
            os.close(self._woken)

    # -- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except Exception:
            traceback.print_exc()
        finally:
            for tunnel in list(self.tunnels.values()):
                tunnel.lose("it was closed")
            self._close()

    def _turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        poller, lines = zmq.Poller(), dict[int, tuple[Tunnel, int, Line]]()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ends.socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        for tunnel, number, line in self._lines():
            if line.wants:
                lines[line.sock.fileno()] = tunnel, number, line
                poller.register(line.sock.fileno(), line.wants)
        events = poller.poll(self._until_next_comparison())
        for ready, what in events:
            if ready == self._woken:
                os.read(self._woken, 4096)
            elif ready in lines:
                tunnel, number, line = lines[ready]
                if tunnel.lines.get(number) is line:
                    tunnel.feed(number, line, what)
        while self._todo:
            self._todo.popleft()()
        while (frames := receive(self._socket)) is not None:
            self._take(frames)
        self._hear_ends()

    def _lines(self) -> Iterator[tuple[Tunnel, int, Line]]:
        for tunnel in self.tunnels.values():
            for number, line in tunnel.lines.items():
                yield tunnel, number, line

    _compared = 0.0  # when the clocks were, last

    def _until_next_comparison(self) -> int | None:
        """The time until the clocks are compared again [ms]: the listening side asks."""
        if not (self._listens and self.tunnels):
            return None
        left = self._compared + PERIOD - time.monotonic()
        if left <= 0:
            self._compared = time.monotonic()
            for tunnel in list(self.tunnels.values()):
                tunnel.ask_time()
        return 1 + int(1000 * (left if left > 0 else PERIOD))

    def _take(self, frames: list[Any]) -> None:
        if not self._listens:
            if (tunnel := self.tunnels.get(b"")) is not None:
                tunnel.take(frames)
            return
        peer, *rest = frames
        tunnel = self.tunnels.get(peer.bytes)
        if tunnel is None:
            self._by[connection(peer)] = peer.bytes
            tunnel = self.tunnels[peer.bytes] = Tunnel(self, peer.bytes, first=1)
            self._accept(tunnel)
            for _ in range(FIRST):
                tunnel.ask_time()
        tunnel.take(rest)

    def _hear_ends(self) -> None:
        if self._listens:
            for fd in self._ends.broken():
                if (tunnel := self.tunnels.get(self._by.pop(fd, b""))) is not None:
                    tunnel.lose(f"its connection closed, or was silent for {SILENCE:g} s")
        else:
            for how in self._ends.changes():
                if how is not None and (tunnel := self.tunnels.get(b"")) is not None:
                    tunnel.lose(how)
