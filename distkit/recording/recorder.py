"""The rank's notebook: what this process did, kept in a bounded buffer until it is sent on.

One :class:`Recorder` per rank and run. The tap writes torch.distributed's calls into it,
:func:`mark` the computation in between, the parameter server its messages.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from distkit.errors import OWN
from distkit.events import (
    LINES,
    NO_ATTRIBUTES,
    STACK,
    WORLD,
    Attributes,
    Event,
    Op,
    State,
    Summary,
)
from distkit.recording.plain import Row, Values, encode_rows

if TYPE_CHECKING:
    from torch import Tensor

    from distkit.recording.device import Later
    from distkit.recording.pending import Pending

#: A summary shows at most this many values, and looks at every element only of smaller tensors.
VALUES, EXACT = 64, 65_536
_SAMPLE = 4096

#: Looking at values may take this much processor time [s], and then this share of the time: beyond,
#: events come without values, so that recording stays cheap in a training loop of any length.
ALLOWANCE, SHARE = 0.005, 0.005

#: So many kinds of what was not recorded are told apart.
MOST_UNSEEN = 100

#: So many calls that differ in what they say are remembered.
MOST_SHARED = 1000

#: In a long run, collected events leave this often [s].
SLOWEST = 0.2

#: So many lines of the user's that led to a wait are noted.
MOST_LINES = 8

#: A wait that takes this long is noted [s].
PATIENCE = 0.1

#: An event waits this long for values that are on their way from a GPU [s], then goes without.
HELD = 0.1

Facts = dict[str, Any] | tuple[tuple[str, Any], ...]


class Waitable(Protocol):
    """An operation that a thread may wait for."""

    seq: int
    op: Op
    fields: tuple[Any, ...]
    done: bool


@dataclass(slots=True)
class Wait:
    """The wait of a thread: for the first of ``operations`` that is not done.

    ``still`` tells whether it waits at all, where nobody says when the wait is over. ``limited``:
    the program has set a time limit, and means to go on after it.
    """

    operations: Sequence[Waitable]
    since: float
    limited: bool = False
    still: Callable[[], bool] | None = None
    noted: int = -1  # the operation that the wait was noted for


class Recorder:
    """Collects the events of one rank.

    Args:
        rank: the rank that all events carry.
        limit: how many unsent events are kept; more are counted in ``dropped``.
        keep: where a copy of each row but a call's goes at once, with its number from 1.
        stepped: somebody goes through the run step by step: every value is looked at, and
            what happens is told at once.
    """

    def __init__(
        self,
        rank: int,
        *,
        limit: int = 200_000,
        keep: Callable[[int, Row], None] | None = None,
        stepped: bool = False,
    ) -> None:
        self.rank, self.limit, self.dropped, self.stepped = rank, limit, 0, stepped
        self._keep, self._number = keep, itertools.count(1)
        self.without_values = 0
        #: What was not recorded, or is not judged, and how often.
        self.unseen: Counter[str] = Counter()
        self.waits: dict[int, Wait] = {}  # by thread
        self.hurry: Callable[[], None] = lambda: None  # have it sent now
        self._rows: list[Row] = []
        self._fields: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._seq = itertools.count()
        self._idle: tuple[int, int, float] | None = None  # where the main thread waits for others
        self.flying: list[Pending] = []  # that a GPU is still at: waited for in a stream
        self._late = False  # values may still be to come
        self._began, self._looked = time.monotonic(), 0.0
        self._loaded = {"cpu"}  # kinds of devices whose kernels a first look has loaded

    def next_seq(self) -> int:
        """A number for the next operation."""
        return next(self._seq)

    def shared(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Equal fields, seen before if they were: those of a loop are packed and sent once."""
        if len(self._fields) > MOST_SHARED:
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
        attributes: Facts = (),
        match: str | None = None,
        summary: Values | Later | None = None,
    ) -> None:
        """Note one transition, now."""
        fields = peer, group, nbytes, shape, dtype, tag, where, attributes, match
        self.put(seq, op, state, time.monotonic(), fields, summary)

    def put(
        self,
        seq: int,
        op: Op,
        state: State,
        at: float,
        fields: tuple[Any, ...],
        summary: Values | Later | None = None,
    ) -> None:
        """Like :meth:`record`, for those in a hurry: ``fields`` from peer to match, in order."""
        if len(self._rows) >= self.limit:
            self.dropped += 1
            return
        row = seq, op, state, at, fields, summary
        self._rows.append(row)
        if summary is not None and type(summary) is not tuple:
            self._late = True
        number = next(self._number)
        if self._keep is not None and state is not State.SCHEDULED:  # it has started right after
            self._keep(number, row)

    def miss(self, what: str) -> None:
        """Count something that the trace lacks; what it says is bounded, and in one line."""
        line = what.partition("\n")[0][:200]
        if line in self.unseen or len(self.unseen) < MOST_UNSEEN:
            self.unseen[line] += 1

    def can_look(self) -> bool:
        """True if one more operation's values may be looked at; counts those that may not."""
        if self.stepped or self._looked <= ALLOWANCE + SHARE * (time.monotonic() - self._began):
            return True
        self.without_values += 1
        return False

    def look(self, *tensors: Tensor) -> Values | Later | None:
        """Summarize tensors, on the clock of the budget that :meth:`can_look` keeps.

        A first look at a GPU is free: it loads the kernels, for longer than any budget.
        """
        began = time.thread_time()  # on a busy machine the others' time does not count
        torch = sys.modules["torch"]
        try:
            with torch._C.DisableTorchFunction():
                if torch._C._len_torch_dispatch_stack():
                    return _unnoticed(*tensors)
                return summarize(*tensors)
        except Exception as error:  # the program is not to fail because we look
            self.miss(f"values: {type(error).__name__}: {error}")
            return None
        finally:
            kind = tensors[0].device.type if tensors else "cpu"
            if kind in self._loaded:
                self._looked += time.thread_time() - began
            self._loaded.add(kind)

    # -- waiting ------------------------------------------------------------------

    def wait_begins(
        self,
        *operations: Waitable,
        limited: bool = False,
        still: Callable[[], bool] | None = None,
    ) -> None:
        """This thread waits for these operations."""
        self.waits[threading.get_ident()] = Wait(operations, time.monotonic(), limited, still)
        if self.stepped:
            self.hurry()

    def wait_ends(self) -> None:
        """This thread goes on."""
        self.waits.pop(threading.get_ident(), None)

    def blocked(self) -> tuple[tuple[int, ...], float, float] | None:
        """The wait of the whole rank: ``(seqs, since, now)``; None if it goes on.

        There are as many operations as threads that communicate.

        A wait that takes long is noted as an event, once.
        """
        now, main = time.monotonic(), threading.main_thread().ident or 0
        waits = dict(self.waits)
        found = {
            thread: seq
            for thread, wait in waits.items()
            if (seq := self._note_blocked(wait, now, thread)) is not None
        }
        autograd = found.keys() - {thread.ident for thread in threading.enumerate()}
        idle = self._idle_since(now, bool(autograd)) if main not in waits else 0.0
        if not found or (main not in found and idle is None):
            return None
        those = [waits[thread] for thread in found]
        if any(w.limited for w in those) or any(t.ident not in found for t in busy_threads()):
            return None  # it may go on without the others
        return tuple(sorted(found.values())), max(idle or 0.0, *(w.since for w in those)), now

    def _note_blocked(self, wait: Wait, now: float, thread: int) -> int | None:
        """Note the operation that a thread has been waiting for; None if it goes on.

        The lines that led to it are looked up only here: a wait that is short costs nothing.
        """
        if now - wait.since < PATIENCE and not self.stepped:
            return None
        open_now = next((o for o in wait.operations if not o.done), None)
        if open_now is None or not (wait.still is None or wait.still()):
            return None
        if wait.noted != open_now.seq:
            wait.noted = open_now.seq
            *call, where, facts, match = fields = open_now.fields
            told = _told_of_wait(sys._current_frames(), thread, where)
            # what waits for a store is told apart by its facts; and it may have gone on meanwhile
            if isinstance(facts, tuple) and self.waits.get(thread) is wait:
                fields = *call, where, (*facts, *told), match
            self.put(open_now.seq, open_now.op, State.BLOCKED, wait.since, fields)
        return open_now.seq

    def _idle_since(self, now: float, autograd: bool) -> float | None:
        """Since when the main thread is known to wait for another thread; None if it does not.

        In a backward pass it waits for autograd's threads, of which Python does not know.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or not (
            waits_for_a_thread(frame)
            or (autograd and frame.f_code.co_name == "_engine_run_backward")
        ):
            self._idle = None
            return None
        if self._idle is None or self._idle[:2] != (id(frame), frame.f_lasti):
            self._idle = id(frame), frame.f_lasti, now
        return self._idle[2]

    def land(self) -> None:
        """Note the ends of operations that the GPU has come to."""
        for operation in list(self.flying):
            if operation.lands():
                self.flying.remove(operation)

    def drain(self, last: bool = False) -> list[Row]:
        """Take the rows recorded since the last call; all of them at last.

        Not those behind one whose values are on their way, for a while.
        """
        rows = self._rows
        if not rows:
            return []
        taken = rows[:] if not self._late else self._with_values(rows[:], last)
        del rows[: len(taken)]  # appends of other threads stay
        return taken

    def _with_values(self, rows: list[Row], last: bool) -> list[Row]:
        """Those whose values are there, up to the first that may still get them."""
        taken: list[Row] = []
        for row in rows:
            values = row[-1]
            if values is not None and type(values) is not tuple:
                values = values.take()
                if values is None and not last and time.monotonic() - row[3] < HELD:
                    return taken
                self.without_values += values is None
                row = *row[:-1], values
            taken.append(row)
        return taken

    def put_back(self, rows: list[Row]) -> None:
        """Have rows taken again that could not be sent."""
        self._rows[:0] = rows


def to_event(
    rank: int, row: Row, place: Callable[[str], str] = str, clock: Callable[[float], float] = float
) -> Event:
    """The event of a row; ``place`` and ``clock`` put its line and time into the reader's words."""
    seq, op, state, at, (*call, where, facts, match), summary = row
    values = None if summary is None else Summary(*summary)
    attributes = Attributes(facts) if facts else NO_ATTRIBUTES
    lines: dict[str, Any] = {n: place(attributes[n]) for n in LINES if n in attributes}
    if STACK in attributes:
        lines[STACK] = tuple(map(place, attributes[STACK]))
    if lines:
        attributes = Attributes(attributes | lines)
    return Event(*(rank, seq, op, state, clock(at), *call, place(where), attributes, match, values))


