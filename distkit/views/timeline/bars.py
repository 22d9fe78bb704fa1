"""The operations of a trace as bars: one by one while its run goes on, then in columns.

Columns are a few arrays in one buffer, which a browser takes in at once: ``columns`` holds what has
words, and ``bytes`` the arrays named in ``parts``, one behind the other, each
``[name, type, length]`` and little-endian. The browser's half is js/columns.js.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit.events import Event, State, Summary
from distkit.trace.columns import Table
from distkit.trace.log import EventLog
from distkit.trace.training import is_note
from distkit.views.scene.frame import Json
from distkit.views.timeline.columns import MAX_VALUES, Columns

#: Up to so many operations are told one by one, more of them in columns.
FEW = 1_000

#: At most so many operations are drawn while a run goes on; a whole trace has no such limit.
MAX_BARS = 20_000


class Bars:
    """Bars and arrows of one trace, which may still grow.

    Args:
        trace: so far.
        live: whether its run goes on.
        thin: tell fewer values.

    >>> from distkit.events import Op
    >>> bars = Bars(EventLog(), live=True)
    >>> len(bars.take([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4)])["bars"])
    1
    """

    def __init__(self, trace: EventLog, live: bool, *, thin: bool = False) -> None:
        self._thin, self._live = thin, live
        self._known: set[tuple[int, int, State]] = set()
        self._table = Table.of(())
        self.columns = Columns(EventLog((), trace.info) if live else trace, live=live)
        if live:
            self.take(trace.events)

    def take(self, events: Iterable[Event]) -> Json:
        """Take in events, each rank's in time order; what they change in the picture."""
        if not self._live:  # all of it is known
            return {"bars": [], "arrows": [], **self.columns.frame}
        told = {(e.rank, e.seq, e.state): e for e in events if not is_note(e)}
        fresh = [e for key, e in told.items() if key not in self._known]
        before = self.columns
        if fresh:
            self._known |= told.keys()
            self._table = Table.of(fresh, self._table)
            self.columns = Columns(EventLog.of(self._table, before.info), MAX_BARS, live=True)
        return self.columns.changes(before)

    def end(self, trace: EventLog) -> Json:
        """The run is over: take in its whole trace; what that changes, and what caused what."""
        patch, whole = self.take(trace.events), self.columns.whole
        self._live, self.columns = False, Columns(trace)
        if whole:
            return {**patch, **self.columns.frame, "causes": self.columns.explained()}
        return lettered(packed(self.columns, thin=self._thin))  # more than was drawn: all anew

    def picture(self) -> Json:
        """All of them, as the painter of the timeline takes them."""
        few = self._live or len(self.columns.ops) <= FEW
        return self.columns.picture() if few else packed(self.columns, thin=self._thin)


#: So many operations have their values along in a page, and so many of each.
PAGE_VALUES, PAGE_CELLS = 400, 32

_TYPES = {"f8": "<f8", "i4": "<i4", "f4": "<f4"}


def packed(columns: Columns, *, thin: bool = False) -> Json:
    """The frame, and bars and arrows as ``columns``; fewer values when ``thin``."""
    ops, pairs = columns.ops, columns.pairs
    order, tracks = columns.tracks()
    place = np.full(len(ops) + 1, -1)  # -1, for "none", stays -1
    place[order] = np.arange(len(order))
    arrows = columns.drawn_arrows()
    parts: dict[str, tuple[str, NDArray[Any]]] = {
        "start": ("f8", ops.start[order]),
        "end": ("f8", ops.end[order]),
        "sent": ("f8", pairs.sent[arrows]),
        "received": ("f8", pairs.received[arrows]),
        "seq": ("i4", ops.seq[order]),
        "look": ("i4", ops.look[order]),
        "tie": ("i4", pairs.tie[order]),
        "send": ("i4", place[pairs.send[arrows]]),
        "recv": ("i4", place[pairs.recv[arrows]]),
    }
    valued, numbers = _values(columns, place, thin)
    parts |= {"valued": ("i4", valued), "numbers": ("f4", numbers)}
    parts |= {
        name: ("f4", some) if some.dtype == float else ("i4", place[some])
        for name, some in columns.caused().items()
    }
    return {
        "bars": [],
        "arrows": [],
        **columns.frame,
        "columns": {
            "looks": columns.looks,
            "tracks": tracks,
            "parts": [[name, kind, len(array)] for name, (kind, array) in parts.items()],
            "bytes": b"".join(
                array.astype(_TYPES[kind]).tobytes() for kind, array in parts.values()
            ),
        },
    }


def lettered(picture: Json) -> Json:
    """A packed picture whose arrays are letters (base64), for where bytes do not get through."""
    columns = picture["columns"]
    letters = base64.b64encode(columns["bytes"]).decode("ascii")
    return {**picture, "columns": {**columns, "bytes": letters}}


def _values(
    columns: Columns, place: NDArray[np.int64], thin: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Per tensor five whole numbers (bar, 0 before or 1 after, size, sampled, count), and values.

    The values are preceded by norm, minimum and maximum.
    """
    heads: list[tuple[int, ...]] = []
    bodies: list[tuple[float, ...]] = []
    for i, pair in columns.values(PAGE_VALUES if thin else MAX_VALUES).items():
        for when, summary in enumerate(pair):
            if summary is not None and place[i] >= 0:
                values = _thin(summary) if thin else summary.values
                sampled = summary.sampled
                heads.append(
                    (int(place[i]), when, min(summary.size, 2**31 - 1), sampled, len(values))
                )
                bodies.append((summary.norm, summary.min, summary.max, *values))
    with np.errstate(over="ignore"):
        numbers = np.array([*chain.from_iterable(bodies)], np.float64).astype("<f4")
    return np.array([*chain.from_iterable(heads)], "<i4"), _round(numbers)


def _thin(s: Summary) -> tuple[float, ...]:
    """Fewer values at equal strides."""
    return s.values[:: -(-len(s.values) // PAGE_CELLS) or 1]


def _round(numbers: NDArray[Any]) -> NDArray[Any]:
    """About four significant digits: what is left of a number packs well."""
    bits = numbers.view("<u4")
    finite = np.isfinite(numbers)
    return np.where(finite, (bits + np.uint32(0x200)) & np.uint32(0xFFFFFC00), bits).view("<f4")
