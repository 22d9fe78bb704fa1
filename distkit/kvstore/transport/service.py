"""Serves a node's requests over ZeroMQ: a ROUTER for the DEALERs of other nodes.

On one host large tensors are in shared memory (:mod:`.memory`). This module handles the sockets;
the logic is in :mod:`.scheduler` and :mod:`.session`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
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
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.link import Link
from distkit.kvstore.transport.memory import Exchange, PeerMemoryLost
from distkit.kvstore.transport.node import Node, listen_on, open_socket, receive
from distkit.kvstore.transport.recording import InFlight, ReplyRecorder
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession


@dataclass
class Peer:
    """The connection and shared memory of a process that sends requests.

    ``incarnation`` is the number of earlier processes of its node.
    """

    identity: bytes
    exchange: Exchange
    incarnation: int = 0


#: Maximum number of batches handled together, which limits how long the first one waits.
_MAX_BATCHES = 8
#: Maximum size of a notice [bytes].
_MAX_NOTICE_BYTES = 1 << 16


class Service:
    """The server or the scheduler that this process runs.

    Args:
        node: its identity in the cluster, a server or the scheduler.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        #: A scheduler reports "listening" with its endpoint, and "started" when the run starts.
        self.report: Callable[[str, Any], None] = lambda kind, data: None
        #: Passes notices from other threads, such as the exit of a node, to the serving thread.
        self._notice_receiver, self._notice_sender = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_DGRAM
        )
        #: Set by another thread at the end of the run, after which no responses are sent.
        self.quiesced = False
        self._recorder = ReplyRecorder()
        self._link = Link(node.keys, node.route)  # to the scheduler and the backup
        self._peers: dict[bytes, Peer] = {}  # by ZeroMQ's identity of the connection
        self._routes: dict[int, Peer] = {}  # latest connection of each node, for responses
        self._handler: ServerSession | Scheduler = (
            ServerSession(node)
            if node.role == "server"
            else Scheduler(node.workers, node.servers, lambda: self.report("started", None))
        )

    def handle_departure(self, node: int, incarnation: int, cause: str) -> None:
        """Notify the scheduler that runs here, from any thread, that a node's process has exited.

        Args:
            node: the id of the node.
            incarnation: number of earlier processes of this node.
            cause: how it has exited.
        """
        self._notice_sender.send(msgpack.encode((node, incarnation, cause)))

    def run(self) -> None:
        """Serve in this thread until the process ends.

        Raises:
            KVStoreError: The node cannot listen in its folder, or the scheduler rejects it.
        """
        torch.set_num_threads(1)  # other processes of this host need the processors
        self._pool = memory.shared_pool()
        self._open()
        while True:
            self._handle_ready()

    def _open(self) -> None:
        """Listen for requests, and register this node if it is a server."""
        node = self.node
        endpoint = node.endpoint(node.id)
        self._router = open_socket(self._link.context, zmq.ROUTER, node.keys)
        try:
            self._router.bind(endpoint)
        except (zmq.ZMQError, OSError) as e:
            raise KVStoreError(
                f"{node.role} {node.index} cannot listen at {endpoint}: {e}. "
                "Use an existing, writable folder."
            ) from e
        self._link.poller.register(self._notice_receiver, zmq.POLLIN)
        if node.address:
            endpoint = f"{listen_on(self._router, node.address)} {endpoint}"
        if isinstance(self._handler, Scheduler):
            self._link.poller.register(self._router, zmq.POLLIN)
            self.report("listening", endpoint)
            return
        register = Register(node.id, 0, endpoint)
        self._registration = InFlight(register, node.scheduler)
        self._link.connect(node.scheduler, node.endpoint(node.scheduler))
        self._link.send(node.scheduler, [register])

    def _handle_ready(self) -> None:
        """Wait for messages and handle them."""
        ready = dict(self._link.poller.poll())
        if self._router in ready:
            self._serve_all()
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
            self._link.poller.register(self._router, zmq.POLLIN)  # workers may send from now on
            if (backup := self._handler.backup.target) is not None:
                self._link.connect(backup, response.endpoints[backup])
        return messages

    # -- nodes that send requests -----------------------------------------------

    def _serve_all(self) -> None:
        """Handle a few batches of requests and send their responses together."""
        responses: list[Message] = []
        for _ in range(_MAX_BATCHES):
            frames = receive(self._router)
            if frames is None:
                break
            responses += self._serve(frames)
        self._deliver(responses)

    def _serve(self, frames: list[Any]) -> list[Message]:
        """Return the responses to a batch of requests; a batch of an exited node may be lost."""
        peer = self._peer(frames[0])
        try:
            batch = decode([frame.buffer for frame in frames[1:]], peer.exchange)
        except PeerMemoryLost:
            return []
        responses: list[Message] = []
        for request in batch.messages:
            assert isinstance(request, Request)
            self._route_responses(request, peer)
            self._recorder.record_request(request)
            responses += self._handler.handle(request, batch.server)
        return responses

    def _peer(self, frame: Any) -> Peer:
        """Return the peer whose identity is in this frame."""
        name = bytes(frame.buffer)
        if name not in self._peers:
            # with several hosts, lend only to peers that have lent to this process
            self._peers[name] = Peer(name, Exchange(None if self.node.address else self._pool))
        return self._peers[name]

    def _route_responses(self, request: Request, peer: Peer) -> None:
        """Send responses for the request's node to this peer, unless it was replaced."""
        peer.incarnation = request.number // INCARNATION_STRIDE
        if peer.incarnation >= self._routes.get(request.node, peer).incarnation:
            self._routes[request.node] = peer

    # -- sending ----------------------------------------------------------------

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Record each message, then send it, so that the trace has every received response."""
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
            peer = self._routes[node]
            frames = encode(*batch, exchange=peer.exchange)
            self._router.send_multipart([peer.identity, *frames], copy=False)
