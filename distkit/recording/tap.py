"""Records torch.distributed calls with hooks in torch's dispatcher.

All of torch's communication (``dist.*``, ``batch_isend_irecv``, DDP's C++ reducer, FSDP2, DTensor,
functional and compiled collectives) passes through the operators of the ``c10d`` library.
The tap registers a Python function for each operator at the dispatch key ``BackendSelect``, which
is below autograd, inference mode, tensor subclasses and modes, and above all backends. The function
records the call and redispatches it to the backend.
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
from datetime import timedelta
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from distkit.events import P2P, WORLD, Op, State
from distkit.recording import recorder as _recorder
from distkit.recording.call_context import CallContext, register_model
from distkit.recording.open_buffers import OpenBuffers
from distkit.recording.operators import (
    CALLS,
    STORE_SETS,
    STORE_WAITS,
    Call,
    Groups,
    describe,
    is_async,
    is_functional,
    object_function,
    reduction,
    splits,
    storage_of,
    tensors,
)
from distkit.recording.pending import (
    COMPLETION_QUERIES,
    Pending,
    UnwaitedCollectives,
    device_of,
    event_query_lock,
    hook,
    is_user_timeout,
    record_wait,
    returns_to_user,
)
from distkit.recording.recorder import (
    HIDDEN_FILES,
    RawAttributes,
    Recorder,
    line_of,
    main_thread_line,
    user_line,
    with_caller,
)

#: Names of functions that return before their message is transferred.
_REQUESTS = {"isend", "irecv"}

#: Period for polling the GPU at the end of a run [s].
POLL_INTERVAL = 0.001

#: Dispatch key of the hooks; no c10d operator has a kernel there.
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)

#: Dispatch key of meta tensors, which are not communicated.
_META = torch._C.DispatchKey.Meta

# the original methods, so the tap's own queries of a Work do not count as the program's
_is_completed, _get_future = dist.Work.is_completed, dist.Work.get_future


class Tap:
    """Installs and removes the recording hooks.

    While the hooks are installed, they record calls with the recorder that
    :func:`distkit.recording.recorder.current` returns. If it returns None, they only redispatch.
    """

    def __init__(self) -> None:
        #: Called before a communication call is passed to the backend; a callback may block or
        #: raise.
        self.before: list[Callable[[Op, int], None]] = []
        #: ``on_gloo``: whether gloo executes the collectives; NCCL executes them in streams.
        #: ``on_gpu``: whether this process computes on a GPU.
        self.on_gloo = self.on_gpu = False
        #: Examines each call before it is passed to the backend, and reports what it finds.
        self.call_context: CallContext | None = None
        self._buffers = OpenBuffers()
        self._undo: ExitStack | None = None  # removes the hooks
        #: Works of messages that programs never waited for, kept alive because gloo drops a message
        #: when its Work is destroyed.
        self._unwaited_messages: list[Any] = []
        self.reset()

    def install(self) -> None:
        """Hook every c10d operator of this torch version, unless already installed."""
        if self._undo is not None:
            return
        undo = self._undo = ExitStack()
        for name, call in CALLS.items():
            if (operator := getattr(torch.ops.c10d, name, None)) is not None:
                _hook_operator(undo, operator.default, partial(self._operator_hook, call))
        _hook_operator(undo, torch.ops._c10d_functional.wait_tensor.default, self._wait_tensor_hook)
        hook(undo, c10d, "_warn_not_in_group", self._not_in_group_hook)
        hook(undo, dist.Work, "wait", self._wait_hook)
        hook(undo, c10d, "_new_group_with_tag", self._new_group_hook)
        for name in ("_unregister_process_group", "_unregister_all_process_groups"):
            hook(undo, c10d, name, self._destroy_hook)
        hook(undo, torch.autograd, "_engine_run_backward", self._buffers.run_backward)
        hook(undo, torch.autograd, "backward", self._backward_hook)
        hook(undo, DistributedDataParallel, "__init__", register_model)
        if self.on_gpu:
            self._watch_gpu(undo)
        for name in COMPLETION_QUERIES:
            hook(undo, dist.Work, name, self._query_hook)
        for name in (*STORE_WAITS, *STORE_SETS):
            hook(undo, dist.Store, name, partial(self._store_hook, name))

    def remove(self) -> None:
        """Restore torch's functions."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def record_completions(self) -> None:
        """Record completions whose callbacks have not run yet, at the end of a run."""
        for work, pending in list(self._pending.values()):
            if pending.op in P2P and pending.begin is None:
                self._unwaited_messages.append(work)
                continue
            future = _future_of(work)  # completes slightly before the Work
            if _is_completed(work) or (future is not None and future.done()):
                self._record_outcome(work, pending)

    def reset(self) -> None:
        """Discard the state of the previous run."""
        self._buffers.clear()
        #: The groups that this rank uses, and the collectives that it has not waited for.
        self.groups, self.unwaited = Groups(), UnwaitedCollectives()
        #: Whether a call has failed; gloo may then have closed the group's connections.
        self.broken = False
        #: Number of collectives called on each group, by name.
        self.collectives: Counter[str] = Counter()
        self._pending: dict[int, tuple[Any, Pending]] = {}
        # by group: the id of the thread that calls collectives, or 0 if several threads do
        self._threads: dict[str, int] = {}
        self._groups_with_timeout: set[str] = set()  # groups with a short timeout
        self._backward = -1  # id of the backward pass of ``_reducer_calls``
        self._reducer_calls: list[tuple[Any, Pending]] = []  # calls of DDP's reducer

    # -- one call ---------------------------------------------------------------

    def _operator_hook(
        self, call: Call, redispatch: Callable[..., Any], keys: Any, *args: Any
    ) -> Any:
        """Record a call of a c10d operator and redispatch it."""
        recorder, (keys, is_meta) = _recorder.current(), _lower_keys(keys.raw_repr())
        if recorder is None or is_meta:
            return redispatch(keys, *args)
        recorder.end_wait()  # under use_algorithm, an all-reduce contains other calls
        call_time, pending = time.monotonic(), self._record_call(recorder, call, args)
        if pending is None:
            return redispatch(keys, *args)
        _check_peer(call, args, pending)
        inputs = _read_tensors(call, args, pending) if pending.has_values else []
        self._record_start(recorder, pending, inputs, call_time)
        if not (self.on_gloo or pending.device is None):
            pending.record_begin()
        if call.blocks or pending.begin is not None:
            limit = None if call.timeout is None else args[call.timeout]
            recorder.begin_wait(pending, has_timeout=is_user_timeout(limit))
        try:
            result = redispatch(keys, *args)
        except BaseException:
            pending.fail()
            self.broken = True
            raise
        finally:
            recorder.end_wait()
        try:
            self._track_completion(recorder, call, args, pending, result)
        except Exception as error:
            recorder.count_missing(f"the end of {call.op}: {type(error).__name__}: {error}")
        return result

    def _record_call(self, recorder: Recorder, call: Call, args: tuple[Any, ...]) -> Pending | None:
        """Return the call as a pending operation, or None if it cannot be recorded.

        If inspection fails, the program continues, and the trace lists the call as missing.
        """
        try:
            with DisableTorchFunction():  # hidden from tensor subclasses
                return self._inspect(recorder, call, args, _caller(sys._getframe(1)))
        except Exception as error:
            recorder.count_missing(f"{call.op}: {type(error).__name__}: {error}")
            return None

    def _inspect(
        self, recorder: Recorder, call: Call, args: tuple[Any, ...], caller: FrameType
    ) -> Pending | None:
        thread, in_backward = threading.get_ident(), torch._C._current_graph_task_id() >= 0
        group = self.groups.find(args[call.group])
        if group is None:
            recorder.count_missing("calls on directly constructed process groups are not recorded")
            return None
        outputs = tensors(args, call.outputs)
        call_tensors = (call.inputs != call.outputs and tensors(args, call.inputs)) or outputs
        if call.op not in P2P:
            self.collectives[group.name] += 1
            # a backward pass runs on autograd's threads
            if not in_backward and self._threads.get(group.name) != thread:
                self._check_thread(group.name, thread)
        peer = None if call.peer is None else group.rank(args[call.peer])
        tag = None if call.tag is None else args[call.tag]
        shape, dtype, nbytes = describe(call_tensors)
        device = (
            None
            if not call_tensors or call_tensors[0].is_cpu
            else device_of(call_tensors[0].device)
        )
        has_values = bool(call_tensors)
        attributes = _attributes(call, caller, in_backward)
        if call.op is Op.ALL_TO_ALL:
            attributes = (*attributes, *splits(args))
        if device is not None:
            attributes = (*attributes, *device.attributes)
            if device.captures():
                device, has_values, attributes = None, False, (*attributes, ("captured", True))
        seq, has_values = recorder.next_seq(), has_values and recorder.may_summarize()
        where = line_of(caller) or main_thread_line()
        fields = peer, group.name, nbytes, shape, dtype, tag, where, attributes, None
        pending = Pending(
            recorder, seq, call.op, recorder.share(fields), outputs, has_values, device
        )
        if self._buffers.active:
            self._buffers.check(
                str(call.op),
                _read_tensors(call, args, pending),
                _written_tensors(call, args, pending),
            )
        return pending

    def _check_thread(self, group: str, thread: int) -> None:
        """Report a group on which several threads call collectives in an undefined order."""
        if self._threads.setdefault(group, thread) not in (thread, 0):
            self._threads[group] = 0  # report only once
            if self.call_context is not None:
                self.call_context.report("threads", group)

    def _record_start(
        self, recorder: Recorder, pending: Pending, inputs: list[torch.Tensor], call_time: float
    ) -> None:
        """Record the call, run the ``before`` callbacks, and record the start in the backend."""
        seq, op, fields = pending.seq, pending.op, pending.fields
        values = recorder.summarize(*inputs) if inputs else None
        if recorder.stepped:
            recorder.put(seq, op, State.SCHEDULED, call_time, with_caller(fields), values)
        else:
            recorder.put(seq, op, State.SCHEDULED, call_time, fields)
        for callback in self.before:
            callback(op, fields[2])
        recorder.put(seq, op, State.STARTED, time.monotonic(), fields, values)
        if self.call_context is not None:
            try:
                self.call_context.before_call(
                    pending, has_timeout=fields[1] in self._groups_with_timeout
                )
            except Exception as error:
                recorder.count_missing(f"context of {op}: {type(error).__name__}: {error}")

    def _track_completion(
        self, recorder: Recorder, call: Call, args: tuple[Any, ...], pending: Pending, result: Any
    ) -> None:
        """Arrange for the completion to be recorded."""
        script = result[-1] if isinstance(result, (tuple, list)) else result
        # monitored_barrier and NCCL's synchronous collectives return no Work; a captured call does
        # not run until its CUDA graph is replayed
        work = dist.Work.unbox(script) if isinstance(script, torch.ScriptObject) else None
        if work is None or ("captured", True) in pending.fields[-2]:
            pending.complete()
            return
        pending.work = work
        caller = _caller(sys._getframe(1))
        from_python = caller.f_code.co_filename == c10d.__file__
        background = call.op not in P2P and (is_async(call, args) or not from_python)
        self._pending[id(work)] = work, pending
        if from_python and (background or caller.f_code.co_name in _REQUESTS):
            self._track_async(call, args, work, pending, caller)
        functional = not from_python and is_functional(caller)
        in_stream = pending.begin is not None
        # on a device, calls made from Python complete at wait(), when the values are available in
        # the program's stream
        if background and not (in_stream and (functional or from_python)):
            self._track_background(recorder, work, pending, functional)
        if not (from_python or functional) and torch._C._current_graph_task_id() < 0:
            # the wait happens in C++, so no hook observes its end
            recorder.begin_wait(pending, is_waiting=_still_in_call(caller))

    def _track_async(
        self, call: Call, args: tuple[Any, ...], work: Any, pending: Pending, caller: FrameType
    ) -> None:
        """Track a call that returns ``work`` before completion, if the caller is user code."""
        if not returns_to_user(caller):
            return
        if call.op not in P2P:
            self.unwaited.add(work, pending)
        if pending.fields[2]:  # the call transfers bytes
            reads = _read_tensors(call, args, pending)
            writes = _written_tensors(call, args, pending)
            self._buffers.add(work, pending, reads, writes, [] if call.copies else reads)

    def _track_background(
        self, recorder: Recorder, work: Any, pending: Pending, separate: bool
    ) -> None:
        """Record a completion for which C++ code waits; DDP's reducer does at the end of backward.

        A future's callback runs on a thread of the backend, which competes with the main thread for
        the GIL. The only bucket of a small model is recorded more cheaply, right after the reducer
        has waited; if there are more buckets, futures are used for all of them.

        On a device, the reducer makes the program's stream wait at the end of backward. After that
        point in the stream, the values of all buckets can be read without a race.

        Args:
            recorder: the recorder of this rank.
            work: the Work that the call returned.
            pending: the call.
            separate: whether the program waits for the call independently of the reducer.
        """
        backward = torch._C._current_graph_task_id()
        if separate or backward < 0:
            self._complete_by_future(work, pending)
            return
        is_first = backward != self._backward
        if is_first:
            self._backward, self._reducer_calls = backward, []
            # the reducer's callback will run between these two callbacks
            self._after_backward(recorder, 2)
        self._reducer_calls.append((work, pending))
        if pending.begin is None and not is_first:
            for call in self._reducer_calls:
                self._complete_by_future(*call)
            self._reducer_calls = []

    def _backward_hook(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a backward pass and check the gradients afterwards."""
        backward(*args, **kwargs)
        if self.call_context is not None and torch._C._current_graph_task_id() < 0:
            self.call_context.after_backward()

    def _after_backward(self, recorder: Recorder, callbacks: int) -> None:
        if callbacks:
            if callbacks == 1:  # the reducer next waits for all buckets of this backward pass
                recorder.begin_wait(*(p for _, p in self._pending.values() if not p.is_done))
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._after_backward(recorder, callbacks - 1))
            return
        recorder.end_wait()
        for work, pending in self._reducer_calls:
            is_done = pending.begin is not None or _is_completed(work)
            (self._record_outcome if is_done else self._complete_by_future)(work, pending)
        self._reducer_calls = []

    def _complete_by_future(self, work: Any, pending: Pending) -> None:
        if (future := _future_of(work)) is not None:  # otherwise, _wait_hook records it
            future.add_done_callback(lambda f: self._record_outcome(work, pending, f))

    def _record_outcome(self, work: Any, pending: Pending, future: Any = None) -> None:
        """Record the outcome of a Work."""
        try:
            if (future := future or _future_of(work)) is not None:
                future.value()
        except Exception:
            pending.fail()
        else:
            pending.complete()
        self._pending.pop(id(work), None)

    def _wait_hook(self, wait: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """Run Work.wait and record the completion before returning to user code."""
        self._stop_watching(work)
        entry = self._pending.pop(id(work), None)
        if entry is not None:
            limit = next(iter((*args, *kwargs.values())), None)
            return self._wait_for(
                [entry], is_user_timeout(limit), partial(wait, work, *args, **kwargs)
            )
        return wait(work, *args, **kwargs)  # already recorded, or started in an earlier cell

    def _query_hook(self, query: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a method of Work, other than wait(), that reveals its completion."""
        result = query(work, *args, **kwargs)
        if query is not _is_completed or result:
            self._stop_watching(work)
            entry = self._pending.get(id(work))
            if entry is not None and entry[1].begin is not None:
                entry[1].has_values = False  # the program may change the tensors in any stream
                self._complete_by_future(*entry)
        return result

    def _stop_watching(self, work: Any) -> None:
        """Stop tracking a Work whose completion the program waits for or observes."""
        self._buffers.remove(work)
        self.unwaited.forget(work)

    def _wait_for(
        self, works: list[tuple[Any, Pending]], has_timeout: bool, wait: Callable[[], Any]
    ) -> Any:
        """Wait for operations and record the wait and their completions."""
        pendings = [pending for _, pending in works]
        has_timeout = has_timeout or any(p.fields[1] in self._groups_with_timeout for p in pendings)
        try:
            with record_wait(*pendings, has_timeout=has_timeout):
                result = wait()
        except BaseException:
            self.broken = True
            raise
        for work, pending in works:
            pending.complete(self._source(work, pending))
        return result

    def _source(self, work: Any, pending: Pending) -> int | None:
        """Return the sender of the message that matched a receive from any source, or None."""
        if pending.op is not Op.RECV or pending.fields[0] is not None:
            return None
        return self.groups.by_name[pending.fields[1]].rank(work._source_rank())

    def wait_for_gpu(self, limit: float = math.inf) -> None:
        """Wait up to ``limit`` seconds for the GPU to finish the operations in flight."""
        recorder = _recorder.current()
        in_flight = [] if recorder is None else list(recorder.in_flight)
        if recorder is None or not in_flight:
            return
        deadline = time.monotonic() + limit
        with record_wait(*in_flight):
            while recorder.in_flight and time.monotonic() < deadline:
                recorder.poll()
                time.sleep(POLL_INTERVAL)

    def _watch_gpu(self, undo: ExitStack) -> None:
        """Hook the functions that synchronize with the GPU or capture a CUDA graph."""
        hook(undo, torch.cuda, "synchronize", partial(self._synchronize_hook, all_streams=True))
        hook(undo, torch.cuda.Stream, "synchronize", self._synchronize_hook)
        hook(undo, torch.cuda.CUDAGraph, "capture_begin", _capture_begin)
        hook(undo, torch.cuda.CUDAGraph, "capture_end", _capture_end)
        with warnings.catch_warnings():  # the overridden kernels only select a dispatch key
            warnings.simplefilter("ignore")
            for operator in (torch.ops.aten._local_scalar_dense, torch.ops.aten._to_copy):
                _hook_operator(undo, operator.default, self._to_host_hook)

    def _to_host_hook(
        self,
        redispatch: Callable[..., Any],
        keys: Any,
        tensor: torch.Tensor | complex,
        **options: Any,
    ) -> Any:
        """Run an operator that synchronizes with the GPU if it copies a tensor to the host."""
        if not isinstance(tensor, torch.Tensor):  # a Python number
            return torch.tensor(tensor, dtype=options.get("dtype"), device=options.get("device"))
        skips_sync = str(options.get("device", "cpu")) != "cpu" or options.get("non_blocking")
        if skips_sync or tensor.is_cpu:
            return redispatch(keys - _KEY, tensor, **options)
        return self._synchronize_hook(redispatch, keys - _KEY, tensor, **options)

    def _synchronize_hook(
        self, wait: Callable[..., Any], *args: Any, all_streams: bool = False, **kwargs: Any
    ) -> Any:
        """Run a call that waits for the work in this thread's stream, or in all streams."""
        recorder = _recorder.current()
        in_flight = [] if recorder is None else list(recorder.in_flight)
        operations = [p for p in in_flight if all_streams or p.is_in_this_stream()]
        if not operations:
            return wait(*args, **kwargs)
        with record_wait(*operations):
            return wait(*args, **kwargs)

    def _wait_tensor_hook(
        self, redispatch: Callable[..., Any], keys: Any, tensor: torch.Tensor
    ) -> Any:
        """Record the wait for a functional collective, given one of its output tensors."""
        works = self._pop_pending(tensor) if _recorder.current() is not None else []
        wait = partial(redispatch, keys - _KEY, tensor)
        return self._wait_for(works, False, wait) if works else wait()

    def _pop_pending(self, tensor: torch.Tensor) -> list[tuple[Any, Pending]]:
        """Remove and return the pending operations that write this tensor's storage."""
        if not self._pending or tensor.is_meta:
            return []
        storage = storage_of(tensor)
        found_keys = [
            key
            for key, (_, pending) in list(self._pending.items())
            if any(storage_of(t) == storage for t in pending.outputs)
        ]
        pairs = (self._pending.pop(key, None) for key in found_keys)
        return [pair for pair in pairs if pair is not None]

    def _new_group_hook(
        self, create: Callable[..., Any], ranks: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Record ``new_group``, which blocks until every rank in the world has called it."""
        recorder = _recorder.current()
        if recorder is None or kwargs.get("use_local_synchronization"):
            return create(ranks, *args, **kwargs)
        members = None if ranks is None else tuple(ranks)
        attributes: RawAttributes = () if members is None else (("members", members),)
        where = user_line(2)
        fields = (None, WORLD, 0, (), "", None, where, attributes, None)
        pending = Pending(recorder, recorder.next_seq(), Op.NEW_GROUP, fields, [], False)
        self._record_start(recorder, pending, [], time.monotonic())
        limit = kwargs.get("timeout", args[0] if args else None)
        with record_wait(pending, has_timeout=is_user_timeout(limit)):
            group = create(ranks, *args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            self.groups.add(group)
            is_returned_to_user = returns_to_user(sys._getframe(1))
            if is_returned_to_user and (
                count := self.groups.count_leaked(weakref.ref(group), where, members)
            ):
                pending.fields = (*fields[:-2], (*attributes, ("lost", count)), None)
            if is_user_timeout(limit):
                self._groups_with_timeout.add(group.group_name)
        pending.complete()
        return group

    def _store_hook(
        self, name: str, method: Callable[..., Any], store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record a program's store call, unless it is part of a call that is being recorded."""
        recorder, caller = _recorder.current(), sys._getframe(2).f_code.co_filename
        is_internal = caller.startswith((c10d.__file__, *HIDDEN_FILES))
        if recorder is None or is_internal or threading.get_ident() in recorder.waits:
            return method(store, *args, **kwargs)
        arguments = (*args, *kwargs.values())
        keys = arguments[:1] if arguments and isinstance(arguments[0], str) else tuple(arguments[0])
        attributes = {"method": name, "keys": tuple(keys)}
        fields = (None, WORLD, 0, (), "", None, user_line(2), attributes, None)
        op = Op.STORE_WAIT if name in STORE_WAITS else Op.STORE_SET
        pending = Pending(recorder, recorder.next_seq(), op, fields, [], False)
        self._record_start(recorder, pending, [], time.monotonic())
        limit = next((arg for arg in arguments if isinstance(arg, timedelta)), store.timeout)
        with record_wait(pending, has_timeout=is_user_timeout(limit)):
            result = method(store, *args, **kwargs)
        pending.complete()
        return result

    def _destroy_hook(self, unregister: Callable[..., Any], name: str = WORLD) -> None:
        """Record the destruction of one or all groups, with their unfinished calls."""
        recorder = _recorder.current()
        if recorder is not None:
            attributes: dict[str, Any] = {"label": "destroy_process_group", "destroyed": name}
            if seqs := self._unfinished_calls(name):
                attributes["open"] = seqs
            seq, where = recorder.next_seq(), user_line(2)
            recorder.record(seq, Op.MARK, State.COMPLETED, attributes=attributes, where=where)
        unregister(*([name] if name != WORLD else []))

    def _unfinished_calls(self, group: str) -> tuple[int, ...]:
        """Return the seqs of unfinished calls on a group; for the world, on all groups."""
        messages = [p for _, p in list(self._pending.values()) if p.op in P2P and not p.is_done]
        seqs = [p.seq for p in messages if group in (WORLD, p.fields[1])]
        return tuple(sorted([*seqs, *self.unwaited.calls(group)]))

    def _not_in_group_hook(self, warn: Callable[[str], None], name: str) -> None:
        """Record a failed call when torch warns that the rank is not in the group."""
        recorder = _recorder.current()
        candidates = [call.op for call in CALLS.values() if str(call.op) in name]
        if recorder is not None and candidates:
            op = max(candidates, key=len)  # "all_reduce_coalesced" also contains "reduce"
            seq, where = recorder.next_seq(), user_line(2)
            recorder.record(seq, op, State.FAILED, group="", where=where)
        warn(name)


@cache
def _lower_keys(keys: int) -> tuple[Any, bool]:
    """Return a call's dispatch keys without the hooks' key, and whether its tensors are meta.

    Converting a key set to or from Python costs more than this lookup by its bits.
    """
    key_set = torch._C.DispatchKeySet.from_raw_repr(keys)
    return key_set - _KEY, key_set.has(_META)


def _hook_operator(undo: ExitStack, operator: Any, replacement: Callable[..., Any]) -> None:
    """Replace an operator with ``replacement(redispatch, keys, …)`` until ``undo`` is closed."""
    library = torch.library.Library(operator.namespace, "IMPL")
    undo.callback(library._destroy)
    kernel = partial(replacement, operator._handle.redispatch_boxed)
    library.impl(operator, kernel, "BackendSelect", with_keyset=True)


def _capture_begin(capture_begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Begin a capture and disable event queries until it ends."""
    event_query_lock.acquire()
    try:
        return capture_begin(*args, **kwargs)
    except BaseException:
        event_query_lock.release()
        raise


def _capture_end(capture_end: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return capture_end(*args, **kwargs)
    finally:
        with suppress(RuntimeError):  # the capture had not begun
            event_query_lock.release()


def _future_of(work: Any) -> Any:
    """Return the future of a Work, or None for gloo's reduce_scatter, which does not have one."""
    try:
        return _get_future(work)
    except RuntimeError:
        return None


def _caller(hook: FrameType) -> FrameType:
    """Return the frame that called a hook, or the hook's frame in a C++ thread of autograd."""
    return hook.f_back or hook


def _attributes(call: Call, caller: FrameType, in_backward: bool) -> RawAttributes:
    """Return the attributes of a call, such as its reduction or enclosing function."""
    name = "reduction" if call.reduces else "function"
    value = reduction(caller) if call.reduces else object_function(caller)
    attributes: RawAttributes = ((name, value),) if value else ()
    if in_backward and call.reduces and not is_functional(caller):
        return *attributes, ("gradients", True)
    return attributes


def _read_tensors(call: Call, args: tuple[Any, ...], pending: Pending) -> list[torch.Tensor]:
    """Return the tensors that this rank's call reads."""
    if call.op is Op.BROADCAST and pending.fields[0] != pending.recorder.rank:
        return []
    return tensors(args, call.inputs)


def _written_tensors(call: Call, args: tuple[Any, ...], pending: Pending) -> list[torch.Tensor]:
    """Return the tensors that this rank's call writes."""
    is_root = pending.fields[0] == pending.recorder.rank
    reads_only = {Op.SEND: True, Op.BROADCAST: is_root, Op.REDUCE: not is_root}
    return [] if reads_only.get(call.op) else tensors(args, call.outputs)


def _check_peer(call: Call, args: tuple[Any, ...], pending: Pending) -> None:
    """Raise ValueError for a peer that does not exist, since gloo would wait for it forever."""
    if call.peer is not None and call.op in P2P and pending.fields[0] is None:
        last = dist.ProcessGroup.unbox(args[call.group]).size() - 1
        raise ValueError(
            f"{call.op}: rank {args[call.peer]} does not exist; the group has ranks 0 to {last}."
        )


def _still_in_call(frame: FrameType) -> Callable[[], bool]:
    """Return a function that checks whether this thread is still in the frame's current call."""
    ident, instruction = threading.get_ident(), frame.f_lasti

    def is_waiting() -> bool:
        return sys._current_frames().get(ident) is frame and frame.f_lasti == instruction

    return is_waiting


#: The tap of this process.
tap = Tap()
