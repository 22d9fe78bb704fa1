"""The cockpit without a browser: messages, commands, static picture and table."""

import json
import threading
import xml.etree.ElementTree as ET

import pytest
import steps
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import FINDING, FakeFinding, FakeStepper
from traces import Script

from distkit.diagnosis.rank_state import RankStatus
from distkit.events import Op
from distkit.views.cockpit import Cockpit, remarks, to_svg, to_table
from distkit.views.cockpit import project as snapshot
from distkit.views.timeline.columns import Columns

SVG = "{http://www.w3.org/2000/svg}"


class Browser:
    """A fake browser that keeps the model's state."""

    def __init__(self, cockpit, monkeypatch):
        self.messages, self.changed = [], threading.Condition()
        self.state = cockpit.get_state()
        monkeypatch.setattr(cockpit, "_send", self.receive)
        self.cockpit = cockpit

    @property
    def steps(self):
        return self.state["steps"]

    def receive(self, message, buffers=None):
        with self.changed:
            if message["method"] == "custom":
                self.messages.append(message["content"])
            self.state |= message.get("state", {})
            self.changed.notify_all()

    def click(self, do, **fields):
        """Send a button's command, and wait until it is handled."""
        self.cockpit._handle_custom_msg({"do": do, "id": len(self.messages), **fields}, [])
        self.wait(lambda: {"done": len(self.messages) - 2} in self.messages)

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, 5)

    def wait_for_step(self, position, last):
        self.wait(lambda: (self.steps["position"], self.steps["last"]) == (position, last))


@pytest.fixture
def open_browser(monkeypatch):
    cockpits = []

    def open_(stepper):
        cockpits.append(Cockpit(stepper))
        return Browser(cockpits[-1], monkeypatch)

    yield open_
    for cockpit in cockpits:
        cockpit.close()


def ring(n=0):
    stepper = steps.ring()
    for _ in range(n):
        stepper.next()
    return stepper


# -- the projection -------------------------------------------------------------------


def test_moment_shows_line_and_tensors_of_each_rank():
    stepper = ring(3)
    stepper.next(0)
    moment = snapshot(stepper)["moment"]
    first, second = moment["ranks"][:2]
    assert moment["choice"] == [0]
    assert first == {
        "rank": 0,
        "status": "blocked",
        "call": "recv(src=3)",
        "where": "collectives.py:18",
        "reason": "rank 3 is paused before send(dst=0) at collectives.py:15",
        "waits": [3],
        "words": "rank 0: blocked in recv(src=3) at collectives.py:18: "
        "rank 3 is paused before send(dst=0) at collectives.py:15",
        "now": "0.3",
        "last": "0.2",
    }
    assert (second["status"], second["now"], second["last"]) == ("paused", "1.3", "1.2")
    assert second["scheduled"]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([None, 0, 1, 2, 3]), max_size=20))
def test_bars_of_every_moment_are_in_the_timeline(choices):
    stepper = ring()
    for choice in choices:
        rank_states = stepper.moments[-1].rank_states
        if any(s.status is RankStatus.PAUSED and choice in (None, s.rank) for s in rank_states):
            stepper.next(choice)
    shown, bars = snapshot(stepper), {bar["id"] for bar in Columns(stepper.trace).picture()["bars"]}
    for rank in shown["moment"]["ranks"]:
        assert {rank.get("now"), rank.get("last")} <= {*bars, None}
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


# -- errors and findings --------------------------------------------------------------

RAISED = """rank 1 raised ValueError: too small at In[5]:7
The others were stopped: rank 0 was in recv with rank 1 at In[5]:4.

Traceback on rank 1:
  File "In[5]", line 7, in fn
    check(x)
ValueError: too small"""


def finding(kind, message, remedy="Repair it."):
    return FakeFinding(message, remedy, False, {1: "In[5]:7"}, kind)


