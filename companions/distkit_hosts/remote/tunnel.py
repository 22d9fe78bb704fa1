"""Multiplex messages and byte streams over one connection between two machines.

A process has one :class:`Multiplexer`, a thread that owns a ZeroMQ socket with CurveZMQ. The
kernel's socket listens, and each agent's socket connects to it. Each peer has a :class:`Tunnel`,
which carries picklable messages in order, and byte streams between a socket here and a socket
there. Flow control allows :data:`WINDOW` unacknowledged chunks per stream. A connection without
data for :data:`HEARTBEAT_TIMEOUT` counts as broken, and so do its tunnel and streams. ZeroMQ's
threads send the heartbeats, so a busy kernel is not considered dead.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum, auto
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from distkit.kvstore.transport.node import open_socket, receive
from distkit_hosts.clocks import RoundTrip

#: Heartbeat timeout of a connection [s].
HEARTBEAT_TIMEOUT = 2.0

#: Maximum time to send the last message of a closed socket [ms].
CLOSE_LINGER_MS = 2000

#: Maximum number of unacknowledged chunks of a stream, and maximum size of a chunk [bytes].
WINDOW, CHUNK = 64, 1 << 16

#: Interval between clock comparisons [s], and number of comparisons at the start.
CLOCK_INTERVAL, FIRST_COMPARISONS = 0.5, 8


class Kind(IntEnum):
    """Kinds of frames. MESSAGE and OPEN, which opens a stream, carry a message."""

    MESSAGE = auto()
    OPEN = auto()
    DATA = auto()
    ACKNOWLEDGED = auto()
    END = auto()
    CLOCK = auto()


_HEAD, _TIMES = struct.Struct("!BQ"), struct.Struct("!ddd")


class Stream:
    """One end of a stream.

    Args:
        sock: the local socket, connected to the socket on the other machine.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.task: asyncio.Task[None] | None = None
        #: Received data; b"" once the other end is closed.
        self.received: asyncio.Queue[bytes] = asyncio.Queue()
        #: One permit for each chunk that may be sent before an acknowledgment.
        self.window = asyncio.Semaphore(WINDOW)


