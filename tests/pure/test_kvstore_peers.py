"""Which of a node's connections its answers go to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distkit.kvstore.protocol.messages import Request
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.link import MOVED, ZmqLink
from distkit.kvstore.transport.scheduler import LIFE
from distkit.kvstore.transport.service import Peer, Peers


def asked(peers: Peers, name: bytes, line: int, *, run: int = 1, number: int = 7) -> Peer:
    """A request comes by this connection."""
    peer = peers.at(name)
    peer.line = line
    peers.know(peer, Request(run, 0, number), SimpleNamespace(get=lambda _: hash(name)))
    return peer


@pytest.mark.parametrize("later", [{"line": 1}, {"line": 0, "number": LIFE}])
@pytest.mark.parametrize("order", [["old", "new", "old"], ["new", "old"], ["old", "new"]])
def test_answers_go_by_the_latest_connection_whatever_is_read_first(order, later) -> None:
    peers = Peers(SimpleNamespace(broken=list), None)
    for name in order:
        asked(peers, name.encode(), **({"line": 0} if name == "old" else later))
    assert peers.ways[0].identity == b"new"
    assert peers.forget(b"old") is None  # whoever goes on by another has not gone
    assert peers.ways[0].identity == b"new"


def test_a_fresh_process_is_heard_although_it_knows_of_no_run_yet() -> None:
    peers = Peers(SimpleNamespace(broken=list), None)
    asked(peers, b"old", 3, run=2)
    asked(peers, b"new", 0, run=0)
    assert peers.ways[0].identity == b"new"


def test_who_was_never_connected_has_nothing_to_renew() -> None:
    link = ZmqLink()
    link.renew(3, "ipc://x")
    link.close()


def test_a_letter_tells_its_connection() -> None:
    assert decode(encode()).line == 0
    assert decode(encode(line=MOVED)).line == MOVED
