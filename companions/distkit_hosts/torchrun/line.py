"""A line that a rank offers, which others have started: a notebook of this machine takes it up.

It carries what a lifeline does, but nobody depends on it: when it breaks, the rank goes on. It is
a Unix socket in a folder that only this user can enter, so whoever speaks is this user.
"""

from __future__ import annotations

import shutil
import socket
import struct
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

#: The number of a rank's only run.
RUN = 1

#: A notebook that takes nothing for so long has lost the line [s], as SO_SNDTIMEO has it.
_PATIENCE = struct.pack("ll", 2, 0)

_NAME = "line"


class Line:
    """The rank's end.

    Args:
        stepped: called with True when the rank is to be paused before each communication, with
            False when that is over.
        hurry: called when somebody waits: has :meth:`take_up` called, and events told.
        release: called with the reason when the notebook ends the program.

    Where there can be no such line, :attr:`path` is "".
    """

    def __init__(
        self,
        stepped: Callable[[bool], None],
        hurry: Callable[[], None],
        release: Callable[[str], None],
    ) -> None:
        self._stepped, self._hurry, self._release = stepped, hurry, release
        self._gate = Gate()
        self._new: Channel | None = None  # taken up, and not greeted
        self._channel: Channel | None = None
        self._is_stepped = False
        self.path, self._listener = "", socket.socket(socket.AF_UNIX)
        with suppress(StartError, OSError):
            folders.sweep(tempfile.gettempdir())
            folder, self._held = folders.make()
            self._listener.bind(f"{folder}/{_NAME}")
            self._listener.listen(1)
            self.path = f"{folder}/{_NAME}"
            threading.Thread(target=self._listen, name="distkit-line", daemon=True).start()

    def pass_by(self, op: Op, nbytes: int) -> None:
        """Stand at the gate: a hook of the tap's."""
        self._gate.wait()

    def take_up(self, written: int) -> None:
        """Tell a new listener how many events are in the file; the others come from now on."""
        if self._new is not None:
            self._channel, self._new = self._new, None
            self.emit("begun", written)

    def emit(self, kind: str, what: Any) -> None:
        """Tell whoever listens."""
        channel = self._channel
        if channel is not None:
            try:
                channel.send((RUN, kind, what))
            except OSError:
                channel.hang_up()

    @property
    def heard(self) -> bool:
        """True if somebody listens."""
        return self._channel is not None

    def close(self) -> None:
        """The rank ends."""
        if self._channel is not None:
            self._channel.hang_up()
        self.close_here()
        if self.path:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)

    def close_here(self) -> None:
        """In a process that the rank has forked: it has no line."""
        self._listener.close()
        if self._channel is not None:
            self._channel.close_here()

    def _listen(self) -> None:
        with suppress(OSError):  # the rank ends
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
                self._serve(Channel(sock))

    def _serve(self, channel: Channel) -> None:
        self._new = channel
        self._hurry()
        with suppress(EOFError):
            while True:
                self._obey(*channel.recv())
        self._channel = self._new = None
        self._obey("go", RUN, None)
        channel.close()

    def _obey(self, word: str, run: int, *what: Any) -> None:
        if word == "step":
            if not self._is_stepped:
                self._gate = Gate()
                self._gate.arrived = self._hurry
            self._set_stepped(True)
        elif word == "release":
            self._release(*what)
        else:
            self._gate.allow(*what)
            if what == (None,):
                self._set_stepped(False)

    def _set_stepped(self, on: bool) -> None:
        self._is_stepped = on
        self._stepped(on)
