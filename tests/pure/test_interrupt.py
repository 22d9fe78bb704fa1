"""An interrupt of a long run: what stands is explained, what moves is only ended."""

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


class Ends(RankController):
    """Ranks that end at once when they are released."""

    def __init__(self, run: Conductor) -> None:
        self._run = run

    def release(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._run.add_outcome(Outcome(rank, error=Failure("Released", released=True)))

    def end(self, ranks: Iterable[int]) -> None:
        assert not ranks


def make() -> Conductor:
    """Two ranks that wait in a barrier."""
    it = Conductor("f", 1, [0, 1], RunInfo(ranks={r: RankInfo(pid=7) for r in (0, 1)}))
    for rank in (0, 1):
        told(it, rank, (0, Op.BARRIER, State.STARTED), (0, Op.BARRIER, State.BLOCKED))
        it.handle_event(rank, "waits", ((0,), 0.1, 0.2))
    return it


@pytest.mark.parametrize(
    ("since", "explained"),
    [("nothing", 1), ("both go on", 0), ("one goes on", 1), ("a stop", 1)],
)
def test_a_long_run_is_explained_if_somebody_stands(
    since: str, explained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[Conductor] = []
    monkeypatch.setattr(conductor, "MAX_DIAGNOSED_EVENTS", 0)
    monkeypatch.setattr(Conductor, "findings", property(times.append))
    it = make()
    on = (0, Op.BARRIER, State.COMPLETED), (1, Op.BARRIER, State.STARTED)
    for rank in {"both go on": (0, 1), "one goes on": (1,), "a stop": (0, 1)}.get(since, ()):
        told(it, rank, *on)
    if since == "a stop":
        it.handle_event(1, "stopped", (19, 0.3))
    it.interrupt()
    it.conduct(Ends(it))
    assert str(it.error).startswith("f was interrupted") and len(times) == explained
