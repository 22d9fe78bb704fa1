"""Where the ranks of several machines meet: what a file in a shared folder is for those of one.

torch's TCPStore would listen on every interface and ask nobody for a password. This one listens
on a Unix socket in the cluster's folder; from other machines a tunnel leads to it.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
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
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"{folder}/{NAME}")
        self._door.listen(128)
        threading.Thread(target=self._accept, name="distkit-store", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                channel = Channel(self._door.accept()[0])
                threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        with suppress(EOFError, OSError):
            while True:
                name, arguments = channel.recv()
                with self._lock:
                    answer = getattr(self, f"do_{name}")(*arguments)
                channel.send(answer)
        channel.close()

    def do_set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._values[key] = value

    def do_get(self, key: str) -> bytes:
        """A value that is there."""
        return self._values[key]

    def do_add(self, key: str, number: int) -> int:
        """Count."""
        now = int(self._values.get(key, b"0")) + number
        self._values[key] = str(now).encode()
        return now

    def do_compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace a value if it is the expected one; an empty one if there is none."""
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def do_check(self, keys: list[str]) -> bool:
        """True if all of these are there."""
        return all(key in self._values for key in keys)

    def do_delete_key(self, key: str) -> bool:
        """Remove a value; True if it was there."""
        return self._values.pop(key, None) is not None

    def do_num_keys(self, begin: str) -> int:
        """The number of values whose keys begin like this."""
        return sum(key.startswith(begin) for key in self._values)


class StoreClient:
    """A rank's view of it: as torch's FileStore, with keys of one group's own.

    Args:
        folder: the cluster's own, on this machine.
        group: what nobody else's keys begin with.
    """

    def __init__(self, folder: str, group: str) -> None:
        self._path, self._group = str(Path(folder, NAME)), f"{group}/"
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        self._ask("set", self._group + key, _bytes(value))

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return bytes(self._ask("get", self._group + key))

    def add(self, key: str, number: int) -> int:
        """Count."""
        return int(self._ask("add", self._group + key, number))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Replace a value if it is the expected one."""
        answer = self._ask("compare_set", self._group + key, _bytes(expected), _bytes(desired))
        return bytes(answer)

    def check(self, keys: list[str]) -> bool:
        """True if all of these are there."""
        return bool(self._ask("check", [self._group + key for key in keys]))

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._ask("delete_key", self._group + key))

    def num_keys(self) -> int:
        """The number of values."""
        return int(self._ask("num_keys", self._group))

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._channel is None:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(self._path)
                self._channel = Channel(sock)
            try:
                self._channel.send((name, arguments))
                return self._channel.recv()
            except BaseException:  # an interrupt may have come between question and answer
                self._channel.close()
                self._channel = None
                raise


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
