"""The output of a notebook during a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import IPython.display
import pytest

from distkit.cluster import card
from distkit.cluster.plan import Plan
from distkit.cluster.runs.conductor import Conductor
from distkit.cluster.runs.run import Run, follow
from distkit.trace.info import RunInfo
from distkit.views import Timeline


class SlowRun(Run):
    """A run that is unfinished at the first poll, and then finishes."""

    def wait(self, timeout: float | None = None) -> Run:
        if timeout is not None:
            raise TimeoutError
        self._conductor._announce()
        return self


def test_long_run_is_shown_once_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("distkit.cluster.runs.run.in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda thing, **_: shown.append(thing))
    conductor = Conductor("train", 1, [], RunInfo())
    conductor.live.mark_replacement(0, "told", 0.0, 1.0)  # one without a message is not shown
    run = SlowRun(conductor)
    assert follow(run) is run
    (live,) = shown
    assert isinstance(live, Timeline) and live.comm is None  # the kernel holds no reference


@pytest.mark.parametrize(
    ("ranks", "servers", "says"),
    [(1, 1, "1 worker, 1 server, 1 scheduler"), (4, 2, "4 workers, 2 servers, 1 scheduler")],
)
def test_title_counts_the_nodes(ranks: int, servers: int, says: str) -> None:
    plan = Plan(ranks, servers, "gloo", ("cpu",) * ranks, 1)
    facts = {"plan": plan, "stage": "ready", "run": None}
    room: Any = SimpleNamespace(**facts, processes=SimpleNamespace(info=RunInfo))
    assert card.status(room).title == f"distkit cluster: {says} · ready"
