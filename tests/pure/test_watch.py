"""The watcher accuses when waits have an instant in common, and never before."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distkit.cluster.runs import watchdog
from distkit.cluster.runs.watchdog import DeadlockWatchdog
from distkit.diagnosis.findings import Kind
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace


def waits_for_each_other(ranks: int) -> Trace:
    """Everybody receives from the left neighbour."""
    return Trace(
        [
            Event(r, 0, Op.RECV, state, 1.0 + 0.1 * i, peer=(r - 1) % ranks, nbytes=4)
            for r in range(ranks)
            for i, state in enumerate((State.STARTED, State.BLOCKED))
        ],
        {"world_size": ranks, "ends": {}},
    )


def fine() -> Trace:
    """Rank 0 waits for rank 1, which computes."""
    return Trace(
        [Event(0, 0, Op.RECV, s, 1.0, peer=1) for s in (State.STARTED, State.BLOCKED)],
        {"world_size": 2, "ends": {}},
    )


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    time = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: time[0])
    return time


def test_nobody_waits() -> None:
    assert not DeadlockWatchdog().due([0, 1])


def test_all_wait_at_one_instant() -> None:
    it = DeadlockWatchdog()
    it.hear(0, (0,), 1.0, 1.4)
    assert not it.due([0, 1]), "rank 1 computes"
    it.hear(1, (0,), 1.2, 1.5)
    assert it.due([0, 1])
    (finding,) = it.judge(waits_for_each_other(2), [0, 1])
    assert (finding.kind, finding.culprits) == (Kind.RECV_CYCLE, (0, 1))


def test_waits_that_follow_each_other_prove_nothing() -> None:
    it = DeadlockWatchdog()
    it.hear(0, (0,), 1.0, 1.2)
    it.hear(1, (0,), 1.3, 1.5)  # rank 0 may have gone on at 1.25
    assert not it.due([0, 1])
    assert it.judge(waits_for_each_other(2), [0, 1]) == []
    it.hear(0, (0,), 1.0, 1.6)  # no: it still waits
    assert it.due([0, 1])
    assert len(it.judge(waits_for_each_other(2), [0, 1])) == 1


def test_who_has_ended_need_not_wait() -> None:
    it = DeadlockWatchdog()
    it.hear(0, (3,), 1.0, 1.4)
    trace = Trace(
        [Event(0, 3, Op.RECV, s, 1.0, peer=1) for s in (State.STARTED, State.BLOCKED)],
        {"world_size": 2, "ends": {"1": {"how": "returned", "text": "", "where": ""}}},
    )
    assert it.due([0])
    (finding,) = it.judge(trace, [0])
    assert (finding.kind, finding.culprits) == (Kind.NO_SENDER, (1,))


def test_what_was_fine_is_not_looked_at_again_until_something_moves() -> None:
    it = DeadlockWatchdog()
    it.hear(0, (0,), 1.0, 1.4)
    it.hear(1, (0,), 1.0, 1.4)
    assert it.due([0, 1])
    assert it.judge(fine(), [0, 1]) == []
    it.hear(0, (0,), 1.0, 1.6)
    it.hear(1, (0,), 1.0, 1.6)
    assert not it.due([0, 1])
    it.hear(1, (1,), 1.7, 1.8)
    it.hear(0, (0,), 1.0, 1.8)
    assert it.due([0, 1]), "rank 1 waits in another operation"
    assert it.due([0]) is True, "somebody has ended"


def test_a_part_of_the_ranks_in_a_deadlock_while_others_compute(now: list[float]) -> None:
    it = DeadlockWatchdog()
    for rank in (0, 1):
        it.hear(rank, (0,), 0.0, 0.4)
    assert not it.due([0, 1, 2]), "rank 2 computes: that may be the reason"
    now[0] = watchdog.PATIENCE + 0.1
    assert it.due([0, 1, 2])
    two_of_three = Trace(waits_for_each_other(2).events, {"world_size": 3, "ends": {}})
    (finding,) = it.judge(two_of_three, [0, 1, 2])
    assert finding.kind is Kind.RECV_CYCLE


def test_what_looked_fine_is_looked_at_again(now: list[float]) -> None:
    it, looks = DeadlockWatchdog(), []
    for n in range(1, 400):
        now[0] = n / 10
        it.hear(0, (0,), 0.0, now[0])  # one wait that never ends
        if it.due([0]):
            looks.append(now[0])
            it.judge(fine(), [0])
    gaps = [b - a for a, b in pairwise(looks)]
    assert gaps == sorted(gaps) and gaps[0] < 1.5 < 8 < gaps[-1]


def test_a_finding_without_a_common_instant_waits_for_one(now: list[float]) -> None:
    it = DeadlockWatchdog()
    it.hear(0, (0,), 1.0, 1.2)
    it.hear(1, (0,), 1.3, 1.5)
    now[0] = 10.0
    assert it.judge(waits_for_each_other(3), [0, 1, 2]) == [], "rank 2 has not said that it waits"
