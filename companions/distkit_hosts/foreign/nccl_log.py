"""Logs of NCCL (``NCCL_DEBUG=INFO``) as events: which rank has made which calls. Pure.

A log has the calls of each process in their order, and nothing of their ends. A communicator is an
address, of each process its own; the lines of its initialisation tell which belong together, and
the place of each in it.

Source: ``ncclEnqueueCheck``, ``ncclCommInitRankFunc`` and ``ncclDebugLog`` of NCCL 2.7 to 2.28;
RCCL writes the same.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from distkit.events import COLLECTIVES, P2P, WORLD, Event, Op, State
from distkit.trace.calls import CUT, named
from distkit.trace.info import MOST_RANKS, Limit, RankInfo, RunInfo
from distkit_hosts.foreign import naming
from distkit_hosts.foreign.flight_recorder import op_of

Json = dict[str, Any]

#: What calls are recognised by, and what writes them.
LOOKED_FOR = (
    "lines of calls such as `AllReduce: opCount 2a …`. NCCL writes them with NCCL_DEBUG=INFO "
    "NCCL_DEBUG_SUBSYS=INIT,COLL"
)

#: Every line: what a launcher puts before it, then ``host:pid:tid [device] NCCL INFO``.
_SAID = "NCCL INFO "
_PROCESS = re.compile(
    r"(?:(?P<host>[^\s:]+):(?P<pid>\d+):\d+ )?\[(?P<device>\d+)\](?: \d+)? $"  # RCCL: a time
)
_CALL = re.compile(
    r"(?P<op>\w+): opCount (?P<number>[0-9a-f]+) sendbuff \S+ recvbuff \S+ count (?P<count>\d+) "
    r"datatype (?P<dtype>\d+) op (?P<reduction>\d+) root (?P<root>\d+) comm (?P<comm>\w+) "
    r"\[nranks=(?P<size>\d+)\] stream [^\s]+(?: task \d+ globalrank (?P<rank>\d+))?"
)
_PART = re.compile(r"\w+: opCount")
_INIT = re.compile(
    r"comm (?P<comm>0x\w+) rank (?P<place>\d+) nranks (?P<size>\d+) cudaDev (?P<device>\d+)"
    r"(?:.* busId (?P<bus>\w+))?(?:.* parent (?P<parent>0x\w+)(?: \w+Count (?P<count>\d+))?"
    r" color (?P<color>-?\d+))?(?:.* commId (?P<id>0x\w+))?.* Init (?:START|COMPLETE)"
)
_CLOSED = re.compile(r"comm (?P<comm>0x\w+) rank .* Destroy COMPLETE")
#: The rank, as torchrun, srun --label and mpiexec --tag-output put it before a line.
_RANK = re.compile(r"\[rank(?P<torchrun>\d+)\]:|^\s*(?P<srun>\d+): |^\[\d+,(?P<mpi>\d+)\]<std")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?")

#: NCCL's numbers of types and reductions.
_DTYPES = (
    *(("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8)),
    *(("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2)),
    *(("float8_e4m3fn", 1), ("float8_e5m2", 1)),
)
_REDUCTIONS = "sum", "product", "max", "min", "avg"
_REDUCING = {Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER}
_ROOTED = {Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER}

#: Where a log has no times, the calls of a rank are so far apart [s].
STEP = 1e-3

#: A device of a process: what has a rank.
Lane = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Call:
    """A line of a call."""

    line: int  # among those of all files
    where: str
    time: float | None
    number: int  # opCount: how many launches of its communicator came before
    op: Op
    count: int
    dtype: int
    reduction: int
    root: int


@dataclass
class Comm:
    """A communicator of one process, and its calls."""

    lane: Lane
    size: int
    identity: str = ""  # equal for those that belong together; "" if that is not known
    place: int | None = None
    bus: str = ""
    first: int = 0
    closed: bool = False
    calls: list[Call] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """True if its calls are here from the first one on."""
        return self.place is not None or not self.calls or not self.calls[0].number

    @property
    def counted(self) -> bool:
        """True if its calls are numbered without a gap."""
        return all(c.number == self.calls[0].number + n for n, c in enumerate(self.calls))


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
    for identity, comms in _together(found.comms).items():
        absent = sorted({*range(comms[0].size)} - {c.place for c in comms if c.place is not None})
        if identity and absent:
            said += f"; {named(absent)} of a communicator of {comms[0].size} never began it"
    return said


def read(logs: Mapping[str, str]) -> tuple[list[Event], RunInfo]:
    """The events of a job, and what is known of it; of several in the logs, the latest.

    Args:
        logs: the texts, by the names of their files.
    """
    log = _Log(logs)
    comms, earlier = _latest(log.comms)
    guessed = _guess(comms)
    ranks, how = _ranks(comms, log)
    groups, members = _groups(comms, ranks)
    unmatched = _aligned(comms)
    events = [*_events(comms, ranks, groups, members, log.timed)]
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
        limits=_limits(log, ranks, how, size, earlier, unmatched, guessed),
        world_size=size if size == len(ranks) else 0,
    )
    return events, info


# -- lines -----------------------------------------------------------------------------------------


class _Log:
    """The communicators in some logs."""

    def __init__(self, logs: Mapping[Any, str]) -> None:
        self.comms: list[Comm] = []
        self.cut, self.torn = Counter[Lane](), 0
        #: The rank of each lane, as its lines begin; and the file that it is in.
        self.told: dict[Lane, int] = {}
        self.files: dict[Lane, str] = {}
        self._open: dict[tuple[str, str, str], Comm] = {}  # by process and address
        self._line = 0
        for name, text in logs.items():
            self._read(str(name), text)

    @property
    def timed(self) -> bool:
        """True if each call has a time."""
        return all(call.time is not None for comm in self.comms for call in comm.calls)

    def _read(self, name: str, text: str) -> None:
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            if "opCount" not in line and "comm 0x" not in line:
                continue  # nearly always
            self._line += 1
            before, is_nccl, said = line.rpartition(_SAID)
            process = _PROCESS.search(before) if is_nccl else None
            if process is None:
                self.torn += "opCount" in line and _PART.search(line) is not None
                continue
            lane = process["host"] or "", process["pid"] or name, process["device"]
            where = f"{name}:{number}"
            if (call := _CALL.match(said)) is not None:
                self._call(lane, call, where, before)
                self.files.setdefault(lane, name)
            elif _PART.match(said):
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
        if not identity and parent is not None and parent.identity:
            identity = f"{parent.identity} split {said['count']} {said['color']}"
        at = *process, said["comm"]
        known = self._open.get(at)
        if known is not None and known.identity == identity and identity:
            return  # START, then COMPLETE
        comm = Comm((*process, said["device"]), int(said["size"]), identity, int(said["place"]))
        comm.bus, comm.first = said["bus"] or "", self._line
        self._open[at] = comm
        self.comms.append(comm)

    def _call(self, lane: Lane, said: re.Match[str], where: str, before: str) -> None:
        op = op_of(said["op"])
        if op is None:
            return
        at = *lane[:2], said["comm"]
        if at not in self._open:
            self._open[at] = Comm(lane, int(said["size"]), first=self._line)
            self.comms.append(self._open[at])
        comm = self._open[at]
        if (rank := _rank_in(before, said)) is not None:
            self.told.setdefault(comm.lane, rank)
        numbers = (int(said[name]) for name in ("count", "dtype", "reduction", "root"))
        time = _time(before)
        comm.calls.append(Call(self._line, where, time, int(said["number"], 16), op, *numbers))


def _rank_in(before: str, said: re.Match[str]) -> int | None:
    prefix = _RANK.search(before)
    told = next(filter(None, prefix.groups()), None) if prefix else said["rank"]
    return int(told) if told is not None else None


def _time(before: str) -> float | None:
    """The time that a line begins with [s]."""
    said = _TIME.search(before)
    if said is None:
        return None
    whole = datetime.fromisoformat(f"{said[1]} {said[2]}").replace(tzinfo=timezone.utc)
    return whole.timestamp() + float(f"0.{said[3] or 0}")


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
    for identity, some in _together(comms).items():
        for lanes in [{c.lane for c in some}] if identity else [{c.lane} for c in some]:
            met = [job for job in jobs if not job.isdisjoint(lanes)]
            jobs = [job for job in jobs if job not in met] + [lanes.union(*met)]
    its = [[comm for comm in comms if comm.lane in job] for job in jobs]
    its.sort(key=lambda some: max(_last(comm) for comm in some), reverse=True)
    kept, places = list[Comm](), set[tuple[str, str]]()
    for some in its:
        here = {(comm.lane[0], comm.bus) for comm in some if comm.bus}
        if here.isdisjoint(places):
            kept += some
            places |= here
    return kept, sum(some[0] not in kept for some in its)


def _last(comm: Comm) -> tuple[float, int]:
    call = comm.calls[-1] if comm.calls else None
    return (call.time or 0.0, call.line) if call else (0.0, comm.first)


def _guess(comms: Sequence[Comm]) -> bool:
    """Where no line tells it: a communicator of as many ranks as there are, one on each, is one."""
    lanes = {comm.lane for comm in comms}
    alike = [comm for comm in comms if not comm.identity and comm.size == len(lanes)]
    is_one = len(alike) == len(lanes) == len({comm.lane for comm in alike})
    if is_one and all(comm.size <= len(lanes) for comm in comms):
        for comm in alike:
            comm.identity = "all"
        return True
    return False


def _ranks(comms: Sequence[Comm], log: _Log) -> tuple[dict[Lane, int], str]:
    """The rank of each lane, and by what it is known: a communicator of all, or else its lines."""
    lanes = sorted({comm.lane for comm in comms}, key=_order)
    for identity, some in _together(comms).items():
        found = {comm.lane: comm.place for comm in some if comm.place is not None}
        if identity and len(found) == len(lanes) == len({*found.values()}):
            return {lane: place for lane, place in found.items() if place is not None}, "world"
    told = {lane: log.told[lane] for lane in lanes if lane in log.told}
    if len(lanes) == len({*told.values()}) and max(told.values()) < MOST_RANKS:
        return told, "lines"
    files = {lane: log.files[lane] for lane in lanes if lane in log.files}
    if len(lanes) == len({*files.values()}) and (names := naming.ranks([*files.values()])):
        if sorted(names.values()) == [*range(len(lanes))]:  # else they are pids
            return {lane: names[file] for lane, file in files.items()}, "names"
    return {lane: rank for rank, lane in enumerate(lanes)}, "order"


def _order(lane: Lane) -> tuple[Any, ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in lane)


def _groups(
    comms: Sequence[Comm], ranks: Mapping[Lane, int]
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The name of each identity's group, and the ranks of each, as far as they are here."""
    names, members = dict[str, str](), dict[str, list[int]]()
    for identity, some in _together(comms).items():
        if not identity:
            continue
        is_of_all = {c.lane for c in some} == ranks.keys()
        is_world = is_of_all and all(c.place in (None, ranks[c.lane]) for c in some)
        name = WORLD if is_world and WORLD not in members else f"communicator {identity}"
        names[identity] = name
        known = {c.place: ranks[c.lane] for c in some if c.place is not None}
        here = [known[place] for place in sorted(known)] or sorted(ranks[c.lane] for c in some)
        members[name] = [*range(some[0].size)] if name == WORLD else here
    return names, members


