"""Where the ranks of several machines meet: what a file in a shared folder is for those of one.

torch's TCPStore would listen on every interface and ask nobody for a password. This one listens
on a Unix socket in the cluster's folder; from other machines a tunnel leads to it.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from distkit.cluster.processes.channel import Channel

#: The name of the socket, in the cluster's folder.
NAME = "store"


class StoreServer:
    """Keeps what ranks tell each other when groups are made.

    Args:
        folder: the cluster's own.
    """

    def __init__(self, folder: str) -> None:
        from torch.distributed import HashStore  # late: a kernel may do without torch

        self._groups: dict[str, Any] = defaultdict(HashStore)
        self._lock = threading.Lock()
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"{folder}/{NAME}")
        self._door.listen(128)
        threading.Thread(target=self._accept, name="distkit-store", daemon=True).start()

    def forget(self, run: str) -> None:
        """Drop what the ranks of a run have told each other, in whichever of its groups."""
        with self._lock:
            for group in [known for known in self._groups if known.startswith(f"{run}-")]:
                del self._groups[group]

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                channel = Channel(self._door.accept()[0])
                channel.listen(partial(self._answer, channel), lambda: None)

    def _answer(self, channel: Channel, question: tuple[str, str, list[Any]]) -> None:
        group, name, arguments = question
        with self._lock:
            store = self._groups[group]
        with suppress(OSError):  # who asked has ended
            channel.send(getattr(store, name)(*arguments))


class StoreClient:
    """A rank's view of it: the methods of torch's FileStore.

    Args:
        folder: the cluster's own, on this machine.
        group: whose values these are.
    """

    def __init__(self, folder: str, group: str) -> None:
        self._path, self._group = str(Path(folder, NAME)), group
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._channel is None:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(self._path)
                self._channel = Channel(sock)
            try:
                self._channel.send((self._group, name, arguments))
                return self._channel.recv()
            except BaseException:  # an interrupt may have come between question and answer
                self._channel.close()
                self._channel = None
                raise
