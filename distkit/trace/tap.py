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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distkit.events import P2P, WORLD, Op, State
from distkit.trace import recorder as _recorder
from distkit.trace.operators import CALLS, Call, is_async, tensors
from distkit.trace.recorder import Recorder, user_line

#: Where the hook sits, and where it forwards to: the key of the real backend.
_KEYS = {"AutogradCPU": "CPU", "AutogradCUDA": "CUDA"}


class _Pending:
    """A started operation: completes once, by ``wait`` or by its future, whichever is first."""

    __slots__ = ("_done", "_fields", "_lock", "_look", "_outputs", "_recorder", "op", "seq")

    def __init__(
        self, recorder: Recorder, seq: int, op: Op, fields: tuple[Any, ...],
        outputs: list[torch.Tensor], look: bool,
    ) -> None:  # fmt: skip
        self._recorder, self.seq, self.op, self._fields = recorder, seq, op, fields
        self._outputs, self._look = outputs, look
        self._lock, self._done = threading.Lock(), False

    def complete(self, peer: int | None = None) -> None:
        now = time.monotonic()  # before looking at the values, which takes a while
        with self._lock:
            if self._done:
                return
            self._done = True
            fields = self._fields if peer is None else (peer, *self._fields[1:])
            values = self._recorder.look(*self._outputs) if self._look else None
            self._recorder.put(self.seq, self.op, State.COMPLETED, now, fields, values)

    def fail(self) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                now = time.monotonic()
                self._recorder.put(self.seq, self.op, State.FAILED, now, self._fields)

    @property
    def sender(self) -> tuple[int | None, str]:
        """The peer as far as it is known, and the group."""
        return self._fields[0], self._fields[1]


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
        self._backward = -1  # the backward pass that the latest call belongs to
        self._alone: tuple[Any, _Pending] | None = None  # its first call, while it is the only one

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
        self._backward, self._alone = -1, None

    def groups(self) -> dict[str, list[int]]:
        """The members of every group seen so far, by the group's name."""
        return dict(self._groups.values())

    # -- one call ---------------------------------------------------------------

    def _hook(self, operator: Any, call: Call, below: str) -> Callable[..., Any]:
        backend = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(below))
        # a third of the cost of calling the operator again below autograd
        forward = partial(operator._handle.redispatch_boxed, backend)

        def hook(*args: Any) -> Any:
            recorder = _recorder.current()
            if recorder is None:
                return forward(*args)
            pending = self._start(recorder, call, args)
            try:
                result = forward(*args)
            except BaseException:
                pending.fail()
                raise
            self._follow(call, args, pending, result)
            return result

        return hook

    def _start(self, recorder: Recorder, call: Call, args: tuple[Any, ...]) -> _Pending:
        """Note that the user's line made this call, and that it goes to the backend."""
        now = time.monotonic()
        inputs, outputs = tensors(args, call.inputs), tensors(args, call.outputs)
        touched = inputs or outputs
        group, members = self._group(args[call.group])
        peer = None if call.peer is None else members[args[call.peer]]
        tag = None if call.tag is None else args[call.tag]
        shape: tuple[int, ...] = ()
        dtype, nbytes, look = "", 0, False
        if touched:
            first = touched[0]
            shape, dtype, look = tuple(first.shape), str(first.dtype)[6:], recorder.can_look()
            nbytes = first.nbytes if len(touched) == 1 else sum(t.nbytes for t in touched)
        fields = (peer, group, nbytes, shape, dtype, tag, user_line(3), "", None)
        seq = recorder.next_seq()
        recorder.put(seq, call.op, State.SCHEDULED, now, fields)
        values = recorder.look(*touched) if look else None
        recorder.put(seq, call.op, State.STARTED, time.monotonic(), fields, values)
        return _Pending(recorder, seq, call.op, fields, outputs, look)

    def _follow(
        self, call: Call, args: tuple[Any, ...], pending: _Pending, result: Any
    ) -> None:
        """Arrange that the completion is noted."""
        script = result[-1] if isinstance(result, (tuple, list)) else result
        if not isinstance(script, torch.ScriptObject):
            pending.complete()  # monitored_barrier has no Work: it has finished
            return
        work = dist.Work.unbox(script)
        is_cuda = bool(pending._outputs) and pending._outputs[0].is_cuda
        background = call.op not in P2P and (is_async(call, args) or not _python_waits())
        if is_cuda and not background:
            pending.complete()  # stream-ordered, nobody waits: reading the values does
            return
        self._pending[id(work)] = work, pending
        if background:
            self._in_background(work, pending)

    def _in_background(self, work: Any, pending: _Pending) -> None:
        """Note a completion that C++ waits for, as DDP's reducer does at the end of backward.

        The work's future tells, on a thread of the backend; the thread needs Python's lock for
        that, while the main thread wants it back. A small model's only bucket is noted more
        cheaply, right after the reducer has waited; a second bucket brings the futures in.
        """
        backward = torch._C._current_graph_task_id()
        if backward >= 0 and backward != self._backward:
            self._backward, self._alone = backward, (work, pending)
            self._after_backward(2)  # the reducer's callback comes between the two
            return
        if self._alone is not None:
            self._by_future(*self._alone)
            self._alone = None
        self._by_future(work, pending)

    def _after_backward(self, turns: int) -> None:
        if turns:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._after_backward(turns - 1))
        elif self._alone is not None:
            work, pending = self._alone
            self._alone = None
            if work.is_completed():
                pending.complete()
                self._pending.pop(id(work), None)
            else:
                self._by_future(work, pending)

    def _by_future(self, work: Any, pending: _Pending) -> None:
        work.get_future().add_done_callback(lambda future: self._settle(work, pending, future))

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
        peer, group = pending.sender
        if pending.op is not Op.RECV or peer is not None:
            return None
        members = dict(self._groups.values())[group]
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


_PYTHON_API = dist.distributed_c10d.__file__


def _python_waits() -> bool:
    """Whether the call was made by Python's ``dist.*``, which waits with Work.wait."""
    return sys._getframe(3).f_code.co_filename == _PYTHON_API


#: The tap of this process.
tap = Tap()
