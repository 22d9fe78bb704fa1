"""Read recorded steps of pipelines, as published with ByteDance's what-if analysis. Pure.

In the Chrome trace a process is a data-parallel copy, and a thread a stream of one of its stages.
An event names its step and its micro-batch. Lin et al., "Understanding stragglers in large model
training using what-if analysis", 2025.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from distkit.events import Event, Op, State
from distkit.trace.info import RankInfo, RunInfo

Json = dict[str, Any]

_THREAD = re.compile(r"PP rank (\d+), TP rank (\d+)")
#: The other end's stage of each message, relative to the rank's stage.
_PEERS = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
#: Collectives; "stage": of all copies of a stage; "ends": of a pipeline's first and last stage.
_COLLECTIVES = {
    "params-all-gather": (Op.ALL_GATHER, "stage"),
    "grads-reduce-scatter": (Op.REDUCE_SCATTER, "stage"),
    "separate-grads-all-reduce": (Op.ALL_REDUCE, "stage"),
    "embedding-grads-all-reduce": (Op.ALL_REDUCE, "ends"),
}


class _Facts(Struct):
    step: int
    mb_id: int | None


class _Slice(Struct):
    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: _Facts


def matches(value: Any) -> bool:
    """Return whether this looks like such a trace."""
    events = value.get("traceEvents") if isinstance(value, dict) else None
    return isinstance(events, list) and any(
        isinstance(e, dict) and (e.get("ph"), e.get("name")) == ("X", "forward-compute")
        for e in events
    )


def check(trace: Json) -> None:
    """Raise a ValueError that names the first invalid field."""
    msgspec.convert(_slices(trace), list[_Slice])


def read(trace: Json) -> tuple[list[Event], RunInfo]:
    """Return the events of all ranks, and the metadata of their run."""
    threads = {
        (e["pid"], e["tid"]): int(match[1])
        for e in trace["traceEvents"]
        if e.get("ph") == "M" and (match := _THREAD.match(str(e["args"].get("name"))))
    }
    slices = sorted(msgspec.convert(_slices(trace), list[_Slice]), key=lambda s: s.ts)
    keys = sorted({(threads[s.pid, s.tid], s.pid) for s in slices})
    ranks = {key: rank for rank, key in enumerate(keys)}
    last = max(stage for stage, _ in keys)
    groups: dict[str, list[int]] = {}
    for (stage, copy), rank in ranks.items():
        groups.setdefault(f"stage {stage}", []).append(rank)
        if stage in (0, last):
            groups.setdefault(f"ends of copy {copy}", []).append(rank)
    events: list[Event] = []
    for seq, s in enumerate(slices):
        stage = threads[s.pid, s.tid]
        facts: Json = {"op": Op.MARK}
        if s.name in _PEERS:
            op = Op.SEND if s.name.endswith("send") else Op.RECV
            facts = {"op": op, "peer": ranks.get((stage + _PEERS[s.name], s.pid)), "tag": 0}
        elif s.name in _COLLECTIVES:
            op, kind = _COLLECTIVES[s.name]
            facts = {"op": op, "group": f"{kind} of copy {s.pid}"}
            if kind == "stage":
                facts["group"] = f"stage {stage}"
        micro = {} if s.args.mb_id is None or s.args.mb_id < 0 else {"microbatch": s.args.mb_id}
        known = {"label": s.name, "batch": s.args.step, "stage": stage, **micro}
        for state, time in ((State.STARTED, s.ts), (State.COMPLETED, s.ts + s.dur)):
            events.append(
                Event(
                    ranks[stage, s.pid],
                    seq,
                    state=state,
                    time=time / 1e6,
                    attributes=known,
                    **facts,
                )
            )
    names = {rank: RankInfo(f"stage {stage}, copy {copy}") for (stage, copy), rank in ranks.items()}
    info = RunInfo(name="pipeline", world_size=len(ranks), groups=groups, ranks=names)
    return sorted(events, key=lambda e: e.time), info


def _slices(trace: Json) -> list[Json]:
    return [e for e in trace["traceEvents"] if e.get("ph") == "X"]
