"""Logs of NCCL (``NCCL_DEBUG=INFO``) as events: which rank has made which calls. Pure.

A log has the calls of each process in their order, and nothing of their ends. A communicator is an
address, of each process its own. The lines of its initialisation say which communicators belong
together, and which rank each process is; calls on others are counted, not shown.

Processes that share a pipe write blocks, not lines: a line may be cut anywhere, and continue behind
another process's. What is left of a call is counted, too.

Source: ``ncclEnqueueCheck``, ``ncclCommInitRankFunc`` and ``ncclDebugLog`` of NCCL 2.18 to 2.28;
RCCL writes the same.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distkit._format import joined, named
from distkit.events import COLLECTIVES, P2P, WORLD, Event, Op, State
from distkit.trace.calls import CUT
from distkit.trace.info import Limit, RankInfo, RunInfo
from distkit_hosts.foreign.flight_recorder import op_of

#: What calls are recognised by, and what writes them.
LOOKED_FOR = (
    "lines of communicators such as `ncclCommInitRank comm 0x… commId 0x… - Init COMPLETE`, and of "
    "calls on them such as `AllReduce: opCount 2a …`. NCCL writes both from the start of a job on "
    "with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL"
)

#: Every line: what a launcher puts before it, then ``host:pid:tid [device] NCCL INFO``.
_SAID = "NCCL INFO "
_PROCESS = re.compile(
    r"(?:(?P<host>[^\s:\]|\"']+):(?P<pid>\d+):\d+ )?\[(?P<device>\d+)\](?: \d+)? $"  # RCCL: a time
)
_SENDER = re.compile(r":\d+:\d+ \[\d+\]")
_CALL = re.compile(
    r"(?P<op>\w+): opCount (?P<number>[0-9a-f]+) sendbuff \S+ recvbuff \S+ count (?P<count>\d+) "
    r"datatype (?P<dtype>\d+) op (?P<reduction>\d+) root (?P<root>\d+) comm (?P<comm>\w+) "
    r"\[nranks=(?P<size>\d+)\] stream [^\s]+"
)
#: What is left of a call that was cut: it has at least one of these.
_PART = re.compile(r": opCount|sendbuff \S+ recvbuff")
#: Colours, which some launchers give their prefixes.
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_INIT = re.compile(
    r"comm (?P<comm>0x\w+) rank (?P<place>\d{1,6}) nranks (?P<size>\d{1,6}) "
    r"cudaDev (?P<device>\d+)"
    r"(?:.* busId (?P<bus>\w+))?(?:.* parent (?P<parent>0x\w+)(?: \w+Count (?P<count>\d+))?"
    r" color (?P<color>-?\d+))?(?:.* commId (?P<id>0x\w+))?.* Init (?:START|COMPLETE)"
)
_CLOSED = re.compile(r"comm (?P<comm>0x\w+) rank .* Destroy COMPLETE")
#: NCCL's numbers of types and reductions.
_DTYPES = (
    *(("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8)),
    *(("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2)),
    *(("float8_e4m3fn", 1), ("float8_e5m2", 1)),
)
_REDUCTIONS = "sum", "product", "max", "min", "avg"
_REDUCING = {Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER}
_ROOTED = {Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER}

#: A log has no times: the calls of a rank are drawn so far apart [s].
STEP = 1e-3

#: A device of a process: what has a rank.
Lane = tuple[str, str, str]


@dataclass
class Comm:
    """A communicator of one process, and its calls."""

    lane: Lane
    size: int
    identity: str  # equal for those that belong together
    place: int
    bus: str
    first: int
    closed: bool = False
    #: Its calls, as events of rank 0: ``seq`` is their line among those of all files.
    calls: list[Event] = field(default_factory=list)


def is_one(value: Any) -> bool:
    """True if this looks like such a log."""
    return isinstance(value, str) and _SAID in value


def check(log: str) -> None:
    """Nothing: a line that does not read as it should is no call."""


def holds(logs: Collection[str]) -> str:
    """The contents of some logs, in words, with the communicators that wait for a rank."""
    found = _Log(dict(enumerate(logs)))
    lines = sum(log.count(_SAID) for log in logs)
    lanes = {comm.lane for comm in found.comms}
    said = f"{lines} lines of NCCL, which name {len(lanes)} ranks"
    if found.unassigned:
        said += f", and have {found.unassigned} calls on communicators whose beginning is not there"
    for comms in _together(found.comms).values():
        if absent := sorted({*range(comms[0].size)} - {c.place for c in comms}):
            said += f"; {named(absent)} of a communicator of {comms[0].size} never began it"
    return said


def read(logs: Mapping[str, str]) -> tuple[list[Event], RunInfo]:
    """The events of a job, and what is known of it; of several in the logs, the latest.

    Args:
        logs: the texts, by the names of their files.
    """
    log = _Log(logs)
    comms, earlier = _latest(log.comms)
    ranks, known = _ranks(comms)
    groups, members = _groups(comms, ranks)
    events = [*_events(comms, ranks, groups, members)]
    size = len(members.get(WORLD, ranks))
    info = RunInfo(
        name="NCCL log",
        backend="nccl",
        ranks={
            rank: RankInfo(f"rank {rank}", host=host, pid=pid)
            for (host, pid, _), rank in sorted(ranks.items(), key=lambda item: item[1])
        },
        groups={WORLD: [*range(size)]} | {g: r for g, r in members.items() if g != WORLD},
        unseen={rank: {CUT: log.cut[lane]} for lane, rank in ranks.items() if log.cut[lane]},
        limits=_limits(log, ranks, known, size, earlier),
        world_size=size if size == len(ranks) else 0,
    )
    return events, info


# -- lines -----------------------------------------------------------------------------------------


class _Log:
    """The communicators in some logs."""

    def __init__(self, logs: Mapping[Any, str]) -> None:
        self.comms: list[Comm] = []
        self.cut = Counter[Lane]()  # calls truncated by the end of a file
        self.torn = self.unassigned = 0  # other fragments of calls; calls on unknown communicators
        self._open: dict[tuple[str, str, str], Comm] = {}  # by process and address
        self._line = 0
        for name, text in logs.items():
            self._read(str(name), text)

    def _read(self, name: str, text: str) -> None:
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            if "opCount" not in line and "comm 0x" not in line and "sendbuff" not in line:
                continue  # the common case
            self._line += 1
            before, _, said = _COLOUR.sub("", line).rpartition(_SAID)
            process = _PROCESS.search(before)
            self.torn += _PART.search(before) is not None
            if (
                process is None or len(_SENDER.findall(before)) > 1
            ):  # the output of two processes, interleaved
                self.torn += _PART.search(said) is not None
                continue
            lane = process["host"] or "", process["pid"] or name, process["device"]
            if (call := _CALL.match(said)) is not None:
                self._call(lane, call, f"{name}:{number}")
            elif _PART.search(said):
                if number == len(lines):
                    self.cut[lane] += 1
                else:
                    self.torn += 1
            elif (init := _INIT.search(said)) is not None:
                self._init(lane, init)
            elif (closed := _CLOSED.search(said)) is not None:
                if (comm := self._open.pop((*lane[:2], closed["comm"]), None)) is not None:
                    comm.closed = True

    def _init(self, lane: Lane, said: re.Match[str]) -> None:
        process = lane[:2]
        parent = self._open.get((*process, said["parent"] or ""))
        identity = said["id"] or ""
        if not identity and parent is not None:
            identity = f"{parent.identity} split {said['count']} {said['color']}"
        at, known = (*process, said["comm"]), self._open.pop((*process, said["comm"]), None)
        if known is not None and known.identity == identity:
            self._open[at] = known  # START, then COMPLETE
        elif identity and int(said["place"]) < int(said["size"]):
            own = *process, said["device"]
            size, place, bus = int(said["size"]), int(said["place"]), said["bus"] or ""
            self._open[at] = Comm(own, size, identity, place, bus, self._line)
            self.comms.append(self._open[at])

    def _call(self, lane: Lane, said: re.Match[str], where: str) -> None:
        op = op_of(said["op"])
        if op is None:
            return
        comm = self._open.get((*lane[:2], said["comm"]))
        if comm is None:
            self.unassigned += 1
            return
        comm.calls.append(_event(op, self._line, where, said))


def _event(op: Op, line: int, where: str, said: re.Match[str]) -> Event:
    """A call, of which rank and when is not known yet."""
    count, dtype, reduction = (int(said[name]) for name in ("count", "dtype", "reduction"))
    name, size = _DTYPES[dtype] if dtype < len(_DTYPES) else ("", 0)
    of = _REDUCTIONS[reduction] if reduction < len(_REDUCTIONS) else "custom"
    return Event(
        0,
        line,
        op,
        State.STARTED,
        0.0,
        peer=int(said["root"]) if op in P2P | _ROOTED else None,
        nbytes=size * count,
        shape=(count,),
        dtype=name,
        where=where,
        attributes={"reduction": of} if op in _REDUCING and of != "sum" else {},
    )


# -- what belongs together -------------------------------------------------------------------------


def _together(comms: Iterable[Comm]) -> dict[str, list[Comm]]:
    """The communicators by their identity."""
    found: dict[str, list[Comm]] = defaultdict(list)
    for comm in comms:
        found[comm.identity].append(comm)
    return found


def _latest(comms: Sequence[Comm]) -> tuple[list[Comm], int]:
    """The communicators of the latest job, and how many jobs came before it.

    Ranks of one job have communicators together; two processes on one GPU are of two jobs.
    """
    jobs: list[set[Lane]] = []
    for some in _together(comms).values():
        lanes = {c.lane for c in some}
        met = [job for job in jobs if not job.isdisjoint(lanes)]
        jobs = [job for job in jobs if job not in met] + [lanes.union(*met)]
    its = [[comm for comm in comms if comm.lane in job] for job in jobs]
    its.sort(key=lambda some: max(_last_line(comm) for comm in some), reverse=True)
    kept, places = list[Comm](), set[tuple[str, str]]()
    for some in its:
        here = {(comm.lane[0], comm.bus) for comm in some if comm.bus}
        if here.isdisjoint(places):
            kept += some
            places |= here
    return kept, sum(some[0] not in kept for some in its)


def _last_line(comm: Comm) -> int:
    return comm.calls[-1].seq if comm.calls else comm.first


def _ranks(comms: Sequence[Comm]) -> tuple[dict[Lane, int], bool]:
    """The rank of each lane, and whether a communicator of all tells it."""
    lanes = sorted({comm.lane for comm in comms}, key=_order)
    for some in _together(comms).values():
        found = {comm.lane: comm.place for comm in some}
        if len(found) == len(lanes) == len({*found.values()}):
            return found, True
    return {lane: rank for rank, lane in enumerate(lanes)}, False


def _order(lane: Lane) -> tuple[Any, ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in lane)


def _groups(
    comms: Sequence[Comm], ranks: Mapping[Lane, int]
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The name of each identity's group, and the ranks of each, as far as they are here."""
    names, members = dict[str, str](), dict[str, list[int]]()
    for identity, some in _together(comms).items():
        is_world = {c.lane: c.place for c in some} == ranks
        name = WORLD if is_world and WORLD not in members else f"communicator {identity}"
        names[identity] = name
        known = {c.place: ranks[c.lane] for c in some}
        here = [known[place] for place in sorted(known)]
        members[name] = [*range(some[0].size)] if name == WORLD else here
    return names, members