class Tunnel:
    """Messages and streams between this process and a process on another machine.

    Args:
        multiplexer: the multiplexer of this process.
        peer: the ZeroMQ identity of the peer.
        first: the number of the first stream opened by this side; numbers increase by 2.
    """

    def __init__(self, multiplexer: Multiplexer, peer: bytes, first: int) -> None:
        self._multiplexer, self.peer, self._next = multiplexer, peer, first
        self.streams: dict[int, Stream] = {}
        self.reason = ""  # why the tunnel was lost, if it was
        # callbacks, called in the multiplexer's thread
        #: Called with each message.
        self.on_message: Callable[[Any], None] = lambda message: None
        #: Called with the message of each stream opened by the peer; returns its local socket.
        self.on_stream: Callable[[Any], socket.socket]
        #: Called with the reason after a loss.
        self.on_lost: Callable[[str], None] = lambda reason: None
        #: Called with the times of each clock comparison.
        self.on_trip: Callable[[RoundTrip], None] = lambda trip: None

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send a picklable message, optionally with a socket as the local end of a stream.

        Raises:
            OSError: the tunnel is lost.
        """
        if self.reason:
            raise BrokenPipeError(self.reason)
        body = pickle.dumps(message, protocol=5)
        if fd is None:
            self._multiplexer.call_soon(lambda: self._post(Kind.MESSAGE, 0, body))
        else:
            sock = socket.socket(fileno=os.dup(fd))
            self._multiplexer.call_soon(lambda: self._open(sock, body))

    # -- in the multiplexer's thread --------------------------------------------------------------

    def _post(self, kind: int, number: int, body: Any = b"") -> None:
        if not self.reason:
            self._multiplexer.post(self, [_HEAD.pack(kind, number), body])

    def _open(self, sock: socket.socket, body: bytes) -> None:
        if self.reason:
            sock.close()
        else:
            self._begin(self._next, sock)
            self._post(Kind.OPEN, self._next, body)
            self._next += 2

    def request_time(self) -> None:
        """Request the peer's time."""
        self._post(Kind.CLOCK, 0, _TIMES.pack(time.monotonic(), 0, 0))

    def handle(self, frames: list[Any]) -> None:
        """Handle a message from the peer."""
        now = time.monotonic()
        kind, number = _HEAD.unpack(frames[0].bytes)
        stream = self.streams.get(number)
        match kind:
            case Kind.MESSAGE:
                self.on_message(pickle.loads(frames[1].buffer))
            case Kind.OPEN:
                try:
                    self._begin(number, self.on_stream(pickle.loads(frames[1].buffer)))
                except OSError:
                    self._post(Kind.END, number)
            case Kind.DATA if stream is not None:
                stream.received.put_nowait(frames[1].bytes)
            case Kind.ACKNOWLEDGED if stream is not None:
                stream.window.release()
            case Kind.END if stream is not None:
                stream.received.put_nowait(b"")
            case Kind.CLOCK:
                self._compare(now, *_TIMES.unpack(frames[1].bytes))

    def _begin(self, number: int, sock: socket.socket) -> None:
        stream = self.streams[number] = Stream(sock)
        stream.task = self._multiplexer.loop.create_task(self._copy(number, stream))

    async def _copy(self, number: int, stream: Stream) -> None:
        """Copy data between a stream's socket and the peer until one of them closes."""
        reader, writer = await asyncio.open_connection(sock=stream.sock)
        pumps = [
            asyncio.ensure_future(self._send(number, stream, reader)),
            asyncio.ensure_future(self._write(number, stream, writer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        writer.close()
        if self.streams.pop(number, None) is not None:
            self._post(Kind.END, number)

    async def _send(self, number: int, stream: Stream, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while await stream.window.acquire() and (data := await reader.read(CHUNK)):
                self._post(Kind.DATA, number, data)

    async def _write(self, number: int, stream: Stream, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await stream.received.get():
                writer.write(data)
                await writer.drain()
                self._post(Kind.ACKNOWLEDGED, number)

    def _compare(self, now: float, requested: float, received: float, sent: float) -> None:
        if received:
            self.on_trip(RoundTrip(requested, received, sent, now))
        else:
            self._post(Kind.CLOCK, 0, _TIMES.pack(requested, now, time.monotonic()))

    def lose(self, reason: str) -> None:
        """Mark the tunnel as lost, close its streams and call ``on_lost``."""
        if self.reason:
            return
        self.reason = reason
        for stream in self.streams.values():
            stream.received.put_nowait(b"")
            with suppress(OSError):  # the socket is already closed
                stream.sock.shutdown(socket.SHUT_RDWR)
        self.streams.clear()
        self._multiplexer.tunnels.pop(self.peer, None)
        self.on_lost(reason)


class Multiplexer:
    """The thread that exchanges data between local sockets and peers.

    Args:
        endpoint: ``tcp://ADDRESS:PORT``, or ``tcp://ADDRESS:*`` to listen on a free port.
        keys: the public and secret key, which both sides share.
        listen: whether to listen or to connect.
        accept: called in the multiplexer's thread with each new tunnel, before its first message.
        listener: a socket already listening on the endpoint, perhaps in another network namespace;
            owned by the caller.
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
        self._socket = open_socket(zmq.Context.instance(), kind, keys)
        # ZeroMQ's own threads send the heartbeats (ZMTP's PING and PONG)
        half_timeout = int(500 * HEARTBEAT_TIMEOUT)  # ms
        self._socket.heartbeat_ivl = self._socket.heartbeat_timeout = half_timeout
        self.tunnels: dict[bytes, Tunnel] = {}
        self._peers: dict[int, bytes] = {}  # connection -> peer
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._fail)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.linger = 0
        if listen:
            self._listen(endpoint, listener)
        else:
            self._socket.connect(endpoint)
        self.endpoint = self._socket.last_endpoint.decode()
        self._thread = threading.Thread(target=self._work, name="distkit-multiplexer", daemon=True)

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
        """Start the thread."""
        self._thread.start()

    def connect(self) -> Tunnel:
        """Return the tunnel of a connecting multiplexer. Call this before :meth:`start`."""
        tunnel = self.tunnels[b""] = Tunnel(self, b"", first=2)
        return tunnel

    def call_soon(self, function: Callable[[], None]) -> None:
        """Schedule a function in the multiplexer's thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function)

    def post(self, tunnel: Tunnel, frames: list[Any]) -> None:
        """Send a message through a tunnel, from the multiplexer's thread."""
        try:
            self._socket.send_multipart([tunnel.peer, *frames] if self._listens else frames)
        except zmq.ZMQError as error:
            tunnel.lose(f"its connection was lost ({error})")
        # ZeroMQ's descriptor does not signal messages that arrive during a send
        self.loop.call_soon(self._receive)

    def close(self) -> None:
        """Close all tunnels and stop the thread."""
        self.call_soon(self.loop.stop)
        if self._thread.ident is None:  # not started
            self._close()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger=CLOSE_LINGER_MS)
            self.loop.close()

    # -- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        for sock in (self._socket, self._monitor):
            self.loop.add_reader(sock.fileno(), self._receive)
        self.loop.call_soon(self._receive)
        if self._listens:
            self.loop.call_soon(self._compare_clocks)
        try:
            self.loop.run_forever()
        finally:
            for tunnel in list(self.tunnels.values()):
                tunnel.lose("it was closed")
            if streams := asyncio.all_tasks(self.loop):
                self.loop.run_until_complete(asyncio.wait(streams))
            self._close()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        loop.stop()

    def _receive(self) -> None:
        """Handle all received messages."""
        while (frames := receive(self._socket)) is not None:
            self._dispatch(frames)
        self._check_connections()

    def _compare_clocks(self) -> None:
        for tunnel in list(self.tunnels.values()):
            tunnel.request_time()
        self.loop.call_later(CLOCK_INTERVAL, self._compare_clocks)

    def _dispatch(self, frames: list[Any]) -> None:
        peer = frames.pop(0) if self._listens else None
        name = b"" if peer is None else peer.bytes
        tunnel = self.tunnels.get(name)
        if tunnel is None and peer is not None:
            self._peers[int(peer.get(zmq.SRCFD))] = name
            tunnel = self.tunnels[name] = Tunnel(self, name, first=1)
            self._accept(tunnel)
            for _ in range(FIRST_COMPARISONS):
                tunnel.request_time()
        if tunnel is not None:
            tunnel.handle(frames)

    def _check_connections(self) -> None:
        while self._monitor.poll(0):
            descriptor = recv_monitor_message(self._monitor)["value"]
            name = self._peers.pop(descriptor, None) if self._listens else b""
            if name is not None and (tunnel := self.tunnels.get(name)) is not None:
                tunnel.lose(f"its connection closed, or was silent for {HEARTBEAT_TIMEOUT:g} s")
