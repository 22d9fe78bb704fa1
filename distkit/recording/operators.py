"""Signatures of torch's ``c10d`` operators: the tensor, the peer, the group, and its name.

Torch knows the members of the groups that its own functions have made. A program may also make a
``ProcessGroup`` by hand, as fault-tolerant trainers do: nobody knows which ranks of the run belong
to it, and its calls are only counted.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from distkit.events import SPARSE, WORLD, Op
from distkit.recording.recorder import dense_parts


@dataclass(frozen=True, slots=True)
class Call:
    """The signature of one c10d operator: the position of each of its arguments.

    ``inputs`` is what it reads: None where it only writes, such as the buffer of a receive.
    """

    op: Op
    inputs: int | None
    outputs: int | None
    group: int
    peer: int | None = None
    tag: int | None = None
    waits: int | None = None  # position of async_op
    reduces: bool = False
    limit: int | None = None  # position of a time limit that it keeps by itself
    blocks: bool = False  # perhaps until it is over, as under dk.algorithms.use_algorithm
    copies: bool = False  # the backend works on a copy, and writes the tensors by operators


#: Every operator that communicates.
CALLS = {
    "send": Call(Op.SEND, 0, 0, 1, peer=2, tag=3),
    "recv_": Call(Op.RECV, None, 0, 1, peer=2, tag=3),
    "recv_any_source_": Call(Op.RECV, None, 0, 1, tag=2),
    "broadcast_": Call(Op.BROADCAST, 0, 0, 1, peer=2, waits=4),
    "reduce_": Call(Op.REDUCE, 0, 0, 1, peer=3, waits=5, reduces=True),
    "allreduce_": Call(Op.ALL_REDUCE, 0, 0, 1, waits=4, reduces=True, blocks=True),
    "allreduce_coalesced_": Call(Op.ALL_REDUCE, 0, 0, 1, waits=3, reduces=True, copies=True),
    "allgather_": Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "_allgather_base_": Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "allgather_coalesced_": Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "allgather_into_tensor_coalesced_": Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "reduce_scatter_": Call(Op.REDUCE_SCATTER, 1, 0, 2, waits=4, reduces=True),
    "_reduce_scatter_base_": Call(Op.REDUCE_SCATTER, 1, 0, 2, waits=4, reduces=True),
    "reduce_scatter_tensor_coalesced_": Call(Op.REDUCE_SCATTER, 1, 0, 2, waits=4, reduces=True),
    "gather_": Call(Op.GATHER, 1, 0, 2, peer=3, waits=4),
    "scatter_": Call(Op.SCATTER, 1, 0, 2, peer=3, waits=4),
    "alltoall_": Call(Op.ALL_TO_ALL, 1, 0, 2, waits=3),
    "alltoall_base_": Call(Op.ALL_TO_ALL, 1, 0, 2, waits=5),
    "barrier": Call(Op.BARRIER, None, None, 1, waits=3),
    "monitored_barrier_": Call(Op.BARRIER, None, None, 1, blocks=True, limit=3),
}


def reduction(frame: FrameType) -> str:
    """The reduction that the calling ``dist.*`` function was asked for; "" for sum.

    The operator gets it as an opaque object; the function's own frame has it in clear, or that
    of the functional operator, whose second argument is its name.
    """
    if is_functional(frame):
        given = frame.f_locals.get("args", ())
        word = given[1] if len(given) > 1 and isinstance(given[1], str) else "sum"
        return "" if word.lower() == "sum" else word.lower()
    if frame.f_code.co_filename != c10d.__file__:
        return ""
    op = frame.f_locals.get("op", dist.ReduceOp.SUM)
    kind = getattr(op, "op", op)  # some reductions carry a factor
    return "" if kind == dist.ReduceOp.SUM else str(kind).rpartition(".")[2].lower()


def of_objects(frame: FrameType | None) -> str:
    """The name of the ``dist.*_object*`` function that this call is a part of; "" if of none.

    Between the two there may be frames of the program: of a mode that watches torch's functions.
    """
    while frame is not None:
        code = frame.f_code
        if "_object" in code.co_name and code.co_filename in _TORCHS:
            return code.co_name
        frame = frame.f_back
    return ""


def loses_gradient(frame: FrameType | None) -> bool:
    """True for a broadcast of torch.distributed.nn.functional whose backward zeroes the source's.

    It compares the source, a rank of the world, with this rank's number in the group
    (pytorch#130515).
    """
    while frame is not None and frame.f_code.co_filename in _TORCHS:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != _WITH_GRADIENTS:
        return False
    ctx = frame.f_locals.get("ctx")
    src, mine = getattr(ctx, "src", None), getattr(ctx, "rank", None)
    needed = getattr(ctx, "needs_input_grad", ())
    return src is not None and src == dist.get_rank() and mine not in (None, src) and any(needed)


def splits(args: tuple[Any, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What an all_to_all sends to each rank and awaits from each, in rows; () if it is even."""
    outputs, inputs, *rest = args
    if isinstance(inputs, torch.Tensor):
        awaited, sent = rest[1], rest[2]
        if not (awaited or sent):
            return ()
        size = len(awaited or sent)
        sent, awaited = (
            given or [len(tensor) // size] * size
            for given, tensor in ((sent, inputs), (awaited, outputs))
        )
    else:
        alike = len({t.shape[1:] for t in (*inputs, *outputs)}) == 1
        sent, awaited = (
            [len(t) if alike and t.dim() else t.numel() for t in some] for some in (inputs, outputs)
        )
    return ("sends", tuple(sent)), ("receives", tuple(awaited))


def is_functional(frame: FrameType) -> bool:
    """True if an operator such as ``torch.ops._c10d_functional.all_reduce`` makes this call."""
    return frame.f_code.co_filename == _OPS


_OPS = torch._ops.__file__
_WITH_GRADIENTS = str(Path(c10d.__file__).parent / "nn" / "functional.py")
_TORCHS = {c10d.__file__, c10d_logger.__file__}  # the latter wraps every function of the former


def is_async(call: Call, args: tuple[Any, ...]) -> bool:
    """True if the caller asked not to wait."""
    return call.waits is not None and (len(args) <= call.waits or bool(args[call.waits]))


def tensors(args: tuple[Any, ...], position: int | None) -> list[torch.Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if position is None:
        return []
    found = args[position]
    if isinstance(found, torch.Tensor):
        return [found]
    if found and isinstance(found[0], (list, tuple)):
        return [t for row in found for t in row]
    return list(found)


def described(touched: list[torch.Tensor]) -> tuple[tuple[int, ...], str, int]:
    """Shape and dtype of the first tensor, and the bytes of all: those that a backend sends."""
    if not touched:
        return (), "", 0
    first = touched[0]
    dtype = _dtype(first.dtype)
    if first.layout is not torch.strided:
        dtype = f"{SPARSE}{dtype}"
    nbytes = _nbytes(first) if len(touched) == 1 else sum(map(_nbytes, touched))
    return tuple(first.shape), dtype, nbytes


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.nbytes for part in dense_parts(tensor))


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, as long as there is one."""
    return int(dense_parts(tensor)[-1].untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class Known:
    """A group as a rank knows it: its name, and the global ranks of its members by place."""

    name: str
    members: tuple[int, ...]

    def rank(self, place: int) -> int | None:
        """The global rank of a member, None if there is none."""
        return self.members[place] if 0 <= place < len(self.members) else None


class Groups:
    """The groups that a rank communicates in, during one run."""

    def __init__(self) -> None:
        #: Called with the name and the members of each group when it is first seen.
        self.on_group: Callable[[str, list[int]], None] | None = None
        self._known: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()
        self._used = set[str]()

    def add(self, group: Any) -> Known | None:
        """Keep what torch knows of a group, until it is destroyed."""
        ranks = c10d._world.pg_group_ranks.get(group)
        if ranks is None:
            return None
        name = WORLD if group is dist.group.WORLD else str(group.group_name)
        known = self._known[group] = Known(name, tuple(sorted(ranks, key=ranks.__getitem__)))
        return known

    def known(self, script: Any) -> Known | None:
        """The group that an operator is called with; None for one that the program made by hand."""
        group = dist.ProcessGroup.unbox(script)
        known = self._known.get(group) or self.add(group)
        if known is not None and known.name not in self._used:
            self._used.add(known.name)
            if self.on_group is not None:
                self.on_group(known.name, [*known.members])
        return known

    def rank(self, name: str, place: int) -> int | None:
        """The global rank of a member of a group that was communicated in."""
        return next(
            (known.rank(place) for known in self._known.values() if known.name == name), None
        )


# A group that is not destroyed keeps its connections, threads and memory, though the program may
# have lost sight of it: torch itself holds on to it.


class MadeGroups:
    """The groups that a run has made, by the line that made them and by their members."""

    def __init__(self) -> None:
        self._made: dict[Any, list[tuple[weakref.ref[Any], int]]] = defaultdict(list)

    def add(self, group: weakref.ref[Any], where: str, members: Any) -> int:
        """Note a new group, and count those that the same line has made and the program lost.

        Args:
            group: the new group, to which only torch and the caller refer.
            where: the line.
            members: its ranks, as the line names them.
        """
        earlier = self._made[where, members]
        lost = sum(
            made() in c10d._world.pg_map and _references(made) <= held for made, held in earlier
        )
        earlier.append((group, _references(group) - 1))
        return lost


def _references(made: weakref.ref[Any]) -> int:
    group = made()
    return sys.getrefcount(group)
