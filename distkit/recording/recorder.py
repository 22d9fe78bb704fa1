"""A bounded event buffer for one rank.

Each rank has one :class:`Recorder` per run. The tap records calls of torch.distributed,
:func:`mark` records computation, and the KVStore records its requests and replies.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

from distkit.errors import PACKAGE_PATHS
from distkit.events import (
    LINES,
    NO_ATTRIBUTES,
    STACK,
    WORLD,
    Attributes,
    Op,
    State,
    Summary,
)
from distkit.recording.encoding import Row, Values, encode_rows

if TYPE_CHECKING:
    from torch import Tensor

    from distkit.recording.pending import DeferredSummary, Pending
    from distkit.trace.columns import Category, Table

#: ``VALUES``: maximum number of values in a summary. ``EXACT``: maximum number of elements of a
#: tensor that is summarized exactly.
VALUES, EXACT = 64, 65_536
#: Maximum number of sampled elements of a larger tensor.
_SAMPLE = 4096

#: CPU time for summarizing values: ``BUDGET`` [s] plus ``BUDGET_RATE`` times the run time so far.
#: When it is used up, events have no values, which keeps recording cheap in long training loops.
BUDGET, BUDGET_RATE = 0.005, 0.005

#: Maximum number of distinct reasons for missing records.
MAX_UNRECORDED = 100

#: Maximum number of distinct field tuples stored for sharing.
MAX_SHARED_FIELDS = 1000

#: Maximum period between flushes [s].
MAX_PERIOD = 0.1

#: Maximum number of user frames recorded for a wait.
MAX_STACK = 8

#: Duration after which a wait is recorded as blocked [s].
BLOCKED_AFTER = 0.1

#: Maximum delay of an event whose values have not arrived from the GPU [s].
MAX_VALUES_DELAY = 0.1

#: The attributes of an event, as a dict or as pairs.
RawAttributes = dict[str, Any] | tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Wait:
    """A thread's wait for the first of ``operations`` that is not done.

    An operation has the attributes ``seq``, ``op``, ``fields`` and ``is_done`` of a
    :class:`Pending`. ``is_waiting`` returns whether the thread is still waiting; it is set if the
    end of the wait is not observable. ``has_timeout`` is True if the program has set a timeout and
    is expected to handle it.
    """

    operations: Sequence[Any]
    since: float
    has_timeout: bool = False
    is_waiting: Callable[[], bool] | None = None
    recorded_seq: int = -1  # seq of the operation recorded as blocked


class Recorder:
    """Collects the events of one rank.

    Args:
        rank: the rank of all events.
        limit: maximum number of unsent events; additional events are counted in ``dropped``.
        copy_to: called immediately with the number (from 1) and row of each event, except when an
            operation is scheduled.
        stepped: whether a stepper controls the run; then all tensors are summarized, and events are
            sent as soon as a thread waits.
    """

    def __init__(
        self,
        rank: int,
        *,
        limit: int = 200_000,
        copy_to: Callable[[int, Row], None] | None = None,
        stepped: bool = False,
    ) -> None:
        self.rank, self.limit, self.dropped, self.stepped = rank, limit, 0, stepped
        self._copy_to, self._number = copy_to, itertools.count(1)
        self.without_values = 0
        #: Number of missing or unchecked records, by reason.
        self.unrecorded: Counter[str] = Counter()
        self.waits: dict[int, Wait] = {}  # by thread
        self.request_flush: Callable[[], None] = lambda: None  # replaced by the flusher
        self._rows: list[Row] = []
        self._fields: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._seq = itertools.count()
        # frame, instruction and start time of the main thread's wait for another thread
        self._idle: tuple[int, int, float] | None = None
        self.in_flight: list[Pending] = []  # operations that a GPU is still executing
        self._has_deferred = False  # some values may not have arrived
        self._start_time, self._cpu_time = time.monotonic(), 0.0

    def next_seq(self) -> int:
        """Return the number of the next operation."""
        return next(self._seq)

    def share(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a shared tuple equal to ``fields``, so a loop's fields are packed only once."""
        if len(self._fields) > MAX_SHARED_FIELDS:
            self._fields.clear()
        return self._fields.setdefault(fields, fields)

    def record(
        self,
        seq: int,
        op: Op,
        state: State,
        *,
        peer: int | None = None,
        group: str = WORLD,
        nbytes: int = 0,
        shape: tuple[int, ...] = (),
        dtype: str = "",
        tag: int | None = None,
        where: str = "",
        attributes: RawAttributes = (),
        match: str | None = None,
        summary: Values | DeferredSummary | None = None,
    ) -> None:
        """Record a state transition that happens now."""
        fields = peer, group, nbytes, shape, dtype, tag, where, attributes, match
        self.put(seq, op, state, time.monotonic(), fields, summary)

    def put(
        self,
        seq: int,
        op: Op,
        state: State,
        timestamp: float,
        fields: tuple[Any, ...],
        summary: Values | DeferredSummary | None = None,
    ) -> None:
        """Record a transition on the fast path; ``fields`` are those from ``peer`` to ``match``."""
        if len(self._rows) >= self.limit:
            self.dropped += 1
            return
        row = seq, op, state, timestamp, fields, summary
        self._rows.append(row)
        if summary is not None and type(summary) is not tuple:
            self._has_deferred = True
        number = next(self._number)
        if self._copy_to is not None and state is not State.SCHEDULED:  # a STARTED event follows
            self._copy_to(number, row)

    def count_missing(self, description: str) -> None:
        """Count a missing part of the trace, by the first line of its description."""
        line = description.partition("\n")[0][:200]
        if line in self.unrecorded or len(self.unrecorded) < MAX_UNRECORDED:
            self.unrecorded[line] += 1

    def may_summarize(self) -> bool:
        """Return whether the budget allows summarizing values; if not, count the event."""
        if self.stepped or self._cpu_time <= BUDGET + BUDGET_RATE * (
            time.monotonic() - self._start_time
        ):
            return True
        self.without_values += 1
        return False

    def summarize(self, *tensors: Tensor) -> Values | DeferredSummary | None:
        """Summarize tensors and charge the CPU time to the budget of :meth:`may_summarize`.

        At most :data:`BUDGET` is charged per call, because the first call on a GPU also loads
        kernels.
        """
        start = time.thread_time()  # does not count the time of other processes
        torch = sys.modules["torch"]
        try:
            with torch._C.DisableTorchFunction():
                if not torch._C._len_torch_dispatch_stack():
                    return summarize(*tensors)
                with torch.utils._python_dispatch._disable_current_modes():
                    return summarize(*tensors)
        except Exception as error:  # recording must not break the program
            self.count_missing(f"values: {type(error).__name__}: {error}")
            return None
        finally:
            self._cpu_time += min(time.thread_time() - start, BUDGET)

    # -- waits --------------------------------------------------------------------

    def begin_wait(
        self,
        *operations: Any,
        has_timeout: bool = False,
        is_waiting: Callable[[], bool] | None = None,
    ) -> None:
        """Record that this thread is waiting for these operations."""
        self.waits[threading.get_ident()] = Wait(
            operations, time.monotonic(), has_timeout, is_waiting
        )
        if self.stepped:
            self.request_flush()

    def end_wait(self) -> None:
        """Record that this thread is no longer waiting."""
        self.waits.pop(threading.get_ident(), None)

    def blocked(self) -> tuple[tuple[int, ...], float, float] | None:
        """Return the rank's wait as ``(seqs, since, now)``, or None if the rank is not blocked.

        ``seqs`` contains the number of the operation in which each blocked thread is waiting. The
        operation is recorded as blocked only once.
        """
        now, main = time.monotonic(), threading.main_thread().ident or 0
        waits = dict(self.waits)
        blocked_seqs = {
            thread: seq
            for thread, wait in waits.items()
            if (seq := self._record_blocked(wait, now, thread)) is not None
        }
        autograd_threads = blocked_seqs.keys() - {thread.ident for thread in threading.enumerate()}
        idle_since = self._idle_since(now, bool(autograd_threads)) if main not in waits else 0.0
        if not blocked_seqs or (main not in blocked_seqs and idle_since is None):
            return None
        blocked_waits = [waits[thread] for thread in blocked_seqs]
        if any(w.has_timeout for w in blocked_waits) or any(
            t.ident not in blocked_seqs for t in busy_threads()
        ):
            return None  # the rank may continue without the other ranks
        return (
            tuple(sorted(blocked_seqs.values())),
            max(idle_since or 0.0, *(w.since for w in blocked_waits)),
            now,
        )

    def _record_blocked(self, wait: Wait, now: float, thread: int) -> int | None:
        """Record that a thread is blocked, and return its operation's seq; None if it is not.

        Only this method records the stack, which keeps short waits cheap.
        """
        if now - wait.since < BLOCKED_AFTER and not self.stepped:
            return None
        operation = next((o for o in wait.operations if not o.is_done), None)
        if operation is None or not (wait.is_waiting is None or wait.is_waiting()):
            return None
        if wait.recorded_seq != operation.seq:
            wait.recorded_seq = operation.seq
            *call, where, attributes, match = fields = operation.fields
            stack = _wait_attributes(sys._current_frames(), thread, where)
            # a store call has a dict of attributes; the thread may no longer be waiting
            if isinstance(attributes, tuple) and self.waits.get(thread) is wait:
                fields = *call, where, (*attributes, *stack), match
            self.put(operation.seq, operation.op, State.BLOCKED, wait.since, fields)
        return wait.recorded_seq

    def _idle_since(self, now: float, in_backward: bool) -> float | None:
        """Return the time since which the main thread has been waiting for another thread, or None.

        In a backward pass, it waits for autograd's threads, which Python does not list.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or not (
            is_waiting_for_thread(frame)
            or (in_backward and frame.f_code.co_name == "_engine_run_backward")
        ):
            self._idle = None
            return None
        if self._idle is None or self._idle[:2] != (id(frame), frame.f_lasti):
            self._idle = id(frame), frame.f_lasti, now
        return self._idle[2]

    def poll(self) -> None:
        """Record the completions of operations that the GPU has finished."""
        for operation in list(self.in_flight):
            if operation.poll():
                with suppress(ValueError):  # another thread has removed it
                    self.in_flight.remove(operation)

    def drain(self, last: bool = False) -> list[Row]:
        """Remove and return the recorded rows, up to the first that still expects GPU values.

        With ``last``, return all rows.
        """
        rows = self._rows
        drained = rows[:] if not self._has_deferred else self._with_values(rows[:], last)
        del rows[: len(drained)]  # keeps rows that other threads have appended
        return drained

    def _with_values(self, rows: list[Row], last: bool) -> list[Row]:
        """Return the rows with their values, up to the first row that still expects values."""
        complete: list[Row] = []
        for row in rows:
            values = row[-1]
            if values is not None and type(values) is not tuple:
                values = values.poll()
                if values is None and not last and time.monotonic() - row[3] < MAX_VALUES_DELAY:
                    return complete
                self.without_values += values is None
                row = *row[:-1], values
            complete.append(row)
        return complete


def to_table(
    rank: int,
    rows: Sequence[Row],
    label: Callable[[str], str] = str,
    clock: Callable[[float], float] = float,
    *,
    first_seq: int = 0,
) -> Table:
    """Convert a rank's rows to events; ``label`` maps source lines, and ``clock`` maps times."""
    import numpy as np  # lazy: ranks do not need it here

    from distkit.trace.columns import Table

    shared = {(id(row[4]), row[1], row[2]): row for row in rows}
    codes = {key: n for n, key in enumerate(shared)}
    return Table(
        np.full(len(rows), rank),
        np.array([first_seq + row[0] for row in rows], np.int64),
        np.array([codes[id(row[4]), row[1], row[2]] for row in rows], np.int64),
        np.array([clock(row[3]) for row in rows], np.float64),
        [_category(row, label) for row in shared.values()],
        np.array([row[4][-1] for row in rows], object),
        np.array([None if row[5] is None else Summary(*row[5]) for row in rows], object),
    )


