"""A worker's connections: which node answers, and what a worker hears of nodes that have ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq

from distkit.errors import KVStoreError
from distkit.kvstore.client.requests import Call, Requests
from distkit.kvstore.protocol.messages import (
    LIFE,
    Departed,
    Message,
    Pull,
    Push,
    Reply,
    Request,
)
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.link import GOODBYE, ZmqLink
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.service import Peer, Peers
from distkit.kvstore.transport.sockets import BROKEN, open_socket
from distkit.trace.calls import silence


@pytest.fixture
def server() -> Iterator[zmq.Socket]:
    context = zmq.Context()
    yield open_socket(context, zmq.ROUTER, None)
    context.destroy(linger=0)


@pytest.fixture
def link() -> Iterator[ZmqLink]:
    link = ZmqLink()
    with closing(link):
        yield link


def test_a_goodbye_reaches_a_node_that_is_slow_to_read(server, link) -> None:
    server.rcvhwm = 1
    server.bind("tcp://127.0.0.1:*")
    link.connect(1, server.last_endpoint.decode())
    for n in range(9):
        link.send(1, [Reply(0, 0, n, value=torch.zeros(1_000_000))])
    assert decode(server.recv_multipart()[1:]).messages
    leaving = threading.Thread(target=link.close)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    *_, last = iter(lambda: server.recv_multipart() if server.poll(1_000) else None, None)
    leaving.join()
    assert last[1:] == GOODBYE


@pytest.mark.parametrize("lives", [False, True])
def test_an_answer_whose_memory_ended_with_its_sender_is_as_good_as_lost(
    server, link, tmp_path: Path, lives: bool
) -> None:
    server.bind(f"ipc://{tmp_path}/server")
    link.connect(1, f"ipc://{tmp_path}/server")
    link.send(1, [Pull(0, 0, 7, "w")])
    name, *_ = server.recv_multipart()
    nowhere = [1 if lives else 2**22 + 1, 2**20, 4, 0, 4_000, 0]
    value = Reply(0, 0, 7, value=torch.zeros(1_000))
    server.send_multipart([name, *encode(value, lend=lambda _: nowhere)])
    if lives:
        with pytest.raises(KVStoreError, match="cannot be opened"):
            while True:
                link.receive(wait=True)
    server.close(linger=1_000)
    changes: list[tuple[int, str | None]] = []
    while not changes:
        assert link.receive(wait=True) == []
        changes = link.changes()
    assert changes == [(1, BROKEN)]


# -- what becomes of requests when a node ends -------------------------------------


class Wire:
    """A worker's connections, as a test has them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Request]] = []
        self.comes: list[Message] = []
        self.changed: list[tuple[int, str | None]] = []
        self.moved: list[tuple[int, int]] = []

    def send(self, to: int, requests: list[Request]) -> None:
        assert requests, "a goodbye"
        self.sent += [(to, r) for r in requests]

    def receive(self, *, wait: bool) -> list[Message]:
        assert self.comes or self.changed or not wait, "would wait for ever"
        found, self.comes = self.comes, []
        return found

    def redirect(self, node: int, by: int) -> None:
        self.moved.append((node, by))

    def changes(self) -> list[tuple[int, str | None]]:
        return self.changed

    def close(self) -> None:
        pass


def asking(replication: int = 1) -> tuple[Wire, Requests]:
    """A worker of two, with servers 2, 3 and 4, and a push to server 2 that is not answered."""
    wire = Wire()
    name, servers = Node("scheduler", 0, 2, 3, "f").name, [2, 3, 4]
    requests = Requests(
        wire, 0, 0, name=name, scheduler=5, servers=servers, replication=replication
    )
    requests.post(Call(2, Push, ("w", (1,), 0, torch.ones(1))))
    requests.dispatch()
    return wire, requests


def departed(server: int, how: str = BROKEN) -> Departed:
    return Departed(0, 0, -1, server, how, LIFE)


def test_the_backup_is_asked_again() -> None:
    wire, requests = asking(replication=2)
    wire.comes = [departed(2)]
    requests.dispatch()
    assert wire.moved == [(2, 3)]
    assert [(to, type(r), r.number) for to, r in wire.sent] == [(2, Push, 0)] * 2
    wire.comes = [Reply(0, 0, 0)]
    requests.flush()


def test_nothing_is_repeated_if_everything_was_answered() -> None:
    wire, requests = asking(replication=2)
    wire.comes = [Reply(0, 0, 0), departed(3)]
    requests.flush()
    assert wire.moved == [(3, 4)]
    wire.comes = [departed(2)]
    with pytest.raises(KVStoreError, match="server 0 has ended"):
        requests.ask([Call(2, Pull, ("w",))])


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_values_whose_backup_has_ended_too_are_lost(order: tuple[int, int]) -> None:
    wire, requests = asking(replication=2)
    wire.comes = [departed(server) for server in order]
    with pytest.raises(KVStoreError, match="server 0 has ended"):
        requests.flush()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            BROKEN,
            r"server 0 has ended \(its connection was lost\) while .*: the values of 'w', 3,",
        ),
        (
            silence(1.5),
            r"server 0 gave no sign of life for 1.5 s and was ended while .*SIGSTOP"
            r".*heartbeat_timeout",
        ),
    ],
)
def test_a_server_without_a_backup_is_named_with_what_is_lost(how: str, says: str) -> None:
    wire, requests = asking()
    requests.held_by = lambda node: [3, "w"]
    wire.comes = [departed(2, how)]
    with pytest.raises(KVStoreError, match=says):
        requests.flush()
    with pytest.raises(KVStoreError, match="server 0"):
        requests.ask([Call(2, Pull, ("w",))])


def test_without_the_scheduler_every_request_ends() -> None:
    wire, requests = asking()
    wire.changed = [(5, BROKEN)]
    with pytest.raises(KVStoreError, match=r"the scheduler has ended .* so the run ends"):
        requests.ask([Call(3, Pull, ("v",))])
    with pytest.raises(KVStoreError, match="the scheduler has ended"):
        requests.flush()


# -- which connection answers go to ------------------------------------------------


def asked(peers: Peers, name: bytes, *, run: int = 1, number: int = 7) -> Peer:
    """A request comes by this connection."""
    peer = peers.at(SimpleNamespace(buffer=name, get=lambda _: hash(name)))
    peers.know(peer, Request(run, 0, number))
    return peer


@pytest.mark.parametrize("order", [["old", "new", "old"], ["new", "old"], ["old", "new"]])
def test_answers_go_to_the_latest_process_in_a_place(order: list[str]) -> None:
    peers = Peers(SimpleNamespace(broken=list), None)
    for name in order:
        asked(peers, name.encode(), number=LIFE if name == "new" else 7)
    assert peers.ways[0].identity == b"new"
    assert peers.forget(b"old") is None  # its node has another connection
    assert peers.ways[0].identity == b"new"
