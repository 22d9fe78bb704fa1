"""The roll call: what each rank has called, in memory that all ranks of the run share.

gloo aborts the process when the members of a collective bring different sizes, and hangs when they
call different ones. So each rank writes its k-th collective on a group into a small file that the
members map, and compares it with what the others have written there. Whoever comes later sees the
difference before the backend does. An entry that is missing, old or half written says nothing.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from distkit.events import Op
from distkit.trace.calls import UNEQUAL

#: So many calls of each member are kept; a rank that is further ahead is not compared.
SLOTS, SIZE = 16, 32

_BODY = struct.Struct("<IIqiiI")  # run, number, share, operation, root, words; then their sum
_CHECK = struct.Struct("<I")
_RUN_AND_NUMBER, _SUM, _SIZE = 8, _BODY.size, _BODY.size + 4
_NUMBER_OF = {op: i for i, op in enumerate(Op)}


class RollCall:
    """The calls of one rank's groups, beside those of the other members.

    Args:
        folder: private to the ranks; each group has a file in it.
        run: number of the run: entries of earlier ones do not count.
        rank: this rank.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one, two = (RollCall(Path(folder), 1, rank) for rank in (0, 1))
    ...     for roll in (one, two):
    ...         roll.meet("world", [0, 1])
    ...     call = None, "world", 12, (3,), "float32", None, "", "", None
    ...     [one.fits(Op.ALL_REDUCE, call), two.fits(Op.REDUCE, (0, *call[1:]))]
    [True, False]
    """

    def __init__(self, folder: Path, run: int, rank: int) -> None:
        self._folder, self._run, self._rank = folder, run & 0xFFFFFFFF, rank
        self._sheets: dict[str, tuple[mmap.mmap, int, list[int]]] = {}
        self._count: dict[str, Iterator[int]] = {}  # threads may share a group

    def meet(self, group: str, members: Sequence[int]) -> None:
        """Open the sheet of a group; only groups that were opened are compared."""
        if self._rank not in members or len(members) < 2 or group in self._sheets:
            return
        known = zlib.crc32(f"{group} {list(members)}".encode())
        try:
            sheet = _open(self._folder / f"calls-{known:08x}", len(members) * SLOTS * SIZE)
        except OSError:  # no room, or no folder any more: this group is not compared
            return
        mine = members.index(self._rank)
        others = [i * SLOTS * SIZE for i in range(len(members)) if i != mine]
        self._count[group] = itertools.count()
        self._sheets[group] = sheet, mine * SLOTS * SIZE, others

    def fits(self, op: Op, fields: tuple[Any, ...]) -> bool:
        """Note this rank's next collective on a group; False if another's is a different one.

        Args:
            op: the operation.
            fields: as those of a recorder's row, from peer to match.
        """
        group = fields[1]
        found = self._sheets.get(group)
        if found is None:
            return True
        sheet, own, others = found
        number = next(self._count[group])
        body = _BODY.pack(self._run, number, *_what(op, fields))
        mine = body + _CHECK.pack(zlib.crc32(body))
        at = number % SLOTS * SIZE
        sheet[own + at : own + at + _SIZE] = mine
        for start in others:
            theirs = sheet[start + at : start + at + _SIZE]
            if theirs != mine and theirs[:_RUN_AND_NUMBER] == body[:_RUN_AND_NUMBER]:
                if theirs[_SUM:] == _CHECK.pack(zlib.crc32(theirs[:_SUM])):
                    return False
        return True

    def close(self) -> None:
        """The run is over."""
        for sheet, _, _ in self._sheets.values():
            sheet.close()
        self._sheets.clear()


def _open(path: Path, size: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # where the disk is full, to write is a SIGBUS
        elif os.fstat(file).st_size < size:
            os.pwrite(file, bytes(size), 0)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


@lru_cache
def _what(op: Op, fields: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """The values that must agree on all members: see :func:`distkit.trace.calls.difference`.

    Two dtypes of the same size go through every backend: their nonsense is told afterwards.
    """
    peer, _, nbytes, shape, dtype, _, _, attributes, _ = fields
    share = 0 if op in UNEQUAL or dtype.startswith("sparse") else nbytes
    if op is Op.SCATTER:
        share = math.prod(shape)
    facts = dict(attributes)
    # in any order, they are the same members
    said = facts.get("function") or sorted(facts.get("members", ()))
    words = zlib.crc32(str(said).encode()) if said else 0
    return share, _NUMBER_OF[op], -1 if peer is None else peer, words
