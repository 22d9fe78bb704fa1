"""Comparison of traces in a browser: panels, clock, counterparts, table."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import traces
from sheets import Sheet

import distkit as dk
from benchmarks.views import long_trace
from distkit.events import Op
from distkit.trace.trace import Trace


def summed(all_reduce: Any, pause: float = 0.0) -> None:
    for n in range(2):
        time.sleep(n * pause)
        all_reduce(torch.ones(64))


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    """The same program with a slow ring of messages, and with the backend's all-reduce."""
    return {
        "ring": dk.run_ranks(summed, 4, dk.algorithms.ring_all_reduce, 0.5).trace,
        "torch": dk.run_ranks(summed, 4, dist.all_reduce).trace,
    }


def row(sheet: Sheet, label: str) -> list[str]:
    """Return the values of a figure and their ratios to the baseline, as a screen reader reads
    them."""
    table = str(sheet.root.locator(".dkc-table").get_attribute("aria-label"))
    (line,) = [line for line in table.splitlines() if line.startswith(f"  {label}  ")]
    return re.split("  +", line.strip())[1:]


def opened(tab: Any, tmp_path: Path, *named: Any) -> Sheet:
    return Sheet(tab, dk.Compare(*named), tmp_path / "compare.html")


def test_lanes_of_both_runs_and_what_the_numbers_say(
    tab: Any, tmp_path: Path, runs: dict[str, Trace]
) -> None:
    sheet = opened(tab, tmp_path, runs)
    assert sheet.text(".dk-head strong") == "ring and torch"
    assert sheet.painted("canvas") and sheet.text(".dkc-tools") == "compared to ring"
    assert "messages inside the backend's collectives are not recorded" in sheet.text(".dk-notices")
    assert row(sheet, "messages")[0] == "48"
    assert row(sheet, "collectives") == ["0", "2"] and row(sheet, "rounds") == ["12", "–"]
    assert "consecutive exchanges" in str(sheet.root.locator(".dkc-table").text_content())  # a hint
    sheet.fine()


def test_zoom_and_keys_apply_to_all_runs(tab: Any, tmp_path: Path, runs: dict[str, Trace]) -> None:
    sheet = opened(tab, tmp_path, runs)
    canvas = sheet.root.locator("canvas")
    canvas.focus()
    pixels = "c => c.toDataURL()"
    before = canvas.evaluate(pixels)
    sheet.press("+", "+", "ArrowRight")
    assert canvas.evaluate(pixels) != before
    sheet.press("0", "w")
    pressed = sheet.root.locator(".dk-lenses button[aria-pressed='true']").all_inner_texts()
    assert pressed == ["Waiting"]
    assert sheet.text(".dk-lens-status").endswith("on all ranks together")
    assert tab.page.evaluate("leaked") == []  # no key reaches the notebook
    sheet.fine()


def test_operation_is_linked_to_its_counterpart(
    tab: Any, tmp_path: Path, runs: dict[str, Trace]
) -> None:
    sheet = opened(tab, tmp_path, runs)
    sheet.root.locator("canvas").focus()
    sheet.press("ArrowDown", "ArrowDown", "ArrowDown")
    message = str(sheet.root.locator("> .dk-spoken").text_content())
    assert re.match(r"(ring: (send|recv)|torch: all_reduce), ", message) and "has none" in message
    card = sheet.text(".dk-tip")
    assert "has none" in card and re.search(r"operation \d of rank \d", card)
    sheet.press("ArrowDown", "ArrowUp", "Escape")
    assert sheet.root.locator(".dk-tip").is_hidden()
    sheet = opened(tab, tmp_path, {"ring": runs["ring"], "again": runs["ring"]})
    sheet.root.locator("canvas").focus()
    sheet.press("ArrowDown")
    message = str(sheet.root.locator("> .dk-spoken").text_content())
    other = r"; (ring|again) (send to|recv from) rank \d at .* later .* longer$"
    assert re.search(other, message), message

    box = sheet.root.locator("canvas").bounding_box()
    found, tip = False, sheet.root.locator(".dk-tip")
    for y in range(8, 60, 7):  # the same by mouse
        for x in range(140, 1150, 60):
            tab.page.mouse.move(box["x"] + x, box["y"] + y)
            found = found or tip.is_visible()
    assert found
    sheet.fine()


def test_comparison_fits_a_projector(tab: Any, tmp_path: Path, runs: dict[str, Trace]) -> None:
    """Runs and figures fit side by side without scrolling, also in a narrow column."""
    sheet = opened(tab, tmp_path, {**runs, "sgd": traces.sync_sgd()})
    root = sheet.root.element_handle()
    tab.page.set_viewport_size({"width": 1280, "height": 720})
    tab.page.wait_for_function("e => e.getBoundingClientRect().height <= 640", arg=root)
    tab.page.set_viewport_size({"width": 400, "height": 720})
    fits = "e => e.clientWidth < 400 && e.scrollWidth <= e.clientWidth"
    tab.page.wait_for_function(fits, arg=root)
    sheet.fine()


@pytest.mark.parametrize("case", ["empty", "one empty", "sizes", "odd", "thousand", "eight"])
def test_unusual_traces_are_compared(tab: Any, tmp_path: Path, case: str) -> None:
    wide = traces.Script()
    for rank in range(1000 if case == "thousand" else 0):
        wide.op(rank, Op.ALL_REDUCE, 0, 1e-3, shape=(2,), dtype="float32", nbytes=8)
    named = {
        "empty": {"a": Trace(), "b": Trace()},
        "one empty": {"a": traces.ring(), "b": Trace()},
        "sizes": {"a": traces.ring(3), "b": traces.ring(8)},
        "odd": {"</script><b>": traces.odd_values(), "hang": traces.hang()},
        "thousand": {"a": wide.trace(world_size=1000), "b": traces.ring()},
        "eight": {f"trace number {i}": traces.ring(4, seed=i) for i in range(8)},
    }[case]
    sheet = opened(tab, tmp_path, named)
    sheet.root.locator("canvas").first.focus()
    for _ in range(3):
        tab.page.keyboard.press("ArrowDown")
    sheet.press("w")
    message = sheet.root.locator("> .dk-spoken").text_content()
    assert message is not None
    if "empty" in case:
        assert "b: nothing was recorded" in " ".join(sheet.texts(".dk-notices li"))
    if case == "thousand":
        assert "the first 128 ranks of each run are drawn" in sheet.text(".dk-notices")
    if case == "sizes":
        assert "the world sizes differ: a 3 ranks; b 8 ranks" in sheet.text(".dk-notices")
    sheet.fine()


def test_long_traces_are_fast_and_small(tab: Any, tmp_path: Path) -> None:
    sheet = opened(tab, tmp_path, {"a": long_trace(100_000), "b": long_trace(60_000)})
    assert sheet.page.evaluate("document.querySelectorAll('#at *').length") < 900
    sheet.root.locator("canvas").first.focus()
    sheet.press("+", "+", "ArrowRight", "w", "0")
    assert sheet.painted("canvas")
    assert sheet.page.evaluate("document.querySelectorAll('#at *').length") < 900
    sheet.fine()


def test_pictures_are_saved(tab: Any, tmp_path: Path, runs: dict[str, Trace]) -> None:
    sheet = opened(tab, tmp_path, runs)
    light = sheet.root.evaluate("e => getComputedStyle(e).backgroundColor")
    sheet.pictures("compare")
    assert sheet.root.evaluate("e => getComputedStyle(e).backgroundColor") != light
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.fine()
