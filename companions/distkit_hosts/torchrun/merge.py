"""The files of ranks, of one host or of several, as one trace. Pure but for reading them.

The monotonic clock of a host is common to its processes. Those of several hosts are put right by
the messages between them, and where these do not tell, by their wall clocks.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any

from msgspec import structs

from distkit.diagnosis.diagnose import diagnose
from distkit.errors import TraceFileError
from distkit.events import WORLD, Event
from distkit.recording.recorder import is_users, to_event
from distkit.trace import file
from distkit.trace.info import ClockOffset, Limit, Raising, RankEnd, RankInfo, RunInfo, Wait
from distkit.trace.log import EventLog, Log
from distkit_hosts.causality import ClocksDisagree, Correction, Crossing, align, crossings
from distkit_hosts.foreign.files import checked
from distkit_hosts.torchrun import rankfile
from distkit_hosts.torchrun.rankfile import Record

#: A rank that was heard of so recently runs [s].
RECENT = 2.0


def of(records: Sequence[Record], kind: type[Log]) -> Log:
    """Merge the files of the ranks of a run; of several runs in a folder, the latest.

    Args:
        records: what :func:`distkit_hosts.torchrun.rankfile.read` has read.
        kind: what to make of their events.

    Raises:
        TraceFileError: a file is damaged.
    """
    files = [record.path for record in records]
    merged: Log = checked(files, lambda: file.checked(kind(*merge(records))))
    return merged


def merge(records: Iterable[Record]) -> tuple[list[Event], RunInfo]:
    """The events of a run, and what is known of it; of ranks started anew, the latest start."""
    generations = generations_of(records)
    last = generations[-1][min(generations[-1])]
    clocks = _Clocks(generations, reference=last.about["clock"])
    part = _part(generations[-1], clocks)
    return list(part.events), structs.replace(
        part.info,
        name=last.about["program"],
        limits=_earlier(generations[:-1], clocks),
        clocks=clocks.offsets,
        clocks_disagree=clocks.disagreement,
    )


def _earlier(generations: Sequence[dict[int, Record]], clocks: _Clocks) -> dict[str, Limit]:
    """That the ranks were started anew, and what ended the start before the latest."""
    if not generations:
        return {}
    found = diagnose(_part(generations[-1], clocks, over=True))
    why = f"; before it, {found[0].message}" if found else "."
    text = f"the ranks were started {len(generations) + 1} times, and this is the latest{why}"
    return {"starts": Limit(text, "To see an earlier start, load its ranks' files alone.")}


def generations_of(records: Iterable[Record]) -> list[dict[int, Record]]:
    """The ranks of each generation of the latest run, by their numbers."""
    run = _latest_run(list(records))
    ranks = [r for r in run if r.rows or r.about["launcher"] != "none"]  # others may spawn ranks
    return _generations(ranks or run)


# -- which files belong together -----------------------------------------------------------------


def _latest_run(records: list[Record]) -> list[Record]:
    """The files of the latest run: its launchers, one on each host, were there together."""
    if not records:
        raise TraceFileError("There are no files of ranks. Give a folder with some.")
    launchers = _by_launcher(records).values()
    lives = sorted(launchers, key=lambda some: max(map(_ended, some)), reverse=True)
    run, began = list[Record](), float("inf")
    for some in lives:
        if run and max(map(_ended, some)) < began:
            break
        run += some
        began = min(began, *map(_began, some))
    return run


def _by_launcher(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """The ranks that each process has started: torchrun's anew when one has ended, others once.

    Hosts that share a kernel share its clock, and their pids may coincide.
    """
    found: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        its = record.about
        pid = its["parent" if its["launcher"] == "torchrun" else "pid"]
        found[its["clock"], its["host"], its["pid_namespace"], pid].append(record)
    return found


def _began(record: Record) -> float:
    """When a rank's process began, by its wall clock [s]."""
    return float(record.about["began"][1])


def _ended(record: Record) -> float:
    """When a rank was last heard of, by its wall clock [s]."""
    monotonic, wall = record.about["began"]
    return float(wall + record.until - monotonic)


def _generations(records: list[Record]) -> list[dict[int, Record]]:
    """The ranks of each generation: those that were there together.

    Each launcher starts its ranks again and again; clocks of several hosts need not agree on the
    order, and launchers need not have counted equally far.
    """
    batches = [list(_batches(some)) for some in _by_launcher(records).values()]
    if len({*map(len, batches)}) == 1:
        found = [_of_one(some) for some in zip(*batches, strict=True)]
        if None not in found:
            return [ranks for ranks in found if ranks is not None]
    together: list[dict[int, Record]] = []
    for batch in sorted(itertools.chain(*batches), key=lambda batch: min(map(_began, batch))):
        joined = _of_one([[*together[-1].values()], batch]) if together else None
        if joined is None:
            together.append({record.rank: record for record in batch})
        else:
            together[-1] = joined
    return together


