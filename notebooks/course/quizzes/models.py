"""The concept checks of the lessons 04 to 08: servers, hangs, costs."""

from __future__ import annotations

import math
from dataclasses import replace

from distkit.events import Op, State
from distkit.trace.trace import Trace
from distkit.views import Servers
from distkit.views.scene.units import human_seconds
from distkit_course.content.quizzes.scripted import (
    MIB,
    MS,
    RANKS,
    Line,
    calls,
    collective,
    mark,
    recv,
    script,
    send,
    slowest,
    told,
    updates,
    waited,
)
from distkit_course.quizzes import Ask, Concept
from distkit_simulation import cost
from distkit_simulation.network import Link, Network
from distkit_simulation.serving import parameter_server
from distkit_simulation.simulator import Stragglers, simulate
from distkit_simulation.training import Workload, data_parallel

# -- 04 --------------------------------------------------------------------------------------

WORKERS, STEPS = 3, 3


def unequal_workers() -> Trace:
    """Three workers, one of them slow, train one key asynchronously."""
    played = parameter_server(
        WORKERS,
        [4096],
        1,
        Link(alpha=1e-3, beta=1e-7),
        10 * MS,
        steps=STEPS,
        staleness=math.inf,
        stragglers=Stragglers(slow={2: 3.0}),
    )
    events = [
        replace(e, attributes={**e.attributes, "key": "w"}) if "key" in e.attributes else e
        for e in played.trace.events
    ]
    return told(Trace(events, played.trace.meta), name="three workers")


def late(trace: Trace) -> int:
    """How stale worker 2's first gradient is."""
    (stale,) = updates(trace, 2)[0].attributes["late"]
    return int(stale)


PARAMETER_SERVER = Concept(
    "04_parameter_server",
    "Three workers make three steps each, in `dist_async`. One server holds one key, `w`. The "
    "pale bars are the workers' computation; click on them to go to a moment.",
    unequal_workers,
    (
        Ask(
            "Which worker is slower than the others?",
            ("worker 0", "worker 1", "worker 2"),
            lambda trace: f"worker {slowest(trace)}",
            "Its bars are the longest: during its first step the others make two or more.",
        ),
        Ask(
            "How many updates happen between its first pull and the use of its gradient?",
            (0, 1, 2, 4),
            late,
            "Its first update says that it is late by so many: that is its staleness.",
        ),
        Ask(
            "Which version of `w` is there at the end?",
            ("v1", "v3", "v9", "v18"),
            lambda trace: f"v{len(updates(trace))}",
            "In `dist_async` each push is an update, and each update makes a version.",
        ),
        Ask(
            "How many updates would the same gradients make in `dist_sync`?",
            (1, 3, 6, 9),
            lambda trace: len(updates(trace)) // WORKERS,
            "One update uses a gradient of each of the three workers: nine gradients, three each.",
        ),
        Ask(
            "If worker 2 crashed before its first push, how many updates would there be?",
            (0, 3, 6, 9),
            lambda trace: len(updates(trace)) - len(updates(trace, 2)),
            "The other two go on in `dist_async`. In `dist_sync` there would be none.",
        ),
    ),
    Servers,
)


# -- 05 --------------------------------------------------------------------------------------


def message_after_the_sum() -> Trace:
    """Rank 1 waits for a message that rank 0 would send after an all-reduce of all ranks."""
    trace = script(
        4,
        "two batches",
        *(mark(r, 0, 5, "batch") for r in range(3)),
        mark(3, 0, 17, "batch"),
        *(_sum(r, 5, 19) for r in range(3)),
        _sum(3, 17, 19),
        recv(1, 19, math.inf, 0),
        *(mark(r, 19, 24, "batch") for r in (0, 2, 3)),
        *(_sum(r, 24, math.inf) for r in (0, 2, 3)),
    )
    open_calls = {(s.rank, s.seq) for s in trace.spans if s.end is None}
    blocked = [
        replace(e, state=State.BLOCKED, time=e.time + MS)
        for e in trace.events
        if (e.rank, e.seq) in open_calls
    ]
    return told(Trace([*trace.events, *blocked], trace.meta), until=32 * MS)


