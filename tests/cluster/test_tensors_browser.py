"""The tensors view in a browser: slider, cards, differences, live updates."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import traces
from sheets import Sheet

import distkit as dk
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views.tensors import draw


def message() -> None:
    """A sum with unusual values, a broadcast, a ring."""
    x = torch.arange(12.0).reshape(3, 4) * (dist.get_rank() + 1) - 6
    if dist.get_rank() == 1:
        x[1, 2] = math.nan
    dist.all_reduce(x)
    dist.broadcast(torch.ones(4) * dist.get_rank(), src=1)
    dk.algorithms.ring_all_reduce(torch.randn(64))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return dk.run_ranks(message, 4).trace


def test_tensors_of_a_run_are_drawn(tab: Any, tmp_path: Path, trace: Trace) -> None:
    tab.page.emulate_media(reduced_motion="reduce")
    sheet = Sheet(tab, dk.Tensors(trace), tmp_path / "tensors.html")
    assert sheet.text(".dk-fact strong") == "all_reduce"
    assert sheet.texts(".dkv-verdicts li span")[1] == "after: the same on all 4 ranks"
    assert sheet.root.locator(".mark-late").all_text_contents().count("1 × NaN") == 5
    assert "NaN" in sheet.root.locator(".mark-cell").all_text_contents()
    values = sheet.root.locator(".dkm-main title").filter(has_text="−6, −5, −4, −3")
    assert values.text_content().startswith("12 values, −6 to 5, norm 12.1\n")

    sheet.page.focus(".dk-scrub")
    sheet.press("ArrowRight")
    assert sheet.text(".dk-fact strong") == "broadcast"
    sheet.press("ArrowRight")
    assert "→" in sheet.text(".dk-fact strong")
    assert sheet.text(".dkv-verdicts").endswith("sent")
    assert sheet.text(".dk-clock") == "operation 3 of 26"
    assert "values: colours: ±" in sheet.root.locator("> .dk-spoken").text_content()
    sheet.press("End", "ArrowRight", "Home", "ArrowLeft")
    assert sheet.text(".dk-fact strong") == "all_reduce"
    assert tab.page.evaluate("leaked") == []  # no key reaches the notebook
    sheet.drawn(lambda: sheet.root.get_by_role("button", name="next").click())
    assert sheet.text(".dk-fact strong") == "broadcast"
    sheet.root.locator(".dkm-list select").select_option("rank 3")
    sheet.drawn(lambda: sheet.root.locator(".dkm-list li").last.click())
    assert "rank 3" in sheet.text(".dk-fact strong")
    sheet.fine()


def test_different_results_of_a_collective_are_marked(tab: Any, tmp_path: Path) -> None:
    trace = traces.Script()
    for rank in range(3):
        x = [1.0, 2.0, 3.0 + (rank == 2), 4.0]
        trace.op(
            rank,
            Op.ALL_REDUCE,
            0,
            1e-3,
            shape=(4,),
            dtype="float32",
            nbytes=16,
            before=traces.summary([0.0] * 4),
            after=traces.summary(x),
        )
    view = dk.Tensors(trace.trace(world_size=3))
    sheet = Sheet(tab, view, tmp_path / "tensors.html")
    assert "rank 2 differs from the others, by up to 1" in sheet.text(".dkv-wrong")
    assert sheet.texts(".dkm-who b") == ["2"]
    assert sheet.root.locator("rect.mark-alarm, path.mark-fresh").count() == 2
    sheet.fine()


def test_view_grows_during_the_run(tab: Any, tmp_path: Path, trace: Trace) -> None:
    first = Trace(trace[: len(trace) // 3], trace.info)
    view = dk.Tensors(first)
    view._live, view._data = True, draw(first, live=True)
    sheet = Sheet(tab, view, tmp_path / "tensors.html")
    assert sheet.text(".dk-live") == "live"
    known = len(view._data["keyframes"])
    assert sheet.text(".dk-clock") == f"operation {known} of {known}"
    sheet.renew(trace)
    assert sheet.text(".dk-clock") == "operation 26 of 26"
    assert sheet.root.locator(".dk-live").count() == 0
    sheet.fine()


@pytest.mark.parametrize("case", ["empty", "thousand"])
def test_unusual_traces_are_drawn(tab: Any, tmp_path: Path, case: str) -> None:
    trace = Trace()
    if case == "thousand":
        s = traces.Script()
        for rank in range(1000):
            s.op(
                rank,
                Op.ALL_REDUCE,
                0,
                1e-3,
                shape=(2,),
                dtype="float32",
                nbytes=8,
                before=traces.summary([0.0, rank]),
                after=traces.summary([math.nan, math.inf]),
            )
        trace = s.trace(world_size=1000)
    sheet = Sheet(tab, dk.Tensors(trace), tmp_path / "tensors.html")
    if case == "empty":
        assert sheet.text(".dkv-empty") == "no tensor values were recorded"
    else:
        assert "and 984 more ranks" in sheet.root.locator(".mark-small").all_text_contents()
    sheet.fine()


def test_pictures_are_saved(tab: Any, tmp_path: Path, trace: Trace) -> None:
    sheet = Sheet(tab, dk.Tensors(trace), tmp_path / "tensors.html")
    light = sheet.root.evaluate("e => getComputedStyle(e).backgroundColor")
    sheet.pictures("tensors")
    assert sheet.root.evaluate("e => getComputedStyle(e).backgroundColor") != light
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.fine()