def test_error_and_its_repetition_are_one_remark():
    (remark,) = remarks(
        RAISED, [finding("raised", "rank 1 raised ValueError: too small at In[5]:7.")]
    )
    assert remark["message"] == "rank 1 raised ValueError: too small at In[5]:7"
    assert remark["more"].startswith("The others were stopped: rank 0 was in recv")
    assert remark["traceback"].splitlines() == RAISED.splitlines()[3:]
    assert (remark["remedy"], remark["lines"]) == ("Repair it.", {"1": "In[5]:7"})


@pytest.mark.parametrize(
    ("error", "findings", "messages"),
    [
        ("", [], []),
        ("it was stopped", [], ["it was stopped"]),
        ("", [FINDING] * 5, [FINDING.message] * 3),
        (f"{FINDING.message} {FINDING.remedy}\nfn was stopped.", [FINDING], [FINDING.message]),
        (
            "rank 1 died; rank 0 waits",
            [finding("died", "rank 1 exited"), finding("skipped", "rank 0 waits")],
            ["rank 1 died; rank 0 waits"],
        ),
        (
            RAISED,
            [finding("raised", "rank 1 failed"), finding("not_waited", "no wait()")],
            ["rank 1 raised ValueError: too small at In[5]:7", "no wait()"],
        ),
    ],
)
def test_remarks_join_the_error_and_the_findings(error, findings, messages):
    assert [remark["message"] for remark in remarks(error, findings)] == messages


def test_stopped_run_is_not_shown_as_an_error():
    stepper = ring(1)
    stepper.error, stepper.info_fields = "fn was stopped on all ranks", {"interrupted": True}
    shown = snapshot(stepper)
    assert shown["stopped"] and not shown["remarks"]
    assert "step 1 of 1 · You stopped it here." in to_table(shown, Columns(stepper.trace).picture())
    stepper.findings = [FINDING]  # it was stuck before it was stopped
    assert snapshot(stepper)["remarks"]


def test_rank_stopped_before_its_call_has_not_entered_it():
    stepper = ring(3)
    stepper.next(0)
    stepper.fail("fn was stopped on all ranks", 2, "", "", "released")
    blocked, paused = snapshot(stepper)["moment"]["ranks"][:2]
    assert blocked["words"].startswith("rank 0: stopped in recv(src=3)")
    assert paused["words"].startswith("rank 1: stopped before send(dst=2)")
    assert "scheduled" not in blocked and paused["scheduled"]
    bars = {bar["id"]: bar for bar in Columns(stepper.trace).picture()["bars"]}
    assert bars[paused["now"]]["state"] == "scheduled"  # the timeline names it "paused before"


# -- the widget --------------------------------------------------------------------------


def test_time_begins_at_the_first_call_of_a_worker():
    script = Script().op(2, Op.REGISTER, 0, 0.9).op(0, Op.REGISTER, 0.8, 0.9)
    trace = script.op(0, Op.PUSH, 1.0, 1.1, peer=2).trace(world_size=2)
    cockpit = Cockpit(ring(1))
    cockpit._process(trace, False)
    start = cockpit.get_state("picture")["picture"]["start"]
    assert start == pytest.approx(script.start + 0.8, abs=1e-4)
    cockpit.close()


def test_buttons_are_handled_and_acknowledged(open_browser):
    stepper = ring()
    browser = open_browser(stepper)
    browser.click("next")
    browser.wait_for_step(1, 1)
    browser.click("next", rank=1)
    browser.wait_for_step(2, 2)
    browser.click("back")
    browser.wait_for_step(1, 2)
    browser.click("seek", position=0)
    browser.wait_for_step(0, 2)
    assert stepper.calls == [("next", None), ("next", 1), ("seek", 1), ("seek", 0)]
    expected = snapshot(stepper)
    assert browser.state["sources"] == expected.pop("sources") and browser.steps == expected


