"""Logs of NCCL: which rank is behind and in which call, and what a log cannot tell."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkit.diagnosis.findings import Finding
from distkit.errors import TraceFileError
from distkit.events import WORLD, Op
from distkit.trace.info import RankInfo
from distkit.trace.trace import Trace

FLOAT, LONG, BYTE = 7, 4, 1
REST = "sendbuff 0x7f5dd32b2100 recvbuff (nil)"


class Process:
    """A process of a job, and what NCCL writes of it."""

    def __init__(self, rank: int, host: str = "node07", pid: int = 0, device: int = -1) -> None:
        self.rank, self.host, self.pid = rank, host, pid or 4000 + rank
        self.device = rank if device < 0 else device
        self.gpu = f"cudaDev {self.device} nvmlDev {self.device} busId {self.device + 1}d000"
        self.prefix = ""

    def said(self, what: str) -> str:
        at = f"{self.host}:{self.pid}:{self.pid + 7} [{self.device}]"
        return f"{self.prefix}{at} NCCL INFO {what}"

    def comm(self, number: int = 0) -> str:
        """The address of a communicator, which another process may have, too."""
        return f"0x55bef02{number:02x}{self.rank % 2}70"

    def init(
        self, size: int, number: int = 0, place: int | None = None, *, of: str = "0xaf"
    ) -> str:
        place = self.rank if place is None else place
        return self.said(
            f"ncclCommInitRank comm {self.comm(number)} rank {place} nranks {size} "
            f"{self.gpu} commId {of} - Init START"
        )

    def call(
        self,
        name: str,
        count: int = 8,
        *,
        n: int = 0,
        size: int = 2,
        dtype: int = FLOAT,
        op: int = 0,
        root: int = 0,
        number: int = 0,
    ) -> str:
        return self.said(
            f"{name}: opCount {n:x} {REST} count {count} datatype {dtype} op {op} root {root} comm "
            f"{self.comm(number)} [nranks={size}] stream 0x55bef0208bd0"
        )


def processes(n: int) -> list[Process]:
    return [Process(rank) for rank in range(n)]


def load(folder: Path, *lines: str) -> Trace:
    file = folder / "job.out"
    file.write_text("\n".join([*lines, "done", ""]))
    return Trace.load(file)


def judged(trace: Trace) -> list[Finding]:
    return [f for f in trace.diagnose() if f.kind != "not_judged"]


def limits(trace: Trace) -> set[str]:
    """What is said not to be known, and that this is told."""
    told = {f.message for f in trace.diagnose() if f.kind == "not_judged"}
    assert all(any(limit.text in one for one in told) for limit in trace.info.limits.values())
    return {*trace.info.limits}


def steps(some: Iterable[Process], *names: str, size: int, start: int = 0) -> list[str]:
    """The same calls on each rank, one after the other."""
    some = [*some]
    return [p.call(name, n=start + n, size=size) for n, name in enumerate(names) for p in some]


# -- a rank is behind ------------------------------------------------------------------------------


def behind(trace: Trace) -> Finding:
    (finding,) = judged(trace)
    assert finding.kind == "behind" and not finding.hang
    return finding


def test_the_rank_that_is_behind_is_named_with_its_last_call(tmp_path: Path) -> None:
    four = processes(4)
    calls = steps(four, "AllReduce", "AllGather", size=4)
    more = steps([p for p in four if p.rank != 2], "ReduceScatter", size=4, start=2)
    trace = load(tmp_path, *(p.init(4) for p in four), *calls, *more)
    assert (trace.ranks, trace.info.groups) == ([0, 1, 2, 3], {WORLD: [0, 1, 2, 3]})
    finding = behind(trace)
    assert finding.culprits == finding.missing_ranks == (2,)
    assert finding.message == (
        "rank 2 is behind: its 2nd and last call is all_gather() of float32[8] at job.out:11, and "
        "ranks 0, 1 and 3 have gone on to reduce_scatter() of float32[8] at job.out:13."
    )
    assert "py-spy dump --pid 4002 on node07" in finding.remedy
    assert limits(trace) == {"completions"}


def test_a_message_that_nobody_received_names_the_receiver(tmp_path: Path) -> None:
    one, other = processes(2)
    inits = [one.init(2), other.init(2)]
    trace = load(
        tmp_path,
        *inits,
        *(one.call("Send", root=1, n=n) for n in range(2)),
        other.call("Recv", root=0),
    )
    (message, lost) = trace.messages
    assert (message.src, message.dst, message.nbytes) == (0, 1, 32)
    assert lost.received is None
    finding = behind(trace)
    assert finding.culprits == (1,)
    assert "it has not received what rank 0 has called send(dst=1) of float32[8]" in finding.message


# -- what the lines hold ---------------------------------------------------------------------------


def test_calls_have_their_facts(tmp_path: Path) -> None:
    two = processes(2)
    told = [
        ("AllReduce", dict(count=3, op=2)),
        ("Broadcast", dict(count=5, dtype=LONG, root=1)),
        ("ReduceScatter", dict(count=2, dtype=9, op=7)),
        ("AlltoAll", dict(count=6, dtype=BYTE)),
    ]
    calls = [p.call(name, n=n, **facts) for n, (name, facts) in enumerate(told) for p in two]
    trace = load(tmp_path, *(p.init(2) for p in two), *calls)
    mine = [s for s in trace.spans if s.rank == 0]
    assert [(str(s.op), s.nbytes, s.shape, s.dtype, s.peer, s.label) for s in mine] == [
        ("all_reduce", 12, (3,), "float32", None, "max"),
        ("broadcast", 40, (5,), "int64", 1, ""),
        ("reduce_scatter", 4, (2,), "bfloat16", None, "custom"),
        ("all_to_all", 6, (6,), "uint8", None, ""),
    ]
    assert trace.info.ranks[1] == RankInfo("rank 1", host="node07", pid="4001")
    assert len(trace.collectives) == 4


PREFIXES: dict[str, Callable[[int], str]] = {
    "torchrun": lambda rank: f"[rank{rank}]:",
    "tee": lambda rank: f"[default{rank}]:",
    "srun": lambda rank: f"{rank}: ",
    "mpiexec": lambda rank: f"[1,{rank}]<stderr>:",
    "ray": lambda rank: f"(RayTrainWorker pid={rank}, ip=10.72.7.6) ",
    "time": lambda rank: "[2026-05-13 18:01:41] ",
    "kubernetes": lambda rank: "2026-05-13T18:01:41.123456789Z worker-0: ",
    "docker": lambda rank: '{"log":"',
    "tqdm": lambda rank: f"step {rank}:  20%|##   | 1/5 [00:0{rank}<00:04, 1.0it/s]",
    "colour": lambda rank: f"\x1b[3{rank}m[rank{rank}]:\x1b[0m",
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("known", [True, False])
def test_what_launchers_put_before_a_line_is_no_obstacle(
    tmp_path: Path, prefix: str, known: bool
) -> None:
    two = [Process(0, pid=9), Process(1, pid=5)]
    for p in two:
        p.prefix = PREFIXES[prefix](p.rank)
    inits = [p.init(2) if known else p.init(1, place=0, of=f"0xa{p.rank}") for p in two]
    calls = steps(two, "AllReduce", size=2 if known else 1)
    trace = load(tmp_path, *inits, *calls, two[0].call("AllReduce", n=1))
    assert [trace.info.ranks[r].pid for r in range(2)] == (["9", "5"] if known else ["5", "9"])
    assert limits(trace) == ({"completions"} if known else {"completions", "ranks"})
    if known:
        assert behind(trace).culprits == (1,)


def test_communicators_that_were_split_have_their_own_ranks(tmp_path: Path) -> None:
    """From NCCL 2.23 on such a line has no commId; an address may be that of one before."""
    four = processes(4)
    splits = [
        p.said(
            f"ncclCommSplit comm {p.comm(1)} rank {p.rank // 2} nranks 2 {p.gpu} parent "
            f"{p.comm()} splitCount 1 color {77 + p.rank % 2} key 0- Init START"
        )
        for p in four
    ]
    calls = [p.call("Broadcast", root=1, number=1) for p in four]
    trace = load(tmp_path, *(p.init(4) for p in four), *splits, *calls)
    assert sorted(trace.info.groups.values()) == [[0, 1, 2, 3], [0, 2], [1, 3]]
    assert [(s.rank, s.peer) for s in sorted(trace.spans, key=lambda s: s.rank)] == [
        *((0, 2), (1, 3), (2, 2), (3, 3))
    ]
    assert len(trace.collectives) == 2


# -- calls that do not match -----------------------------------------------------------------------


DIFFERENT = ["AllReduce", "AllReduce"], ["AllReduce", "AllReduce"], ["AllGather", "AllGather"]


def test_different_calls_at_one_position_are_told(tmp_path: Path) -> None:
    three = processes(3)
    calls = [line for p in three for line in steps([p], *DIFFERENT[p.rank], size=3)]
    (finding,) = judged(load(tmp_path, *(p.init(3) for p in three), *calls))
    assert (finding.kind, finding.culprits) == ("different_collective", (2,))


def test_calls_without_the_beginning_of_their_communicator_are_refused(tmp_path: Path) -> None:
    """Subsystem COLL alone, which NCCL recommends, does not tell which belong together."""
    with pytest.raises(TraceFileError) as error:
        load(tmp_path, *steps(processes(3), "AllReduce", size=3))
    assert "3 calls on communicators whose beginning is not there" in str(error.value)
    assert "from the start of a job on with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL" in str(
        error.value
    )


# -- what would be a false verdict -----------------------------------------------------------------


def test_of_two_jobs_in_a_log_the_latest_is_shown(tmp_path: Path) -> None:
    """Both on the same GPUs; the first one hung."""
    first, second = processes(2), [Process(rank, pid=5000 + rank) for rank in range(2)]
    trace = load(
        tmp_path,
        *(p.init(2) for p in first),
        first[0].call("AllReduce"),
        *(p.init(2, of="0xb0") for p in second),
        *steps(second, "Broadcast", size=2),
    )
    assert [s.op for s in trace.spans] == [Op.BROADCAST] * 2
    assert judged(trace) == []
    assert trace.info.limits["jobs"].text == "the log has 2 jobs; this is the latest."


def test_threads_of_one_process_are_ranks_of_their_own(tmp_path: Path) -> None:
    two = [Process(rank, pid=77) for rank in range(2)]
    two[1].comm = lambda number=0: "0x55ffff000070"  # type: ignore[method-assign]
    trace = load(tmp_path, *(p.init(2) for p in two), *steps(two, "AllReduce", size=2))
    assert (trace.ranks, len(trace.collectives)) == ([0, 1], 1)


#: Communicators of four ranks: all of them, and two ways to make pairs.
COMMS = [[0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [1, 3]]


def program(calls: list[tuple[int, str, int]], rank: int) -> list[str]:
    """The lines of a rank in a program whose ranks make the same calls."""
    process, lines, made = Process(rank), list[str](), dict[int, int]()
    for number, (comm, name, count) in enumerate(calls):
        members = COMMS[comm]
        if rank not in members:
            continue
        place, of = members.index(rank), {"size": len(members), "number": comm}
        if comm not in made:
            lines.append(process.init(len(members), comm, place, of=f"0xc{comm}"))
        n = made[comm] = made.get(comm, -1) + 1
        if name == "message":
            sends = place == number % 2
            lines.append(
                process.call("Send" if sends else "Recv", count, root=1 - place, n=n, **of)
            )
        else:
            lines.append(process.call(name, count, n=n, **of))
    return lines


CALLS = st.one_of(
    st.tuples(st.integers(0, 4), st.sampled_from(["AllReduce", "Broadcast"]), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.just("message"), st.integers(1, 9)),
)


@given(st.lists(CALLS, min_size=1, max_size=12), st.data())
def test_of_a_right_program_no_part_of_a_log_says_that_it_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    """Wherever the log of each rank begins and ends, and however they are mixed."""
    parts = []
    for rank in range(4):
        lines = program(calls, rank)
        first = data.draw(st.sampled_from([0, 0, data.draw(st.integers(0, len(lines)))]))
        parts.append(lines[first : data.draw(st.integers(first, len(lines)))])
    turns = data.draw(st.permutations([r for r, lines in enumerate(parts) for _ in lines]))
    left = [iter(lines) for lines in parts]
    mixed = [next(left[rank]) for rank in turns]
    file = tmp_path_factory.getbasetemp() / "right.log"
    file.write_text("\n".join([*mixed, ""]))
    if not any("opCount" in line for line in mixed):
        return
    try:
        trace = Trace.load(file)
    except TraceFileError as error:
        assert "nothing that could be shown" in str(error)
        return
    host = {r: int(about.pid) - 4000 for r, about in trace.info.ranks.items()}
    for finding in judged(trace):
        assert finding.kind == "behind"
        assert all(len(parts[host[r]]) < len(program(calls, host[r])) for r in finding.culprits)


@given(st.lists(CALLS, min_size=1, max_size=6), st.data())
def test_blocks_of_a_shared_pipe_give_no_false_verdict(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    """Each process writes blocks, which end anywhere in a line."""
    blocks = []
    for rank in range(4):
        text = "\n".join([*program(calls, rank), ""])
        at = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)) | {0, len(text)})
        blocks.append([text[a:b] for a, b in pairwise(at)])
    turns = data.draw(st.permutations([r for r, some in enumerate(blocks) for _ in some]))
    left = [iter(some) for some in blocks]
    file = tmp_path_factory.getbasetemp() / "blocks.log"
    file.write_text("".join(next(left[rank]) for rank in turns))
    with suppress(TraceFileError):
        assert judged(Trace.load(file)) == []


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [lambda text: text.encode(), lambda t: gzip.compress(t.encode())])
@pytest.mark.parametrize("first", ["", "[W513 NCCLUtils.cpp] hello\n", "{not json\n", "\ufeff"])
def test_a_log_is_known_by_its_lines(
    tmp_path: Path, pack: Callable[[str], bytes], first: str
) -> None:
    two = processes(2)
    lines = [*(p.init(2) for p in two), *steps(two, "AllReduce", size=2)]
    file = tmp_path / "slurm-81.out"
    file.write_bytes(pack(first + "\n".join(lines)))
    assert len(Trace.load(file).collectives) == 1


def test_lines_are_named_by_their_file(tmp_path: Path) -> None:
    for p in (Process(0, pid=9), Process(1, pid=5)):
        text = "\n".join([p.init(2), *steps([p], *["AllReduce"] * (2 - p.rank), size=2)])
        tmp_path.joinpath(f"train.rank{p.rank}.log").write_text(text)
    trace = Trace.load(tmp_path)
    assert [trace.info.ranks[r].pid for r in range(2)] == ["9", "5"]
    assert behind(trace).culprits == (1,)
    assert re.search(r"at train\.rank1\.log:2", behind(trace).message)


def test_a_log_without_calls_says_what_to_set_and_who_never_began(tmp_path: Path) -> None:
    """NCCL_DEBUG=INFO alone writes no calls."""
    three = processes(4)[:3]
    with pytest.raises(TraceFileError) as error:
        load(tmp_path, *(p.init(4) for p in three))
    said = str(error.value)
    assert "3 lines of NCCL, which name 3 ranks; rank 3 of a communicator of 4 never began" in said
    assert "NCCL_DEBUG_SUBSYS=INIT,COLL" in said


LINES = [
    line
    for p in processes(2)
    for line in (p.init(2), *steps([p], "AllReduce", "Broadcast", size=2), p.call("Send", root=1))
]


@given(st.data())
def test_no_damage_is_worse_than_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = "\n".join(data.draw(st.permutations(LINES)))
    at = data.draw(st.integers(0, len(text)))
    noise = data.draw(
        st.sampled_from(["", "\n", " 99999999999999999999", "0x", "[9]", "NCCL INFO "])
    )
    file = tmp_path_factory.getbasetemp() / "damaged.log"
    file.write_text(text[:at] + noise + text[data.draw(st.integers(at, len(text))) :])
    try:
        Trace.load(file).diagnose()
    except TraceFileError as error:
        assert str(file) in str(error)
