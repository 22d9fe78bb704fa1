"""Accept a notebook of this machine at a socket of a rank that another launcher started.

The socket carries the messages of a lifeline, but the rank outlives the connection. It is a
Unix socket in a folder that only this user can enter, so the peer is a process of this user.
"""

from __future__ import annotations

import shutil
import socket
import struct
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

#: The number of a rank's only run.
RUN = 1

#: Time after which a notebook that receives nothing is disconnected [s], as SO_SNDTIMEO.
_SEND_TIMEOUT = struct.pack("ll", 2, 0)

_NAME = "line"


class NotebookConnection:
    """The rank's end of the connection to a notebook.

    :attr:`path` is "" if the socket cannot be created.

    Args:
        stepped: called with True to pause the rank before each communication, and with False to
            stop doing so.
        request_flush: called when a listener waits for events or for :meth:`announce`.
        release: called with the reason when the notebook ends the program.
    """

    def __init__(
        self,
        stepped: Callable[[bool], None],
        request_flush: Callable[[], None],
        release: Callable[[str], None],
    ) -> None:
        self._stepped, self._request_flush, self._release = stepped, request_flush, release
        self._gate = Gate()
        self._pending: Channel | None = None  # connected, but not announced yet
        self._channel: Channel | None = None
        self._is_stepped = False
        self.path, self._listener = "", socket.socket(socket.AF_UNIX)
        with suppress(StartError, OSError):
            folder = folders.make(folders.new_prefix())
            self._listener.bind(f"{folder}/{_NAME}")
            self._listener.listen(1)
            self.path = f"{folder}/{_NAME}"
            threading.Thread(target=self._listen, name="distkit-line", daemon=True).start()

    def wait_at_gate(self, op: Op, nbytes: int) -> None:
        """Wait at the gate; a hook of the tap."""
        self._gate.wait()

    def announce(self, written: int) -> None:
        """Send a new listener the number of events in the file; it receives later events."""
        if self._pending is not None:
            self._channel, self._pending = self._pending, None
            self.emit("begun", written)

    def emit(self, kind: str, value: Any) -> None:
        """Send a message to the listener, if any."""
        channel = self._channel
        if channel is not None:
            try:
                channel.send((RUN, kind, value))
            except OSError:
                channel.hang_up()

    @property
    def has_listener(self) -> bool:
        """Whether a listener is connected."""
        return self._channel is not None

    def close(self) -> None:
        """Close the connection and remove the socket, at the end of the rank."""
        if self._channel is not None:
            self._channel.hang_up()
        self.close_here()
        if self.path:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)

    def close_here(self) -> None:
        """Close the sockets in a forked child of the rank."""
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):  # the rank ends
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
                self._serve(Channel(sock))

    def _serve(self, channel: Channel) -> None:
        self._pending = channel
        self._request_flush()
        with suppress(EOFError):
            while True:
                self._handle_command(*channel.recv())
        self._channel = self._pending = None
        self._handle_command("go", RUN, None)
        channel.close()

    def _handle_command(self, command: str, run: int, *arguments: Any) -> None:
        if command == "step":
            if not self._is_stepped:
                self._gate = Gate()
                self._gate.arrived = self._request_flush
            self._set_stepped(True)
        elif command == "release":
            self._release(*arguments)
        else:
            self._gate.allow(*arguments)
            if arguments == (None,):
                self._set_stepped(False)

    def _set_stepped(self, on: bool) -> None:
        self._is_stepped = on
        self._stepped(on)
