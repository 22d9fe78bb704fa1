"""Findings from events, and no false alarms for correct programs."""

from __future__ import annotations

import random
import time

import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Simulation, Step, line

from distkit.diagnosis.diagnose import diagnose
from distkit.events import Event, Op, State
from distkit.trace.info import RankEnd
from distkit.trace.trace import Trace


def send(dst, n, **fields):
    return Step(Op.SEND, dst, where=line(n), **fields)


def recv(src, n, **fields):
    return Step(Op.RECV, src, where=line(n), **fields)


def all_reduce(n, **fields):
    return Step(Op.ALL_REDUCE, where=line(n), **fields)


def barrier(n, **fields):
    return Step(Op.BARRIER, where=line(n), **fields)


def broadcast(src, n, **fields):
    return Step(Op.BROADCAST, src, where=line(n), **fields)


def wait(step):
    return Step(None, wait=step)


def exchange(sends, receives):
    rows = sum(sends)
    splits = {"sends": sends, "receives": receives}
    return Step(Op.ALL_TO_ALL, where=line(3), attributes=splits, nbytes=4 * rows, shape=(rows,))


def backward(*sizes):
    fields = {"attributes": {"gradients": True}, "is_async": True}
    parts = [all_reduce(8, nbytes=n, shape=(n // 4,), **fields) for n in sizes]
    return [*parts, *map(wait, parts)]


ONE, TWO = {"nbytes": 4, "shape": (1,)}, {"nbytes": 8, "shape": (2,)}


def finding_of_hang(*programs, **groups):
    """Return a hanging run's finding, which must not change when the ranks are released."""
    sim = Simulation(list(programs), groups).run()
    assert sim.stuck
    (live,) = [f for f in diagnose(sim.live()) if f.kind != "straggler"]
    assert diagnose(sim.released()) == [live]
    assert live.hang and set(live.waiting) == set(sim.stuck)
    return live


def finding_without_hang(*programs, **groups):
    """Return the finding of a run that ends."""
    sim = Simulation(list(programs), groups).run()
    assert not sim.stuck
    (finding,) = diagnose(sim.live())
    assert not finding.hang and not finding.waiting
    return finding


# -- messages -------------------------------------------------------------------------


#: Programs that hang: kind, culprits, programs, groups, and parts of the finding's text.
HANGS = {
    "cycle of three ranks, and a rank that waits for one of them": (
        "cycle",
        (0, 1, 2),
        [*([recv((r - 1) % 3, 4), send((r + 1) % 3, 5)] for r in range(3)), [recv(2, 9)]],
        {},
        (
            "rank 0 waits in recv(src=2) at a.py:4, rank 2 waits",
            "in a cycle. Rank 3 waits as a result.",
        ),
    ),
    "cycle of sends": (
        "cycle",
        (0, 1),
        [[send(1, 4), recv(1, 5)], [send(0, 4), recv(0, 5)]],
        {},
        ("isend",),
    ),
    "cycle of a collective and a receive": (
        "cycle",
        (0, 1),
        [[all_reduce(4), send(1, 5)], [recv(0, 7), all_reduce(8)]],
        {},
        ("all_reduce() at a.py:4", "recv(src=0) at a.py:7"),
    ),
    "cycle and an unmatched send": (
        "recv_cycle",
        (0, 2),
        [[recv(2, 3), send(2, 4)], [send(2, 5)], [recv(0, 7), recv(1, 8)]],
        {},
        (),
    ),
    "cycle with a send that is received later": (
        "cycle",
        (0, 1, 2),
        [[send(2, 3), send(1, 4)], [recv(0, 7), send(2, 8)], [recv(1, 9), recv(0, 10)]],
        {},
        (),
    ),
    "send without receive": (
        "no_receiver",
        (1,),
        [[send(1, 3), send(1, 4)], [recv(0, 7)]],
        {},
        ("rank 0 waits in send(dst=1) at a.py:4", "rank 1 has finished after receiving 1 message"),
    ),
    "receive without send": (
        "no_sender",
        (0,),
        [[barrier(2)], [barrier(2), recv(0, 7)], [barrier(2), recv(1, 9)]],
        {},
        ("rank 0 has finished after sending 0 messages",),
    ),
    "receive from any source without send": (
        "no_sender",
        (1, 2),
        [[recv(None, 3), recv(None, 3)], [send(0, 7)], []],
        {},
        ("recv(src=any)",),
    ),
    "different tag": (
        "wrong_tag",
        (0, 1),
        [[send(1, 3, tag=1)], [recv(0, 7, tag=2)]],
        {},
        ("with tag 1 at a.py:3", "waits for tag 2"),
    ),
    "different tag before a barrier": (
        "wrong_tag",
        (0, 1),
        [[send(1, 3, tag=1, is_async=True), barrier(4)], [recv(0, 7), barrier(8)]],
        {},
        (),
    ),
    "different source": (
        "wrong_source",
        (2,),
        [[], [send(2, 3)], [recv(0, 7)]],
        {},
        ("rank 1 sends to it in send(dst=2) at a.py:3",),
    ),
    "different source before a barrier": (
        "wrong_source",
        (2,),
        [[barrier(9)], [send(2, 3), barrier(9)], [recv(0, 7), barrier(9)]],
        {},
        (),
    ),
    "different destination": (
        "wrong_destination",
        (0,),
        [[send(2, 3)], [recv(0, 7)], []],
        {},
        ("rank 0 sends to rank 2, which has finished", "Send to rank 1, or receive on rank 2."),
    ),
    "different collective": (
        "different_collective",
        (0,),
        [[broadcast(0, 3)], [all_reduce(5)], [all_reduce(5)]],
        {},
        ("rank 0 calls broadcast(src=0) at a.py:3", "ranks 1 and 2 call all_reduce() at a.py:5"),
    ),
    "different order, blocked at the first call": (
        "different_collective",
        (0, 1),
        [[all_reduce(3), broadcast(0, 4)], [broadcast(0, 6), all_reduce(7)]],
        {},
        (),
    ),
    "different root": (
        "different_root",
        (2,),
        [[broadcast(0, 3)], [broadcast(0, 3)], [broadcast(2, 3)]],
        {},
        (),
    ),
    "one rank skips a collective": ("skipped", (0,), [[], *[[all_reduce(3)]] * 3], {}, ()),
    "all ranks but one skip a collective": ("skipped", (0,), [[all_reduce(3)], *[[]] * 3], {}, ()),
    "one more iteration": (
        "uneven",
        (2,),
        [[all_reduce(3)] * n for n in (3, 3, 4)],
        {},
        ("rank 2", "at a.py:3 for the 4th time"),
    ),
    "missing barrier": (
        "missing_barrier",
        (1,),
        [[barrier(3)], [], [barrier(3)]],
        {},
        (),
    ),
    "missing barrier before an all-reduce": (
        "missing_barrier",
        (1,),
        [[barrier(3), all_reduce(4)], [all_reduce(4)], [barrier(3), all_reduce(4)]],
        {},
        (),
    ),
    "missing barrier in a loop": (
        "missing_barrier",
        (1,),
        [
            [all_reduce(3), barrier(4)] * 3,
            [all_reduce(3), barrier(4), all_reduce(3), all_reduce(3), barrier(4)],
            [all_reduce(3), barrier(4)] * 3,
        ],
        {},
        (),
    ),
    "different group": (
        "wrong_group",
        (0,),
        [[all_reduce(3, group="1")], [all_reduce(5)], [all_reduce(5)]],
        {"1": [0, 1]},
        ("all_reduce() on the group of ranks 0 and 1 at a.py:3",),
    ),
    "group without the other ranks": (
        "wrong_group",
        (0,),
        [[], [all_reduce(3, group="1")], []],
        {"1": [0, 1]},
        (),
    ),
    "message in a different group": (
        "wrong_group",
        (0, 1),
        [[send(1, 3, group="1")], [recv(0, 5)], []],
        {"1": [0, 1]},
        (),
    ),
    "new_group that two ranks skip": (
        "new_group",
        (2, 3),
        [
            *[[Step(Op.NEW_GROUP, where=line(3), attributes={"members": (0, 1)}), barrier(9)]] * 2,
            *[[barrier(9)]] * 2,
        ],
        {},
        ("new_group([0, 1]) at a.py:3",),
    ),
    "rank without a backward pass": (
        "uneven",
        (0,),
        [[], backward(8), backward(8)],
        {},
        (),
    ),
    "one more step of DDP": (
        "uneven",
        (2,),
        [[s for _ in range(n) for s in backward(8, 400)] for n in (2, 2, 3)],
        {},
        (),
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_hang_is_explained(name):
    kind, culprits, programs, groups, texts = HANGS[name]
    f = finding_of_hang(*programs, **groups)
    assert (f.kind, f.culprits) == (kind, culprits)
    assert all(text in str(f) for text in texts)


#: Faulty programs that do not hang: kind, culprits, programs, and parts of the finding's text.
SILENT = {
    "message of a different size": (
        "wrong_tensor",
        (0, 1),
        [[send(1, 3, nbytes=400, shape=(100,))], [recv(0, 7, nbytes=800, shape=(200,))]],
        ("float32[100]", "float32[200] at a.py:7"),
    ),
    "messages of a different dtype": (
        "wrong_tensor",
        (0, 1),
        [[send(1, 3)] * 3, [recv(0, 7, dtype="int32")] * 3],
        ("2 more messages",),
    ),
    "messages in a different order": (
        "wrong_tensor",
        (0, 1),
        [[send(1, 3, **ONE), send(1, 4, **TWO)], [recv(0, 7, **TWO), recv(0, 8, **ONE)]],
        ("in the order in which they are sent",),
    ),
    "collectives in a different order": (
        "another_order",
        (3,),
        [
            *[[all_reduce(3, **ONE), all_reduce(4, **TWO)]] * 3,
            [all_reduce(6, **TWO), all_reduce(7, **ONE)],
        ],
        ("all_reduce() of float32[2] at a.py:6 and then all_reduce() of float32[1]",),
    ),
    "equal collectives in a different order": (
        "another_order",
        (2,),
        [*[[all_reduce(3), all_reduce(4)]] * 2, [all_reduce(4), all_reduce(3)]],
        (),
    ),
    "different reduction": (
        "different_reduction",
        (3,),
        [*[[all_reduce(3)]] * 3, [all_reduce(3, attributes={"reduction": "max"})]],
        ("rank 3 calls all_reduce(max)", "all_reduce(sum)"),
    ),
    "splits that do not match": (
        "split_mismatch",
        (0, 1),
        [[exchange((1, 3), (1, 2))], [exchange((2, 2), (2, 2))]],
        ("rank 0 sends 3 rows to rank 1", "expects 2", "[1, 3]", "[2, 2]"),
    ),
    "different shape in a collective": (
        "different_tensor",
        (2,),
        [*[[all_reduce(3)]] * 2, [all_reduce(4, nbytes=20, shape=(5,))]],
        ("rank 2 calls all_reduce() of float32[5] at a.py:4",),
    ),
    "different dtype in a collective": (
        "different_tensor",
        (0, 1),
        [[all_reduce(3)], [all_reduce(3, dtype="int32")]],
        (),
    ),
    "send request without wait": (
        "not_waited",
        (0,),
        [[send(1, 3, is_async=True)], [recv(0, 7)]],
        (),
    ),
    "send request without receive": (
        "no_receiver",
        (0,),
        [[send(1, 3, is_async=True)], []],
        (),
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_mistake_without_a_hang_is_explained(name):
    kind, culprits, programs, texts = SILENT[name]
    f = finding_without_hang(*programs)
    assert (f.kind, f.culprits) == (kind, culprits)
    assert all(text in str(f) for text in texts)


def test_recv_cycle_message_names_each_line():
    f = finding_of_hang([recv(1, 4), send(1, 5)], [recv(0, 7), send(0, 8)])
    assert f.kind == "recv_cycle" and f.culprits == (0, 1)
    assert f.lines == {0: "a.py:4", 1: "a.py:7"}
    assert str(f) == (
        "rank 0 waits in recv(src=1) at a.py:4, rank 1 waits in recv(src=0) at a.py:7: "
        "each waits for the other. Let one of them send first. [DK101]"
    )


def test_long_lists_of_ranks_are_abbreviated():
    f = finding_of_hang(*([recv((r - 1) % 100, 4)] for r in range(100)))
    assert f.culprits == tuple(range(100)) and len(f.lines) == 100
    assert "(100 in all)" in f.message and len(f.message) < 400


#: A receive of the second message; its wait follows the receive of the first.
EARLY = recv(0, 7, tag=2, is_async=True)
#: Correct programs that resemble mistakes.
CORRECT = {
    "tags out of order": [
        [send(1, 3, tag=1), send(1, 4, tag=2)],
        [EARLY, recv(0, 8, tag=1), wait(EARLY)],
    ],
    "equal numbers of elements": [[send(1, 3, shape=(1, 3))], [recv(0, 7)]],
    "equal calls on different lines": [
        [all_reduce(2), barrier(3)],
        [all_reduce(5), barrier(6)],
    ]
    * 2,
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_program_is_accepted(name):
    assert diagnose(Simulation(CORRECT[name]).run().live()) == []


def test_race_with_a_receive_from_any_source_is_explained():
    first, second = recv(None, 3), recv(1, 4)
    sim = Simulation([[first, second], [send(0, 7)], [send(0, 9)]], random=random.Random(1)).run()
    assert sim.stuck == [0, 2], "rank 1's message arrived first"
    (f,) = (f for f in diagnose(sim.live()) if f.hang)
    assert (f.kind, f.culprits, f.waiting) == ("message_race", (0,), (0, 2))
    assert "recv(src=1) at a.py:4" in f.message and "recv(src=any) at a.py:3" in f.message
    assert "rank 2 sends at a.py:9 is unmatched" in f.message


def test_shape_mismatch_that_crashes_a_rank_is_explained():
    sim = Simulation([[send(1, 3, nbytes=400, shape=(100,))], [recv(0, 7)]]).run(2)
    (f,) = diagnose(died(sim.live(), 1, "signal SIGABRT"))
    assert f.kind == "wrong_tensor"
    assert "Rank 1 failed because of it (signal SIGABRT)." in f.message


# -- collectives ----------------------------------------------------------------------


@given(st.integers(2, 5), st.data())
def test_matching_splits_are_accepted(n, data):
    counts = [[data.draw(st.integers(0, 3)) for _ in range(n)] for _ in range(n)]
    awaited = [tuple(row[r] for row in counts) for r in range(n)]
    rows = [[exchange(tuple(counts[r]), awaited[r])] for r in range(n)]
    assert diagnose(Simulation(rows).run().live()) == []


def test_rank_outside_the_group_is_named():
    sim = Simulation([[all_reduce(3, group="1")]] * 2 + [[]], {"1": [0, 1]}).run()
    call = Event(2, 0, Op.ALL_REDUCE, State.FAILED, 0.1, group="", where=line(3))
    (f,) = diagnose(Trace([*sim.live(), call], sim.live().info))
    assert (f.kind, f.culprits, f.hang) == ("not_a_member", (2,), False)
    assert "rank 2 calls all_reduce() at a.py:3 on a group without rank 2" in f.message


# -- ranks that end ---------------------------------------------------------------------


def ended(trace, rank, **end):
    return Trace(trace, traces.info(trace.info, ends={**trace.info.ends, rank: RankEnd(**end)}))


def died(trace, rank, text):
    return ended(trace, rank, how="died", text=text)


def test_rank_that_raised_is_the_cause():
    sim = Simulation([[all_reduce(3), recv(1, 4)], [all_reduce(3)], [all_reduce(3), recv(0, 9)]])
    trace = ended(sim.run().live(), 1, how="raised", text="ValueError: boom\nmore", where=line(7))
    (f,) = diagnose(trace)
    assert (f.kind, f.culprits, f.waiting, f.hang) == ("raised", (1,), (0, 2), True)
    assert f.message == (
        "rank 1 raised ValueError: boom at a.py:7; rank 0 waits in recv(src=1) at a.py:4, "
        "rank 2 waits in recv(src=0) at a.py:9."
    )
    assert f.lines == {0: "a.py:4", 1: "a.py:7", 2: "a.py:9"}


def test_ranks_with_equal_errors_share_a_finding():
    trace = Simulation([[all_reduce(4)], [], [], []]).run().released()
    for rank in (1, 2):
        trace = ended(
            trace,
            rank,
            how="raised",
            text=f"ValueError: boom of <object at 0x{rank}f>",
            where=line(7),
        )
    trace = ended(trace, 0, how="raised", text="RuntimeError: Connection closed by peer")
    (f,) = diagnose(trace)
    assert (f.culprits, f.waiting) == ((1, 2), (0,))
    assert f.message.startswith("ranks 1 and 2 raised ValueError")


def test_killed_rank_is_the_cause():
    sim = Simulation([[all_reduce(3)], []]).run()
    (f,) = diagnose(died(sim.released(), 1, "signal SIGKILL"))
    assert (f.kind, f.culprits, f.waiting) == ("died", (1,), (0,))
    assert "the process of rank 1 exited (signal SIGKILL); rank 0 waits" in f.message


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        (State.SCHEDULED, "before"),
        (State.STARTED, "calling"),
        (State.BLOCKED, "waiting in"),
        (State.COMPLETED, "after"),
    ],
)
def test_finding_about_a_dead_rank_has_no_lines(state, seen):
    call = Event(1, 0, Op.ALL_REDUCE, state, 0.0, where=line(3))
    note = Event(
        1, 1, Op.MARK, State.COMPLETED, 1.0, attributes={"label": "backward"}, where=line(9)
    )
    (f,) = diagnose(died(Trace([call, note], traces.info(ends={})), 1, "signal SIGKILL"))
    assert f.message == (
        "the process of rank 1 exited (signal SIGKILL); "
        f"last seen {seen} all_reduce() at {line(3)}."
    )
    assert f.lines == {}


def test_ddp_error_about_missing_gradients_is_explained():
    text = "RuntimeError: Expected to have finished reduction in the prior iteration before …"
    sim = Simulation([backward(8), []]).run()
    (f,) = diagnose(ended(sim.released(), 1, how="raised", text=text, where=line(5)))
    assert (f.kind, f.culprits, f.waiting) == ("unused_parameter", (1,), (0,))


def test_two_causes_are_two_findings():
    sim = Simulation([[recv(1, 3)], [recv(0, 4)], [], [recv(2, 9)]]).run()
    trace = ended(sim.released(), 2, how="raised", text="ValueError: boom", where=line(7))
    assert [(f.kind, f.waiting) for f in diagnose(trace)] == [
        ("raised", (3,)),
        ("recv_cycle", (0, 1)),
    ]


# -- no hang ------------------------------------------------------------------------------


def test_computing_rank_is_not_a_hang():
    trace = Simulation([[all_reduce(3)], [barrier(4, group="1")]], {"1": [1]}).run().live()
    (f,) = diagnose(Trace(trace, traces.info(trace.info, ends={})))
    assert (f.kind, f.culprits, f.waiting, f.hang) == ("straggler", (1,), (0,), False)
    assert "for rank 1, which is not communicating" in f.message
    released = {str(r): {"how": "released", "text": "", "where": ""} for r in (0, 1)}
    (f,) = diagnose(Trace(trace, traces.info(trace.info, ends=released)))
    assert f.kind == "straggler" and not f.hang


def test_paused_rank_is_not_a_hang():
    trace = Simulation([[recv(1, 3)], []]).run().live()
    paused = Event(1, 0, Op.SEND, State.SCHEDULED, 1.0, peer=0, where=line(5))
    assert diagnose(Trace([*trace, paused], traces.info(trace.info, ends={}))) == []


def test_straggler_of_a_finished_run_is_named():
    late = [
        Event(r, i, Op.ALL_REDUCE, s, i + 0.5 * (r == 2) + wait, where=line(3))
        for r in range(3)
        for i in range(5)
        for s, wait in ((State.STARTED, 0.0), (State.COMPLETED, 0.5))
    ]
    (f,) = diagnose(Trace(late, traces.info(world_size=3)))
    assert (f.kind, f.culprits, f.hang) == ("straggler", (2,), False)
    assert "rank 2 arrived last at 4 of 4 collectives: the others waited 2 s" in f.message


def test_buffer_used_before_wait_is_reported():
    request = recv(0, 7, is_async=True)
    sim = Simulation([[send(1, 3)], [request, wait(request)]]).run()
    touch = Event(1, 5, Op.TOUCH, State.COMPLETED, 0.0, match="0", where=line(8))
    (f,) = diagnose(Trace([*sim.live(), touch], sim.live().info))
    assert (f.kind, f.culprits, f.hang) == ("buffer_in_use", (1,), False)
    assert "buffer of irecv(src=0) at a.py:7 too early, at a.py:8" in f.message


def test_incomplete_trace_reports_only_errors():
    trace = Simulation([[recv(1, 4)], [recv(0, 7)]]).run().released()
    lost = Trace(trace, traces.info(trace.info, dropped={"0": 3}))
    assert diagnose(lost) == []
    (f,) = diagnose(ended(lost, 1, how="raised", text="ValueError: boom"))
    assert f.kind == "raised"


def test_old_and_empty_traces_have_no_findings():
    assert diagnose(Trace()) == []
    trace = Simulation([[recv(1, 4)], [recv(0, 7)]]).run().released()
    assert diagnose(Trace(trace.events)) == []  # without info, the release of the ranks is unknown


def test_twenty_thousand_events_are_diagnosed_within_a_second():
    trace = traces.big(7_200)
    assert len(trace) > 20_000
    began = time.process_time()
    assert diagnose(trace) == []
    assert time.process_time() - began < 1


# -- random programs ---------------------------------------------------------------------


class ProgramGenerator:
    """Generates correct programs, with all messages and collectives in one global order."""

    def __init__(self, seed, n):
        self.random, self.n = random.Random(seed), n
        self.programs = [[] for _ in range(n)]
        self.open = []  # (rank, step) not yet waited for
        pairs = [sorted(self.random.sample(range(n), k)) for k in range(2, n)]
        self.groups = {str(i + 1): members for i, members in enumerate(pairs)}
        self.line = 0

    def write(self, rounds):
        for _ in range(rounds):
            self.line += 10
            shape = (self.random.choice([1, 3, 8]),)
            self.tensor_fields = dict(shape=shape, nbytes=4 * shape[0])
            add_calls = self.random.choice(
                [self.message, self.message, self.any_source, self.collective, self.loop]
            )
            add_calls()
            for _ in range(self.random.randrange(3)):
                self.add_wait()
        while self.open:
            self.add_wait()
        return self

    def add(self, rank, op, peer=None, **fields):
        branch = fields.pop("branch", 0)
        step = Step(op, peer, where=line(self.line + branch), **{**self.tensor_fields, **fields})
        self.programs[rank].append(step)
        if step.is_async:
            self.open.append((rank, step))

    def add_wait(self):
        if self.open:
            rank, step = self.open.pop(self.random.randrange(len(self.open)))
            self.programs[rank].append(wait(step))

    def message(self):
        src, dst = self.random.sample(range(self.n), 2)
        choice = self.random.choice
        groups = ["world", *(g for g, m in self.groups.items() if {src, dst} <= set(m))]
        common = dict(group=choice(groups), tag=choice([None, 1, 2]))
        ends = [(src, Op.SEND, dst), (dst, Op.RECV, src)]
        self.random.shuffle(ends)
        for rank, op, peer in ends:
            self.add(rank, op, peer, branch=op is Op.RECV, is_async=choice([False, True]), **common)

    def any_source(self):
        dst, *sources = self.random.sample(range(self.n), self.random.randint(2, self.n))
        for src in sources:
            self.add(src, Op.SEND, dst, tag=1000 + self.line)
        for _ in sources:
            self.add(dst, Op.RECV, None, tag=1000 + self.line, branch=1)

    def collective(self, where=None):
        op = self.random.choice(
            [Op.ALL_REDUCE, Op.BROADCAST, Op.BARRIER, Op.REDUCE, Op.ALL_GATHER, Op.ALL_TO_ALL]
        )
        group = self.random.choice(["world", *self.groups])
        members = self.groups.get(group, range(self.n))
        peer = self.random.choice(list(members)) if op in (Op.BROADCAST, Op.REDUCE) else None
        attributes = self.random.choice([{}, {"reduction": "max"}]) if op is Op.ALL_REDUCE else {}
        branches = self.random.choice([1, 2])  # if rank == …: … else: …
        for r in members:
            self.add(
                r,
                op,
                peer,
                group=group,
                attributes=attributes,
                branch=r % branches,
                is_async=op is Op.ALL_REDUCE and self.random.random() < 0.3,
            )

    def loop(self):
        for _ in range(self.random.randint(2, 4)):
            for r in range(self.n):
                self.add(r, Op.ALL_REDUCE, branch=1)
            for r in range(self.n):
                self.add(r, Op.ALL_REDUCE, branch=2)


programs = st.builds(
    lambda seed, n, rounds: ProgramGenerator(seed, n).write(rounds),
    st.integers(0, 10**6),
    st.integers(2, 5),
    st.integers(1, 12),
)


def without_stragglers(trace):
    return [f for f in diagnose(trace) if f.kind != "straggler" or f.hang]


@settings(max_examples=100, deadline=None)
@given(programs, st.integers(0, 10**6), st.integers(0, 80))
def test_no_false_alarm_in_correct_programs(generator, seed, cut):
    sim = Simulation(generator.programs, generator.groups, random.Random(seed)).run(cut)
    assert without_stragglers(sim.live()) == []  # while it runs
    sim.run()
    assert not sim.stuck
    assert without_stragglers(sim.live()) == []
    assert without_stragglers(sim.released()) == []


@settings(max_examples=100, deadline=None)
@given(programs, st.integers(0, 10**6), st.data())
def test_no_false_alarm_when_some_events_arrive_late(generator, seed, data):
    sim = Simulation(
        generator.programs, generator.groups, random.Random(seed), report_probability=0.9
    ).run()
    received = [
        e
        for r in range(generator.n)
        for e in sim.live().by_rank[r][: data.draw(st.integers(0, 60))]
    ]
    assert without_stragglers(Trace(received, sim.info)) == []


@settings(max_examples=150, deadline=None)
@given(programs, st.integers(0, 10**6), st.data())
def test_every_injected_hang_is_found(generator, seed, data):
    for _ in range(data.draw(st.integers(1, 3))):
        inject_mistake(generator.programs, data)
    sim = Simulation(generator.programs, generator.groups, random.Random(seed)).run()
    for trace in (sim.live(), sim.released()):
        found = diagnose(trace)
        assert {r for f in found if f.hang for r in f.waiting} == set(sim.stuck)
        waiting = [r for f in found for r in f.waiting if f.hang]
        assert len(waiting) == len(set(waiting))
        assert all(f.culprits for f in found)


def inject_mistake(programs, data):
    """Omit a step or swap two; waits stay after their requests."""
    rank = data.draw(st.sampled_from([r for r, p in enumerate(programs)]))
    candidates = [i for i, s in enumerate(programs[rank]) if not s.is_async and s.wait is None]
    if not candidates:
        return
    i, j = (data.draw(st.sampled_from(candidates)) for _ in range(2))
    if i == j:
        del programs[rank][i]
    else:
        row = programs[rank]
        row[i], row[j] = row[j], row[i]