def _sum(rank: int, begin: float, end: float) -> Line:
    return collective(Op.ALL_REDUCE, rank, begin, end, 4096)


def cycle(trace: Trace) -> str:
    """The ranks that wait for each other, as the diagnosis finds them."""
    return "ranks {} and {}".format(*trace.diagnose()[0].culprits)


def last_to_come(trace: Trace) -> str:
    """The rank that is in the first all-reduce for the shortest time."""
    first = [s for s in trace.spans if s.op is Op.ALL_REDUCE and s.end is not None]
    return RANKS[max(first, key=lambda s: s.start).rank]


def absent(trace: Trace) -> str:
    """The rank that is not in the last all-reduce."""
    there = {s.rank for s in trace.spans if s.op is Op.ALL_REDUCE and s.end is None}
    (missing,) = {*trace.ranks} - there
    return RANKS[missing]


REPAIRS = {
    "straggler": "rank 3 computes faster",
    "cycle": "rank 0 sends before its second `all_reduce`",
    "in_backend": "all ranks wait longer",
}

HANGS = Concept(
    "05_when_it_hangs",
    "Four ranks reduce the gradients of two batches. After its second `all_reduce`, rank 0 sends "
    "a message to rank 1, which calls `recv` for it.",
    message_after_the_sum,
    (
        Ask(
            "Which rank do the others wait for in the first `all_reduce`?",
            RANKS,
            last_to_come,
            "It enters last. That is not a hang: a slow rank does arrive in the end.",
        ),
        Ask(
            "Which rank is missing from the second `all_reduce`?",
            RANKS,
            absent,
            "Its last bar is a `recv`; the others' last bars are `all_reduce`.",
        ),
        Ask(
            "Which ranks wait for each other?",
            ("ranks 2 and 3", "ranks 0 and 1", "ranks 1 and 2", "ranks 0 and 3"),
            cycle,
            "Rank 1 waits for rank 0's message, and rank 0 for rank 1 in `all_reduce`: a cycle.",
        ),
        Ask(
            "How many ranks will never go on?",
            (1, 2, 3, 4),
            lambda trace: len(trace.diagnose()[0].waiting),
            "Two form the cycle. The other two wait in `all_reduce` for one of them.",
        ),
        Ask(
            "What repairs it?",
            tuple(REPAIRS.values()),
            lambda trace: REPAIRS[trace.diagnose()[0].kind],
            "Then rank 1 gets its message and calls `all_reduce`, too. A slow rank is no hang, "
            "and a cycle never ends by itself.",
        ),
    ),
)


# -- 06 --------------------------------------------------------------------------------------


def four_mebibytes_twice() -> Trace:
    """Messages of 1, 2 and 4 MiB, then 4 MiB in four messages."""
    bars = [(0, 3, 1), (4, 8, 2), (9, 15, 4), *((18 + 3 * i, 21 + 3 * i, 1) for i in range(4))]
    lines: list[Line] = []
    for begin, end, size in bars:
        lines += [send(0, begin, end, 1, size * MIB), recv(1, begin, end, 0, size * MIB)]
    return script(2, "seven messages", *lines)


def fitted(trace: Trace) -> Link:
    """The link on which the messages take as long as they do: a line through two of them."""
    times = {s.nbytes: s.seconds or 0.0 for s in trace.spans}
    small, large = min(times), max(times)
    beta = (times[large] - times[small]) / (large - small)
    return Link(times[small] - beta * small, beta)


def in_parts(trace: Trace) -> str:
    """By how much four messages take longer than one with the same bytes."""
    sent = [s.seconds or 0.0 for s in trace.spans if s.op is Op.SEND]
    return human_seconds(sum(sent[-4:]) - sent[2])


