"""A worker's connections when a node is slow, or has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import zmq

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Message, Pull, Reply
from distkit.kvstore.protocol.wire import encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.link import ZmqLink
from distkit.kvstore.transport.memory import Exchange
from distkit.kvstore.transport.sockets import open_socket


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


def test_reply_with_vanished_shared_memory_is_lost(
    server, link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.bind(f"ipc://{tmp_path}/server")
    link.connect(1, f"ipc://{tmp_path}/server")
    link.send(1, [Pull(0, 7, "w")], 1)
    name, *_ = server.recv_multipart()
    exchange = Exchange(None)
    exchange.lend = lambda _: [2**22 + 1, 2**20, 4, 0, 4_000, 0]  # of no process
    lost = encode(Reply(0, 7, value=torch.zeros(1_000)), exchange=exchange)
    server.send_multipart([name, *lost])
    server.send_multipart([name, *encode(Reply(0, 8))])
    received: list[Message] = []
    while not received:
        received = link.receive(wait=True)
    assert [reply.number for reply in received] == [8]

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(memory, "_mapped", refuse)
    server.send_multipart([name, *lost])
    with pytest.raises(KVStoreError, match="cannot be opened"):
        link.receive(wait=True)
