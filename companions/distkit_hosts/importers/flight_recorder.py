"""Read dumps of PyTorch's flight recorder: the calls of ranks, including hanging ones.

No side effects.

A dump contains the latest calls of one rank, and their states as seen by a watchdog. Some backends
record no states: a completed call is then assumed to end when the last rank of its group makes the
call.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, torch/distributed/flight_recorder.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from distkit.errors import PACKAGE_PATHS
from distkit.events import COLLECTIVES, WORLD, Event, Op, State
from distkit.trace.info import Count, Rank, RankEnd, RunInfo

#: Maps parts of calls' names to operations; the first match is used.
OPS = {
    "allreducebarrier": Op.BARRIER,
    "allreduce": Op.ALL_REDUCE,
    "reducescatter": Op.REDUCE_SCATTER,
    "reduce": Op.REDUCE,
    "allgather": Op.ALL_GATHER,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "alltoall": Op.ALL_TO_ALL,
    "broadcast": Op.BROADCAST,
    "barrier": Op.BARRIER,
    "send": Op.SEND,
    "recv": Op.RECV,
}

#: The usual name and the bytes per element, by torch's name for the type in dumps.
DTYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "complexfloat": ("complex64", 8),
    "complexdouble": ("complex128", 16),
}

#: Names of point-to-point calls contain the group ranks of both ends: ``send 0->1``, ``recv 1<-0``.
_ENDS = re.compile(r"(\d+)\s*(?:->|<-)\s*(\d+)")
#: Files of packages, generated code, and files of distkit in a checkout.
_FOREIGN = re.compile(f"-packages|<|^{'|^'.join(map(re.escape, PACKAGE_PATHS))}")
_Shapes = list[list[Count]]
_Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Frame(Struct):
    filename: str = "<unknown>"
    line: Count = 0


class _Entry(Struct):
    record_id: _Time
    process_group: list[str]
    profiling_name: str
    time_created_ns: _Time
    state: str
    retired: bool = False
    collective_seq_id: _Time = 0
    time_discovered_started_ns: _Time | None = None
    time_discovered_completed_ns: _Time | None = None
    input_sizes: _Shapes = []
    output_sizes: _Shapes = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    frames: list[_Frame] = []

    @property
    def group(self) -> str:
        """The name of the call's group."""
        return _group(*self.process_group)

    @property
    def has_states(self) -> bool:
        """Whether the backend records states."""
        return self.profiling_name.startswith("nccl:")

    @property
    def is_complete(self) -> bool:
        """Whether the call is known to have completed."""
        return self.state == "completed" or (self.retired and not self.has_states)


class Dump(Struct):
    """The content of a dump."""

    entries: list[_Entry]
    pg_config: dict[str, dict[str, str]] | None = None


def parse(value: Any) -> Dump:
    """Return a dump, or raise a ValueError that names the first invalid field."""
    dump = msgspec.convert(value, Dump)
    dump.entries.sort(key=lambda entry: entry.record_id)
    return dump


def op_of(name: str) -> Op | None:
    """Return the operation with this name in torch or a backend; None for other names.

    >>> op_of("nccl:_all_gather_base"), op_of("nccl:recv 1<-0"), op_of("nccl:coalesced")
    (<Op.ALL_GATHER: 'all_gather'>, <Op.RECV: 'recv'>, None)
    """
    letters = re.sub(r"[^a-z]", "", name.rpartition(":")[2].lower())
    return next((op for word, op in OPS.items() if word in letters), None)


def describe_tensor(
    op: Op, inputs: list[list[int]], outputs: list[list[int]], dtype: str
) -> tuple[tuple[int, ...], str, int]:
    """Return the shape of a call's first tensor, its dtype, and the total bytes of all tensors.

    The tensors are the outputs of a recv or scatter, and the inputs of other calls, if any.
    """
    shapes = (outputs if op in (Op.RECV, Op.SCATTER) else inputs) or outputs or inputs
    name, size = DTYPES.get(dtype.lower(), (dtype.lower(), 0))
    if op is Op.BARRIER or not shapes:
        return (), "", 0
    return tuple(shapes[0]), name, size * sum(map(math.prod, shapes))


