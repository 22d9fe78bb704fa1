"""The cockpit in a browser, with a fake stepper instead of ranks and a kernel."""

import json
import queue
from pathlib import Path
from typing import Any

import pytest
import steps
from ipywidgets.widgets.widget import _put_buffers
from sheets import RESULTS, settle, to_base64

from distkit.views.cockpit import Cockpit
from distkit.views.widget.assets import css, esm

PAGE = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<style>%s</style><p id="before" tabindex="0">before</p><div id="at"></div><div id="too"></div>
<script type="module">%s
const state = %s, on = {}, sent = [];
const model = {get: (k) => state[k], on: (k, f) => (on[k] ??= []).push(f), off: () => {},
               send: (message) => {
                 if (window.gone) throw new Error("Cannot send");
                 sent.push(message);
               }};
window.lose = () => { window.gone = true; for (const f of on.comm_live_update) f(); };
window.takeSent = () => sent.splice(0);
window.feed = ({ method, state: delta, content }) => {
  Object.assign(state, delta);
  const events = method === "custom" ? ["msg:custom"] : Object.keys(delta).map(k => `change:${k}`);
  for (const name of events) for (const f of on[name] ?? []) f(content);
};
window.show = (id) => cockpit.render({model, el: document.getElementById(id)});
window.leaked = [];
document.addEventListener("keydown", (e) => leaked.push(e.key));
show("at");
</script>"""


class Link:
    """Carries messages between the page and the widget, like a kernel."""

    def __init__(self, tab: Any, stepper: Any, path: Path, monkeypatch: Any) -> None:
        self.tab, self.stepper, self.cockpit = tab, stepper, Cockpit(stepper)
        self.to_page: queue.SimpleQueue[Any] = queue.SimpleQueue()
        parts = {k: self.cockpit.get_state(k)[k] for k in ("picture", "steps", "sources")}
        monkeypatch.setattr(self.cockpit, "_send", self.receive)
        script = esm("cockpit").replace("export default", "const cockpit =")
        text = PAGE % (
            css("cockpit"),
            script,
            json.dumps(parts, default=to_base64).replace("<", "\\u003c"),
        )
        path.write_text(text, encoding="utf-8")
        tab.page.goto(path.as_uri())
        self.root = tab.page.locator("#at .distkit-cockpit[data-cockpit=ready]")
        self.root.wait_for()

    def receive(self, message: Any, buffers: Any = None) -> None:
        _put_buffers(message.get("state", {}), message.get("buffer_paths", ()), buffers or ())
        self.to_page.put(message)

    def deliver_all(self) -> None:
        """Deliver the page's messages to the widget, and the widget's replies to the page."""
        for message in self.tab.page.evaluate("takeSent()"):
            self.cockpit._handle_custom_msg(message, [])
            self.wait_until(lambda m, me=message: m.get("content") == {"done": me["id"]})
        while not self.to_page.empty():
            self.deliver_one()

    def wait_until(self, condition: Any) -> None:
        while not condition(self.deliver_one()):
            pass

    def deliver_one(self) -> Any:
        message = self.to_page.get(timeout=60)
        encoded = json.dumps(message, default=to_base64)
        self.tab.page.evaluate("message => feed(JSON.parse(message))", encoded)
        return message

    def wait_until_drawn(self, action: Any) -> None:
        """Perform an action, and wait until the cockpit shows another moment."""
        before = self.moment
        action()
        self.deliver_all()
        while self.moment == before:
            if not self.to_page.empty():
                self.deliver_one()
        settle(self.tab.page)

    def press(self, key: str) -> None:
        self.wait_until_drawn(lambda: self.tab.page.keyboard.press(key))

    def click(self, selector: str) -> None:
        self.wait_until_drawn(lambda: self.root.locator(selector).click())

    @property
    def moment(self) -> int:
        return int(self.root.get_attribute("data-moment"))

    @property
    def position(self) -> int:
        return int(self.root.get_attribute("data-position"))

    def text(self, selector: str) -> str:
        settle(self.tab.page)
        return self.root.locator(selector).inner_text()

    def lines(self) -> dict[int, str]:
        """Return the line of each rank's marker."""
        settle(self.tab.page)
        pins = self.root.locator(".dk-window .dk-pin").all()
        return {int(p.get_attribute("data-rank")): p.get_attribute("data-line") for p in pins}


