"""Records the context of communication calls.

If a rank communicates while handling an exception, the exception is recorded. A collective is
compared with the other ranks' calls and blocked if it differs (:class:`CollectiveFingerprint`).
After a backward pass, the DDP parameters that received no gradient are recorded.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
import sys
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from distkit.events import COLLECTIVES, UNEVEN, Op
from distkit.recording.pending import Pending, record_wait
from distkit.recording.recorder import is_user_file

_BODY = struct.Struct("<III")  # run number, call number, and checksum; the CRC of these follows
_CRC = struct.Struct("<I")
#: ``_NUMBERS_SIZE``: size of an entry's run and call numbers [bytes]. ``_CRC_OFFSET``: offset of
#: its CRC [bytes].
_NUMBERS_SIZE, _CRC_OFFSET = 8, _BODY.size

#: ``SLOTS``: number of entries per member. A call is compared only until its entry is overwritten.
#: ``SIZE``: size of an entry, which describes one call [bytes].
SLOTS, SIZE = 16, _BODY.size + _CRC.size


class CollectiveFingerprint:
    """Compares a rank's collectives with the other members' collectives through shared memory.

    gloo aborts the process when the members of a collective pass different sizes, and hangs when
    they call different collectives. Therefore, each rank writes a checksum of its k-th collective
    on a group to a small file that all members map, and compares it with the other members'
    entries. The rank that arrives later detects the difference before the backend does. Missing,
    stale and incomplete entries are ignored.

    Args:
        folder: a folder private to the ranks, with one file per group.
        run: the number of the run; entries of earlier runs are ignored.
        rank: this rank.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     a, b = (CollectiveFingerprint(Path(folder), 1, rank) for rank in (0, 1))
    ...     for fingerprint in (a, b):
    ...         fingerprint.add_group("world", [0, 1])
    ...     call = None, "world", 12, (3,), "float32", None, "", "", None
    ...     [a.check(Op.ALL_REDUCE, call), b.check(Op.REDUCE, (0, *call[1:]))]
    [True, False]
    """

    def __init__(self, folder: Path, run: int, rank: int) -> None:
        self._folder, self._run, self._rank = folder, run & 0xFFFFFFFF, rank
        # by group: the shared memory, this rank's offset, the other ranks' offsets, and a counter
        # of calls (an iterator, because threads may share a group)
        self._maps: dict[str, tuple[mmap.mmap, int, list[int], Iterator[int]]] = {}

    def add_group(self, group: str, members: Sequence[int]) -> None:
        """Map the file of a group; only mapped groups are compared."""
        if self._rank not in members or len(members) < 2 or group in self._maps:
            return
        checksum = zlib.crc32(f"{group} {list(members)}".encode())
        try:
            memory = _open(self._folder / f"calls-{checksum:08x}", len(members) * SLOTS * SIZE)
        except OSError:  # full disk or removed folder: do not compare this group
            return
        position = members.index(self._rank)
        others = [i * SLOTS * SIZE for i in range(len(members)) if i != position]
        self._maps[group] = memory, position * SLOTS * SIZE, others, itertools.count()

    def check(self, op: Op, fields: tuple[Any, ...]) -> bool:
        """Write the entry for this rank's next collective; return False if another rank's differs.

        Args:
            op: the operation.
            fields: the fields of a recorder's row, from ``peer`` to ``match``.
        """
        group = fields[1]
        mapping = self._maps.get(group)
        if mapping is None:
            return True
        memory, offset, other_offsets, counter = mapping
        number = next(counter)
        body = _BODY.pack(self._run, number, _checksum(op, fields))
        entry = body + _CRC.pack(zlib.crc32(body))
        slot = number % SLOTS * SIZE
        memory[offset + slot : offset + slot + SIZE] = entry
        for start in other_offsets:
            other = memory[start + slot : start + slot + SIZE]
            if other != entry and other[:_NUMBERS_SIZE] == body[:_NUMBERS_SIZE]:
                if other[_CRC_OFFSET:] == _CRC.pack(zlib.crc32(other[:_CRC_OFFSET])):
                    return False
        return True


def _open(path: Path, size: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # on a full disk, writing would raise SIGBUS
        elif os.fstat(file).st_size < size:
            os.pwrite(file, bytes(size), 0)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


@lru_cache
def _checksum(op: Op, fields: tuple[Any, ...]) -> int:
    """Return a checksum of the properties that all members must agree on.

    See :func:`distkit.trace.calls.difference`. The dtype is not included: every backend accepts
    different dtypes of the same size, and the diagnosis reports them after the run.
    """
    peer, _, nbytes, shape, dtype, _, _, attributes, _ = fields
    size = 0 if op in UNEVEN or dtype.startswith("sparse") else nbytes
    if op is Op.SCATTER:
        size = math.prod(shape)
    values = dict(attributes)
    # the order of members does not matter
    target = values.get("function") or sorted(values.get("members", ()))
    return zlib.crc32(repr((op, size, peer, target)).encode())


#: Maximum number of reported parameters without a gradient.
_MAX_PARAMETERS = 8

_ddp_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def register_model(
    init: Callable[..., None], model: DistributedDataParallel, *args: Any, **kwargs: Any
) -> None:
    """Register a model when DDP wraps it."""
    init(model, *args, **kwargs)
    _ddp_models.add(model)


class CallContext:
    """Examines each call of a run before it is passed to the backend.

    Args:
        report: called with a kind and its data: ``"group"`` with a group's name and members,
            ``"threads"`` with the name of a group on which several threads call collectives,
            ``"raising"`` with the call's seq and the exception's text and line, or
            ``"unreduced"`` with names of DDP parameters.
        fingerprint: compares the call with the other ranks' calls, if not None.
        block: waits until the run is over.
    """

    def __init__(
        self,
        report: Callable[[str, Any], None],
        fingerprint: CollectiveFingerprint | None,
        block: Callable[[], object],
    ) -> None:
        self.report, self._fingerprint, self._block = report, fingerprint, block
        self._reported_names: list[str] = []
        stale = [model for model in _ddp_models if _parameters_without_gradient(model)]
        _ddp_models.difference_update(stale)  # left over from an earlier run

    def add_group(self, group: str, members: list[int]) -> None:
        """Report a group on its first use, and start comparing its collectives."""
        self.report("group", (group, members))
        if self._fingerprint is not None:
            self._fingerprint.add_group(group, members)

    def before_call(self, pending: Pending, has_timeout: bool) -> None:
        """Examine a call before it reaches the backend; a call with a timeout is never blocked."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            self.report("raising", (pending.seq, *describe_exception(error)))
        if pending.op not in COLLECTIVES:
            return
        if (
            self._fingerprint is None
            or self._fingerprint.check(pending.op, pending.fields)
            or has_timeout
        ):
            return
        with record_wait(pending):
            self._block()

    def after_backward(self) -> None:
        """Report the parameters that received no gradient in a backward pass."""
        missing = [
            name for model in list(_ddp_models) for name in _parameters_without_gradient(model)
        ]
        if missing != self._reported_names:
            self._reported_names = missing
            self.report("unreduced", missing)


def _parameters_without_gradient(model: DistributedDataParallel) -> list[str]:
    """Return the names of parameters that received no gradient in the latest backward pass."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        parameters = model.module.named_parameters()
        return [n for n, p in parameters if p.requires_grad and p.grad is None][
            :_MAX_PARAMETERS
        ] or ["?"]
    except AttributeError:  # the model has no reducer
        return []
    return []


def describe_exception(error: BaseException) -> tuple[str, str]:
    """Return an exception's text and the innermost user line of its traceback."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
    lines = [f"{file}:{number}" for file, number in frames if is_user_file(file)]
    return text[:1000], lines[-1] if lines else ""
