"""Merge the files of ranks on one or more hosts into one trace.

The processes on a host share a monotonic clock. Clocks on different hosts are aligned using the
messages between the hosts and, if messages provide no bound, the wall clocks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any

from msgspec import structs

from distkit.cluster.runs.outcome import crash_frames
from distkit.errors import TraceFileError
from distkit.events import WORLD, Event
from distkit.recording.recorder import to_table
from distkit.trace import file
from distkit.trace.info import ClockOffset, Limitation, Raising, RankEnd, RankInfo, RunInfo, Wait
from distkit.trace.log import EventLog, Log
from distkit_hosts.causality import ClocksDisagree, CrossHostMessage, align, cross_host_messages
from distkit_hosts.importers.files import checked
from distkit_hosts.torchrun import rankfile
from distkit_hosts.torchrun.rankfile import Record

#: A rank is considered running if it recorded a heartbeat or event within this time [s].
RECENT = 2.0


def merged_trace(records: Sequence[Record], kind: type[Log]) -> Log:
    """Merge the files of the ranks of a run, or of the latest run if there are several.

    Args:
        records: the results of :func:`distkit_hosts.torchrun.rankfile.read`.
        kind: the class of the result.

    Raises:
        TraceFileError: a file is damaged.
    """
    files = [record.path for record in records]
    trace: Log = checked(files, lambda: file.round_trip(kind(*merge(records))))
    return trace


def merge(records: Iterable[Record]) -> tuple[list[Event], RunInfo]:
    """Return the events and the metadata of the latest attempt of a run."""
    attempts = attempts_of(records)
    ranks, clocks = attempts[-1], Clocks(attempts[-1])
    ahead = {rank: clocks.offset_of(r).ahead for rank, r in ranks.items()}
    events = [e for rank, r in ranks.items() for e in _events(rank, r, ahead[rank])]
    earlier = Limitation(
        f"the ranks were started {len(attempts)} times, and only the latest attempt is shown.",
        "To see an earlier attempt, load only its ranks' files.",
    )
    return events, structs.replace(
        _info(ranks, clocks, ahead),
        limitations=({"attempts": earlier} if len(attempts) > 1 else {}) | clocks.limitations,
        clocks=clocks.offsets,
    )


# -- which files belong together -----------------------------------------------------------------


def attempts_of(records: Iterable[Record]) -> list[dict[int, Record]]:
    """Return the records of each attempt of the latest run, by rank.

    torchrun restarts all ranks of a run when one of them fails or a host joins.
    """
    records = list(records)
    if not records:
        raise TraceFileError("No rank files were found. Pass a folder that contains rank files.")
    # a process without a launcher may be just the parent that started the ranks
    ranks = [r for r in records if r.rows or r.header["launcher"] != "none"] or records
    attempts: list[dict[int, Record]] = []
    for record in sorted(ranks, key=_start_time):
        if not attempts or not _belongs(record, attempts[-1]):
            attempts.append({})
        attempts[-1][record.rank] = record
    latest = set(map(_launcher, attempts[-1].values()))
    run = [a for a in attempts if not latest.isdisjoint(map(_launcher, a.values()))]
    return [dict(sorted(attempt.items())) for attempt in run]


def _belongs(record: Record, attempt: Mapping[int, Record]) -> bool:
    """Return whether a rank belongs to an attempt whose known ranks started no later than it."""
    others = attempt.values()
    if record.rank in attempt or any(r.world_size != record.world_size for r in others):
        return False
    same_launcher = _launcher(record) in map(_launcher, others)
    return same_launcher or _start_time(record) <= max(map(_end_time, others))


def _launcher(record: Record) -> tuple[Any, ...]:
    """Return the identity of the torchrun agent that starts a rank, or of the rank's own process.

    Only torchrun restarts ranks. Containers on one machine share its clock, and can have the same
    pids.
    """
    header = record.header
    pid = header["parent" if header["launcher"] == "torchrun" else "pid"]
    return header["clock"], header["host"], header["pid_namespace"], pid


def _start_time(record: Record) -> float:
    """Return the start time of a rank's process on its wall clock [s]."""
    return float(record.header["began"][1])


def _end_time(record: Record) -> float:
    """Return the time of a rank's last heartbeat or event on its wall clock [s]."""
    monotonic, wall = record.header["began"]
    return float(wall + record.until - monotonic)


# -- clocks --------------------------------------------------------------------------------------


class Clocks:
    """The offsets of the hosts' clocks from the clock of the first rank."""

    def __init__(self, ranks: Mapping[int, Record]) -> None:
        hosts, assumed = dict[str, str](), dict[str, float]()
        for record in ranks.values():
            clock, (monotonic, wall) = record.header["clock"], record.header["began"]
            hosts.setdefault(clock, record.header["host"])
            assumed.setdefault(clock, monotonic - wall)
        first = next(iter(assumed.values()))
        assumed = {clock: ahead - first for clock, ahead in assumed.items()}
        #: The reason that the clocks could not be aligned, if any.
        self.limitations: dict[str, Limitation] = {}
        try:
            self._by_clock = align(assumed, _cross_host_messages(ranks) if len(assumed) > 1 else [])
        except ClocksDisagree as error:
            self._by_clock = align(assumed, [])
            remedy = "Synchronize the hosts' clocks, and record again."
            self.limitations = {"clocks": Limitation(str(error), remedy)}
        #: The offset of each host's clock; empty if there is only one clock.
        self.offsets = {
            hosts[c]: offset for c, offset in self._by_clock.items() if len(assumed) > 1
        }

    def offset_of(self, record: Record) -> ClockOffset:
        """Return the offset of a rank's clock."""
        return self._by_clock.get(record.header["clock"], ClockOffset(0.0))


