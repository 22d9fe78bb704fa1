"""The tap: records every torch.distributed call by hooking torch's dispatcher.

Every communication of torch (``dist.*``, ``batch_isend_irecv``, DDP's C++ reducer, FSDP2,
DTensor, functional and compiled collectives) passes through the operators of the ``c10d`` library.
The tap puts a Python function in front of each, at the dispatch key ``BackendSelect``: below
autograd, inference mode, tensor subclasses and modes, above every backend. It notes the call and
forwards it to the real backend. Computation is not touched and pays nothing.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from distkit.events import P2P, WORLD, Op, State
from distkit.recording import recorder as _recorder
from distkit.recording.device import asking, device_of
from distkit.recording.open_buffers import OpenBuffers
from distkit.recording.operators import (
    CALLS,
    Call,
    Groups,
    MadeGroups,
    described,
    is_async,
    is_functional,
    loses_gradient,
    of_objects,
    reduction,
    splits,
    storage_of,
    tensors,
)
from distkit.recording.pending import LOOKS, Pending, Unwaited, hook, is_given_to_users, is_limit
from distkit.recording.recorder import Facts, Recorder, line_of_main, user_line, with_caller
from distkit.recording.stores import Stores
from distkit.recording.witness import Witness, before_backward, noting_model

#: What returns before its message has gone or come.
_REQUESTS = {"isend", "irecv"}

#: So often a run that is over asks the GPU whether it is [s].
LOOK = 0.001

#: Where the hooks sit: no key that any operator of c10d uses itself.
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)

#: Tensors without data, by which torch finds out shapes: nothing is communicated.
_META = torch._C.DispatchKey.Meta

# torch's own: the tap's looks at a Work are not the program's
_is_completed, _get_future = dist.Work.is_completed, dist.Work.get_future


class Tap:
    """Puts the recording hooks in place, and takes them away again.

    While installed, calls are recorded into :func:`distkit.recording.recorder.current`; when
    that is None they are only forwarded.
    """

    def __init__(self) -> None:
        #: Called before a communication goes to the backend; may wait, or raise.
        self.before: list[Callable[[Op, int], None]] = []
        #: Called with a group whose collectives several threads of this rank call.
        self.on_threads: Callable[[str], None] = lambda group: None
        #: Whether collectives are gloo's; NCCL's wait in streams.
        self.on_gloo = False
        #: Whether this process computes on a GPU, and may wait for that.
        self.on_gpu = False
        #: Looks at each collective before it goes to the backend.
        self.witness: Witness | None = None
        self._buffers = OpenBuffers()
        self._stores = Stores(self._hand_over)
        self._undo: ExitStack | None = None  # takes the hooks away
        self.forget()

    def install(self) -> None:
        """Hook every c10d operator that this torch has; a second time it does nothing."""
        if self._undo is not None:
            return
        undo = self._undo = ExitStack()
        for name, call in CALLS.items():
            if (operator := getattr(torch.ops.c10d, name, None)) is not None:
                _hook_operator(undo, operator.default, partial(self._called, call))
        _hook_operator(undo, torch.ops._c10d_functional.wait_tensor.default, self._wait_tensor)
        hook(undo, c10d, "_warn_not_in_group", self._noting_stranger)
        hook(undo, dist.Work, "wait", self._waiting)
        hook(undo, dist.Work, "get_future", self._giving_future)
        hook(undo, c10d, "_new_group_with_tag", self._making_group)
        for name in ("_unregister_process_group", "_unregister_all_process_groups"):
            hook(undo, c10d, name, self._destroying)
        hook(undo, torch.autograd, "_engine_run_backward", self._buffers.after)
        hook(undo, torch.autograd, "backward", self._looking)
        hook(undo, DistributedDataParallel, "__init__", noting_model)
        if self.on_gpu:
            self._watch_gpu(undo)
        for name in LOOKS:
            hook(undo, dist.Work, name, self._noticing)
        self._stores.install(undo)

    def remove(self) -> None:
        """Restore stock torch."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def settle(self) -> None:
        """Note completions whose notice is still on its way, when a run ends."""
        for work, pending in list(self._pending.values()):
            if pending.op in P2P and pending.begin is None:
                continue
            future = _future_of(work)  # it is done a moment before the work
            if _is_completed(work) or (future is not None and future.done()):
                self._settle(work, pending)

    def forget(self) -> None:
        """Know nothing of what was called so far."""
        self._buffers.clear()
        #: The groups that this rank communicates in.
        self.groups = Groups()
        #: A call has failed: gloo may have closed connections, the group is not what it was.
        self.broken = False
        #: How many collectives were called on each group, by the group's name.
        self.collectives: Counter[str] = Counter()
        #: Asynchronous collectives that the program has not waited for.
        self.unwaited = Unwaited()
        self._made = MadeGroups()
        self._pending: dict[int, tuple[Any, Pending]] = {}
        self._threads: dict[str, int] = {}  # by group, who called a collective; 0 for several
        self._limited: set[str] = set()  # groups that the program gave a short time limit
        self._backward = -1  # the backward pass that the latest call belongs to
        self._sent: list[tuple[Any, Pending]] = []  # by its reducer, and noted at its end
        # with a device at them, by works that the program may wait for
        self._afloat: weakref.WeakKeyDictionary[Any, Pending] = weakref.WeakKeyDictionary()

    # -- one call ---------------------------------------------------------------

    def _called(self, call: Call, redispatch: Callable[..., Any], keys: Any, *args: Any) -> Any:
        """An operator of c10d is called."""
        recorder = _recorder.current()
        if recorder is None or keys.has(_META):
            return redispatch(keys - _KEY, *args)
        recorder.wait_ends()  # under dk.algorithms.use_algorithm this is a call within a call
        called, pending = time.monotonic(), self._noted(recorder, call, args)
        if pending is None:
            return redispatch(keys - _KEY, *args)
        _check_peer(call, args, pending)
        read = _read_by(call, args, pending) if pending.look else []
        self._hand_over(recorder, pending, read, called)
        if not (self.on_gloo or pending.device is None):
            pending.leaves()
        if call.blocks or pending.begin is not None:
            limit = None if call.limit is None else args[call.limit]
            recorder.wait_begins(pending, limited=is_limit(limit))
        try:
            result = redispatch(keys - _KEY, *args)
        except BaseException:
            pending.fail()
            self.broken = True
            raise
        finally:
            recorder.wait_ends()
        try:
            self._follow(recorder, call, args, pending, result)
        except Exception as error:
            recorder.miss(f"the end of {call.op}: {type(error).__name__}: {error}")
        return result

    def _noted(self, recorder: Recorder, call: Call, args: tuple[Any, ...]) -> Pending | None:
        """The function that the user's line has called; None if unknown.

        A program goes on as without us when we fail to read its call, and the trace says so.
        """
        try:
            with DisableTorchFunction():  # a subclass does not hear of our looks
                return self._read(recorder, call, args, _caller(sys._getframe(1)))
        except Exception as error:
            recorder.miss(f"{call.op}: {type(error).__name__}: {error}")
            return None

    def _read(
        self, recorder: Recorder, call: Call, args: tuple[Any, ...], caller: FrameType
    ) -> Pending | None:
        thread, in_backward = threading.get_ident(), torch._C._current_graph_task_id() >= 0
        group = self.groups.known(args[call.group])
        if group is None:
            recorder.miss("calls on process groups made by hand are not recorded")
            return None
        outputs = tensors(args, call.outputs)
        touched = (call.inputs != call.outputs and tensors(args, call.inputs)) or outputs
        if call.op not in P2P:
            self.collectives[group.name] += 1
            if not in_backward:  # autograd has threads of its own
                self._note_thread(group.name, thread)
        peer = None if call.peer is None else group.rank(args[call.peer])
        tag = None if call.tag is None else args[call.tag]
        shape, dtype, nbytes = described(touched)
        device = None if not touched or touched[0].is_cpu else device_of(touched[0].device)
        facts = _facts(call, caller, in_backward)
        if call.op is Op.ALL_TO_ALL:
            facts = (*facts, *splits(args))
        elif call.op is Op.BROADCAST and loses_gradient(caller):
            facts = (*facts, ("zeroes_gradient", True))
        if device is not None:
            facts = (*facts, *device.facts)
            if device.captures():
                device, facts = None, (*facts, ("captured", True))
        look = bool(touched) and (device is not None or touched[0].is_cpu) and recorder.can_look()
        seq = recorder.next_seq()
        where = user_line(3) or line_of_main()
        fields = peer, group.name, nbytes, shape, dtype, tag, where, facts, None
        pending = Pending(recorder, seq, call.op, recorder.shared(fields), outputs, look, device)
        if self._buffers.active:
            reads, writes = _read_by(call, args, pending), _written_by(call, args, pending)
            self._buffers.look(str(call.op), reads, writes)
        return pending

    def _note_thread(self, group: str, thread: int) -> None:
        """Tell of a group whose collectives several threads of this rank call: no order holds."""
        if self._threads.setdefault(group, thread) not in (thread, 0):
            self._threads[group] = 0  # once is enough
            self.on_threads(group)

    def _hand_over(
        self, recorder: Recorder, pending: Pending, read: list[torch.Tensor], called: float
    ) -> None:
        """Note the call, pass the gates, and note that it goes to the backend."""
        seq, op, fields = pending.seq, pending.op, pending.fields
        values = recorder.look(*read) if read else None
        if recorder.stepped:
            recorder.put(seq, op, State.SCHEDULED, called, with_caller(fields), values)
        else:
            recorder.put(seq, op, State.SCHEDULED, called, fields)
        for pass_by in self.before:
            pass_by(op, fields[2])
        recorder.put(seq, op, State.STARTED, time.monotonic(), fields, values)
        if self.witness is not None:
            try:
                self.witness.look(pending, limited=fields[1] in self._limited)
            except Exception as error:
                recorder.miss(f"a look at {op}: {type(error).__name__}: {error}")

    def _follow(
        self, recorder: Recorder, call: Call, args: tuple[Any, ...], pending: Pending, result: Any
    ) -> None:
        """Arrange that the completion is noted."""
        script = result[-1] if isinstance(result, (tuple, list)) else result
        if not isinstance(script, torch.ScriptObject):
            pending.complete()  # monitored_barrier has no Work: it has finished
            return
        if ("captured", True) in pending.fields[-2]:
            pending.complete()  # it is in a graph, and happens when that is replayed
            return
        work = pending.work = dist.Work.unbox(script)
        if work is None:  # NCCL's synchronous collectives work in the caller's stream
            pending.complete()
            return
        caller = _caller(sys._getframe(1))
        python = caller.f_code.co_filename == c10d.__file__
        background = call.op not in P2P and (is_async(call, args) or not python)
        self._pending[id(work)] = work, pending
        if python and (background or caller.f_code.co_name in _REQUESTS):
            self._leave_open(call, args, work, pending, caller)
        functional = is_functional(caller)
        in_stream = pending.begin is not None
        if background and not (in_stream and functional):  # there wait_tensor has the stream wait
            self._in_background(recorder, work, pending, python if in_stream else functional)
        if not (python or functional) and torch._C._current_graph_task_id() < 0:
            recorder.wait_begins(pending, still=_same_call(caller))  # in C++, unseen

    def _leave_open(
        self, call: Call, args: tuple[Any, ...], work: Any, pending: Pending, caller: FrameType
    ) -> None:
        """The caller goes on; what becomes of ``work`` matters if the caller is the user."""
        if not is_given_to_users(caller):
            return
        if call.op not in P2P:
            self.unwaited.add(work, pending)
        if pending.fields[2]:  # else it has no values
            reads, writes = _read_by(call, args, pending), _written_by(call, args, pending)
            self._buffers.add(work, pending, reads, writes, [] if call.copies else reads)

    def _in_background(self, recorder: Recorder, work: Any, pending: Pending, apart: bool) -> None:
        """Note a completion that C++ waits for, as DDP's reducer does at the end of backward.

        The work's future tells, on a thread of the backend; the thread needs Python's lock for
        that, while the main thread wants it back. A small model's only bucket is noted more
        cheaply, right after the reducer has waited; a second bucket brings the futures in.

        On a device a future runs at once, in a stream that only follows the backend's. The reducer
        makes the program's stream wait at the end of backward: there the values of all buckets are
        read without a race.

        Args:
            recorder: of this rank.
            work: the call's.
            pending: the call.
            apart: its end is waited for apart from the reducer's.
        """
        backward = torch._C._current_graph_task_id()
        if apart or backward < 0:
            self._by_future(work, pending)
            return
        is_first = backward != self._backward
        if is_first:
            self._backward, self._sent = backward, []
            self._after_backward(recorder, 2)  # the reducer's callback comes between the two
        self._sent.append((work, pending))
        if pending.begin is None and not is_first:
            for sent in self._sent:
                self._by_future(*sent)
            self._sent = []

    def _looking(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A backward pass of the program's, after which the witness looks at the gradients."""
        before_backward()
        backward(*args, **kwargs)
        if self.witness is not None and torch._C._current_graph_task_id() < 0:
            self.witness.look_at_gradients()

    def _after_backward(self, recorder: Recorder, turns: int) -> None:
        if turns:
            if turns == 1:  # next, the reducer waits for all that this backward has sent
                recorder.wait_begins(*(p for _, p in self._pending.values() if not p.done))
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._after_backward(recorder, turns - 1))
            return
        recorder.wait_ends()
        for work, pending in self._sent:
            is_over = pending.begin is not None or _is_completed(work)
            (self._settle if is_over else self._by_future)(work, pending)
        self._sent = []

    def _by_future(self, work: Any, pending: Pending) -> None:
        if (future := _future_of(work)) is not None:  # else waiting for it tells
            future.add_done_callback(lambda done: self._settle(work, pending, done))

    def _settle(self, work: Any, pending: Pending, future: Any = None) -> None:
        """Note how a work has ended."""
        try:
            if (future := future or _future_of(work)) is not None:
                future.value()
        except Exception:
            pending.fail()
        else:
            pending.complete()
            if pending.begin is not None:
                self._afloat[work] = pending
        self._pending.pop(id(work), None)

    def _waiting(self, wait: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """Work.wait that notes the completion before the user's code goes on."""
        self._stop_watching(work)
        found = self._pending.pop(id(work), None)
        if found is not None:
            limit = next(iter((*args, *kwargs.values())), None)
            return self._wait_for([found], is_limit(limit), partial(wait, work, *args, **kwargs))
        result = wait(work, *args, **kwargs)  # it is over, or was begun in an earlier cell
        if (pending := self._afloat.pop(work, None)) is not None:
            pending.joins()
        return result

    def _noticing(self, look: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of Work, beside wait(), by which the program learns that it is over."""
        result = look(work, *args, **kwargs)
        if look is not _is_completed or result:
            self._stop_watching(work)
        return result

    def _stop_watching(self, work: Any) -> None:
        """The program waits for a work, and may want its memory back."""
        self._buffers.remove(work)
        self.unwaited.forget(work)

    def _giving_future(self, get_future: Callable[..., Any], work: Any) -> Any:
        """Who has a work's future, as DDP's hooks, may change its tensors in any stream."""
        if (pending := self._afloat.pop(work, None)) is not None:
            pending.joins(read=False)
        return get_future(work)

    def _wait_for(
        self, open_now: list[tuple[Any, Pending]], limited: bool, wait: Callable[[], Any]
    ) -> Any:
        """Wait for operations, and note that and their ends."""
        pendings = [pending for _, pending in open_now]
        recorder = pendings[0].recorder
        limited = limited or any(p.fields[1] in self._limited for p in pendings)
        recorder.wait_begins(*pendings, limited=limited)
        try:
            result = wait()
        except BaseException:
            for pending in pendings:
                pending.fail()
            self.broken = True
            raise
        finally:
            recorder.wait_ends()
        for work, pending in open_now:
            pending.complete(self._source(work, pending))
        return result

    def _source(self, work: Any, pending: Pending) -> int | None:
        """The sender of the message that a receive from any source got."""
        peer, group = pending.fields[:2]
        if pending.op is not Op.RECV or peer is not None:
            return None
        return self.groups.rank(group, work._source_rank())

    def rest(self, limit: float = math.inf) -> None:
        """Wait until the GPU has done what its callers have waited for in its streams.

        Or until ``limit`` seconds are over.
        """
        recorder = _recorder.current()
        if recorder is None or not recorder.flying:
            return
        recorder.wait_begins(*recorder.flying)
        try:
            end = time.monotonic() + limit
            while recorder.flying and time.monotonic() < end:
                recorder.land()
                time.sleep(LOOK)
        finally:
            recorder.wait_ends()

    def _watch_gpu(self, undo: ExitStack) -> None:
        """Notice where this process waits for its GPU, and when a CUDA graph is captured."""
        hook(undo, torch.cuda, "synchronize", partial(self._waiting_for_gpu, all_streams=True))
        hook(undo, torch.cuda.Stream, "synchronize", self._waiting_for_gpu)
        hook(undo, torch.cuda.CUDAGraph, "capture_begin", _not_asking)
        hook(undo, torch.cuda.CUDAGraph, "capture_end", _asking_again)
        with warnings.catch_warnings():  # one has a kernel there, which only chooses a key
            warnings.simplefilter("ignore")
            for operator in (torch.ops.aten._local_scalar_dense, torch.ops.aten._to_copy):
                _hook_operator(undo, operator.default, self._to_host)

    def _to_host(
        self,
        redispatch: Callable[..., Any],
        keys: Any,
        tensor: torch.Tensor | complex,
        **how: Any,
    ) -> Any:
        """An operator that waits for the GPU if it brings a tensor from there to the host."""
        if not isinstance(tensor, torch.Tensor):  # a number, of which torch has made a tensor
            return torch.tensor(tensor, dtype=how.get("dtype"), device=how.get("device"))
        stays = str(how.get("device", "cpu")) != "cpu" or how.get("non_blocking")
        if stays or tensor.is_cpu:
            return redispatch(keys - _KEY, tensor, **how)
        return self._waiting_for_gpu(redispatch, keys - _KEY, tensor, **how)

    def _waiting_for_gpu(
        self, wait: Callable[..., Any], *args: Any, all_streams: bool = False, **kwargs: Any
    ) -> Any:
        """A call that returns when the GPU has done what is in this thread's stream, or in all."""
        recorder = _recorder.current()
        flying = [] if recorder is None else list(recorder.flying)
        if not all_streams:
            flying = [p for p in flying if p.is_in_this_stream()]
        if recorder is None or not flying:
            return wait(*args, **kwargs)
        recorder.wait_begins(*flying)
        try:
            return wait(*args, **kwargs)
        finally:
            recorder.wait_ends()

    def _wait_tensor(self, redispatch: Callable[..., Any], keys: Any, tensor: torch.Tensor) -> Any:
        """Functional collectives are waited for by one of their tensors, in C++."""
        found = self._open_for(tensor) if _recorder.current() is not None else []
        wait = partial(redispatch, keys - _KEY, tensor)
        return self._wait_for(found, False, wait) if found else wait()

    def _open_for(self, tensor: torch.Tensor) -> list[tuple[Any, Pending]]:
        """Take the open operations that fill this tensor's memory."""
        if not self._pending or tensor.is_meta:
            return []
        storage = storage_of(tensor)
        found = [
            key
            for key, (_, pending) in list(self._pending.items())
            if any(storage_of(t) == storage for t in pending.outputs)
        ]
        taken = (self._pending.pop(key, None) for key in found)
        return [pair for pair in taken if pair is not None]

    def _making_group(
        self, make: Callable[..., Any], ranks: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """new_group, noted: every rank of the world has to call it, or those that do wait."""
        recorder = _recorder.current()
        if recorder is None or kwargs.get("use_local_synchronization"):
            return make(ranks, *args, **kwargs)
        members = None if ranks is None else tuple(ranks)
        facts: Facts = () if members is None else (("members", members),)
        where = user_line(2)
        fields = (None, WORLD, 0, (), "", None, where, facts, None)
        pending = Pending(recorder, recorder.next_seq(), Op.NEW_GROUP, fields, [], False)
        self._hand_over(recorder, pending, [], time.monotonic())
        limit = kwargs.get("timeout", args[0] if args else None)
        recorder.wait_begins(pending, limited=is_limit(limit))
        with pending.waited_for():
            made = make(ranks, *args, **kwargs)
        if isinstance(made, dist.ProcessGroup):
            self.groups.add(made)
            given = is_given_to_users(sys._getframe(1))
            if given and (lost := self._made.add(weakref.ref(made), where, members)):
                pending.fields = (*fields[:-2], (*facts, ("lost", lost)), None)
            if is_limit(limit):
                self._limited.add(made.group_name)
        pending.complete()
        return made

    def _destroying(self, unregister: Callable[..., Any], name: str = WORLD) -> None:
        """The end of a group, or of all groups, noted with what is open on it."""
        recorder = _recorder.current()
        if recorder is not None:
            facts: dict[str, Any] = {"label": "destroy_process_group", "destroyed": name}
            if still := self._open_on(name):
                facts["open"] = still
            about: dict[str, Any] = {"attributes": facts, "where": user_line(2)}
            seq = recorder.next_seq()
            for state in (State.STARTED, State.COMPLETED):
                recorder.record(seq, Op.MARK, state, **about)
        unregister(*([name] if name != WORLD else []))

    def _open_on(self, group: str) -> tuple[int, ...]:
        """The calls on a group, or on any if it is the world, that were not waited for."""
        messages = [p for _, p in list(self._pending.values()) if p.op in P2P and not p.done]
        named = [p.seq for p in messages if group in (WORLD, p.fields[1])]
        return tuple(sorted([*named, *self.unwaited.calls(group)]))

    def _noting_stranger(self, warn: Callable[[str], None], name: str) -> None:
        """Torch's warning that the rank does not belong to the group, noted as a failed call."""
        recorder = _recorder.current()
        fitting = [call.op for call in CALLS.values() if str(call.op) in name]
        if recorder is not None and fitting:
            op = max(fitting, key=len)  # "all_reduce_coalesced" has "reduce" in it, too
            fields = (None, "", 0, (), "", None, user_line(2), None, None)
            Pending(recorder, recorder.next_seq(), op, fields, [], False).fail()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warn(name)
        file, _, line = user_line(2).rpartition(":")
        for warning in said:  # torch would name the line in this file
            warnings.warn_explicit(warning.message, warning.category, file, int(line or 0))


def _hook_operator(undo: ExitStack, operator: Any, instead: Callable[..., Any]) -> None:
    """Have ``instead(redispatch, keys, …)`` called for an operator, until ``undo`` is closed."""
    library = torch.library.Library(operator.namespace, "IMPL")
    undo.callback(library._destroy)
    hooked = partial(instead, operator._handle.redispatch_boxed)
    library.impl(operator, hooked, "BackendSelect", with_keyset=True)


def _not_asking(capture_begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A capture that nobody disturbs by asking the GPU whether it has come to an event."""
    asking.acquire()
    try:
        return capture_begin(*args, **kwargs)
    except BaseException:
        asking.release()
        raise


def _asking_again(capture_end: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return capture_end(*args, **kwargs)
    finally:
        with suppress(RuntimeError):  # it had not begun
            asking.release()


def _future_of(work: Any) -> Any:
    """The future of a work; None for gloo's reduce_scatter, which has none."""
    try:
        return _get_future(work)
    except RuntimeError:
        return None


def _caller(hook: FrameType) -> FrameType:
    """The frame that has called a hook; its own in a thread of C++, as autograd has for a GPU."""
    return hook.f_back or hook


def _facts(call: Call, caller: FrameType, in_backward: bool) -> Facts:
    """A reduction, and what a call is a part of."""
    name = "reduction" if call.reduces else "function"
    value = reduction(caller) if call.reduces else of_objects(caller)
    found: Facts = ((name, value),) if value else ()
    if in_backward and not is_functional(caller):
        return *found, ("gradients", True)
    return found


def _read_by(call: Call, args: tuple[Any, ...], pending: Pending) -> list[torch.Tensor]:
    """The tensors that this rank's call reads; what it only writes may hold anything before."""
    if call.op is Op.BROADCAST and pending.fields[0] != pending.recorder.rank:
        return []
    return tensors(args, call.inputs)


def _written_by(call: Call, args: tuple[Any, ...], pending: Pending) -> list[torch.Tensor]:
    """The tensors that this rank's call changes."""
    is_root = pending.fields[0] == pending.recorder.rank
    reads_only = {Op.SEND: True, Op.BROADCAST: is_root, Op.REDUCE: not is_root}
    return [] if reads_only.get(call.op) else tensors(args, call.outputs)


def _check_peer(call: Call, args: tuple[Any, ...], pending: Pending) -> None:
    """Refuse a message to or from a rank that does not exist: gloo would wait for it for ever."""
    if call.op in P2P and call.peer is not None and pending.fields[0] is None:
        last = dist.ProcessGroup.unbox(args[call.group]).size() - 1
        raise ValueError(
            f"{call.op}: rank {args[call.peer]} does not exist; the group has ranks 0 to {last}."
        )


def _same_call(frame: FrameType) -> Callable[[], bool]:
    """Tells later whether a thread is still in the C++ function that this line has called."""
    ident, at = threading.get_ident(), frame.f_lasti

    def still() -> bool:
        return sys._current_frames().get(ident) is frame and frame.f_lasti == at

    return still


#: The tap of this process.
tap = Tap()