_current: Recorder | None = None


def current() -> Recorder | None:
    """The recorder of this process, None when nobody records."""
    return _current


def set_current(recorder: Recorder | None) -> None:
    """Record into this recorder from now on, or stop recording."""
    global _current
    _current = recorder


@contextmanager
def mark(label: str) -> Iterator[None]:
    """Show a piece of computation beside the communication, as a labelled span.

    Outside a recorded run it does nothing.

    Args:
        label: what the picture calls it, such as ``"forward"``.

    >>> with mark("forward"):
    ...     y = sum(range(10))
    """
    recorder = _current
    if recorder is None:
        yield
        return
    about: dict[str, Any] = {"attributes": {"label": label}, "where": user_line(2)}
    seq = recorder.next_seq()
    recorder.record(seq, Op.MARK, State.STARTED, **about)
    try:
        yield
    except BaseException:
        recorder.record(seq, Op.MARK, State.FAILED, **about)
        raise
    recorder.record(seq, Op.MARK, State.COMPLETED, **about)


# -- values ---------------------------------------------------------------------


def summarize(*tensors: Tensor) -> Values | Later | None:
    """A bounded picture of the values: Summary's fields, as a tuple. None for no elements.

    Several tensors count as one long one, and of a sparse one the stored values. Its cost does
    not grow with the size: beyond 65,536 elements the statistics come from a strided sample.
    A GPU's are computed there, and come later.
    """
    import numpy as np  # late: the kernel reads no values

    strided = sys.modules["torch"].strided
    if any(t.layout is not strided for t in tensors):
        tensors = tuple(dense_parts(t)[-1] for t in tensors)
    size = sum(t.numel() for t in tensors)
    if size == 0:
        return None
    sampled = size > EXACT
    width = tensors[0].shape[-1] if tensors[0].dim() else 1
    stride = _stride(size, _SAMPLE, width) if sampled else 1
    parts = [_flat(t, stride) for t in tensors if t.numel()]
    if tensors[0].device.type != "cpu":
        from distkit.recording.device import Later  # late, as numpy

        flat = parts[0] if len(parts) == 1 else sys.modules["torch"].cat(parts)
        return Later(flat, _stride(len(flat), VALUES, width), size)
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    values = flat[:: _stride(len(flat), VALUES, width)].tolist()
    with np.errstate(all="ignore"):  # a receive buffer may hold anything before it is filled
        square = float(flat.dot(flat)) * (size / len(flat))
    norm = math.sqrt(square) if square >= 0 else math.nan
    return tuple(values), norm, float(flat.min()), float(flat.max()), size, sampled


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor is made of, its values last: itself, or what a sparse has."""
    torch = sys.modules["torch"]
    if tensor.layout is torch.strided:
        return (tensor,)
    t = tensor.detach()
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    by_row = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    index = (t.crow_indices(), t.col_indices()) if by_row else (t.ccol_indices(), t.row_indices())
    return *index, t.values()


def _unnoticed(*tensors: Tensor) -> Values | Later | None:
    """Same as :func:`summarize`, invisible to modes by which the program watches its operations."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return summarize(*tensors)


