"""Traces of torch.profiler, and Chrome traces that distkit has written, as events. Pure.

The profiler's traces have an operator ``c10d::…`` per call; NCCL adds ``record_param_comms`` with
the group, and a kernel that tells when the GPU was at it; gloo adds a range ``gloo:…`` that tells
until when it took. What ``record_function`` has marked becomes a mark.

Source: torch/csrc/profiler/util.h (the names of the arguments), the Trace Event Format document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from distkit.events import P2P, WORLD, Event, Op, State
from distkit.trace import fields
from distkit.trace.flight_recorder import described, op_of

Json = dict[str, Any]

#: The arguments of a ``c10d::`` operator that are its peer, its tag, and the tensors it reads.
_PEER = {Op.SEND: 2, Op.RECV: 2, Op.BROADCAST: 2, Op.REDUCE: 3, Op.GATHER: 3, Op.SCATTER: 3}
_TAG = 3
_TENSORS = {Op.SEND: 0, Op.RECV: 0, Op.BROADCAST: 0, Op.REDUCE: 0, Op.ALL_REDUCE: 0}
#: A call of a Python function, in a trace with stacks.
_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): .*")
#: Ranges of a backend.
_BACKEND = re.compile(r"(gloo|nccl|ucc|mpi|xccl):\w+")
_EVENT = fields.record(
    {"name": fields.text, "ph": fields.text, "ts": fields.number, "dur": fields.number}
)


#: gloo does not tell the group of a call.
STRANGE = "collectives of a group that the profiler does not tell"


@dataclass(frozen=True, slots=True)
class Slice:
    """A complete slice of one thread [s]."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    facts: Json


def is_one(value: Json) -> bool:
    """True if this looks like such a trace."""
    return "traceEvents" in value


def is_ours(trace: Json) -> bool:
    """True if distkit has written such a trace: it has all ranks of a run."""
    return "dropped" in trace.get("otherData", ())


def check(trace: Json) -> None:
    """Raise ValueError when a field holds something else than it should, and name it."""
    fields.items(_EVENT)(trace["traceEvents"], "traceEvents")
    about = trace.get("distributedInfo") or {}
    fields.record({"world_size": fields.rank, "rank": fields.rank})(about, "distributedInfo")


def read(traces: Mapping[int, Json]) -> tuple[list[Event], Json]:
    """The events and the meta data of a run, from the traces of its ranks.

    Args:
        traces: by rank, or one that distkit has written, of all ranks; each has passed
            :func:`check`.
    """
    ours = next(filter(is_ours, traces.values()), None)
    if ours:
        return _ours(ours)
    base = min((int(t.get("baseTimeNanoseconds", 0)) for t in traces.values()), default=0)
    about = [t.get("distributedInfo") or {} for t in traces.values()]
    world = max(max(traces) + 1, *(int(a.get("world_size", 0)) for a in about))
    groups = {WORLD: [*range(world)]}
    for config in (c for a in about for c in a.get("pg_config") or ()):
        name = WORLD if config.get("pg_desc") == "default_pg" else str(config["pg_name"])
        groups[name] = [*map(int, config.get("ranks") or groups.get(name, ()))]
    events: list[Event] = []
    unseen = {}
    for rank, trace in traces.items():
        late = (int(trace.get("baseTimeNanoseconds", 0)) - base) / 1e9
        its = _Rank(rank, _slices(trace, late), groups)
        events += its.events()
        if its.strange:
            unseen[str(rank)] = {STRANGE: its.strange}
    meta = {
        "name": "profiler",
        "world_size": world,
        "backend": next((str(a["backend"]) for a in about if "backend" in a), ""),
        "groups": groups,
        "unseen": unseen,
    }
    return events, meta


def _slices(trace: Json, late: float) -> list[Slice]:
    found = [
        Slice(
            e.get("name", ""),
            str(e.get("cat", "")),
            (e.get("pid"), e.get("tid")),
            e["ts"] / 1e6 + late,
            (e["ts"] + e.get("dur", 0)) / 1e6 + late,
            e.get("args") or {},
        )
        for e in trace["traceEvents"]
        if e.get("ph") == "X"
    ]
    return sorted(found, key=lambda s: (s.start, -s.end))


