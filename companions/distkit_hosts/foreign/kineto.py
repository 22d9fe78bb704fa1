"""Read traces of torch.profiler. Pure.

A trace has an operator ``c10d::…`` for each call, or for some only a range of the backend. NCCL
adds ``record_param_comms`` with the group, and a kernel with the times on the GPU. gloo adds a
range ``gloo:…`` with the end of the call. Ranges of ``record_function`` become marks.

Source: torch/csrc/profiler/util.h (the names of the arguments), the Trace Event Format document.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from distkit._format import count, joined, named
from distkit.events import P2P, WORLD, Event, Op, State
from distkit.trace.info import Limitation, Number, Rank, RunInfo
from distkit_hosts.foreign.flight_recorder import described, op_of, peer_of

Json = dict[str, Any]

#: Positions of a ``c10d::`` operator's arguments: its peer, its tag, and the tensors it reads.
_PEER = {Op.SEND: 2, Op.RECV: 2, Op.BROADCAST: 2, Op.REDUCE: 3, Op.GATHER: 3, Op.SCATTER: 3}
_TAG = 3
_TENSORS = {Op.SEND: 0, Op.RECV: 0, Op.BROADCAST: 0, Op.REDUCE: 0, Op.ALL_REDUCE: 0}
#: Ranges of a backend.
_BACKEND = re.compile(r"(gloo|nccl|ucc|mpi|xccl|hccl):\w+")
#: Categories of operators; older versions write "operator", and legacy profilers "".
_OPERATORS = {"cpu_op", "operator", ""}
_ANNOTATIONS = {"user_annotation", *_OPERATORS}

#: Details of a call are at most this number of slices before it.
_NEAR = 8
#: Reasons for missing facts of calls.
NO_GROUP = "collectives whose group the profiler does not record"
NO_PEER = "sends and receives whose peer the profiler does not record"
NO_BYTES = "calls whose size the profiler does not record"

#: For errors: the slices that are read.
LOOKED_FOR = "operators c10d::…, ranges of a backend (nccl:…, gloo:…) and record_function's marks"


@dataclass(frozen=True, slots=True)
class Slice:
    """A complete slice of one thread [s]."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    facts: Json


class _Event(Struct):
    name: str = ""
    ph: str = ""
    ts: Number = 0.0
    dur: Number = 0.0


class _Distributed(Struct):
    world_size: Rank = 0
    rank: Rank = 0


class _Trace(Struct):
    traceEvents: list[_Event]
    distributedInfo: _Distributed | None = None


def matches(value: Any) -> bool:
    """Return whether this looks like such a trace."""
    return isinstance(value, dict) and "traceEvents" in value


def check(trace: Json) -> None:
    """Raise a ValueError that names the first invalid field."""
    if "dropped" in trace.get("otherData", ()):
        raise ValueError(
            "it was written by trace.to_chrome for Perfetto: load the file of trace.save instead"
        )
    msgspec.convert(trace, _Trace)


def contents(traces: Iterable[Json]) -> str:
    """Describe the contents of traces.

    >>> contents([{"traceEvents": [{"ph": "X", "cat": "kernel"}, {"ph": "M"}]}])
    '2 events (1 kernel)'
    """
    events = [e for trace in traces for e in trace["traceEvents"]]
    kinds = Counter(str(e.get("cat", "slice")) for e in events if e.get("ph") == "X")
    most = ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common(4))
    return f"{len(events):,} events" + f" ({most})" * bool(most)


def read(traces: Mapping[int, Json]) -> tuple[list[Event], RunInfo]:
    """Return the events of a run and its metadata, from the traces of its ranks.

    Args:
        traces: the trace of each rank, after :func:`check`.
    """
    base = min((int(t.get("baseTimeNanoseconds", 0)) for t in traces.values()), default=0)
    about = [t.get("distributedInfo") or {} for t in traces.values()]
    known = max(int(a.get("world_size", 0)) for a in about)
    world = max(max(traces) + 1, known)
    missing = [r for r in range(world) if r not in traces] if known or len(traces) > 1 else []
    groups = _groups(about)
    events: list[Event] = []
    unrecorded: dict[int, Counter[str]] = {}
    for rank, trace in traces.items():
        offset = (int(trace.get("baseTimeNanoseconds", 0)) - base) / 1e9
        reader = _Rank(rank, _slices(trace, offset), groups)
        events += reader.events()
        unrecorded[rank] = reader.unrecorded
    info = RunInfo(
        name="profiler",
        backend=next((str(a["backend"]) for a in about if "backend" in a), ""),
        groups={WORLD: [*range(world)]} | groups,
        unrecorded={rank: dict(counts) for rank, counts in unrecorded.items() if counts},
        limitations=_limits(traces, missing, events, sum(unrecorded.values(), Counter())),
        # otherwise there would be lanes for all missing ranks
        world_size=world if len(traces) == world else 0,
    )
    return events, info


