"""Channels between processes: messages and disconnection."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from distkit.cluster.processes.channel import Channel


def encode(message: Any) -> bytes:
    ours, theirs = Channel.pair()
    ours.send(message)
    ours.close()
    with theirs:
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


@pytest.mark.parametrize("cut", [3, 8, 20])
def test_truncated_message_is_discarded(cut: int) -> None:
    ours, theirs = Channel.pair()
    received = queue.SimpleQueue[Any]()
    ours.listen(received.put, lambda: received.put(EOFError))
    encoded = encode(["rows", list(range(40))])
    theirs.sendall(encoded[:cut])
    theirs.sendall(encoded[cut:] + encode("a") + encoded[:cut])
    theirs.close()
    assert [received.get(timeout=10) for _ in range(3)] == [
        ("rows", tuple(range(40))),
        "a",
        EOFError,
    ]


def test_invalid_message_disconnects_both_ends_at_once() -> None:
    """The kernel then waits for the exit of the rank, which must detect the disconnection."""
    ours, theirs = Channel.pair()
    exited = threading.Event()
    ours.listen(lambda message: None, lambda: exited.wait() and None)
    with theirs:
        theirs.sendall(encode("text")[:8] + b"\xc1" * 5)
        theirs.settimeout(10)
        assert theirs.recv(1) == b""
    exited.set()


def test_finalizer_may_send_during_a_send() -> None:
    ours, theirs = Channel.pair()
    received = queue.SimpleQueue[Any]()
    Channel(theirs).listen(received.put, lambda: None)
    # the descriptor sends when it is used, as a finalizer may at any time
    finalizer = {"__index__": lambda self: ours.send("finalizer") or 0}
    message: Any = "message", type("Descriptor", (), finalizer)()
    sender = threading.Thread(target=ours.send, args=message, daemon=True)
    sender.start()
    assert [received.get(timeout=10) for _ in range(2)] == ["finalizer", "message"]
    sender.join()
    ours.close()
