"""Connections between processes on one host: nothing is lost, and no node waits for another."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from distkit.kvstore.transport.connection import LocalConnection

SIZES = st.integers(0, 9) | st.integers(0, 300_000)  # [bytes]; a socket accepts about 200 kB
MESSAGES = st.lists(st.tuples(SIZES, st.lists(SIZES, max_size=3)), max_size=4)


def pair() -> tuple[LocalConnection, LocalConnection, zmq.Poller]:
    """Return two connected ends that never wait, and their poller."""
    poller = zmq.Poller()
    left, right = (LocalConnection(s, poller, wait=False) for s in socket.socketpair())
    return left, right, poller


def received(end: LocalConnection) -> Iterator[tuple[bytes, bytes]]:
    while (message := end.receive()) is not None:
        header, body = message
        yield bytes(header), bytes(body)


@given(MESSAGES)
def test_messages_arrive_complete_in_order(sizes: list[tuple[int, list[int]]]) -> None:
    left, right, _ = pair()
    sent = [
        (bytes([i]) * n, [bytes([9 + i]) * m for m in body]) for i, (n, body) in enumerate(sizes)
    ]
    for header, body in sent:
        left.send(header, [memoryview(b) for b in body])  # does not wait for the receiver
    arrived: list[tuple[bytes, bytes]] = []
    while len(arrived) < len(sent):
        arrived += received(right)
        assert left.receive() is None  # sends the rest
    assert arrived == [(header, b"".join(body)) for header, body in sent]
    left.close()
    right.close()


def test_messages_sent_before_close_arrive() -> None:
    left, right, poller = pair()
    left.send(b"first", [])
    left.send(b"last", [memoryview(b"body")])
    left.close()
    assert list(received(right)) == [(b"first", b""), (b"last", b"body")]
    assert right.fileno() == -1
    assert poller.poll(0) == []
    right.send(b"lost", [])  # the other end has exited


@pytest.mark.parametrize("data", [bytes(15), b"\xff" * 16, b"\x00" * 7 + b"\x09" + bytes(8)])
def test_incomplete_or_invalid_message_is_dropped_with_its_connection(data: bytes) -> None:
    sock, other = socket.socketpair()
    end = LocalConnection(sock, zmq.Poller(), wait=False)
    other.sendall(data)
    other.close()
    assert list(received(end)) == []
    assert end.fileno() == -1
