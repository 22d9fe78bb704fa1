"""The correct answers to the concept checks, computed from their runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import pytest

from distkit._format import human_bytes, human_seconds
from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.events import Op, Span
from distkit.trace.info import clock_error, hosts_of
from distkit.trace.trace import Trace
from distkit_course.content.runs import MIB, RUNS, two_hosts
from distkit_course.quizzes import QUIZZES
from distkit_parallel import PIPELINES, idle
from distkit_simulation import cost
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import simulate

#: The answers to a lesson's questions, in order.
Answers = tuple[object, ...]
ORDINALS = ("the first", "the second", "the third")


def calls(trace: Trace, op: Op, rank: int | None = None) -> list[Span]:
    return [s for s in trace.spans if s.op is op and rank in (None, s.rank)]


def work(trace: Trace, label: str = "") -> list[Span]:
    marks = [s for s in calls(trace, Op.MARK) if s.label.startswith(label)]
    return sorted(marks, key=lambda span: span.start)


def seconds(spans: list[Span]) -> float:
    return sum(s.seconds or 0.0 for s in spans)


def waiting_seconds(trace: Trace, rank: int) -> float:
    """Return the seconds that a rank spends in communication calls."""
    return seconds([s for s in trace.spans if s.rank == rank and s.op is not Op.MARK])


def updates(trace: Trace, worker: int | None = None) -> list[Span]:
    all_updates = [s for s in trace.spans if "version" in s.attributes]
    return [s for s in all_updates if worker is None or worker in s.attributes["workers"]]


def slowest(trace: Trace) -> int:
    return max(work(trace), key=lambda span: span.seconds or 0.0).rank


def stuck_ranks(trace: Trace) -> list[int]:
    return sorted({s.rank for s in trace.spans if s.end is None})


def ranks(numbers: Any) -> str:
    *first, last = map(str, sorted(numbers))
    return f"ranks {', '.join(first)} and {last}"


def welcome(trace: Trace) -> Answers:
    marks = work(trace)
    first = min(calls(trace, Op.RECV, marks[-1].rank), key=lambda s: s.end or 0)
    return (
        f"rank {marks[0].rank}",
        len(trace.messages),
        max(sum(m.start <= other.start < (m.end or 0) for m in marks) for other in marks),
        f"rank {max(trace.ranks, key=lambda rank: waiting_seconds(trace, rank))}",
        f"rank {first.peer}'s",
    )


def messages(trace: Trace) -> Answers:
    first, second = calls(trace, Op.SEND, 0)
    return (
        f"rank {first.peer}",
        human_seconds(first.seconds or 0.0),
        "the receiver" if calls(trace, Op.RECV, 2)[0].start < second.start else "the sender",
        sum(m.received is not None for m in trace.messages),
        f"{ranks(stuck_ranks(trace))} wait for each other",
    )


def ring(trace: Trace) -> Answers:
    sent = calls(trace, Op.SEND, 0)
    return (
        len(sent),
        sent[0].nbytes,
        len({s.peer for s in sent}),
        f"{sum(s.nbytes for s in sent):,}",
        sum(bool(t.reduce) for t in ALL_REDUCES["ring"].schedule(6)),
    )


def all_reduce(trace: Trace) -> Answers:
    link, sent = Network(Link(alpha=2e-4, beta=1e-6)), calls(trace, Op.SEND, 0)
    titles = {"ring": "the ring", "halving_doubling": "halving and doubling", "tree": "the tree"}
    same = [
        title
        for name, title in titles.items()
        if [(s.peer, s.nbytes) for s in calls(simulate(name, 8, 1024, link), Op.SEND, 0)]
        == [(s.peer, s.nbytes) for s in sent]
    ]
    peers, nbytes = {s.peer for s in sent}, [s.nbytes for s in sent]
    return len(sent), nbytes[0], len(peers), f"{sum(nbytes):,}", *same


def sync_sgd(trace: Trace) -> Answers:
    steps = len(work(trace, "update")) // 4
    backward = [s.seconds or 0.0 for s in work(trace, "backward")]
    late = min(trace.ranks, key=lambda rank: waiting_seconds(trace, rank))
    return (
        steps,
        len(trace.collectives) // steps,
        f"rank {late}",
        ORDINALS[backward.index(max(backward)) // 4],
        human_seconds(round(waiting_seconds(trace, 0) - waiting_seconds(trace, late), 9)),
    )


def parameter_server(trace: Trace) -> Answers:
    count, slow = len(updates(trace)), slowest(trace)
    (late,) = updates(trace, slow)[0].attributes["stale_by"]
    return f"worker {slow}", late, f"v{count}", count // 3, count - len(updates(trace, slow))


def hangs(trace: Trace) -> Answers:
    sums = calls(trace, Op.ALL_REDUCE)
    late = max((s for s in sums if s.end is not None), key=lambda s: s.start).rank
    (absent,) = {*trace.ranks} - {s.rank for s in sums if s.end is None}
    found = trace.diagnose()[0]
    return (
        f"rank {late}",
        f"rank {absent}",
        ranks(found.culprits),
        len(found.waiting),
        {"cycle": "rank 0 sends before its second `all_reduce`"}[found.kind],
    )


def cost_models(trace: Trace) -> Answers:
    sent = calls(trace, Op.SEND, 0)
    times = {s.nbytes: s.seconds or 0.0 for s in sent}
    beta = (times[4 * MIB] - times[MIB]) / (3 * MIB)
    link = Link(times[MIB] - beta * MIB, beta)
    return (
        human_seconds(link.alpha),
        human_seconds(float(link.seconds(8 * MIB))),
        f"{link.alpha / beta / MIB:.3g} MiB",
        human_seconds(seconds(sent[-4:]) - times[4 * MIB]),
        human_seconds(float(cost.ring(4, 4 * MIB, link))),
    )


def simulation(trace: Trace) -> Answers:
    def pairs(run: Trace) -> list[tuple[int, int]]:
        return [(m.src, m.dst) for m in run.messages]

    def transfer(rank: int) -> float:
        """Return the time of the rank's longest transfer, from the arrival of both ranks [s]."""
        begins = {(s.rank, s.seq): s.start for s in trace.spans}
        return max(
            (m.received or 0.0) - max(begins[m.send], begins[m.recv])
            for m in trace.messages
            if rank in (m.src, m.dst) and m.send and m.recv
        )

    titles = {"ring": "the ring", "tree": "the tree", "hierarchical": "the hierarchical one"}
    crossing = [(a, b) for a, b in pairs(trace) if a // 3 != b // 3]
    leaders = {rank for pair in crossing for rank in pair}
    slow = max({*trace.ranks} - leaders, key=transfer)
    ends, normal = ({s.rank: s.end or 0.0 for s in t.spans} for t in (trace, two_hosts(slow=1.0)))
    return (
        *(title for name, title in titles.items() if pairs(two_hosts(name)) == pairs(trace)),
        ranks(leaders),
        len(crossing),
        f"rank {slow}",
        sum(ends[rank] > normal[rank] for rank in ends if rank != slow),
    )


def when_it_pays(trace: Trace) -> Answers:
    compute, sync = seconds(calls(trace, Op.MARK, 0)), waiting_seconds(trace, 0)
    return (
        human_seconds(compute),
        human_seconds(sync),
        human_seconds(4 * compute),
        round(cost.break_even(compute, sync)),
        f"{cost.speedup(4, 2 * compute, sync):.3g}",
    )


def pipelines(trace: Trace) -> Answers:
    work = {rank: [s.label for s in calls(trace, Op.MARK, rank)] for rank in trace.ranks}
    alive = [sum(1 if x[0] == "F" else -1 for x in work[3][:n]) for n in range(len(work[3]) + 1)]
    backward = min((s for s in trace.spans if s.label == "B0"), key=lambda s: s.start)
    shares = {1 / 4: "a quarter", 1 / 3: "a third", 1 / 2: "half", 2 / 3: "two thirds"}
    titles = {"gpipe": "GPipe", "1f1b": "1F1B", "zero_bubble": "zero bubble"}
    orders = {
        title: [f"{a.kind}{a.microbatch}" for a in PIPELINES[name].orders(4, 6)[0]]
        for name, title in titles.items()
    }
    return (
        len(work[0]) // 2,
        f"rank {backward.rank}",
        *(name for share, name in shares.items() if idle(trace)[0] == pytest.approx(share)),
        *(title for title, order in orders.items() if order == work[0]),
        max(alive),
    )


def equality(trace: Trace) -> Answers:
    batches = Counter(s.rank for s in work(trace))
    gradients = [s.nbytes for s in calls(trace, Op.ALL_REDUCE, 2) if s.nbytes > 4]
    at_the_end = sum(n == max(batches.values()) for n in batches.values())
    return (
        f"rank {max(batches, key=lambda rank: batches[rank])}",
        min(batches.values()),
        len(gradients) - batches[2],
        human_bytes(gradients[0]),
        {1: "a third", 2: "two thirds", 3: "all"}[at_the_end] + " of it",
    )


def model_parallelism(trace: Trace) -> Answers:
    gathers, scatters = (calls(trace, op, 0) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER))
    sizes = [s.nbytes for s in gathers[: len(scatters)]]
    return (
        {0: "DDP", 1: "ZeRO, stage 2", 2: "FSDP"}[len(gathers) // len(scatters)],
        len(scatters),
        ORDINALS[sizes.index(max(sizes))],
        f"rank {slowest(trace)}",
        human_bytes(sum(sizes) // 4),
    )


def strategies(trace: Trace) -> Answers:
    ops = {span.op for span in trace.spans}
    titles = {
        Op.REDUCE_SCATTER: "FullyShardedStrategy",
        Op.ALL_REDUCE: "MirroredStrategy",
        Op.REDUCE: "CentralStorageStrategy",
        Op.PUSH: "ParameterServerStrategy",
    }
    changed = work(trace, "update")
    at = changed[0].start
    (meanwhile,) = {s.op for s in trace.spans if s.rank in (1, 2) and s.start <= at < (s.end or at)}
    starts = [s.start for s in calls(trace, Op.MARK, 1)]  # of the steps
    reduced = {sum(start < s.start for start in starts) for s in calls(trace, Op.REDUCE, 1)}
    return (
        *(title for op, title in titles.items() if op in ops),
        f"rank {changed[0].rank}",
        f"they wait in `{meanwhile}`",
        len(changed),
        *(ordinal for n, ordinal in enumerate(ORDINALS, 1) if n not in reduced),
    )


def staleness(trace: Trace) -> Answers:
    def pushed(worker: int, at: float) -> int:
        return sum((s.end or at) <= at for s in calls(trace, Op.PUSH, worker))

    slow = slowest(trace)
    counts = [(s.rank, [pushed(w, s.start) for w in range(3)]) for s in work(trace, "step")]
    gaps = [b.start - (a.end or 0.0) for a, b in pairwise(calls(trace, Op.MARK, 0))]
    over = max(s.end or 0.0 for w in range(3) if w != slow for s in calls(trace, Op.PUSH, w))
    return (
        f"worker {slow}",
        f"step {gaps.index(max(gaps)) + 1}",
        max(count[worker] - min(count) for worker, count in counts),
        updates(trace, slow)[1].attributes["stale_by"][0],
        len(calls(trace, Op.PUSH, slow)) - pushed(slow, over),
    )


def crashes(trace: Trace) -> Answers:
    (dead,) = (rank for rank, end in trace.info.ends.items() if end.how == "died")
    pushes, used, all_updates = calls(trace, Op.PUSH, dead), updates(trace, dead), updates(trace)
    last = all_updates[-1].attributes["workers"]
    # no gradient was lost, and the others continued
    assert len(used) == len(pushes) < len(all_updates)
    return (
        len(pushes),
        f"it is in the update to v{used[-1].attributes['version']}",
        len(last),
        "replace" if dead in last else "continue",
        sum(3 - len(u.attributes["workers"]) for u in all_updates),
    )


def many_machines(trace: Trace) -> Answers:
    hosts = hosts_of(trace.info)
    sends = [s for s in calls(trace, Op.SEND) if hosts[s.rank] != hosts[s.peer or 0]]
    quickest = {
        host: min(s.seconds or 0.0 for s in sends if host in (hosts[s.rank], hosts[s.peer or 0]))
        for host in hosts.values()
    }
    return (
        ranks({*trace.ranks} - {s.rank for s in sends}),
        len(sends),
        human_bytes(sum(s.nbytes for s in sends if hosts[s.rank] == "delta")),
        max(quickest, key=lambda name: quickest[name]),
        human_seconds(clock_error(trace.info) or 0.0),
    )


def devices(trace: Trace) -> Answers:
    steps = [[s.label for s in calls(trace, Op.MARK, worker)] for worker in range(2)]
    pushed = {calls(trace, Op.PUSH, worker)[0].nbytes: worker for worker in range(2)}
    return (
        "on a device" if steps[0].index("add") < steps[0].index("copy") else "on the host",
        steps[1].count("copy"),
        f"worker {pushed[min(pushed)]}",
        max(pushed) // min(pushed),
        *("the server" for rank in {s.rank for s in work(trace, "update")} if rank == 2),
    )


def gpu_ranks(trace: Trace) -> Answers:
    call, load, item = (
        next(s for s in calls(trace, Op.MARK, 0) if s.label == label)
        for label in ("all_reduce", "load", "x[0].item()")
    )
    on_gpu = calls(trace, Op.ALL_REDUCE, 2)[0]
    assert call.end == load.start and load.end < on_gpu.end  # all of it overlaps
    return (
        "NCCL"
        if len({r.device for r in trace.info.ranks.values() if r.device}) == 2
        else "gloo, through host memory",
        human_seconds(call.seconds or 0.0),
        human_seconds(on_gpu.seconds or 0.0),
        item.label if item.start < on_gpu.end < item.end else "",
        human_seconds(load.seconds or 0.0),
    )


def job(trace: Trace) -> Answers:
    def seconds(rank: int, kind: str) -> list[float]:
        return [s.seconds or 0.0 for s in calls(trace, Op.MARK, rank) if s.label[0] == kind]

    def kept(rank: int) -> int:
        steps = [{"F": 1, "B": -1}.get(s.label[0], 0) for s in calls(trace, Op.MARK, rank)]
        return max(accumulate(steps))

    ends = {rank: calls(trace, Op.ALL_REDUCE, rank)[0].end for rank in trace.ranks}
    return (
        len(trace.ranks),
        len(seconds(0, "F")),
        round(median(seconds(0, "B")) / median(seconds(0, "F"))),
        f"stage {min(ends, key=lambda rank: ends[rank])}",
        f"stage {max(trace.ranks, key=kept)}",
    )


def compiled(trace: Trace) -> Answers:
    *_, second = work(trace, "compile")
    (eager,) = {*trace.ranks} - {second.rank}
    mine, others = (calls(trace, Op.ALL_REDUCE, rank) for rank in (second.rank, eager))
    during = {
        s.op for s in trace.spans if s.rank == eager and s.start <= second.start < (s.end or 0)
    }
    waits = [theirs.start > own.start for own, theirs in zip(mine, others, strict=True)]
    return (
        f"rank {second.rank}",
        ("none", "one", "two", "three")[len({s.label for s in work(trace, "graph")}) - 1],
        *(f"it waits in `{op}`" for op in during),
        human_seconds(round(others[-1].start - mine[-1].start, 9)),
        "not at all" if all(waits[1:]) else "8 ms",
    )


def coordinator(trace: Trace) -> Answers:
    functions = work(trace, "function")
    slow = slowest(trace)
    (coordinator,) = {0, 1, 2} - {s.rank for s in functions}
    first = min(s.end or 0.0 for s in functions if s.rank == slow)
    (twice,) = (label for label, n in Counter(s.label for s in functions).items() if n == 2)
    return (
        f"worker {coordinator}",
        sum((s.end or 0.0) <= first for s in functions if s.rank != slow),
        twice,
        len(calls(trace, Op.PUSH)),
        len(updates(trace)),
    )


def bring_your_own(trace: Trace) -> Answers:
    moved = Counter[str]()
    for s in trace.spans:
        moved[s.where] += s.nbytes * (s.op is not Op.MARK)
    (line,) = {s.where for s in trace.spans if s.end is None}
    by_bytes = [where for where, _ in moved.most_common() if where]
    return (
        by_bytes[0],
        by_bytes[-1],
        f"rank {min(stuck_ranks(trace), key=lambda rank: waiting_seconds(trace, rank))}",
        f"rank {min(trace.ranks, key=lambda r: len(calls(trace, Op.MARK, r)))}",
        line,
    )


COMPUTED: dict[str, Callable[[Trace], Answers]] = {
    "00_welcome": welcome,
    "01_messages": messages,
    "02_all_reduce": ring,
    "03_sync_sgd": sync_sgd,
    "04_when_it_hangs": hangs,
    "05_parameter_server": parameter_server,
    "06_cost_models": cost_models,
    "07_when_does_it_pay": when_it_pays,
    "08_pipelines": pipelines,
    "09_sharded_and_tensor_parallel": model_parallelism,
    "10_many_machines": many_machines,
    "11_bring_your_own": bring_your_own,
    "12_more_all_reduces": all_reduce,
    "13_when_equality_ends": equality,
    "14_waiting_less": staleness,
    "15_surviving_crashes": crashes,
    "16_strategies": strategies,
    "17_scale_by_simulation": simulation,
    "18_devices_and_compression": devices,
    "19_gpu_ranks": gpu_ranks,
    "20_ten_thousand_gpus": job,
    "21_eager_and_compiled": compiled,
    "22_coordinator": coordinator,
}


@pytest.mark.parametrize("lesson", QUIZZES)
def test_correct_answers_match_the_run(lesson: str) -> None:
    computed = COMPUTED[lesson](RUNS[lesson]())
    assert [str(answer) for answer in computed] == [
        question.answer for question in QUIZZES[lesson].questions
    ]