@dataclass(frozen=True, slots=True)
class _Call:
    """An entry of a dump, and the first event of its call."""

    entry: _Entry
    event: Event
    pending: bool

    @property
    def collective(self) -> tuple[str, int] | None:
        """The group of a collective, and its number in the group; None for other calls."""
        if self.event.op in COLLECTIVES:
            return self.event.group, self.entry.collective_seq_id
        return None


def read(dumps: Mapping[int, Dump]) -> tuple[list[Event], RunInfo]:
    """Return the events of a run and its metadata, from the dumps of its ranks."""
    groups = _groups(dumps)
    world = max(len(groups[WORLD]), *(rank + 1 for rank in dumps))
    groups[WORLD] = [*range(world)]
    unrecorded: dict[int, Counter[str]] = defaultdict(Counter)
    # nanoseconds of the wall clock do not fit in a float
    first = min((e.time_created_ns for d in dumps.values() for e in d.entries), default=0)
    calls = [
        call
        for rank, dump in dumps.items()
        for call in _calls(rank, dump, groups, first, unrecorded[rank])
    ]
    calls = _complete_collectives([*_matchable(calls, unrecorded)], groups)
    events = list(_events(calls, first))
    return events, RunInfo(
        name="flight recorder",
        world_size=world,
        groups=groups,
        unrecorded={rank: dict(found) for rank, found in unrecorded.items() if found},
        ends=_ends(events, range(world), dumps),
    )


# -- groups --------------------------------------------------------------------------


def _groups(dumps: Mapping[int, Dump]) -> dict[str, list[int]]:
    """Return the ranks of each group: the configured ones or, if unknown, those that used it."""
    callers: dict[str, set[int]] = defaultdict(set)
    known: dict[str, list[int]] = {WORLD: []}
    for rank, dump in dumps.items():
        for entry in dump.entries:
            callers[entry.group].add(rank)
        for name, config in (dump.pg_config or {}).items():
            ranks = msgspec.json.decode(config.get("ranks") or "[]", type=list[Rank])
            label = _group(name, config.get("desc", ""))
            known[label] = sorted({*known.get(label, ()), *ranks})
    return known | {name: known.get(name) or sorted(ranks) for name, ranks in callers.items()}


def _group(name: str = "", description: str = "", *_: str) -> str:
    """Return the name of a group, given torch's name and description."""
    return WORLD if description == "default_pg" or not name else name


# -- entries -------------------------------------------------------------------------


def _calls(
    rank: int,
    dump: Dump,
    groups: Mapping[str, list[int]],
    first: int,
    unrecorded: Counter[str],
) -> Iterator[_Call]:
    """Yield the calls of a rank in order; count unknown calls and calls that have not begun."""
    is_waiting = False
    for entry in dump.entries:
        op = op_of(entry.profiling_name)
        if op is None:
            # the calls of a batch have their own entries
            if not entry.profiling_name.endswith(":coalesced"):
                unrecorded[entry.profiling_name.rpartition(":")[2]] += 1
        elif is_waiting and entry.has_states and entry.state == "scheduled":
            unrecorded[f"{op} queued behind an unfinished call"] += 1
        else:
            is_waiting = is_waiting or not entry.is_complete
            yield _Call(entry, _event(rank, entry, op, groups, first), not entry.is_complete)


def _event(rank: int, entry: _Entry, op: Op, groups: Mapping[str, list[int]], first: int) -> Event:
    """Return the first event of a call."""
    dtype = next(iter(entry.input_dtypes or entry.output_dtypes), "")
    shape, dtype, nbytes = describe_tensor(op, entry.input_sizes, entry.output_sizes, dtype)
    return Event(
        rank=rank,
        seq=entry.record_id,
        op=op,
        state=State.SCHEDULED,
        time=(entry.time_created_ns - first) / 1e9,
        peer=peer_of(entry.profiling_name, groups.get(entry.group, [])),
        group=entry.group,
        nbytes=nbytes,
        shape=shape,
        dtype=dtype,
        where=_where(entry.frames),
    )


