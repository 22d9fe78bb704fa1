"""Synthetic traces that look like real runs."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from distkit.events import Event, Op, State, Summary
from distkit.trace.info import RankInfo, RunInfo
from distkit.trace.trace import Trace

US, MS = 1e-6, 1e-3


def summary(values: list[float], size: int | None = None) -> Summary:
    finite = [v for v in values if math.isfinite(v)] or [math.nan]
    norm = math.sqrt(sum(v * v for v in values))
    return Summary(tuple(values), norm, min(finite), max(finite), size or len(values))


def info(known: RunInfo = RunInfo(), **fields: Any) -> RunInfo:  # noqa: B008
    """Return a RunInfo with these fields, given as plain data or structs."""
    plain = msgspec.to_builtins(fields, str_keys=True)
    reported = msgspec.convert(plain, RunInfo, str_keys=True)
    return structs.replace(known, **{name: getattr(reported, name) for name in fields})


class Script:
    """Writes a trace operation by operation, with sequence numbers like a recorder's."""

    def __init__(self, start: float = 4711.25) -> None:
        self.start, self.events = start, []
        self._seq: dict[int, int] = defaultdict(int)

    def op(self, rank, op, begin, end, *, before=None, after=None, failed=False, **fields):
        """Add an operation from ``begin`` to ``end`` [s]; None if it never completes."""
        seq, at = self._seq[rank], self.start
        self._seq[rank] += 1
        add = self.events.append
        if op is not Op.MARK:
            add(Event(rank, seq, op, State.SCHEDULED, at + begin, **fields))
        add(Event(rank, seq, op, State.STARTED, at + begin + 2 * US, **fields, summary=before))
        if end is not None:
            state = State.FAILED if failed else State.COMPLETED
            add(Event(rank, seq, op, state, at + max(end, begin + 3 * US), **fields, summary=after))
        return self

    def trace(self, **fields) -> Trace:
        return Trace(self.events, info(**fields))


def gpus() -> Trace:
    """Two ranks whose GPU memory grows and shrinks."""
    script = Script()
    for step, used in enumerate([1, 4, 2]):
        for rank in (0, 1):
            on = {"device": f"cuda:{rank}", "stream": 7, "memory": used * (rank + 1) << 20}
            fields = dict(nbytes=4096, shape=(1024,), dtype="float32")
            fields["attributes"] = {**on, "device_seconds": 0.25 * MS}
            script.op(rank, Op.ALL_REDUCE, step * MS, (step + 0.5) * MS, **fields)
    return script.trace(name="made up", world_size=2)


def names(*roles: str) -> dict[int, RankInfo]:
    """Return ``info.ranks`` for roles such as worker, worker, server, scheduler."""
    seen: dict[str, int] = defaultdict(int)
    ranks = {}
    for rank, role in enumerate(roles):
        number = "" if role == "scheduler" else f" {seen[role]}"
        seen[role] += 1
        ranks[rank] = RankInfo(role + number, role, "localhost", 4000 + rank, "cpu")
    return ranks


def ping_pong(rounds: int = 3, size: int = 8) -> Trace:
    """Rank 0 sends a vector; rank 1 adds one and sends it back."""
    s, t = Script(), 0.1 * MS
    tensor = dict(nbytes=4 * size, shape=(size,), dtype="float32", tag=0)
    x = [0.5 * i for i in range(size)]
    s.op(
        1,
        Op.RECV,
        0.02 * MS,
        0.26 * MS,
        peer=0,
        where="p2p.py:14",
        **tensor,
        before=summary([0.0] * size),
        after=summary(x),
    )
    s.op(0, Op.SEND, 0.1 * MS, 0.21 * MS, peer=1, where="p2p.py:9", **tensor, before=summary(x))
    for _ in range(rounds):
        y = [v + 1 for v in x]
        s.op(
            1,
            Op.MARK,
            t + 0.18 * MS,
            t + 0.3 * MS,
            attributes={"label": "x + 1"},
            where="p2p.py:15",
        )
        s.op(
            0,
            Op.RECV,
            t + 0.14 * MS,
            t + 0.46 * MS,
            peer=1,
            where="p2p.py:10",
            **tensor,
            before=summary(x),
            after=summary(y),
        )
        s.op(
            1,
            Op.SEND,
            t + 0.31 * MS,
            t + 0.42 * MS,
            peer=0,
            where="p2p.py:16",
            **tensor,
            before=summary(y),
        )
        x, t = y, t + 0.5 * MS
        s.op(
            1,
            Op.RECV,
            t - 0.04 * MS,
            t + 0.16 * MS,
            peer=0,
            where="p2p.py:14",
            **tensor,
            before=summary([v - 1 for v in x]),
            after=summary(x),
        )
        s.op(
            0,
            Op.SEND,
            t + 0.01 * MS,
            t + 0.12 * MS,
            peer=1,
            where="p2p.py:9",
            **tensor,
            before=summary(x),
        )
    return s.trace(name="ping-pong", world_size=2, backend="gloo", ranks=names("rank", "rank"))


