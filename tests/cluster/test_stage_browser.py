"""The stage in a browser, with traces of real ranks: played, stepped, scrubbed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sheets import Sheet, settle

import distkit as dk
from distkit.trace.trace import Trace
from distkit.views.scene.theme import theme


def ring() -> None:
    torch.manual_seed(dist.get_rank())
    dk.algorithms.ring_all_reduce(torch.randn(16))


def recorded(f: Any) -> Trace:
    """Record a run with the values of every tensor, which a busy machine may omit."""
    runs = (dk.run_ranks(f, 4).trace for _ in range(10))
    return next(trace for trace in runs if not trace.info.without_values)


@pytest.fixture(scope="module")
def real() -> Trace:
    return recorded(ring)


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


def test_ring_all_reduce_is_stepped_through_round_by_round(load: Any, real: Trace) -> None:
    view = load(real)
    assert "a chunk has a layer" in view.text(".dk-description")
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
    view.press("Home")
    view.at(-1)
    assert view.layers() == 16
    view.pictures("stage-ring")
    assert view.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    first = view.root.evaluate("r => getComputedStyle(r).getPropertyValue('--dk-r0')")
    assert first == theme()["dark"]["ranks"][0]
    view.assert_clean()


def test_view_plays_pauses_and_ends(load: Any, real: Trace) -> None:
    view = load(real, reduced_motion="no-preference")
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
    view.assert_clean()


def test_trace_without_messages_has_a_notice(load: Any) -> None:
    view = load(Trace())
    assert "no messages" in view.text(".dkv-empty")
    view.assert_clean()
