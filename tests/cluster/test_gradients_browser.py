"""The gradients of real training loops in a real browser."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sheets import Sheet
from torch.nn.parallel import DistributedDataParallel

import distkit as dk
from distkit.trace.trace import Trace
from distkit.views.gradients.projection import project


def train(average: bool = True) -> None:
    """Synchronous SGD on the digits, with the gradient of the whole batch on rank 0."""
    images, labels = dk.demos.digits()
    mine, my = dk.data.shard(images, labels)
    net = dk.demos.model()
    all_reduce = dist.all_reduce if average else lambda gradient: None
    with dk.watch_gradients(net) as watch:
        for rows in torch.arange(32 * 6).split(32):
            if dist.get_rank() == 0:
                everything = slice(4 * int(rows[0]), 4 * int(rows[-1]) + 4)
                watch.alone(F.cross_entropy(net(images[everything]), labels[everything]))
            loss = dk.algorithms.sync_sgd_step(
                net, (mine[rows], my[rows]), F.cross_entropy, 0.2, all_reduce=all_reduce
            )
            watch.step(loss=loss, lr=0.2, samples=len(rows))


def train_ddp() -> None:
    images, labels = dk.data.shard(*dk.demos.digits())
    net = DistributedDataParallel(dk.demos.model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    with dk.watch_gradients(net) as watch:
        for rows in torch.arange(32 * 3).split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            watch.step(loss=loss, lr=0.2, samples=len(rows))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return dk.run_ranks(train, 4).trace


def test_the_gradients_of_synchronous_sgd(tab: Any, tmp_path: Path, trace: Trace) -> None:
    sheet = Sheet(tab, dk.Gradients(trace), tmp_path / "gradients.html")
    first, second, third = sheet.texts(".dkv-verdicts li span")
    assert first == "after the all-reduce every rank has the same gradient: the mean of all 4"
    assert second.startswith("one process computes the same, to ")
    assert third == "the replicas' weights are bitwise equal at every step"
    assert sheet.texts(".dkv-tiles h4")[0].startswith("loss")
    assert sheet.root.locator(".dkv-chart").count() == 4
    assert sheet.text(".dk-facts").endswith("learning rate 0.2")  # all the time: no curve
    assert sheet.texts("tbody th button")[0].startswith("0.weight")
    assert sheet.root.locator("tbody .dkv-heat").count() == 4 * 6
    assert sheet.root.locator("[data-card]").count() == 6 and sheet.painted("[data-card] .dkv-heat")
    assert sheet.root.locator(".dkv-cos").count() == 16
    assert sheet.texts(".dkv-matrix .dkv-of") == ["0", "1", "2", "3", "0", "1", "2", "3"]

    sheet.page.focus(".dkv-slider")
    sheet.press("ArrowRight", "ArrowRight", "ArrowDown")
    assert sheet.text(".dkv-where") == "step 3"
    assert sheet.text(".dkv-chosen button").startswith("0.bias")
    assert "step 3, layer 0.bias; rank 0 norm" in sheet.root.locator("> .dk-spoken").text_content()
    sheet.drawn(lambda: sheet.root.locator("tbody tr >> nth=3").click())
    assert sheet.text(".dkv-detail strong").startswith("2.bias")
    chart = sheet.root.locator(".dkv-chart").first.bounding_box()
    sheet.drawn(lambda: sheet.page.mouse.click(chart["x"] + chart["width"] - 12, chart["y"] + 40))
    assert sheet.text(".dkv-where") == "step 6"
    sheet.root.locator(".dk-head strong").click()  # the keys are the view's wherever one clicks
    sheet.press("ArrowLeft", "ArrowUp")
    sheet.drawn(lambda: sheet.root.locator("tbody tr button >> nth=1").click())
    sheet.press("ArrowUp")
    assert sheet.text(".dkv-where") == "step 5"
    assert sheet.text(".dkv-chosen button").startswith("0.weight")
    assert tab.page.evaluate("leaked") == []
    sheet.fine()


def test_the_pointer_is_told_the_values(tab: Any, tmp_path: Path, trace: Trace) -> None:
    sheet = Sheet(tab, dk.Gradients(trace), tmp_path / "gradients.html")
    sheet.root.locator(".dkv-chart").first.hover()
    said = sheet.root.locator(".dkv-chart title").first.text_content()
    assert said.startswith("loss at step ") and "rank 3 2." in said and "mean 2." in said
    strip = sheet.root.locator("tbody .dkv-heat").first
    strip.hover()
    assert ", of 8,192 values, " in strip.get_attribute("title")
    pair = sheet.root.locator(".dkv-cos >> nth=1")
    assert pair.get_attribute("title") == f"rank 0 and rank 1: {pair.inner_text()}"
    sheet.fine()


def test_what_was_not_averaged(tab: Any, tmp_path: Path) -> None:
    view = dk.Gradients(dk.run_ranks(train, 2, average=False).trace)
    sheet = Sheet(tab, view, tmp_path / "gradients.html")
    assert sheet.texts(".dkv-wrong span")[0].endswith("nothing was averaged")
    assert sheet.texts(".dkv-wrong span")[-1].endswith(" from rank 0 after step 6")
    assert sheet.texts("tbody .dk-alarm") == ["≠ by rank"] * 4
    assert sheet.text(".dkv-pair p").endswith("the norm of the sum: nothing was summed.")
    assert sheet.texts(".dkv-cos:not(.dkv-self)")[0].startswith("≈")  # estimated
    sheet.fine()


def test_ddp(tab: Any, tmp_path: Path) -> None:
    sheet = Sheet(tab, dk.Gradients(dk.run_ranks(train_ddp, 2).trace), tmp_path / "g.html")
    assert sheet.texts(".dkv-same span")[0].endswith("the mean of all 2")
    assert len(sheet.texts("tbody tr")) == 4
    sheet.fine()


def test_it_grows_while_the_run_goes_on(tab: Any, tmp_path: Path, trace: Trace) -> None:
    first = Trace(trace[: len(trace) // 2], trace.info)
    view = dk.Gradients(first)
    view._data = project(first, live=True)
    sheet = Sheet(tab, view, tmp_path / "gradients.html")
    assert sheet.text(".dk-live") == "live"
    patch = view._end(trace)
    sheet.drawn(lambda: tab.page.evaluate("p => feed({patch0: p})", patch))
    sheet.page.focus(".dkv-slider")
    sheet.press("End")
    assert sheet.text(".dkv-where") == "step 6"
    assert sheet.root.locator(".dk-live").count() == 0
    sheet.fine()


def test_pictures(tab: Any, tmp_path: Path, trace: Trace) -> None:
    sheet = Sheet(tab, dk.Gradients(trace), tmp_path / "gradients.html")
    sheet.pictures("gradients")
    assert sheet.root.evaluate("e => e.scrollWidth <= e.clientWidth")
    sheet.fine()