def _cross_host_messages(ranks: Mapping[int, Record]) -> Iterator[CrossHostMessage]:
    """Return the messages between hosts, with the times that the ranks recorded.

    Ranks that used a GPU are omitted, because a call on a GPU returns before it completes.
    """
    usable = {rank: r for rank, r in ranks.items() if not _losses(r)[3]}
    clock = {rank: str(r.header["clock"]) for rank, r in usable.items()}
    return cross_host_messages(
        EventLog(e for rank, r in usable.items() for e in _events(rank, r)), clock
    )


# -- the ranks of one attempt --------------------------------------------------------------------


def _info(ranks: Mapping[int, Record], clocks: Clocks, ahead: Mapping[int, float]) -> RunInfo:
    """Return the metadata of one attempt."""
    size = max(max(r.world_size for r in ranks.values()), *(rank + 1 for rank in ranks))
    groups = {g: list(members) for r in ranks.values() for g, members in r.notes.get("group", ())}
    return RunInfo(
        name=next(iter(ranks.values())).header["program"],
        world_size=size,
        ranks={
            rank: RankInfo(
                f"rank {rank}",
                "rank",
                r.header["host"],
                r.header["pid"],
                "cuda" if _losses(r)[3] else "cpu",
            )
            for rank, r in ranks.items()
        },
        groups={WORLD: [*range(size)]} | groups,
        ends={rank: end for rank, r in ranks.items() if (end := end_of(r, ahead[rank]))},
        waits={rank: wait for rank, r in ranks.items() for wait in waits(r, clocks)},
        until=max(r.until - ahead[rank] for rank, r in ranks.items()),
        dropped={rank: lost for rank, r in ranks.items() if (lost := _losses(r)[0])},
        without_values={rank: n for rank, r in ranks.items() if (n := _losses(r)[1])},
        unrecorded={rank: calls for rank, r in ranks.items() if (calls := _losses(r)[2])},
        threads={rank: [*r.notes["threads"]] for rank, r in ranks.items() if "threads" in r.notes},
        raising={rank: _raising(r) for rank, r in ranks.items() if "raising" in r.notes},
        unreduced={rank: [*(r.latest("unreduced", ()))] for rank, r in ranks.items()},
        unwaited={rank: [*(r.latest("unwaited", ()))] for rank, r in ranks.items()},
        sources={
            _label(r.header["folder"], file): text
            for r in ranks.values()
            for file, text in r.notes.get("source", ())
        },
    )


def _events(rank: int, record: Record, ahead: float = 0.0) -> Sequence[Event]:
    label = partial(_source_line, record.header["folder"])
    return to_table(rank, record.rows, label, lambda time: time - ahead)


@lru_cache(4096)
def _source_line(folder: str, where: str) -> str:
    """Return a source line with its path relative to the folder, or only the file name."""
    file, _, line = where.rpartition(":")
    return f"{_label(folder, file)}:{line}" if file else where


def _label(folder: str, file: str) -> str:
    path = PurePath(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def _losses(record: Record) -> tuple[int, int, dict[str, int], bool]:
    """Return a rank's counts of lost events, values and calls, and whether it used a GPU."""
    *_, lost, without_values, unrecorded, cuda = record.latest(
        "beat", (0, 0, None, 0, 0, {}, False)
    )
    return lost, without_values, unrecorded, cuda


def waits(record: Record, clocks: Clocks) -> list[Wait]:
    """Return the wait of a running rank, if any, shortened by its clock's maximum error."""
    wait, clock = record.latest("beat", (0, 0, None))[2], clocks.offset_of(record)
    if wait is None or clock.error is None or end_of(record):
        return []
    seqs, since, until = wait
    return [Wait(seqs, since - clock.ahead + clock.error, until - clock.ahead - clock.error)]


def _raising(record: Record) -> Raising:
    seq, text, where = record.latest("raising")
    return Raising(seq, text, _source_line(record.header["folder"], where))


#: Crash signals, keyed by the first words of the faulthandler message.
_CRASHES = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


def end_of(record: Record, ahead: float = 0.0) -> RankEnd | None:
    """Return how a rank ended, for the trace's ``info.ends``; None if it may still be running.

    Args:
        record: the record of the rank.
        ahead: how far the clock of the rank is ahead [s].
    """
    if "end" in record.notes:
        how, text, where, ended = record.latest("end")
        return RankEnd(how, text, _source_line(record.header["folder"], where), ended - ahead)
    until = record.until - ahead
    crash = re.search(r"Fatal Python error: (.*)", record.fault)
    if crash is not None:
        signal = next((s for name, s in _CRASHES.items() if crash[1].startswith(name)), "")
        text = f"signal {signal}" if signal else crash[1]
        return RankEnd("died", text, _crashed_at(record), until)
    if record.fault:  # a signal ended the rank
        return RankEnd("released", time=until)
    if _may_be_running(record):
        return None
    text = "without a report: it was killed or called os._exit, or its host was lost"
    return RankEnd("died", text, time=until)


def _may_be_running(record: Record) -> bool:
    """Return whether a rank that has not recorded its end may still be running."""
    shares_clock = record.header["clock"] == rankfile.clock()
    age = time.monotonic() - record.until if shares_clock else time.time() - _end_time(record)
    if record.is_growing or abs(age) < RECENT:
        return True
    is_here = rankfile.is_here(record.header)
    return is_here and rankfile.is_running(record.header["pid"], _start_time(record) + RECENT)


def _crashed_at(record: Record) -> str:
    """Return the innermost line of the user's code in a crash report."""
    frames = crash_frames(record.fault)
    return _source_line(record.header["folder"], f"{frames[0][0]}:{frames[0][1]}") if frames else ""
