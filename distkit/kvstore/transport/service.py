"""Serves requests to a node, over Unix sockets within its host and over ZeroMQ between hosts.

This module handles the sockets; the logic is in :mod:`.scheduler` and :mod:`.session`.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from msgspec import msgpack

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    INCARNATION_STRIDE,
    AddressBook,
    Copy,
    Message,
    Register,
    Request,
    Response,
)
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.connection import LocalConnection, Received, join_frames, listen
from distkit.kvstore.transport.link import Link
from distkit.kvstore.transport.node import Node, listen_on, open_socket, receive
from distkit.kvstore.transport.recording import InFlight, ReplyRecorder
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession


@dataclass
class Peer:
    """A process that sends requests; ``send`` sends a message to it.

    ``incarnation`` is how many processes its node had before this one.
    """

    send: Callable[[bytes, Sequence[memoryview]], None]
    incarnation: int = 0


#: glibc's options M_MMAP_MAX and M_TRIM_THRESHOLD.
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
#: Maximum size of a notice [bytes].
_MAX_NOTICE_BYTES = 1 << 16


class Service:
    """The server or the scheduler that this process runs.

    Args:
        node: the server or scheduler to run.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        #: Called by a scheduler with "listening" and its endpoint, and with "started" and None when
        #: the run starts.
        self.report: Callable[[str, Any], None] = lambda kind, data: None
        #: Passes notices from other threads, such as the exit of a node, to the serving thread.
        self._notice_receiver, self._notice_sender = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_DGRAM
        )
        #: Set by another thread at the end of the run, after which no messages are sent.
        self.quiesced = False
        self._recorder = ReplyRecorder()
        #: Receives requests from other hosts, if there are any.
        self._router: Any = None
        self._link = Link(node.keys, node.route, wait=False)  # to the scheduler and the backup
        #: The processes on this host that send requests, by file descriptor.
        self._local_peers: dict[int, tuple[LocalConnection, Peer]] = {}
        self._remote_peers: dict[bytes, Peer] = {}  # by ZeroMQ connection identity
        self._routes: dict[int, Peer] = {}  # latest connection of each node, for responses
        self._handler: ServerSession | Scheduler = (
            ServerSession(node)
            if node.role == "server"
            else Scheduler(node.workers, node.servers, lambda: self.report("started", None))
        )

    def handle_departure(self, node: int, incarnation: int, cause: str) -> None:
        """Notify the local scheduler that a node's process has exited. Thread-safe.

        Args:
            node: the id of the node.
            incarnation: how many processes this node had before this one.
            cause: why it exited.
        """
        self._notice_sender.send(msgpack.encode((node, incarnation, cause)))

    def run(self) -> None:
        """Serve in this thread until the process ends.

        Raises:
            KVStoreError: The node cannot create its socket.
        """
        torch.set_num_threads(1)  # other processes on this host need the CPUs
        _keep_freed_memory()
        self._open()
        while True:
            self._handle_ready()

    def _open(self) -> None:
        """Listen for requests, and register this node if it is a server."""
        node = self.node
        endpoint = f"ipc://{node.path(node.id)}"
        try:
            self._listener = listen(node.path(node.id))
        except OSError as e:
            raise KVStoreError(
                f"{node.role} {node.index} cannot listen on {endpoint}: {e}. "
                "Use an existing, writable folder."
            ) from e
        self._link.poller.register(self._notice_receiver, zmq.POLLIN)
        if node.address:
            self._router = open_socket(self._link.context, zmq.ROUTER, node.keys)
            endpoint = f"{listen_on(self._router, node.address)} {endpoint}"
        if isinstance(self._handler, Scheduler):
            self._accept_requests()
            self.report("listening", endpoint)
            return
        register = Register(node.id, 0, endpoint)
        self._registration = InFlight(register, node.scheduler)
        self._link.connect(node.scheduler, node.endpoint(node.scheduler))
        self._link.send(node.scheduler, [register])

    def _accept_requests(self) -> None:
        for sock in filter(None, (self._listener, self._router)):
            self._link.poller.register(sock, zmq.POLLIN)

    def _handle_ready(self) -> None:
        """Wait for messages and handle them."""
        ready = dict(self._link.poller.poll())
        if self._listener.fileno() in ready:
            self._accept()
        self._serve_all(ready)
        for response in self._link.receive(wait=False):
            assert isinstance(response, Response)
            self._deliver(self._handle_response(response))
        if self._notice_receiver.fileno() in ready:
            assert isinstance(self._handler, Scheduler)
            self._deliver(
                self._handler.handle_departure(
                    *msgpack.decode(self._notice_receiver.recv(_MAX_NOTICE_BYTES))
                )
            )

    def _handle_response(self, response: Response) -> list[Message]:
        """Handle a response from the scheduler or the backup; return messages to send."""
        assert isinstance(self._handler, ServerSession)
        messages = self._handler.handle_response(response)
        if isinstance(response, AddressBook):
            self._registration.end(response)
            self._accept_requests()
            if (backup := self._handler.backup.target) is not None:
                self._link.connect(backup, response.endpoints[backup])
        return messages

    # -- nodes that send requests -----------------------------------------------

    def _accept(self) -> None:
        """Accept a connection from a process on this host."""
        sock, _ = self._listener.accept()
        connection = LocalConnection(sock, self._link.poller, wait=False)
        self._local_peers[connection.fileno()] = connection, Peer(connection.send)

    def _serve_all(self, ready: Mapping[Any, int]) -> None:
        """Handle one batch from each ready peer, and send the responses together."""
        responses: list[Message] = []
        for fd in ready:
            if fd in self._local_peers:
                connection, peer = self._local_peers[fd]
                if (received := connection.receive()) is not None:
                    responses += self._serve(received, peer)
                if connection.fileno() < 0:  # closed
                    del self._local_peers[fd]
        if self._router in ready and (frames := receive(self._router)) is not None:
            peer = self._remote_peer(frames[0].bytes)
            responses += self._serve(join_frames(*frames[1:]), peer)
        self._deliver(responses)

    def _serve(self, received: Received, peer: Peer) -> list[Message]:
        """Return the responses to a batch of requests."""
        batch = decode(*received)
        responses: list[Message] = []
        for request in batch.messages:
            assert isinstance(request, Request)
            self._route_responses(request, peer)
            self._recorder.record_request(request)
            responses += self._handler.handle(request, batch.server)
        return responses

    def _remote_peer(self, identity: bytes) -> Peer:
        """Return the process on another host with this connection identity."""
        if identity not in self._remote_peers:

            def send(header: bytes, body: Sequence[memoryview]) -> None:
                self._router.send_multipart([identity, header, *body], copy=False)

            self._remote_peers[identity] = Peer(send)
        return self._remote_peers[identity]

    def _route_responses(self, request: Request, peer: Peer) -> None:
        """Send responses for the request's node to this peer, unless its process was replaced."""
        peer.incarnation = request.number // INCARNATION_STRIDE
        if peer.incarnation >= self._routes.get(request.node, peer).incarnation:
            self._routes[request.node] = peer

    # -- sending ----------------------------------------------------------------

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Send messages; record each response first, so that the trace has it if it arrives."""
        if self.quiesced:
            return
        batches: dict[int, list[Message]] = {}
        copies: list[Message] = []
        for message in messages:
            if isinstance(message, Copy):
                copies.append(message)
            elif message.node in self._routes:
                self._recorder.record_response(message)
                batches.setdefault(message.node, []).append(message)
        if copies and isinstance(self._handler, ServerSession):
            self._link.send(self._handler.backup.target, copies)
        for node, batch in batches.items():
            self._routes[node].send(*encode(*batch))


def _keep_freed_memory() -> None:
    """Keep freed memory for new tensors: mapping new pages takes longer than copying a tensor."""
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
