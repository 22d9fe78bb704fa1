"""The cockpit in a browser, with a fake stepper instead of ranks and a kernel."""

import json
import queue
from pathlib import Path
from typing import Any

import pytest
import steps
from ipywidgets.widgets.widget import _put_buffers
from sheets import RESULTS, letters, settle

from distkit.trace.info import RankInfo
from distkit.views import Cockpit
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
window.taken = () => sent.splice(0);
window.feed = ({ method, state: more, content }) => {
  Object.assign(state, more);
  const heard = method === "custom" ? ["msg:custom"] : Object.keys(more).map((k) => `change:${k}`);
  for (const name of heard) for (const f of on[name] ?? []) f(content);
};
window.show = (id) => cockpit.render({model, el: document.getElementById(id)});
window.leaked = [];
document.addEventListener("keydown", (e) => leaked.push(e.key));
show("at");
</script>"""


class Link:
    """Carries messages between page and widget, like a kernel."""

    def __init__(self, tab: Any, stepper: Any, path: Path, monkeypatch: Any) -> None:
        self.tab, self.stepper, self.cockpit = tab, stepper, Cockpit(stepper)
        self.out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        parts = {k: self.cockpit.get_state(k)[k] for k in ("picture", "steps", "sources")}
        monkeypatch.setattr(self.cockpit, "_send", self.receive)
        script = esm("cockpit").replace("export default", "const cockpit =")
        text = PAGE % (
            css("cockpit"),
            script,
            json.dumps(parts, default=letters).replace("<", "\\u003c"),
        )
        path.write_text(text, encoding="utf-8")
        tab.page.goto(path.as_uri())
        self.root = tab.page.locator("#at .distkit-cockpit[data-cockpit=ready]")
        self.root.wait_for()

    def receive(self, message: Any, buffers: Any = None) -> None:
        _put_buffers(message.get("state", {}), message.get("buffer_paths", ()), buffers or ())
        self.out.put(message)

    def carry(self) -> None:
        """Deliver the page's messages to the widget, and its replies until the command is done."""
        for message in self.tab.page.evaluate("taken()"):
            self.cockpit._handle_custom_msg(message, [])
            self.until(lambda m, me=message: m.get("content") == {"did": me["id"]})
        while not self.out.empty():
            self.one()

    def until(self, what: Any) -> None:
        while not what(self.one()):
            pass

    def one(self) -> Any:
        message = self.out.get(timeout=60)
        reported = json.dumps(message, default=letters)
        self.tab.page.evaluate("told => feed(JSON.parse(told))", reported)
        return message

    def drawn(self, act: Any) -> None:
        """Perform an action and wait until its moment is drawn."""
        before = self.moment
        act()
        self.carry()
        while self.moment == before:
            if not self.out.empty():
                self.one()
        settle(self.tab.page)

    def reach(self, state: str) -> None:
        """Deliver messages until the page reaches a state."""
        while self.root.get_attribute("data-state") != state:
            if not self.out.empty():
                self.one()
        settle(self.tab.page)

    def press(self, key: str) -> None:
        self.drawn(lambda: self.tab.page.keyboard.press(key))

    def click(self, selector: str) -> None:
        self.drawn(lambda: self.root.locator(selector).click())

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
def opened(tab: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    links = []

    def open_(stepper: Any) -> Link:
        links.append(Link(tab, stepper, tmp_path / "cockpit.html", monkeypatch))
        return links[-1]

    yield open_
    for link in links:
        link.cockpit.close()
    assert tab.errors == [] and tab.outside == []


def test_next_moves_markers_and_cards(opened: Any) -> None:
    link = opened(steps.ring())
    assert link.text(".dk-step") == "before the first step"
    assert link.lines() == {0: "17", 1: "14", 2: "17", 3: "14"}
    link.click(".dk-next")
    assert link.text(".dk-step") == "step 1 of 1"
    assert link.lines() == {0: "18", 1: "15", 2: "18", 3: "15"}
    card = link.text(".dk-card[data-rank='1']")
    for words in (
        "rank 1",
        "paused",
        "send(dst=2)",
        "collectives.py:15",
        "recv from rank 0",
        "before",
        "after",
        "float32 [16]",
    ):
        assert words in card
    assert link.root.locator(".dk-card[data-rank='1'] .dk-strip i").count() == 2 * 16
    assert "rank 1: paused before send(dst=2)" in link.root.locator("> .dk-spoken").text_content()


def test_user_function_is_shown_with_the_library_folded(opened: Any) -> None:
    link = opened(steps.called())
    assert link.text(".dk-tab[aria-selected=true]") == "In[5]"
    assert link.text(".dk-fold button") == "in ring_all_reducecollectives.py"
    before = {15: "before recv", 17: "before send", 14: "before recv"}
    shown = ".dk-fold .dk-row:has(.dk-pin) code"
    output = link.root.locator(shown).evaluate_all("all => all.map((code) => code.dataset.at)")
    assert set(output) <= set(before.values()) and len(output) == 2
    link.click(".dk-next")  # another call on the same line of fn
    assert link.lines() == {0: "18", 1: "15", 2: "18", 3: "15"}
    link.root.locator(".dk-fold button").click()
    assert link.lines() == dict.fromkeys(range(4), "5")
    assert link.root.locator(".dk-fold .dk-row").count() == 0
    at = link.root.locator(".dk-here code").get_attribute("data-at")
    assert at == "0, 2 before recv · 1, 3 before send"
    link.root.locator(".dk-tab >> nth=1").click()  # the library's source has the markers as well
    assert link.lines() == {0: "18", 1: "15", 2: "18", 3: "15"}


@pytest.mark.parametrize("make", [steps.ring, steps.called, steps.cycle])
def test_cockpit_fits_wide_and_narrow_columns(opened: Any, tab: Any, make: Any) -> None:
    link = opened(make())
    link.click(".dk-next")
    for width, height in ((1280, 640), (1100, 598), (860, 640), (400, 1400)):
        tab.page.set_viewport_size({"width": width, "height": 720})
        tab.page.wait_for_function(  # the layout is updated after a resize
            """([root, width, height]) => {
                const source = root.querySelector(".dk-window");
                return root.getBoundingClientRect().height <= height &&
                    document.documentElement.scrollWidth === width &&
                    source.scrollWidth <= source.clientWidth;
            }""",
            arg=[link.root.element_handle(), width, height],
        )


def test_single_step_blocks_the_rank(opened: Any) -> None:
    link = opened(steps.ring())
    link.click(".dk-go[data-rank='1']")
    assert link.stepper.calls == [("next", 1)]
    assert link.root.locator(".dk-window .dk-pin[data-status=blocked]").inner_text() == "1"
    assert "rank 0 is paused before send(dst=1)" in link.text(".dk-card[data-rank='1']")
    button = link.root.locator(".dk-go[data-rank='1']")
    assert button.get_attribute("aria-disabled") == "true"
    assert button.get_attribute("title").startswith("rank 1: blocked in recv(src=0)")
    assert link.root.locator(".dk-chip").all_inner_texts() == ["3 paused", "1 blocked"]


def test_user_can_look_back_and_return(opened: Any, tab: Any) -> None:
    link = opened(steps.ring())
    for _ in range(3):
        link.click(".dk-next")
    link.click(".dk-back")
    assert (link.position, link.root.get_attribute("data-state")) == (2, "past")
    assert link.lines() == {0: "17", 1: "14", 2: "17", 3: "14"}
    assert link.root.locator(".dk-go[aria-disabled=true]").count() == 4
    link.click(".dk-next")  # replays the moments already seen
    assert link.position == 3 and len(link.stepper.moments) == 4
    scrub = link.root.locator(".dk-scrub")
    link.drawn(lambda: scrub.fill("1"))
    assert link.position == 1 and link.text(".dk-step") == "step 1 of 3"


def test_play_runs_to_the_end(opened: Any) -> None:
    link = opened(steps.ring())
    link.root.locator(".dk-speed").select_option("5")
    link.click(".dk-play")
    assert ("play", 5.0) in link.stepper.calls
    link.reach("finished")
    assert link.position == 7
    for name in ("next", "play", "finish"):
        assert (
            link.root.locator(f".dk-{name}").get_attribute("title") == "The program has finished."
        )
    assert link.root.locator(".dk-chip").inner_text() == "all finished"


def test_keys_match_buttons_and_do_not_propagate(opened: Any, tab: Any) -> None:
    link = opened(steps.ring())
    link.root.focus()
    for key, position in (
        ("n", 1),
        ("ArrowRight", 2),
        ("b", 1),
        ("ArrowLeft", 0),
        ("End", 2),
        ("Home", 0),
        ("End", 2),
        ("1", 3),
        ("f", 8),
    ):
        link.press(key)
        assert link.position == position, key
    assert ("next", 1) in link.stepper.calls
    tab.page.keyboard.press("?")
    assert link.root.locator("dl.dk-help").is_visible()
    tab.page.keyboard.press("9")
    assert link.root.locator("> .dk-spoken").text_content() == "There is no rank 9."
    link.root.locator("canvas").focus()  # these keys are the timeline's
    tab.page.keyboard.press("0")
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate("taken()") == [] and link.position == 8
    assert tab.page.evaluate("leaked") == []
    tab.page.keyboard.press("Control+s")
    assert "s" in tab.page.evaluate("leaked")


def test_deadlock_is_announced_in_view(opened: Any) -> None:
    link = opened(steps.cycle())
    link.click(".dk-next")
    link.stepper.findings = [steps.FOUND]
    link.stepper._changed()
    link.until(lambda m: any("remarks" in v for v in m.get("state", {}).values()))
    link.root.locator(".dk-remark span", has_text="Let one of them send first.").wait_for()
    assert steps.FOUND.message in link.text(".dk-finding")
    assert link.root.locator(".dk-graph .mark-held").count() == 2
    assert link.root.locator(".dk-graph .mark-wrong").count() == 2
    assert link.root.locator(".dk-graph").get_attribute("aria-label").startswith("rank 0: blocked")
    hot = link.root.locator(".dk-hot").all()
    assert [row.get_attribute("data-line") for row in hot] == ["4", "7"]
    assert "none can continue" in link.root.locator(".dk-next").get_attribute("title")
    link.click(".dk-back")
    assert link.text(".dk-finding") == ""


def test_two_views_of_one_cockpit_show_the_same(opened: Any, tab: Any) -> None:
    link = opened(steps.ring())
    link.click(".dk-next")
    tab.page.evaluate("void show('too')")
    other = tab.page.locator("#too .distkit-cockpit")
    assert other.get_attribute("data-position") == "1"
    link.click(".dk-next")
    tab.page.wait_for_function("document.querySelector('#too [data-position=\"2\"]')")
    assert other.locator(".dk-step").inner_text() == "step 2 of 2"


def test_unresponsive_kernel_is_announced(opened: Any, tab: Any) -> None:
    tab.page.clock.install()
    link = opened(steps.ring())
    link.root.locator(".dk-next").click()
    tab.page.clock.run_for(5_000)
    link.root.locator(".dk-trouble", has_text="The kernel is not responding").wait_for()
    link.carry()
    tab.page.clock.run_for(100)
    link.root.locator(".dk-trouble:empty").wait_for(state="attached")


def test_dead_kernel_disables_the_cockpit(opened: Any, tab: Any) -> None:
    link = opened(steps.ring())
    link.click(".dk-next")
    tab.page.evaluate("lose()")
    link.root.locator(
        ".dk-trouble", has_text="The kernel has stopped: run the cell again."
    ).wait_for()
    buttons = link.root.locator(".dk-button:not(.dk-help)").all()
    assert {b.get_attribute("aria-disabled") for b in buttons} == {"true"}
    assert link.root.locator(".dk-scrub").is_disabled()
    link.root.focus()
    tab.page.keyboard.press("n")
    assert tab.page.evaluate("taken()") == []


ERROR = """rank 1 raised ValueError: too small at collectives.py:9
The others were released: rank 0.

Traceback on rank 1:
  File "collectives.py", line 9, in fn
ValueError: too small"""


def test_failed_run_is_announced_once_and_ranks_keep_their_place(opened: Any) -> None:
    stepper = steps.ring(3)
    stepper.next()
    stepper.fail(ERROR, 1, "ValueError: too small", "collectives.py:9")
    link = opened(stepper)
    assert link.root.locator(".dk-remark").count() == 1 and link.text(".dk-trouble") == ""
    assert link.text(".dk-remark strong").startswith("rank 1 raised ValueError")
    trace = link.root.locator(".dk-remark pre")
    assert not trace.is_visible()
    link.root.locator("summary").click()
    assert trace.inner_text().splitlines() == ERROR.splitlines()[3:]
    assert link.lines() == {0: "18", 1: "9", 2: "17"}
    assert "ValueError: too small" in link.text(".dk-card[data-rank='1']")
    assert link.root.locator(".dk-chip").all_inner_texts() == ["2 released", "1 failed"]


def test_program_without_communication_has_a_notice(opened: Any) -> None:
    link = opened(steps.FakeStepper("quiet", [[], []], {}))
    assert link.text(".dk-source") == "It has no communication calls to step through."


def test_cockpit_is_drawn_in_both_themes_and_widths(opened: Any, tab: Any) -> None:
    link = opened(steps.ring())
    for _ in range(3):
        link.click(".dk-next")
    link.click(".dk-go[data-rank='0']")
    RESULTS.mkdir(exist_ok=True)
    for scheme in ("light", "dark"):
        for width in (1200, 640):
            tab.page.emulate_media(color_scheme=scheme)
            tab.page.set_viewport_size({"width": width, "height": 1200})
            settle(tab.page)
            overflow = "() => document.documentElement.scrollWidth - innerWidth"
            assert tab.page.evaluate(overflow) <= 0
            tops = {link.root.locator(f".dk-{c}").bounding_box()["y"] for c in ("source", "cards")}
            assert len(tops) == (1 if width == 1200 else 2)
            tab.page.screenshot(path=RESULTS / f"cockpit-{scheme}-{width}.png")


def test_cards_name_the_host_of_a_rank(tab: Any, tmp_path: Path, monkeypatch: Any) -> None:
    stepper = steps.ring(4)
    hosts = ["alpha", "alpha", "beta", "beta"]
    stepper.about = {r: RankInfo(host=host) for r, host in enumerate(hosts)}
    tab.page.set_viewport_size({"width": 1280, "height": 720})
    Link(tab, stepper, tmp_path / "page.html", monkeypatch)
    assert tab.page.locator(".dk-host").all_inner_texts() == [f"on {host}" for host in hosts]
    tab.page.screenshot(path=RESULTS / "hosts-cockpit.png")
    assert not tab.errors
