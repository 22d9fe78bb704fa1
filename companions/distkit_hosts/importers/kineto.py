"""Read traces of torch.profiler. No side effects.

Each call is an operator ``c10d::…`` in the trace. NCCL adds ``record_param_comms`` with the group,
and a kernel with the times on the GPU. gloo adds a range ``gloo:…`` with the end of the call.
Ranges of ``record_function`` become marks.

Source: torch/csrc/profiler/util.h (the names of the arguments), the Trace Event Format document.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from distkit._format import named
from distkit.events import P2P, WORLD, Event, Op, State
from distkit.trace.info import Limitation, Number, Rank, RunInfo
from distkit_hosts.importers.flight_recorder import describe_tensor, op_of

#: Index of the argument whose tensors are described, by ``c10d::`` operator; 1 if not listed.
_TENSORS = {Op.SEND: 0, Op.RECV: 0, Op.BROADCAST: 0, Op.REDUCE: 0, Op.ALL_REDUCE: 0}
#: Names of the ranges that backends record.
_BACKEND = re.compile(r"(gloo|nccl|ucc|mpi|xccl|hccl):\w+")


class _Slice(Struct):
    """A slice of one thread; times in microseconds."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    tid: Any = None
    ts: Number = 0.0
    dur: Number = 0.0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """The end time."""
        return self.ts + self.dur


class _Group(Struct):
    pg_name: str | int
    pg_desc: str = ""
    ranks: list[Rank] = []


class _Distributed(Struct):
    rank: Rank | None = None
    world_size: Rank = 0
    backend: str = ""
    pg_config: list[_Group] = []


class Profile(Struct):
    """The trace of one rank."""

    traceEvents: list[_Slice]
    baseTimeNanoseconds: int = 0
    #: The process group, if it is recorded.
    distributedInfo: _Distributed = msgspec.field(default_factory=_Distributed)


def parse(value: Any) -> Profile:
    """Return a trace, or raise a ValueError that names the first invalid field."""
    if "dropped" in value.get("otherData", ()):
        raise ValueError(
            "it was written by trace.to_chrome for Perfetto: load the file from trace.save instead"
        )
    return msgspec.convert(value, Profile)


def read(profiles: Mapping[int, Profile]) -> tuple[list[Event], RunInfo]:
    """Return the events of a run and its metadata, from the traces of its ranks."""
    infos = [profile.distributedInfo for profile in profiles.values()]
    known = max(a.world_size for a in infos)
    world = max(max(profiles) + 1, known)
    groups = {
        str(group.pg_name): group.ranks
        for a in infos
        for group in a.pg_config
        if group.ranks and group.pg_desc != "default_pg"
    }
    base = min(profile.baseTimeNanoseconds for profile in profiles.values())
    events: list[Event] = []
    for rank, profile in profiles.items():
        offset = (profile.baseTimeNanoseconds - base) / 1e3
        events += _Rank(rank, profile, offset).events()
    missing = [r for r in range(world) if r not in profiles] if known or len(profiles) > 1 else []
    info = RunInfo(
        name="profiler",
        backend=next((a.backend for a in infos if a.backend), ""),
        groups={WORLD: [*range(world)]} | groups,
        limitations=dict(_limitations(missing, world, events)),
        # otherwise there would be lanes for all missing ranks
        world_size=world if len(profiles) == world else 0,
    )
    return events, info


def _limitations(
    missing: list[int], world: int, events: list[Event]
) -> Iterator[tuple[str, Limitation]]:
    """Yield the limitations of traces, with their remedies."""
    if missing:
        yield (
            "matching",
            Limitation(
                f"{named(missing)} of {world} {'are' if len(missing) > 1 else 'is'} missing: the "
                "ranks' calls are not checked for matching.",
                "Load the traces of all ranks together: distkit replay FOLDER.",
            ),
        )
    calls = [e for e in events if e.state is State.SCHEDULED and e.op is not Op.MARK]
    if not calls:
        yield (
            "communication",
            Limitation(
                "the profile contains no communication (no c10d:: operators).",
                "Calls are recorded on the CPU: profile with ProfilerActivity.CPU, around steps "
                "that communicate.",
            ),
        )
    if any(e.op in P2P for e in calls):
        yield (
            "messages",
            Limitation(
                "distkit does not read the peers of sends and receives from a profile, so the "
                "messages are missing.",
                "Record the ranks to see their messages: distkit trace -- torchrun ….",
            ),
        )


