"""Read dumps of PyTorch's flight recorder: the calls of ranks, including hanging ones. Pure.

A dump has the latest calls of one rank. A watchdog discovers their states. Some backends have no
states: there a completed call is assumed to end when its last member has called it.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, torch/distributed/flight_recorder.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from distkit.errors import OWN
from distkit.events import COLLECTIVES, WORLD, Event, Op, State
from distkit.trace.info import Count, Rank, RankEnd, RunInfo

Json = dict[str, Any]

#: The operation for a part of a call's name; the first match counts.
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

#: The usual name and the bytes per element for torch's names of types in dumps.
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

#: Point-to-point calls name the group ranks of both ends: ``send 0->1``, ``recv 1<-0``.
_ENDS = re.compile(r"(\d+)\s*(?:->|<-)\s*(\d+)")
_Shapes = list[list[Count]]
_Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Frame(Struct):
    filename: str = ""
    line: Count = 0


class _Entry(Struct):
    record_id: _Time
    process_group: list[str]
    profiling_name: str
    time_created_ns: _Time
    state: str
    collective_seq_id: _Time = 0
    time_discovered_started_ns: _Time | None = None
    time_discovered_completed_ns: _Time | None = None
    input_sizes: _Shapes = []
    output_sizes: _Shapes = []
    input_dtypes: list[str] = []
    frames: list[_Frame] = []


class _Dump(Struct):
    entries: list[_Entry]
    pg_config: dict[str, dict[str, str]] | None = None


#: For errors: the entries that are read.
LOOKED_FOR = f"entries of calls such as {', '.join(OPS)}"


def matches(value: Any) -> bool:
    """Return whether this looks like a dump."""
    return isinstance(value, dict) and {"version", "entries"} <= value.keys()


def contents(dumps: Collection[Json]) -> str:
    """Describe the contents of dumps."""
    names = Counter(e["profiling_name"] for dump in dumps for e in dump["entries"])
    most = ", ".join(name for name, _ in names.most_common(4))
    return f"{len(dumps)} dumps with {names.total()} entries" + f" ({most})" * bool(most)


def check(dump: Json) -> None:
    """Raise a ValueError that names the first invalid field."""
    msgspec.convert(dump, _Dump)


def op_of(name: str) -> Op | None:
    """Return the operation for its name in torch or a backend; None for another name.

    >>> op_of("nccl:_all_gather_base"), op_of("nccl:recv 1<-0"), op_of("nccl:coalesced")
    (<Op.ALL_GATHER: 'all_gather'>, <Op.RECV: 'recv'>, None)
    """
    letters = re.sub(r"[^a-z]", "", name.rpartition(":")[2].lower())
    return next((op for word, op in OPS.items() if word in letters), None)


def described(
    op: Op, inputs: list[list[int]], outputs: list[list[int]], dtype: str
) -> tuple[tuple[int, ...], str, int]:
    """Return shape, type and bytes of a call's input, or of its output if it has no input."""
    shapes = (outputs if op in (Op.RECV, Op.SCATTER) else inputs) or outputs or inputs
    name, size = DTYPES.get(dtype.lower(), (dtype.lower(), 0))
    if op is Op.BARRIER or not shapes:
        return (), "", 0
    return tuple(shapes[0]), name, size * sum(map(math.prod, shapes))


@dataclass(frozen=True, slots=True)
class Call:
    """An entry of a dump: the event of the call, and the times of its states."""

    event: Event  # at the time of the call
    number: int  # the number of a collective in its group
    started: float | None
    ended: float | None
    pending: bool
    stated: bool  # whether its backend has states

    @property
    def key(self) -> tuple[str, int, Op, int]:
        """The key that the calls of one collective share."""
        return self.event.group, self.number, self.event.op, self.event.nbytes