def _category(row: Row, label: Callable[[str], str]) -> Category:
    from distkit.trace.columns import Category

    _, op, state, _, (*call, where, pairs, _), _ = row
    attributes = Attributes(pairs) if pairs else NO_ATTRIBUTES
    lines: dict[str, Any] = {n: label(attributes[n]) for n in LINES if n in attributes}
    if STACK in attributes:
        lines[STACK] = tuple(map(label, attributes[STACK]))
    if lines:
        attributes = Attributes(attributes | lines)
    return Category(*(op, state, *call, label(where), attributes))


_current: Recorder | None = None


def current() -> Recorder | None:
    """Return the recorder of this process, or None if nothing is recorded."""
    return _current


def set_current(recorder: Recorder | None) -> None:
    """Set the recorder of this process; None stops recording."""
    global _current
    _current = recorder


@contextmanager
def mark(label: str) -> Iterator[None]:
    """Record the computation in the block as a labeled span, shown next to the communication.

    Outside a recorded run, this does nothing.

    Args:
        label: the text of the span, such as ``"forward"``.

    >>> with mark("forward"):
    ...     y = sum(range(10))
    """
    recorder = _current
    if recorder is None:
        yield
        return
    fields: dict[str, Any] = {"attributes": {"label": label}, "where": user_line(2)}
    seq = recorder.next_seq()
    recorder.record(seq, Op.MARK, State.STARTED, **fields)
    end = State.FAILED
    try:
        yield
        end = State.COMPLETED
    finally:
        recorder.record(seq, Op.MARK, end, **fields)


