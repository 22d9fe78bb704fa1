"""Several traces as one, on one clock: each rank of each run has a number, and a lane, of its own.

Rank r of the n-th of N runs is rank ``N * r + n`` of all. Every run begins at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
from msgspec.structs import replace

from distkit.events import WORLD
from distkit.trace.columns import Table
from distkit.trace.info import RankEnd, RunInfo
from distkit.views.compare.projection import Side, names
from distkit.views.scene.frame import Json


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
