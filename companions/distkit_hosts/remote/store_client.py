"""A rank's client of the rendezvous store of ranks on several machines."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distkit.cluster.processes.channel import Channel
from distkit_hosts.remote.store import NAME

#: Interval between polls for a key [s].
POLL_INTERVAL = 0.001


class StoreClient(dist.Store):
    """Implements torch's store in Python, with requests to the :class:`StoreServer`.

    Args:
        folder: the cluster's folder on this machine.
        group: the group of the values.
    """

    timeout: timedelta  # missing in torch's type hints

    def __init__(self, folder: str, group: str) -> None:
        super().__init__()
        self._path, self._group = f"{folder}/{NAME}", group
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self.set_timeout(timedelta(minutes=30))

    # the names and arguments of dist.Store, which torch's C++ calls

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, num: int) -> int:
        """Add to a counter, and return its value."""
        return int(self._ask("add", key, num))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Replace a value if it is the expected one."""
        return bytes(self._ask("compare_set", key, expected_value, desired_value))

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return bool(self._ask("check", keys))

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        """Return the number of values."""
        return int(self._ask("num_keys"))

    deleteKey, getNumKeys = delete_key, num_keys  # their names in C++

    # instead of torch's methods, which would call the recorder's replacements without end

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: the timeout has passed.
        """
        end = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"{keys} were not set within {timeout or self.timeout}")
            time.sleep(POLL_INTERVAL)

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._channel is None:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(self._path)
                self._channel = Channel(sock)
            try:
                self._channel.send((self._group, name, arguments))
                return self._channel.recv()
            except BaseException:  # an interrupt may come between request and reply
                self._channel.close()
                self._channel = None
                raise
