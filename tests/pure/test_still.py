"""The picture beside a widget: what stays in the notebook is what was drawn last."""

from __future__ import annotations

import threading
from pickle import dumps
from typing import Any

import IPython.display
import pytest

from distkit import Trace
from distkit.cluster.runs.conductor import Conductor
from distkit.cluster.runs.outcome import Outcome
from distkit.cluster.runs.run import Run
from distkit.views import Timeline
from distkit.views.widget.snapshot import NotebookSnapshot


class Handle:
    """Where IPython would replace the picture."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.sent.append(bundle["text/plain"])


def test_a_slow_drawing_does_not_replace_a_newer_one() -> None:
    state, drawing, finish = ["old"], threading.Event(), threading.Event()

    def draw() -> tuple[str, str]:
        now = state[0]
        if now == "old":
            drawing.set()
            finish.wait(10)
        return "<svg/>", now

    still = NotebookSnapshot(draw)
    handle: Any = Handle()
    still._handle = handle
    slow = threading.Thread(target=still.renew)
    slow.start()
    assert drawing.wait(10)
    state[0] = "new"
    quick = threading.Thread(target=still.renew)
    quick.start()
    quick.join(0.1)  # it may be done by now; it must not be
    finish.set()
    slow.join(10)
    quick.join(10)
    assert handle.sent == ["old", "new"]


def test_what_changes_while_it_is_displayed_is_sent_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, handle = ["going on"], Handle()
    renewals: list[threading.Thread] = []

    def display(bundle: dict[str, str], **options: Any) -> Handle | None:
        if "display_id" not in options:
            return None
        state[0] = "over"  # the run ends between the drawing and the display
        renewals.append(threading.Thread(target=still.renew))
        renewals[0].start()
        renewals[0].join(0.1)  # it may be done by now; it must not be
        handle.sent.append(bundle["text/plain"])
        return handle

    still = NotebookSnapshot(lambda: ("<svg/>", state[0]))
    monkeypatch.setattr(IPython.display, "display", display)
    still.show({})
    renewals[0].join(10)
    assert handle.sent == ["going on", "over"]


class OneRank:
    """A crew whose rank has ended."""

    def settle(self, run: int) -> None:
        """It holds nothing back."""


def test_who_waits_for_a_run_goes_on_when_the_views_have_their_last_picture() -> None:
    conductor = Conductor("f", 1, [0], {"ranks": {}})
    run = Run(conductor)
    order: list[str] = []
    waiter = threading.Thread(target=lambda: (run.wait(), order.append("waited")))

    def draw(events: list[Any]) -> None:
        run.wait()  # who is told may ask for what remains
        waiter.start()
        waiter.join(0.2)  # it may be done by now; it must not be
        order.append(f"drawn, finished: {run.finished}")

    run.subscribe(draw)
    conductor.add_outcome(Outcome(0, result=dumps(7), intact=True))
    crew: Any = OneRank()
    conductor.conduct(crew)
    waiter.join(10)
    assert order == ["drawn, finished: True", "waited"]
    assert run.results == [7]


def test_a_trace_put_together_while_the_run_ends_is_not_what_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conductor = Conductor("f", 1, [0], {"ranks": {}})
    run = Run(conductor)
    crew: Any = OneRank()

    def end(events: list[Any], ended: list[str]) -> dict[str, str]:
        monkeypatch.undo()
        conductor.live.mark_replacement(0, "the last", 0.0, 1.0)
        conductor.add_outcome(Outcome(0, result=dumps(7), intact=True))
        conductor.conduct(crew)
        return {}

    conductor.live.mark_replacement(0, "the first", 0.0, 1.0)
    monkeypatch.setattr("distkit.cluster.runs.live_trace.sources", end)
    assert len(run.trace.events) == 2
    assert len(run.trace.events) == 4
    assert run.trace is run.trace


def test_the_picture_is_drawn_while_no_events_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    view, free = Timeline(Trace([])), []

    def look() -> None:
        free.append(view._lock.acquire(blocking=False))

    def draw() -> str:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return "<svg/>"

    monkeypatch.setattr(view, "_svg", draw)
    view._still.bundle()
    view._repr_mimebundle_()
    assert free == [False, False]
