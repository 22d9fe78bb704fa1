"""The stage in a real browser, with traces of real ranks: played, stepped, scrubbed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from traces import hang, odd_values, parameter_server

import distkit as dk
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit.views.scene.theme import theme
from distkit.views.stage.projection import project
from distkit.views.widget.assets import css, esm

RESULTS = Path(__file__).parents[2] / "test-results"

PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>%s
body { margin: 16px } @media (prefers-color-scheme: dark) { body { background: #0b0e12 } }
</style><div id="at"></div>
<script type="module">%s
const state = {picture: %s}, listeners = [];
const model = {get: (k) => state[k], on: (_, f) => listeners.push(f), off: () => {}};
window.feed = (name, patch) => { state[name] = patch; listeners.forEach((f) => f()); };
window.dispose = stage.render({model, el: document.getElementById("at")});
</script>"""


def ring() -> None:
    torch.manual_seed(dist.get_rank())
    dk.ring_all_reduce(torch.randn(16))


def tree() -> None:
    """A broadcast from rank 0: whoever has the tensor passes it on, twice as many every round."""
    rank, n, have = dist.get_rank(), dist.get_world_size(), 1
    x = torch.full((4,), rank + 1.0)
    while have < n:
        if rank < have:
            dist.send(x, dst=rank + have)
        elif rank < 2 * have:
            dist.recv(x, src=rank - have)
        have *= 2


def native() -> None:
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.barrier()


def recorded(f: Any) -> Trace:
    """A run in which there was time to look at every tensor: not so on a busy machine."""
    runs = (dk.run_ranks(f, 4).trace for _ in range(10))
    return next(trace for trace in runs if not trace.meta["without_values"])


@pytest.fixture(scope="module")
def real() -> dict[str, Trace]:
    return {f.__name__: recorded(f) for f in (ring, tree, native)}


def load(tab: Any, folder: Path, picture: dict[str, Any], **more: Any) -> Any:
    """The stage on a page of its own."""
    snapshot = json.dumps({**picture, "theme": theme(), "next": 0}).replace("<", "\\u003c")
    script = esm("stage").replace("export default", "const stage =")
    path = folder / "stage.html"
    path.write_text(PAGE % (css("stage"), script, snapshot), encoding="utf-8")
    tab.page.emulate_media(**more)
    tab.page.goto(path.as_uri())
    root = tab.page.locator(".distkit-stage[data-stage=ready]")
    root.wait_for()
    return root


def quiet(tab: Any) -> bool:
    return tab.errors == [] and tab.outside == []


def at(tab: Any, beat: int) -> None:
    """Wait until a beat is the current one, and the picture rests."""
    tab.page.wait_for_selector(f".distkit-stage[data-beat='{beat}']")


def full(tab: Any) -> int:
    """How many contributions all strips hold together."""
    return tab.page.locator(".dk-strips .dk-sure").count()


def test_a_ring_all_reduce_is_stepped_through(tab: Any, real: Any, tmp_path: Path) -> None:
    root = load(tab, tmp_path, project(real["ring"]), reduced_motion="reduce")
    assert "schedule of a ring all-reduce" in tab.page.locator(".dk-said").inner_text()
    assert tab.page.locator(".dk-beats li").count() == 24
    assert full(tab) == 16  # four chunks on each of four ranks, its own contribution in each
    root.focus()
    tab.page.keyboard.press("ArrowRight")
    at(tab, 0)
    assert full(tab) == 17
    assert tab.page.locator(".dk-beats [aria-current=step]").count() == 1
    fact = tab.page.locator(".dk-fact").inner_text()
    assert "→" in fact and "added" in fact and "16 B" in fact and "collectives.py" in fact
    tab.page.keyboard.press("ArrowLeft")
    at(tab, -1)
    assert full(tab) == 16
    tab.page.keyboard.press("End")
    at(tab, 23)
    assert full(tab) == 64
    tab.page.keyboard.press("Home")
    tab.page.keyboard.press("PageDown")
    assert int(root.get_attribute("data-beat")) >= 3
    assert quiet(tab)