def _stride(size: int, most: int, width: int) -> int:
    """Every how many elements to look; never the row's length, which would see one column."""
    stride = max(1, -(-size // most))
    while stride > 1 and math.gcd(stride, width) > 1:
        stride += 1
    return stride


def _flat(tensor: Tensor, stride: int) -> Any:
    """Every stride-th element as a flat numpy array of floats; a GPU's as a tensor there."""
    t = tensor.detach() if tensor.requires_grad else tensor
    if stride > 1:
        t = t.reshape(-1)[::stride]
    torch = sys.modules["torch"]
    if t.device.type != "cpu" or t.dtype not in (torch.float64, torch.float32):
        t = (t.real if t.is_complex() else t).to(torch.float64)  # numpy's fast paths take those
    if t.device.type != "cpu":
        return t.reshape(-1)
    return sys.modules["numpy"].from_dlpack(_Capsule(t)).reshape(-1)


@dataclass(slots=True)
class _Capsule:
    """A tensor for numpy; ``t.numpy()`` would forbid its program to resize the storage later."""

    tensor: Tensor

    def __dlpack__(self, **_: object) -> object:
        return sys.modules["torch"]._C._to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the host's memory


# -- places ---------------------------------------------------------------------

#: Frames of these are machinery; those of other files of algorithms/ and of demos.py are shown.
MACHINERY = (
    f"{OWN[0]}_hosts/",
    f"{OWN[1]}/distkit_hosts/",
    *(
        f"{OWN[0]}/{name}"
        for name in (
            "recording/",
            "cluster/",
            "kvstore/",
            "algorithms/contract.py",
            "algorithms/hosts.py",
            "algorithms/use.py",
        )
    ),
)
_LIBRARY = str(Path(threading.__file__).parent) + "/"
_made_users: set[str] = set()


def user_line(depth: int = 1) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor distkit's machinery."""
    return next(_users_lines(sys._getframe(depth)), "")


def line_of_main() -> str:
    """The line that the main thread is in; the GPU part of a backward pass has its own thread."""
    return next(_users_lines(sys._current_frames().get(threading.main_thread().ident or 0)), "")


def _users_lines(frame: FrameType | None) -> Iterator[str]:
    """The user's lines that led to a frame, the innermost first."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def _told_of_wait(
    frames: dict[int, FrameType], thread: int, where: str
) -> tuple[tuple[str, Any], ...]:
    """Where a thread waits for a call of line ``where``, and the lines that led there.

    A thread of autograd's has no line of the user's: there it is the main thread's.
    """
    main = threading.main_thread().ident or 0
    own, mains = (
        tuple(itertools.islice(_users_lines(frames.get(one)), MOST_LINES)) for one in (thread, main)
    )
    if not own:
        return ((STACK, mains),) if mains[:1] == (where,) else ()
    elsewhere = (("waits_at", own[0]),) if own[0] != where else ()
    return *elsewhere, (STACK, own)


def with_caller(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operation's fields with the ``caller`` of the page that it is in, if it is in one.

    That is the innermost line of the user's that is on no page of distkit's own.
    """
    *before, where, facts, match = fields
    for frame, line in walk_stack(sys._getframe(1)) if where.startswith(OWN) else ():
        file = frame.f_code.co_filename
        if not file.startswith(OWN) and is_users(file):
            return *before, where, (*(facts or ()), ("caller", f"{file}:{line}")), match
    return fields


def make_users(filename: str) -> None:
    """Take a source file for the user's, wherever it is: a script or function of it is run."""
    if filename not in _made_users and not filename.startswith(MACHINERY):
        _made_users.add(filename)
        is_users.cache_clear()


@cache
def is_users(filename: str) -> bool:
    """True if a source file is the user's, or a page to read: no library, no machinery."""
    if filename.startswith((*MACHINERY, "<frozen", "<string>", "<eval_with_key>")):
        return False
    if "/torchinductor_" in filename:  # what torch.compile has written
        return False
    if filename.startswith(OWN) or filename in _made_users:
        return True
    return "-packages/" not in filename and not filename.startswith(_LIBRARY)


def is_standard(filename: str) -> bool:
    """True if a source file is one of Python's own library."""
    return filename.startswith(_LIBRARY) and "-packages/" not in filename


def busy_threads() -> list[threading.Thread]:
    """The threads, besides the main one, that run a function of the user's, or will."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # its own holds them all, till the next garbage collection

    def is_busy(thread: threading.Thread) -> bool:
        begun = getattr(thread, "function", None) or getattr(thread, "_target", None)
        code = getattr(begun, "__code__", None)
        if code is not None and is_users(code.co_filename):
            return True
        frame = frames.get(thread.ident or 0)
        outwards = walk_stack(frame) if frame is not None else ()
        return any(is_users(outer.f_code.co_filename) for outer, _ in outwards)

    return [t for t in threading.enumerate() if t is not threading.main_thread() and is_busy(t)]


def waits_for_a_thread(frame: FrameType) -> bool:
    """True if this is the innermost frame of a thread in join(), wait(), get() or result().

    One with a time limit goes on by itself.
    """
    if frame.f_code.co_filename != threading.__file__:
        return False
    limit = frame.f_locals.get("timeout")
    return limit is None or limit < 0


class Flusher:
    """A thread that hands on what the recorder collected, every ``period`` seconds.

    Args:
        emit: called with ``"rows"`` and (their number, the rows packed), then with ``"waits"``
            and what :meth:`Recorder.blocked` said, unless that was None; it must not raise.
        period: seconds between two looks at first; it doubles up to :data:`SLOWEST`.
        pack: packs the rows, which come again if it raises.
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
        self._over, self._flushing = False, threading.Lock()
        self._bell = threading.Semaphore(0)
        recorder.hurry = self._bell.release
        self._thread = threading.Thread(target=self._work, name="distkit-flusher", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._over:
            try:
                # all ranks at the same moments: one update of a live view, one pause of a step
                self._bell.acquire(timeout=self._period - time.monotonic() % self._period)
                self.flush()
            except Exception:  # the program has broken what this needs: next time, or at its end
                continue
            self._period = min(2 * self._period, SLOWEST)

    def flush(self, last: bool = False) -> None:
        """Send what has been collected, now."""
        with self._flushing:
            if self._recorder.flying:
                self._recorder.land()
            blocked = self._recorder.blocked()  # what happened before is among the rows
            rows = self._recorder.drain(last)
            try:
                packed = self._pack(rows)
            except Exception:
                self._recorder.put_back(rows)
                raise
            if rows:
                self._emit("rows", (len(rows), packed))
            if blocked is not None:
                self._emit("waits", blocked)

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._over = True
        self._bell.release()
        self._thread.join()
        self.flush(last=True)
