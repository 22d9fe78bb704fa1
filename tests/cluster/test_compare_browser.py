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
    assert sheet.is_drawn("canvas") and sheet.text(".dkc-tools") == "compared to ring"
    assert "messages inside the backend's collectives are not recorded" in sheet.text(".dk-notices")
    assert row(sheet, "messages")[0] == "48"
    assert row(sheet, "collectives") == ["0", "2"] and row(sheet, "rounds") == ["12", "–"]
    sheet.root.locator("canvas").focus()
    before = sheet.root.locator("canvas").evaluate("c => c.toDataURL()")
    sheet.press("+", "w")
    assert sheet.root.locator("canvas").evaluate("c => c.toDataURL()") != before
    assert sheet.text(".dk-lens-status").endswith("in total on all ranks")
    assert tab.page.evaluate("leaked") == []  # no key reaches the notebook
    sheet.pictures("compare")
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.assert_clean()


def test_hostile_names_stay_text_and_an_empty_run_is_named(tab: Any, tmp_path: Path) -> None:
    sheet = opened(tab, tmp_path, {"</script><b>": traces.odd_values(), "b": Trace()})
    assert "b: nothing was recorded" in " ".join(sheet.texts(".dk-notices li"))
    assert sheet.text(".dkc-tools") == "compared to </script><b>"
    sheet.assert_clean()


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
    sheet = opened(tab, tmp_path, {"ring": runs["ring"], "again": runs["ring"]})
    sheet.root.locator("canvas").focus()
    sheet.press("ArrowDown")
    message = str(sheet.root.locator("> .dk-spoken").text_content())
    other = r"; (ring|again) (send to|recv from) rank \d at .* later .* longer$"
    assert re.search(other, message), message
    sheet.assert_clean()