COST_MODELS = Concept(
    "06_cost_models",
    "Rank 0 sends 1, 2 and 4 MiB to rank 1, and then 4 MiB once more, in four messages of 1 MiB. "
    "Nothing else uses the link. Point at a bar to see how long it takes.",
    four_mebibytes_twice,
    (
        Ask(
            "How large is the latency α?",
            ("500 µs", "1 ms", "2 ms", "3 ms"),
            lambda trace: human_seconds(fitted(trace).alpha),
            "1 MiB takes 3 ms, and 2 MiB take 4 ms: 1 ms a MiB. So 0 bytes would take 2 ms.",
        ),
        Ask(
            "How long would a message of 8 MiB take?",
            ("8 ms", "10 ms", "12 ms", "24 ms"),
            lambda trace: human_seconds(float(fitted(trace).seconds(8 * MIB))),
            "α + 8 MiB · β = 2 ms + 8 · 1 ms.",
        ),
        Ask(
            "At which message size do the latency and the bytes take equally long?",
            ("0.5 MiB", "1 MiB", "2 MiB", "4 MiB"),
            lambda trace: f"{fitted(trace).alpha / fitted(trace).beta / MIB:.3g} MiB",
            "α/β = 2 ms / (1 ms per MiB): the second message, half of whose 4 ms is latency.",
        ),
        Ask(
            "How much longer do four messages of 1 MiB take than one of 4 MiB?",
            ("0 ms", "2 ms", "4 ms", "6 ms"),
            in_parts,
            "12 ms in place of 6 ms: the bytes are the same, three more latencies of 2 ms are not.",
        ),
        Ask(
            "Four ranks with such links all-reduce 4 MiB in a ring: how long does it take?",
            ("12 ms", "18 ms", "24 ms", "36 ms"),
            lambda trace: human_seconds(float(cost.ring(4, 4 * MIB, fitted(trace)))),
            "2(n−1) = 6 rounds with messages of 1 MiB, 3 ms each.",
        ),
    ),
)


# -- 07 --------------------------------------------------------------------------------------

HOSTS, DEVICES = 2, 3
SIZE = 12 * MIB


def two_hosts(algorithm: str = "hierarchical", slow: float = 3.0) -> Trace:
    """Six ranks on two hosts with a slow network between them, and one slow rank."""
    inside, between = Link(0.0, 1.25 * MS / SIZE), Link(1 * MS, 3 * MS / SIZE)
    options = {"devices_per_host": DEVICES} if algorithm == "hierarchical" else {}
    trace = simulate(
        algorithm,
        HOSTS * DEVICES,
        SIZE,
        Network.hosts(HOSTS, DEVICES, inside, between),
        stragglers=Stragglers(slow={4: slow}),
        **options,
    )
    return told(trace, name="all-reduce of 12 MiB")


def pairs(trace: Trace) -> list[tuple[int, int]]:
    """Who sends to whom, message by message."""
    return [(m.src, m.dst) for m in trace.messages]