#: Suffix of the group name for a rank's collectives without a recorded group.
_UNKNOWN = ", unknown group"


class _Rank:
    """The slices of one rank, and their calls.

    Args:
        rank: its number.
        profile: its trace.
        offset: the trace's time base, relative to the earliest one [µs].
    """

    def __init__(self, rank: int, profile: Profile, offset: float) -> None:
        self.rank, self._offset = rank, offset
        self._only_world = len(profile.distributedInfo.pg_config) == 1
        slices = [s for s in profile.traceEvents if s.ph == "X"]
        self._slices = sorted(slices, key=lambda s: (s.ts, -s.dur))
        self._details = [s for s in self._slices if s.name == "record_param_comms"]
        self._detail_starts = [s.ts for s in self._details]
        self._kernels = {
            str(s.args.get("External id")): s
            for s in self._slices
            if s.cat == "kernel" and s.name.startswith("nccl")
        }
        self._ranges: dict[Op | None, list[_Slice]] = defaultdict(list)  # gloo's, latest first
        for s in self._slices[::-1]:
            if s.name.startswith("gloo:"):
                self._ranges[op_of(s.name)].append(s)

    def events(self) -> Iterator[Event]:
        """Yield the transitions of its calls and marks."""
        for seq, s in enumerate(self._slices):
            op = op_of(s.name) if s.name.startswith("c10d::") else None
            if op is not None and s.cat == "cpu_op":
                yield from self._call(seq, s, op)
            elif s.cat == "user_annotation" and not _BACKEND.match(s.name):
                mark = {"op": Op.MARK, "attributes": {"label": s.name}}
                yield from self._states(seq, [s.ts, s.ts, s.end], **mark)

    def _states(self, seq: int, times: list[float], **fields: Any) -> Iterator[Event]:
        states = State.SCHEDULED, State.STARTED, State.COMPLETED
        for state, microseconds in zip(states, times, strict=True):
            time = (microseconds + self._offset) / 1e6
            yield Event(rank=self.rank, seq=seq, state=state, time=time, **fields)

    def _call(self, seq: int, s: _Slice, op: Op) -> Iterator[Event]:
        """Yield a call, from its operator to the end of the backend's work for it."""
        first = bisect_left(self._detail_starts, s.ts)
        details = self._details[first : bisect_right(self._detail_starts, s.end)]
        detail = next((d for d in details if d.tid == s.tid), _Slice())
        ids = (str(x.args.get("External id")) for x in (s, detail))
        kernel = next((self._kernels[i] for i in ids if i in self._kernels), None)
        gloo = self._ranges[op].pop() if self._ranges[op] else None
        started = kernel.ts if kernel else s.ts
        ended = kernel.end if kernel else max(s.end, gloo.end if gloo else s.end)
        group = self._group(detail.args)
        shapes = _shapes(s, op, detail)
        shape, dtype, nbytes = describe_tensor(op, shapes, [], _dtype(s, op, detail, gloo))
        yield from self._states(
            seq,
            [s.ts, started, ended],
            op=op,
            group=group or (WORLD if op in P2P else f"rank {self.rank}{_UNKNOWN}"),
            nbytes=nbytes,
            shape=shape,
            dtype=dtype,
        )

    def _group(self, details: dict[str, Any]) -> str:
        """Return the group of a call; "" if it is unknown."""
        if "Process Group Name" in details:
            world = details.get("Process Group Description") == "default_pg"
            return WORLD if world else str(details["Process Group Name"])
        return WORLD if self._only_world else ""


def _shapes(s: _Slice, op: Op, detail: _Slice) -> list[list[int]]:
    """Return the shapes of a call's inputs; the profiler records one shape or a list of them."""
    dims, index = s.args.get("Input Dims") or (), _TENSORS.get(op, 1)
    value = dims[index] if index < len(dims) else []
    if value:
        return value if isinstance(value[0], list) else [value]
    elements = detail.args.get("Out msg nelems" if op is Op.RECV else "In msg nelems")
    return [[int(elements)]] if elements else []


def _dtype(s: _Slice, op: Op, detail: _Slice, gloo: _Slice | None) -> str:
    types = s.args.get("Input type") or ()
    index = _TENSORS.get(op, 1)
    call_dtype = next((str(t) for t in types[index:][:1] if t != "TensorList"), "")
    backend_dtype = (gloo.args.get("Input type") or [""])[0] if gloo else ""
    return str(detail.args.get("dtype") or call_dtype or backend_dtype)