class _Rank:
    """The slices of one rank, and what they tell of its calls."""

    def __init__(self, rank: int, slices: list[Slice], groups: dict[str, list[int]]) -> None:
        self.rank, self.groups, self.strange = rank, groups, 0
        self._slices, self._seq = slices, 0
        self._details = [s for s in slices if s.name == "record_param_comms"]
        self._kernels = {
            s.facts.get("External id"): s
            for s in slices
            if s.category == "kernel" and s.name.startswith("nccl")
        }
        self._ranges: dict[Op, Iterator[Slice]] = {
            op: iter([s for s in slices if _range(s) is op and s.name.startswith("gloo")])
            for op in Op
        }
        self._lines = _Lines(slices)

    def events(self) -> Iterator[Event]:
        """The transitions of its calls and marks."""
        for s in self._slices:
            if s.category == "cpu_op" and s.name.startswith("c10d::"):
                op = op_of(s.name)
                if op is not None:
                    yield from self._call(s, op)
            elif s.category == "user_annotation" and not _BACKEND.match(s.name):
                yield from self._states(
                    [s.start, s.start, s.end], op=Op.MARK, attributes={"label": s.name}
                )

    def _states(self, times: list[float], **facts: Any) -> Iterator[Event]:
        seq, self._seq = self._seq, self._seq + 1
        states = State.SCHEDULED, State.STARTED, State.COMPLETED
        for state, time in zip(states, times, strict=True):
            yield Event(rank=self.rank, seq=seq, state=state, time=time, **facts)

    def _call(self, s: Slice, op: Op) -> Iterator[Event]:
        """A call: from its operator to the end of what the backend did for it."""
        detail = next((d for d in self._details if s.start <= d.start <= s.end), None)
        told = detail.facts if detail else {}
        ids = [x.facts.get("External id") for x in (s, detail) if x]
        kernel = next((self._kernels[i] for i in ids if i in self._kernels), None)
        lasted = next(self._ranges[op], None)
        started = kernel.start if kernel else s.start
        ended = kernel.end if kernel else max(s.end, lasted.end if lasted else s.end)
        group = self._group(told, op)
        inputs = [str(x) for x in s.facts.get("Concrete Inputs") or ()]
        peer = _number(inputs, _PEER.get(op))
        members = self.groups.get(group, [])
        if peer is not None and peer < len(members):
            peer = members[peer]  # a place in the group
        shape, dtype, nbytes = described(op, _shapes(s, op), [], _dtype(s, op, told, lasted))
        yield from self._states(
            [s.start, started, ended],
            op=op,
            peer=peer,
            group=group,
            nbytes=nbytes,
            shape=shape,
            dtype=dtype,
            tag=_number(inputs, _TAG) if op in P2P else None,
            where=self._lines.at(s),
        )

    def _group(self, told: Json, op: Op) -> str:
        if "Process Group Name" in told:
            world = told.get("Process Group Description") == "default_pg"
            return WORLD if world else str(told["Process Group Name"])
        if len(self.groups) == 1 or op in P2P:
            return WORLD
        self.strange += 1
        return f"rank {self.rank}, unknown group"


def _range(s: Slice) -> Op | None:
    """The operation of a backend's range."""
    return op_of(s.name) if _BACKEND.match(s.name) and s.category == "user_annotation" else None


def _number(inputs: list[str], place: int | None) -> int | None:
    given = inputs[place] if place is not None and place < len(inputs) else ""
    return int(given) if given.isdecimal() else None


def _shapes(s: Slice, op: Op) -> list[list[int]]:
    """The shapes of the tensors that a call reads: the profiler's argument is one or a list."""
    given, place = s.facts.get("Input Dims") or (), _TENSORS.get(op, 1)
    found = given[place] if place < len(given) else []
    nested = bool(found) and isinstance(found[0], list)
    return found if nested else [found] if found else []


def _dtype(s: Slice, op: Op, told: Json, lasted: Slice | None) -> str:
    types = s.facts.get("Input type") or ()
    own = next((str(t) for t in types[_TENSORS.get(op, 1) :][:1] if t != "TensorList"), "")
    theirs = (lasted.facts.get("Input type") or [""])[0] if lasted else ""
    return str(told.get("dtype") or own or theirs)


class _Lines:
    """The user's line of each call, where the trace has Python's stacks."""

    def __init__(self, slices: list[Slice]) -> None:
        frames = [s for s in slices if s.category == "python_function"]
        self._frames = [(s, f) for s in frames if (f := _FRAME.match(s.name))]

    def at(self, call: Slice) -> str:
        """``file:line`` of the innermost caller that is of no package; "" if it is not told."""
        around = [
            f
            for s, f in self._frames
            if s.start <= call.start and call.end <= s.end and s.thread == call.thread
        ]
        own = [f for f in around if "-packages" not in f["file"] and "<" not in f["file"]]
        theirs = [f for f in own if not f["file"].startswith("torch/")]
        return f"{PurePath(theirs[-1]['file']).name}:{theirs[-1]['line']}" if theirs else ""


# -- what distkit has written --------------------------------------------------------------------


def _ours(trace: Json) -> tuple[list[Event], Json]:
    """The events of a trace that :meth:`distkit.Trace.to_chrome` has written."""
    slices = [e for e in trace["traceEvents"] if "seq" in (e.get("args") or ())]
    events = [event for e in slices for event in _span(e)]
    world = max((e.rank for e in events), default=-1) + 1
    return events, {"name": str(trace["otherData"].get("name", "")), "world_size": world}


_FACTS = "seq", "peer", "group", "dtype", "tag", "where"


def _span(e: Json) -> Iterator[Event]:
    """The transitions of an operation, from its slice."""
    told: Json = {k: tuple(v) if type(v) is list else v for k, v in e["args"].items()}
    state = State(told.pop("state", State.COMPLETED))
    told = {k: v for k, v in told.items() if k not in ("before", "after")}
    op = Op.MARK if e.get("cat") == "computation" else Op(e["name"])
    known: Json = {k: told.pop(k) for k in _FACTS if k in told}
    known |= {"nbytes": told.pop("bytes", 0), "shape": tuple(json.loads(told.pop("shape", "[]")))}
    event = Event(
        e["pid"] - 1, op=op, state=State.STARTED, time=e["ts"] / 1e6, attributes=told, **known
    )
    yield event
    if state is not State.STARTED:
        yield replace(event, state=state, time=(e["ts"] + e.get("dur", 0)) / 1e6)
