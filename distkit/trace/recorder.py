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
        self._rows: list[Row] = []
        self._seq = itertools.count()

    def next_seq(self) -> int:
        """A number for the next operation."""
        return next(self._seq)

    def record(
        self, seq: int, op: Op, state: State, *, peer: int | None = None, group: str = WORLD,
        nbytes: int = 0, shape: tuple[int, ...] = (), dtype: str = "", tag: int | None = None,
        where: str = "", label: str = "", match: str | None = None,
        summary: tuple[Any, ...] | Summary | None = None, at: float | None = None,
    ) -> None:  # fmt: skip
        """Note one transition, ``at`` a time.monotonic() or now."""
        if len(self._rows) >= self.limit:
            self.dropped += 1
            return
        now = time.monotonic() if at is None else at
        self._rows.append((seq, op, state, now, peer, group, nbytes, shape, dtype,
                           tag, where, label, match, summary))  # fmt: skip

    def drain(self) -> list[Row]:
        """Take the rows recorded since the last call."""
        rows = self._rows
        if not rows:
            return []
        taken = rows[:]
        del rows[: len(taken)]  # appends of other threads stay
        return taken


def to_event(rank: int, row: Row) -> Event:
    """The event of a row, as the receiving side sees it."""
    if isinstance(row[-1], tuple):
        row = (*row[:-1], Summary(*row[-1]))
    return Event(rank, *row)


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
    t = tensor.detach()
    if t.is_contiguous():
        t = t.view(-1)[::stride] if stride > 1 else t.view(-1)
    else:
        t = t.reshape(-1)[::stride]
    if t.is_cuda or t.dtype not in _numpy_floats():
        t = (t.real if t.is_complex() else t).to("cpu", _numpy_floats()[0])
    return t.numpy()


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
        send: called with a list of rows; it must not raise.
        period: seconds between two looks.
    """

    def __init__(
        self, recorder: Recorder, send: Callable[[list[Row]], None], *, period: float = 0.05
    ) -> None:
        self._recorder, self._send, self._period = recorder, send, period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="distkit-flusher", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(self._period):
            self.flush()

    def flush(self) -> None:
        """Send what has been collected, now."""
        rows = self._recorder.drain()
        if rows:
            self._send(rows)

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._stop.set()
        self._thread.join()
        self.flush()