def ring(n: int = 4, size: int = 64, seed: int = 0) -> Trace:
    """A ring all-reduce: in each of 2(n-1) rounds, every rank sends a chunk to the right."""
    s, rng = Script(), random.Random(seed)
    clock = [0.05 * MS + 0.1 * MS * rng.random() for _ in range(n)]
    chunk = dict(nbytes=4 * size // n, shape=(size // n,), dtype="float32", tag=0)
    for step in range(2 * (n - 1)):
        line = 31 if step < n - 1 else 35
        sent = [t + 0.01 * MS for t in clock]
        arrive = [
            max(clock[r], sent[(r - 1) % n]) + (0.12 + 0.06 * rng.random()) * MS for r in range(n)
        ]
        for r in range(n):
            left, right = (r - 1) % n, (r + 1) % n
            mine = summary([math.sin(0.7 * i + r + step) for i in range(size // n)])
            received = summary([math.sin(0.7 * i + left + step) for i in range(size // n)])
            s.op(
                r,
                Op.SEND,
                sent[r],
                arrive[right] + 0.01 * MS,
                peer=right,
                where=f"collectives.py:{line}",
                before=mine,
                **chunk,
            )
            s.op(
                r,
                Op.RECV,
                sent[r] + 0.01 * MS,
                arrive[r],
                peer=left,
                where=f"collectives.py:{line}",
                before=mine,
                after=received,
                **chunk,
            )
        clock = [
            max(arrive[r], arrive[(r + 1) % n] + 0.01 * MS) + 0.04 * MS * (0.6 + rng.random())
            for r in range(n)
        ]
    return s.trace(name="ring all-reduce", world_size=n, backend="gloo", ranks=names(*["rank"] * n))


def sync_sgd(n: int = 4, steps: int = 3, seed: int = 1) -> Trace:
    """Synchronous SGD: two bucketed all-reduces overlap the backward pass."""
    s, rng = Script(), random.Random(seed)
    weights = dict(nbytes=4 * 64 * 32, shape=(64, 32), dtype="float32")
    grads = [
        dict(nbytes=4 * 320, shape=(320,), dtype="float32"),
        dict(nbytes=4 * 2048, shape=(2048,), dtype="float32"),
    ]
    w = summary([math.cos(i) for i in range(64)], 2048)
    begin = [0.3 * MS * rng.random() for _ in range(n)]
    done = max(begin) + 0.5 * MS
    for r in range(n):
        s.op(
            r,
            Op.BROADCAST,
            begin[r],
            done + 0.05 * MS * rng.random(),
            peer=0,
            where="sgd.py:18",
            before=w,
            after=w,
            **weights,
        )
    clock = [done + 0.1 * MS for _ in range(n)]
    for step in range(steps):
        slow = [rng.uniform(0.85, 1.2) for _ in range(n)]
        fore = [clock[r] + 0.9 * MS * slow[r] for r in range(n)]
        calls = [[fore[r] + part * MS * slow[r] for r in range(n)] for part in (0.7, 1.5)]
        ends = [max(c) + cost * MS for c, cost in zip(calls, (0.5, 0.8), strict=True)]
        for r in range(n):
            s.op(r, Op.MARK, clock[r], fore[r], attributes={"label": "forward"}, where="sgd.py:24")
            s.op(
                r,
                Op.MARK,
                fore[r] + 5 * US,
                calls[1][r] + 0.02 * MS,
                attributes={"label": "backward"},
                where="sgd.py:26",
            )
            for bucket in (0, 1):
                g = [math.sin(0.3 * i + r + step) / (step + 1) for i in range(64)]
                mean = [math.sin(0.3 * i + 1.5 + step) / (step + 1) for i in range(64)]
                s.op(
                    r,
                    Op.ALL_REDUCE,
                    calls[bucket][r],
                    ends[bucket] + 0.04 * MS * rng.random(),
                    where="sgd.py:26",
                    before=summary(g, 2048),
                    after=summary(mean, 2048),
                    **grads[bucket],
                )
            s.op(
                r,
                Op.MARK,
                ends[1] + 0.06 * MS,
                ends[1] + 0.3 * MS,
                attributes={"label": "update"},
                where="sgd.py:29",
            )
        clock = [ends[1] + 0.35 * MS + 0.05 * MS * rng.random() for _ in range(n)]
    return s.trace(name="synchronous SGD", world_size=n, backend="gloo", ranks=names(*["rank"] * n))


def parameter_server(steps: int = 3) -> Trace:
    """Two workers, two servers and a scheduler; workers pull, compute and push."""
    s, ids = Script(), iter(range(1000))
    scheduler = 4

    def request(op, worker, server, at, wait, *, size, attributes, where=""):
        match = f"kv:{worker}:{next(ids)}"
        there, back = at + 0.1 * MS, at + 0.16 * MS + wait
        big = dict(
            nbytes=4 * size, shape=(size,), dtype="float32", attributes=attributes, match=match
        )
        small = {**big, "nbytes": 24, "shape": (), "dtype": ""}
        sent, received = (big, small) if op is not Op.PULL else (small, big)
        s.op(
            worker,
            op,
            at,
            back + 0.1 * MS,
            peer=server,
            where=where,
            **{**big, "nbytes": max(sent["nbytes"], received["nbytes"])},
        )
        s.op(server, Op.RECV, there - 0.03 * MS, there, peer=worker, **sent)
        s.op(server, Op.SEND, back, back + 0.03 * MS, peer=worker, **received)
        return back + 0.1 * MS

    for node in range(4):
        request(
            Op.REGISTER, node, scheduler, 0.05 * MS * (1 + node), 0.25 * MS, size=0, attributes={}
        )
    clock = [0.9 * MS, 0.95 * MS]
    for step in range(steps):
        for w in (0, 1):
            t = clock[w]
            for key, server in (("w1", 2), ("w2", 3)):
                t = (
                    request(
                        Op.PULL,
                        w,
                        server,
                        t,
                        0.02 * MS,
                        size=2048,
                        attributes={"key": key},
                        where="train.py:21",
                    )
                    + 0.02 * MS
                )
            s.op(
                w,
                Op.MARK,
                t,
                t + (0.8 + 0.3 * w) * MS,
                attributes={"label": "gradient"},
                where="train.py:22",
            )
            t += (0.82 + 0.3 * w) * MS
            for key, server in (("w1", 2), ("w2", 3)):
                t = (
                    request(
                        Op.PUSH,
                        w,
                        server,
                        t,
                        0.05 * MS + 0.02 * MS * step,
                        size=2048,
                        attributes={"key": key},
                        where="train.py:23",
                    )
                    + 0.02 * MS
                )
            clock[w] = t
        clock = [max(clock)] * 2
    return s.trace(
        name="parameter server",
        world_size=5,
        backend="gloo",
        ranks=names("worker", "worker", "server", "server", "scheduler"),
    )


def hang() -> Trace:
    """Ranks 0 to 2 wait in an all-reduce, and rank 3 for a message."""
    s = Script()
    tensor = dict(nbytes=4096, shape=(1024,), dtype="float32")
    for r in range(4):
        s.op(
            r,
            Op.MARK,
            0.1 * MS,
            (0.5 + 0.1 * r) * MS,
            attributes={"label": "forward"},
            where="hang.py:7",
        )
        s.op(r, Op.BARRIER, (0.55 + 0.1 * r) * MS, (1.05 + 0.01 * r) * MS, where="hang.py:8")
    for r in range(3):
        s.op(r, Op.ALL_REDUCE, (1.2 + 0.15 * r) * MS, None, where="hang.py:11", **tensor)
    s.op(2, Op.SEND, 1.1 * MS, 1.3 * MS, peer=1, where="hang.py:10", tag=7, **tensor)
    s.op(3, Op.RECV, 1.25 * MS, None, peer=0, where="hang.py:13", tag=3, **tensor)
    s.op(0, Op.SEND, 0.2 * MS, 0.4 * MS, peer=2, where="hang.py:5", failed=True, **tensor)
    return s.trace(name="a hang", world_size=4, backend="gloo", dropped={"1": 1203})


def stores(rounds: int = 1) -> Trace:
    """Rank 0 sets keys; rank 1 gets them, and waits for keys that no rank sets."""
    s = Script()

    def at(rank: int, op: Op, begin: float, end: float | None, **attributes: object) -> None:
        begin, end = begin * MS, None if end is None else end * MS
        s.op(rank, op, begin, end, where=f"store.py:{rank + 4}", attributes=attributes)

    for n in range(rounds):
        at(0, Op.STORE_SET, 3 * n + 0.2, 3 * n + 0.9, method="set", keys=("ready",))
        at(1, Op.STORE_WAIT, 3 * n + 0.1, 3 * n + 1.0, method="get", keys=("ready",))
    at(1, Op.STORE_WAIT, 3 * rounds, None, method="wait", keys=("a", "late"))
    until = s.start + (3 * rounds + 2) * MS
    return s.trace(name="stores", world_size=2, backend="gloo", until=until)


def big(operations: int = 30_000, n: int = 8) -> Trace:
    """Many small all-reduces."""
    s, rng = Script(), random.Random(3)
    for i in range(operations // n):
        at = i * 0.2 * MS
        for r in range(n):
            s.op(
                r,
                Op.ALL_REDUCE,
                at + 0.05 * MS * rng.random(),
                at + 0.15 * MS,
                nbytes=4096,
                shape=(1024,),
                dtype="float32",
                where="many.py:3",
            )
    return s.trace(name="very many", world_size=n, backend="gloo")


def odd_values() -> Trace:
    """One rank with unusual values, an empty summary and hostile labels."""
    s = Script()
    inf = math.inf
    s.op(
        0,
        Op.ALL_REDUCE,
        0.0,
        1 * MS,
        shape=(4,),
        nbytes=16,
        dtype="float32",
        before=Summary((1.0, math.nan, inf, -inf), math.nan, -inf, inf, 4),
        after=Summary((), 0.0, 0.0, 0.0, 0),
    )
    s.op(
        0, Op.MARK, 1.1 * MS, 2 * MS, attributes={"label": "</script><img src=x onerror=alert(1)>"}
    )
    s.op(0, Op.RECV, 2.1 * MS, None, where="<b>&.py:1", shape=(), dtype="float64", nbytes=8)
    return s.trace(name='<i>odd</i> & "ends"', world_size=1)


DEMOS = {
    "p2p": ping_pong,
    "all_reduce": ring,
    "sync_sgd": sync_sgd,
    "parameter_server": parameter_server,
    "hang": hang,
}


def on_hosts(hosts: Sequence[str], each: int = 2, error: float = 0.15 * MS) -> Trace:
    """A hierarchical all-reduce of 16 bytes over several hosts."""
    s, n, clock = Script(), each * len(hosts), 0.1 * MS
    groups = [list(range(i, i + each)) for i in range(0, n, each)]
    leaders = [group[0] for group in groups]
    inside = [(r, group[0]) for group in groups for r in group[1:]]
    ring = list(zip(leaders, leaders[1:] + leaders[:1], strict=True))
    rounds = [inside, *[ring] * (2 * len(hosts) - 2), [(b, a) for a, b in inside]]
    for pairs in rounds:
        for src, dst in pairs:
            late = 0.03 * MS * src
            fields = {"nbytes": 16, "shape": (4,), "dtype": "float32", "where": "reduce.py:7"}
            s.op(src, Op.SEND, clock + late, clock + late + 0.4 * MS, peer=dst, **fields)
            s.op(dst, Op.RECV, clock + 0.1 * MS, clock + late + 0.5 * MS, peer=src, **fields)
        clock += 0.8 * MS
    ranks = {str(r): {"name": f"rank {r}", "host": hosts[r // each]} for r in range(n)}
    clocks = {host: {"ahead": 5.0 * i, "error": error} for i, host in enumerate(hosts)}
    return s.trace(name="reduce", world_size=n, backend="gloo", ranks=ranks, clocks=clocks)