def read(dumps: Mapping[int, Json]) -> tuple[list[Event], RunInfo]:
    """Return the events of a run and its metadata, from the dumps of its ranks.

    Args:
        dumps: the dump of each rank, after :func:`check`.
    """
    groups = _groups(dumps)
    world = max(len(groups[WORLD]), *(rank + 1 for rank in dumps))
    groups[WORLD] = [*range(world)]
    unrecorded: dict[int, Counter[str]] = defaultdict(Counter)
    first = min((e["time_created_ns"] for d in dumps.values() for e in d["entries"]), default=0)
    calls = {
        rank: list(_calls(rank, dump, groups, unrecorded[rank], first))
        for rank, dump in dumps.items()
    }
    events = list(_events(_settled([*_aligned(calls, unrecorded)], groups)))
    return events, RunInfo(
        name="flight recorder",
        world_size=world,
        groups=groups,
        unrecorded={rank: dict(found) for rank, found in unrecorded.items() if found},
        ends=_ends(events, range(world), dumps),
    )


# -- groups --------------------------------------------------------------------------


def _groups(dumps: Mapping[int, Json]) -> dict[str, list[int]]:
    """Return the ranks of each group: as configured, or else those with calls in it."""
    seen: dict[str, set[int]] = defaultdict(set)
    known: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        for entry in _entries(dump):
            seen[_group(entry["process_group"])].add(rank)
        for name, about in (dump.get("pg_config") or {}).items():
            ranks = msgspec.json.decode(about.get("ranks") or "[]", type=list[Rank])
            label = WORLD if name == "" else _group([name, about.get("desc", "")])
            known[label] = sorted({*known.get(label, ()), *ranks})
    found = {name: known.get(name) or sorted(ranks) for name, ranks in seen.items()}
    return {WORLD: known.get(WORLD, []), **known, **found}


def _group(process_group: list[str]) -> str:
    """Return the name of a group, given torch's name and description."""
    name, description = [*process_group, ""][:2]
    return WORLD if description == "default_pg" else name


# -- entries -------------------------------------------------------------------------


def _entries(dump: Json) -> list[Json]:
    return sorted(dump["entries"], key=lambda entry: int(entry["record_id"]))


def _calls(
    rank: int, dump: Json, groups: Mapping[str, list[int]], unrecorded: Counter[str], first: int
) -> Iterator[Call]:
    """Yield the calls of a rank in order; count unknown ones and those that have not begun.

    Times begin at ``first`` [ns], because nanoseconds of the wall clock do not fit into a float.
    """
    waits = False
    for entry in _entries(dump):
        backend, _, name = entry["profiling_name"].rpartition(":")
        op = op_of(name)
        if op is None:
            if name != "coalesced":  # the end of a batch, whose calls are entries too
                unrecorded[name] += 1
            continue
        over = entry["state"] == "completed" or (backend != "nccl" and bool(entry.get("retired")))
        if waits and backend == "nccl" and entry["state"] == "scheduled":
            unrecorded[f"{op} queued behind an unfinished call"] += 1
            continue
        waits = waits or not over
        yield _call(rank, entry, op, groups, over, first)


def _call(
    rank: int, entry: Json, op: Op, groups: Mapping[str, list[int]], over: bool, first: int
) -> Call:
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
    group = _group(entry["process_group"])
    inputs, outputs = entry.get("input_sizes") or [], entry.get("output_sizes") or []
    shape, dtype, nbytes = described(op, inputs, outputs, str(dtypes[0]))
    event = Event(
        rank=rank,
        seq=entry["record_id"],
        op=op,
        state=State.SCHEDULED,
        time=(entry["time_created_ns"] - first) / 1e9,
        peer=peer_of(entry["profiling_name"], groups.get(group, [])),
        group=group,
        nbytes=nbytes,
        shape=shape,
        dtype=dtype,
        where=_where(entry.get("frames") or []),
    )
    return Call(
        event,
        entry.get("collective_seq_id", 0),
        _seconds(entry.get("time_discovered_started_ns"), first),
        _seconds(entry.get("time_discovered_completed_ns"), first) if over else None,
        not over,
        entry["profiling_name"].startswith("nccl:"),
    )