def _aligned(comms: Sequence[Comm]) -> int:
    """Let the calls of each group begin together; how many calls cannot be put together so.

    A log that has not been kept from the start begins somewhere; numbers without a gap tell where.
    """
    lost = 0
    for identity, some in _together(comms).items():
        if identity and all(comm.begun for comm in some):
            continue
        if identity and all(comm.counted for comm in some):
            first = max(comm.calls[0].number for comm in some if comm.calls)
            for comm in some:
                comm.calls = [call for call in comm.calls if call.number >= first]
            continue
        for comm in some:
            comm.identity = ""
            lost += len(comm.calls)
    return lost


# -- events ----------------------------------------------------------------------------------------


def _events(
    comms: Sequence[Comm],
    ranks: Mapping[Lane, int],
    names: Mapping[str, str],
    members: Mapping[str, list[int]],
    timed: bool,
) -> Iterator[Event]:
    """Each call, and its end where that can be assumed: its other ranks have made it, too."""
    begun: dict[int, list[tuple[int, Comm, Call]]] = defaultdict(list)
    for comm in comms:
        begun[ranks[comm.lane]] += [(call.line, comm, call) for call in comm.calls]
    events: list[tuple[Event, Comm]] = []
    for rank, made in begun.items():
        for seq, (_, comm, call) in enumerate(sorted(made, key=lambda one: one[0])):
            time = call.time if timed and call.time is not None else seq * STEP
            group = names.get(comm.identity, f"rank {rank}, unknown group")
            events.append((_event(rank, seq, time, group, call, comm, members.get(group)), comm))
    met: dict[Any, list[float]] = defaultdict(list)
    keys = list(_keys(event for event, _ in events))
    for key, (event, _) in zip(keys, events, strict=True):
        met[key].append(event.time)
    for key, (event, comm) in zip(keys, events, strict=True):
        yield event
        needed = 2 if event.op in P2P else len(members.get(event.group, ()))
        if comm.closed or len(met[key]) == needed:
            yield replace(event, state=State.COMPLETED, time=max(met[key]) + STEP / 2)