def _batches(records: list[Record]) -> Iterator[list[Record]]:
    """The ranks that a launcher has started, each time."""
    batch: list[Record] = []
    for record in sorted(records, key=lambda r: r.about["began"][0]):
        if any(other.about["local_rank"] == record.about["local_rank"] for other in batch):
            yield batch
            batch = []
        batch.append(record)
    yield batch


def _of_one(batches: Iterable[list[Record]]) -> dict[int, Record] | None:
    """The ranks of some batches; None if they cannot be of one generation."""
    records = list(itertools.chain(*batches))
    ranks = {record.rank: record for record in records}
    sizes = {record.world_size for record in records}
    return dict(sorted(ranks.items())) if len(ranks) == len(records) and len(sizes) == 1 else None


# -- clocks --------------------------------------------------------------------------------------


class _Clocks:
    """The clocks of the hosts, put right."""

    def __init__(self, generations: list[dict[int, Record]], reference: str) -> None:
        records = [record for ranks in generations for record in ranks.values()]
        self._hosts: dict[str, str] = {}
        assumed: dict[str, float] = {}
        for record in sorted(records, key=lambda r: r.about["clock"] != reference):
            monotonic, wall = record.about["began"]
            self._hosts.setdefault(record.about["clock"], record.about["host"])
            assumed.setdefault(record.about["clock"], monotonic - wall)
        first = next(iter(assumed.values()))
        assumed = {clock: ahead - first for clock, ahead in assumed.items()}
        self._corrections: dict[str, Correction] = {}
        self.offsets: dict[str, ClockOffset] = {}
        #: Why they could not be aligned.
        self.disagreement = ""
        if len(assumed) > 1:
            self._align(assumed, [c for ranks in generations for c in _crossings(ranks)])

    def _align(self, assumed: Mapping[str, float], messages: list[Crossing]) -> None:
        try:
            self._corrections = align(assumed, messages)
        except ClocksDisagree as error:
            self._corrections = align(assumed, [])
            self.disagreement = str(error)
        self.offsets = {
            self._hosts[clock]: ClockOffset(c.seconds, c.error if math.isfinite(c.error) else None)
            for clock, c in self._corrections.items()
        }

    def __call__(self, record: Record, *times: float) -> list[float]:
        """Instants of a rank's clock by the reference's [s]."""
        correction = self._corrections.get(record.about["clock"])
        return [*times] if correction is None else correction(times).tolist()

    def surely(self, record: Record, since: float, until: float) -> list[float]:
        """The part of a span that is within it whatever the clock's error."""
        correction = self._corrections.get(record.about["clock"])
        error = 0.0 if correction is None else correction.error
        since, until = self(record, since, until)
        return [since + error, until - error]


def _crossings(ranks: Mapping[int, Record]) -> Iterator[Crossing]:
    """The messages between hosts, with the times that the ranks noted.

    Where a rank has used a GPU, calls return before they are done: they tell nothing.
    """
    usable = {rank: r for rank, r in ranks.items() if not _beat(r)[3]}
    clock = {rank: str(r.about["clock"]) for rank, r in usable.items()}
    return crossings(EventLog(e for rank, r in usable.items() for e in _events(rank, r)), clock)


# -- the ranks of one generation -----------------------------------------------------------------


def _part(ranks: Mapping[int, Record], clocks: _Clocks, *, over: bool = False) -> EventLog:
    """The trace of one generation; ``over``: its ranks were started anew, so they have ended."""
    events = [e for rank, r in ranks.items() for e in _events(rank, r, clocks)]
    size = max(max(r.world_size for r in ranks.values()), *(rank + 1 for rank in ranks))
    groups = {g: list(members) for r in ranks.values() for g, members in r.notes.get("group", ())}
    told = dict(sorted(ranks.items()))
    info = RunInfo(
        world_size=size,
        ranks={
            rank: RankInfo(
                f"rank {rank}",
                "rank",
                r.about["host"],
                r.about["pid"],
                "cuda" if _beat(r)[3] else "cpu",
            )
            for rank, r in told.items()
        },
        groups={WORLD: [*range(size)]} | groups,
        ends={rank: end for rank, r in told.items() if (end := end_of(r, clocks, over=over))},
        waits={rank: wait for rank, r in told.items() for wait in _waits(r, clocks, over)},
        until=max(clocks(r, r.until)[0] for r in ranks.values()),
        dropped={rank: lost for rank, r in told.items() if (lost := _beat(r)[0])},
        without_values={rank: n for rank, r in told.items() if (n := _beat(r)[1])},
        unseen={
            rank: seen
            for rank, r in told.items()
            if (seen := {**_beat(r)[2], **r.latest("unseen", {})})
        },
        threads={rank: [*r.notes["threads"]] for rank, r in told.items() if "threads" in r.notes},
        raising={rank: _raising(r) for rank, r in told.items() if "raising" in r.notes},
        unreduced={rank: [*(r.latest("unreduced", ()))] for rank, r in told.items()},
        unused={rank: [*(r.latest("unused", ()))] for rank, r in told.items()},
        unwaited={rank: [*(r.latest("unwaited", ()))] for rank, r in told.items()},
        sources={
            _label(r.about["folder"], file): text
            for r in ranks.values()
            for file, text in r.notes.get("source", ())
        },
    )
    return EventLog(events, info)


