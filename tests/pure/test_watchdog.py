"""The watchdog reports a deadlock only if the waits overlap."""

from __future__ import annotations

import pytest
import traces

from distkit.cluster.runs import conductor
from distkit.cluster.runs.conductor import DeadlockWatchdog
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace


def trace_of_a_cycle(ranks: int) -> Trace:
    """Return a run in which every rank receives from its left neighbor."""
    return Trace(
        [
            Event(r, 0, Op.RECV, state, 1.0 + 0.1 * i, peer=(r - 1) % ranks, nbytes=4)
            for r in range(ranks)
            for i, state in enumerate((State.STARTED, State.BLOCKED))
        ],
        traces.info(world_size=ranks, ends={}),
    )


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    time = [0.0]
    monkeypatch.setattr(conductor.time, "monotonic", lambda: time[0])
    return time


def test_consecutive_waits_are_not_a_deadlock() -> None:
    detector = DeadlockWatchdog()
    detector.waits[0] = (0,), 1.0, 1.2
    detector.waits[1] = (0,), 1.3, 1.5  # rank 0 may have continued at 1.25
    assert not detector.is_due([0, 1])
    assert detector.check(trace_of_a_cycle(2), [0, 1]) == []
    detector.waits[0] = (0,), 1.0, 1.6  # it has not: it still waits
    assert detector.is_due([0, 1])
    assert len(detector.check(trace_of_a_cycle(2), [0, 1])) == 1


def test_deadlock_needs_simultaneous_waits(now: list[float]) -> None:
    detector = DeadlockWatchdog()
    detector.waits[0] = (0,), 1.0, 1.2
    detector.waits[1] = (0,), 1.3, 1.5
    now[0] = 10.0
    assert detector.check(trace_of_a_cycle(3), [0, 1, 2]) == [], "rank 2 has not reported a wait"
