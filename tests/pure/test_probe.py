"""The doctor's probe: information about a machine, and messages between machines."""

from __future__ import annotations

import os
import socket

from distkit_hosts.checkup import probe


def test_clients_without_the_secret_are_rejected() -> None:
    alice, bob, mallory = probe.Probe(), probe.Probe(), probe.Probe()
    to = ["127.0.0.1", alice.do_listen("127.0.0.1", "secret")]
    bob.do_listen("127.0.0.1", "secret")
    assert bob.do_reach({"alice": to}) == {"alice": ""}
    bob.do_send_datagrams("bob", {"alice": to})
    assert alice.do_receive_datagrams(["bob"], 10.0) == ["bob"]
    mallory.do_listen("127.0.0.1", "sesame")
    assert mallory.do_reach({"alice": to})["alice"] in (
        "another program is listening on that port",
        "connection reset by peer",
    )
    mallory.do_send_datagrams("mallory", {"alice": to})
    assert alice.do_receive_datagrams(["mallory"], 0.1) == ["bob"]


def test_failures_are_reported() -> None:
    assert probe.Probe().handle({"do": "reach", "address": "x"})["error"].startswith("TypeError: ")
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    reached = probe.Probe().do_reach({"nobody": ["127.0.0.1", port]})
    assert reached == {"nobody": os.strerror(111).lower()}