def test_it_plays_pauses_and_ends(tab: Any, real: Any, tmp_path: Path) -> None:
    root = load(tab, tmp_path, project(real["ring"]), reduced_motion="no-preference")
    tab.page.select_option(".dk-speed", "4")
    root.focus()
    tab.page.keyboard.press("Space")
    tab.page.wait_for_selector(".dk-token")
    token = tab.page.locator(".dk-token").first
    first = token.get_attribute("transform")
    tab.page.wait_for_function(
        "t => document.querySelector('.dk-token')?.getAttribute('transform') !== t", arg=first
    )
    tab.page.keyboard.press("Space")
    assert root.get_attribute("data-playing") == "false"
    paused = tab.page.locator(".dk-clock").inner_text()
    tab.page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    assert tab.page.locator(".dk-clock").inner_text() == paused
    tab.page.click(".dk-play")
    at(tab, 23)
    tab.page.wait_for_selector(".distkit-stage[data-playing=false]")
    assert full(tab) == 64 and tab.page.locator(".dk-token").count() == 0
    assert quiet(tab)


def test_with_reduced_motion_playing_goes_from_message_to_message(
    tab: Any, real: Any, tmp_path: Path
) -> None:
    root = load(tab, tmp_path, project(real["tree"]), reduced_motion="reduce")
    tab.page.select_option(".dk-speed", "4")
    root.focus()
    tab.page.keyboard.press("Space")
    for beat in range(3):
        at(tab, beat)
    tab.page.wait_for_selector(".distkit-stage[data-playing=false]")
    colours = tab.page.eval_on_selector_all(
        ".dk-strips .dk-sure", "all => all.map(r => r.getAttribute('fill'))"
    )
    assert colours == ["var(--dk-r0)"] * 4
    assert quiet(tab)


def test_time_is_scrubbed_and_a_row_is_chosen(tab: Any, real: Any, tmp_path: Path) -> None:
    load(tab, tmp_path, project(real["ring"]), reduced_motion="reduce")
    tab.page.locator(".dk-scrub").fill("1000")
    at(tab, 23)
    late = tab.page.locator(".dk-clock").inner_text()
    tab.page.locator(".dk-beats li").nth(4).click()
    at(tab, 4)
    assert tab.page.locator(".dk-clock").inner_text() != late
    assert full(tab) < 64 and quiet(tab)


def test_by_rounds_all_messages_of_a_round_fly_together(
    tab: Any, real: Any, tmp_path: Path
) -> None:
    root = load(tab, tmp_path, project(real["ring"]), reduced_motion="reduce")
    tab.page.click("[data-clock=rounds]")
    assert tab.page.locator(".dk-clock").inner_text() == "round 1"
    root.focus()
    for rounds, held in enumerate((20, 28, 40, 52, 60, 64), 1):
        tab.page.keyboard.press("PageDown")
        at(tab, 4 * rounds - 1)
        assert full(tab) == held
    tab.page.keyboard.press("ArrowLeft")
    at(tab, 22)
    tab.page.locator(".dk-scrub").fill("420")  # 2.52 of 6: in the middle of round 3
    assert tab.page.locator(".dk-token").count() == 4
    tab.page.click("[data-clock=time]")
    assert full(tab) == 16 and quiet(tab)


def test_values_instead_of_contributions(tab: Any, real: Any, tmp_path: Path) -> None:
    root = load(tab, tmp_path, project(real["ring"]), reduced_motion="reduce")
    root.focus()
    tab.page.keyboard.press("v")
    assert full(tab) == 0
    assert tab.page.locator("[data-mode=values]").get_attribute("aria-pressed") == "true"
    fills = set(
        tab.page.eval_on_selector_all(
            ".dk-strips rect[fill]", "all => all.map(r => r.getAttribute('fill'))"
        )
    )
    assert len(fills) > 8
    tab.page.click("[data-mode=contributions]")
    assert full(tab) == 16 and quiet(tab)


