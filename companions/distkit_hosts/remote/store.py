"""Rendezvous store for ranks on several machines; the counterpart of FileStore on one machine.

torch's TCPStore would listen on every interface without authentication. This store listens on a
Unix socket in the cluster's folder; other machines reach it through a tunnel.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Any

from distkit.cluster.processes.channel import Channel

#: The name of the socket, in the cluster's folder.
NAME = "store"


class StoreServer:
    """Stores the values that ranks exchange when process groups are created.

    Args:
        folder: the cluster's folder.
    """

    def __init__(self, folder: str) -> None:
        from torch.distributed import HashStore  # here, because the kernel may never need torch

        self._groups: dict[str, Any] = defaultdict(HashStore)
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/{NAME}")
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="distkit-store", daemon=True).start()

    def forget(self, run: str) -> None:
        """Delete the values of all groups of a run."""
        with self._lock:
            for group in [name for name in self._groups if name.startswith(f"{run}-")]:
                del self._groups[group]

    def close(self) -> None:
        """Stop accepting connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                channel = Channel(self._listener.accept()[0])
                channel.listen(partial(self._reply, channel), lambda: None)

    def _reply(self, channel: Channel, request: tuple[str, str, list[Any]]) -> None:
        group, name, arguments = request
        with self._lock:
            store = self._groups[group]
        with suppress(OSError):  # the client has exited
            channel.send(getattr(store, name)(*arguments))


class StoreClient:
    """Client of one group's store in the :class:`StoreServer`; backs a ``PollingStore``.

    Args:
        folder: the cluster's folder on this machine.
        group: the name of the group.
    """

    def __init__(self, folder: str, group: str) -> None:
        self._path, self._group = f"{folder}/{NAME}", group
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``dist.Store`` and return its result."""
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
