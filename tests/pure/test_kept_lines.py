"""Lines that are made again, and the doors behind which the next kernel looks."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distkit.cluster.processes import door
from distkit.cluster.processes.channel import Channel, Renewable


def test_what_a_kernel_has_not_read_is_said_to_the_next_one() -> None:
    kernel, line = Channel.pair()
    zygote, spare = Channel.pair()
    lost = threading.Event()
    process = Renewable(line, spare)
    process.on_loss = lost.set
    with ThreadPoolExecutor() as threads:
        long = bytes(10_000_000)  # more than a socket takes: half of it when the kernel ends
        said = threads.submit(process.send, long)
        kernel._sock.recv(100_000)
        kernel.close()
        assert lost.wait(10)
        assert process.alone and not said.done()
        kernel, theirs = Channel.pair()
        with theirs:
            zygote.send(None, theirs.fileno())
        assert kernel.recv() == ("pid", os.getpid())
        assert kernel.recv() == long
        said.result(10)
        assert not process.alone
        kernel.send("go on")
        assert process.recv() == "go on"
        kernel.close()
        zygote.close()
        with pytest.raises(EOFError):  # nobody else will come
            process.recv()
        with pytest.raises(BrokenPipeError):
            process.send("anybody?")
    process.close_here()


def test_doors_of_other_users_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        tempfile.TemporaryDirectory() as short,  # a socket's path must be
        socket.socket(socket.AF_UNIX) as listener,
        ThreadPoolExecutor() as threads,
    ):
        folder = Path(short, "distkit-12345678")
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(tempfile, "tempdir", short)
        listener.bind(str(folder / door.NAME))
        listener.listen()

        def answer() -> None:
            line = Channel(listener.accept()[0])
            assert line.recv()[0] == "look"
            line.send(({"name": "mine", "holder": (1, "alpha")}, 90, b""))
            line.close()

        answered = threads.submit(answer)
        (one,) = door.kept()
        answered.result()
        assert one.standing == "no kernel since process 1 ended; stays for 90 s"
        monkeypatch.setattr(os, "getuid", lambda: -1)
        assert door.kept() == []
