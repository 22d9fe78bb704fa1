"""The control socket of an attached rank: access, commands and disconnection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.folders import is_ours
from distkit.events import Op
from distkit_hosts.torchrun import line
from distkit_hosts.torchrun.line import NotebookConnection


class Rank:
    """A rank with a control socket; ``passed`` counts its communication calls."""

    def __init__(self) -> None:
        self.passed, self.stepped, self.released = 0, list[bool](), list[str]()
        self.line = NotebookConnection(self.stepped.append, self.hurry, self.released.append)

    def hurry(self) -> None:
        self.line.announce(7)

    def communicate(self, times: int) -> threading.Thread:
        def work() -> None:
            for _ in range(times):
                self.line.wait_at_gate(Op.BARRIER, 0)
                self.passed += 1

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.line.close()
    assert not Path(made.line.path).parent.exists()


def call(rank: Rank) -> Channel:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(rank.line.path)
    return Channel(sock)


def test_socket_of_another_user_is_ignored(rank: Rank, tmp_path: Path) -> None:
    assert is_ours(Path(rank.line.path).parent)
    tmp_path.chmod(0o755)
    assert not is_ours(tmp_path)  # accessible for others
    assert not is_ours(tmp_path / "none")


def test_stalled_reader_is_dropped(rank: Rank, monkeypatch: Any) -> None:
    monkeypatch.setattr(line, "_SEND_TIMEOUT", struct.pack("ll", 0, 50_000))
    caller = call(rank)
    caller.recv()
    until(
        lambda: (rank.line.emit("rows", bytes(1 << 20)), not rank.line.has_listener)[1], timeout=60
    )
    caller.close()
