"""Several traces on one clock, and how they differ in numbers.

projection.py compares, scene.py has the marks below the timeline of all runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
from msgspec.structs import replace

from distkit.events import WORLD, Event
from distkit.trace.columns import Table
from distkit.trace.info import RankEnd, RunInfo
from distkit.trace.log import EventLog
from distkit.views.compare.projection import Side, names, summary, to_table
from distkit.views.compare.scene import FIRST, HEAD, ROW, WIDE, losses, table, width_of
from distkit.views.scene import svg
from distkit.views.scene.frame import MAX_LANES as MOST_LANES
from distkit.views.scene.frame import Json, flagged
from distkit.views.scene.painter import body, cut
from distkit.views.scene.theme import MARKS
from distkit.views.timeline.bars import Bars, lettered, packed
from distkit.views.timeline.causes import causes
from distkit.views.timeline.static import MAX_BARS, MAX_LANES, WIDTH, whole
from distkit.views.widget.assets import css, esm
from distkit.views.widget.live import Live
from distkit.views.widget.view import View, trace_of

#: More lanes than this side by side cannot be told apart.
MAX_TRACES = 8
CLOCKS = ("start", "duration")
#: The largest numbers of operations and of lanes in the static picture, until it is small enough.
SIZES = ((MAX_BARS, MAX_LANES), (0, MAX_LANES), (0, MAX_LANES // 3))


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
        self._join()
        self._open()
        for n, (_, live) in enumerate(found.values()):
            if live is not None:
                self._follow(live, partial(self._grow, n), partial(self._finish, n))

    def _join(self) -> None:
        """Make one timeline of all runs."""
        sides = self._sides
        tables = [self._among_all(n, side.trace.table) for n, side in enumerate(sides)]
        live = any(side.live for side in sides)
        self._bars = Bars(EventLog.of(joined(tables), facts(sides)), live, thin=True)
        if not live:
            whole, end = self._bars.columns, max(side.told["figures"]["seconds"] for side in sides)
            whole.causes = causes(whole.ops, whole.pairs, end, len(sides))

    def _among_all(self, n: int, events: Table) -> Table:
        return relabelled(events, n, self._sides[n], len(self._sides))

    def _grow(self, n: int, events: list[Event]) -> Json | None:
        self._sides[n].take(events)
        patch = self._bars.take(self._among_all(n, Table.of(events)))
        return {**patch, **self._around(patch)} if patch["bars"] else None

    def _finish(self, n: int, trace: EventLog) -> Json:
        self._sides[n].end(trace)
        if any(side.live for side in self._sides):
            patch = self._bars.take(self._among_all(n, trace.table))
        else:
            self._join()
            patch = lettered(packed(self._bars.columns, thin=True))
        return {**patch, **self._around(patch)}

    def _told(self) -> Json:
        return summary([side.told for side in self._sides], self._baseline)

    def _around(self, picture: Json) -> Json:
        """All but the bars and arrows of a timeline."""
        told, runs = self._told(), range(len(self._sides))
        drawn, left_out = self._first(lanes(picture["lanes"], self._sides), MOST_LANES)
        return {
            **{key: told[key] for key in ("title", "live", "said", "notes", "baseline")},
            "notices": told["notices"] + left_out,
            "facts": [],  # each run has a heading with its own
            "opening": None,
            "clock": self._clock,
            "runs": [run["name"] for run in told["runs"]],
            "lanes": drawn,
            "figures": table(told, width_of(len(runs))).plain(),
            "first": HEAD + ROW * min(FIRST, len(told["rows"])),
            "losses": losses(told),
            "styles": MARKS,
            "tables": [to_table({**told, "baseline": n}) for n in runs],
        }

    def _first(self, drawn: list[Json], most: int) -> tuple[list[Json], list[str]]:
        """The lanes of each run's first ranks, at most so many; and a notice if there are more."""
        runs = len(self._sides)
        first = [lane for lane in drawn if lane["rank"] // runs < most // runs]
        ranks = sum(len(side.told["figures"]["ranks"]) for side in self._sides)
        left_out = [f"the first {most // runs} ranks of each run are drawn here"]
        return first, left_out * (len(first) < ranks)

    def _picture(self) -> Json:
        picture = self._bars.picture()
        return {**picture, **self._around(picture)}

    def _svg(self) -> str:
        picture = self._bars.columns.picture(3 * MAX_BARS)
        picture |= {**self._around(picture), "bare": True}
        picture["title"] = cut(picture["title"], 600, 16)
        return svg.fitting(self._document(picture, *size) for size in SIZES)

    def _document(self, picture: Json, limit: int, most: int) -> str:
        """The timeline of all runs, the losses and the figures, one below the other.

        Args:
            picture: of the timeline.
            limit: the largest number of operations that are drawn one by one.
            most: the largest number of lanes.
        """
        told = self._told()
        drawn, left_out = self._first(picture["lanes"], most)
        part = {**picture, "lanes": drawn, "notices": told["notices"] + left_out}
        parts, y = svg.opening(picture["title"], "", flagged(told))
        if picture["operations"] or not picture["losses"]:
            timeline, y = whole(part, limit)
            parts = [timeline]
        figures = table(told, WIDE, ranks=0).plain()
        others = {*range(1, len(self._sides) + 1)} - {1 + self._baseline}
        for scene in filter(None, [picture["losses"], figures]):
            marks = body(scene, 0.0, hidden=others, joined=True)
            parts.append(f'<g transform="translate(24 {y + 10:.0f})">{marks}</g>')
            y += scene["height"] + 20
        return svg.document(WIDTH, y, told["title"], "".join(parts))

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


def relabelled(table: Table, n: int, side: Side, sides: int) -> Table:
    """Events of the n-th run, with the ranks, groups and times that they have among all."""
    looks = [
        look._replace(
            peer=None if look.peer is None else look.peer * sides + n,
            group=side.name if look.group == WORLD else f"{side.name} {look.group}",
        )
        for look in table.looks
    ]
    match = {i: f"{n}/{match}" for i, match in table.match.items()}
    rank, time = table.rank * sides + n, table.time - side.start
    return Table(rank, table.seq, table.look, time, looks, match, table.summary)


def joined(tables: Sequence[Table]) -> Table:
    """The events of all runs, those of each in the order of time.

    >>> from distkit.events import Event, Op, State
    >>> one = Table.of([Event(0, 0, Op.MARK, State.COMPLETED, 0.5)])
    >>> joined([one, one]).time.tolist()
    [0.5, 0.5]
    """
    events = list(accumulate(map(len, tables), initial=0))
    looks = list(accumulate((len(table.looks) for table in tables), initial=0))
    known = [*zip(tables, events, looks, strict=False)]
    return Table(
        np.concatenate([table.rank for table in tables]),
        np.concatenate([table.seq for table in tables]),
        np.concatenate([table.look + first for table, _, first in known]),
        np.concatenate([table.time for table in tables]),
        [*chain.from_iterable(table.looks for table in tables)],
        {first + i: match for table, first, _ in known for i, match in table.match.items()},
        {first + i: found for table, first, _ in known for i, found in table.summary.items()},
    )


def facts(sides: Sequence[Side]) -> RunInfo:
    """What is known of all runs together."""
    ranks, ends = {}, dict[int, RankEnd]()
    called = names([side.told for side in sides])
    for n, side in enumerate(sides):
        for lane in side.told["figures"]["ranks"]:
            rank = lane["rank"]
            ranks[rank * len(sides) + n] = replace(side.info.rank(rank), name=called[rank], host="")
        for rank, end in side.info.ends.items():
            time = None if end.time is None else end.time - side.start
            ends[rank * len(sides) + n] = replace(end, time=time)
    until = max((side.info.until or 0.0) - side.start for side in sides)
    stopped = any(side.info.interrupted for side in sides)
    return RunInfo(ranks=ranks, ends=ends, until=until, interrupted=stopped)


def lanes(drawn: Sequence[Json], sides: Sequence[Side]) -> list[Json]:
    """The lanes of all runs, those of one after those of another; its name is their heading."""
    found = []
    ranks = sorted({lane["rank"] // len(sides) for lane in drawn})
    for lane in drawn:
        rank, n = divmod(lane["rank"], len(sides))
        side = sides[n]
        known = next((one for one in side.columns.frame["lanes"] if one["rank"] == rank), lane)
        place = {
            "run": n,
            "color": ranks.index(rank),
            "host": side.told["heading"],
            "detail": " · ".join(
                word
                for word in (known["detail"], known.get("host", ""))
                if word not in side.told["heading"]
            ),
            "end": side.told["figures"]["seconds"],
            "live": side.live,
        }
        found.append({**lane, **place})
    return sorted(found, key=lambda lane: (lane["run"], lane["rank"]))