def test_collectives_meet_in_a_hub(tab: Any, real: Any, tmp_path: Path) -> None:
    picture = project(real["native"])
    load(tab, tmp_path, picture, reduced_motion="reduce")
    beat = picture["beats"][0]
    part = 1000 * (beat["meet"] - picture["start"]) / (picture["end"] - picture["start"])
    tab.page.locator(".dk-scrub").fill(str(int(part)))
    assert tab.page.locator(".dk-hub").count() >= 1  # who has left may be in the next one
    tab.page.locator(".dk-scrub").fill("1000")
    assert full(tab) == 16  # four ranks, one chunk, all four contributions
    rows = tab.page.locator(".dk-beats li").all_inner_texts()
    assert [row.split("\n")[0] for row in rows] == ["all_reduce", "barrier"]
    assert quiet(tab)


@pytest.mark.parametrize("make", [hang, odd_values, parameter_server, Trace])
def test_odd_runs_are_shown_without_a_murmur(tab: Any, make: Any, tmp_path: Path) -> None:
    picture = project(make())
    root = load(tab, tmp_path, picture, reduced_motion="reduce")
    root.focus()
    for key in ("ArrowRight", "PageDown", "v", "End", "ArrowRight", "Home", "ArrowLeft"):
        tab.page.keyboard.press(key)
    assert tab.page.locator(".dk-notices li").count() == len(picture["notices"])
    said = tab.page.locator(".dk-fact").inner_text()
    assert said == ("at the start" if picture["beats"] else "nothing was said")
    assert quiet(tab)


def test_a_thousand_ranks(tab: Any, tmp_path: Path) -> None:
    events = []
    for r in range(1000):
        left, right = (r - 1) % 1000, (r + 1) % 1000
        events += [
            Event(r, 0, Op.SEND, State.STARTED, 0.0, peer=right, nbytes=4),
            Event(r, 1, Op.RECV, State.STARTED, 0.0, peer=left, nbytes=4),
            Event(r, 1, Op.RECV, State.COMPLETED, 0.5 + r / 1e4, peer=left),
        ]
    root = load(tab, tmp_path, project(Trace(events)), reduced_motion="reduce")
    assert tab.page.locator(".dk-nodes circle").count() == 1000
    assert tab.page.locator(".dk-number").count() == 0
    assert tab.page.locator(".dk-link").count() == 1
    root.focus()
    tab.page.keyboard.press("End")
    at(tab, 999)
    assert quiet(tab)


def test_a_live_run_grows_until_it_ends(tab: Any, real: Any, tmp_path: Path) -> None:
    whole = real["ring"]
    early = project(Trace(whole.events[:60], whole.meta), live=True)
    root = load(tab, tmp_path, early, reduced_motion="reduce")
    assert tab.page.locator(".dk-live").is_visible()
    tab.page.evaluate("patch => feed('patch0', patch)", project(whole))
    assert not tab.page.locator(".dk-live").is_visible()
    assert tab.page.locator(".dk-beats li").count() == 24
    root.focus()
    tab.page.keyboard.press("End")
    at(tab, 23)
    assert full(tab) == 64
    tab.page.evaluate("dispose()")
    assert root.count() == 0 and quiet(tab)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 760])
def test_it_is_drawn_in_light_and_dark(
    tab: Any, real: Any, tmp_path: Path, scheme: Any, width: int
) -> None:
    tab.page.set_viewport_size({"width": width, "height": 860})
    root = load(tab, tmp_path, project(real["ring"]), reduced_motion="reduce", color_scheme=scheme)
    root.focus()
    for _ in range(2):
        tab.page.keyboard.press("PageDown")
    RESULTS.mkdir(exist_ok=True)
    tab.page.screenshot(path=RESULTS / f"stage-ring-{width}-{scheme}.png")
    first = root.evaluate("r => getComputedStyle(r).getPropertyValue('--dk-r0')")
    assert first == theme()[scheme]["ranks"][0]
    box, svg = root.bounding_box(), tab.page.locator(".dk-svg").bounding_box()
    assert svg["x"] >= box["x"] and svg["x"] + svg["width"] <= box["x"] + box["width"]
    assert quiet(tab)