# -- values ---------------------------------------------------------------------


def summarize(*tensors: Tensor) -> Values | DeferredSummary | None:
    """Return the fields of a Summary of the values, as a tuple, or None if there are no elements.

    Several tensors are treated as one concatenated tensor, and a sparse tensor as its stored
    values. Beyond 65,536 elements, the statistics are computed from a strided sample, to bound the
    cost. Values on a GPU are summarized there and arrive later.
    """
    import numpy as np  # lazy: the notebook's kernel does not need numpy here

    tensors = tuple(map(stored_values, tensors))
    size = sum(t.numel() for t in tensors)
    if size == 0:
        return None
    sampled = size > EXACT
    width = tensors[0].shape[-1] if tensors[0].dim() else 1
    stride = _stride(size, _SAMPLE, width) if sampled else 1
    parts = [_flatten(t, stride) for t in tensors if t.numel()]
    if tensors[0].device.type != "cpu":
        from distkit.recording.pending import DeferredSummary  # lazy: it imports torch

        flat = parts[0] if len(parts) == 1 else sys.modules["torch"].cat(parts)
        return DeferredSummary(flat, _stride(len(flat), VALUES, width), size)
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    values = flat[:: _stride(len(flat), VALUES, width)].tolist()
    with np.errstate(all="ignore"):  # an unfilled receive buffer may hold any values
        square = float(flat.dot(flat)) * (size / len(flat))
    norm = math.sqrt(square) if square >= 0 else math.nan
    return tuple(values), norm, float(flat.min()), float(flat.max()), size, sampled