def _events(rank: int, record: Record, clocks: _Clocks | None = None) -> Iterator[Event]:
    place = partial(_place, record.about["folder"])
    times = [row[3] for row in record.rows]
    right = iter(times if clocks is None else clocks(record, *times))
    return (to_event(rank, row, place, lambda _: next(right)) for row in record.rows)


@lru_cache(4096)
def _place(folder: str, where: str) -> str:
    """A line as its user knows it: below the current folder, or by the file's name."""
    file, _, line = where.rpartition(":")
    return f"{_label(folder, file)}:{line}" if file else where


def _label(folder: str, file: str) -> str:
    path = PurePath(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def _beat(record: Record) -> tuple[int, int, dict[str, int], bool]:
    """What a rank has lost, has not looked at, and has not seen; and if it has used a GPU."""
    *_, lost, without_values, unseen, cuda = record.latest("beat", (0, 0, None, 0, 0, {}, False))
    return lost, without_values, unseen, cuda


def _waits(record: Record, clocks: _Clocks, over: bool) -> list[Wait]:
    """Operations that a running rank waits in; [] if none, or if it is unknown since when."""
    waits = record.latest("beat", (0, 0, None))[2]  # in an older file it is something else
    if not isinstance(waits, tuple) or end_of(record, over=over):
        return []
    since, until = clocks.surely(record, *waits[1:])
    return [Wait(waits[0], since, until)] if math.isfinite(since) else []


def _raising(record: Record) -> Raising:
    seq, text, where = record.latest("raising")
    return Raising(seq, text, _place(record.about["folder"], where))


#: The interpreter's words for signals of crashes.
_CRASHES = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


def end_of(
    record: Record,
    clocks: Callable[..., list[float]] = lambda record, *times: [*times],
    *,
    over: bool = False,
) -> RankEnd | None:
    """The end of a rank, for the trace's ``info.ends``; None: it may still run.

    ``over``: it has ended, whatever it reported.
    """
    if "end" in record.notes:
        how, text, where, at = record.latest("end")
        place = _place(record.about["folder"], where)
        return RankEnd(how, text, place, clocks(record, at)[0])
    (at,) = clocks(record, record.until)
    crash = re.search(r"Fatal Python error: (.*)", record.fault)
    if crash is not None:
        signal = next((s for words, s in _CRASHES.items() if crash[1].startswith(words)), "")
        text = f"signal {signal}" if signal else crash[1]
        return RankEnd("died", text, _crashed_at(record), at)
    if record.fault:  # whoever started it has ended it
        return RankEnd("released", time=at)
    if not over and _may_run(record):
        return None
    text = "without a report: killed, left by os._exit, or its host was lost"
    return RankEnd("died", text, time=at)


def _may_run(record: Record) -> bool:
    """True if a rank runs still that has not told of its end."""
    shares_clock = record.about["clock"] == rankfile.clock()
    ago = time.monotonic() - record.until if shares_clock else time.time() - _ended(record)
    if record.goes_on or abs(ago) < RECENT:
        return True
    is_here = rankfile.is_here(record.about)
    return is_here and rankfile.lives(record.about["pid"], _began(record) + RECENT)


def _crashed_at(record: Record) -> str:
    """The innermost line of the user's in a crash report."""
    report = record.fault.partition("Fatal Python error")[2].partition("(most recent call first)")[
        2
    ]
    lines = re.findall(r'File "(.+)", line (\d+) in ', report.partition("\n\n")[0])
    return next(
        (_place(record.about["folder"], f"{file}:{n}") for file, n in lines if is_users(file)), ""
    )