def _event(
    rank: int, seq: int, time: float, group: str, call: Call, comm: Comm, ranks: list[int] | None
) -> Event:
    dtype, size = _DTYPES[call.dtype] if call.dtype < len(_DTYPES) else ("", 0)
    of = _REDUCTIONS[call.reduction] if call.reduction < len(_REDUCTIONS) else "custom"
    peer = call.root if call.op in P2P | _ROOTED else None
    if peer is not None and group != WORLD:
        peer = ranks[peer] if ranks and len(ranks) == comm.size and peer < comm.size else None
    return Event(
        rank=rank,
        seq=seq,
        op=call.op,
        state=State.STARTED,
        time=time,
        peer=peer,
        group=group,
        nbytes=size * call.count,
        shape=(call.count,),
        dtype=dtype,
        where=call.where,
        attributes={"reduction": of} if call.op in _REDUCING and of != "sum" else {},
    )


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
    how: str,
    size: int,
    earlier: int,
    unmatched: int,
    guessed: bool,
) -> dict[str, Limit]:
    """What these logs cannot tell, and what to do about it."""
    found: dict[str, Limit] = {}
    if guessed and how == "order":  # else these are known to be all ranks
        found["communicators"] = Limit(
            text="the log does not tell which communicators belong together: those of "
            f"{len(ranks)} ranks are taken for one",
            remedy="NCCL_DEBUG_SUBSYS=INIT,COLL tells it.",
        )
    times = "" if log.timed else " It has no times either: the calls of a rank are drawn in a row."
    found["completions"] = Limit(
        text="a log of NCCL has calls, and nothing of their ends: each is drawn until the "
        f"last of its ranks has made it, and whether it ended then is not known.{times}",
        remedy="The flight recorder notes what has ended, and on which lines: set "
        "TORCH_FR_BUFFER_SIZE=2000, and load its dumps.",
    )
    missing = [rank for rank in range(size) if rank not in ranks.values()]
    if missing or log.torn or unmatched:
        are = "are" if len(missing) > 1 else "is"
        why = [f"{named(missing)} of {size} {are} missing"] if missing else []
        why += [f"{log.torn} calls have lost the beginning of their line"] if log.torn else []
        why += [f"the communicator of {unmatched} calls is not known"] if unmatched else []
        found["matching"] = Limit(
            text=f"{' and '.join(why)}: whether the ranks' calls match is not judged.",
            remedy="Let each rank write a file of its own, from its start on: "
            "NCCL_DEBUG_SUBSYS=INIT,COLL NCCL_DEBUG_FILE=nccl.%h.%p.log",
            calls=log.torn,
        )
    if how == "order":
        lanes = sorted(ranks, key=lambda lane: ranks[lane])
        some = ", ".join(f"{ranks[lane]} is {lane[0]}:{lane[1]}" for lane in lanes[:4])
        found["ranks"] = Limit(
            text="of which rank each process is, the log does not tell: they are numbered by "
            f"host and pid ({some}{', …' * (len(lanes) > 4)}).",
            remedy="NCCL_DEBUG_SUBSYS=INIT,COLL tells it, as do `srun --label` and torchrun.",
        )
    if earlier:
        found["jobs"] = Limit(
            text=f"the log has {earlier + 1} jobs; this is the latest.",
            remedy="Give the part of one job to see that.",
        )
    return found
