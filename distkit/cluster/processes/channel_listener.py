"""Hearing what the processes of all clusters say, in one thread."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from distkit.cluster.processes.channel import Channel


class ChannelListener:
    """Reads many channels, and hands every message to the one who asked for it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[tuple[Channel, Callable[[Any], None], Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._wakeup, self._bell = os.pipe()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        threading.Thread(target=self._work, name="distkit-lines", daemon=True).start()

    def add(self, channel: Channel, hear: Callable[[Any], None], gone: Callable[[], None]) -> None:
        """Call ``hear(message)`` for each message, and ``gone()`` after the last; then close it.

        To end it from this side, ``channel.hang_up()``: the channel belongs to the thread.
        """
        with self._lock:
            self._new.append((channel, hear, gone))
        os.write(self._bell, b"!")

    def _work(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wakeup, 4096)
                    self._take_up()
                else:
                    self._read(*key.data)

    def _take_up(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for line in new:
            self._selector.register(line[0], selectors.EVENT_READ, line)

    def _read(
        self, channel: Channel, hear: Callable[[Any], None], gone: Callable[[], None]
    ) -> None:
        try:
            try:
                message = channel.recv()
            except EOFError:
                self._selector.unregister(channel)
                channel.close()
                gone()
            else:
                hear(message)
        except Exception:  # a listener's mistake must not make all the others deaf
            traceback.print_exc(file=sys.__stderr__)


_lines: ChannelListener | None = None
_guard = threading.Lock()


def lines() -> ChannelListener:
    """This process's listener, started if need be."""
    global _lines
    with _guard:
        if _lines is None:
            _lines = ChannelListener()
        return _lines


def _forget() -> None:
    """In a fork of this process: its thread has not come along."""
    global _lines, _guard
    _lines, _guard = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
