"""The stage in a browser, with traces of real ranks: played, stepped, scrubbed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sheets import RESULTS, Sheet, settle
from traces import hang, odd_values, parameter_server

import distkit as dk
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit.views.scene.theme import theme


def ring() -> None:
    torch.manual_seed(dist.get_rank())
    dk.algorithms.ring_all_reduce(torch.randn(16))


def tree() -> None:
    """A broadcast from rank 0 in which the number of ranks with the tensor doubles every round."""
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
    """Record a run with the values of every tensor, which a busy machine may omit."""
    runs = (dk.run_ranks(f, 4).trace for _ in range(10))
    return next(trace for trace in runs if not trace.info.without_values)


@pytest.fixture(scope="module")
def real() -> dict[str, Trace]:
    return {f.__name__: recorded(f) for f in (ring, tree, native)}


@pytest.fixture
def load(tab: Any, tmp_path: Path) -> Callable[..., "Shown"]:
    """Show the stage on a page, with reduced motion by default."""

    def make(trace: Trace, **media: Any) -> Shown:
        tab.page.emulate_media(**{"reduced_motion": "reduce", "color_scheme": "light", **media})
        return Shown(tab, dk.Stage(trace), tmp_path / "stage.html")

    return make


class Shown(Sheet):
    """A stage in the browser."""

    def at(self, keyframe: int) -> None:
        """Wait until a keyframe is current."""
        self.page.wait_for_selector(f".distkit-stage[data-keyframe='{keyframe}']")

    def layers(self) -> int:
        """Return the number of contributions in all strips."""
        return self.main("rect.mark-own").count()

    def main(self, what: str) -> Any:
        """Return the visible elements of the large picture, without badges."""
        return self.root.locator(f".dkm-main {what}").locator("visible=true")

    def panel(self) -> str:
        return self.text(".dkm-panels [aria-current] b")


def test_ring_all_reduce_is_stepped_through_round_by_round(load: Any, real: Any) -> None:
    view = load(real["ring"])
    assert "a chunk has a layer" in view.text(".dk-said")
    assert view.texts(".dkm-panels b") == [f"round {k} of 6" for k in range(1, 7)]
    assert view.layers() == 16  # four chunks on each of four ranks, each with its own contribution
    view.root.focus()
    for rounds, held in enumerate((20, 28, 40, 52, 60, 64), 1):
        view.press("ArrowRight")
        view.at(rounds - 1)
        assert view.layers() == held
        assert view.panel() == view.text(".dk-clock") == f"round {rounds} of 6"
        assert view.main(".mark-fresh").count() == 4  # the chunks that have just come
    fact = view.text(".dk-fact")
    assert "4 messages" in fact and "16 B each" in fact and "replace" in fact
    assert "ring.py" in fact
    view.press("PageUp")
    view.at(4)
    view.press("Home")
    view.at(-1)
    assert view.layers() == 16
    view.fine()


def test_view_plays_pauses_and_ends(load: Any, real: Any) -> None:
    view = load(real["ring"], reduced_motion="no-preference")
    view.root.focus()
    view.page.keyboard.press("Space")
    token = view.main(".dkm-moving").first
    token.wait_for()
    first = token.get_attribute("transform")
    view.page.wait_for_function(
        "t => document.querySelector('.dkm-moving')?.getAttribute('transform') !== t", arg=first
    )
    view.page.keyboard.press("Space")
    assert view.root.get_attribute("data-playing") == "false"
    paused = view.page.locator(".dk-scrub").input_value()
    settle(view.page)
    assert view.page.locator(".dk-scrub").input_value() == paused
    view.page.select_option(".dk-speed", "4")
    view.page.click(".dk-play")
    view.at(5)
    view.page.wait_for_selector(".distkit-stage[data-playing=false]")
    assert view.layers() == 64 and view.main(".dkm-moving").count() == 0
    view.fine()


def test_reduced_motion_plays_round_by_round(load: Any, real: Any) -> None:
    view = load(real["tree"])
    view.page.select_option(".dk-speed", "4")
    view.root.focus()
    view.page.keyboard.press("Space")
    view.at(1)
    view.page.wait_for_selector(".distkit-stage[data-playing=false]")
    fills = view.main("rect.mark-own").evaluate_all("all => all.map(r => r.getAttribute('fill'))")
    assert fills == ["var(--dk-r0)"] * 4
    view.fine()


def test_slider_selects_a_moment(load: Any, real: Any) -> None:
    view = load(real["ring"])
    view.drawn(lambda: view.page.locator(".dk-scrub").fill("2000"))
    view.at(5)
    late = view.text(".dk-clock")
    view.drawn(lambda: view.page.locator(".dk-scrub").fill("1999"))
    assert view.page.locator(".dk-scrub").input_value() == "1999"  # time advances along the scale
    view.drawn(lambda: view.page.click(".dkm-panels li:nth-child(2) button"))
    view.at(1)
    assert view.panel() == "round 2 of 6"
    assert view.text(".dk-clock") != late and view.layers() < 64
    view.fine()


def test_collectives_are_drawn_as_a_hub(load: Any, real: Any) -> None:
    view = load(real["native"])
    view.drawn(lambda: view.page.locator(".dk-scrub").fill("600"))  # of two rounds
    assert view.main(".mark-hub").count() == 1 and view.main(".mark-token").count() == 4
    view.drawn(lambda: view.page.locator(".dk-scrub").fill("2000"))
    assert view.layers() == 16  # four ranks, one chunk, all four contributions
    assert view.texts(".dkm-panels b") == ["before", "all_reduce", "barrier"]
    view.fine()


@pytest.mark.parametrize("make", [hang, odd_values, parameter_server, Trace])
def test_unusual_runs_are_drawn_without_errors(load: Any, make: Any) -> None:
    view = load(make())
    view.root.focus()
    for key in ("ArrowRight", "PageDown", "End", "ArrowRight", "Home", "ArrowLeft"):
        view.page.keyboard.press(key)
    assert view.page.locator(".dk-notices li").count() == len(view.view._data["notices"])
    if view.view._data["keyframes"]:
        assert view.text(".dk-fact") == "before the first message"
    else:
        assert "no messages" in view.text(".dkv-empty")
    view.fine()


def test_first_of_a_thousand_ranks_are_drawn(load: Any) -> None:
    events = []
    for r in range(1000):
        left, right = (r - 1) % 1000, (r + 1) % 1000
        events += [
            Event(r, 0, Op.SEND, State.STARTED, 0.0, peer=right, nbytes=4),
            Event(r, 1, Op.RECV, State.STARTED, 0.0, peer=left, nbytes=4),
            Event(r, 1, Op.RECV, State.COMPLETED, 0.5 + r / 1e4, peer=left),
        ]
    view = load(Trace(events))
    assert view.main("circle.mark-own").count() == 256
    assert view.main(".mark-number").count() == 0
    assert view.main(".mark-link").count() == 1
    view.root.focus()
    view.page.keyboard.press("End")
    view.at(0)
    view.fine()


def test_live_run_grows_until_it_ends(load: Any, real: Any) -> None:
    whole = real["ring"]
    view = load(Trace(whole.events[:60], whole.info))
    before = view.layers()
    view.renew(whole)
    view.root.focus()
    view.press("End")
    view.at(5)
    assert view.layers() == 64 > before
    view.fine()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 760, 400])
def test_stage_is_drawn_in_both_themes(
    tab: Any, load: Any, real: Any, scheme: Any, width: int
) -> None:
    tab.page.set_viewport_size({"width": width, "height": 860})
    view = load(real["ring"], color_scheme=scheme)
    view.root.focus()
    view.press("PageDown", "PageDown")
    RESULTS.mkdir(exist_ok=True)
    tab.page.screenshot(path=RESULTS / f"stage-ring-{width}-{scheme}.png", full_page=True)
    first = view.root.evaluate("r => getComputedStyle(r).getPropertyValue('--dk-r0')")
    assert first == theme()[scheme]["ranks"][0]
    box, svg = view.root.bounding_box(), tab.page.locator(".dkm-main").bounding_box()
    assert svg["x"] >= box["x"] and svg["x"] + svg["width"] <= box["x"] + box["width"]
    assert box["height"] <= (640 if width == 1200 else 900)
    view.fine()
