"""Tensors that processes of one host hand to each other in memory that both see (Linux).

The sender writes a tensor into a *block* of its :class:`Pool` and says where it lies; the receiver
maps that memory and has the tensor without a copy. The block is lent until the receiver's last
tensor over it is gone; the sender hears so in passing, with the next message, and uses it again.

The memory has no name: a ``memfd``, found through ``/proc`` by processes of its user alone, and
gone with the last process that maps it, however that ends. It is sealed: nobody can make it
shorter, so that what was checked when it was mapped holds for ever.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
import sys
import warnings
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.transport.sockets import outlives_connection

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: Tensors of so many bytes and more travel this way; smaller ones are faster through a socket.
LARGE = 1 << 16
#: Bytes of a pool's files; a larger tensor has a file of its own.
_FILE = 1 << 26


class MemoryGone(KVStoreError):
    """A tensor was in the memory of a process that has ended."""


class Place(NamedTuple):
    """The place of a tensor: ``nbytes`` from ``start`` on in an open file of a process."""

    pid: int
    file: int
    inode: int
    start: int
    nbytes: int


class Pool:
    """Memory of this process that others can see.

    >>> pool = Pool()
    >>> x = pool.empty(100_000, torch.float32).fill_(1)
    >>> pool.find(x[10:20]).nbytes
    40
    """

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._used: dict[int, tuple[_File, int, Any]] = {}  # by address: file, start, guard
        self._free: dict[int, list[tuple[_File, int]]] = {}  # by size

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of ``size`` elements."""
        nbytes = size * dtype.itemsize
        room = math.ceil(nbytes / mmap.PAGESIZE) * mmap.PAGESIZE
        file, start = self._take(room)
        view = memoryview(file.memory)[start : start + nbytes]
        tensor = over(view, dtype)
        address = tensor.data_ptr()
        # nothing but the tensor's storage holds the view: when it goes, the block is free
        guard = weakref.ref(view, lambda _: self._give_back(address, room))
        self._used[address] = file, start, guard
        return tensor

    def find(self, tensor: Tensor) -> Place | None:
        """The place of a tensor of this pool, or of a part; None if it is not from here."""
        used = self._used.get(tensor.untyped_storage().data_ptr())
        if used is None:
            return None
        file, start, _ = used
        start += int(tensor.storage_offset()) * tensor.element_size()
        return Place(os.getpid(), file.number, file.inode, start, tensor.nbytes)

    def _take(self, room: int) -> tuple[_File, int]:
        if self._free.get(room):
            return self._free[room].pop()
        if not self._files or self._files[-1].left < room:
            self._files.append(_File(max(room, _FILE)))
        return self._files[-1], self._files[-1].cut(room)

    def _give_back(self, address: int, room: int) -> None:
        file, start, _ = self._used.pop(address)
        self._free.setdefault(room, []).append((file, start))


class _File:
    """A file without a name, in memory; a page is taken when it is first written."""

    def __init__(self, size: int) -> None:
        self.number = os.memfd_create("distkit", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.number, size)
        fcntl.fcntl(self.number, fcntl.F_ADD_SEALS, _SEALS)
        self.memory = mmap.mmap(self.number, size)
        self.inode = os.fstat(self.number).st_ino
        self.left = size

    def cut(self, room: int) -> int:
        """The next ``room`` bytes: where they start."""
        self.left -= room
        return len(self.memory) - self.left - room


