"""The rank's notebook: what this process did, kept in a bounded buffer until it is sent on.

One :class:`Recorder` per rank and run. The tap writes torch.distributed's calls into it,
:func:`mark` the computation in between, the parameter server its messages.
"""

from __future__ import annotations

import itertools
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from distkit.events import WORLD, Event, Op, State, Summary

if TYPE_CHECKING:
    from torch import Tensor

#: A summary shows at most this many values, and looks at every element only of smaller tensors.
VALUES, EXACT = 64, 65_536
_SAMPLE = 4096

#: Looking at values may take this long at first [s], then this share of the time: beyond, events
#: come without values, so that recording stays cheap in a training loop of any length.
ALLOWANCE, SHARE = 0.005, 0.005

#: In a long run, collected events leave this often [s].
SLOWEST = 0.2

#: An event on its way: Event's fields without the rank, with the summary as a plain tuple.
Row = tuple[Any, ...]


class Recorder:
    """Collects the events of one rank.

    Args:
        rank: the rank that all events carry.
        limit: how many unsent events are kept; more are counted in ``dropped``.
    """

    def __init__(self, rank: int, *, limit: int = 200_000) -> None:
        self.rank, self.limit, self.dropped = rank, limit, 0
        self.without_values = 0
        self._rows: list[Row] = []
        self._seq = itertools.count()
        self._began, self._looked = time.monotonic(), 0.0

    def next_seq(self) -> int:
        """A number for the next operation."""
        return next(self._seq)

    def record(
        self, seq: int, op: Op, state: State, *, peer: int | None = None, group: str = WORLD,
        nbytes: int = 0, shape: tuple[int, ...] = (), dtype: str = "", tag: int | None = None,
        where: str = "", label: str = "", match: str | None = None,
        summary: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """Note one transition, now."""
        fields = peer, group, nbytes, shape, dtype, tag, where, label, match
        self.put(seq, op, state, time.monotonic(), fields, summary)

    def put(
        self, seq: int, op: Op, state: State, at: float, fields: tuple[Any, ...],
        summary: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """As :meth:`record`, for those in a hurry: ``fields`` from peer to match, in order."""
        if len(self._rows) < self.limit:
            self._rows.append((seq, op, state, at, *fields, summary))
        else:
            self.dropped += 1

    def can_look(self) -> bool:
        """Whether one more operation's values may be looked at; counts those that may not."""
        if self._looked <= ALLOWANCE + SHARE * (time.monotonic() - self._began):
            return True
        self.without_values += 1
        return False

    def look(self, *tensors: Tensor) -> tuple[Any, ...] | None:
        """Summarize tensors, on the clock of the budget that :meth:`can_look` keeps."""
        began = time.monotonic()
        try:
            return summarize(*tensors)
        finally:
            self._looked += time.monotonic() - began

    def drain(self) -> list[Row]:
        """Take the rows recorded since the last call."""
        rows = self._rows
        if not rows:
            return []
        taken = rows[:]
        del rows[: len(taken)]  # appends of other threads stay
        return taken


def to_event(rank: int, row: Row, place: Callable[[str], str] = str) -> Event:
    """The event of a row; ``place`` puts its source line into the reader's words."""
    where, label, match, summary = row[-4:]
    values = None if summary is None else Summary(*summary)
    return Event(*(rank, *row[:-4], place(where), label, match, values))


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
    seq, where = recorder.next_seq(), user_line(2)
    recorder.record(seq, Op.MARK, State.STARTED, label=label, where=where)
    try:
        yield
    except BaseException:
        recorder.record(seq, Op.MARK, State.FAILED, label=label, where=where)
        raise
    recorder.record(seq, Op.MARK, State.COMPLETED, label=label, where=where)


# -- values ---------------------------------------------------------------------


def summarize(*tensors: Tensor) -> tuple[Any, ...] | None:
    """A bounded picture of the values: Summary's fields, as a tuple. None for no elements.

    Several tensors count as one long one. Its cost does not grow with the size: beyond
    65,536 elements the statistics come from a strided sample.
    """
    size = sum(t.numel() for t in tensors)
    if size == 0:
        return None
    sampled = size > EXACT
    width = tensors[0].shape[-1] if tensors[0].dim() else 1
    stride = _stride(size, _SAMPLE, width) if sampled else 1
    parts = [_flat(t, stride) for t in tensors if t.numel()]
    flat = parts[0] if len(parts) == 1 else _concatenate(parts)
    values = flat[:: _stride(len(flat), VALUES, width)].tolist()
    with _quiet():  # a receive buffer may hold anything before it is filled
        square = float(flat.dot(flat)) * (size / len(flat))
    norm = math.sqrt(square) if square >= 0 else math.nan
    return tuple(values), norm, float(flat.min()), float(flat.max()), size, sampled


def _stride(size: int, most: int, width: int) -> int:
    """Every how many elements to look; never the row's length, which would see one column."""
    stride = max(1, -(-size // most))
    while stride > 1 and math.gcd(stride, width) > 1:
        stride += 1
    return stride


def _flat(tensor: Tensor, stride: int) -> Any:
    """Every stride-th element as a flat numpy array of floats."""
    t = tensor.detach() if tensor.requires_grad else tensor
    if stride > 1:
        t = t.reshape(-1)[::stride]
    if t.is_cuda or t.dtype not in _numpy_floats():
        t = (t.real if t.is_complex() else t).to("cpu", _numpy_floats()[0])
    return t.numpy().reshape(-1)


def _concatenate(parts: list[Any]) -> Any:
    import numpy as np

    return np.concatenate(parts)


def _quiet() -> Any:
    import numpy as np

    return np.errstate(all="ignore")


_floats: tuple[Any, ...] = ()


def _numpy_floats() -> tuple[Any, ...]:
    """The dtypes that numpy's fast paths take as they are."""
    global _floats
    if not _floats:
        import torch

        _floats = torch.float64, torch.float32
    return _floats


# -- places ---------------------------------------------------------------------

_PACKAGE = str(Path(__file__).resolve().parent.parent)
#: Frames of these folders are machinery; those of algorithms/ and demos.py are pages to read.
MACHINERY = tuple(f"{_PACKAGE}/{name}/" for name in ("trace", "cluster", "kvstore"))
_LIBRARY = str(Path(threading.__file__).parent) + "/"
_is_user: dict[CodeType, bool] = {}
_lines: dict[tuple[CodeType, int], str] = {}


def user_line(depth: int = 1) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor distkit's machinery."""
    frame = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        known = _is_user.get(code)
        if known is None:
            known = _is_user[code] = is_users(code.co_filename)
        if known:
            key = code, frame.f_lineno
            line = _lines.get(key)
            if line is None:
                line = _lines[key] = f"{code.co_filename}:{frame.f_lineno}"
            return line
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def is_users(filename: str) -> bool:
    """Whether a source file is the user's, or a page to read: no library, no machinery."""
    if filename.startswith(MACHINERY) or filename.startswith("<frozen"):
        return False
    if filename.startswith(_PACKAGE):
        return True
    return "-packages/" not in filename and not filename.startswith(_LIBRARY)


class Flusher:
    """A thread that hands on what the recorder collected, every ``period`` seconds.

    Args:
        send: called with a number of rows and the rows pickled; it must not raise.
        period: seconds between two looks at first; it doubles up to :data:`SLOWEST`.
    """

    def __init__(
        self, recorder: Recorder, send: Callable[[int, bytes], None], *, period: float = 0.05
    ) -> None:
        self._recorder, self._send, self._period = recorder, send, period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="distkit-flusher", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(self._period):
            self.flush()
            self._period = min(2 * self._period, SLOWEST)

    def flush(self) -> None:
        """Send what has been collected, now."""
        rows = self._recorder.drain()
        if rows:
            self._send(len(rows), pickle.dumps(rows, protocol=5))

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._stop.set()
        self._thread.join()
        self.flush()