def _groups(about: list[Json]) -> dict[str, list[int]]:
    """Return the known ranks of each group."""
    groups: dict[str, list[int]] = {}
    for config in (c for a in about for c in a.get("pg_config") or ()):
        name = WORLD if config.get("pg_desc") == "default_pg" else str(config["pg_name"])
        groups[name] = [*map(int, config.get("ranks") or groups.get(name, ()))]
    return groups


def _limits(
    traces: Mapping[int, Json], missing: list[int], events: list[Event], unrecorded: Counter[str]
) -> dict[str, Limitation]:
    """Return the limitations of these traces, and their remedies."""
    found: dict[str, Limitation] = {}
    if missing:
        found["matching"] = Limitation(
            text=f"{named(missing)} of {len(traces) + len(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} missing: the ranks' calls are not checked "
            "for matching.",
            remedy="Load the traces of all ranks together: distkit replay FOLDER.",
        )
    if not any(e.op is not Op.MARK for e in events):
        found["communication"] = Limitation(
            text=f"there is no communication in {contents(traces.values())}: "
            f"looked for {LOOKED_FOR}.",
            remedy="Calls are recorded on the CPU: profile with ProfilerActivity.CPU, around "
            "steps that communicate.",
        )
    if n := unrecorded[NO_GROUP]:
        found["groups"] = Limitation(
            text=f"the profiler does not record the group of {count(n, 'collective')}: they "
            "are drawn for each rank separately, and not checked for matching.",
            remedy="It records groups for NCCL since torch 2.3, and for gloo in a process with "
            "one group.",
        )
    lost = [f"the peer of {count(n, 'send or recv')}"] if (n := unrecorded[NO_PEER]) else []
    lost += [f"the size of {count(n, 'call')}"] if (n := unrecorded[NO_BYTES]) else []
    if lost:
        found["messages"] = Limitation(
            text=f"the profiler does not record {joined(lost)}: messages and bytes are missing.",
            remedy="Profile with record_shapes=True. For gloo it records no peers in a process "
            "with several groups.",
        )
    return found


def _slices(trace: Json, offset: float) -> list[Slice]:
    found = [
        Slice(
            e.get("name", ""),
            str(e.get("cat", "")).lower(),
            (e.get("pid"), e.get("tid")),
            e["ts"] / 1e6 + offset,
            (e["ts"] + e.get("dur", 0)) / 1e6 + offset,
            e.get("args") or {},
        )
        for e in trace["traceEvents"]
        if e.get("ph") == "X"
    ]
    return sorted(found, key=lambda s: (s.start, -s.end))


