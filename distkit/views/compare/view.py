"""Several traces on one clock, and how they differ in numbers.

The projection is in projection.py, the browser's painter in js/, the static one in static.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from distkit.events import Event
from distkit.trace.log import EventLog
from distkit.views.compare.projection import Side, summary
from distkit.views.compare.static import to_svg, to_table
from distkit.views.scene.frame import Json
from distkit.views.widget.assets import css, esm
from distkit.views.widget.live import Live
from distkit.views.widget.view import View, trace_of

#: More lanes than this side by side cannot be told apart.
MAX_TRACES = 8
CLOCKS = ("start", "duration")


class Compare(View):
    """Shows two or more traces overlaid or side by side on one time axis, and their differences.

    A table has total time, messages, bytes, rounds, communication and waiting of each, as
    multiples of the baseline. A rank is *waiting* while it only waits for others. The
    barrier at the end of a run, where ranks that have finished wait, does not count.

    Hover over the n-th operation of a rank to see the n-th of that rank in the other traces, and
    the difference in time. The losses of watched training loops are drawn over time and
    over steps. The view follows runs that are still running.

    Args:
        traces: a mapping from names to traces or runs, or several of them, then named by
            their programs.
        clock: "start" aligns the traces' beginnings; "duration" their ends as well, so that
            each fills the width.
        baseline: the name of the trace to which the others are compared; the first one, if None.

    Raises:
        TypeError: something has no trace.
        ValueError: fewer than two traces or more than eight, no such clock, no such baseline.

    >>> from distkit.events import Op, State
    >>> def run(seconds):
    ...     return EventLog([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...                   Event(1, 0, Op.RECV, State.STARTED, 0.0, peer=0, nbytes=4),
    ...                   Event(1, 0, Op.RECV, State.COMPLETED, seconds, peer=0, nbytes=4),
    ...                   Event(0, 0, Op.SEND, State.COMPLETED, seconds, peer=1, nbytes=4)])
    >>> Compare({"near": run(0.1), "far": run(0.2)})
    Compare: near took 100 ms, far took 200 ms
                                 near     far
      total time                 100 ms   200 ms  2×
      messages                   1        1       =
      bytes in messages          4 B      4 B     =
      most bytes sent by a rank  4 B      4 B     =
      rounds                     1        1       =
      in communication           100 %    100 %   =
      far took 2× as long as near.
    """

    _esm = esm("compare")
    _css = css("compare")

    def __init__(
        self,
        *traces: EventLog | Live | Mapping[str, EventLog | Live],
        clock: str = "start",
        baseline: str | None = None,
    ) -> None:
        named = _named(traces)
        if clock not in CLOCKS:
            raise ValueError(f"clock is one of {', '.join(map(repr, CLOCKS))}, not {clock!r}.")
        if baseline is not None and baseline not in named:
            known = ", ".join(map(repr, named))
            raise ValueError(f"no trace is named {baseline!r}: choose from {known}.")
        self._clock = clock
        self._baseline = list(named).index(baseline) if baseline is not None else 0
        found = {name: trace_of(source, "Compare") for name, source in named.items()}
        self._sides = [Side(name, trace, live is not None) for name, (trace, live) in found.items()]
        self._open()
        for n, (_, live) in enumerate(found.values()):
            if live is not None:
                self._follow(live, partial(self._grow, n), partial(self._finish, n))

    def _grow(self, n: int, events: list[Event]) -> Json | None:
        side = self._sides[n]
        patch = side.take(events)
        told = self._told() if side.renew() else None
        return {"run": n, "picture": patch, "told": told} if patch or told else None

    def _finish(self, n: int, trace: EventLog) -> Json:
        return {"run": n, "picture": self._sides[n].end(trace), "told": self._told()}

    def _told(self) -> Json:
        told = summary([side.told for side in self._sides], self._baseline)
        return {**told, "clock": self._clock}

    def _picture(self) -> Json:
        return {**self._told(), "pictures": [side.picture for side in self._sides]}

    def _svg(self) -> str:
        return to_svg(self._told(), [side.columns for side in self._sides])

    def __repr__(self) -> str:
        return to_table(self._told())


def _named(
    traces: tuple[EventLog | Live | Mapping[str, EventLog | Live], ...],
) -> dict[str, EventLog | Live]:
    """Each trace by the name it has, or gets."""
    if len(traces) == 1 and isinstance(traces[0], (list, tuple)):
        raise TypeError(
            f"Compare got a {type(traces[0]).__name__}. Use Compare(run_a, run_b), without it, or "
            'Compare({"ring": run_a, "tree": run_b}).'
        )
    if len(traces) == 1 and isinstance(traces[0], Mapping):
        named = {str(name): source for name, source in traces[0].items()}
    else:
        named = _by_program(traces)
    if not 2 <= len(named) <= MAX_TRACES:
        raise ValueError(
            f"Compare needs two to {MAX_TRACES} traces, not {len(named)}. "
            'Use Compare({"ring": run, "tree": other}), or Timeline(run) for a single one.'
        )
    return named


def _by_program(traces: tuple[Any, ...]) -> dict[str, EventLog | Live]:
    """Named by their programs; those of one name are numbered."""
    found: list[tuple[str, EventLog | Live]] = []
    for source in traces:
        trace, _ = trace_of(source, "Compare")
        found.append((trace.info.name or "trace", source))
    many, seen = Counter(name for name, _ in found), Counter[str]()
    named = {}
    for name, source in found:
        seen[name] += 1
        named[f"{name} {seen[name]}" if many[name] > 1 else name] = source
    return named