def _seconds(nanoseconds: int | None, first: int) -> float | None:
    return (nanoseconds - first) / 1e9 if nanoseconds else None


def peer_of(name: str, members: list[int]) -> int | None:
    """Return the global rank at the other end of a point-to-point call."""
    ends = _ENDS.search(name)
    if ends is None:
        return None
    index = int(ends[2])
    return members[index] if index < len(members) else index


def _where(frames: list[Json]) -> str:
    """Return the line of the user's code: the innermost one outside packages."""
    user_frames = (f for f in frames if not _FOREIGN.search(f.get("filename", "<")))
    return next((f"{PurePath(f['filename']).name}:{f.get('line', 0)}" for f in user_frames), "")


#: Files of packages, of what Python generates, and of distkit in a checkout.
_FOREIGN = re.compile(f"-packages|<|^{'|^'.join(map(re.escape, OWN))}")


# -- matching -----------------------------------------------------------


def _aligned(
    calls: dict[int, list[Call]], unrecorded: Mapping[int, Counter[str]]
) -> Iterator[Call]:
    """Yield the calls; only count those whose partners may have been overwritten."""
    first: dict[str, int] = defaultdict(int)
    for rank_calls in calls.values():
        oldest: dict[str, int] = {}
        for call in rank_calls:
            if call.event.op in COLLECTIVES:
                oldest.setdefault(call.event.group, call.number)
        for group, number in oldest.items():
            first[group] = max(first[group], number)
    overwritten = any(rank_calls and rank_calls[0].event.seq for rank_calls in calls.values())
    for rank, rank_calls in calls.items():
        for call in rank_calls:
            op, group = call.event.op, call.event.group
            known = call.number >= first[group] if op in COLLECTIVES else not overwritten
            if known or (call.pending and op not in COLLECTIVES):
                yield call
            else:
                unrecorded[rank][f"{op} whose partner may have been overwritten"] += 1


def _settled(calls: list[Call], groups: Mapping[str, list[int]]) -> list[Call]:
    """Return the calls; a collective that all members have called counts as completed.

    This applies to backends without states, which may not have recorded the end yet.
    """
    callers: dict[tuple[str, int, Op, int], set[int]] = defaultdict(set)
    for call in calls:
        callers[call.key].add(call.event.rank)
    return [
        replace(c, pending=False)
        if c.pending
        and not c.stated
        and c.event.op in COLLECTIVES
        and len(callers[c.key]) == len(groups[c.event.group]) > 1
        else c
        for c in calls
    ]


def _events(calls: list[Call]) -> Iterator[Event]:
    """Yield the transitions of each call; a rank is blocked in its first pending one."""
    arrived: dict[tuple[str, int], float] = defaultdict(float)
    for call in calls:
        key = call.event.group, call.number
        arrived[key] = max(arrived[key], call.event.time)
    until = max((t for c in calls for t in (c.event.time, c.started, c.ended) if t), default=0.0)
    blocked: set[int] = set()
    for call in calls:
        event, started = call.event, call.started or call.event.time
        yield event
        yield replace(event, state=State.STARTED, time=started)
        if not call.pending:
            last = arrived[event.group, call.number] if event.op in COLLECTIVES else started
            ended = max(call.ended or last, started)
            yield replace(event, state=State.COMPLETED, time=ended)
        elif event.rank not in blocked:
            blocked.add(event.rank)
            yield replace(event, state=State.BLOCKED, time=until)


def _ends(events: list[Event], world: range, dumps: Mapping[int, Json]) -> dict[int, RankEnd]:
    """Return the ranks that are not blocked while others are: their dumps end, or are missing."""
    blocked = {e.rank for e in events if e.state is State.BLOCKED}
    missing = "its dump is missing"
    return {
        rank: RankEnd("elsewhere", "" if rank in dumps else missing)
        for rank in world
        if blocked and rank not in blocked
    }
