"""What comes last by a connection: the last word of one end, an answer of an end that has gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import zmq

from distkit.kvstore.protocol.messages import Pull, Reply
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.link import BYE, ZmqLink
from distkit.kvstore.transport.memory import NotShown
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


def test_a_last_word_reaches_who_is_slow_to_read(server, link) -> None:
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
    assert last[1:] == BYE


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_whose_tensors_ended_with_its_sender_is_asked_again(
    server, link, tmp_path: Path, ended: bool
) -> None:
    server.bind(f"ipc://{tmp_path}/server")
    link.connect(1, f"ipc://{tmp_path}/server")
    link.send(1, [Pull(0, 0, 7, "w")])
    name, *_ = server.recv_multipart()
    nowhere = [2**22 + 1, 3, 4, 0, 4_000, 0]  # there is no such process
    value = Reply(0, 0, 7, value=torch.zeros(1_000))
    server.send_multipart([name, *encode(value, lend=lambda _: nowhere)])
    if ended:
        server.close(linger=1_000)
        while 1 not in link.lost():
            assert link.receive(wait=True) == []
    else:
        with pytest.raises(NotShown, match="cannot be opened"):
            while True:
                link.receive(wait=True)
