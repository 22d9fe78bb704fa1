"""A live timeline: batched updates that lose no event."""

import threading

import pytest
import traces
from traces import ping_pong, ring

from distkit.trace.trace import Trace
from distkit.views.scenes import Gradients, Stage, Tensors
from distkit.views.timeline.view import Timeline
from distkit.views.widget.view import View

NEVER = 3600.0


class FakeRun:
    """A live source that plays back events."""

    def __init__(self, trace):
        self.complete, self.seen, self.finished, self.callbacks = trace, [], False, []

    @property
    def trace(self):
        return Trace(self.seen, self.complete.info if self.finished else traces.info(world_size=4))

    def subscribe(self, callback):
        if self.seen:
            callback(list(self.seen))
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def publish(self, events):
        self.seen += events
        for callback in self.callbacks:
            callback(list(events))

    def end(self):
        self.finished = True
        for callback in self.callbacks:
            callback([])


class Browser:
    """A fake browser, which receives a timeline's messages."""

    def __init__(self, timeline, monkeypatch):
        self.updates, self.arrived = [], threading.Event()
        monkeypatch.setattr(timeline, "_send", self.receive)

    def receive(self, message, buffers=None):
        assert message["method"] == "update"
        self.updates.append(message["state"]["picture"])
        self.arrived.set()


@pytest.fixture
def slow(monkeypatch):
    """Prevent a second update before the run ends, so that the number of updates is known."""
    monkeypatch.setattr(View, "period", NEVER)


def test_updates_are_sent_in_batches(slow, monkeypatch):
    run = FakeRun(ring())
    events = list(run.complete.events)
    browser = Browser(Timeline(run), monkeypatch)
    feeder = threading.Thread(target=lambda: run.publish(events[:50]))
    feeder.start()
    feeder.join()
    assert browser.arrived.wait(60)
    run.publish(events[50:])
    run.end()
    first, last = browser.updates
    assert first["live"] and not last["live"] and first["operations"] < last["operations"] == 48
    assert [first["updates"], last["updates"]] == [1, 2]


@pytest.mark.parametrize(("rounds", "has_live_values"), [(3, True), (150, False)])
def test_tensor_values_of_a_long_run_are_sent_at_its_end(
    slow, monkeypatch, rounds, has_live_values
):
    run = FakeRun(ping_pong(rounds))
    browser = Browser(Timeline(run), monkeypatch)
    run.publish(run.complete.events)
    assert browser.arrived.wait(60)
    run.end()
    sizes = [{name: n for name, _, n in p["columns"]["parts"]} for p in browser.updates]
    assert [n["numbers"] > 0 for n in sizes] == [has_live_values, True]


class EndsEarly(FakeRun):
    """A run that ends while its snapshot is created."""

    @property
    def trace(self):
        if not self.seen:
            events = list(self.complete.events)
            so_far = Trace(events[:50], traces.info(world_size=4))
            self.publish(events)
            self.end()
            return so_far
        return super().trace


@pytest.mark.parametrize("view", [Timeline, Stage, Tensors, Gradients], ids=lambda v: v.__name__)
def test_run_that_ends_during_view_creation_is_complete(slow, view):
    shown = view(EndsEarly(ring())).get_state("picture")["picture"]
    assert {**shown, "updates": 0} == view(ring()).get_state("picture")["picture"]


def test_closing_ends_the_subscription():
    run = FakeRun(ring())
    timeline = Timeline(run)
    assert len(run.callbacks) == 1
    timeline.close()
    timeline.close()  # ipywidgets does this at garbage collection
    assert run.callbacks == []


def test_objects_without_a_trace_raise():
    with pytest.raises(TypeError, match=r"distkit\.Trace.*not list.*Trace\.load"):
        Timeline([1, 2])