# -- events ----------------------------------------------------------------------------------------


def _events(
    comms: Sequence[Comm],
    ranks: Mapping[Lane, int],
    names: Mapping[str, str],
    members: Mapping[str, list[int]],
) -> Iterator[Event]:
    """Each call, and its end where that can be assumed: its other ranks have made it, too."""
    begun: dict[int, list[tuple[Event, Comm]]] = defaultdict(list)
    for comm in comms:
        begun[ranks[comm.lane]] += [(call, comm) for call in comm.calls]
    events: list[tuple[Event, Comm]] = []
    for rank, made in begun.items():
        for seq, (call, comm) in enumerate(sorted(made, key=lambda one: one[0].seq)):
            group = names[comm.identity]
            peer = _peer(call.peer, comm, members[group])
            event = replace(call, rank=rank, seq=seq, time=seq * STEP, group=group, peer=peer)
            events.append((event, comm))
    met: dict[Any, list[float]] = defaultdict(list)
    keys = list(_keys(event for event, _ in events))
    for key, (event, _) in zip(keys, events, strict=True):
        met[key].append(event.time)
    for key, (event, comm) in zip(keys, events, strict=True):
        yield event
        needed = 2 if event.op in P2P else len(members.get(event.group, ()))
        if comm.closed or len(met[key]) == needed:
            yield replace(event, state=State.COMPLETED, time=max(met[key]) + STEP / 2)