class _Rank:
    """The slices of one rank, and their calls."""

    def __init__(self, rank: int, slices: list[Slice], groups: dict[str, list[int]]) -> None:
        self.rank, self.groups, self.unrecorded = rank, groups, Counter[str]()
        self._seq = 0
        operators = [(s, op) for s in slices if (op := _operator(s)) is not None]
        ranges = [(s, op) for s in slices if (op := _range(s)) is not None]
        has_operator = {op for _, op in operators}
        only = [(s, op) for s, op in ranges if op not in has_operator]
        marks = [(s, Op.MARK) for s in slices if _is_mark(s)]
        self._calls = sorted([*operators, *only, *marks], key=lambda call: call[0].start)
        self._details = _Details(s for s in slices if s.name == "record_param_comms")
        self._kernels = {
            s.facts.get("External id"): s
            for s in slices
            if s.category == "kernel" and s.name.startswith("nccl")
        }
        self._ranges: dict[Op, Iterator[Slice]] = {
            op: iter([s for s, kind in ranges if kind is op and s.name.startswith("gloo")])
            for op in Op
        }

    def events(self) -> Iterator[Event]:
        """Yield the transitions of its calls and marks."""
        for s, op in self._calls:
            if op is Op.MARK:
                times = [s.start, s.start, s.end]
                yield from self._states(times, op=op, attributes={"label": s.name})
            else:
                yield from self._call(s, op)

    def _states(self, times: list[float], **facts: Any) -> Iterator[Event]:
        seq, self._seq = self._seq, self._seq + 1
        states = State.SCHEDULED, State.STARTED, State.COMPLETED
        for state, time in zip(states, times, strict=True):
            yield Event(rank=self.rank, seq=seq, state=state, time=time, **facts)

    def _call(self, s: Slice, op: Op) -> Iterator[Event]:
        """Yield a call, from its operator to the end of the backend's work for it."""
        detail = self._details.of(s)
        details = detail.facts if detail else {}
        ids = [x.facts.get("External id") for x in (s, detail) if x]
        kernel = next((self._kernels[i] for i in ids if i in self._kernels), None)
        backend_range = next(self._ranges[op], None)
        started = kernel.start if kernel else s.start
        ended = kernel.end if kernel else max(s.end, backend_range.end if backend_range else s.end)
        group = self._group(details)
        inputs = [str(x) for x in s.facts.get("Concrete Inputs") or ()]
        peer = self._peer(s, op, group, inputs)
        shapes = _shapes(s, op, details)
        shape, dtype, nbytes = described(op, shapes, [], _dtype(s, op, details, backend_range))
        self.unrecorded[NO_BYTES] += not shapes and op is not Op.BARRIER
        self.unrecorded[NO_PEER] += peer is None and op in P2P
        self.unrecorded[NO_GROUP] += not group and op not in P2P
        self.unrecorded = +self.unrecorded
        yield from self._states(
            [s.start, started, ended],
            op=op,
            peer=peer,
            group=group or (WORLD if op in P2P else f"rank {self.rank}, unknown group"),
            nbytes=nbytes,
            shape=shape,
            dtype=dtype,
            tag=_number(inputs, _TAG) if op in P2P else None,
        )

    def _group(self, details: Json) -> str:
        """Return the group of a call; "" if it is unknown."""
        if "Process Group Name" in details:
            world = details.get("Process Group Description") == "default_pg"
            return WORLD if world else str(details["Process Group Name"])
        return next(iter(self.groups)) if len(self.groups) == 1 else ""

    def _peer(self, s: Slice, op: Op, group: str, inputs: list[str]) -> int | None:
        """Return the global rank of the other end or the root; None if it is uncertain."""
        index = _number(inputs, _PEER.get(op))
        index = peer_of(s.name, []) if index is None else index
        candidates = [ranks for ranks in self.groups.values() if self.rank in ranks]
        members = [self.groups[group]] if group in self.groups else candidates
        found = {ranks[index] for ranks in members if index is not None and index < len(ranks)}
        return found.pop() if len(found) == 1 else None


def _operator(s: Slice) -> Op | None:
    """Return the operation of an operator of torch; None for another slice."""
    return op_of(s.name) if s.category in _OPERATORS and s.name.startswith("c10d::") else None


def _range(s: Slice) -> Op | None:
    """Return the operation of a backend's range; None for another slice."""
    return op_of(s.name) if s.category in _ANNOTATIONS and _BACKEND.match(s.name) else None


def _is_mark(s: Slice) -> bool:
    return s.category == "user_annotation" and not _BACKEND.match(s.name)


def _number(inputs: list[str], index: int | None) -> int | None:
    text = inputs[index] if index is not None and index < len(inputs) else ""
    return int(text) if text.isdecimal() else None


def _shapes(s: Slice, op: Op, details: Json) -> list[list[int]]:
    """Return the shapes of a call's inputs; the profiler records one shape or a list of them."""
    dims, index = s.facts.get("Input Dims") or (), _TENSORS.get(op, 1)
    index = index if _operator(s) else 0
    value = dims[index] if index < len(dims) else []
    nested = bool(value) and isinstance(value[0], list)
    shapes = value if nested else [value] if value else []
    elements = details.get("Out msg nelems" if op is Op.RECV else "In msg nelems")
    return shapes or ([[int(elements)]] if elements else [])


def _dtype(s: Slice, op: Op, details: Json, backend_range: Slice | None) -> str:
    types = s.facts.get("Input type") or ()
    index = _TENSORS.get(op, 1) if _operator(s) else 0
    of_call = next((str(t) for t in types[index:][:1] if t != "TensorList"), "")
    of_backend = (backend_range.facts.get("Input type") or [""])[0] if backend_range else ""
    return str(details.get("dtype") or of_call or of_backend)


class _Details:
    """NCCL's details of each call, matched by time with torch's operator or NCCL's own range."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._slices = [*slices]
        self._starts = [s.start for s in self._slices]

    def of(self, call: Slice) -> Slice | None:
        """Return the details of a call."""
        first = max(0, bisect_right(self._starts, call.start) - _NEAR)
        for candidate in islice(self._slices, first, bisect_right(self._starts, call.end)):
            if candidate.thread == call.thread and candidate.end >= call.start:
                return candidate
        return None
