"""An all-reduce through shared memory within a host, with a ring between hosts."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distkit._format import named
from distkit.algorithms.all_reduce.ring import ring_of
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, hosts_of
from distkit.trace.log import grouped

#: Maximum size of a rank's slot [bytes], which should stay in the cache.
SLOT = 1 << 20
#: Maximum size of all slots [bytes]; containers have little shared memory.
SLOTS = 1 << 25
#: Maximum total size [bytes] at which every rank reduces everything, which saves a barrier.
SMALL = 1 << 18
#: Number of integers in each rank's status, which fills a cache line.
_STATUS = 8
#: Number of cached slot views.
_CACHED_VIEWS = 64
#: A barrier polls _POLLS times without sleeping, and then sleeps between polls, first for
#: _MIN_SLEEP and at most for _MAX_SLEEP [s].
_POLLS, _MIN_SLEEP, _MAX_SLEEP = 200, 2e-5, 1e-3
#: Whether the system has anonymous files (memfd) that other processes can open.
_HAS_MEMFD = sys.platform == "linux"


@collective(on_device=True)
def shared_memory_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce ``x`` through shared memory, in place, as ``dist.all_reduce(x)`` does.

    No message is sent within a host. Every rank writes its tensor block by block into its slot of
    the shared memory. Rank r then sums part r of all slots, and every rank reads all sums::

        rank 0  writes slot 0 ─┐           ┌─ sums part 0 ─┐           ┌─ reads the sums
        rank 1  writes slot 1 ─┼─ barrier ─┼─ sums part 1 ─┼─ barrier ─┼─ reads the sums
        rank 2  writes slot 2 ─┘           └─ sums part 2 ─┘           └─ reads the sums

    This is reduce-scatter and all-gather at memory speed. If the tensors on a host have at most
    256 KiB in total, each rank sums all parts itself, which saves a barrier. In both cases, the
    result is bitwise identical on all ranks. If there are several hosts, their first ranks then
    all-reduce the sums in a ring, and the other ranks copy the result.

    Args:
        x: a tensor with the same shape on every rank; GPUs copy directly to and from the slots.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.

    Raises:
        ValueError: Tensors or reductions differ between the ranks on a host.

    Source:
        Jain et al., "Framework for scalable intra-node collective operations using shared
        memory", SC 2018. NCCL and MPI implementations do the same within a host.

    Example:
        >>> import distkit as dk, torch
        >>> def total():
        ...     x = torch.arange(6.)
        ...     dk.algorithms.shared_memory_all_reduce(x)
        ...     return x.tolist()
        >>> dk.run_ranks(total, 3).results[0]        # doctest: +SKIP
        [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    """
    segment = Segment.for_group(group)
    segment.reduce(x, op)
    if len(segment.leaders) > 1:
        if segment.rank == 0:
            ring_of(segment.leaders, x, op, group)
        segment.broadcast(x)


