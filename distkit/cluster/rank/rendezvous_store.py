"""The rendezvous store of a group: a file, and waiting that can be interrupted."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

#: How often to look whether a key has come [s]. torch's own FileStore looks every 10 ms.
PERIOD = 0.001


class PatientStore(dist.Store):
    """A ``dist.FileStore`` that waits in Python, where an interrupt reaches it.

    torch's stores wait in C++ for up to 30 minutes and hear no signal: a ``new_group`` that
    not every member calls could only be ended together with its process.

    Args:
        path: of the file, in a folder that only this user can enter.
        world_size: how many ranks meet.
    """

    def __init__(self, path: str, world_size: int) -> None:
        super().__init__()
        self._path, self._file_store = path, dist.FileStore(path, world_size)
        self._timeout = timedelta(minutes=30)

    @property
    def _file(self) -> dist.FileStore:
        """torch's, unless the file is gone: then it would wait for it, where no interrupt comes."""
        if not os.path.exists(self._path):  # noqa: PTH110  # a third of the time
            raise dist.DistStoreError(
                f"{self._path} was removed, perhaps by a program that cleans temporary folders: "
                "the ranks cannot meet without it. Make the cluster again."
            )
        return self._file_store

    # the names and arguments of dist.Store, which torch's C++ calls

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return self._file.get(key)

    def add(self, key: str, num: int) -> int:
        """Count."""
        return self._file.add(key, num)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Replace a value if it is the expected one."""
        return self._file.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        """True if all of these are there."""
        return self._file.check(keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self._file.delete_key(key)

    def num_keys(self) -> int:
        """The number of values."""
        return self._file.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls them

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout for a value."""
        self._timeout = timeout

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """True if it has append as well: no file store has."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these are there.

        Raises:
            DistStoreError: they have not come in time.
        """
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self._file.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"{keys} did not come within {timeout or self._timeout}")
            time.sleep(PERIOD)
