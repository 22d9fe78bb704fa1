"""Lines to many processes: one that stops in the middle of a message holds up no other."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from distkit.cluster.processes.channel import Channel, ChannelListener


class Line:
    """A channel that a listener reads, and its other end."""

    def __init__(self, listener: ChannelListener) -> None:
        ours, self.theirs = Channel.pair()
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        listener.add(ours, self.heard.put, lambda: self.heard.put(EOFError))

    def next(self) -> Any:
        return self.heard.get(timeout=10)


def sent(message: Any) -> bytes:
    """A message as it travels."""
    ours, theirs = Channel.pair()
    ours.send(message)
    ours.close()
    with theirs:
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


@pytest.mark.parametrize("cut", [3, 8, 20])
def test_a_message_that_stops_half_way_holds_up_no_other_line(cut: int) -> None:
    listener = ChannelListener()
    stopped, other = Line(listener), Line(listener)
    whole = sent(["rows", list(range(40))])
    stopped.theirs.sendall(whole[:cut])
    other.theirs.sendall(sent("a") + sent("b") + whole[:cut])
    assert [other.next(), other.next()] == ["a", "b"]
    stopped.theirs.sendall(whole[cut:])
    assert stopped.next() == ("rows", tuple(range(40)))
    other.theirs.close()
    assert other.next() is EOFError  # without its last message
    stopped.theirs.close()
    assert stopped.next() is EOFError


def test_what_a_listener_raises_costs_no_message(capfd: pytest.CaptureFixture[str]) -> None:
    listener, heard = ChannelListener(), queue.SimpleQueue[Any]()
    ours, theirs = Channel.pair()

    def hear(message: Any) -> None:
        heard.put(message)
        raise ValueError(message)

    listener.add(ours, hear, lambda: None)
    theirs.sendall(sent("a") + sent("b"))
    assert [heard.get(timeout=10), heard.get(timeout=10)] == ["a", "b"]
    theirs.close()
