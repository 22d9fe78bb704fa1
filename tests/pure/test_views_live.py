"""A live timeline: few updates, nothing sent twice, nothing lost, whatever the threads do."""

import threading

import pytest
import traces
from traces import ring

from distkit.trace.trace import Trace
from distkit.views import Gradients, Stage, Tensors, Timeline
from distkit.views.widget.live import Throttle

AT_ONCE, NEVER = 0.0, 3600.0


class FakeRun:
    """A run that is played back by the test: what a live source must offer."""

    def __init__(self, trace):
        self.whole, self.seen, self.finished, self.callbacks = trace, [], False, []

    @property
    def trace(self):
        return Trace(self.seen, self.whole.info if self.finished else traces.info(world_size=4))

    def subscribe(self, callback):
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def tell(self, events):
        self.seen += events
        for callback in self.callbacks:
            callback(list(events))

    def end(self):
        self.finished = True
        for callback in self.callbacks:
            callback([])


class Front:
    """Receives what a timeline sends, as a browser would."""

    def __init__(self, timeline, monkeypatch):
        self.bars, self.arrows, self.updates = {}, {}, []
        self.next = timeline.get_state("picture")["picture"]["next"]
        self.arrived = threading.Event()
        monkeypatch.setattr(timeline, "_send", self.receive)

    def receive(self, message, buffers=None):
        assert message["method"] == "update"
        ((name, patch),) = message["state"].items()
        assert name == f"patch{self.next}"
        self.next += 1
        self.updates.append(patch)
        self.bars |= {bar["id"]: bar for bar in patch["bars"]}
        self.arrows |= {arrow["id"]: arrow for arrow in patch["arrows"]}
        self.arrived.set()


@pytest.fixture
def slow(monkeypatch):
    """No second update before the run ends: what is sent is then known exactly."""
    monkeypatch.setattr(Throttle.__init__, "__kwdefaults__", {"period": NEVER})


def test_updates_reach_the_browser_in_pieces(slow, monkeypatch):
    run = FakeRun(ring())
    events = list(run.whole.events)
    timeline = Timeline(run)
    front = Front(timeline, monkeypatch)
    feeder = threading.Thread(target=lambda: run.tell(events[:50]))
    feeder.start()
    feeder.join()
    assert front.arrived.wait(60)
    run.tell(events[50:])
    run.end()
    assert front.updates[0]["live"] and not front.updates[-1]["live"]
    whole = Timeline(run.whole).get_state("picture")["picture"]
    assert front.bars == {bar["id"]: bar for bar in whole["bars"]}
    assert front.arrows == {arrow["id"]: arrow for arrow in whole["arrows"]}


def test_nothing_is_sent_twice(slow, monkeypatch):
    run = FakeRun(ring())
    events = list(run.whole.events)
    run.seen = events[:60]
    front = Front(Timeline(run), monkeypatch)
    run.tell(events[60:])
    run.end()
    known = {f"{e.rank}.{e.seq}" for e in events[:60]} - {f"{e.rank}.{e.seq}" for e in events[60:]}
    assert known and not known & set(front.bars)


def test_what_came_before_a_late_reader_is_in_its_snapshot(slow):
    run = FakeRun(ring())
    timeline = Timeline(run)
    run.tell(list(run.whole.events))
    run.end()
    late = timeline.get_state("picture")["picture"]
    assert len(late["bars"]) == 48 and len(late["arrows"]) == 24 and not late["live"]
    assert late["next"] == timeline._patches


def test_a_run_that_has_finished_needs_no_subscription():
    run = FakeRun(ring())
    run.seen, run.finished = list(run.whole.events), True
    timeline = Timeline(run)
    assert run.callbacks == [] and len(timeline.get_state("picture")["picture"]["bars"]) == 48


class Hasty(FakeRun):
    """A run that ends while somebody puts together what it has told so far."""

    @property
    def trace(self):
        if not self.seen:
            events = list(self.whole.events)
            so_far = Trace(events[:50], traces.info(world_size=4))
            self.tell(events)
            self.end()
            return so_far
        return super().trace


@pytest.mark.parametrize("view", [Timeline, Stage, Tensors, Gradients], ids=lambda v: v.__name__)
def test_a_run_that_ends_while_its_view_is_made_is_seen_to_its_end(slow, view):
    shown = view(Hasty(ring())).get_state("picture")["picture"]
    whole = view(ring()).get_state("picture")["picture"]
    assert {**shown, "next": 0} == whole


def test_closing_ends_the_subscription():
    run = FakeRun(ring())
    timeline = Timeline(run)
    assert len(run.callbacks) == 1
    timeline.close()
    timeline.close()  # ipywidgets does, when it is collected
    assert run.callbacks == []


def test_only_what_has_a_trace_can_be_drawn():
    with pytest.raises(TypeError, match=r"distkit\.Trace.*not list.*Trace\.load"):
        Timeline([1, 2])
