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
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distkit.events import P2P, WORLD, Op, State
from distkit.trace import recorder as _recorder
from distkit.trace.operators import CALLS, Call, is_async, of_objects, reduction, tensors
from distkit.trace.pending import Pending
from distkit.trace.recorder import Recorder, user_line
from distkit.trace.touch import OpenBuffers

#: A program that sets a time limit up to this [ms] handles it: it is not released before.
PATIENT = 60_000

#: Where the hook sits, and where it forwards to: the key of the real backend.
_KEYS = {"AutogradCPU": "CPU", "AutogradCUDA": "CUDA"}


class Tap:
    """Puts the recording hooks in place, and takes them away again.

    While installed, calls are recorded into :func:`distkit.trace.recorder.current`; when
    that is None they are only forwarded.
    """

    def __init__(self) -> None:
        #: Called before a communication goes to the backend; may wait, or raise.
        self.before: list[Callable[[Op, int], None]] = []
        #: Called with the name and the members of each group when it is first seen.
        self.on_group: Callable[[str, list[int]], None] | None = None
        #: A call has failed: gloo may have closed connections, the group is not what it was.
        self.broken = False
        self._library: Any = None
        self._wait: Any = None
        self._new_group: Any = None
        self._warn: Any = None
        self._pending: dict[int, tuple[Any, Pending]] = {}
        self._groups: dict[str, tuple[str, list[int]]] = {}
        self._limited: set[str] = set()  # groups that the program gave a short time limit
        self._buffers = OpenBuffers()
        self._backward = -1  # the backward pass that the latest call belongs to
        self._alone: tuple[Any, Pending] | None = None  # its first call, while it is the only one

    def install(self) -> None:
        """Hook every c10d operator that this torch has; a second time it does nothing."""
        if self._library is not None:
            return
        self._library = torch.library.Library("c10d", "IMPL")
        for name, call in CALLS.items():
            operator = getattr(torch.ops.c10d, name, None)
            if operator is None:
                continue
            for key, below in _KEYS.items():
                self._library.impl(name, self._hook(operator.default, call, below), key)
        self._wait, self._new_group = dist.Work.wait, c10d._new_group_with_tag
        self._warn = c10d._warn_not_in_group
        c10d._warn_not_in_group = self._noting_strangers(self._warn)
        dist.Work.wait = self._waiting(dist.Work.wait)  # type: ignore[method-assign]
        c10d._new_group_with_tag = self._making_groups(c10d._new_group_with_tag)

    def remove(self) -> None:
        """Restore stock torch."""
        if self._library is not None:
            self._library._destroy()
            dist.Work.wait = self._wait  # type: ignore[method-assign]
            c10d._new_group_with_tag, c10d._warn_not_in_group = self._new_group, self._warn
            self._library = None
        self.forget()

    def settle(self) -> None:
        """Note completions whose notice is still on its way, when a run ends."""
        for work, pending in list(self._pending.values()):
            if pending.op not in P2P and work.is_completed():
                self._settle(work, pending)

    def forget(self) -> None:
        """Let go of operations that nobody waited for."""
        self.broken = False
        self._pending.clear()
        self._groups.clear()
        self._limited.clear()
        self._buffers.clear()
        self._backward, self._alone = -1, None

    # -- one call ---------------------------------------------------------------

    def _hook(self, operator: Any, call: Call, below: str) -> Callable[..., Any]:
        backend = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(below))
        # a third of the cost of calling the operator again below autograd
        forward = partial(operator._handle.redispatch_boxed, backend)

        def hook(*args: Any) -> Any:
            recorder = _recorder.current()
            if recorder is None:
                return forward(*args)
            recorder.wait_ends()  # under dk.use_algorithm this is a call within a call
            pending = self._start(recorder, call, args)
            if call.blocks:
                limit = None if call.limit is None else args[call.limit]
                recorder.wait_begins(pending, limited=_is_limit(limit))
            try:
                result = forward(*args)
            except BaseException:
                pending.fail()
                self.broken = True
                raise
            finally:
                recorder.wait_ends()
            self._follow(recorder, call, args, pending, result)
            return result

        return hook

    def _start(self, recorder: Recorder, call: Call, args: tuple[Any, ...]) -> Pending:
        """Note that the user's line made this call, and that it goes to the backend."""
        now, caller = time.monotonic(), sys._getframe(2)
        inputs, outputs = tensors(args, call.inputs), tensors(args, call.outputs)
        touched = inputs or outputs
        group, members = self._group(args[call.group])
        peer = None if call.peer is None else _global(members, args[call.peer], call.op)
        tag = None if call.tag is None else args[call.tag]
        shape: tuple[int, ...] = ()
        dtype, nbytes, look = "", 0, False
        if touched:
            first = touched[0]
            shape, dtype, look = tuple(first.shape), str(first.dtype)[6:], recorder.can_look()
            nbytes = first.nbytes if len(touched) == 1 else sum(t.nbytes for t in touched)
        label = reduction(caller) if call.reduces else of_objects(caller)
        if torch._C._current_graph_task_id() >= 0:
            label = label or "gradients"
        fields = (peer, group, nbytes, shape, dtype, tag, user_line(3), label, None)
        pending = Pending(recorder, recorder.next_seq(), call.op, fields, outputs, look)
        self._hand_over(recorder, pending, touched, now)
        return pending

    def _hand_over(
        self, recorder: Recorder, pending: Pending, touched: list[torch.Tensor], called: float
    ) -> None:
        """Note the call, pass the gates, and note that it goes to the backend."""
        seq, op, fields = pending.seq, pending.op, pending.fields
        values = recorder.look(*touched) if pending.look else None
        recorder.put(seq, op, State.SCHEDULED, called, fields, values if recorder.stepped else None)
        for pass_by in self.before:
            pass_by(op, fields[2])
        recorder.put(seq, op, State.STARTED, time.monotonic(), fields, values)

    def _follow(
        self, recorder: Recorder, call: Call, args: tuple[Any, ...], pending: Pending, result: Any
    ) -> None:
        """Arrange that the completion is noted."""
        script = result[-1] if isinstance(result, (tuple, list)) else result
        if not isinstance(script, torch.ScriptObject):
            pending.complete()  # monitored_barrier has no Work: it has finished
            return
        work = dist.Work.unbox(script)
        is_cuda = bool(pending.outputs) and pending.outputs[0].is_cuda
        caller = sys._getframe(2)
        python = caller.f_code.co_filename == c10d.__file__
        if python and caller.f_code.co_name == "irecv" and pending.outputs:
            self._buffers.add(pending)
        background = call.op not in P2P and (is_async(call, args) or not python)
        if is_cuda and not background:
            pending.complete()  # stream-ordered, nobody waits: reading the values does
            return
        self._pending[id(work)] = work, pending
        if background:
            self._in_background(recorder, work, pending)
        if not python and torch._C._current_graph_task_id() < 0:
            recorder.wait_begins(pending, still=_same_call(caller))  # in C++, unseen

    def _in_background(self, recorder: Recorder, work: Any, pending: Pending) -> None:
        """Note a completion that C++ waits for, as DDP's reducer does at the end of backward.

        The work's future tells, on a thread of the backend; the thread needs Python's lock for
        that, while the main thread wants it back. A small model's only bucket is noted more
        cheaply, right after the reducer has waited; a second bucket brings the futures in.
        """
        backward = torch._C._current_graph_task_id()
        if backward >= 0 and backward != self._backward:
            self._backward, self._alone = backward, (work, pending)
            self._after_backward(recorder, 2)  # the reducer's callback comes between the two
            return
        if self._alone is not None:
            self._by_future(*self._alone)
            self._alone = None
        self._by_future(work, pending)

    def _after_backward(self, recorder: Recorder, turns: int) -> None:
        if turns:
            if turns == 1:  # next, the reducer waits for all that this backward has sent
                recorder.wait_begins(*(p for _, p in self._pending.values() if not p.done))
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._after_backward(recorder, turns - 1))
            return
        recorder.wait_ends()
        if self._alone is not None:
            work, pending = self._alone
            self._alone = None
            if work.is_completed():
                self._settle(work, pending)
            else:
                self._by_future(work, pending)

    def _by_future(self, work: Any, pending: Pending) -> None:
        with suppress(RuntimeError):  # gloo's reduce_scatter has none: waiting for it tells
            work.get_future().add_done_callback(lambda future: self._settle(work, pending, future))

    def _settle(self, work: Any, pending: Pending, future: Any = None) -> None:
        """Note how a work has ended."""
        try:
            if future is None:
                with suppress(RuntimeError):
                    future = work.get_future()
            if future is not None:
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
            recorder = pending.recorder
            limit = next(iter((*args, *kwargs.values())), None)
            limited = _is_limit(limit) or pending.fields[1] in self._limited
            recorder.wait_begins(pending, limited=limited)
            try:
                result = wait(work, *args, **kwargs)
            except BaseException:
                pending.fail()
                self.broken = True
                raise
            finally:
                recorder.wait_ends()
                self._buffers.remove(pending)
            pending.complete(self._source(work, pending))
            return result

        return waiting

    def _source(self, work: Any, pending: Pending) -> int | None:
        """Who sent what a receive from anybody got."""
        peer, group = pending.sender
        if pending.op is not Op.RECV or peer is not None:
            return None
        members = dict(self._groups.values())[group]
        return int(members[work._source_rank()])

    def _making_groups(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """new_group, noted: every rank of the world has to call it, or those that do wait."""

        def making(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
            recorder = _recorder.current()
            if recorder is None or kwargs.get("use_local_synchronization"):
                return make(ranks, *args, **kwargs)
            label = "all" if ranks is None else ",".join(map(str, ranks))
            fields = (None, WORLD, 0, (), "", None, user_line(2), label, None)
            pending = Pending(recorder, recorder.next_seq(), Op.NEW_GROUP, fields, [], False)
            self._hand_over(recorder, pending, [], time.monotonic())
            limit = kwargs.get("timeout", args[0] if args else None)
            recorder.wait_begins(pending, limited=_is_limit(limit))
            try:
                made = make(ranks, *args, **kwargs)
            except BaseException:
                pending.fail()
                raise
            finally:
                recorder.wait_ends()
            pending.complete()
            if _is_limit(limit) and isinstance(made, dist.ProcessGroup):
                self._limited.add(made.group_name)
            return made

        return making

    def _noting_strangers(self, warn: Callable[[str], None]) -> Any:
        """Torch's warning that the rank does not belong to the group, noted as a failed call."""

        def noting(name: str) -> None:
            recorder = _recorder.current()
            fitting = [call.op for call in CALLS.values() if str(call.op) in name]
            if recorder is not None and fitting:
                op = max(fitting, key=len)  # "all_reduce_coalesced" has "reduce" in it, too
                fields = (None, "", 0, (), "", None, user_line(2), "not a member", None)
                Pending(recorder, recorder.next_seq(), op, fields, [], False).fail()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                warn(name)
            file, _, line = user_line(2).rpartition(":")
            for warning in said:  # torch would name the line in this file
                warnings.warn_explicit(warning.message, warning.category, file, int(line or 0))

        return noting

    def _group(self, script: Any) -> tuple[str, list[int]]:
        """Name and members (global ranks) of a process group."""
        group = dist.ProcessGroup.unbox(script)
        name = group.group_name
        if name not in self._groups:
            members = dist.get_process_group_ranks(group)
            default = dist.group.WORLD
            label = WORLD if default is not None and name == default.group_name else name
            self._groups[name] = label, list(members)
            if self.on_group is not None:
                self.on_group(label, list(members))
        return self._groups[name]


def _is_limit(given: timedelta | int | None) -> bool:
    """Whether this time limit is one that the program means to reach; int in milliseconds."""
    if isinstance(given, timedelta):
        given = given // timedelta(milliseconds=1)
    return given is not None and 0 < given <= PATIENT


def _global(members: list[int], rank: int, op: Op) -> int:
    """The global rank of a group's member."""
    if 0 <= rank < len(members):
        return members[rank]
    raise ValueError(f"{op}: there is no rank {rank}; the group has ranks 0 to {len(members) - 1}.")


def _same_call(frame: FrameType) -> Callable[[], bool]:
    """Tells later whether a thread is still in the C++ function that this line has called."""
    ident, at = threading.get_ident(), frame.f_lasti

    def still() -> bool:
        return sys._current_frames().get(ident) is frame and frame.f_lasti == at

    return still


#: The tap of this process.
tap = Tap()
