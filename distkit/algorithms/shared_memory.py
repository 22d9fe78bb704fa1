"""All-reduce through memory that ranks of a host share, with a ring between hosts."""

from __future__ import annotations

import mmap
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
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from distkit.algorithms.all_reduce.ring import ring_of
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective
from distkit.algorithms.hosts import hosts_of

#: Bytes of a rank's slot at most: it stays in the cache between writing and reading.
SLOT = 1 << 20
#: Bytes of all slots at most: a container has little memory.
SLOTS = 1 << 25
#: Up to so many bytes of all ranks each sums everything by itself: one meeting instead of two.
SMALL = 1 << 18
#: Numbers that a rank shows the others, on a cache line of its own.
_LINE = 8
#: So many cuts of its slots a rank remembers.
_CUTS = 64
#: After so many looks a waiting rank sleeps in between [s], longer and longer.
_LOOKS, _NAP, _LONGEST = 200, 2e-5, 1e-3
#: Linux shows other processes files in memory that have no name.
_NAMELESS = sys.platform == "linux"


@collective(on_device=True)
def shared_memory_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce ``x`` in memory that ranks share, in place. The contract of ``dist.all_reduce(x)``.

    On one host no message is sent. Every rank writes its tensor, block by block, into its slot of
    memory that all can see; then rank r sums part r of all slots, and everybody reads all the
    sums::

        rank 0  writes slot 0 ─┐             ┌─ sums part 0 ─┐             ┌─ reads the sums
        rank 1  writes slot 1 ─┼─ all meet ──┼─ sums part 1 ─┼─ all meet ──┼─ reads the sums
        rank 2  writes slot 2 ─┘             └─ sums part 2 ─┘             └─ reads the sums

    That is reduce-scatter and all-gather again, at the speed of memory. Sums are taken in the
    order of ranks, so that everybody has the same to the bit. Of ranks on several hosts the first
    of each host then passes the sums round a ring, and everybody reads what comes out.

    Args:
        x: a tensor of any shape, the same on every rank. A GPU copies to the slots itself.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: who takes part; None for everybody.

    Raises:
        ValueError: tensors that differ between ranks of a host.

    Source:
        Jain et al., "Framework for scalable intra-node collective operations using shared
        memory", SC 2018. NCCL and the MPIs do so within a host.

    Example:
        >>> import distkit as dk, torch
        >>> def total():
        ...     x = torch.arange(6.)
        ...     dk.algorithms.shared_memory_all_reduce(x)
        ...     return x.tolist()
        >>> dk.run_ranks(total, 3).results[0]        # doctest: +SKIP
        [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    """
    segment = Segment.of(x, group)
    segment.reduce(x, op)
    if len(segment.leaders) > 1:
        if segment.rank == 0:
            ring_of(segment.leaders, x, op, group)
        segment.broadcast(x)


class Segment:
    """Memory that the ranks of a group on one host share, and the meetings of these ranks.

    ``leaders`` are the first ranks of all hosts, this one's among them.

    It has a line per rank with two or three numbers, and two sets of slots that are used in
    turn: a slot is written again only after a meeting that came after its last reading.

    Args:
        group: who shares it. All of them make it at the same time.
    """

    _all: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Segment]] = WeakKeyDictionary()

    @classmethod
    def of(cls, x: Tensor, group: Group) -> Segment:
        """The segment of a group, made when it is first used."""
        group = group or dist.group.WORLD
        assert group is not None  # collective() has checked it
        if group not in cls._all:
            cls._all[group] = cls(group)
        segment = cls._all[group]
        if x.is_cuda and not segment.pinned:
            segment.pin()
        return segment

    def __init__(self, group: dist.ProcessGroup) -> None:
        hosts, rank = hosts_of(group), dist.get_rank(group)
        here = next(host for host in hosts if rank in host)
        self.leaders, self.rank, self.n = [h[0] for h in hosts], here.index(rank), len(here)
        self.slot = min(SLOT, SLOTS // (2 * self.n + 2) // 64 * 64)
        lines = self.n * _LINE * 8
        memory = _mapped(group, here, lines + 2 * (self.n + 1) * self.slot)
        self._lines = memoryview(memory)[:lines].cast("q")
        with torch.inference_mode(False):  # it outlives the mode in which it is first used
            self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=lines)
        self._slots = self._slots.view(2, self.n + 1, self.slot)
        self._cuts = lru_cache(_CUTS)(self._cut)
        self._meetings = self._turn = self._said = 0
        self.pinned = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def pin(self) -> None:
        """Have the GPU copy from and to the slots by itself; if refused, it is slower."""
        self.pinned, runtime, address = True, torch.cuda.cudart(), self._slots.data_ptr()
        runtime.cudaHostRegister(address, self._slots.nbytes, 0)
        finalize(self, runtime.cudaHostUnregister, address).atexit = False

    def reduce(self, x: Tensor, op: ReduceOp) -> None:
        """Reduce ``x`` over the ranks here, in place."""
        reduce, said = _REDUCE[op], _say(x, op)
        if x.nbytes * self.n <= SMALL:
            slots, _ = self.write(x, said)
            self.meet()
            sums = x if x.is_cpu else torch.empty(x.shape, dtype=x.dtype)
            reduce(slots, out=sums)
            if sums is not x:
                x.copy_(sums)
            return

        for block in x.split(self.slot // x.element_size()):
            slots, sums = self.write(block, said)
            mine = self.part(len(block))
            self.meet()
            reduce(slots[:, mine], out=sums[mine])
            self.meet()
            block.copy_(sums)

    def broadcast(self, x: Tensor) -> None:
        """Copy ``x`` of the first rank here to all the others."""
        said = _say(x, SUM)
        for block in x.split(self.slot // x.element_size()):
            slots, _ = self.write(block, said)
            self.meet()
            if self.rank:
                block.copy_(slots[0])

    def write(self, block: Tensor, said: int) -> tuple[Tensor, Tensor]:
        """Put a block (k,) into this rank's slot, and say what it is.

        Returns:
            Everybody's slots (n, k), complete after the next meeting, and room for sums (k,).
        """
        self._turn, self._said = 1 - self._turn, said
        slots, mine, sums = self._cuts(self._turn, block.dtype, len(block))
        mine.copy_(block)
        self._lines[self.rank * _LINE + 1 + self._turn] = said
        return slots, sums

    def _cut(self, turn: int, dtype: torch.dtype, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """A turn's slots (n, k), this rank's (k,), and room for sums (k,)."""
        with torch.inference_mode(False):
            slots = self._slots[turn].view(dtype)[:, :k]
            return slots[: self.n], slots[self.rank], slots[self.n]

    def part(self, k: int) -> slice:
        """This rank's share of ``k`` elements."""
        return slice(k * self.rank // self.n, k * (self.rank + 1) // self.n)

    def meet(self) -> None:
        """Go on when everybody is here, with the same to reduce.

        Raises:
            ValueError: somebody came with another tensor or reduction; on every rank.
        """
        self._meetings += 1
        self._fence()
        self._lines[self.rank * _LINE] = self._meetings
        for rank in range(self.n):
            self._await(rank * _LINE)
        self._fence()
        said = self._lines[1 + self._turn :: _LINE].tolist()
        if said.count(self._said) != self.n:
            raise ValueError(_difference(said))

    def _fence(self) -> None:
        """Order memory: earlier writes are seen earlier, on weakly ordered processors, too."""
        self._lock.release()
        self._lock.acquire()

    def _await(self, line: int) -> None:
        """Look until this rank has come; sleep in between when that takes long."""
        looks, nap = 0, _NAP
        while self._lines[line] < self._meetings:
            looks += 1
            if looks < _LOOKS:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST)


def _mapped(group: dist.ProcessGroup, here: Sequence[int], size: int) -> mmap.mmap:
    """Memory that one rank makes and all open; nothing has its name any more when they have."""
    store, key = group.get_group_store(), f"distkit/shared_memory/{here[0]}"
    rank = dist.get_rank(group)
    if rank != here[0]:
        host, path, inode = store.get(key).decode().split("\n")
        file = _open(host, path, int(inode), rank, here[0])
        memory = mmap.mmap(file, size)
        os.close(file)
        store.set(f"{key}/{rank}", "opened")
        return memory
    file, path = _file(size)
    try:
        memory = mmap.mmap(file, size)
        store.set(key, f"{socket.gethostname()}\n{path}\n{os.fstat(file).st_ino}")
        for other in here[1:]:
            store.get(f"{key}/{other}")
    finally:
        os.close(file)
        if not _NAMELESS:
            Path(path).unlink()
    return memory


def _file(size: int) -> tuple[int, str]:
    """An open file of that size, and where others find it.

    On Linux it is in memory, and gone with the last process that has it, however that ends.

    Raises:
        OSError: there is too little memory.
    """
    if not _NAMELESS:
        file, path = tempfile.mkstemp(prefix="distkit-")
        os.ftruncate(file, size)
        return file, path
    file = os.memfd_create("distkit", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, size)  # now, instead of a crash later
    except OSError as error:
        os.close(file)
        raise OSError(
            f"there are no {size:,} bytes of memory left for all-reduce through shared memory. "
            "Make room, or use another algorithm."
        ) from error
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _open(host: str, path: str, inode: int, rank: int, first: int) -> int:
    with suppress(OSError):
        file = os.open(path, os.O_RDWR)
        if os.fstat(file).st_ino == inode:
            return file
        os.close(file)
    raise ValueError(
        f"rank {rank} does not see the memory of rank {first}, although the host of both is called "
        f"{host}: they may be in different containers. Give these different host names, or use "
        '"ring" or "halving_doubling".'
    )


# -- what is reduced, and what ranks tell each other about it ----------------------

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
#: How slots (n, k) become ``out`` (k,).
_REDUCE: dict[ReduceOp, Callable[..., Tensor]] = {
    SUM: partial(torch.sum, dim=0),
    dist.ReduceOp.PRODUCT: partial(torch.prod, dim=0),
    dist.ReduceOp.MIN: partial(torch.amin, dim=0),
    dist.ReduceOp.MAX: partial(torch.amax, dim=0),
}
_OPS = list(_REDUCE)


def _say(x: Tensor, op: ReduceOp) -> int:
    """Length, dtype and reduction in one number."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"shared_memory_all_reduce does not know {x.dtype}. Convert it first.")
    return (len(x) * len(_DTYPES) + _DTYPES.index(x.dtype)) * len(_OPS) + _OPS.index(op)


def _difference(said: list[int]) -> str:
    """The calls that do not fit together, by rank."""

    def call(number: int) -> str:
        rest, op = divmod(number, len(_OPS))
        length, dtype = divmod(rest, len(_DTYPES))
        return f"{_OPS[op].name} of {str(_DTYPES[dtype])[6:]}[{length:,}]"

    calls: dict[str, list[str]] = {}
    for rank, number in enumerate(said):
        calls.setdefault(call(number), []).append(str(rank))
    told = "; ".join(f"rank {', '.join(ranks)}: {what}" for what, ranks in calls.items())
    return f"all_reduce of different tensors. {told}. Pass the same shape and dtype on every rank."