def stored_values(tensor: Tensor) -> Tensor:
    """Return a dense tensor, or the stored values of a sparse tensor."""
    return tensor.detach()._values() if tensor.is_sparse else tensor


def _stride(size: int, limit: int, width: int) -> int:
    """Return a sampling stride coprime to the row length, so that it covers all columns."""
    stride = max(1, -(-size // limit))
    while stride > 1 and math.gcd(stride, width) > 1:
        stride += 1
    return stride


def _flatten(tensor: Tensor, stride: int) -> Any:
    """Return every stride-th element as a flat numpy array of floats; on a GPU, as a tensor."""
    t = tensor.detach() if tensor.requires_grad else tensor
    if stride > 1:
        t = t.reshape(-1)[::stride]
    torch = sys.modules["torch"]
    if t.device.type != "cpu" or t.dtype not in (torch.float64, torch.float32):
        t = (t.real if t.is_complex() else t).to(torch.float64)  # for numpy's fast paths
    if t.device.type != "cpu":
        return t.reshape(-1)
    return sys.modules["numpy"].from_dlpack(_Capsule(t)).reshape(-1)


@dataclass(slots=True)
class _Capsule:
    """A DLPack view of a tensor for numpy; ``t.numpy()`` would make its storage unresizable."""

    tensor: Tensor

    def __dlpack__(self, **_: object) -> object:
        return sys.modules["torch"]._C._to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU


# -- source lines -----------------------------------------------------------------

#: Files whose frames are hidden; frames of examples and of other files in algorithms/ are shown.
HIDDEN_FILES = (
    f"{PACKAGE_PATHS[0]}_hosts/",
    f"{PACKAGE_PATHS[1]}/distkit_hosts/",
    *(
        f"{PACKAGE_PATHS[0]}/{name}"
        for name in (
            "recording/",
            "imports.py",
            "cluster/",
            "kvstore/",
            "algorithms/contract.py",
            "algorithms/use.py",
        )
    ),
)
_LIBRARY = str(Path(threading.__file__).parent) + "/"
_user_files: set[str] = set()


def user_line(depth: int = 1) -> str:
    """Return ``file:line`` of the innermost user frame."""
    return line_of(sys._getframe(depth))


def main_thread_line() -> str:
    """Return the main thread's user line, for autograd threads, which have no user frames."""
    return line_of(sys._current_frames().get(threading.main_thread().ident or 0))


def line_of(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost user frame in a stack, or "" if there is none."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _user_lines(frame: FrameType | None) -> tuple[str, ...]:
    """Return at most ``MAX_STACK`` user lines of a stack, innermost first."""
    stack = walk_stack(frame) if frame is not None else ()
    lines = (
        f"{user.f_code.co_filename}:{number}"
        for user, number in stack
        if is_user_file(user.f_code.co_filename)
    )
    return tuple(itertools.islice(lines, MAX_STACK))


def _wait_attributes(
    frames: dict[int, FrameType], thread: int, where: str
) -> tuple[tuple[str, Any], ...]:
    """Return the line and stack of a thread's wait for the call at line ``where``.

    An autograd thread has no user frames, so the main thread's stack replaces its stack.
    """
    main = threading.main_thread().ident or 0
    lines, main_lines = (_user_lines(frames.get(ident)) for ident in (thread, main))
    if not lines:
        return ((STACK, main_lines),) if main_lines[:1] == (where,) else ()
    wait_line = (("waits_at", lines[0]),) if lines[0] != where else ()
    return *wait_line, (STACK, lines)


def with_caller(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the attribute ``caller`` to the fields of a call made by a reference implementation.

    The caller is the innermost user line outside distkit.
    """
    *call, where, attributes, match = fields
    for frame, line in walk_stack(sys._getframe(1)) if where.startswith(PACKAGE_PATHS) else ():
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE_PATHS) and is_user_file(file):
            return *call, where, (*(attributes or ()), ("caller", f"{file}:{line}")), match
    return fields


def add_user_file(filename: str) -> None:
    """Treat the source file of a script or function as user code, wherever it is."""
    if filename not in _user_files and not filename.startswith(HIDDEN_FILES):
        _user_files.add(filename)
        is_user_file.cache_clear()


@cache
def is_user_file(filename: str) -> bool:
    """Return whether a source file is user code or a reference implementation."""
    if filename.startswith((*HIDDEN_FILES, "<frozen", "<string>", "<eval_with_key>")):
        return False
    if "/torchinductor_" in filename:  # generated by torch.compile
        return False
    if filename.startswith(PACKAGE_PATHS) or filename in _user_files:
        return True
    return "-packages/" not in filename and not filename.startswith(_LIBRARY)


def is_stdlib_file(filename: str) -> bool:
    """Return whether a source file belongs to Python's standard library."""
    return filename.startswith(_LIBRARY) and "-packages/" not in filename


def busy_threads() -> list[threading.Thread]:
    """Return the threads, except the main thread, that are running or will run user code."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # avoids a reference cycle through this frame

    def is_busy(thread: threading.Thread) -> bool:
        target = getattr(thread, "function", None) or getattr(thread, "_target", None)
        code = getattr(target, "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            return True
        frame = frames.get(thread.ident or 0)
        stack = walk_stack(frame) if frame is not None else ()
        return any(is_user_file(outer.f_code.co_filename) for outer, _ in stack)

    return [t for t in threading.enumerate() if t is not threading.main_thread() and is_busy(t)]


def is_waiting_for_thread(frame: FrameType) -> bool:
    """Return whether a frame of threading is waiting without a timeout, as in join() or get()."""
    if frame.f_code.co_filename != threading.__file__:
        return False
    limit = frame.f_locals.get("timeout")
    return limit is None or limit < 0


class Flusher:
    """Sends the recorder's events from a thread every ``period`` seconds.

    Args:
        emit: called with ``"rows"`` and (number of rows, packed rows), then with ``"waits"``
            and the result of :meth:`Recorder.blocked` unless it is None; it must not raise.
        period: initial period [s], which doubles up to :data:`MAX_PERIOD`.
        pack: packs the rows.
    """

    def __init__(
        self,
        recorder: Recorder,
        emit: Callable[[str, Any], None],
        *,
        period: float = 0.05,
        pack: Callable[[list[Row]], Any] = encode_rows,
    ) -> None:
        self._recorder, self._emit, self._period, self._pack = recorder, emit, period, pack
        self._is_closing, self._flush_lock = False, threading.Lock()
        self._wakeup = threading.Semaphore(0)
        recorder.request_flush = self._wakeup.release
        self._thread = threading.Thread(target=self._work, name="distkit-flusher", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_closing:
            try:
                # aligned across ranks, so a live view updates once per period
                self._wakeup.acquire(timeout=self._period - time.monotonic() % self._period)
                self.flush()
            except Exception:  # the program may have broken a module used here: retry later
                continue
            self._period = min(2 * self._period, MAX_PERIOD)

    def flush(self, last: bool = False) -> None:
        """Send the collected events now."""
        with self._flush_lock:
            if self._recorder.in_flight:
                self._recorder.poll()
            blocked = self._recorder.blocked()  # adds a BLOCKED event to the rows
            rows = self._recorder.drain(last)
            if rows:
                self._emit("rows", (len(rows), self._pack(rows)))
            if blocked is not None:
                self._emit("waits", blocked)

    def close(self) -> None:
        """Send the remaining events and stop the thread."""
        self._is_closing = True
        self._wakeup.release()
        self._thread.join()
        self.flush(last=True)