class Exchange:
    """The memory that this process and one other lend to each other.

    Args:
        pool: where this process's tensors are put.
        writable: whether what is borrowed may be written: if it is lent to nobody else.
    """

    def __init__(self, pool: Pool | None, *, writable: bool) -> None:
        self._pool, self._writable = pool, writable
        self._lent: dict[int, Tensor] = {}
        self._numbers = itertools.count()
        self._maps: dict[tuple[int, ...], mmap.mmap] = {}
        self._borrowed: dict[int, Any] = {}  # guards, by the lender's number
        self._given_up: list[int] = []

    def lend(self, tensor: Tensor) -> list[int] | None:
        """The place of a flat tensor for the peer, and a number; None if it must be sent."""
        if self._pool is None or tensor.nbytes < LARGE:
            return None
        place = self._pool.find(tensor)
        if place is None:
            tensor = self._pool.empty(tensor.numel(), tensor.dtype).copy_(tensor)
            place = self._pool.find(tensor)
            assert place is not None
        number = next(self._numbers)
        self._lent[number] = tensor
        return [*place, number]

    def take_back(self, numbers: list[int]) -> None:
        """The other needs these no more."""
        for number in numbers:
            self._lent.pop(number, None)

    def borrow(self, where: list[int]) -> memoryview:
        """The bytes of a tensor that the other lends, as :meth:`lend` described them.

        Raises:
            MemoryGone: the other has ended.
            KVStoreError: its memory cannot be opened.
            ValueError: there is no such memory, or not so much.
        """
        *numbers, number = where
        place = Place(*numbers)
        memory = self._map(place)
        if not 0 <= place.start <= place.start + place.nbytes <= len(memory):
            raise ValueError(f"{place} in memory of {len(memory)} bytes")
        view = memoryview(memory)[place.start : place.start + place.nbytes]
        self._borrowed[number] = weakref.ref(view, lambda _: self._give_up(number))
        return view

    def given_up(self) -> list[int]:
        """The numbers of what was borrowed and is not needed any more: to be told once."""
        numbers, self._given_up = self._given_up, []
        return numbers

    def _give_up(self, number: int) -> None:
        self._borrowed.pop(number, None)
        self._given_up.append(number)

    def _map(self, place: Place) -> mmap.mmap:
        key = place[:3]
        if key not in self._maps:
            try:
                self._maps[key] = _mapped(*key, self._writable)
            except OSError as e:
                if not outlives_connection(place.pid):
                    raise MemoryGone(f"process {place.pid} has ended, with its memory") from None
                raise KVStoreError(
                    f"the memory of process {place.pid} cannot be opened: {e}. Run all nodes of a "
                    "cluster as one user, where /proc shows them to each other."
                ) from None
        return self._maps[key]


def _mapped(pid: int, number: int, inode: int, writable: bool) -> mmap.mmap:
    """Map a file of another process, if it is sealed memory of this user."""
    flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    flags |= os.O_RDWR if writable else os.O_RDONLY
    file = os.open(f"/proc/{pid}/fd/{number}", flags)
    try:
        found = os.fstat(file)
        mine = (found.st_uid, found.st_ino) == (os.getuid(), inode)
        if not mine or not stat.S_ISREG(found.st_mode):
            raise ValueError(f"file {number} of process {pid} is not what it was said to be")
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"file {number} of process {pid} is not sealed")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(file, found.st_size, mmap.MAP_SHARED, protection)
    finally:
        os.close(file)


def over(view: Any, dtype: torch.dtype) -> Tensor:
    """A flat tensor over these bytes, which it keeps.

    Raises:
        ValueError: they are no whole number of elements.
    """
    if not len(view):
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype)


with warnings.catch_warnings():  # that memory may be read-only is said once, here
    warnings.simplefilter("ignore", UserWarning)
    over(b"0", torch.uint8)


# -- the pool of this process -----------------------------------------------------------

_pool: Pool | None = None


def shared() -> Pool | None:
    """This process's pool, from now on used by :func:`empty`; None where there is none."""
    global _pool
    if _pool is None and sys.platform == "linux":
        _pool = Pool()
    return _pool


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of ``size`` elements: in the pool, if this process has one and it is large."""
    if _pool is None or size * dtype.itemsize < LARGE:
        return torch.empty(size, dtype=dtype)
    return _pool.empty(size, dtype)


def empty_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, as :func:`empty`."""
    if _pool is None or tensor.nbytes < LARGE or tensor.device.type != "cpu":
        return torch.empty_like(tensor)
    return _pool.empty(tensor.numel(), tensor.dtype).view(tensor.shape)


def _forget() -> None:
    """In a fork of this process: its memory is the parent's."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)