def peer_of(name: str, members: list[int]) -> int | None:
    """Return the global rank at the other end of a point-to-point call."""
    ends = _ENDS.search(name)
    if ends is None:
        return None
    index = int(ends[2])
    return members[index] if index < len(members) else index


def _where(frames: list[_Frame]) -> str:
    """Return the line of the user's code: the innermost line outside packages."""
    user_frames = (f for f in frames if not _FOREIGN.search(f.filename))
    return next((f"{PurePath(f.filename).name}:{f.line}" for f in user_frames), "")


# -- matching -----------------------------------------------------------


def _matchable(calls: list[_Call], unrecorded: Mapping[int, Counter[str]]) -> Iterator[_Call]:
    """Yield the calls; count and skip those whose partners may have been overwritten."""
    oldest: dict[tuple[int, str], int] = {}  # the first collective of each rank in each group
    overwritten = any(d.event.seq > 0 for d in {c.event.rank: c for c in calls[::-1]}.values())
    for call in calls:
        if call.collective:
            group, number = call.collective
            oldest.setdefault((call.event.rank, group), number)
    complete: dict[str, int] = defaultdict(int)  # the first collective that all ranks still have
    for (_, group), number in oldest.items():
        complete[group] = max(complete[group], number)
    for call in calls:
        if call.collective:
            known = call.entry.collective_seq_id >= complete[call.event.group]
        else:
            known = call.pending or not overwritten
        if known:
            yield call
        else:
            lost = f"{call.event.op} whose partner may have been overwritten"
            unrecorded[call.event.rank][lost] += 1


def _complete_collectives(calls: list[_Call], groups: Mapping[str, list[int]]) -> list[_Call]:
    """Return the calls; a collective that all members have called counts as completed.

    This applies to backends without states, which may not have recorded the end yet.
    """
    callers: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for call in calls:
        callers[call.collective, call.event.op, call.event.nbytes].add(call.event.rank)
    return [
        replace(call, pending=False)
        if call.collective
        and not call.entry.has_states
        and callers[call.collective, call.event.op, call.event.nbytes]
        >= {*groups[call.event.group]}
        else call
        for call in calls
    ]


def _events(calls: Iterable[_Call], origin_ns: int) -> Iterator[Event]:
    """Yield the transitions of each call; a rank is blocked in its first pending call."""

    def seconds(nanoseconds: int | None) -> float:
        return (nanoseconds - origin_ns) / 1e9 if nanoseconds else 0.0

    arrivals: dict[tuple[str, int] | None, float] = defaultdict(float)  # time of the last call
    latest = 0.0
    for call in calls:
        arrivals[call.collective] = max(arrivals[call.collective], call.event.time)
        ended = seconds(call.entry.time_discovered_completed_ns)
        latest = max(latest, call.event.time, ended)
    blocked: set[int] = set()
    for call in calls:
        event = call.event
        started = seconds(call.entry.time_discovered_started_ns) or event.time
        yield event
        yield replace(event, state=State.STARTED, time=started)
        if not call.pending:
            last = arrivals[call.collective] if call.collective else started
            ended = seconds(call.entry.time_discovered_completed_ns) or last
            yield replace(event, state=State.COMPLETED, time=max(ended, started))
        elif event.rank not in blocked:
            blocked.add(event.rank)
            yield replace(event, state=State.BLOCKED, time=max(latest, started))


def _ends(events: list[Event], ranks: range, dumps: Mapping[int, Dump]) -> dict[int, RankEnd]:
    """Return a RankEnd for each rank that is not blocked while others are.

    Such a rank's dump has no pending call, or is missing.
    """
    blocked = {e.rank for e in events if e.state is State.BLOCKED}
    missing = "its dump is missing"
    return {
        rank: RankEnd("elsewhere", "" if rank in dumps else missing)
        for rank in ranks
        if blocked and rank not in blocked
    }