class Segment:
    """Memory shared by the ranks of a group on one host, with a barrier.

    ``leaders`` are the first ranks of all hosts. The segment has one cache line per rank for its
    status, and two sets of slots that alternate, so that a barrier separates the last read of a
    slot from the next write.

    Args:
        group: the process group; all its ranks on a host must create the segment together.
    """

    _all: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Segment]] = WeakKeyDictionary()

    @classmethod
    def for_group(cls, group: Group) -> Segment:
        """Return the segment of a group, created on first use."""
        group = group or dist.group.WORLD
        assert group is not None  # the default group exists
        if group not in cls._all:
            cls._all[group] = cls(group)
        return cls._all[group]

    def __init__(self, group: dist.ProcessGroup) -> None:
        hosts, rank = hosts_of(group), dist.get_rank(group)
        local_ranks = next(host for host in hosts if rank in host)
        self.leaders, self.rank, self.n = (
            [h[0] for h in hosts],
            local_ranks.index(rank),
            len(local_ranks),
        )
        self.slot = min(SLOT, SLOTS // (2 * self.n + 2) // 64 * 64)
        status_bytes = self.n * _STATUS * 8
        size = status_bytes + 2 * (self.n + 1) * self.slot
        with torch.inference_mode(False):  # the tensor outlives the caller's inference mode
            memory = _map_shared(group, local_ranks, size)
            self._slots = memory[status_bytes:].view(2, self.n + 1, self.slot)
        self._status = memoryview(memory[:status_bytes].numpy()).cast("q")  # type: ignore[arg-type]
        self._views = lru_cache(_CACHED_VIEWS)(self._make_views)
        self._generation = self._set = self._signature = 0
        self._lock = threading.Lock()
        self._lock.acquire()

    def reduce(self, x: Tensor, op: ReduceOp) -> None:
        """Reduce ``x`` over the ranks on this host, in place."""
        reduce, signature = _REDUCE[op], _signature_of(x, op)
        if x.nbytes * self.n <= SMALL:
            slots, _ = self.write(x, signature)
            self._barrier()
            sums = x if x.is_cpu else torch.empty(x.shape, dtype=x.dtype)
            reduce(slots, out=sums)
            if sums is not x:
                x.copy_(sums)
            return

        for block in x.split(self.slot // x.element_size()):
            slots, sums = self.write(block, signature)
            part = self.part(len(block))
            self._barrier()
            reduce(slots[:, part], out=sums[part])
            self._barrier()
            block.copy_(sums)

    def broadcast(self, x: Tensor) -> None:
        """Copy ``x`` from this host's first rank to its other ranks."""
        signature = _signature_of(x, SUM)
        for block in x.split(self.slot // x.element_size()):
            slots, _ = self.write(block, signature)
            self._barrier()
            if self.rank:
                block.copy_(slots[0])

    def write(self, block: Tensor, signature: int) -> tuple[Tensor, Tensor]:
        """Write a block (k,) and its signature into this rank's slot.

        Returns:
            All slots (n, k), complete after the next barrier, and a buffer for sums (k,).
        """
        self._set, self._signature = 1 - self._set, signature
        slots, slot, sums = self._views(self._set, block.dtype, len(block))
        slot.copy_(block)
        self._status[self.rank * _STATUS + 1 + self._set] = signature
        return slots, sums

    def _make_views(
        self, buffer_set: int, dtype: torch.dtype, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of one set: all slots (n, k), this rank's slot (k,), a sum buffer (k,)."""
        with torch.inference_mode(False):
            slots = self._slots[buffer_set].view(dtype)[:, :k]
            return slots[: self.n], slots[self.rank], slots[self.n]

    def part(self, k: int) -> slice:
        """Return the slice of ``k`` elements that this rank reduces."""
        return slice(k * self.rank // self.n, k * (self.rank + 1) // self.n)

    def _barrier(self) -> None:
        """Wait for all ranks and compare their calls.

        Raises:
            ValueError: The ranks passed different tensors or reductions; raised on every rank.
        """
        self._generation += 1
        self._fence()
        self._status[self.rank * _STATUS] = self._generation
        for rank in range(self.n):
            self._wait_for(rank * _STATUS)
        self._fence()
        signatures = self._status[1 + self._set :: _STATUS].tolist()
        if signatures.count(self._signature) != self.n:
            raise ValueError(_mismatch(signatures))

    def _fence(self) -> None:
        """Issue a memory fence for processors with weak memory ordering."""
        self._lock.release()
        self._lock.acquire()

    def _wait_for(self, index: int) -> None:
        """Poll until a rank arrives; after many polls, sleep between polls."""
        polls, sleep = 0, _MIN_SLEEP
        while self._status[index] < self._generation:
            polls += 1
            if polls < _POLLS:
                os.sched_yield()
            else:
                time.sleep(sleep)
                sleep = min(2 * sleep, _MAX_SLEEP)


def _map_shared(group: dist.ProcessGroup, local_ranks: Sequence[int], size: int) -> Tensor:
    """Map memory that one rank creates and the others open.

    On Linux, the memory has no name and is freed when the last process that maps it exits.
    """
    store, key = group.get_group_store(), f"distkit/shared_memory/{local_ranks[0]}"
    rank = dist.get_rank(group)
    if rank != local_ranks[0]:
        host, path, inode = store.get(key).decode().split("\n")
        memory = _open_file(host, path, int(inode), size, rank, local_ranks[0])
        store.set(f"{key}/{rank}", "opened")
        return memory
    if _HAS_MEMFD:
        file = os.memfd_create("distkit", os.MFD_CLOEXEC)
        os.posix_fallocate(file, 0, size)  # fail here, not with SIGBUS later
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="distkit-")
    try:
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        store.set(key, f"{socket.gethostname()}\n{path}\n{os.fstat(file).st_ino}")
        for other in local_ranks[1:]:
            store.get(f"{key}/{other}")
    finally:
        os.close(file)
        if not _HAS_MEMFD:
            Path(path).unlink()
    return memory


def _open_file(host: str, path: str, inode: int, size: int, rank: int, first: int) -> Tensor:
    with suppress(OSError):
        if Path(path).stat().st_ino == inode:  # else the path belongs to another process
            return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    raise ValueError(
        f"rank {rank} cannot open the memory of rank {first}, although both have the host name "
        f"{host}: they may be in different containers. Give the containers different host names, "
        'or use "ring" or "halving_doubling".'
    )


# -- reductions and call signatures -------------------------------------------------

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
#: Functions that reduce slots (n, k) to ``out`` (k,).
_REDUCE: dict[ReduceOp, Callable[..., Tensor]] = {
    SUM: partial(torch.sum, dim=0),
    dist.ReduceOp.PRODUCT: partial(torch.prod, dim=0),
    dist.ReduceOp.MIN: partial(torch.amin, dim=0),
    dist.ReduceOp.MAX: partial(torch.amax, dim=0),
}
_OPS = list(_REDUCE)


def _signature_of(x: Tensor, op: ReduceOp) -> int:
    """Encode length, dtype and reduction as one integer."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"shared_memory_all_reduce does not support {x.dtype}. Convert x first.")
    return (len(x) * len(_DTYPES) + _DTYPES.index(x.dtype)) * len(_OPS) + _OPS.index(op)


def _mismatch(signatures: list[int]) -> str:
    """Return an error message that lists the different calls and their ranks."""

    def call(number: int) -> str:
        length_and_dtype, op = divmod(number, len(_OPS))
        length, dtype = divmod(length_and_dtype, len(_DTYPES))
        return f"{_OPS[op].name} of {str(_DTYPES[dtype])[6:]}[{length:,}]"

    calls = grouped(range(len(signatures)), lambda rank: call(signatures[rank]))
    listed = "; ".join(f"{named(ranks)}: {text}" for text, ranks in calls.items())
    return (
        f"all_reduce got different arguments ({listed}). Pass the same shape, dtype and reduction "
        "on every rank."
    )
