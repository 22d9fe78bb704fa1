"""Context of a call, noted beside it: what it meets, and what led to it.

At a call of a collective: that other ranks call something else there (then the call waits, see
:class:`RollCall`), and that an exception is under way on this rank. After a backward pass: the
parameters of DDP's models, and the modules of FSDP2's, that it has left out.
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
from contextlib import suppress
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from distkit.events import COLLECTIVES, WORLD, Op
from distkit.recording.pending import Pending
from distkit.recording.recorder import is_users
from distkit.trace.calls import UNEQUAL

_BODY = struct.Struct("<III")  # run, number and checksum of the call; then the sum of these
_CHECK = struct.Struct("<I")
_RUN_AND_NUMBER, _SUM = 8, _BODY.size

#: So many calls of each member are kept; a rank that is further ahead is not compared.
SLOTS, SIZE = 16, _BODY.size + _CHECK.size


class RollCall:
    """The calls of one rank's groups, beside those of the other members, in shared memory.

    gloo aborts the process when the members of a collective bring different sizes, and hangs when
    they call different ones. So each rank writes its k-th collective on a group into a small file
    that the members map, and compares it with what the others have written there. Whoever comes
    later sees the difference before the backend does. An entry that is missing, old or half
    written says nothing.

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
        body = _BODY.pack(self._run, number, _checksum(op, fields))
        mine = body + _CHECK.pack(zlib.crc32(body))
        at = number % SLOTS * SIZE
        sheet[own + at : own + at + SIZE] = mine
        for start in others:
            theirs = sheet[start + at : start + at + SIZE]
            if theirs != mine and theirs[:_RUN_AND_NUMBER] == body[:_RUN_AND_NUMBER]:
                if theirs[_SUM:] == _CHECK.pack(zlib.crc32(theirs[:_SUM])):
                    return False
        return True


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
def _checksum(op: Op, fields: tuple[Any, ...]) -> int:
    """Checksum of what must agree on all members: see :func:`distkit.trace.calls.difference`.

    Two dtypes of the same size go through every backend: their nonsense is told afterwards.
    """
    peer, _, nbytes, shape, dtype, _, _, attributes, _ = fields
    share = 0 if op in UNEQUAL or dtype.startswith("sparse") else nbytes
    if op is Op.SCATTER:
        share = math.prod(shape)
    facts = dict(attributes)
    # in any order, they are the same members
    said = facts.get("function") or sorted(facts.get("members", ()))
    return zlib.crc32(repr((op, share, peer, said)).encode())


#: So many parameters without a gradient are named.
_NAMED = 8

_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def noting_model(
    init: Callable[..., None], model: DistributedDataParallel, *args: Any, **kwargs: Any
) -> None:
    """The construction of a model that DDP wraps, which is kept in mind."""
    init(model, *args, **kwargs)
    _wrapped.add(model)


#: Modules of FSDP2 whose result the backward pass under way has not used.
_unused: list[str] = []


@cache
def _watch_groups(module: Any) -> None:
    """Note the groups of parameters that ran in forward and come to their backward without one."""
    stock = module.FSDPParamGroup.post_backward

    @wraps(stock)
    def post_backward(group: Any, *args: Any) -> Any:
        with suppress(AttributeError):  # another torch keeps it elsewhere
            parameters = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
            gradients = [
                p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None
                for p in parameters
            ]
            if group._post_forward_indices and gradients and not any(gradients):
                _unused.append(group._module_fqn or "the model")
        return stock(group, *args)

    module.FSDPParamGroup.post_backward = post_backward


def before_backward() -> None:
    """A backward pass begins: look at what it does not use, once FSDP2 has been imported."""
    _unused.clear()
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if module is not None:
        _watch_groups(module)


class Witness:
    """Looks at each call of a run before it goes to the backend.

    Args:
        note: called with a word and what there is to know: ``"raising"`` with the call's number,
            the exception's text and line; ``"unreduced"`` with names of DDP's parameters,
            ``"unused"`` with those of FSDP2's modules.
        rollcall: compares the call with the other ranks'; None if nobody does.
        hold: waits until the run is over.
    """

    def __init__(
        self,
        note: Callable[[str, Any], None],
        rollcall: RollCall | None,
        hold: Callable[[], object],
    ) -> None:
        self._note, self._rollcall, self._hold = note, rollcall, hold
        self._told: dict[str, list[str]] = {"unreduced": [], "unused": []}
        left = [model for model in _wrapped if _without_gradient(model)]
        _wrapped.difference_update(left)  # by an earlier run, in the middle of a backward pass

    def meet(self, group: str, members: list[int]) -> None:
        """A group is used for the first time."""
        if self._rollcall is not None and _over_gloo(group):
            self._rollcall.meet(group, members)

    def look(self, pending: Pending, limited: bool) -> None:
        """A call is about to go to the backend; ``limited``: it gives up by itself."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            self._note("raising", (pending.seq, *told(error)))
        if pending.op not in COLLECTIVES:
            return
        if self._rollcall is None or self._rollcall.fits(pending.op, pending.fields) or limited:
            return
        pending.recorder.wait_begins(pending)
        with pending.waited_for():
            self._hold()

    def look_at_gradients(self) -> None:
        """A backward pass is over: note what it has left out of DDP's and FSDP2's models."""
        missing = [name for model in list(_wrapped) for name in _without_gradient(model)]
        for what, names in (("unreduced", missing), ("unused", _unused[:_NAMED])):
            if names != self._told[what]:
                self._told[what] = names
                self._note(what, names)


def _over_gloo(group: str) -> bool:
    """True if this is a group of torch's own making, and gloo carries it."""
    default = dist.group.WORLD if dist.is_initialized() else None
    for known, (backend, _) in c10d._world.pg_map.items():
        if known.group_name == group or (group == WORLD and known is default):
            return "gloo" in str(backend)
    return False


def _without_gradient(model: DistributedDataParallel) -> list[str]:
    """The parameters that a backward pass, which is over, has left out; [] for none."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        parameters = model.module.named_parameters()
        return [n for n, p in parameters if p.requires_grad and p.grad is None][:_NAMED] or ["?"]
    except AttributeError:  # it is not ready, or no longer
        return []
    return []


def told(error: BaseException) -> tuple[str, str]:
    """An exception's text, and the user's innermost line in its traceback."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    walked = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
    lines = [f"{file}:{number}" for file, number in walked if is_users(file)]
    return text[:1000], lines[-1] if lines else ""
