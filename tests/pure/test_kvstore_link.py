"""A worker's connections when a node is slow, or has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import zmq

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Pull, Reply
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.link import GOODBYE, ZmqLink
from distkit.kvstore.transport.memory import Exchange
from distkit.kvstore.transport.sockets import BROKEN, open_socket


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


def test_goodbye_reaches_a_slow_reader(server, link) -> None:
    server.rcvhwm = 1
    server.bind("tcp://127.0.0.1:*")
    link.connect(1, server.last_endpoint.decode())
    for n in range(9):
        link.send(1, [Reply(0, n, value=torch.zeros(1_000_000))], 1)
    assert decode(server.recv_multipart()[1:]).messages
    leaving = threading.Thread(target=link.close)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    *_, last = iter(lambda: server.recv_multipart() if server.poll(1_000) else None, None)
    leaving.join()
    assert last[1:] == GOODBYE


@pytest.mark.parametrize("lives", [False, True])
def test_reply_with_vanished_shared_memory_is_lost(
    server, link, tmp_path: Path, lives: bool
) -> None:
    server.bind(f"ipc://{tmp_path}/server")
    link.connect(1, f"ipc://{tmp_path}/server")
    link.send(1, [Pull(0, 7, "w")], 1)
    name, *_ = server.recv_multipart()
    nowhere = [1 if lives else 2**22 + 1, 2**20, 4, 0, 4_000, 0]
    value = Reply(0, 7, value=torch.zeros(1_000))
    exchange = Exchange(None)
    exchange.lend = lambda _: nowhere
    server.send_multipart([name, *encode(value, exchange=exchange)])
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
