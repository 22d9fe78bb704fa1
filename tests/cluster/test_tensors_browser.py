"""The tensors view in a browser: slider, cells, differences and list."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded import record_with_values
from sheets import Sheet

import distkit as dk
from distkit.trace.trace import Trace


def communicate() -> None:
    """Run an all-reduce with unusual values, a broadcast and a ring all-reduce."""
    x = torch.arange(12.0).reshape(3, 4) * (dist.get_rank() + 1) - 6
    if dist.get_rank() == 1:
        x[1, 2] = math.nan
    dist.all_reduce(x)
    dist.broadcast(torch.ones(4) * dist.get_rank(), src=1)
    dk.algorithms.ring_all_reduce(torch.randn(64))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record_with_values(communicate, 4)


def test_tensors_of_a_run_are_drawn(tab: Any, tmp_path: Path, trace: Trace) -> None:
    tab.page.emulate_media(reduced_motion="reduce")
    sheet = Sheet(tab, dk.Tensors(trace), tmp_path / "tensors.html")
    assert sheet.text(".dk-fact strong") == "all_reduce"
    assert sheet.texts(".dkv-verdicts li span")[1] == "after: the same on all 4 ranks"
    assert "NaN" in sheet.root.locator(".mark-cell").all_text_contents()

    sheet.page.focus(".dk-scrub")
    sheet.press("ArrowRight")
    assert sheet.text(".dk-fact strong") == "broadcast"
    sheet.press("ArrowRight")
    assert "→" in sheet.text(".dk-fact strong")
    assert sheet.text(".dkv-verdicts").endswith("sent")
    rows = sheet.root.locator(".dkm-main .mark-strong").all_text_contents()
    assert "sends next" in rows  # the receiver adds its own values
    assert sheet.text(".dk-clock") == "operation 3 of 26"
    assert "values: colors: ±" in sheet.root.locator("> .dk-spoken").text_content()
    sheet.root.locator(".dkm-list select").select_option("rank 3")
    # the picture shows the operation that the filtered list marks
    marked = sheet.text(".dkm-list [aria-current]")
    assert marked.startswith(f"{sheet.text('.dk-fact strong')} at ")
    sheet.wait_until_drawn(lambda: sheet.root.locator(".dkm-list li").last.click())
    assert "rank 3" in sheet.text(".dk-fact strong")
    sheet.save_screenshots("tensors")
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.assert_clean()
