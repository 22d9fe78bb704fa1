"""A rank's client of the rendezvous store of ranks on several machines."""

from __future__ import annotations

import socket
import threading
from typing import Any

from distkit.cluster.processes.channel import Channel
from distkit_hosts.remote.store import NAME


class StoreClient:
    """Calls methods of a group's store in the :class:`StoreServer`, for a ``PollingStore``.

    Args:
        folder: the cluster's folder on this machine.
        group: the name of the group.
    """

    def __init__(self, folder: str, group: str) -> None:
        self._path, self._group = f"{folder}/{NAME}", group
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``dist.Store``, and return its result."""
        with self._lock:
            if self._channel is None:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(self._path)
                self._channel = Channel(sock)
            try:
                self._channel.send((self._group, method, arguments))
                return self._channel.recv()
            except BaseException:  # an interrupt may occur between request and reply
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