def crossing(trace: Trace) -> list[tuple[int, int]]:
    """The messages between the hosts."""
    return [(src, dst) for src, dst in pairs(trace) if src // DEVICES != dst // DEVICES]


def transfer(trace: Trace, rank: int) -> float:
    """The seconds of the rank's longest transfer, once both of its ends are there."""
    begins = {(s.rank, s.seq): s.start for s in trace.spans}
    return max(
        (m.received or 0.0) - max(begins[m.send], begins[m.recv])
        for m in trace.messages
        if rank in (m.src, m.dst) and m.send and m.recv
    )


def slow_one(trace: Trace) -> str:
    """The rank that is no leader and whose transfers take longest."""
    leaders = {rank for pair in crossing(trace) for rank in pair}
    return f"rank {max({*trace.ranks} - leaders, key=lambda rank: transfer(trace, rank))}"


def delayed(trace: Trace) -> int:
    """How many other ranks end later than they would if nobody were slow."""
    ends, calm = ({s.rank: s.end or 0.0 for s in t.spans} for t in (trace, two_hosts(slow=1.0)))
    return sum(ends[rank] > calm[rank] for rank in ends if f"rank {rank}" != slow_one(trace))


ALGORITHMS = {"ring": "the ring", "tree": "the tree", "hierarchical": "the hierarchical one"}


def recognised(trace: Trace) -> str:
    """The algorithm whose messages these are."""
    same = (name for name in ALGORITHMS if pairs(two_hosts(name)) == pairs(trace))
    return ALGORITHMS[next(same)]


SIMULATION = Concept(
    "07_scale_by_simulation",
    "Ranks 0, 1 and 2 are devices of one host, ranks 3, 4 and 5 of another one. The network "
    "between the hosts is slower than the links inside them. One rank is slower than the others.",
    two_hosts,
    (
        Ask(
            "Which algorithm is it?",
            tuple(ALGORITHMS.values()),
            recognised,
            "In each host the others send to its first rank. The two first ranks exchange halves, "
            "and send the result back to the others.",
        ),
        Ask(
            "Which ranks send messages to the other host?",
            ("ranks 2 and 3", "ranks 0 and 3", "ranks 2 and 5", "all six ranks"),
            lambda trace: "ranks {} and {}".format(*sorted({src for src, _ in crossing(trace)})),
            "Follow the arrows: between the lanes of different hosts they lead from 0 to 3 and "
            "back.",
        ),
        Ask(
            "How many messages go between the two hosts, counting both directions?",
            (2, 4, 8, 12),
            lambda trace: len(crossing(trace)),
            "A ring of two: 2(2 − 1) rounds, in each of which both send.",
        ),
        Ask(
            "Which rank is slow?",
            ("rank 1", "rank 2", "rank 4", "rank 5"),
            slow_one,
            "Rank 3 sends the same bytes to ranks 4 and 5 at the end: to rank 4 they take three "
            "times as long.",
        ),
        Ask(
            "How many of the other five ranks finish later because of it?",
            (1, 2, 3, 5),
            delayed,
            "Rank 3 waits for it, rank 0 for rank 3, and all the others for rank 0 or rank 3.",
        ),
    ),
)


# -- 08 --------------------------------------------------------------------------------------


def one_step() -> Trace:
    """A step of four ranks, with one bucket of gradients: nothing overlaps."""
    network = Network(Link(1 * MS, 1 * MS / MIB))
    trace = data_parallel(4, Workload(2 * MS, 3 * MS, (4 * MIB,), 1 * MS), network)
    return told(trace, name="a step of training")


def t_comp(trace: Trace) -> float:
    """The seconds that a rank computes."""
    return sum(s.seconds or 0.0 for s in calls(trace, Op.MARK, 0))


def alone(trace: Trace) -> float:
    """The seconds that one rank would take for the batches of all."""
    return t_comp(trace) * len(trace.ranks)


def twice_the_batch(trace: Trace) -> str:
    """The speed-up of all ranks over one, if each computes for twice as long."""
    return f"{cost.speedup(len(trace.ranks), 2 * t_comp(trace), waited(trace, 0)):.3g}"


WHEN_IT_PAYS = Concept(
    "08_when_does_it_pay",
    "Four ranks make a step of training, each with a batch of its own. The marks are `forward`, "
    "`backward` and, after the all-reduce, `update`.",
    one_step,
    (
        Ask(
            "How long is Tcomp?",
            ("2 ms", "5 ms", "6 ms", "18 ms"),
            lambda trace: human_seconds(t_comp(trace)),
            "Forward, backward and update of one rank: 2 + 3 + 1 ms.",
        ),
        Ask(
            "How long is Tsync?",
            ("1 ms", "6 ms", "12 ms", "18 ms"),
            lambda trace: human_seconds(waited(trace, 0)),
            "The `all_reduce`, from 5 ms to 17 ms.",
        ),
        Ask(
            "How long would one rank alone need for all four batches?",
            ("6 ms", "12 ms", "18 ms", "24 ms"),
            lambda trace: human_seconds(alone(trace)),
            "Four batches of 6 ms each. The four ranks take 18 ms: 1.33 times as fast.",
        ),
        Ask(
            "With how many ranks would training be just as fast as with one?",
            (2, 3, 4, 6),
            lambda trace: round(cost.break_even(t_comp(trace), waited(trace, 0))),
            "1 + Tsync/Tcomp = 1 + 12/6. It pays with more ranks than these.",
        ),
        Ask(
            "Twice the batch doubles Tcomp: how many times as fast as one are four ranks then?",
            ("1.33", "2", "2.67", "4"),
            twice_the_batch,
            "Four batches of 12 ms in 12 + 12 ms: 48/24. Tsync does not depend on the batch.",
        ),
    ),
)

CONCEPTS = (PARAMETER_SERVER, HANGS, COST_MODELS, SIMULATION, WHEN_IT_PAYS)
