"""The store through which the ranks of a group find each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: Interval between polls for a key [s]; torch's FileStore polls every 10 ms, and a group that
#: connects waits several times.
POLL_INTERVAL = 0.001

#: Timeout for a store's file that was removed, perhaps by a cleanup program [s].
FILE_TIMEOUT = 1.0


def open_file(path: str, ranks: int) -> PollingStore:
    """Return a store in a file, for ranks on one machine."""
    file = dist.FileStore(path, ranks)
    file.set_timeout(timedelta(seconds=FILE_TIMEOUT))
    return PollingStore(lambda method, *arguments: getattr(file, method)(*arguments))


class PollingStore(dist.Store):
    """A ``dist.Store`` whose waits poll for their keys.

    Args:
        call: calls a method, by its name, of the ``dist.Store`` that has the values.
    """

    timeout: timedelta  # missing in torch's type hints

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call
        self.set_timeout(timedelta(minutes=30))

    # the names and arguments of dist.Store, which torch's C++ calls

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return bytes(self._call("get", key))

    def add(self, key: str, num: int) -> int:
        """Add to a counter, and return its value."""
        return int(self._call("add", key, num))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Replace a value if it equals the expected value."""
        return bytes(self._call("compare_set", key, expected_value, desired_value))

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return bool(self._call("check", keys))

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._call("delete_key", key))

    def num_keys(self) -> int:
        """Return the number of values."""
        return int(self._call("num_keys"))

    deleteKey, getNumKeys = delete_key, num_keys  # their names in C++

    # torch's versions would call the recorder's hooks recursively

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
