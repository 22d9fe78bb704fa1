"""Signatures of torch's ``c10d`` operators, methods of stores, and a rank's process groups.

Torch knows the members of the groups that its functions create. A program may also construct a
``ProcessGroup`` directly, as fault-tolerant trainers do. The members of such a group are unknown,
so its calls are only counted.

Calls to a ``dist.Store`` do not pass through ``c10d`` operators. ``store.get``, ``wait`` and
``multi_get`` block until another rank has set a key, so they can hang like a receive.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from distkit.events import SPARSE, WORLD, Op
from distkit.recording.recorder import stored_values


@dataclass(frozen=True, slots=True)
class Call:
    """The signature of a c10d operator, with the position of each argument.

    An argument that the operator does not have is None. ``inputs`` is also None if the operator
    only writes its tensors, as a receive does.
    """

    op: Op
    inputs: int | None
    outputs: int | None
    group: int
    peer: int | None = None
    tag: int | None = None
    async_op: int | None = None
    reduces: bool = False
    timeout: int | None = None
    blocks: bool = False  # may return only after completion, as under use_algorithm
    copies: bool = False  # the backend writes the results with operators, which increment versions


#: The signatures of the recorded operators.
CALLS = {
    "send": Call(Op.SEND, 0, 0, 1, peer=2, tag=3),
    "recv_": Call(Op.RECV, None, 0, 1, peer=2, tag=3),
    "recv_any_source_": Call(Op.RECV, None, 0, 1, tag=2),
    "broadcast_": Call(Op.BROADCAST, 0, 0, 1, peer=2, async_op=4),
    "reduce_": Call(Op.REDUCE, 0, 0, 1, peer=3, async_op=5, reduces=True),
    "allreduce_": Call(Op.ALL_REDUCE, 0, 0, 1, async_op=4, reduces=True, blocks=True),
    "allreduce_coalesced_": Call(Op.ALL_REDUCE, 0, 0, 1, async_op=3, reduces=True, copies=True),
    "allgather_": Call(Op.ALL_GATHER, 1, 0, 2, async_op=3),
    "_allgather_base_": Call(Op.ALL_GATHER, 1, 0, 2, async_op=3),
    "allgather_coalesced_": Call(Op.ALL_GATHER, 1, 0, 2, async_op=3),
    "allgather_into_tensor_coalesced_": Call(Op.ALL_GATHER, 1, 0, 2, async_op=3),
    "reduce_scatter_": Call(Op.REDUCE_SCATTER, 1, 0, 2, async_op=4, reduces=True),
    "_reduce_scatter_base_": Call(Op.REDUCE_SCATTER, 1, 0, 2, async_op=4, reduces=True),
    "reduce_scatter_tensor_coalesced_": Call(Op.REDUCE_SCATTER, 1, 0, 2, async_op=4, reduces=True),
    "gather_": Call(Op.GATHER, 1, 0, 2, peer=3, async_op=4),
    "scatter_": Call(Op.SCATTER, 1, 0, 2, peer=3, async_op=4),
    "alltoall_": Call(Op.ALL_TO_ALL, 1, 0, 2, async_op=3),
    "alltoall_base_": Call(Op.ALL_TO_ALL, 1, 0, 2, async_op=5),
    "barrier": Call(Op.BARRIER, None, None, 1, async_op=3),
    "monitored_barrier_": Call(Op.BARRIER, None, None, 1, blocks=True, timeout=3),
}


def reduction(frame: FrameType) -> str:
    """Return the name of the reduction in the caller's frame, or "" for sum.

    The c10d operator receives an opaque object. A ``dist.*`` function has the reduction in a local
    variable, and a functional operator has its name in the second argument.
    """
    if is_functional(frame):
        arguments = frame.f_locals.get("args", ())
        name = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], str) else "sum"
        return "" if name.lower() == "sum" else name.lower()
    if frame.f_code.co_filename != _C10D:
        return ""
    op = frame.f_locals.get("op", _SUM)
    if op is _SUM:
        return ""
    kind = getattr(op, "op", op)  # some reductions include a factor
    return "" if kind == _SUM else str(kind).rpartition(".")[2].lower()


def object_function(frame: FrameType | None) -> str:
    """Return the name of the enclosing ``dist.*_object*`` function, or "" if there is none.

    Frames of the program, such as a TorchFunctionMode's, may be in between.
    """
    while frame is not None:
        code = frame.f_code
        if "_object" in code.co_name and code.co_filename in _TORCH_FILES:
            return code.co_name
        frame = frame.f_back
    return ""


def splits(args: tuple[Any, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return how many rows an all_to_all sends to and receives from each rank.

    If the rows of the tensors differ in shape, count elements instead. For a single tensor without
    split sizes, return ().
    """
    outputs, inputs, *options = args
    if isinstance(inputs, torch.Tensor):
        received, sent = options[1], options[2]
        if not (received or sent):
            return ()
        size = len(received or sent)
        sent, received = (
            rows or [len(tensor) // size] * size
            for rows, tensor in ((sent, inputs), (received, outputs))
        )
    else:
        same_row = len({t.shape[1:] for t in (*inputs, *outputs)}) == 1
        sent, received = (
            [len(t) if same_row and t.dim() else t.numel() for t in side]
            for side in (inputs, outputs)
        )
    return ("sends", tuple(sent)), ("receives", tuple(received))


def is_functional(frame: FrameType) -> bool:
    """Return whether a frame belongs to an operator such as ``_c10d_functional.all_reduce``."""
    return frame.f_code.co_filename == _OPS


_OPS, _C10D, _SUM = torch._ops.__file__, c10d.__file__, dist.ReduceOp.SUM
_TORCH_FILES = {_C10D, c10d_logger.__file__}  # c10d_logger wraps c10d's functions


def is_async(call: Call, args: tuple[Any, ...]) -> bool:
    """Return whether the call is asynchronous, which is the operators' default."""
    return call.async_op is not None and (len(args) <= call.async_op or bool(args[call.async_op]))


def tensors(args: tuple[Any, ...], position: int | None) -> list[torch.Tensor]:
    """Return the tensors in the argument at a position."""
    return [] if position is None else tensors_in(args[position])


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists and tuples.

    >>> len(tensors_in([torch.ones(2), ([torch.ones(3)], "sum")]))
    2
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def describe(values: list[torch.Tensor]) -> tuple[tuple[int, ...], str, int]:
    """Return the shape and dtype of the first tensor, and the total size of all tensors [bytes]."""
    if not values:
        return (), "", 0
    first = values[0]
    dtype = SPARSE + _dtype(first.dtype) if first.is_sparse else _dtype(first.dtype)
    return tuple(first.shape), dtype, sum(map(_nbytes, values))


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def _nbytes(tensor: torch.Tensor) -> int:
    if not tensor.is_sparse:
        return tensor.nbytes
    return tensor.detach()._indices().nbytes + stored_values(tensor).nbytes


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, valid while the storage exists."""
    return int(stored_values(tensor).untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The name of a group, and the global ranks of its members in group order."""

    name: str
    members: tuple[int, ...]

    def rank(self, group_rank: int) -> int | None:
        """Return the global rank of a member, or None if it does not exist."""
        return self.members[group_rank] if 0 <= group_rank < len(self.members) else None


class Groups:
    """The process groups that a rank uses during one run."""

    def __init__(self) -> None:
        #: Called with the name and members of each group on its first use.
        self.on_group: Callable[[str, list[int]], None] = lambda name, members: None
        #: The groups in use, by name.
        self.by_name: dict[str, GroupInfo] = {}
        self._infos: weakref.WeakKeyDictionary[Any, GroupInfo] = weakref.WeakKeyDictionary()
        # the groups that the program has created, with their reference counts, by line and members
        self._created_groups: dict[Any, list[tuple[weakref.ref[Any], int]]] = defaultdict(list)

    def add(self, group: Any) -> GroupInfo | None:
        """Register a group and return it, or None if torch does not know its members."""
        ranks = c10d._world.pg_group_ranks.get(group)
        if ranks is None:
            return None
        name = WORLD if group is dist.group.WORLD else str(group.group_name)
        info = self._infos[group] = GroupInfo(name, tuple(sorted(ranks, key=ranks.__getitem__)))
        return info

    def find(self, script: Any) -> GroupInfo | None:
        """Return an operator's group, or None if the program constructed it directly."""
        group = dist.ProcessGroup.unbox(script)
        info = self._infos.get(group) or self.add(group)
        if info is not None and info.name not in self.by_name:
            self.by_name[info.name] = info
            self.on_group(info.name, [*info.members])
        return info

    def count_leaked(self, group: weakref.ref[Any], where: str, members: Any) -> int:
        """Register a group; return how many groups from this line with these members have leaked.

        A group that is not destroyed keeps its connections, threads and memory even if the program
        holds no reference to it, because torch holds one.

        Args:
            group: the new group, which only torch and the caller reference.
            where: the source line that created it.
            members: the ranks passed to ``new_group``.
        """
        earlier = self._created_groups[where, members]
        leaked = sum(
            ref() in c10d._world.pg_map and sys.getrefcount(ref()) <= count
            for ref, count in earlier
        )
        earlier.append((group, sys.getrefcount(group()) - 1))
        return leaked


# -- stores ----------------------------------------------------------------------------------------

#: The methods of a store that wait for keys, and the methods that set keys.
STORE_WAITS = ("get", "wait", "multi_get")
STORE_SETS = ("set", "add", "append", "compare_set", "multi_set", "queue_push")
