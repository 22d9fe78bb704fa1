"""The tap: records every torch.distributed call by hooking torch's dispatcher.

Every communication of torch (``dist.*``, ``batch_isend_irecv``, DDP's C++ reducer, FSDP2,
DTensor) passes through the operators of the ``c10d`` library. The tap puts a Python
function in front of each, at the autograd keys; it notes the call and forwards it one
key further down, to the real backend. Computation is not touched and pays nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distkit.events import P2P, WORLD, Op, State
from distkit.trace import recorder as _recorder
from distkit.trace.recorder import Recorder, summarize, user_line


@dataclass(frozen=True, slots=True)
class _Call:
    """How to read one c10d operator: the position of each of its arguments."""

    op: Op
    inputs: int | None
    outputs: int | None
    group: int
    peer: int | None = None
    tag: int | None = None
    waits: int | None = None  # position of async_op


_CALLS = {
    "send": _Call(Op.SEND, 0, 0, 1, peer=2, tag=3),
    "recv_": _Call(Op.RECV, 0, 0, 1, peer=2, tag=3),
    "recv_any_source_": _Call(Op.RECV, 0, 0, 1, tag=2),
    "broadcast_": _Call(Op.BROADCAST, 0, 0, 1, peer=2, waits=4),
    "reduce_": _Call(Op.REDUCE, 0, 0, 1, peer=3, waits=5),
    "allreduce_": _Call(Op.ALL_REDUCE, 0, 0, 1, waits=4),
    "allreduce_coalesced_": _Call(Op.ALL_REDUCE, 0, 0, 1, waits=3),
    "allgather_": _Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "_allgather_base_": _Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "allgather_coalesced_": _Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "allgather_into_tensor_coalesced_": _Call(Op.ALL_GATHER, 1, 0, 2, waits=3),
    "reduce_scatter_": _Call(Op.REDUCE_SCATTER, 1, 0, 2, waits=4),
    "_reduce_scatter_base_": _Call(Op.REDUCE_SCATTER, 1, 0, 2, waits=4),
    "reduce_scatter_tensor_coalesced_": _Call(Op.REDUCE_SCATTER, 1, 0, 2, waits=4),
    "gather_": _Call(Op.GATHER, 1, 0, 2, peer=3, waits=4),
    "scatter_": _Call(Op.SCATTER, 1, 0, 2, peer=3, waits=4),
    "alltoall_": _Call(Op.ALL_TO_ALL, 1, 0, 2, waits=3),
    "alltoall_base_": _Call(Op.ALL_TO_ALL, 1, 0, 2, waits=5),
    "barrier": _Call(Op.BARRIER, None, None, 1, waits=3),
    "monitored_barrier_": _Call(Op.BARRIER, None, None, 1),
}
_KEYS = ("AutogradCPU", "AutogradCUDA")


class _Pending:
    """A started operation: completes once, by ``wait`` or by its future, whichever is first."""

    __slots__ = ("_done", "_lock", "_outputs", "_recorder", "_row", "op", "seq")

    def __init__(
        self, recorder: Recorder, seq: int, op: Op, outputs: list[torch.Tensor], row: dict[str, Any]
    ) -> None:
        self._recorder, self.seq, self.op = recorder, seq, op
        self._outputs, self._row = outputs, row
        self._lock, self._done = threading.Lock(), False

    def complete(self, peer: int | None = None) -> None:
        now = time.monotonic()  # before looking at the values, which takes a while
        with self._lock:
            if self._done:
                return
            self._done = True
            if peer is not None:
                self._row["peer"] = peer
            self._recorder.record(self.seq, self.op, State.COMPLETED, **self._row,
                                  summary=summarize(*self._outputs), at=now)  # fmt: skip

    def fail(self) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                self._recorder.record(self.seq, self.op, State.FAILED, **self._row)


class Tap:
    """Puts the recording hooks in place, and takes them away again.

    While installed, calls are recorded into :func:`distkit.trace.recorder.current`; when
    that is None they are only forwarded.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._wait: Any = None
        self._pending: dict[int, tuple[Any, _Pending]] = {}
        self._groups: dict[str, tuple[str, list[int]]] = {}

    def install(self) -> None:
        """Hook every c10d operator that this torch has; a second time it does nothing."""
        if self._library is not None:
            return
        self._library = torch.library.Library("c10d", "IMPL")
        for name, call in _CALLS.items():
            operator = getattr(torch.ops.c10d, name, None)
            if operator is None:
                continue
            for key in _KEYS:
                self._library.impl(name, self._hook(operator.default, call), key)
        self._wait = dist.Work.wait
        dist.Work.wait = self._waiting(dist.Work.wait)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore stock torch."""
        if self._library is not None:
            self._library._destroy()
            dist.Work.wait = self._wait  # type: ignore[method-assign]
            self._library = None
        self.forget()

    def settle(self) -> None:
        """Note completions whose notice is still on its way, when a run ends."""
        for work, pending in list(self._pending.values()):
            if pending.op not in P2P and work.is_completed():
                pending.complete()

    def forget(self) -> None:
        """Let go of operations that nobody waited for."""
        self._pending.clear()
        self._groups.clear()

    def groups(self) -> dict[str, list[int]]:
        """The members of every group seen so far, by the group's name."""
        return dict(self._groups.values())

    # -- one call ---------------------------------------------------------------

    def _hook(self, operator: Callable[..., Any], call: _Call) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            recorder = _recorder.current()
            if recorder is None:
                with torch._C._AutoDispatchBelowAutograd():
                    return operator(*args)
            pending = self._start(recorder, call, args)
            try:
                with torch._C._AutoDispatchBelowAutograd():
                    result = operator(*args)
            except BaseException:
                pending.fail()
                raise
            self._follow(call, args, pending, result)
            return result

        return hook

    def _start(self, recorder: Recorder, call: _Call, args: tuple[Any, ...]) -> _Pending:
        """Note that the user's line made this call, and that it goes to the backend."""
        inputs, outputs = _tensors(args, call.inputs), _tensors(args, call.outputs)
        touched = inputs or outputs
        group, members = self._group(args[call.group])
        row: dict[str, Any] = {
            "peer": None if call.peer is None else members[args[call.peer]],
            "group": group,
            "tag": None if call.tag is None else args[call.tag],
            "where": user_line(3),
            "nbytes": sum(t.numel() * t.element_size() for t in touched),
        }
        if touched:
            row["shape"], row["dtype"] = tuple(touched[0].shape), str(touched[0].dtype)[6:]
        seq = recorder.next_seq()
        recorder.record(seq, call.op, State.SCHEDULED, **row)
        recorder.record(seq, call.op, State.STARTED, **row, summary=summarize(*touched))
        return _Pending(recorder, seq, call.op, outputs, row)

    def _follow(
        self, call: _Call, args: tuple[Any, ...], pending: _Pending, result: Any
    ) -> None:
        """Arrange that the completion is noted."""
        script = result[-1] if isinstance(result, (tuple, list)) else result
        if script is None or not isinstance(script, torch.ScriptObject):
            pending.complete()  # monitored_barrier has no Work: it has finished
            return
        work = dist.Work.unbox(script)
        is_cuda = bool(pending._outputs) and pending._outputs[0].is_cuda
        background = call.op not in P2P and (_is_async(call, args) or not _python_waits())
        if is_cuda and not background:
            pending.complete()  # stream-ordered, nobody waits: reading the values does
            return
        self._pending[id(work)] = work, pending
        if background:  # DDP's reducer, for one, waits in C++, on the future
            work.get_future().add_done_callback(lambda f: self._settle(work, pending, f))

    def _settle(self, work: Any, pending: _Pending, future: Any) -> None:
        try:
            future.value()
        except Exception:
            pending.fail()
        else:
            pending.complete()
        self._pending.pop(id(work), None)

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Work.wait that notes the completion before the user's code goes on."""

        def waiting(work: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._pending.pop(id(work), None)
            if found is None:
                return wait(work, *args, **kwargs)
            pending = found[1]
            try:
                result = wait(work, *args, **kwargs)
            except BaseException:
                pending.fail()
                raise
            pending.complete(self._source(work, pending))
            return result

        return waiting

    def _source(self, work: Any, pending: _Pending) -> int | None:
        """Who sent what a receive from anybody got."""
        if pending.op is not Op.RECV or pending._row["peer"] is not None:
            return None
        members = dict(self._groups.values())[pending._row["group"]]
        return int(members[work._source_rank()])

    def _group(self, script: Any) -> tuple[str, list[int]]:
        """Name and members (global ranks) of a process group."""
        group = dist.ProcessGroup.unbox(script)
        name = group.group_name
        if name not in self._groups:
            members = dist.get_process_group_ranks(group)
            default = dist.group.WORLD
            label = WORLD if default is not None and name == default.group_name else name
            self._groups[name] = label, list(members)
        return self._groups[name]


def _is_async(call: _Call, args: tuple[Any, ...]) -> bool:
    return call.waits is not None and (len(args) <= call.waits or bool(args[call.waits]))


_PYTHON_API = dist.distributed_c10d.__file__


def _python_waits() -> bool:
    """Whether the call was made by Python's ``dist.*``, which waits with Work.wait."""
    return sys._getframe(3).f_code.co_filename == _PYTHON_API


def _tensors(args: tuple[Any, ...], position: int | None) -> list[torch.Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if position is None:
        return []
    found = args[position]
    if isinstance(found, torch.Tensor):
        return [found]
    if found and isinstance(found[0], (list, tuple)):
        return [t for row in found for t in row]
    return list(found)


#: The tap of this process.
tap = Tap()
