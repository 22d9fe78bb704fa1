"""The Stage view of a run on real ranks, in a browser: keyframes and playback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded import record_with_values
from sheets import Sheet, settle

import distkit as dk
from distkit.trace.trace import Trace
from distkit.views.scene.theme import theme


def ring() -> None:
    torch.manual_seed(dist.get_rank())
    dk.algorithms.ring_all_reduce(torch.randn(16))


@pytest.fixture(scope="module")
def ring_trace() -> Trace:
    return record_with_values(ring, 4)


@pytest.fixture
def show_stage(tab: Any, tmp_path: Path) -> Callable[..., "StageSheet"]:
    """A function that shows a stage on a page, by default with reduced motion."""

    def make(trace: Trace, **media: Any) -> StageSheet:
        tab.page.emulate_media(**{"reduced_motion": "reduce", "color_scheme": "light", **media})
        return StageSheet(tab, dk.Stage(trace), tmp_path / "stage.html")

    return make


class StageSheet(Sheet):
    """A stage in the browser."""

    def wait_for_keyframe(self, keyframe: int) -> None:
        self.page.wait_for_selector(f".distkit-stage[data-keyframe='{keyframe}']")

    def layers(self) -> int:
        """Return the number of layers, one per contribution, in all strips."""
        return self.visible("rect.mark-own").count()

    def visible(self, selector: str) -> Any:
        """Return the visible elements of the main picture."""
        return self.root.locator(f".dkm-main {selector}").locator("visible=true")

    def current_panel(self) -> str:
        return self.text(".dkm-panels [aria-current] b")


def test_keys_work_while_the_pointer_is_over_the_stage(show_stage: Any, ring_trace: Trace) -> None:
    view = show_stage(ring_trace)
    view.root.hover()
    view.page.keyboard.press("ArrowRight")
    view.wait_for_keyframe(0)
    view.root.locator(".dk-next").click()
    view.wait_for_keyframe(1)
    view.page.keyboard.press("Space")  # plays, although the pointer has pressed another button
    view.wait_for_keyframe(5)
    view.page.mouse.move(0, 0)
    view.page.evaluate("document.activeElement.blur()")
    view.page.keyboard.press("ArrowLeft")
    assert view.text(".dk-clock") == "round 6 of 6"


def test_keys_step_through_the_rounds_of_a_ring_all_reduce(
    show_stage: Any, ring_trace: Trace
) -> None:
    view = show_stage(ring_trace)
    assert "A chunk has a layer" in view.text(".dk-description")
    assert view.texts(".dkm-panels b") == [f"round {k} of 6" for k in range(1, 7)]
    assert view.layers() == 16  # four chunks on each of four ranks, with that rank's contribution
    view.root.focus()
    for rounds, layers in enumerate((20, 28, 40, 52, 60, 64), 1):
        view.press("ArrowRight")
        view.wait_for_keyframe(rounds - 1)
        assert view.layers() == layers
        assert view.current_panel() == view.text(".dk-clock") == f"round {rounds} of 6"
        assert view.visible(".mark-fresh").count() == 4  # the chunks received in this round
    fact = view.text(".dk-fact")
    assert "4 messages" in fact and "16 B each" in fact and "replace" in fact
    assert "ring.py" in fact
    view.press("Home")
    view.wait_for_keyframe(-1)
    assert view.layers() == 16
    view.save_screenshots("stage-ring")
    assert view.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    first = view.root.evaluate("r => getComputedStyle(r).getPropertyValue('--dk-r0')")
    assert first == theme()["dark"]["ranks"][0]
    view.assert_clean()


def test_stage_plays_pauses_and_stops_at_the_end(show_stage: Any, ring_trace: Trace) -> None:
    view = show_stage(ring_trace, reduced_motion="no-preference")
    view.root.focus()
    view.page.keyboard.press("Space")
    token = view.visible(".dkm-moving").first
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
    view.wait_for_keyframe(5)
    view.page.wait_for_selector(".distkit-stage[data-playing=false]")
    assert view.layers() == 64 and view.visible(".dkm-moving").count() == 0
    view.assert_clean()


def test_trace_without_messages_has_a_notice(show_stage: Any) -> None:
    view = show_stage(Trace())
    assert "no messages" in view.text(".dkv-empty")
    view.assert_clean()