@pytest.fixture
def open_cockpit(tab: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    links = []

    def open_(stepper: Any) -> Link:
        links.append(Link(tab, stepper, tmp_path / "cockpit.html", monkeypatch))
        return links[-1]

    yield open_
    for link in links:
        link.cockpit.close()
    assert tab.errors == [] and tab.external_requests == []


def test_next_updates_markers_and_cards(open_cockpit: Any, tab: Any) -> None:
    link = open_cockpit(steps.ring())
    assert link.text(".dk-step") == "before the first step"
    assert link.lines() == {0: "17", 1: "14", 2: "17", 3: "14"}
    link.click(".dk-next")
    assert link.text(".dk-step") == "step 1 of 1"
    assert link.lines() == {0: "18", 1: "15", 2: "18", 3: "15"}
    card = link.text(".dk-card[data-rank='1']")
    for text in (
        "rank 1",
        "paused",
        "send(dst=2)",
        "collectives.py:15",
        "recv from rank 0",
        "before",
        "after",
        "float32 [16]",
    ):
        assert text in card
    assert "rank 1: paused before send(dst=2)" in link.root.locator("> .dk-spoken").text_content()
    RESULTS.mkdir(exist_ok=True)
    fits = """([root, width, height]) => root.getBoundingClientRect().height <= height &&
        document.documentElement.scrollWidth === width"""
    for scheme, width, height in (("light", 1280, 640), ("dark", 400, 1400)):
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.set_viewport_size({"width": width, "height": 720})
        tab.page.wait_for_function(fits, arg=[link.root.element_handle(), width, height])
        settle(tab.page)
        tab.page.screenshot(path=RESULTS / f"cockpit-{scheme}-{width}.png")


def test_library_code_can_be_collapsed_into_the_calling_line(open_cockpit: Any) -> None:
    link = open_cockpit(steps.ring_from_cell())
    assert link.text(".dk-tab[aria-selected=true]") == "In[5]"
    assert link.text(".dk-fold button") == "in ring_all_reducecollectives.py"
    assert link.lines() == {0: "17", 1: "14", 2: "17", 3: "14"}
    link.root.locator(".dk-fold button").click()
    assert link.lines() == dict.fromkeys(range(4), "5")
    assert link.root.locator(".dk-fold .dk-row").count() == 0


def test_keys_act_like_buttons_and_do_not_propagate(open_cockpit: Any, tab: Any) -> None:
    link = open_cockpit(steps.ring())
    tab.page.emulate_media(reduced_motion="reduce")  # no flashes to wait for
    link.root.focus()
    for key, position in (
        ("n", 1),
        ("b", 0),
        ("End", 1),
        ("1", 2),
        ("f", 8),
    ):
        link.press(key)
        assert link.position == position, key
    assert ("next", 1) in link.stepper.calls
    tab.page.keyboard.press("?")
    assert link.root.locator("dl.dk-help").is_visible()
    tab.page.keyboard.press("9")
    assert link.root.locator("> .dk-spoken").text_content() == "There is no rank 9."
    link.root.locator("canvas").focus()  # the timeline handles these keys
    tab.page.keyboard.press("0")
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate("takeSent()") == [] and link.position == 8
    assert tab.page.evaluate("leaked") == []
    tab.page.keyboard.press("Control+s")
    assert "s" in tab.page.evaluate("leaked")


def test_deadlock_is_announced_in_the_cockpit(open_cockpit: Any) -> None:
    link = open_cockpit(steps.cycle())
    link.click(".dk-next")
    link.stepper.findings = [steps.FINDING]
    link.stepper._changed()
    link.wait_until(lambda m: any("remarks" in v for v in m.get("state", {}).values()))
    link.root.locator(".dk-remark span", has_text="Let one of them send first.").wait_for()
    assert steps.FINDING.message in link.text(".dk-finding")
    assert link.root.locator(".dk-graph .mark-held").count() == 2
    assert "none can continue" in link.root.locator(".dk-next").get_attribute("title")
    link.click(".dk-back")
    assert link.text(".dk-finding") == ""


def test_cockpit_is_disabled_when_the_kernel_stops(open_cockpit: Any, tab: Any) -> None:
    link = open_cockpit(steps.ring())
    link.click(".dk-next")
    tab.page.evaluate("lose()")
    link.root.locator(
        ".dk-error", has_text="The kernel has stopped: run the cell again."
    ).wait_for()
    buttons = link.root.locator(".dk-button:not(.dk-help)").all()
    assert {b.get_attribute("aria-disabled") for b in buttons} == {"true"}
    assert link.root.locator(".dk-scrub").is_disabled()
    link.root.focus()
    tab.page.keyboard.press("n")
    assert tab.page.evaluate("takeSent()") == []


ERROR = """rank 1 raised ValueError: too small at collectives.py:9
The others were stopped: rank 0.

Traceback on rank 1:
  File "collectives.py", line 9, in fn
ValueError: too small"""


def test_failed_run_is_announced_once_and_ranks_keep_their_line(open_cockpit: Any) -> None:
    stepper = steps.ring(3)
    stepper.next()
    stepper.fail(ERROR, 1, "ValueError: too small", "collectives.py:9")
    link = open_cockpit(stepper)
    assert link.root.locator(".dk-remark").count() == 1 and link.text(".dk-error") == ""
    assert link.text(".dk-remark strong").startswith("rank 1 raised ValueError")
    trace = link.root.locator(".dk-remark pre")
    assert not trace.is_visible()
    link.root.locator("summary").click()
    assert trace.inner_text().splitlines() == ERROR.splitlines()[3:]
    assert link.lines() == {0: "18", 1: "9", 2: "17"}
    assert "ValueError: too small" in link.text(".dk-card[data-rank='1']")
    assert link.root.locator(".dk-chip").all_inner_texts() == ["2 stopped", "1 failed"]
