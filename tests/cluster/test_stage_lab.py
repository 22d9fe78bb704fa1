"""The stage and the timeline of real ranks in a real JupyterLab: light, dark, wide, narrow."""

from __future__ import annotations

from typing import Any

import pytest
from labs import idle, look, run_cell
from sheets import settle

from benchmarks.lab import notebook

START = """
import torch, torch.distributed as dist
import distkit as dk

def average_gradients_by_a_ring_and_say_so_on_every_rank():
    x = torch.arange(8.0) + 10 * dist.get_rank()
    with dk.mark("forward and backward"):
        sum(torch.randn(200, 200).matmul(torch.randn(200, 200)).sum() for _ in range(20))
    dk.ring_all_reduce(x)
    dist.all_reduce(x / 4)

with dk.Cluster(4) as cluster:
    run = cluster.submit(average_gradients_by_a_ring_and_say_so_on_every_rank).wait()
"""


def at(page: Any, beat: int) -> None:
    page.wait_for_selector(f".distkit-stage[data-beat='{beat}']")


def play(page: Any, stage: Any) -> None:
    """Go through it by keys and clicks, to where every rank holds everything."""
    assert "the messages of a ring all-reduce" in stage.locator(".dk-said").inner_text()
    assert stage.locator(".dkm-panels li").count() == 6
    assert stage.locator(".dk-beats li").count() == 7  # six rounds, and torch's own all_reduce
    stage.focus()
    page.keyboard.press("ArrowRight")
    at(page, 0)
    page.keyboard.press("ArrowLeft")
    at(page, -1)
    stage.get_by_role("button", name="play (space)").click()
    page.wait_for_selector(".distkit-stage[data-playing='true']")
    page.keyboard.press(" ")
    page.wait_for_selector(".distkit-stage[data-playing='false']")
    stage.get_by_role("button", name="time", exact=True).click()
    stage.locator(".dk-beats li").nth(9).click()
    at(page, 9)
    stage.get_by_role("button", name="values").click()
    page.wait_for_selector(".distkit-stage [data-name='values'][aria-pressed='true']")
    stage.get_by_role("button", name="contributions").click()
    settle(page)
    assert stage.locator(".dkm-main rect.mark-own").count() > 16  # some chunks are sums by now


@pytest.mark.parametrize("width", [1280, 760])
def test_the_stage_is_played_in_a_notebook(width: int, lab: Any, tab: Any) -> None:
    name = f"stage-{width}.ipynb"
    (lab.root / name).write_text(notebook(START, "dk.Stage(run)", "dk.Timeline(run)"))
    page = tab.page
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(lab.address(name))
    idle(page)
    for cell in (0, 1):
        run_cell(page, cell)
    stage, timeline = page.locator(".distkit-stage"), page.locator(".distkit-timeline[data-taken]")
    page.wait_for_selector(".distkit-stage[data-drawn]")
    if width == 1280:
        play(page, stage)
    run_cell(page, 2)
    timeline.wait_for()
    page.set_viewport_size({"width": width, "height": 2400})  # all of it, beside no toolbar
    look(page, {"lab-stage": stage, "lab-timeline": timeline}, f"-{width}")
    assert tab.errors == [] and tab.outside == []