def _peer(place: int | None, comm: Comm, ranks: list[int]) -> int | None:
    """The rank at a place of a communicator, if its ranks are known."""
    return ranks[place] if place is not None and place < comm.size == len(ranks) else None


def _keys(events: Iterable[Event]) -> Iterator[Any]:
    """What is equal for the calls that meet: the n-th of a group, or between two ranks."""
    count: Counter[Any] = Counter()
    for event in events:
        if event.op in COLLECTIVES:
            of: tuple[Any, ...] = event.group, event.rank
            key: tuple[Any, ...] = (event.group,)
        else:
            ends = event.rank, event.peer
            key = event.group, *(ends if event.op is Op.SEND else ends[::-1])
            of = *key, event.op
        yield *key, event.op in P2P, count[of]
        count[of] += 1


# -- what a log cannot tell ------------------------------------------------------------------------


def _limits(
    log: _Log,
    ranks: Mapping[Lane, int],
    known: bool,
    size: int,
    earlier: int,
) -> dict[str, Limit]:
    """What these logs cannot tell, and what to do about it."""
    found: dict[str, Limit] = {}
    found["completions"] = Limit(
        text="a log of NCCL has calls, and nothing of their ends: each is drawn until the "
        "last of its ranks has made it, and whether it ended then is not known. It has no times "
        "either: the calls of a rank are drawn in a row.",
        remedy="The flight recorder notes what has ended, and on which lines: set "
        "TORCH_FR_BUFFER_SIZE=2000, and load its dumps.",
    )
    missing = [rank for rank in range(size) if rank not in ranks.values()]
    if missing or log.torn or log.unassigned:
        are = "are" if len(missing) > 1 else "is"
        why = [f"{named(missing)} of {size} {are} missing"] if missing else []
        why += [f"{log.torn} parts of calls are torn from their lines"] if log.torn else []
        unknown = f"the communicator of {log.unassigned} calls is not known"
        why += [unknown] if log.unassigned else []
        found["matching"] = Limit(
            text=f"{joined(why)}: whether the ranks' calls match is not judged.",
            remedy="Let each rank write a file of its own, from its start on: "
            "NCCL_DEBUG_SUBSYS=INIT,COLL NCCL_DEBUG_FILE=nccl.%h.%p.log",
            calls=log.torn + log.unassigned,
        )
    if not known:
        lanes = sorted(ranks, key=lambda lane: ranks[lane])
        some = ", ".join(f"{ranks[lane]} is {lane[0]}:{lane[1]}" for lane in lanes[:4])
        found["ranks"] = Limit(
            text="of which rank each process is, the log does not tell: they are numbered by "
            f"host and pid ({some}{', …' * (len(lanes) > 4)}).",
            remedy="A collective of all ranks tells it, such as dist.barrier() at the start.",
        )
    if earlier:
        found["jobs"] = Limit(
            text=f"the log has {earlier + 1} jobs; this is the latest.",
            remedy="Give the part of one job to see that.",
        )
    return found
