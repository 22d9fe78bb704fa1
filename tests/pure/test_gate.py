"""The gate: nobody passes without a permit, nobody with one is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from distkit.cluster.rank.release import Gate


class Walker:
    """A thread that goes through a gate again and again; ``passed`` counts."""

    def __init__(self, gate: Gate, times: int) -> None:
        self.passed, self._moved, self._waits = 0, threading.Condition(), threading.Semaphore(0)
        gate.arrived = self._waits.release
        self.thread = threading.Thread(target=self._walk, args=(gate, times))
        self.thread.start()

    def _walk(self, gate: Gate, times: int) -> None:
        for _ in range(times):
            gate.wait()
            with self._moved:
                self.passed += 1
                self._moved.notify()

    def stands(self) -> bool:
        """Wait until it stands before the gate."""
        return self._waits.acquire(timeout=60)

    def ends(self) -> int:
        """Wait for its end; how often it has passed."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.passed


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.allow(None)  # whoever still stands there may go


def test_a_permit_is_for_one(gate: Gate) -> None:
    walker = Walker(gate, 3)
    for n in range(3):
        assert walker.stands()
        assert walker.passed == n
        gate.allow(1)
    assert walker.ends() == 3


def test_several_permits_at_once(gate: Gate) -> None:
    walker = Walker(gate, 5)
    assert walker.stands()
    gate.allow(4)
    assert walker.stands()
    assert walker.passed == 4
    gate.allow(1)
    assert walker.ends() == 5


def test_permits_that_come_early_are_kept(gate: Gate) -> None:
    gate.allow(1)
    gate.allow(1)
    walker = Walker(gate, 3)
    assert walker.stands()
    assert walker.passed == 2


def test_an_open_gate_holds_nobody(gate: Gate) -> None:
    walker = Walker(gate, 1000)
    assert walker.stands()
    gate.allow(None)
    assert walker.ends() == 1000
    assert not walker._waits.acquire(blocking=False), "it was not told again that somebody waits"
    gate.allow(2)
    assert Walker(gate, 1000).ends() == 1000
