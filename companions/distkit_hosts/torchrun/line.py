"""Obey a notebook of this machine, through a socket of a rank that another launcher started.

It is a Unix socket in a folder that only this user can enter, so the peer is a process of this
user. The rank outlives the connection.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.processes import folders
from distkit.cluster.processes.channel import Channel
from distkit.cluster.rank.gate import Gate
from distkit.errors import StartError
from distkit.events import Op

_NAME = "line"


class ControlSocket:
    """The rank's end of the connection to a notebook.

    :attr:`path` is "" if the socket cannot be created.

    Args:
        stepped: called with True to pause the rank before each communication, and with False to
            stop doing so.
        request_flush: called when the rank waits for the notebook's permit.
        release: called with the reason when the notebook ends the program.
    """

    def __init__(
        self,
        stepped: Callable[[bool], None],
        request_flush: Callable[[], None],
        release: Callable[[str], None],
    ) -> None:
        self._stepped, self._request_flush, self._release = stepped, request_flush, release
        self._gate: Gate | None = None  # of a stepped rank
        self.path, self._listener = "", socket.socket(socket.AF_UNIX)
        with suppress(StartError, OSError):
            folders.sweep(tempfile.gettempdir())
            folder, self._held = folders.make()
            self._listener.bind(f"{folder}/{_NAME}")
            self._listener.listen(1)
            self.path = f"{folder}/{_NAME}"
            threading.Thread(target=self._listen, name="distkit-line", daemon=True).start()

    def wait_at_gate(self, op: Op, nbytes: int) -> None:
        """Wait at the gate; a hook of the tap."""
        gate = self._gate
        if gate is not None:
            gate.wait()

    def close(self) -> None:
        """Remove the socket at the end of the rank."""
        self.close_here()
        if self.path:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)

    def close_here(self) -> None:
        """Close the socket in a forked child of the rank."""
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):  # the rank ends
            while True:
                self._serve(Channel(self._listener.accept()[0]))

    def _serve(self, channel: Channel) -> None:
        """Execute the commands of one notebook, then let the rank continue."""
        with suppress(EOFError, OSError):
            channel.send("ready")
            while True:
                self._handle_command(*channel.recv())
        self._handle_command("go", None)
        channel.close()

    def _handle_command(self, command: str, argument: Any) -> None:
        if command == "release":
            self._release(argument)
        elif command == "step" and self._gate is None:
            self._gate = Gate()
            self._gate.arrived = self._request_flush
            self._stepped(True)
        elif command == "go" and self._gate is not None:
            self._gate.allow(argument)
            if argument is None:
                self._gate = None
                self._stepped(False)
