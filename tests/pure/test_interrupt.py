"""An interrupt of a run explains what its ranks wait for, unless the run is long."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from distkit.cluster.runs import conductor
from distkit.cluster.runs.conductor import Conductor, RankController
from distkit.cluster.runs.outcome import Failure, Outcome
from distkit.events import WORLD, Op, State
from distkit.recording.plain import encode_rows
from distkit.trace.info import RankInfo, RunInfo

FIELDS = (None, WORLD, 0, (), "", None, "", (), None)


def told(it: Conductor, rank: int, *rows: tuple[int, Op, State]) -> None:
    packed = [(seq, op, state, 0.1, FIELDS, None) for seq, op, state in rows]
    it.live.add(rank, len(packed), encode_rows(packed))


class ConnectionMonitor(RankController):
    """Ranks that end at once when they are released."""

    def __init__(self, run: Conductor) -> None:
        self._run = run

    def release(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._run.add_outcome(Outcome(rank, error=Failure("Released", released=True)))

    def end(self, ranks: Iterable[int]) -> None:
        assert not ranks


def make() -> Conductor:
    """Create two ranks that wait in a barrier."""
    it = Conductor("f", 1, [0, 1], RunInfo(ranks={r: RankInfo(pid=7) for r in (0, 1)}))
    for rank in (0, 1):
        told(it, rank, (0, Op.BARRIER, State.STARTED), (0, Op.BARRIER, State.BLOCKED))
        it.handle_event(rank, "waits", ((0,), 0.1, 0.2))
    return it


@pytest.mark.parametrize(("limit", "explained"), [(0, False), (10, True)])
def test_only_a_short_run_is_diagnosed(
    limit: int, explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "MAX_DIAGNOSED_EVENTS", limit)
    it = make()
    it.interrupt()
    it.conduct(ConnectionMonitor(it))
    assert "f was interrupted" in str(it.error)
    assert ("DK106" in str(it.error)) is explained