def test_user_can_seek_back_and_pause_while_ranks_run(open_browser, monkeypatch):
    stepper, running, release = ring(2), threading.Event(), threading.Event()
    monkeypatch.setattr(stepper, "finish", lambda: (running.set(), release.wait(60)))
    browser = open_browser(stepper)
    browser.cockpit._handle_custom_msg({"do": "finish", "id": "x"}, [])
    assert running.wait(60)
    browser.cockpit._handle_custom_msg({"do": "seek", "position": 1, "id": "y"}, [])
    browser.wait(lambda: {"done": "y"} in browser.messages)
    browser.wait_for_step(1, 2)
    assert {"received": "x"} in browser.messages and {"done": "x"} not in browser.messages
    release.set()
    browser.wait(lambda: {"done": "x"} in browser.messages)


def test_invalid_action_is_shown_as_an_error(open_browser):
    stepper = steps.cycle()
    stepper.next()
    browser = open_browser(stepper)
    browser.click("next", rank=1)
    browser.wait(lambda: browser.steps["error"])
    assert browser.steps["error"].startswith("rank 1: blocked in recv(src=0) at In[7]:7")
    browser.click("back")
    browser.wait(lambda: browser.steps["error"] == "")
    browser.click("jump")
    browser.wait(lambda: browser.steps["error"])
    assert browser.steps["error"] == "KeyError: 'jump'"


# -- the static picture and the table ----------------------------------------------------


def texts(picture):
    return [
        text for element in ET.fromstring(picture).iter(f"{SVG}text") for text in element.itertext()
    ]


def test_notebook_stores_picture_and_table(tmp_path):
    stepper = ring(3)
    stepper.next(0)
    cockpit = Cockpit(stepper)
    picture, table = cockpit._draw()
    assert table.splitlines() == [
        "fn: step 4 of 4",
        "  rank    state    call         line               waits for",
        "  rank 0  blocked  recv(src=3)  collectives.py:18  rank 3",
        "  rank 1  paused   send(dst=2)  collectives.py:15",
        "  rank 2  paused   recv(src=1)  collectives.py:18",
        "  rank 3  paused   send(dst=0)  collectives.py:15",
    ]
    assert cockpit.save(tmp_path / "fn.svg").read_text("utf-8") == picture
    words = texts(picture)
    assert "recv(src=3)" in words and "collectives.py:18" in words
    assert any(word.startswith("rank 3 is paused before send(dst=0) at") for word in words)
    assert "paused before send" in words
    cockpit.close()


def test_static_picture_shows_errors_and_the_shown_moment():
    stepper = steps.cycle()
    stepper.next()
    stepper.findings = [FINDING]
    shown = snapshot(stepper)
    timeline = Columns(stepper.trace).picture()
    assert any(FINDING.message in words for words in texts(to_svg(shown, timeline)))
    assert f"! {FINDING.message}" in to_table(shown, timeline)
    stepper.error = "rank 1 died"
    assert "! rank 1 died" in to_table(snapshot(stepper), timeline)
    stepper.seek(0)
    words = texts(to_svg(snapshot(stepper), timeline))
    assert "step 0 of 1, looking back" in words
    assert not any(FINDING.message in word for word in words)


@pytest.mark.parametrize("n", [1, 3, 9, 20])
def test_static_pictures_are_well_formed_and_small(n):
    scripts = [
        [
            dict(
                op=Op.ALL_REDUCE,
                where="many.py:300",
                shape=(64,),
                nbytes=256,
                dtype="float32",
                before=[float(r)] * 64,
            )
        ]
        for r in range(n)
    ]
    stepper = FakeStepper("many", scripts, {"many.py": "x <= 1 & y\n" * 400})
    picture = to_svg(snapshot(stepper), Columns(stepper.trace).picture())
    assert ET.fromstring(picture).tag == f"{SVG}svg" and len(picture.encode()) < 80_000
    assert "many.py:300" in texts(picture)
    assert ("… and 4 more ranks" in texts(picture)) == (n == 20)
