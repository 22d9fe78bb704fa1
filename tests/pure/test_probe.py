"""What a machine says of itself, and the messages between machines."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from distkit_hosts.checkup import probe


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is installed counts, but what an import would find."""
    monkeypatch.syspath_prepend(tmp_path)
    assert probe.package("a_package_of_a_test") is None
    folder = tmp_path / "a_package_of_a_test"
    folder.mkdir()
    assert probe.package(folder.name) is None  # nothing is in it
    folder.joinpath("__init__.py").write_text('"""Doc."""\n__version__ = "1.2.3"\n')
    assert probe.package(folder.name) == "1.2.3"
    before = probe.digest(folder.name)
    folder.joinpath("more.py").write_text("x = 1\n")
    assert len({before, probe.digest(folder.name), probe.digest("no_such_package")}) == 3


def test_a_folder_that_is_not_there() -> None:
    assert probe.room("/no/such/folder")["error"] == "No such file or directory"
    assert probe.room("/")["size"] > 0


def test_names() -> None:
    assert probe.resolve("localhost")["addresses"] == ["127.0.0.1"]
    assert "error" in probe.resolve("no-such-host.invalid")
    assert probe.route("127.0.0.1")["interface"] == "lo"


def test_who_is_too_slow_is_left_out() -> None:
    never = threading.Event()
    assert probe.at_once(lambda n: n or never.wait(), [0, 1, 2], 0.5) == {1: 1, 2: 2}
    never.set()


def test_only_those_with_the_secret_are_served() -> None:
    alice, bob = probe.Probe(), probe.Probe()
    ports = alice.do_listen(["127.0.0.1"], [0], "secret")
    to = ["127.0.0.1", ports["127.0.0.1"]["0"]]
    bob.do_listen([], [], "secret")
    assert bob.do_reach({"alice": to}) == {"alice": ""}
    assert bob.do_shout("bob", {"alice": [*to, [256]]}) == {"alice": {"256": ""}}
    assert alice.do_heard({"bob": [256]}, 10.0) == {"bob": [256]}
    measured = bob.do_measure(*to, sizes=[1, 4096], seconds=0.05)
    assert set(measured["samples"]) == {"1", "4096"}
    mallory = probe.Probe()
    mallory.do_listen([], [], "sesame")
    assert mallory.do_reach({"alice": to})["alice"] in (
        "another program answers",
        "connection reset by peer",
    )
    mallory.do_shout("mallory", {"alice": [*to, [256]]})
    assert "mallory" not in alice.do_heard({"mallory": [256]}, 0.1)


def test_a_slow_message_is_not_sent_again_and_again() -> None:
    known = {"1": [1e-3], "65536": [0.1]}
    assert probe._is_short(known, 65536, 0.6)
    assert probe._is_short(known, 1 << 17, 0.6)
    assert not probe._is_short(known, 1 << 20, 0.6)


def test_what_fails_is_said() -> None:
    answer = probe.Probe().answer({"do": "measure", "address": "x"})
    assert answer["error"].startswith("TypeError: ")
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    reached = probe.Probe().do_reach({"nobody": ["127.0.0.1", port]})
    assert reached == {"nobody": os.strerror(111).lower()}
