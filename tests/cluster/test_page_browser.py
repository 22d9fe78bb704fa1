"""The timeline in a browser: the stand-alone page, and a live run."""

import io
from pathlib import Path
from typing import Any

import pytest
import traces
from PIL import Image, ImageChops
from sheets import RESULTS, Sheet, settle
from traces import DEMOS, big, odd_values, ring

from distkit.trace.trace import Trace
from distkit.views.timeline.view import Timeline
from distkit.views.widget.page import to_html


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    to_html({name: make() for name, make in DEMOS.items()}, folder / "demos.html")
    to_html(ring(), folder / "ring.html")
    to_html(odd_values(), folder / "odd.html")
    to_html(big(30_000), folder / "big.html")
    return folder


def open_page(tab: Any, path: Path) -> Any:
    tab.page.goto(path.as_uri())
    canvas = tab.page.locator("canvas").first
    canvas.wait_for()
    settle(tab.page)
    return canvas


def picture(canvas: Any) -> Image.Image:
    return Image.open(io.BytesIO(canvas.screenshot())).convert("RGB")


def differ(one: Image.Image, other: Image.Image) -> bool:
    return one.size != other.size or ImageChops.difference(one, other).getbbox() is not None


def has_no_errors(tab: Any) -> bool:
    return tab.errors == [] and tab.external_requests == []


def move_pointer(tab: Any, canvas: Any, x: float, y: float) -> None:
    """Move the pointer to x, a fraction of the canvas's width, and y, in pixels from its top."""
    box = canvas.bounding_box()
    tab.page.mouse.move(box["x"] + x * box["width"] - 9, box["y"] + y)
    tab.page.mouse.move(box["x"] + x * box["width"], box["y"] + y)
    settle(tab.page)


def test_each_demo_is_drawn_in_both_themes(tab: Any, pages: Path) -> None:
    shots = {}
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        open_page(tab, pages / "demos.html")
        for i, name in enumerate(DEMOS):
            tab.page.click(f"#panel{i}tab")
            settle(tab.page)
            shot = shots[scheme, name] = picture(tab.page.locator(f"#panel{i} canvas"))
            assert shot.width > 1000 and shot.height > 150
            assert len(shot.getcolors(maxcolors=2**24)) > 50
            RESULTS.mkdir(exist_ok=True)
            tab.page.screenshot(path=RESULTS / f"timeline-{name}-{scheme}.png")
    for name in DEMOS:
        light, dark = (shots[scheme, name].getpixel((1, 1)) for scheme in ("light", "dark"))
        assert sum(light) > 700 and sum(dark) < 100
    assert has_no_errors(tab)


def test_hovering_an_operation_shows_details(tab: Any, pages: Path) -> None:
    canvas = open_page(tab, pages / "ring.html")
    before = picture(canvas)
    move_pointer(tab, canvas, 0.16, 21)
    card = tab.page.locator(".dk-tip")
    assert card.is_visible()
    for word in ("send", "completed", "rank 1", "float32 [16]", "64 B", "collectives.py:31"):
        assert word in card.inner_text()
    assert differ(before, picture(canvas))
    move_pointer(tab, canvas, 0.5, canvas.bounding_box()["height"] + 30)
    assert not card.is_visible()


def test_wheel_drag_and_keys_change_the_time_range(tab: Any, pages: Path) -> None:
    canvas = open_page(tab, pages / "ring.html")
    tab.page.emulate_media(reduced_motion="reduce")
    seen = [picture(canvas)]

    def assert_changed() -> None:
        settle(tab.page)
        seen.append(picture(canvas))
        assert differ(*seen[-2:])

    move_pointer(tab, canvas, 0.5, 200)
    tab.page.mouse.wheel(0, -240)
    assert_changed()
    tab.page.mouse.down()
    move_pointer(tab, canvas, 0.3, 200)
    tab.page.mouse.up()
    assert_changed()
    canvas.focus()
    for key in ("ArrowRight", "+", "0"):
        tab.page.keyboard.press(key)
        assert_changed()
    tab.page.keyboard.press("ArrowDown")
    settle(tab.page)
    spoken = tab.page.locator(".dk-spoken").text_content()
    assert spoken.startswith("send, completed; on rank 3; to rank 0; tensor float32 [16]")
    tab.page.keyboard.press("/")
    tab.page.locator(".dk-lenses input").fill("rank 2")
    assert status_text(tab) == "12 of 48 operations"
    assert has_no_errors(tab)


def test_unusual_values_and_hostile_labels_are_shown_as_text(tab: Any, pages: Path) -> None:
    canvas = open_page(tab, pages / "odd.html")
    assert tab.page.locator(".dk-head strong").inner_text() == '<i>odd</i> & "ends"'
    move_pointer(tab, canvas, 0.3, 21)
    assert "[1, NaN, ∞, −∞]" in tab.page.locator(".dk-tip").inner_text()
    assert has_no_errors(tab)


def status_text(tab: Any) -> str:
    settle(tab.page)
    return str(tab.page.locator(".dk-lens-status").inner_text())


def test_long_run_opens_as_summary_and_zooms_to_operations(tab: Any, pages: Path) -> None:
    canvas = open_page(tab, pages / "big.html")
    assert status_text(tab).startswith("fraction of time in operations")
    assert tab.page.evaluate("document.querySelectorAll('*').length") < 6_000
    assert tab.page.locator(".dk-stage").evaluate("e => e.getBoundingClientRect().height") < 500
    canvas.focus()
    tab.page.keyboard.press("+", delay=220)  # until the animation has ended
    tab.page.emulate_media(reduced_motion="reduce")
    for _ in range(11):
        tab.page.keyboard.press("+")
        settle(tab.page)
    assert status_text(tab) == "" and has_no_errors(tab)


def test_timeline_of_a_live_run_grows_until_the_run_ends(tab: Any, tmp_path: Path) -> None:
    trace = ring()
    info = traces.info(world_size=4, name="live")
    view = Timeline(Trace())
    view._process(Trace((), info), True)
    sheet = Sheet(tab, view, tmp_path / "live.html")
    canvas = tab.page.locator("canvas[role]")
    assert tab.page.locator(".dk-live").is_visible()
    sheet.refresh(Trace(trace.events[:70], info), live=True)
    assert 0 < number_of_messages(tab.page) < 24
    now = picture(canvas)
    assert any(differ(now, picture(canvas)) for _ in range(20))  # open bars grow
    sheet.refresh(Trace(trace.events, info))
    tab.page.locator(".dk-live").wait_for(state="hidden")
    assert number_of_messages(tab.page) == 24
    assert has_no_errors(tab)


def number_of_messages(page: Any) -> int:
    settle(page)
    return int(page.locator(".dk-tile b").first.inner_text())
