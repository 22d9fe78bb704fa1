"""The comparison of traces in a browser: panels, clock, counterparts and table."""

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


def reduce_twice(all_reduce: Any, pause: float = 0.0) -> None:
    for n in range(2):
        time.sleep(n * pause)
        all_reduce(torch.ones(64))


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    """A program with a slow ring all-reduce, and with the backend's all-reduce."""
    return {
        "ring": dk.run_ranks(reduce_twice, 4, dk.algorithms.ring_all_reduce, 0.5).trace,
        "torch": dk.run_ranks(reduce_twice, 4, dist.all_reduce).trace,
    }


def table_row(sheet: Sheet, label: str) -> list[str]:
    """Return a table row's values, with their ratios to the baseline, from the accessible label."""
    table = str(sheet.root.locator(".dkc-table").get_attribute("aria-label"))
    (line,) = [line for line in table.splitlines() if line.startswith(f"  {label}  ")]
    return re.split("  +", line.strip())[1:]


def open_comparison(tab: Any, tmp_path: Path, *runs: Any) -> Sheet:
    return Sheet(tab, dk.Compare(*runs), tmp_path / "compare.html")


def test_comparison_draws_both_runs_and_tabulates_their_metrics(
    tab: Any, tmp_path: Path, runs: dict[str, Trace]
) -> None:
    sheet = open_comparison(tab, tmp_path, runs)
    assert sheet.text(".dk-head strong") == "ring and torch"
    assert sheet.is_drawn("canvas") and sheet.text(".dkc-tools") == "compared to ring"
    assert "messages inside the backend's collectives are not recorded" in sheet.text(".dk-notices")
    assert table_row(sheet, "messages")[0] == "48"
    assert [table_row(sheet, x) for x in ("collectives", "rounds")] == [["0", "2"], ["12", "–"]]
    sheet.root.locator("canvas").focus()
    before = sheet.root.locator("canvas").evaluate("c => c.toDataURL()")
    sheet.press("+", "w")
    assert sheet.root.locator("canvas").evaluate("c => c.toDataURL()") != before
    assert sheet.text(".dk-lens-status").endswith("in total on all ranks")
    assert tab.page.evaluate("leaked") == []  # no key reaches the notebook
    sheet.save_screenshots("compare")
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.assert_clean()


def test_names_are_escaped_and_an_empty_run_is_noted(tab: Any, tmp_path: Path) -> None:
    sheet = open_comparison(tab, tmp_path, {"</script><b>": traces.odd_values(), "b": Trace()})
    assert "b: nothing was recorded" in " ".join(sheet.texts(".dk-notices li"))
    assert sheet.text(".dkc-tools") == "compared to </script><b>"
    sheet.assert_clean()


def test_selected_operation_describes_its_counterpart(
    tab: Any, tmp_path: Path, runs: dict[str, Trace]
) -> None:
    sheet = open_comparison(tab, tmp_path, runs)
    sheet.root.locator("canvas").focus()
    sheet.press("ArrowDown", "ArrowDown", "ArrowDown")
    message = str(sheet.root.locator("> .dk-spoken").text_content())
    assert re.match(r"(ring: (send|recv)|torch: all_reduce), ", message) and "no match" in message
    card = sheet.text(".dk-tip")
    assert "no matching" in card and re.search(r"operation \d of rank \d", card)
    sheet = open_comparison(tab, tmp_path, {"ring": runs["ring"], "again": runs["ring"]})
    sheet.root.locator("canvas").focus()
    sheet.press("ArrowDown")
    message = str(sheet.root.locator("> .dk-spoken").text_content())
    expected = r"; (ring|again) (send to|recv from) rank \d at .* the same time 0 µs longer$"
    assert re.search(expected, message), message
    sheet.assert_clean()
