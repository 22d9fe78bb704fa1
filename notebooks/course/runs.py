"""The runs of the concept checks, written operation by operation or simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from distkit.events import Op, State
from distkit.trace.info import ClockOffset, Consistency, RankEnd, RankInfo, Replacement
from distkit.trace.trace import Trace
from distkit_parallel import Layout, Transformer
from distkit_simulation.job import H100, Job
from distkit_simulation.network import Link, Network
from distkit_simulation.parameter_servers import parameter_server
from distkit_simulation.simulator import Stragglers, Writer, finish_times, simulate
from distkit_simulation.training import pipeline

MS, MIB = 1e-3, 2**20

#: The op, rank, begin [ms], end [ms] and event fields of an operation.
Operation = tuple[Op, int, float, float, dict[str, Any]]


def script(n: int, name: str, *operations: Operation) -> Trace:
    """Return a trace of ``n`` ranks; an operation with an infinite end never returns."""
    writer = Writer(n)
    for op, rank, begin, end, fields in operations:
        writer.add_operation(op, rank, begin * MS, end * MS, **fields)
    return writer.trace(
        name,
        backend="drawn",
        simulated=False,
        ranks={r: RankInfo(f"rank {r}", "rank") for r in range(n)},  # without devices
    )


def with_info(trace: Trace, **fields: Any) -> Trace:
    """Return the trace with some fields of its info replaced, such as its name."""
    return Trace(trace.events, structs.replace(trace.info, **fields))


def mark(rank: int, begin: float, end: float, label: str, **fields: Any) -> Operation:
    """Return a marked computation on a rank."""
    return Op.MARK, rank, begin, end, {"attributes": {"label": label}, **fields}


def _message(
    op: Op, rank: int, begin: float, end: float, peer: int, nbytes: int = 256, **fields: Any
) -> Operation:
    message = {
        "peer": peer,
        "nbytes": nbytes,
        "shape": (nbytes // 4,),
        "dtype": "float32",
        "tag": 0,
    }
    return op, rank, begin, end, {**message, **fields}


send, recv = partial(_message, Op.SEND), partial(_message, Op.RECV)


def collective(
    op: Op, rank: int, begin: float, end: float, nbytes: int, dtype: str = "float32", **fields: Any
) -> Operation:
    """Return a rank's call of a collective."""
    shape = (nbytes // (8 if dtype == "float64" else 4),)
    return op, rank, begin, end, {"nbytes": nbytes, "shape": shape, "dtype": dtype, **fields}


all_reduce = partial(collective, Op.ALL_REDUCE)


def fork_and_join() -> Trace:
    """Rank 2 computes and sends work to two ranks; rank 1 combines their results."""
    return script(
        4,
        "fork and join",
        mark(2, 0, 10, "work"),
        send(2, 10, 11, 0),
        send(2, 11, 12, 3),
        recv(0, 0, 11, 2),
        recv(3, 0, 12, 2),
        mark(0, 11, 31, "work"),
        mark(3, 12, 22, "work"),
        recv(1, 0, 32, 0),
        send(0, 31, 32, 1),
        send(3, 22, 33, 1),
        recv(1, 32, 33, 3),
        mark(1, 33, 43, "work"),
    )


def two_messages_and_a_deadlock() -> Trace:
    """Two messages, and two ranks that wait for each other at the end."""
    return script(
        3,
        "three ranks",
        send(0, 2, 32, 1, 1024),
        mark(1, 0, 30, "busy"),
        recv(1, 30, 32, 0, 1024),
        recv(2, 0, 54, 0, 64),
        mark(0, 32, 52, "busy"),
        send(0, 52, 54, 2, 64),
        recv(1, 32, math.inf, 2),
        recv(2, 54, math.inf, 1),
    )


def six_in_a_ring() -> Trace:
    """A ring of six ranks."""
    return with_info(
        simulate("ring", 6, 1536, Network(Link(alpha=2e-4, beta=1e-6))),
        name="all-reduce of 1.5 KiB",
    )


def halving_and_doubling() -> Trace:
    """Halving and doubling on eight ranks."""
    trace = simulate("halving_doubling", 8, 1024, Network(Link(alpha=2e-4, beta=1e-6)))
    return with_info(trace, name="all-reduce of 1 KiB")


def three_steps() -> Trace:
    """Three steps of four ranks, each with two all-reduces; one rank is late in one step."""
    operations, at = list[Operation](), 0.0
    for step in range(3):
        ready = at + 10 + 12 * (step == 1)  # when the last rank starts its all-reduce
        for rank in range(4):
            end = ready if rank == 2 else at + 10
            operations += [mark(rank, at, at + 4, "forward"), mark(rank, at + 4, end, "backward")]
            operations += [all_reduce(rank, end, ready + 1, 5120)]
        operations += [all_reduce(rank, ready + 1, ready + 3, 33_000) for rank in range(4)]
        operations += [mark(rank, ready + 3, ready + 4, "update") for rank in range(4)]
        at = ready + 4
    return script(4, "three steps", *operations)


def unequal_workers() -> Trace:
    """Three workers, one of them slow, train one key asynchronously."""
    slow = Stragglers(slow={2: 3.0})
    link, unbounded = Link(alpha=1e-3, beta=1e-7), math.inf
    trace = parameter_server(
        3, [4096], 1, link, 10 * MS, steps=3, staleness=unbounded, stragglers=slow
    ).trace
    events = [
        replace(e, attributes={**e.attributes, "key": "w"}) if "key" in e.attributes else e
        for e in trace.events
    ]
    return with_info(Trace(events, trace.info), name="three workers")


def joined_ranks() -> Trace:
    """Three ranks under Join, with two, four and one batches."""
    batches, operations, now = (2, 4, 1), list[Operation](), 0
    for step in range(max(batches)):
        for rank, count in enumerate(batches):
            begin = now + 8 * (step < count)
            if step < count:
                operations.append(mark(rank, now, begin, f"batch {step}"))
            operations.append(all_reduce(rank, begin, now + 9, 4))
            operations.append(all_reduce(rank, now + 9, now + 11, 4096))
        now += 11
    operations += [all_reduce(rank, now, now + 1, 4) for rank in range(3)]
    return script(3, "one epoch", *operations)


def message_after_the_sum() -> Trace:
    """Rank 1 waits for a message that rank 0 would send only after an all-reduce of all ranks."""
    trace = script(
        4,
        "two batches",
        *(mark(r, 0, 5, "batch") for r in range(3)),
        mark(3, 0, 17, "batch"),
        *(all_reduce(r, 5, 19, 4096) for r in range(3)),
        all_reduce(3, 17, 19, 4096),
        recv(1, 19, math.inf, 0),
        *(mark(r, 19, 24, "batch") for r in (0, 2, 3)),
        *(all_reduce(r, 24, math.inf, 4096) for r in (0, 2, 3)),
    )
    open_calls = {(s.rank, s.seq) for s in trace.spans if s.end is None}
    blocked = [
        replace(e, state=State.BLOCKED, time=e.time + MS)
        for e in trace.events
        if (e.rank, e.seq) in open_calls
    ]
    return with_info(Trace([*trace.events, *blocked], trace.info), until=32 * MS)


def four_mebibytes_twice() -> Trace:
    """Messages of 1, 2 and 4 MiB, then 4 MiB in four messages."""
    bars = [(0, 3, 1), (4, 8, 2), (9, 15, 4), *((18 + 3 * i, 21 + 3 * i, 1) for i in range(4))]
    sends = [send(0, begin, end, 1, size * MIB) for begin, end, size in bars]
    return script(
        2,
        "seven messages",
        *sends,
        *(recv(1, begin, end, 0, size * MIB) for begin, end, size in bars),
    )


def two_hosts(algorithm: str = "hierarchical", slow: float = 3.0) -> Trace:
    """Six ranks on two hosts with a slow network between them, and one slow rank."""
    size = 12 * MIB
    network = Network.hosts(2, 3, Link(0.0, 1.25 * MS / size), Link(1 * MS, 3 * MS / size))
    options = {"devices_per_host": 3} if algorithm == "hierarchical" else {}
    return with_info(
        simulate(algorithm, 6, size, network, stragglers=Stragglers(slow={4: slow}), **options),
        name="all-reduce of 12 MiB",
    )


def one_step() -> Trace:
    """A step of four ranks, with one bucket of gradients: nothing overlaps."""
    writer, size = Writer(4), 4 * MIB
    begin = np.zeros(4)
    end = begin + 5 * MS + finish_times("ring", 4, size, Network(Link(MS, MS / MIB)))
    writer.add_operations(Op.MARK, begin, begin + 2 * MS, attributes={"label": "forward"})
    writer.add_operations(Op.MARK, begin + 2 * MS, begin + 5 * MS, attributes={"label": "backward"})
    tensor = {"nbytes": size, "shape": (size // 4,), "dtype": "float32"}
    writer.add_operations(
        Op.ALL_REDUCE, begin + 5 * MS, end, attributes={"gradients": True}, **tensor
    )
    writer.add_operations(Op.MARK, end, end + MS, attributes={"label": "update"})
    return with_info(writer.trace("data parallel"), name="a step of training")


def all_forward_first() -> Trace:
    """A pipeline of four stages and six micro-batches."""
    return with_info(
        pipeline(4, 6, 4 * MS, 8 * MS, 2048, Network(Link(0, 0)), order="gpipe"), name="one step"
    )


def sharded_step() -> Trace:
    """A step under FSDP: the second of three layers is the largest, and rank 2 is slow."""
    operations, now = list[Operation](), [0.0] * 4

    def communicate(op: Op, mib: int) -> None:
        end = max(now) + mib
        operations.extend(collective(op, rank, now[rank], end, mib * MIB) for rank in range(4))
        now[:] = [end] * 4

    def compute(label: str, ms: float) -> None:
        for rank, begin in enumerate(now):
            now[rank] = begin + ms * (1.5 if rank == 2 else 1)
            operations.append(mark(rank, begin, now[rank], label))

    layers = (1, 4, 1)
    for mib in layers:
        communicate(Op.ALL_GATHER, mib)
        compute("forward", 2 * mib)
    for mib in reversed(layers):
        communicate(Op.ALL_GATHER, mib)
        compute("backward", 4 * mib)
        communicate(Op.REDUCE_SCATTER, mib)
    compute("update", 1)
    return script(4, "one step", *operations)


def central_steps() -> Trace:
    """Steps of three replicas with the variables on rank 0; one rank fails in the second step."""
    operations, at = list[Operation](), 0.0
    call = partial(collective, dtype="float64")
    for step in range(3):
        for rank in range(3):
            ready = at + 4 + rank
            operations.append(mark(rank, at, ready, "gradients"))
            operations.append(call(Op.ALL_GATHER, rank, ready, at + 13, 24))
        at += 13
        if step != 1:
            operations += [call(Op.REDUCE, rank, at, at + 8, 8192, peer=0) for rank in range(3)]
            operations.append(mark(0, at + 8, at + 18, "update"))
            for rank, begin in enumerate((at + 18, at + 8, at + 8)):
                operations += [
                    call(Op.ALL_GATHER, rank, begin, at + 20, 24),
                    call(Op.BROADCAST, rank, at + 20, at + 31, 8192, peer=0),
                ]
            at += 31
    return script(3, "three steps", *operations)


def ahead_of_the_slowest() -> Trace:
    """Three workers, one of them slow, with a staleness bound."""
    slow = Stragglers(slow={1: 2.5})
    result = parameter_server(
        3, [4096], 1, Link(0.5 * MS, 0), 8 * MS, steps=5, staleness=2, stragglers=slow
    )
    return with_info(result.trace, name="five gradients each")


def counted_to_the_end() -> Trace:
    """Five rounds of three workers; one dies in the third round, after its gradient has arrived."""
    operations, at, server, dead = [*_request(Op.INIT, 0, 0, 1, 1, 2)], 2.0, 3, 2
    for turn in range(5):
        workers = tuple(w for w in range(3) if w != dead or turn < 3)
        pushed = {w: at + (9, 12, 5)[w] for w in workers}  # the one that dies is the fastest
        full = max(pushed.values()) + 3
        for position, (w, begin) in enumerate(pushed.items()):
            operations += [mark(w, at + 1, begin, "gradient")]
            operations += _request(Op.PUSH, w, begin, begin + 1, begin + 1.2, begin + 2)
            if (w, turn) != (dead, 2):
                reply = full + 1.2 + 0.1 * position
                operations += _request(Op.PULL, w, begin + 2.2, begin + 3, reply, reply + 0.8)
        update = {
            "key": "w",
            "version": turn + 1,
            "workers": workers,
            "stale_by": (0,) * len(workers),
        }
        operations.append((Op.MARK, server, full, full + 1, {"attributes": update}))
        at = full + 3
    trace = script(4, "five rounds", *sorted(operations, key=lambda operation: operation[2]))
    ranks = {r: RankInfo(f"worker {r}", "worker") for r in range(3)}
    ranks[server] = RankInfo("server 0", "server")
    return with_info(
        trace,
        ranks=ranks,
        ends={dead: RankEnd("died", "it was killed")},
        consistency=Consistency("dist_sync"),
    )


def _request(
    op: Op,
    worker: int,
    begin: float,
    arrival: float,
    reply: float,
    end: float,
    server: int = 3,
    nbytes: int = 256,
) -> Iterator[Operation]:
    """Yield a worker's request, its arrival at the server, and the server's reply."""
    common: dict[str, Any] = {
        "attributes": {"key": "w"},
        "match": f"kv:1:{worker}:{begin * 10:.0f}",
    }
    tensor = {"nbytes": nbytes, "shape": (nbytes // 4,), "dtype": "float32"}
    request, answer = ({}, tensor) if op is Op.PULL else (tensor, {})
    yield op, worker, begin, end, {"peer": server, **common, **tensor}
    yield Op.RECV, server, arrival - 0.01, arrival, {"peer": worker, **common, **request}
    yield Op.SEND, server, reply, reply + 0.01, {"peer": worker, **common, **answer}


def three_hosts() -> Trace:
    """A hierarchical all-reduce on three hosts, one of which has a slow link."""
    inside, between = Link(1e-4, 1e-9), Link(1e-3, 2e-8)
    network, slow = Network.hosts(3, 2, inside, between), Stragglers(slow={2: 2.5})
    trace = simulate("hierarchical", 6, 3 * MIB, network, stragglers=slow)
    hosts = ("delta", "epsilon", "zeta")
    ranks = {r: RankInfo(f"rank {r}", host=hosts[r // 2]) for r in range(6)}
    clocks = {host: ClockOffset(7.0 * n, error=1e-4) for n, host in enumerate(hosts)}
    return with_info(trace, name="all-reduce of 3 MiB", ranks=ranks, clocks=clocks)


def two_gpus() -> Trace:
    """A step of two ranks with a GPU each: a call returns long before the GPU is done."""
    operations = list[Operation]()
    for rank in range(2):
        operations += [
            mark(rank, 0, 2, "backward"),
            mark(rank, 2, 4, "all_reduce"),
            mark(rank, 4, 7, "load"),
            mark(rank, 7, 14.1, "x[0].item()"),
            mark(rank, 14.1, 16.5, "update"),
            mark(2 + rank, 0.5, 5, "backward"),
            all_reduce(2 + rank, 5, 14, 16 * MIB),
            mark(2 + rank, 14.6, 17, "update"),
        ]
    return with_info(
        script(4, "two GPUs", *operations),
        ranks={r: RankInfo(f"rank {r}", device=f"cuda:{r}") for r in range(2)}
        | {2 + r: RankInfo(f"GPU {r}", "device") for r in range(2)},
    )


def two_devices() -> Trace:
    """Two workers with two devices each: one adds on a device, the other compresses its pushes."""
    operations = [
        operation
        for worker, parts, nbytes, at, end in (
            (0, "add copy", 65_536, 25, 54),
            (1, "copy copy add", 4096, 36, 58),
        )
        for operation in (
            mark(worker, 0, 10, "gradients"),
            *(mark(worker, 10 + 6 * n, 16 + 6 * n, s) for n, s in enumerate(parts.split())),
            *_request(Op.PUSH, worker, at, at + 2, at + 7, at + 8, 2, nbytes),
            *_request(Op.PULL, worker, at + 8, at + 9, end - 1, end, 2, 65_536),
        )
    ]
    update = mark(2, 39, 51, "update")
    names = ("worker 0", "worker"), ("worker 1", "worker"), ("server 0", "server")
    return with_info(
        script(3, "one step", *sorted([*operations, update], key=lambda operation: operation[2])),
        ranks={r: RankInfo(*name) for r, name in enumerate(names)},
    )


def a_script() -> Trace:
    """A script in which rank 3 is slow, and rank 1 leaves the loop one step early."""
    gradients = partial(all_reduce, nbytes=1 << 20, where="train.py:21")
    operations = [
        collective(Op.BROADCAST, rank, 0, 3, 1 << 20, where="train.py:9", peer=0)
        for rank in range(4)
    ]
    for step in range(3):
        for rank in range(4):
            at = 3 + 20.0 * step
            begin = at + (14 if rank == 3 else 8)
            operations += [
                mark(rank, at, begin, "compute"),
                gradients(rank, begin, at + 17),
                all_reduce(rank, at + 18, at + 19, 4, where="train.py:24"),
            ]
    for rank in (0, 2, 3):
        begin = 63 + (14 if rank == 3 else 8)
        operations += [mark(rank, 63, begin, "compute"), gradients(rank, begin, math.inf)]
    return with_info(script(4, "a script", *operations), ends={1: RankEnd("returned")})


def job_of_four_stages() -> Trace:
    """One pipeline of a simulated job, with four stages and six micro-batches."""
    model = Transformer(
        layers=24, hidden=8192, heads=64, kv_heads=8, inner=28_672, vocabulary=128_256
    )
    job = Job(
        model,
        Layout(dp=8, pp=4, tp=8, world=256),
        H100,
        batch=48,
        sequence=8192,
        flash=True,
        zero=1,
    )
    return with_info(job.trace, name="a simulated step")


def eager_and_compiled() -> Trace:
    """Two steps of two ranks; rank 0 compiles its network, which has a graph break."""
    operators = [("linear", 14), ("relu", 11), ("linear", 14), ("backward", 31)]
    graphs = [("graph 1", 14), ("print", 12), ("graph 2", 14), ("backward", 22)]
    first = [("compile", 45), *graphs[:2], ("compile", 19), *graphs[2:]]
    operations, at = list[Operation](), 0.0
    for step in range(2):
        ready = {rank: at for rank in range(2)}
        for rank, work in enumerate((graphs if step else first, operators)):
            for label, ms in work:
                operations.append(mark(rank, ready[rank], ready[rank] + ms, label))
                ready[rank] += ms
        at = max(ready.values()) + 3
        operations += [all_reduce(rank, begin, at, 38_440) for rank, begin in ready.items()]
    return script(2, "two steps", *operations)


def scheduled_functions() -> Trace:
    """Seven functions on two workers; one worker is replaced, and its function runs again."""
    died, final = 68.0, (State.COMPLETED, State.FAILED)
    fast = [(1, n, 4.0 + 14 * i, 18.0 + 14 * i) for i, n in enumerate((0, 2, 3, 5, 6))]
    others = [(2, 1, 4.0, 36.0), (2, 4, 36.0, died), (1, 4, died + 26, died + 40)]
    operations, applied, server = [*_request(Op.INIT, 0, 0, 1, 1, 2)], list[int](), 3
    for worker, n, begin, end in sorted([*fast, *others], key=lambda run: run[-1]):
        operations += _request(Op.PULL, worker, begin, begin + 0.8, begin + 0.9, begin + 1.6)
        operations += [mark(worker, begin + 2, end, f"function {n}", final=final[end == died])]
        operations += _request(Op.PUSH, worker, end - 2, end - 1.2, end - 0.8, end - 0.2)
        if n not in applied:
            applied.append(n)
            update = {"key": "w", "version": len(applied), "workers": (worker,), "stale_by": (0,)}
            operations.append((Op.MARK, server, end - 1.2, end - 0.8, {"attributes": update}))
    operations += [mark(2, died, died + 24, "replaced: it was killed")]
    operations += _request(Op.PULL, 0, died + 41, died + 42, died + 42, died + 43)
    trace = script(4, "seven functions", *sorted(operations, key=lambda operation: operation[2]))
    ranks = {r: RankInfo(f"worker {r}", "worker") for r in range(3)}
    ranks[server] = RankInfo("server 0", "server")
    return with_info(
        trace,
        ranks=ranks,
        replaced=[Replacement(2, "worker 2", "it was killed", died * MS)],
    )


#: The run of each lesson's concept check.
RUNS: dict[str, Callable[[], Trace]] = {
    "00_welcome": fork_and_join,
    "01_messages": two_messages_and_a_deadlock,
    "02_all_reduce": six_in_a_ring,
    "03_sync_sgd": three_steps,
    "04_when_it_hangs": message_after_the_sum,
    "05_parameter_server": unequal_workers,
    "06_cost_models": four_mebibytes_twice,
    "07_when_does_it_pay": one_step,
    "08_pipelines": all_forward_first,
    "09_sharded_and_tensor_parallel": sharded_step,
    "10_many_machines": three_hosts,
    "11_bring_your_own": a_script,
    "12_more_all_reduces": halving_and_doubling,
    "13_when_equality_ends": joined_ranks,
    "14_waiting_less": ahead_of_the_slowest,
    "15_surviving_crashes": counted_to_the_end,
    "16_strategies": central_steps,
    "17_scale_by_simulation": two_hosts,
    "18_devices_and_compression": two_devices,
    "19_gpu_ranks": two_gpus,
    "20_ten_thousand_gpus": job_of_four_stages,
    "21_eager_and_compiled": eager_and_compiled,
    "22_coordinator": scheduled_functions,
}

#: Lessons whose run is drawn by ``dk.Servers``.
OF_SERVERS = {"05_parameter_server", "15_surviving_crashes"}
