"""Shared memory for tensors between processes of one host (Linux).

The sender writes a tensor into a *block* of its :class:`Pool` and sends its address; the receiver
maps that memory, so the tensor is not copied. The block is lent until the receiver has freed its
last tensor there; the next message returns it to the sender, which reuses it.

The memory is a ``memfd`` without a name. Only processes of the same user can open it, through
``/proc``; the kernel frees it with the last process that maps it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import warnings
import weakref
from collections import defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distkit.errors import KVStoreError

#: Minimum size of a tensor in shared memory [bytes]; smaller ones are faster through a socket.
LARGE = 1 << 16
#: Size of a pool's file [bytes]; a page takes up memory only once it is written.
_SIZE = 1 << 38


class PeerMemoryLost(KVStoreError):
    """Raised for a tensor in the memory of a process that has exited."""


class Pool:
    """Shared memory of this process, in an anonymous file.

    ``used`` is the number of bytes at the start of the file that have been in use.

    >>> pool = Pool()
    >>> x = pool.empty(100_000, torch.float32)
    >>> pool.has(x[10:20]), pool.has(x.clone())
    (True, False)
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("distkit")
        os.ftruncate(self._file, _SIZE)
        self._inode, self.used = os.fstat(self._file).st_ino, 0
        self._memory = mmap.mmap(self._file, _SIZE)
        self._begin = from_buffer(self._memory, torch.uint8).data_ptr()
        self._free: dict[int, list[int]] = defaultdict(list)  # blocks by size

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of ``size`` elements."""
        nbytes = size * dtype.itemsize
        block = nbytes + -nbytes % mmap.PAGESIZE
        free = self._free[block]
        if not free:
            free.append(self.used)
            self.used += block
        start = free.pop()
        view = memoryview(self._memory)[start : start + nbytes]
        # only the tensor's storage references the view, so freeing the storage frees the block
        weakref.finalize(view, free.append, start).atexit = False
        return from_buffer(view, dtype)

    def address(self, tensor: Tensor) -> list[int]:
        """Return the address of a tensor: process, file, inode, first byte and number of bytes.

        For a tensor in other memory, the first byte is outside the file.
        """
        start = tensor.data_ptr() - self._begin
        return [os.getpid(), self._file, self._inode, start, tensor.nbytes]

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in this pool."""
        return 0 <= tensor.data_ptr() - self._begin < _SIZE


class Exchange:
    """The shared memory that this process and a peer lend to each other.

    Args:
        pool: the memory of this process, or None to lend nothing.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self._loans: dict[int, Tensor] = {}
        self._numbers = itertools.count()
        self._returned_loans: list[int] = []

    def lend(self, tensor: Tensor) -> list[int] | None:
        """Lend a flat tensor; return its address and the loan's number, or None if not lent."""
        if self._pool is None or tensor.nbytes < LARGE:
            return None
        if not self._pool.has(tensor):
            tensor = self._pool.empty(tensor.numel(), tensor.dtype).copy_(tensor)
        number = next(self._numbers)
        self._loans[number] = tensor
        return [*self._pool.address(tensor), number]

    def take_back(self, numbers: list[int]) -> None:
        """Release the tensors of loans that the peer has returned."""
        for number in numbers:
            self._loans.pop(number, None)

    def borrow(self, address: list[int]) -> memoryview:
        """Return the bytes of a tensor at an address from the peer's :meth:`lend`.

        Raises:
            PeerMemoryLost: The peer has exited.
        """
        pid, file, inode, start, nbytes, number = address
        memory = _map_file(pid, file, inode)
        self._pool = self._pool or _pool  # a peer that lends is on this host
        view = memoryview(memory)[start : start + nbytes]
        weakref.finalize(view, self._returned_loans.append, number).atexit = False
        return view

    def returned_loans(self) -> list[int]:
        """Return the numbers of loans that are no longer needed, each number once."""
        numbers = self._returned_loans.copy()
        del self._returned_loans[: len(numbers)]
        return numbers


@cache
def _map_file(pid: int, number: int, inode: int) -> mmap.mmap:
    """Map a file of another process, unless its pid was reused."""
    path = Path(f"/proc/{pid}/fd/{number}")
    with suppress(FileNotFoundError, ProcessLookupError), path.open("r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_ino == inode:
            return mmap.mmap(file.fileno(), 0)
    raise PeerMemoryLost(f"process {pid} has exited, and its memory no longer exists")


def from_buffer(view: Any, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor over these bytes, without copying them.

    Raises:
        ValueError: The size is not a multiple of the element size.
    """
    if not len(view):
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype)


with warnings.catch_warnings():  # torch warns once that memory may be read-only
    warnings.simplefilter("ignore", UserWarning)
    from_buffer(b"0", torch.uint8)


# -- the pool of this process -----------------------------------------------------------

_pool: Pool | None = None


def shared_pool() -> Pool | None:
    """Return this process's pool, which :func:`empty` then uses, or None if not supported."""
    global _pool
    if _pool is None and sys.platform == "linux":
        with suppress(OSError):  # the address space may be limited
            _pool = Pool()
    return _pool


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of ``size`` elements; a large one is in the pool, if there is one."""
    if _pool is None or size * dtype.itemsize < LARGE:
        return torch.empty(size, dtype=dtype)
    return _pool.empty(size, dtype)


def empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype, as :func:`empty` does."""
    if tensor.device.type != "cpu":
        return torch.empty_like(tensor)
    return empty(tensor.numel(), tensor.dtype).view(tensor.shape)


def _forget() -> None:
    """Drop the pool after a fork, because its memory is the parent's."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)
