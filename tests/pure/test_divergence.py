"""Findings from the program's source: loops, conditions, exits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import traces
from simulated import Simulation, Step, line

from distkit.diagnosis.diagnose import diagnose
from distkit.diagnosis.program import Program
from distkit.events import Event, Op, State
from distkit.recording.call_context import CollectiveFingerprint
from distkit.trace.trace import Trace

LOOP = """\
for batch in batches:
    if broken(batch):
        continue
    all_reduce(batch)
    if rank == 0:
        all_gather(state)
barrier()
"""
FINALLY = """\
try:
    work()
finally:
    barrier()
"""


def all_reduce(n, **fields):
    return Step(Op.ALL_REDUCE, where=line(n), **fields)


def first_finding(*programs, source=LOOP, **fields):
    """Return the first finding of a hanging run with a known source."""
    sim = Simulation(list(programs)).run()
    assert sim.stuck
    return diagnose(
        Trace(live := sim.live(), traces.info(live.info, sources={"a.py": source}, **fields))
    )[0]


REDUCE, GATHER, BARRIER = (
    Step(op, where=line(n)) for op, n in ((Op.ALL_REDUCE, 4), (Op.ALL_GATHER, 6), (Op.BARRIER, 7))
)


def test_rank_that_exited_its_loop_early_is_named():
    f = first_finding([REDUCE] * 3 + [BARRIER], [REDUCE] * 2 + [BARRIER], [REDUCE] * 3 + [BARRIER])
    assert (f.kind, f.culprits) == ("uneven", (1,))
    assert "rank 1 continues with barrier() at a.py:7 after calling it 2 times" in f.message
    assert "`continue` under `if broken(batch)` at a.py:3" in f.remedy


def test_call_made_by_some_ranks_in_a_loop_is_named():
    f = first_finding([REDUCE] * 2 + [GATHER], [REDUCE] * 3, [REDUCE] * 3)
    assert (f.kind, f.culprits) == ("different_collective", (0,))
    assert "only rank 0 calls all_gather() at a.py:6, under `if rank == 0` at a.py:5" in f.message


def test_first_diverging_call_is_found_despite_a_later_match():
    text = "if rank == 0:\n    barrier()\nbarrier()\n"
    inside, after = Step(Op.BARRIER, where=line(2)), Step(Op.BARRIER, where=line(3))
    f = first_finding([inside, after], [after], [after], source=text)
    assert (f.culprits, f.waiting) == ((0,), (0,))
    assert "only rank 0 calls barrier() at a.py:2, under `if rank == 0` at a.py:1" in f.message


def test_loop_that_a_rank_never_enters_is_named():
    f = first_finding([all_reduce(2)], [], source="for x in batches:\n    all_reduce(x)\n")
    assert (f.kind, f.culprits) == ("skipped", (1,)) and (
        "Run the same number of iterations of `for x in batches` at a.py:1 on every rank"
        in f.remedy
    )


def test_branches_of_one_condition_do_not_diverge():
    text = "if rank == 0:\n    all_reduce(x)\nelse:\n    all_reduce(y)\nbarrier()\n"
    f = first_finding(
        [all_reduce(2), BARRIER], [all_reduce(4)], [all_reduce(4), BARRIER], source=text
    )
    assert (f.kind, f.culprits) == ("missing_barrier", (1,))


def test_ddp_steps_are_distinguished_from_missing_gradients():
    gradients = all_reduce(4, attributes={"gradients": True})
    rows = [[gradients] * 2 + [BARRIER], [gradients, BARRIER], [gradients] * 2 + [BARRIER]]
    f = first_finding(*rows, unreduced={})
    assert (f.kind, f.culprits) == ("uneven", (1,))
    f = first_finding(*rows, unreduced={"1": ["head.weight"]})
    assert (f.kind, f.culprits) == ("unused_parameter", (1,))
    assert "head.weight" in f.message and "find_unused_parameters" in f.remedy
    f = first_finding(rows[0][:-1], rows[1][:-1], rows[2][:-1], unreduced={"1": ["head.weight"]})
    assert (f.kind, f.culprits) == ("unused_parameter", (1,))


def test_pending_exception_is_the_first_finding():
    note = {"0": {"seq": 0, "text": "ValueError: broken", "where": "a.py:2"}}
    rows = [[Step(Op.BARRIER, where=line(4))], [all_reduce(1)], [all_reduce(1)]]
    f = first_finding(*rows, source=FINALLY, raising=note)
    assert (f.kind, f.culprits, f.waiting) == ("raised", (0,), (0, 1, 2))
    assert f.message.startswith("rank 0 raised ValueError: broken at a.py:2")
    assert (
        first_finding(*rows, source=FINALLY, raising={"0": {**note["0"], "seq": 7}}).kind
        != "raised"
    )


def test_stalled_collective_of_all_ranks_is_reported():
    events = [
        Event(r, 0, Op.ALL_REDUCE, s, 0.0, where=line(3))
        for r in (0, 1)
        for s in (State.STARTED, State.BLOCKED)
    ]
    (f,) = diagnose(Trace(events, traces.info(world_size=2, until=3.0, ends={})))
    assert (f.kind, f.waiting, f.hang) == ("in_backend", (0, 1), False)
    assert "ranks 0 and 1 have waited in all_reduce() at a.py:3 for 3 s" in f.message
    assert diagnose(Trace(events, traces.info(world_size=2, until=0.5, ends={}))) == []
    assert "doctor" not in f.remedy


def test_possibly_lost_message_is_reported():
    events = [
        Event(r, 0, op, s, 0.0, peer=1 - r, where=line(3))
        for r, op in enumerate((Op.SEND, Op.RECV))
        for s in (State.STARTED, State.BLOCKED)
    ]
    ranks = {"0": {"host": "beta"}, "1": {"host": "alpha"}}
    (f,) = diagnose(Trace(events, traces.info(world_size=2, until=3.0, ranks=ranks)))
    assert f.kind == "in_backend"
    assert "messages lost between hosts (see distkit doctor --hosts alpha,beta)" in f.remedy


def diagnose_delays(*delays, op=Op.ALL_REDUCE):
    """Return the findings of a run whose rank 1 is late for each collective by these times [s]."""
    events = []
    for n, delay in enumerate(delays):
        for rank in (0, 1):
            start = n + delay * rank
            events += [
                Event(rank, n, op, State.STARTED, start),
                Event(rank, n, op, State.COMPLETED, n + delay),
            ]
    ends = {str(r): {"how": "returned", "text": "", "where": ""} for r in (0, 1)}
    return diagnose(Trace(events, traces.info(world_size=2, ends=ends)))


def test_slow_start_is_not_a_straggler():
    slow_starts = [3.0], [3.0, 0.01, 0.01, 0.01], [0.01, 3.0, 0.01, 0.01]
    assert [diagnose_delays(*delays) for delays in slow_starts] == [[], [], []]
    assert diagnose_delays(*[0.02] * 50) == [], "a busy machine"
    assert diagnose_delays(0.4, 0.4, 0.4, 0.4, op=Op.NEW_GROUP) == []
    (f,) = diagnose_delays(0.4, 0.4, 0.4, 0.4)
    assert (f.kind, f.culprits) == ("straggler", (1,))


# -- source analysis ----------------------------------------------------------------------


def test_functions_are_analyzed_at_the_call_site():
    text = "def save():\n    barrier()\n\nif rank == 0:\n    save()\n"
    guard = Program({"a.py": text}).skipping_guard(["a.py:2"])
    assert guard is not None and str(guard.statement) == "`if rank == 0` at a.py:4"
    twice = Program({"a.py": text + "save()\n"})
    assert twice.skipping_guard(["a.py:2"]) is None
    called = twice.skipping_guard(["a.py:2", "a.py:5"])
    assert called is not None and called.statement == guard.statement


@pytest.mark.parametrize(
    ("text", "guard"),
    [
        ("if training:\n    if rank == 0:\n        call()\n", "`if rank == 0` at a.py:2"),
        ("if rank == 0:\n    if step % 10 == 0:\n        call()\n", "`if rank == 0` at a.py:1"),
        ("first = get_rank() == 0\nif first:\n    call()\n", "`if first` at a.py:2"),
        ("match rank:\n    case 0:\n        call()\n", "`case 0` of `match rank` at a.py:2"),
        ("x = 1\n\nbarrier() if rank == 0 else None\n", "`if rank == 0` at a.py:3"),
        ("x = 1\n\nrank == 0 and barrier()\n", "`rank == 0 and …` at a.py:3"),
        ("\nfor _ in range(rank):\n    call()\n", "`for _ in range(rank)` at a.py:2"),
        ("if __name__ == '__main__':\n\n    call()\n", "None"),
        ("if training:\n    print()\n    call()\n", "`if training` at a.py:1"),
        ("def f():\n  if rank: return\n  call()\n", "`return` under `if rank` at a.py:2"),
        ("for x in y:\n  if rank: continue\n  call()\n", "`continue` under `if rank` at a.py:2"),
        ("for x in y:\n  for z in x: rank or next()\n  call()\n", "None"),
    ],
)
def test_condition_that_makes_ranks_diverge_is_named(text, guard):
    found = Program({"a.py": text}).skipping_guard(["a.py:3"])
    assert str(found and found.statement) == guard


@pytest.mark.parametrize("text", ["", "%%ranks\nif x:\n    y()\n", "if x:\n"])
def test_source_that_is_not_python_is_ignored(text):
    program = Program({"a.py": text})
    assert program.skipping_guard(["a.py:2"]) is None and program.exits(["a.py:3"]) == []
    assert program.differing_guards(["a.py:2"], ["nowhere"]) == [] and program.text("a.py:9") == ""


def test_silent_except_and_no_sync_are_exits():
    text = (
        "for x in xs:\n    try:\n        step(x)\n    except OSError:\n        log()\n"
        "    with net.no_sync():\n        step(x)\n    while y:\n        break\n"
    )
    assert [e.text for e in Program({"a.py": text}).exits(["a.py:3"])] == [
        "except OSError",
        "with net.no_sync()",
    ]


# -- fingerprints of collectives ------------------------------------------------------------


def call(nbytes=12, peer=None, shape=(3,), dtype="float32", attributes=None, group="world"):
    return peer, group, nbytes, shape, dtype, None, "", tuple((attributes or {}).items()), None


@pytest.fixture
def fingerprints():
    with tempfile.TemporaryDirectory() as folder:
        created = [CollectiveFingerprint(Path(folder), 1, rank) for rank in range(3)]
        for fingerprint in created:
            fingerprint.add_group("world", [0, 1, 2])
        yield created


@pytest.mark.parametrize(
    ("op", "one", "other"),
    [
        (Op.ALL_REDUCE, call(), call(16)),
        (Op.BROADCAST, call(peer=0), call(peer=1)),
        (Op.ALL_GATHER, call(attributes={"function": "all_gather_object"}), call()),
        (Op.SCATTER, call(shape=(4,)), call(shape=(3,))),
        (
            Op.NEW_GROUP,
            call(0, attributes={"members": (0, 1)}),
            call(0, attributes={"members": (1, 2)}),
        ),
    ],
)
def test_mismatch_is_detected_by_the_last_rank(fingerprints, op, one, other):
    assert fingerprints[0].check(op, one)
    assert fingerprints[1].check(op, one)
    assert not fingerprints[2].check(op, other)


@pytest.mark.parametrize(
    ("op", "one", "other"),
    [
        (Op.ALL_TO_ALL, call(), call(16)),
        (Op.BARRIER, call(0), call(4)),
        (Op.SCATTER, call(24), call(12)),
        (Op.ALL_REDUCE, call(), call(attributes={"reduction": "max"})),
        (Op.ALL_REDUCE, call(12), call(12, shape=(1, 3))),
        (Op.ALL_REDUCE, call(), call(attributes={"gradients": True})),
        (Op.ALL_REDUCE, call(20, dtype="sparse float32"), call(8, dtype="sparse float32")),
        (
            Op.NEW_GROUP,
            call(0, attributes={"members": (0, 1)}),
            call(0, attributes={"members": (1, 0)}),
        ),
    ],
)
def test_permitted_differences_are_not_mismatches(fingerprints, op, one, other):
    assert fingerprints[0].check(op, one) and fingerprints[1].check(op, other)
